"""The table of subjects. A new integration gets all laws of ``tests/laws`` by a row here."""

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.support.subjects import Subject

HERE = {name: importlib.util.find_spec(name) is not None for name in ("torch", "jax")}


def _of_torch() -> Iterator[Subject]:
    from tests.support.late_stores import PARAMETERS_ON_DISK, STATES_ON_DISK
    from tests.support.rules import REFERENCES, settings_of
    from tests.support.ways import STAGE_3

    bf16 = {"param_dtype": "bfloat16"}
    settings: dict[str, dict[str, Any]] = {
        "stage 1": {"stage": 1, "gradient_clipping": 0.1},
        "stage 2": {},
        "serial, bf16": {**bf16, "schedule": "serial"},
        "fp16": {"param_dtype": "float16", "initial_loss_scale": 2.0**26, "loss_scale_window": 3},
        "delayed": {**bf16, "schedule": "delayed", "delay_warmup_steps": 2},
        "accumulating": {"gradient_accumulation_steps": 2, "gradient_clipping": 0.1},
        "in backward": {"update_in_backward": True},
        "sent early": {**bf16, "update_in_backward": True, "gradient_clipping": 1e3},
        "stage 3": {"stage": 3, "param_persistence_threshold": 8},
        "stage 3, on the host": STAGE_3,
        "stage 3, nothing live": {**STAGE_3, "max_live_parameters": 1, "prefetch_bucket_size": 0},
        "stage 3, in backward": {**STAGE_3, "update_in_backward": True},
        "half on disk": {**STATES_ON_DISK, "nvme_host_bytes": 3000, "reduce_bucket_size": 100},
        "stage 3, on disk": {**PARAMETERS_ON_DISK, **bf16, "param_persistence_threshold": 8},
        "bf16 states": {"state_format": "bf16"},
        "8 bits": {"state_format": "8bit", **bf16},
        "8 bits, bf16 masters": {"state_format": "8bit", "master_dtype": "bfloat16", **bf16},
        "a function": {**bf16, "lr": lambda updates: 1e-2 / (1 + updates)},
        "two optimizers": {"groups": [{}, {"optimizer": "sgd", "momentum": 0.9}]},
        "muon": {"optimizer": "muon", "muon_params": ["head.weight"]},
        **{name: settings_of(name) for name in REFERENCES if name != "adamw"},
        **{f"{name}, on disk": {**settings_of(name), **PARAMETERS_ON_DISK} for name in REFERENCES if name != "adamw"},
        **{f"{name}, 8 bits": {**settings_of(name), "state_format": "8bit"} for name in REFERENCES if name != "adamw"},
    }
    for name, fields in settings.items():
        yield Subject(f"engine, {name}", "of_torch:Engine", fields, without=_without(name, fields))
    for device in ("late", "simulated, delays 0"):
        for name in ("stage 2", "fp16", "stage 3, on the host", "sent early"):
            without = _without(name, settings[name], device)
            yield Subject(f"engine, {name}, {device}", "of_torch:Engine", settings[name], device, without=without)
    by_blocks = {"layerwise": True, "gradient_accumulation_steps": 2}
    for name, device in (("stage 2", "host"), ("stage 3, on the host", "host"), ("fp16", "simulated, delays 0")):
        fields, without = (
            {**settings[name], **by_blocks},
            _without("by blocks", {**settings[name], **by_blocks}, device),
        )
        yield Subject(
            f"engine, {name}, by blocks, {device}", "of_torch:EngineByBlocks", fields, device, without=without
        )
    for name in ("stage 2", "stage 3, on the host"):
        yield Subject(f"engine, {name}, a module with a state", "of_torch:EngineOfStates", settings[name])
    alone: dict[str, dict[str, Any]] = {
        "fp32": {},
        "fp32, early copy": {"early_copy": True},
        "bf16": {"model_dtype": "bfloat16"},
        "bf16, early copy": {"model_dtype": "bfloat16", "early_copy": True},
        "8 bits": {"model_dtype": "bfloat16", "state_format": "8bit"},
        "on disk": {**STATES_ON_DISK},
        "a function": {"lr": lambda updates: 1e-2 / (1 + updates)},
        "SGD": {"kind": "OffloadedSGD", "momentum": 0.9},
        **{name: {"kind": f"Offloaded{name}"} for name in ("Lion", "Adagrad")},
    }
    from tests.support.subjects import of_torch
    from tests.support.subjects.of_torch import Alone

    for name, fields in alone.items():
        out = set() if name in ("fp32", "bf16, early copy") else Alone.wrong.keys() - SOME
        out |= {"torch_state_dict"} if name == "Lion" else set()
        out |= {"a group with a negative rate", "a pickle"} if name == "a function" else set()
        out |= {each for each in of_torch.REPLACED if "gradient" in each and "early_copy" in fields}
        yield Subject(f"alone, {name}", "of_torch:Alone", fields, without=frozenset(out))
    fields, on_device = alone["bf16"], frozenset({*Alone.wrong} - SOME | {*Alone.calls})
    yield Subject("alone, bf16, simulated", "of_torch:Alone", fields, "simulated, delays 0", without=on_device)
    for number in range(4):
        more = {"gradient_accumulation_steps": 2} if number == 1 else {}
        yield Subject(
            f"DeepSpeed's face, stage {number}",
            "of_deepspeed:Face",
            {"stage": number, **more},
            without=frozenset({"step"} if more else ()),
        )
    for name in ("stage 1", "stage 2", "stage 3, on the host"):
        yield Subject(f"two ranks, {name}", "of_torch:OfRanks", settings[name], ranks=2, slow=True)
    yield Subject("two ranks, FSDP2", "of_torch:OverFsdp", {}, ranks=2, slow=True)


