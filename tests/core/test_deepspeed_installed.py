"""The keys, defaults and schedules of DeepSpeed configurations, against the DeepSpeed that is installed."""

import inspect
import logging
import math
import warnings
from dataclasses import fields
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from frontends.torch import wrap
from offload_core import ConfigWarning
from offload_core.config.options import OffloadConfig
from offload_core.deepspeed.keys import KEYS, VERSION, spellings
from offload_core.deepspeed.schedules import SCHEDULES
from offload_core.step.loss_scale import LossScaler
from tests.support.strategies import law

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    deepspeed = pytest.importorskip("deepspeed")
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime import constants, lr_schedules, precision_config
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS, DeepSpeedConfig
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from pydantic import BaseModel

pytestmark = pytest.mark.skipif(deepspeed.__version__ != VERSION, reason=f"the table is that of DeepSpeed {VERSION}")

ON = {"enabled": True}
SECTIONS = {
    "zero_optimization": (DeepSpeedZeroConfig, {}),
    "zero_optimization.offload_optimizer": (DeepSpeedZeroOffloadOptimizerConfig, {"device": "cpu"}),
    "zero_optimization.offload_param": (DeepSpeedZeroOffloadParamConfig, {"device": "cpu"}),
    "zero_optimization.leaf_module": (DeepSpeedZeroLeafModuleConfig, {}),
    "fp16": (precision_config.DeepSpeedFP16Config, ON),
    "bf16": (precision_config.DeepSpeedBF16Config, ON),
}
"""Each section's model in DeepSpeed, and what switches it on."""
OWN_DEFAULTS = {
    "zero_optimization.stage",  # 2, not 0: the section offloads
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.leaf_module",  # those of transformers: the model may lack them
}
"""Keys whose absence means something else here: memory and time, not results."""


def keys_of(path):
    keys = KEYS
    for name in path.split("."):
        keys = keys[name].keys
    return keys


