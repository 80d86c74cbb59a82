"""Subjects of torch on one process or on ranks: an engine in each of its ways, and an optimizer alone."""

import copy
import io
import pickle
import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR

from frontends import torch as front_end
from frontends.torch import export_deepspeed, gathered_parameters, wrap
from frontends.torch.training import grad_hooks
from offload_core.checkpoint.manifest import read_manifest, write_manifest
from offload_core.errors import CheckpointError, ConfigError, GradientError, ParameterError, StateError
from offload_core.support.checkpoint_folder import MANIFEST
from tests.support import modes, torch_rank
from tests.support.checkpoints import Loader
from tests.support.late_stores import PARAMETERS_ON_DISK
from tests.support.subjects import Call, Run, Wrong, plain
from tests.support.subjects.models import Mixed, Remembering, images, mixed
from tests.support.torch_models import place
from tests.support.ways import STAGE_3


def generators() -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
    """The functions that read and set the state of each generator that a run draws from."""
    found = [
        (random.getstate, random.setstate),
        (np.random.get_state, np.random.set_state),
        (torch.get_rng_state, torch.set_rng_state),
    ]
    if place().type != "cpu":
        module = torch.get_device_module(place().type)
        found.append((module.get_rng_state, module.set_rng_state))
    return found


REFUSED = (StateError, ConfigError, ParameterError, ValueError)
TAGS = {"empty": "", "hidden": ".hidden", "a path": "a/b", "latest": "latest", "long": "x" * 101, "a number": 3}


class TorchRun(Run):
    """A model and its optimizer; ``self.optimizer`` is ours."""

    model: nn.Module
    optimizer: Any

    def __init__(self, seed: int, **fields: Any) -> None:
        self.fields = fields
        self.loader = Loader(seed)

    def another(self, steps: int = 3) -> "TorchRun":
        """Another run with the same fields, which has trained a few steps."""
        made = type(self)(5, **self.fields)
        for number in range(11, 11 + steps):
            made.step(number)
        return made

    def stateful(self) -> dict[str, Any]:
        """Objects with ``state_dict`` beside model and optimizer, by name."""
        return {"loader": self.loader}

    def rest(self) -> Any:
        """What the state dicts of model and optimizer do not have."""
        states = {name: each.state_dict() for name, each in self.stateful().items()}
        return copy.deepcopy([states, *(get() for get, _ in generators())])

    def take_rest(self, rest: Any) -> None:
        states, *of_generators = rest
        for name, each in self.stateful().items():
            each.load_state_dict(states[name])
        for (_, restore), state in zip(generators(), of_generators, strict=True):
            restore(state)

    def params(self) -> list[nn.Parameter]:
        return [param for param in self.model.parameters() if param.requires_grad]

    def values(self) -> dict[str, Any]:
        self.optimizer.flush()
        with gathered_parameters([*self.model.parameters()]):
            found = {f"param {name}": plain(p) for name, p in self.model.named_parameters()}
        entries = [(i, self.optimizer.state[p]) for i, p in enumerate(self.params()) if p in self.optimizer.state]
        found |= {
            f"{name} of {i}": plain(torch.as_tensor(value)) for i, entry in entries for name, value in entry.items()
        }
        return found | {"updates": self.optimizer.updates, "loss scale": self.optimizer.loss_scale}

    def everything(self) -> dict[str, Any]:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return super().everything() | {
            **{f"buffer {name}": plain(buffer) for name, buffer in self.model.named_buffers() if name != "cache"},
            "groups": plain(groups),
            "loader": self.loader.at,
            "seen": getattr(self.model, "seen", 0),
            "torch": plain([get() for get, _ in generators()[2:]]),
        }

    also_traced: ClassVar = modes.FILES

    def put_back(self, left: Any) -> None:
        modes.put_back(left[0])

    def left_behind(self) -> Any:
        return modes.modes(), [backward for backward in grad_hooks._STARTED if backward.runs.locked()]


# --- ways to resume ----------------------------------------------------------------------------------------


def by_state_dicts(
    run: TorchRun, begin: Any, folder: Path, go_on: Callable[[], None], *, model_first: bool, through: Any
) -> TorchRun:
    """Through the state dicts of module and optimizer, which know no schedules and generators."""
    states = run.optimizer.state_dict()  # first: it brings parameters of the delayed schedule level
    with gathered_parameters([*run.model.parameters()]):
        kept = through({"weights": copy.deepcopy(run.model.state_dict()), "states": states})
    kept["rest"] = run.rest()
    go_on()
    other = begin(1)
    for part in ("weights", "states") if model_first else ("states", "weights"):
        if part == "states":
            other.optimizer.load_state_dict(kept["states"])
            continue
        with gathered_parameters([*other.model.parameters()], modifier_rank=0):
            kept["weights"].pop("ones", None)  # torch cannot copy to overlapping elements
            other.model.load_state_dict(kept["weights"], strict=False)
    other.take_rest(kept["rest"])
    return other