WHOLE = ("stage 2", "fp16", "stage 3, on the host", "stage 3, on disk")
"""The settings of engines in which each call is refused; in others some are, of each kind."""
CUT_WHOLE = (*WHOLE, "serial, bf16", "delayed", "in backward", "sent early")
"""Those in which each call is interrupted; in others those of ``CUT``."""
SOME = {
    "a step without a backward",
    "a negative rate",
    "a group with a negative rate",
    "states: another shape",
    "states: a rate that is NaN",
    "states: another optimizer's",
    "checkpoint: another optimizer's",
    "checkpoint: a negative step",
    "checkpoint: betas of 1",
    "a save of a module",
    "weights: another shape",
    "released: a parameter",
}
CUT = {"step", "load_checkpoint", "release"}


def _without(name: str, fields: Mapping[str, Any], device: str = "host") -> frozenset[str]:
    """What an engine with these fields has not, or what other rows show."""
    from tests.support.subjects import of_torch
    from tests.support.subjects.of_torch import Engine

    out: set[str] = set()
    if name not in WHOLE or device != "host":
        out |= Engine.wrong.keys() - SOME
    if name not in CUT_WHOLE or (device != "host" and name != "stage 2"):
        out |= Engine.calls.keys() - CUT
    if device == "host" and name != "stage 2":
        out |= of_torch.BY_HAND.keys()
    if fields.get("param_dtype") != "float16":
        out |= {*of_torch.SCALES, *of_torch.FORGED_SCALES}
    if fields.get("stage") == 3:
        out |= {*of_torch.BY_HAND, "a copy"}  # its parameters are read in gathered_parameters() alone
    if fields.get("update_in_backward"):
        out |= {*of_torch.HYPERPARAMETERS, *of_torch.MID_STEP}  # a backward changes states
    if fields.get("schedule") == "delayed":
        out |= {"a copy"}  # it brings the parameters level
    if fields.get("optimizer") == "lion":
        out |= {"torch_state_dict"}  # torch has none
    if fields.get("optimizer") in ("sgd", "adagrad", "muon"):
        out |= {"checkpoint: betas of 1"}
    if callable(fields.get("lr")):
        # Even a refused step shows the rate of the next update, and groups have no rates of their own.
        out |= {"a step without a backward", "a group with a negative rate"}
    if fields.get("stage") != 3:
        out |= {"released: gathered_parameters"}
    if fields.get("gradient_accumulation_steps"):
        out |= {"step"}  # zero_grad() drops gradients and keeps the count of micro-steps
    if device == "late":
        out |= {"release", "restore", *of_torch.RELEASED}  # there is no such accelerator
    elif device != "host":
        out |= Engine.calls.keys() - {"release", "restore"}
    return frozenset(out)