def nested(path, value):
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def resolved(config):
    """The fields; a warning that the run differs is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        warnings.filterwarnings("error", ".*the run differs", ConfigWarning)
        return OffloadConfig.resolve(config, **({"stage": 3} if "zero_optimization" in config else {}))


@pytest.mark.parametrize("path", SECTIONS)
def test_a_section_has_the_keys_of_the_installed_deepspeed(path):
    model, _ = SECTIONS[path]
    theirs = {field.alias or name for name, field in model.model_fields.items()}
    ours = keys_of(path)
    assert theirs <= {*spellings(ours)}
    assert {*ours} - theirs <= {*_REMOVED_ZERO_CONFIG_KEYS}


class Asked(dict):
    """Notes which keys are asked for."""

    asked: ClassVar[set[str]] = set()

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)

    def keys(self):
        return self


def test_the_top_level_has_the_keys_that_the_installed_deepspeed_asks_for():
    DeepSpeedConfig(Asked(train_batch_size=1))
    assert {*_REMOVED_TOP_LEVEL_CONFIG_KEYS, "gradient_clipping", "torch_autocast"} <= Asked.asked <= {*spellings(KEYS)}


@pytest.mark.parametrize("path", SECTIONS)
def test_a_key_with_its_default_means_what_leaving_it_out_means(path):
    model, switched_on = SECTIONS[path]
    without = resolved(nested(path, switched_on))
    for name, field in model.model_fields.items():
        key = field.alias or name
        default = field.get_default(call_default_factory=True)
        if not {path, f"{path}.{key}"} & OWN_DEFAULTS and key not in switched_on:
            default = default.model_dump() if isinstance(default, BaseModel) else default
            assert resolved(nested(path, {**switched_on, key: default})) == without, key


def test_a_key_of_the_top_level_with_its_default_means_what_leaving_it_out_means():
    named = {key: f"{key.upper()}_DEFAULT" for key in KEYS}
    defaults = {key: getattr(constants, name) for key, name in named.items() if hasattr(constants, name)}
    assert {"gradient_clipping", "managed_gradient_accumulation", "gradient_allreduce_op"} <= {*defaults}
    for key, default in defaults.items():
        assert resolved({"bf16": {}, key: default}) == resolved({"bf16": {}}), key


@pytest.mark.parametrize(
    ("optimizer", "kind", "known"),
    [
        (DeepSpeedCPUAdam, "AdamW", {"betas", "eps", "amsgrad", "bias_correction", "adam_w_mode"}),
        (FusedAdam, "AdamW", {"betas", "eps", "amsgrad", "bias_correction", "adam_w_mode"}),
        (DeepSpeedCPULion, "Lion", {"betas"}),
        (FusedLion, "Lion", {"betas"}),
        (DeepSpeedCPUAdagrad, "Adagrad", {"eps"}),
    ],
)
def test_an_optimizer_with_its_defaults_means_what_leaving_them_out_means(optimizer, kind, known):
    signature = inspect.signature(optimizer).parameters.values()
    params = {each.name: each.default for each in signature if each.default is not each.empty}
    if kind == "AdamW":
        params["adam_w_mode"] = params.pop("adamw_mode", params.get("adam_w_mode"))
    given = {name: value for name, value in params.items() if name in keys_of("optimizer.params")}
    assert {"lr", "weight_decay", *known} <= {*given}
    sections = [{"optimizer": {"type": kind, "params": each}} for each in (given, {})]
    assert resolved(sections[0]) == resolved(sections[1])


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_has_the_arguments_and_defaults_of_the_installed_deepspeed(name):
    theirs = {
        each.name: None if each.default is each.empty else each.default
        for each in inspect.signature(getattr(lr_schedules, name)).parameters.values()
        if each.name not in ("optimizer", "last_batch_iteration")
    }
    ours = {each.name: each.default for each in fields(SCHEDULES[name]) if each.name != "lr"}
    for key, default in theirs.items():
        assert key in ours
        assert default is None or ours[key] == default, key
    assert {*ours} == {*theirs}


ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(["warmup_max_lr", "warmup_min_lr", "lr_range_test_min_lr", "cycle_min_lr"], st.floats(0, 1)),
        **dict.fromkeys(["warmup_min_ratio", "cos_min_ratio", "lr_range_test_step_rate"], st.floats(0, 1)),
        **dict.fromkeys(["warmup_num_steps", "total_num_steps", "lr_range_test_step_size"], st.integers(1, 12)),
        **dict.fromkeys(["cycle_max_lr", "decay_lr_rate"], st.floats(0, 1)),
        "decay_mom_rate": st.floats(0, 0.005),
        **dict.fromkeys(["cycle_first_step_size", "decay_step_size"], st.integers(1, 12)),
        "warmup_type": st.sampled_from(["log", "linear"]),
        "lr_range_test_staircase": st.booleans(),
        "cycle_momentum": st.booleans(),
    },
)


@law(25)
@given(st.sampled_from(sorted(SCHEDULES)), ARGUMENTS)
def test_a_section_gives_each_group_the_rates_of_the_installed_deepspeed(name, arguments):
    theirs = getattr(lr_schedules, name)
    known = inspect.signature(theirs).parameters
    defaults = {"total_num_steps": 5, "cycle_min_lr": 0.1, "cycle_max_lr": 0.5}
    given = {key: value for key, value in {**defaults, **arguments}.items() if key in known}
    models = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    group, own = {"params": [models[0].weight]}, {"params": [models[0].bias], "lr": 0.25}
    torchs = torch.optim.AdamW([dict(group), dict(own)], lr=0.125)
    engine = wrap(
        models[1],
        {"optimizer": {"type": "AdamW", "params": {"lr": 0.125}}, "scheduler": {"type": name, "params": given}},
        params=[{"params": [models[1].weight]}, {"params": [models[1].bias], "lr": 0.25}],
    )
    schedule = theirs(torchs, **given)
    for _ in range(20):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        for mine, their in zip(engine.optimizer.param_groups, torchs.param_groups, strict=True):
            assert mine["lr"] == pytest.approx(their["lr"], rel=1e-9, abs=1e-15)
            assert mine["betas"] == pytest.approx(their["betas"])
        schedule.step()


# --- training --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """DeepSpeed as the only rank on the CPU."""
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**names, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "DS_ACCELERATOR": "cpu"}.items():
            patch.setenv(name, value)
        patch.setattr(deepspeed.utils.logger, "level", logging.ERROR)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            deepspeed.init_distributed("gloo", verbose=False)
            yield
        dist.destroy_process_group()


@law(50)
@given(st.lists(st.sampled_from([False] * 5 + [True]), max_size=60), st.integers(1, 4), st.integers(1, 3))
def test_the_loss_scale_of_the_installed_deepspeed_doubles_one_update_later(alone, overflows, window, hysteresis):
    """At the start and after each overflow: without the first good update there, both are the same."""
    theirs = DynamicLossScaler(2.0**8, window, 1.0, hysteresis, False, raise_error_at_min_scale=False)
    ours = LossScaler(2.0**8, window, least=1.0, hysteresis=hysteresis)
    first = True
    for overflow in overflows:
        theirs.update_scale(overflow)
        if overflow or not first:
            ours.update(overflow=overflow)
        assert theirs.cur_scale == ours.scale
        first = overflow


ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}


@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True], ids=["engine.backward", "loss.backward"])
@pytest.mark.parametrize("clips", [True, False], ids=["clips by default", "clips not"])
@pytest.mark.parametrize("bf16", [{}, ON, {**ON, "check_grad_overflow": False}], ids=["fp32", "bf16", "unchecked"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.filterwarnings("ignore")
def test_a_configuration_trains_as_in_the_installed_deepspeed(stage, bf16, clips, plain, alone):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": ADAM,
        "zero_optimization": {"stage": stage},
        "bf16": bf16,
        **({} if clips else {"gradient_clipping": 0}),
    }
    if clips and len(bf16) > 1 and stage < 3:
        with pytest.warns(ConfigWarning, match="the run differs .*: bf16.check_grad_overflow .*gradient_clipping 0"):
            wrap(torch.nn.Linear(8, 8), config)
        return
    torch.manual_seed(0)
    start = torch.nn.Linear(8, 8).state_dict()
    batches = torch.randn(6, 2, 8) * 4
    batches[2, 0, 0] = math.inf

    def norms(engine, norm_of):
        for i, x in enumerate(batches.bfloat16() if bf16 else batches):
            loss = engine(x).float().pow(2).mean()
            loss.backward() if plain else engine.backward(loss)
            report = engine.step()
            if i % 2 and i != 3:  # update 1 has an inf
                yield norm_of(report)

    theirs, ours = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    for model in (theirs, ours):
        model.load_state_dict(start)
    engine, *_ = deepspeed.initialize(model=theirs, model_parameters=theirs.parameters(), config=config)
    their_norms = list(norms(engine, lambda _: float(engine.get_global_grad_norm())))
    mine = wrap(ours, config)
    close = {"rtol": 1e-2, "atol": 1e-2} if bf16 else {"rtol": 1e-5, "atol": 1e-6}
    my_norms = list(norms(mine, lambda report: report.grad_norm))
    examined = mine.offload_config.skip_nonfinite
    assert my_norms == (pytest.approx(their_norms, close["rtol"]) if examined else [None, None])
    assert mine.optimizer.updates == engine.global_steps - engine.skipped_steps
    with deepspeed.zero.GatheredParameters([*theirs.parameters()], enabled=stage == 3):
        for their, our in zip(theirs.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(our, their, equal_nan=True, **close)