def through_a_file(kept: Any) -> Any:
    file = io.BytesIO()
    torch.save(kept, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_copy(
    run: TorchRun, begin: Any, folder: Path, go_on: Callable[[], None], *, how: Callable[[Any], Any]
) -> TorchRun:
    twin, rest = how(run), run.rest()
    go_on()
    twin.take_rest(rest)
    return twin


STATE_DICTS = {
    "a deep copy of the state dicts": partial(by_state_dicts, model_first=True, through=copy.deepcopy),
    "a file, the states first": partial(by_state_dicts, model_first=False, through=through_a_file),
}
COPIES = {
    "a copy": partial(by_copy, how=copy.deepcopy),
    "a pickle": partial(by_copy, how=lambda run: pickle.loads(pickle.dumps(run))),
}


# --- what is refused ---------------------------------------------------------------------------------------


def forged(change: Callable[[dict[str, Any]], object], match: str | None = None) -> Wrong:
    """The load of a checkpoint of another run, whose manifest was changed."""

    def prepare(run: TorchRun, folder: Path) -> None:
        path = run.another().save(folder)
        content = read_manifest(path / MANIFEST)
        change(content)
        write_manifest(path, content)

    return Wrong(lambda run, folder: run.load(folder), CheckpointError, match, prepare)


def taken(change: Callable[[dict[str, Any]], object], match: str | None = None) -> Wrong:
    """The load of another run's state dict, which was changed."""

    def prepare(run: TorchRun, folder: Path) -> None:
        run.given = copy.deepcopy(run.another().optimizer.state_dict())
        for group in run.given["param_groups"]:
            group["lr"] = 7.0
        change(run.given)

    return Wrong(lambda run, folder: run.optimizer.load_state_dict(run.given), REFUSED, match, prepare)


def grouped(change: dict[str, Any], error: Any, match: str) -> Wrong:
    """A group that cannot be added."""

    def act(run: TorchRun, folder: Path) -> None:
        run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, device=place()))], **change})

    return Wrong(act, error, match)


def set_in_group(name: str, value: Any, match: str) -> Wrong:
    """A step with a hyperparameter that was set by hand."""

    def act(run: TorchRun, folder: Path) -> None:
        run.given = run.optimizer.param_groups[0].get(name)
        run.optimizer.param_groups[0][name] = value
        run.optimizer.step()

    def mend(run: TorchRun) -> None:
        run.optimizer.param_groups[0][name] = run.given

    return Wrong(act, REFUSED, match, lambda run, folder: run.backward(20), mend)


def entry(state: dict[str, Any], **values: Any) -> None:
    """Replace values of the first entry that has a moment."""
    first = next(each for each in state["state"].values() if any(torch.is_tensor(v) and v.dim() for v in each.values()))
    for name, value in values.items():
        if name == "moment":
            name = next(key for key, each in first.items() if torch.is_tensor(each) and each.dim() and key != "master")
            value = value(torch.as_tensor(first[name]))
        first[name] = value


STATES = {
    "states: a negative step": taken(lambda s: entry(s, step=torch.tensor(-1.0))),
    "states: a step that is NaN": taken(lambda s: entry(s, step=torch.tensor(float("nan")))),
    "states: half a step": taken(lambda s: entry(s, step=0.5)),
    "states: steps of two elements": taken(lambda s: entry(s, step=torch.ones(2))),
    "states: float64": taken(lambda s: entry(s, moment=lambda m: m.double())),
    "states: integers": taken(lambda s: entry(s, moment=lambda m: m.long())),
    "states: another shape": taken(lambda s: entry(s, moment=lambda m: torch.zeros(3)), "expected a tensor of shape"),
    "states: a rate that is NaN": taken(lambda s: s["param_groups"][0].update(lr=float("nan"))),
    "states: a negative rate": taken(lambda s: s["param_groups"][0].update(lr=-1.0)),
    "states: a negative decay": taken(lambda s: s["param_groups"][0].update(weight_decay=-0.1)),
    "states: amsgrad": taken(lambda s: s["param_groups"][0].update(amsgrad=True)),
    "states: negative updates": taken(lambda s: s.update(updates=-1)),
    "states: updates that are NaN": taken(lambda s: s.update(updates=float("nan"))),
    "states: no groups": taken(lambda s: s["param_groups"].pop()),
    "states: a parameter less": taken(lambda s: s["param_groups"][0]["params"].pop()),
    "states: no step": taken(lambda s: next(iter(s["state"].values())).pop("step")),
}


def of_another_rule(run: TorchRun) -> Any:
    """An engine around the same model with states of other names, after a step."""
    rule = "lion" if getattr(run.optimizer, "rule_name", None) == "sgd" else "sgd"
    other = wrap(mixed(5), lr=1e-2, optimizer=rule, **({"momentum": 0.9} if rule == "sgd" else {}))
    other.backward(other(images(11)).float().pow(2).mean())
    other.step()
    return other