def _of_jax() -> Iterator[Subject]:
    from tests.support.late_stores import STATES_ON_DISK
    from tests.support.rules import REFERENCES, settings_of
    from tests.support.subjects import of_jax

    bf16 = {"param_dtype": "bfloat16"}
    delayed = {**bf16, "schedule": "delayed", "delay_warmup_steps": 1}
    settings: dict[str, dict[str, Any]] = {
        "fp32": {"gradient_clipping": 0.05},
        "fp16": {"param_dtype": "float16", "initial_loss_scale": 64.0, "loss_scale_window": 3},
        "bf16": {**bf16, "gradient_clipping": 0.5},
        "delayed": delayed,
        "accumulating": {"gradient_accumulation_steps": 2},
        "on disk": {**STATES_ON_DISK, **bf16},
        "later": {"wait": False},
        "later, delayed": {**delayed, "wait": False},
        "8 bits": {"state_format": "8bit", **bf16},
        **{name: settings_of(name) for name in REFERENCES if name != "adamw"},
        **{
            f"mesh, stage {stage}": {"ranks": 4, "stage": stage, "param_persistence_threshold": 20, **bf16}
            for stage in (1, 2, 3)
        },
        **{
            f"mesh, stage {stage}, 8 bits": {
                "ranks": 4,
                "stage": stage,
                "param_persistence_threshold": 0,
                **bf16,
                "state_format": "8bit",
                "master_dtype": "bfloat16",
            }
            for stage in (2, 3)
        },
        "own memory": {"own_memory": True, **bf16},
        "own memory, given away": {"own_memory": True, "donate": True, **bf16},
        "mesh, stage 3, on disk": {"ranks": 4, "stage": 3, "offload_param": "cpu", **STATES_ON_DISK, **bf16},
    }
    for name, fields in settings.items():
        out: set[str] = set()
        if name not in ("fp32", "fp16", "mesh, stage 3"):
            out |= of_jax.Tree.wrong.keys() - SOME_OF_JAX
        if name not in ("fp32", "on disk", "delayed", "mesh, stage 2"):
            out |= of_jax.Tree.calls.keys() - {"update"}
        if fields.get("param_dtype") == "float16":
            out |= {"optax's state", "gradients: only None", "gradients: nothing", "gradients: one array"}
        else:
            out |= {*of_jax.PLAIN, *of_jax.TREES_OF_SCALES}
        if fields.get("param_dtype") or "optimizer" in fields:
            out |= {"optax's state"}  # it has no master weights
        if "optimizer" in fields:
            out |= {"load_optax_state", *of_jax.OPTAX}
        if fields.get("schedule") == "delayed":
            out |= of_jax.Tree.reads.keys() - {"flush", "to_pytree"}  # parameters are a step behind
        if name == "later, delayed":
            out |= {"update"}  # the interrupt of a read ends the update before, and brings parameters level early
        if "ranks" in fields:
            out |= {"value_and_grad of no scalar"}  # the batch is looked at first
        yield Subject(f"tree, {name}", "of_jax:Tree", fields, needs=("jax",), without=frozenset(out))


SOME_OF_JAX = {
    "gradients: another shape",
    "gradients: donated",
    "tree: another shape",
    "tree: a negative step",
    "checkpoint: negative updates",
    "under jit: params",
}


def _of_others() -> Iterator[Subject]:
    few = frozenset({*STATES_OF_OTHERS})
    rows: dict[str, tuple[str, str, dict[str, Any]]] = {
        "Accelerate": ("accelerate", "Accelerated", {}),
        "Accelerate, bf16": ("accelerate", "Accelerated", {"model_dtype": "bfloat16"}),
        "Accelerate, in shards": ("accelerate", "Accelerated", {"model_dtype": "bfloat16", "in_shards": True}),
        "Trainer": ("transformers", "OfPlainTrainer", {}),
        "OffloadTrainer, stage 1": ("transformers", "OfTrainer", {"offload": {"stage": 1}}),
        "OffloadTrainer, stage 2, bf16": ("transformers", "OfTrainer", {"offload": {"param_dtype": "bfloat16"}}),
        "OffloadTrainer, stage 3": ("transformers", "OfTrainer", {"offload": STAGE_3_OF_OTHERS}),
        "Lightning, the optimizer": ("lightning", "OfLightning", {}),
        "Lightning, the optimizer, bf16": ("lightning", "OfLightning", {"precision": "bf16-true"}),
        "Lightning, the strategy": ("lightning", "OfLightning", {"stage": 2}),
        "Lightning, the strategy, stage 3": ("lightning", "OfLightning", {"stage": 3}),
    }
    for name, (package, kind, fields) in rows.items():
        needs = ("torch", package)
        yield Subject(name, f"of_others:{kind}", fields, needs=needs, integration=True, without=few)


STAGE_3_OF_OTHERS = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 100}
STATES_OF_OTHERS = ("states: a parameter less", "states: no step")

ROWS = [
    *(_of_torch() if HERE["torch"] else ()),
    *(_of_jax() if HERE["jax"] else ()),
    *(_of_others() if HERE["torch"] else ()),
]
SUBJECTS = {row.name: row for row in ROWS}
assert len(SUBJECTS) == len(ROWS)


def cases(what: str) -> Iterator[Any]:
    """Parameters ``device, subject, name`` of a law: each name of each subject's ``what``."""
    for subject in ROWS:
        for name in subject.names(what):
            yield pytest.param(subject.device, subject.name, name, marks=subject.marks, id=f"{subject.name}: {name}")