OTHER_RULES = {
    "states: another optimizer's": Wrong(
        lambda run, folder: run.optimizer.load_state_dict(run.given),
        REFUSED,
        None,
        lambda run, folder: setattr(run, "given", of_another_rule(run).optimizer.state_dict()),
    ),
    "checkpoint: another optimizer's": Wrong(
        lambda run, folder: run.engine.load_checkpoint(folder),
        CheckpointError,
        "it was saved with another optimizer|was updated by optimizer=",
        lambda run, folder: of_another_rule(run).save_checkpoint(folder),
    ),
}
SCALES = {
    "states: a loss scale that is NaN": taken(
        lambda s: s.update(loss_scale={"scale": float("nan"), "good_steps": 0, "tolerated": 0}), "its loss scale"
    ),
    "states: half a loss scale": taken(lambda s: s.update(loss_scale={"scale": 2.0}), "its loss scale"),
    "states: no loss scale": taken(lambda s: s.update(loss_scale=None), "its loss scale"),
}
GROUPS = {
    "a group of complex numbers": grouped(
        {"params": [nn.Parameter(torch.ones(2, dtype=torch.complex64))]}, ParameterError, "complex"
    ),
    "a group with a negative rate": grouped({"lr": -1}, ConfigError, r"parameter group \d: lr: got -1"),
    "a group with amsgrad": grouped(
        {"amsgrad": True}, ConfigError, r"parameter group \d: amsgrad=True is not supported"
    ),
    "a group with a wrong word": grouped(
        {"wd": 0.1}, ConfigError, "'wd' is no hyperparameter; expected 'weight_decay'"
    ),
    "a group of a set": grouped({"params": {nn.Parameter(torch.ones(4))}}, TypeError, "organized in ordered"),
    "a group that is a list": Wrong(
        lambda run, folder: run.optimizer.add_param_group([nn.Parameter(torch.ones(4))]), TypeError, "must be a dict"
    ),
    "a group of a parameter that it has": Wrong(
        lambda run, folder: run.optimizer.add_param_group({"params": run.params()[:1]}), ValueError, "more than one"
    ),
}
HYPERPARAMETERS = {
    "a negative rate": set_in_group("lr", -1.0, r"parameter group 0: lr: got -1\.0|lr=-1\.0 was set"),
    "a decay that is NaN": set_in_group("weight_decay", float("nan"), "weight_decay: got nan"),
    "amsgrad": set_in_group("amsgrad", True, "parameter group 0: amsgrad=True is not supported"),
}
FORGERIES = {
    "checkpoint: no extras": forged(lambda c: c["state"].pop("extras")),
    "checkpoint: no states of objects": forged(lambda c: c["state"].pop("stateful")),
    "checkpoint: no updates": forged(lambda c: c["state"].pop("updates")),
    "checkpoint: negative updates": forged(lambda c: c["state"].update(updates=-1)),
    "checkpoint: updates of 10**400": forged(lambda c: c["state"].update(updates=10**400)),
    "checkpoint: updates in words": forged(lambda c: c["state"].update(updates="3")),
    "checkpoint: a negative step": forged(lambda c: c["parameters"]["head.bias"].update(step=-3)),
    "checkpoint: an object's state missing": forged(lambda c: c["state"]["stateful"].pop("loader"), "stateful"),
    "checkpoint: a rate that is NaN": forged(
        lambda c: c["state"]["groups"][0].update(lr={"$": "float", "value": "nan"})
    ),
    "checkpoint: a negative rate": forged(lambda c: c["state"]["groups"][0].update(lr=-1.0)),
    "checkpoint: betas of 1": forged(lambda c: c["state"]["groups"][0].update(betas=[0.9, 1.0])),
    "checkpoint: a rate in words": forged(lambda c: c["state"]["groups"][0].update(lr="fast")),
    "checkpoint: amsgrad": forged(lambda c: c["state"]["groups"][0].update(amsgrad=True)),
    "checkpoint: other parameters": forged(lambda c: c["state"]["groups"][0].update(params=[])),
    "checkpoint: groups that are True": forged(lambda c: c["state"].update(groups=True)),
    "checkpoint: groups that are none": forged(lambda c: c["state"].update(groups=[3])),
    "checkpoint: a group that is not there": forged(
        lambda c: [parameter.update(group=7) for parameter in c["parameters"].values()]
    ),
    "checkpoint: no random state": forged(lambda c: c["own"][0].pop("random")),
    "checkpoint: the random state of no generator": forged(
        lambda c: c["own"][0]["random"].update(python={"$": "tuple", "value": [3, 1, 2]})
    ),
    "checkpoint: a torch generator's random state": forged(lambda c: c["own"][0]["random"].update(torch=3)),
    "checkpoint: numpy's random state": forged(
        lambda c: c["own"][0]["random"].update(numpy=None), "random_state=False"
    ),
    "checkpoint: a plain state": forged(lambda c: c.update(state=None)),
}
FORGED_MODULES = {
    "checkpoint: modules in words": forged(lambda c: c["state"].update(modules="_extra_state")),
    "checkpoint: a module's state missing": forged(lambda c: c["state"]["modules"].clear(), "_extra_state"),
}
FORGED_SCALES = {
    f"checkpoint: a loss scale of {name}": forged(lambda c, scale=scale: c.update(loss_scale=scale), "the loss scale")
    for name, scale in {
        "infinity": {"scale": "inf", "good_steps": "0", "tolerated": "0"},
        "one word": {"scale": "1.0"},
        "zero": {"scale": "0"},
        "a number": 3,
    }.items()
}


def saved(match: str, error: Any = CheckpointError, **arguments: Any) -> Wrong:
    """A save with arguments that it cannot have; it leaves the folder empty."""

    def act(run: "Engine", folder: Path) -> None:
        try:
            run.engine.save_checkpoint(folder, **{name: made(run) for name, made in arguments.items()})
        finally:
            assert not list(folder.iterdir())

    return Wrong(act, error, match)


def of_another_model(run: "Engine", folder: Path) -> None:
    wrap(nn.Linear(3, 3).to(place()), lr=1e-2).save_checkpoint(folder)


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will not have them for ever
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


MID_STEP = {
    "a save in mid-step": saved("between backward", StateError)._replace(prepare=lambda run, folder: run.backward(20))
}
SAVES = {
    "a save of a module": saved(r"state\['extras'\]\['x'\] is a ", extras=lambda run: {"x": run.model}),
    "a save of a sparse tensor": saved(
        r"state\['extras'\]\['x'\]: a torch.sparse_coo tensor", extras=lambda run: {"x": torch.eye(3).to_sparse()}
    ),
    "a save of a meta tensor": saved(
        r"state\['extras'\]\['x'\]: a meta torch.strided tensor",
        extras=lambda run: {"x": torch.empty(3, device="meta")},
    ),
    "a save of a nested tensor": saved(
        r"state\['extras'\]\['x'\]: a nested ",
        extras=lambda run: {"x": nested()},
    ),
    "a save of an object without a state": saved(r"stateful\['x'\] is an int", stateful=lambda run: {"x": 1}),
    **{f"a tag that is {name}": saved("tag: got", tag=lambda run, tag=tag: tag) for name, tag in TAGS.items()},
    **{
        f"to keep {keep}": saved(
            "keep: got .*, expected a number of checkpoints", keep=lambda run, keep=keep: eval(keep)
        )
        for keep in ("10**30", "2**63", "0", "-1", "True", "1.5", "10**5000")
    },
    "a load of nothing": Wrong(lambda run, folder: run.load(folder), CheckpointError, "no checkpoint"),
    "a save of a quantised tensor": saved("tensor of torch.qint8", extras=lambda run: {"x": quantised()}),
    "a load of an object that it lacks": Wrong(
        lambda run, folder: run.engine.load_checkpoint(folder, stateful={"x": run.loader}),
        CheckpointError,
        r"stateful\['x'\]: the checkpoint has no state of that name; it has none",
        lambda run, folder: run.engine.save_checkpoint(folder),
    ),
    "a load of another model": Wrong(
        lambda run, folder: run.engine.load_checkpoint(folder), CheckpointError, "it lacks", of_another_model
    ),
}


def into(change: Callable[[dict[str, torch.Tensor]], object], match: str) -> Wrong:
    """Weights that are asked for into tensors that do not fit: nothing is written."""

    def act(run: "Engine", folder: Path) -> None:
        given = {name: torch.full_like(tensor, 1) for name, tensor in run.engine.named_weights()}
        tensors = list(given.values())
        change(given)
        before = plain(tensors)
        try:
            run.engine.named_weights(into=given)
        finally:
            assert plain(tensors) == before

    return Wrong(act, ParameterError, match)


def weights(match: str, **arguments: Any) -> Wrong:
    return Wrong(lambda run, folder: run.engine.named_weights(**arguments), ConfigError, match)


WEIGHTS = {
    "weights: a name less": into(lambda t: t.pop("head.bias"), r"1 missing: .*head.bias.*nothing was written"),
    "weights: a name more": into(lambda t: t.update(other=torch.zeros(2)), "1 unknown: .*'other'"),
    "weights: another shape": into(
        lambda t: t.update({"head.bias": torch.zeros(9)}), r"'head.bias' is \(9,\) .*, expected"
    ),
    "weights: integers": into(
        lambda t: t.update({"head.bias": torch.zeros(4, dtype=torch.int64)}), "int64.*floating-point"
    ),
    "weights: on meta": into(lambda t: t.update({"head.bias": torch.zeros(4, device="meta")}), "on meta, expected"),
    "weights: a list": into(lambda t: t.update({"head.bias": [0.0] * 4}), "'head.bias' is a list, expected"),
    "weights: into a number": weights("into: got an int", into=1),
    "weights: a wrong type": weights("dtype: got 'int8'", dtype="int8"),
    "weights: a wrong layout": weights("layout: got 'mine'", layout="mine"),
    "weights: a wrong device": weights("device: got 'moon'", device="moon"),
}


def released(use: Callable[["Engine", Path], object]) -> Wrong:
    def prepare(run: "Engine", folder: Path) -> None:
        run.given = run.optimizer.state_dict()
        run.engine.save_checkpoint(folder)

    def act(run: "Engine", folder: Path) -> None:
        run.engine.release()
        use(run, folder)

    said = r"released parameters have no memory.*expected engine\.restore\(\)"
    return Wrong(act, StateError, said, prepare, lambda run: run.engine.restore())


RELEASED = {
    f"released: {name}": released(use)
    for name, use in {
        "forward": lambda run, folder: run.engine(torch.ones(4, 3, 6, 6, device=place())),
        "the module's forward": lambda run, folder: run.model(torch.ones(4, 3, 6, 6, device=place())),
        "a layer": lambda run, folder: run.model.norm(torch.ones(1, 8, 2, 2, device=place())),
        "gathered_parameters": lambda run, folder: gathered_parameters(run.params()).__enter__(),
        "a parameter": lambda run, folder: run.model.head.weight.sum(),
        "a frozen parameter": lambda run, folder: run.model.frozen + 1,
        "a buffer": lambda run, folder: run.model.norm.running_mean.tolist(),
        "a write": lambda run, folder: nn.init.zeros_(run.model.head.bias),
        "data": lambda run, folder: run.model.head.bias.data,
        "state_dict": lambda run, folder: run.engine.state_dict(),
        "step": lambda run, folder: run.engine.step(),
        "the optimizer's step": lambda run, folder: run.optimizer.step(),
        "load_checkpoint": lambda run, folder: run.engine.load_checkpoint(folder),
        "load_state_dict": lambda run, folder: run.optimizer.load_state_dict(run.given),
        "a state": lambda run, folder: run.optimizer.state.__setitem__(run.model.head.bias, {}),
        "load_master": lambda run, folder: run.optimizer.load_master(run.model.head.bias, torch.zeros(4)),
        "a group": lambda run, folder: run.optimizer.add_param_group(
            {"params": [nn.Parameter(torch.ones(3, device=place()))]}
        ),
    }.items()
}
STEPS = {
    "a step without a backward": Wrong(lambda run, folder: run.engine.step(), StateError, r"step\(\) without backward"),
    "a loss of three elements": Wrong(
        lambda run, folder: run.engine.backward(torch.ones(3)), GradientError, "expected a tensor of one element"
    ),
    "a loss that is a number": Wrong(lambda run, folder: run.engine.backward(1.0), GradientError, "expected a tensor"),
}


# --- what is read ------------------------------------------------------------------------------------------


def saved_and_loaded(run: "Engine", folder: Path) -> Any:
    run.save(folder)
    other = run.another(0)
    other.load(folder)
    return other.values()


def forward(run: TorchRun, x: Any = None) -> torch.Tensor:
    x = images(30)
    run.model.eval()
    try:
        with torch.no_grad():
            return run.callable(x)
    finally:
        run.model.train()


READS_OF_STATES: dict[str, Callable[[Any, Path], Any]] = {
    "states": lambda run, folder: [dict(run.optimizer.state[p]) for p in run.params()],
    "whole_states": lambda run, folder: [run.optimizer.whole_states(p) for p in run.params()],
    "the optimizer's state_dict": lambda run, folder: run.optimizer.state_dict()["state"],
    "torch_state_dict": lambda run, folder: run.optimizer.torch_state_dict()["state"],
    "updates": lambda run, folder: run.optimizer.updates,
}
READS = {
    **READS_OF_STATES,
    "a forward": lambda run, folder: forward(run),
    "named_weights": lambda run, folder: dict(run.engine.named_weights(dtype="float32")),
    "named_weights, into": lambda run, folder: (
        run.engine.named_weights(into=(given := {name: torch.empty_like(t) for name, t in run.shapes().items()}))
        and given
    ),
    "whole_state_dict": lambda run, folder: run.engine.whole_state_dict(),
    "gathered_parameters": lambda run, folder: run.gathered(),
    "a checkpoint": saved_and_loaded,
    "export_safetensors": lambda run, folder: (
        run.engine.export_safetensors(folder) and {path.name: path.read_bytes() for path in folder.iterdir()}
    ),
}
READS_BY_HAND: dict[str, Callable[[list[Any], nn.Module], Any]] = {
    "a sum": lambda params, model: [p.sum() for p in params],
    "state_dict": lambda params, model: model.state_dict(),
    "torch.save": lambda params, model: through_a_file(model.state_dict()),
    "deepcopy": lambda params, model: list(copy.deepcopy(model).parameters()),
    "data": lambda params, model: [p.data.clone() for p in params],
    "numpy": lambda params, model: [p.detach().float().cpu().numpy() for p in params],
    "a list of them": lambda params, model: list(torch._foreach_mul(params, 1.0)),
    "functional_call": lambda params, model: torch.func.functional_call(
        model.eval(), dict(model.named_parameters()), (images(30).to(params[0].dtype),)
    ),
    "parameters_to_vector": lambda params, model: nn.utils.parameters_to_vector(model.head.parameters()),
    "item": lambda params, model: [p.view(-1)[0].item() for p in params if p.is_contiguous()],
    "repr": lambda params, model: repr(params),
    "chunks": lambda params, model: [part for p in params if p.dim() for part in torch.split(p, 3)],
    "to": lambda params, model: list(copy.deepcopy(model).to(torch.float32).parameters()),
}
BY_HAND = {
    name: lambda run, folder, read=read: read(list(run.model.parameters()), run.model)
    for name, read in READS_BY_HAND.items()
}


# --- what an interrupt may cut -----------------------------------------------------------------------------


def given_weights(run: "Engine", folder: Path) -> None:
    run.engine.named_weights(into=run.given)


def in_a_block(run: "Engine", folder: Path) -> None:
    with gathered_parameters([*run.model.parameters()], modifier_rank=0):
        run.model.head.bias.detach().mul_(1.0)


def traced(run: "Engine", folder: Path) -> None:
    with run.engine.trace(folder / "trace.json"):
        run.engine.flush()


def save_another(run: "Engine", folder: Path) -> None:
    other = run.another()
    other.save(folder / "given")
    other.close()


def closed(run: "Engine", folder: Path) -> None:
    """End the close; the model is wrapped anew."""
    run.engine.close()
    assert not run.optimizer.is_open
    run.wrap_anew()


CALLS = {
    "step": Call(lambda run, folder: run.update(2)),
    "backward": Call(lambda run, folder: run.backward(2)),
    "flush": Call(lambda run, folder: run.engine.flush()),
    "named_weights": Call(lambda run, folder: [*run.engine.named_weights(dtype="float32")]),
    "named_weights, into": Call(given_weights, lambda run, folder: run.__dict__.update(given=run.shapes())),
    "whole_state_dict": Call(lambda run, folder: run.engine.whole_state_dict()),
    "torch_state_dict": Call(lambda run, folder: run.optimizer.torch_state_dict()),
    "load_state_dict": Call(lambda run, folder: run.optimizer.load_state_dict(run.optimizer.state_dict())),
    "load_state_dict of another": Call(
        lambda run, folder: run.optimizer.load_state_dict(run.given),
        lambda run, folder: run.__dict__.update(given=copy.deepcopy(run.another().optimizer.state_dict())),
    ),
    "gathered_parameters": Call(in_a_block),
    "release": Call(lambda run, folder: run.engine.release(), end=lambda run, folder: run.engine.restore()),
    "restore": Call(
        lambda run, folder: run.engine.restore(),
        lambda run, folder: run.engine.release(),
        lambda run, folder: run.engine.restore(),
    ),
    "close": Call(lambda run, folder: run.engine.close(), end=closed),
    "export_safetensors": Call(lambda run, folder: run.engine.export_safetensors(folder / "exported")),
    "export_deepspeed": Call(lambda run, folder: export_deepspeed(run.engine, folder / "universal")),
    "save_checkpoint": Call(lambda run, folder: run.engine.save_checkpoint(folder / "saved")),
    "load_checkpoint": Call(
        lambda run, folder: run.load(folder / "given"), save_another, lambda run, folder: run.load(folder / "given")
    ),
    "trace": Call(traced),
}


# --- an engine ---------------------------------------------------------------------------------------------


class Engine(TorchRun):
    """An engine around a model, with a schedule if its rate is a number."""

    kind: ClassVar[type[Mixed]] = Mixed
    engine: Any

    def __init__(self, seed: int, **fields: Any) -> None:
        super().__init__(seed, **fields)
        self.model = mixed(seed, self.kind)
        self.wrap_anew()

    def wrap_anew(self) -> None:
        given = {"lr": 1e-2, "num_threads": 1, "reduce_bucket_size": 64, **self.fields}
        self.engine = wrap(self.model, **self.with_groups(given))
        self.optimizer = self.engine.optimizer
        self.schedules = {} if callable(given["lr"]) else {"schedule": CosineAnnealingLR(self.optimizer, 7)}

    def with_groups(self, given: dict[str, Any]) -> dict[str, Any]:
        """Have ``groups``, a list of settings, be parameter groups: the first of matrices, the second of the rest."""
        if (groups := given.pop("groups", None)) is None:
            return given
        parts = [p for p in self.params() if p.dim() > 1], [p for p in self.params() if p.dim() <= 1]
        return {**given, "params": [{"params": part, **own} for part, own in zip(parts, groups, strict=True)]}

    def __getstate__(self) -> dict[str, Any]:
        return {"engine": self.engine, **self.__dict__}  # a copy begins with it: parameters of stage 3 are copied by it

    @property
    def callable(self) -> Any:
        return self.engine

    @property
    def micro_steps(self) -> int:
        return self.fields.get("gradient_accumulation_steps", 1)

    def backward(self, number: int | None = None) -> None:
        self.engine.backward(self.engine(images(number)).float().pow(2).mean())

    def update(self, number: int | None = None) -> None:
        for micro_step in range(self.micro_steps):
            self.backward(None if number is None else 100 * number + micro_step)
            self.engine.step()

    def step(self, number: int | None = None) -> None:
        self.update(number)
        self.loader.at += 1
        for schedule in self.schedules.values():
            schedule.step()

    def everything(self) -> dict[str, Any]:
        schedules = {name: plain(schedule.state_dict()) for name, schedule in self.schedules.items()}
        return super().everything() | schedules

    def stateful(self) -> dict[str, Any]:
        return {**self.schedules, "loader": self.loader}

    def save(self, folder: Path, **arguments: Any) -> Path:
        return self.engine.save_checkpoint(folder, stateful=self.stateful(), extras={"epoch": 3}, **arguments)

    def load(self, folder: Path) -> None:
        assert self.engine.load_checkpoint(folder, stateful=self.stateful()) == {"epoch": 3}

    def forget(self) -> None:
        try:
            self.engine.zero_grad()
        except StateError:  # what was used in backward is not taken back
            self.engine.step()
            self.engine.zero_grad()

    @property
    def in_part(self) -> bool:
        return self.fields.get("update_in_backward", False) and "gradient_clipping" not in self.fields

    def shapes(self) -> dict[str, torch.Tensor]:
        return {name: torch.empty_like(t) for name, t in mixed().state_dict().items() if torch.is_tensor(t)}

    def gathered(self) -> Any:
        with gathered_parameters([*self.model.parameters()]):
            return plain([*self.model.parameters()])

    def close(self) -> None:
        self.engine.close()

    @staticmethod
    def by_checkpoint(run: "Engine", begin: Any, folder: Path, go_on: Callable[[], None], *, wait: bool) -> "Engine":
        run.save(folder, wait=wait)
        go_on()
        other = begin(1)
        for _ in range(3):
            other.step()
        run.engine.wait_for_checkpoint()
        other.load(folder)
        return other

    @staticmethod
    def in_another_stage(run: "Engine", begin: Any, folder: Path, go_on: Callable[[], None]) -> "Engine":
        """From stage 3 or a disk in stage 2 with all in memory, else in stage 3 with parameters on the host."""
        run.save(folder)
        go_on()
        fields = {name: value for name, value in run.fields.items() if name not in {*PARAMETERS_ON_DISK, *STAGE_3}}
        elsewhere = run.fields.get("stage") == 3 or "nvme_path" in run.fields
        other = type(run)(1, **fields, **({} if elsewhere else STAGE_3))
        other.load(folder)
        return other

    resumes: ClassVar = {
        "a checkpoint": partial(by_checkpoint, wait=True),
        "a checkpoint in another stage": in_another_stage,
        "a checkpoint that is written meanwhile": partial(by_checkpoint, wait=False),
        **STATE_DICTS,
        "a copy": partial(by_copy, how=copy.deepcopy),
    }
    wrong: ClassVar = {
        **STEPS, **HYPERPARAMETERS, **MID_STEP, **GROUPS, **STATES, **OTHER_RULES, **SCALES, **FORGERIES,
        **FORGED_SCALES, **SAVES, **WEIGHTS, **RELEASED,
    }  # fmt: skip
    reads: ClassVar = {**READS, **BY_HAND}
    calls: ClassVar = CALLS
    peeks: ClassVar = {
        "state_dict": lambda run: run.optimizer.state_dict()["state"],
        "torch_state_dict": lambda run: run.optimizer.torch_state_dict()["state"],
        "states": lambda run: [dict(run.optimizer.state[p]) for p in run.params()],
    }
    peeked: ClassVar = ("step", "load_state_dict of another")


class EngineByBlocks(Engine):
    """An engine whose micro-batches pass block by block."""

    def update(self, number: int | None = None) -> None:
        seeds = [None if number is None else 100 * number + micro_step for micro_step in range(self.micro_steps)]
        data = [images(seed) for seed in seeds]
        self.engine.accumulate(data, lambda output, _: output.float().pow(2).mean(), blocks=["conv", "norm", "head"])
        self.engine.step()


class EngineOfStates(Engine):
    """An engine around a model that has besides tensors a state of its own."""

    kind = Remembering
    resumes: ClassVar = {name: way for name, way in Engine.resumes.items() if "checkpoint" in name}
    wrong: ClassVar = {**FORGERIES, **FORGED_MODULES}
    reads: ClassVar = {}
    calls: ClassVar = {}


# --- the optimizer alone -----------------------------------------------------------------------------------


def replaced(
    of: Callable[["Alone"], torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor], match: str
) -> Wrong:
    """A step after the memory of a tensor was replaced by another shape or type."""

    def act(run: "Alone", folder: Path) -> None:
        run.given = of(run).data
        of(run).data = change(run.given)
        run.optimizer.step()

    def mend(run: "Alone") -> None:
        of(run).data = run.given

    return Wrong(act, (ParameterError, GradientError), match, lambda run, folder: run.backward(20), mend)


WEIGHT = r"'group 0, parameter \d' is .* and was \(4, 8\) torch.\w+ on (cpu|simulated:0)"
REPLACED = {
    "a parameter of another size": replaced(lambda run: run.model.head.weight, lambda t: t[:2].clone(), WEIGHT),
    "a parameter of another shape": replaced(lambda run: run.model.head.weight, lambda t: t.view(8, 4), WEIGHT),
    "a parameter of another type": replaced(lambda run: run.model.head.weight, lambda t: t.double(), WEIGHT),
    "a gradient of another shape": replaced(
        lambda run: run.model.head.bias.grad,
        lambda t: t.new_ones(3),
        r"gradient has shape torch.Size\(\[3\]\), expected",
    ),
    "a gradient of another type": replaced(
        lambda run: run.model.head.bias.grad, lambda t: t.double(), "gradient has dtype torch.float64, expected torch"
    ),
}


class Alone(TorchRun):
    """An optimizer of ours in a loop of the user's.

    Args:
        kind: the name of its class; ``model_dtype``: of the model.
    """

    def __init__(self, seed: int, *, kind: str = "OffloadedAdamW", model_dtype: str = "float32", **fields: Any) -> None:
        super().__init__(seed, kind=kind, model_dtype=model_dtype, **fields)
        self.model = mixed(seed).to(getattr(torch, model_dtype))
        given = {"lr": 1e-2, "num_threads": 1, "reduce_bucket_size": 64, **fields}
        self.optimizer = getattr(front_end, kind)(self.params(), **given)

    def backward(self, number: int | None = None) -> None:
        x = images(number).to(self.model.head.weight.dtype)
        self.differentiate(self.model(x).float().pow(2).mean())

    def differentiate(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self, number: int | None = None) -> None:
        self.backward(number)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loader.at += 1

    def forget(self) -> None:
        self.optimizer.zero_grad()

    def close(self) -> None:
        self.optimizer.close()

    resumes: ClassVar = {**STATE_DICTS, **COPIES}
    wrong: ClassVar = {**HYPERPARAMETERS, **GROUPS, **STATES, **REPLACED}
    reads: ClassVar = {**READS_OF_STATES}
    calls: ClassVar = {
        "step": Call(lambda run, folder: run.step(2)),
        "state_dict": Call(lambda run, folder: run.optimizer.state_dict()),
        "torch_state_dict": CALLS["torch_state_dict"],
    }


# --- on ranks ----------------------------------------------------------------------------------------------


class OfRanks(Engine):
    """An engine on each of several ranks, which train on different data."""

    def backward(self, number: int | None = None) -> None:
        x = images(number) * (1 + dist.get_rank())
        self.engine.backward(self.engine(x).float().pow(2).mean())

    def everything(self) -> dict[str, Any]:
        found = super().everything()  # statistics are those of rank 0's data in a checkpoint
        return {name: value for name, value in found.items() if not name.startswith("buffer norm.")}

    resumes: ClassVar = {
        name: Engine.resumes[name] for name in ("a checkpoint", "a checkpoint that is written meanwhile")
    }
    wrong: ClassVar = {
        name: Engine.wrong[name]
        for name in ("a step without a backward", "a group with a negative rate", "states: a rate that is NaN")
    }
    reads: ClassVar = {name: READS[name] for name in ("states", "whole_states", "a forward", "whole_state_dict")}
    calls: ClassVar = {}


class OverFsdp(OfRanks):
    """An engine around a model that FSDP2 has sharded."""

    def __init__(self, seed: int, **fields: Any) -> None:
        TorchRun.__init__(self, seed, **fields)
        self.model = torch_rank.make(seed)
        for layer in (*self.model, self.model):
            fully_shard(layer, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
        self.wrap_anew()

    def backward(self, number: int | None = None) -> None:
        images(number)  # seeds the generators
        self.engine.backward(self.engine(torch.randn(8, 32) * (1 + dist.get_rank())).pow(2).mean())

    reads: ClassVar = {name: READS[name] for name in ("states", "whole_states", "whole_state_dict")}
