"""DeepSpeed configurations: what each key becomes, what is refused, and the files as they are written."""

import json
import math
import pickle
import re
import warnings
from fractions import Fraction
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import frontends.jax
from frontends.torch import OffloadedAdamW, wrap
from offload_core import ConfigError, ConfigWarning
from offload_core.config.options import FIELDS, OffloadConfig
from offload_core.deepspeed.keys import AUTO, KEYS, walk
from offload_core.deepspeed.schedules import SCHEDULES
from offload_core.deepspeed.translation import OWN_LR
from offload_core.lr_schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from tests.support.strategies import law
from tests.support.torch_models import assert_same, loss_of, make

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "deepspeed.md"


def read(config, **overrides):
    """The configuration, with what is ignored let pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        return OffloadConfig.resolve(config, **overrides)


def changed(config, *, default=None, **overrides):
    """The fields that are not those of a DeepSpeed configuration that asks for nothing. The size of buckets, which
    follows ``offload_optimizer``, only where it was given."""
    got, default = read(config, **overrides), default or OffloadConfig.resolve({"bf16": {}})
    found = {name: getattr(got, name) for name in FIELDS if getattr(got, name) != getattr(default, name)}
    return {name: value for name, value in found.items() if name != "reduce_bucket_size" or type(value) is int}


def ignored(config, **overrides):
    """The paths of one warning."""
    with pytest.warns(ConfigWarning) as caught:
        OffloadConfig.resolve(config, **overrides)
    (warning,) = caught
    text = str(warning.message).partition("without effect here: ")[2]
    return {part.partition(" (")[0] for part in text.split("; ")}


def written(folder, text):
    path = folder / "ds_config.json"
    path.write_text(text)
    return path


# --- examples of tutorials, as they stand there ----------------------------------------------------

OFFLOAD_TUTORIAL = """{
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {
            "device": "cpu",
        }
        "contiguous_gradients": true,
        "overlap_comm": true
    }
}"""
STAGE_1_TUTORIAL = """{
    "zero_optimization": {
        "stage":1,
        "reduce_bucket_size": 5e8
    }
}"""
STAGE_2_TUTORIAL = """{
    "zero_optimization": {
        "stage":2,
        "contiguous_gradients": true,
        "overlap_comm": true,
        "reduce_scatter": true,
        "reduce_bucket_size": 5e8,
        "allgather_bucket_size": 5e8
    }
}"""
STAGE_3_TUTORIAL = """{
  "zero_optimization": {
    "stage": 3,
    "cpu_offload": true,
    "cpu_offload_params": true,
    "overlap_comm": true,
    "contiguous_gradients": true,
    "stage3_max_live_parameters": 6000000,
    "stage3_max_reuse_distance": 100000000,
    "stage3_prefetch_bucket_size": 200000,
    "stage3_param_persitance_threshold": 100000,
    "reduce_bucket_size": 3000000,
    "sub_group_size": 1e6
  }
}"""
BLOG_POST = """{
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": 4,
  "optimizer": {
    "type": "AdamW",
    "params": {
      "lr": 5e-5
    }
  },
  "zero_optimization": {
    "stage": 2,
    "offload_optimizer": {
      "device": "cpu",
      "pin_memory": true
    },
    "allgather_partitions": true,
    "allgather_bucket_size": 2e8,
    "reduce_scatter": true,
    "reduce_bucket_size": 2e8,
    "overlap_comm": true,
    "contiguous_gradients": true
  },
  "fp16": {
    "enabled": true
  },
  "gradient_clipping": 1.0
}"""
HALF = {"loss_scale_window": 1000, "loss_scale_hysteresis": 2, "param_dtype": "float16"}
STAGE_3 = {
    "stage": 3,
    "offload_param": "cpu",
    "max_live_parameters": 6_000_000,
    "max_reuse_distance": 100_000_000,
    "prefetch_bucket_size": 200_000,
    "reduce_bucket_size": 3_000_000,
}


@pytest.mark.parametrize(
    ("text", "fields", "without_effect"),
    [
        (OFFLOAD_TUTORIAL, {}, {"contiguous_gradients"}),
        (STAGE_1_TUTORIAL, {"stage": 1, "reduce_bucket_size": 500_000_000}, set()),
        (
            STAGE_2_TUTORIAL,
            {"reduce_bucket_size": 500_000_000},
            {"contiguous_gradients", "allgather_bucket_size"},
        ),
        (STAGE_3_TUTORIAL, STAGE_3, {"contiguous_gradients", "sub_group_size"}),
        (
            BLOG_POST,
            {"lr": 5e-5, "weight_decay": 0.0, "reduce_bucket_size": 200_000_000, **HALF},
            {"contiguous_gradients", "allgather_bucket_size"},
        ),
    ],
    ids=["offload", "stage 1", "stage 2", "stage 3", "blog post"],
)
def test_the_examples_of_tutorials_load_as_they_stand(text, fields, without_effect, tmp_path):
    path = written(tmp_path, text)
    assert changed(path) == changed(str(path)) == fields
    if without_effect:
        assert ignored(path) == {f"zero_optimization.{name}" for name in without_effect}


def test_files_have_comments_and_lack_commas(tmp_path):
    path = written(
        tmp_path, "\ufeff{ // one\n # two\n /* three */ bf16: {enabled: true},\n gradient_clipping: 2.0\n}\n"
    )
    assert changed(path) == {"param_dtype": "bfloat16", "gradient_clipping": 2.0}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"bf16": {"enabled": true, "enabled": false}}', "ds_config.json: 'enabled' given more than once"),
        ('{"bf16": ', "'.*ds_config.json' cannot be read .*line 1"),
        ('{"gradient_clipping": 1e999}', "'.*ds_config.json' cannot be read .*infinity"),
        ('{"train_batch_size": ' + "9" * 5000, "'.*ds_config.json' cannot be read .*4300 digits"),
        ("{a: '''", "'.*ds_config.json' cannot be read .*index out of range"),
        ('{"a": ' * 10_000, "'.*ds_config.json' cannot be read .*recursion"),
        ('{"a": 1, "a": 1, ' * 100 + "}", "'.*ds_config.json' cannot be read|given more than once"),
        ("[1]", "ds_config.json: got list, expected an object"),
        ("", "ds_config.json: it has no keys"),
        ('{"lr": 1e-3}', "ds_config.json: lr: unknown key; DeepSpeed has it as 'optimizer.params.lr'"),
    ],
    ids=["twice", "cut off", "infinite", "digits", "quotes", "deep", "pairs", "list", "empty", "fields"],
)
def test_a_file_that_is_no_configuration_is_refused(text, match, tmp_path):
    with pytest.raises(ConfigError, match=match):
        OffloadConfig.resolve(written(tmp_path, text))


def test_a_path_that_leads_nowhere_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.json' cannot be read .*No such file.*expected the path"):
        wrap(make(), tmp_path / "nowhere.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match=r"binary.json' cannot be read"):
        wrap(make(), tmp_path / "binary.json")


NESTED: list = []
NESTED.append([[NESTED]])
DEEP: list = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.draws(21)
@pytest.mark.parametrize(
    "value",
    [
        lambda: 10**5000,
        lambda: DEEP,
        lambda: NESTED,
        lambda: np.ones(3),
        lambda: torch.ones(3),
        lambda: {3: DEEP},
        lambda: "x" * 10**6,
    ],
)
@pytest.mark.parametrize("make_config", [
    lambda value: {"train_batch_size": value}, lambda value: {"gradient_clipping": value}, lambda value: {"lr": value},
    lambda value: {"optimizer": value}, lambda value: {"optimizer": {"type": value}}, lambda value: {"amp": value},
    lambda value: {"optimizer": {"type": "Adam", "params": {"betas": [value, value], "lr": "auto"}}},
    lambda value: {"zero_optimization": {"offload_optimizer": {"device": value}}}, lambda value: {"loss_scale": value},
    lambda value: {"fp16": {"enabled": True, "hysteresis": value}}, lambda value: {"stage": value},
    lambda value: {"schedule": value}, lambda value: {"betas": (value, 0.9)},
    lambda value: {"reduce_bucket_size": value}, lambda value: {"scheduler": {"type": value}},
])  # fmt: skip
def test_a_value_of_any_size_and_depth_is_refused_by_name(make_config, value):
    """Python refuses to write a number of 5,000 digits, and the repr of a deep list fails."""
    with pytest.raises(ConfigError) as caught:
        read(make_config(value()))
    assert len(str(caught.value)) < 2000


@pytest.mark.draws(1)
@pytest.mark.parametrize("key", [10**5000, "x" * 10**6, (1, 2), b"x", None], ids=lambda key: type(key).__name__)
def test_a_key_of_any_kind_is_refused_by_name(key):
    for config in ({key: 1}, {"zero_optimization": {key: 1}}, {"bf16": {"enabled": True}, key: 1}):
        with pytest.raises(ConfigError, match="unknown"):
            OffloadConfig.resolve(config)


def test_a_file_with_many_keys_twice_names_some(tmp_path):
    pairs = ", ".join(f'"{i}": 1' for i in range(1000))
    with pytest.raises(ConfigError, match="'0', '1', '10', '100', '101', … given more than once") as caught:
        OffloadConfig.resolve(written(tmp_path, f"{{{pairs}, {pairs}}}"))
    assert len(str(caught.value)) < 1000


# --- two kinds of dict -----------------------------------------------------------------------------


def test_a_dict_of_fields_stays_one():
    shared, own = {"gradient_clipping": 1.0, "gradient_accumulation_steps": 2}, OffloadConfig()
    assert changed(shared, default=own) == shared
    assert changed({**shared, "stage": 1}, default=own) == {**shared, "stage": 1}
    assert changed({}, default=own) == {}


@law(100)
@given(
    st.sets(st.sampled_from(sorted({*FIELDS} - {*KEYS})), min_size=1),
    st.sets(st.sampled_from(sorted({*KEYS} - {*FIELDS})), min_size=1),
)
def test_a_mixture_of_both_kinds_is_refused(ours, theirs):
    with pytest.raises(ConfigError, match="is a field of OffloadConfig and .* a key of DeepSpeed's"):
        OffloadConfig.resolve({**dict.fromkeys(ours, 1), **dict.fromkeys(theirs, 1)})


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"zero_optimisation": {"stage": 2}}, "unknown configuration field .*did you mean 'zero_optimization'"),
        ({"overlap_comm": True}, "DeepSpeed has it as 'zero_optimization.overlap_comm'"),
        ({"bf16": {}, "zero_optimisation": {}}, "zero_optimisation: unknown key; did you mean 'zero_optimization'"),
        ({"bf16": {}, 3: 4}, "3: unknown key"),
        ({"zero_optimization": {"stage3_max_live_params": 1}}, "did you mean 'stage3_max_live_parameters'"),
        ({"zero_optimization": {"gradient_clipping": 1}}, "DeepSpeed has it as 'gradient_clipping'"),
        ({"fp16": {"loss_scale_windw": 1}}, "fp16.loss_scale_windw: unknown key; did you mean 'loss_scale_window'"),
    ],
    ids=str,
)
def test_unknown_keys_are_named_with_the_nearest_known(config, match):
    with pytest.raises(ConfigError, match=match):
        OffloadConfig.resolve(config)


def test_a_key_of_deepspeeds_that_is_given_as_a_field_is_named():
    with pytest.raises(ConfigError, match="'zero_optimization'; it is a key of DeepSpeed's: give such a"):
        OffloadConfig.resolve(None, zero_optimization={})


# --- what keys become ------------------------------------------------------------------------------


OF_SGD = {"optimizer": "sgd", "betas": None, "eps": None, "weight_decay": 0.0, "momentum": 0.0}
OF_LION = {"optimizer": "lion", "eps": None, "weight_decay": 0.0}
OF_ADAGRAD = {"optimizer": "adagrad", "betas": None, "eps": 1e-10, "lr": 1e-2, "weight_decay": 0.0}


ON_DISK = {"device": "nvme", "nvme_path": "/a"}
STATES_ON_DISK = {"offload_optimizer": "nvme", "nvme_path": ("/a",)}
ALL_ON_DISK = {**STATES_ON_DISK, "stage": 3, "offload_param": "nvme"}
ON_DEVICE = {"offload_optimizer": None}
ON_HOST = {"stage": 3, "offload_param": "cpu"}


def zero(**keys):
    return {"zero_optimization": keys}


def optimizer(kind="AdamW", **params):
    return {"optimizer": {"type": kind, "params": params}}


def half(**keys):
    return {"fp16": {"enabled": True, **keys}}


def unchecked(**keys):
    return {"bfloat16": {"enabled": True, "check_grad_overflow": False}, **zero(**keys)}


@pytest.mark.draws(12)
@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (zero(stage=0), {"stage": 1}),
        ({"zero_optimization": True}, {"stage": 1}),
        (zero(stage=1.0), {"stage": 1}),
        (zero(overlap_comm=False), {"schedule": "serial"}),
        (zero(overlap_comm=AUTO, reduce_bucket_size=AUTO, stage=AUTO), {}),
        (zero(reduce_bucket_size=2e6), {"reduce_bucket_size": 2_000_000}),
        (zero(offload_optimizer={"device": "none"}), ON_DEVICE),
        (zero(offload_optimizer={"device": "none", "ratio": 0.5}), ON_DEVICE),
        (zero(offload_optimizer={}), ON_DEVICE),
        (zero(offload_optimizer=None), {}),
        (zero(cpu_offload=False), ON_DEVICE),
        (zero(offload_optimizer={"device": "cpu", "ratio": 1}), {}),
        (zero(offload_optimizer={"device": "cpu", "ratio": 0.3}), {"device_states_bytes": 0.7}),
        (zero(offload_optimizer={"device": "cpu", "ratio": 0}), {"device_states_bytes": 1.0}),
        (zero(offload_optimizer={**ON_DISK, "ratio": 0.75}), {**STATES_ON_DISK, "device_states_bytes": 0.25}),
        (zero(stage=3, offload_optimizer={"device": "none"}, offload_param={"device": "cpu"}), ON_HOST),
        (zero(stage=3, offload_optimizer={"ratio": 0.5, "device": "cpu"}, offload_param={"device": "cpu"}), ON_HOST),
        (zero(offload_optimizer={"device": "cpu", "pin_memory": False}), {"pin_memory": False}),
        (zero(cpu_offload=True, cpu_offload_use_pin_memory=False), {"pin_memory": False}),
        (zero(stage=3, offload_param={"device": "cpu"}), {"stage": 3, "offload_param": "cpu"}),
        (zero(stage=3, offload_param={"device": "none"}), {"stage": 3}),
        (zero(offload_optimizer=ON_DISK), STATES_ON_DISK),
        (zero(stage=1, offload_optimizer={**ON_DISK, "device": "NVMe"}), {**STATES_ON_DISK, "stage": 1}),
        (zero(stage=3, offload_optimizer=ON_DISK, offload_param=ON_DISK), ALL_ON_DISK),
        (zero(stage=3, offload_optimizer=ON_DISK, offload_param={"device": "nvme"}), ALL_ON_DISK),
        (zero(stage=3, offload_optimizer={"device": "nvme"}, offload_param=ON_DISK), ALL_ON_DISK),
        (
            zero(stage=3, offload_optimizer=ON_DISK, offload_param={**ON_DISK, "nvme_path": "/a/"}),
            {**ALL_ON_DISK, "nvme_path": ("/a/",)},
        ),
        (
            zero(stage=3, offload_optimizer=ON_DISK, offload_param={**ON_DISK, "nvme_path": "/b"}),
            {**ALL_ON_DISK, "nvme_path": ("/a", "/b")},
        ),
        (
            zero(stage=3, offload_optimizer=ON_DISK, offload_param={"device": "cpu", "nvme_path": "/b"}),
            {**ALL_ON_DISK, "offload_param": "cpu"},
        ),
        (zero(stage=3, offload_optimizer={"device": "cpu", "nvme_path": "/a"}), {"stage": 3}),
        (zero(offload_optimizer={"device": "none", "nvme_path": "/a"}), ON_DEVICE),
        (zero(stage=3, cpu_offload_param=True), {"stage": 3, "offload_param": "cpu"}),
        (
            zero(stage=3, leaf_module={"classes": ["Block"], "name_suffixes": ["mlp"], "names": []}),
            {"stage": 3, "leaf_modules": ("Block", "mlp")},
        ),
        (zero(stage=3, stage3_param_persistence_threshold=7), {"stage": 3, "param_persistence_threshold": 7}),
        (zero(stage=3, param_persistence_threshold=7), {"stage": 3, "param_persistence_threshold": 7}),
        (zero(stage=2, stage3_max_live_parameters=7), {}),
        (optimizer(), {"weight_decay": 0.0}),
        (
            optimizer(weight_decay=0.3, lr=1, betas=[0.8, 0.9], eps=1e-6),
            {"weight_decay": 0.3, "lr": 1, "betas": (0.8, 0.9), "eps": 1e-6},
        ),
        (optimizer(betas=AUTO, eps=AUTO, torch_adam=True), {}),
        (optimizer("Adam"), {"weight_decay": 0.0}),
        (optimizer("Adam", adam_w_mode=False, torch_adam=True), {"weight_decay": 0.0, "adam_mode": "adam"}),
        ({"optimizer": None, "scheduler": None, "gradient_clipping": 0}, {"gradient_clipping": None}),
        ({"optimizer": {"type": "adamw"}, "gradient_clipping": 0.5}, {"weight_decay": 0.0, "gradient_clipping": 0.5}),
        (optimizer("SGD", momentum=0.9, nesterov=True), {**OF_SGD, "momentum": 0.9, "nesterov": True}),
        (optimizer("sgd", momentum=0.9, dampening=0.5), {**OF_SGD, "momentum": 0.9, "dampening": 0.5}),
        (optimizer("SGD", weight_decay=0.5), {**OF_SGD, "weight_decay": 0.5}),
        (optimizer("Lion"), OF_LION),
        (optimizer("DeepSpeedCPULion", betas=[0.9, 0.99]), {**OF_LION, "betas": (0.9, 0.99)}),
        (optimizer("Adagrad"), OF_ADAGRAD),
        (optimizer("DeepSpeedCPUAdagrad", lr=0.5, eps=0.1), {**OF_ADAGRAD, "lr": 0.5, "eps": 0.1}),
        (optimizer("Adagrad", lr_decay=0.1), {**OF_ADAGRAD, "lr_decay": 0.1}),
        (half(), HALF),
        (half(loss_scale=128), {**HALF, "loss_scale": 128}),
        (
            half(
                initial_scale_power=32,
                loss_scale_window=7,
                hysteresis=3,
                consecutive_hysteresis=True,
                min_loss_scale=0.5,
            ),
            {
                "param_dtype": "float16",
                "initial_loss_scale": 2.0**32,
                "loss_scale_window": 7,
                "loss_scale_hysteresis": 3,
                "loss_scale_consecutive_hysteresis": True,
                "min_loss_scale": 0.5,
            },
        ),
        ({"fp16": {"enabled": False, "loss_scale_window": 7}, "bf16": {"enabled": False}}, {}),
        ({"fp16": {"enabled": AUTO}, "bf16": {"enabled": True}}, {"param_dtype": "bfloat16"}),
        (
            {"fp16": {"enabled": AUTO}, "bf16": {"enabled": AUTO}},
            {name: HALF[name] for name in HALF if name != "param_dtype"},
        ),
        (unchecked(stage=1), {"stage": 1, "param_dtype": "bfloat16", "skip_nonfinite": False}),
        (unchecked(stage=2), {"param_dtype": "bfloat16", "skip_nonfinite": False}),
        (unchecked(stage=3), {"stage": 3, "param_dtype": "bfloat16"}),
        (unchecked(), {"param_dtype": "bfloat16"}),
        (zero(stage=3, leaf_module={"names": "mlp"}), {"stage": 3, "leaf_modules": ("mlp",)}),
        ({"data_types": {"param_dtype": "fp32"}}, {"param_dtype": "float32"}),
        (
            {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}},
            {"param_dtype": "bfloat16"} | {"buffer_dtype": "bfloat16"},
        ),
        ({"communication_data_type": "fp16"}, {"communication_dtype": "float16"}),
        ({"fp32_allreduce": True}, {"communication_dtype": "float32"}),
    ],
    ids=str,
)
def test_what_keys_become(config, fields):
    before = json.dumps(config)
    assert changed(config) == fields
    assert json.dumps(config) == before


@pytest.mark.parametrize(
    ("config", "overrides", "fields"),
    [
        (optimizer(lr=AUTO, weight_decay=AUTO), {"lr": 2.0, "weight_decay": 0.5}, {"lr": 2.0, "weight_decay": 0.5}),
        ({"gradient_clipping": AUTO, "bf16": {}}, {"gradient_clipping": None}, {"gradient_clipping": None}),
        (unchecked(stage=3), {"stage": 2}, {"param_dtype": "bfloat16", "skip_nonfinite": False}),
        (zero(stage=2, stage3_max_live_parameters=7), {"stage": 3}, {"stage": 3, "max_live_parameters": 7}),
        ({"fp16": {"enabled": AUTO, "loss_scale": 8}}, {"param_dtype": "bfloat16"}, {"param_dtype": "bfloat16"}),
        ({"fp16": {"enabled": AUTO, "loss_scale": 8}}, {"param_dtype": "float16"}, {"loss_scale": 8, **HALF}),
        ({"fp16": {"enabled": True}}, {"loss_scale_window": 5}, {**HALF, "loss_scale_window": 5}),
        (zero(stage=3, offload_param={"device": "cpu"}), {"stage": 2, "offload_param": None}, {}),
        (zero(offload_optimizer=ON_DISK), {"offload_optimizer": "cpu"}, {}),
        (zero(offload_optimizer={}), {"offload_optimizer": "cpu"}, {}),
        (zero(offload_optimizer={"device": "cpu", "ratio": 0.5}), {"offload_optimizer": None}, ON_DEVICE),
        (zero(offload_optimizer={"device": "cpu", "ratio": 0}), {"device_states_bytes": 7}, {"device_states_bytes": 7}),
        (zero(stage=3, offload_optimizer={}), {"offload_param": "cpu"}, ON_HOST),
        (zero(offload_optimizer=ON_DISK), {"nvme_path": Path("/c")}, {**STATES_ON_DISK, "nvme_path": ("/c",)}),
        (
            zero(offload_optimizer={"device": "nvme"}),
            {"nvme_path": "/a", "nvme_host_bytes": 5},
            {**STATES_ON_DISK, "nvme_host_bytes": 5},
        ),
        (zero(offload_optimizer={"device": "cpu", "nvme_path": "/a"}), {"offload_optimizer": "nvme"}, STATES_ON_DISK),
        (
            zero(stage=3, offload_param=ON_DISK),
            {"offload_optimizer": "nvme"},
            ALL_ON_DISK,
        ),
        (
            zero(stage=3, offload_optimizer=ON_DISK, offload_param=ON_DISK),
            {"offload_param": None},
            {**STATES_ON_DISK, "stage": 3},
        ),
        (
            zero(stage=3, offload_optimizer=ON_DISK, offload_param=ON_DISK),
            {"offload_param": "cpu", "offload_optimizer": "cpu"},
            {"stage": 3, "offload_param": "cpu"},
        ),
    ],
    ids=str,
)
def test_fields_beside_it_win_and_stand_for_auto(config, overrides, fields):
    assert changed(config, **overrides) == fields


def test_every_auto_that_is_missing_is_named_at_once():
    config = {
        **optimizer(lr=AUTO, betas=AUTO, weight_decay=AUTO),
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": AUTO, "warmup_max_lr": AUTO, "total_num_steps": 9},
        },
        "gradient_clipping": AUTO,
        "gradient_accumulation_steps": AUTO,
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "fp16": {"enabled": AUTO},
    }
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.resolve(config)
    named, _, how = str(caught.value).partition("; expected values in the configuration; or beside it: ")
    assert set(
        named.removeprefix("DeepSpeed configuration: 'auto' stands for values that are unknown here: ").split(", ")
    ) == {
        "optimizer.params.lr",
        "optimizer.params.weight_decay",
        "scheduler.params.warmup_num_steps",
        "gradient_clipping",
        "gradient_accumulation_steps",
    }
    assert how == "wrap(..., gradient_accumulation_steps=..., weight_decay=..., lr=..., gradient_clipping=...)"
    with pytest.raises(ConfigError, match="unknown here: fp16.enabled; .*wrap.*param_dtype="):
        OffloadConfig.resolve({"fp16": {"enabled": AUTO, "loss_scale": 8}})


SCHEDULED = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}}


@pytest.mark.draws(10)
@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled and bf16.enabled are both true"),
        ({**half(), "data_types": {"param_dtype": "bf16"}}, r"fp16.enabled \(float16\) and data_types.param_dtype"),
        (
            {"fp32_allreduce": True, "communication_data_type": "bf16"},
            "fp32_allreduce and communication_data_type differ",
        ),
        (zero(stage=2, offload_param={"device": "cpu"}), "offload_param: got 'cpu' with stage 2, expected stage 3"),
        (zero(cpu_offload_params=True), "offload_param: got 'cpu' with stage left out, expected stage 3"),
        (
            zero(offload_optimizer={"device": "nvme"}),
            "offload_optimizer.nvme_path: missing, with device 'nvme'; expected",
        ),
        (
            zero(offload_optimizer={"device": "nvme", "nvme_path": ""}),
            "nvme_path: got '', expected the name of a folder",
        ),
        (
            zero(offload_optimizer={"device": "nvme", "nvme_path": ["/a"]}),
            r"nvme_path: got \['/a'\], expected the name",
        ),
        *(
            (zero(offload_optimizer={"device": "cpu", "ratio": ratio}), f"ratio: got {ratio!r}, expected a {what}")
            for ratio, what in {1.5: "finite number >= 0 and <= 1", -1: "finite number >= 0", "half": "number"}.items()
        ),
        (zero(offload_optimizer={"device": "ssd"}), "device: got 'ssd', expected one of 'none', 'cpu', 'nvme'"),
        (
            zero(stage=3, offload_param=ON_DISK),
            "offload_param.device: got 'nvme' with states in host memory: .*'nvme', too",
        ),
        (
            zero(stage=3, offload_param=ON_DISK, offload_optimizer={"device": "cpu", "nvme_path": "/a"}),
            "offload_param.device: got 'nvme' with states in host memory",
        ),
        (
            zero(stage=2, offload_param=ON_DISK, offload_optimizer=ON_DISK),
            "offload_param: got 'nvme' with stage 2, expected",
        ),
        (
            zero(offload_optimizer={"device": "nvme", "max_in_cpu": 1}),
            "max_in_cpu: unknown key; DeepSpeed has it as 'zero",
        ),
        (zero(cpu_offload=True, offload_optimizer={}), "offload_optimizer and .*cpu_offload mean the same"),
        (
            zero(cpu_offload_param=True, cpu_offload_params=True),
            "cpu_offload_params and .*cpu_offload_param are two names of one key",
        ),
        (
            zero(stage=3, offload_param={"pin_memory": True}, offload_optimizer={"pin_memory": False}),
            "differ; expected one",
        ),
        (zero(stage=4), "zero_optimization.stage: got 4, expected 0, 1, 2 or 3"),
        (zero(stage="2"), "zero_optimization.stage: got '2', expected an integer"),
        (zero(reduce_bucket_size=0), "reduce_bucket_size: got 0, expected an integer of at least 1"),
        (zero(reduce_bucket_size=1.5), "reduce_bucket_size: got 1.5, expected an integer"),
        (zero(overlap_comm="yes"), "overlap_comm: got 'yes', expected True or False"),
        (zero(offload_optimizer="cpu"), "zero_optimization.offload_optimizer: got 'cpu', expected an object"),
        ({"optimizer": {"params": {}}}, "optimizer.type: missing; expected 'AdamW', 'Adam', 'SGD', 'Lion', 'Ada"),
        (optimizer("Lion", eps=1e-8), "optimizer.params.eps: type 'lion' has lr, betas, weight_decay"),
        (optimizer("AdamW", momentum=0.9), "optimizer.params.momentum: type 'adamw' has lr, betas"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type: got 'Lamb', expected one of 'adam', 'adamw'"),
        (optimizer(adam_w_mode=False), "adam_w_mode: got False with type 'AdamW'; expected type 'Adam'"),
        (optimizer(lr=-1), "optimizer.params.lr: got -1, expected a finite number >= 0"),
        (optimizer(betas=[0.9]), r"optimizer.params.betas: got \[0.9\], expected a pair"),
        (optimizer(betas=[0.9, 1.0]), "optimizer.params.betas: got 1.0"),
        (optimizer(max_grad_norm=1.0), "max_grad_norm: got 1.0, which is not supported: .*gradient_clipping"),
        (optimizer(amsgrad=True), "amsgrad: got True, which is not supported"),
        (optimizer(bias_correction=False), "bias_correction: got False, which is not supported"),
        ({"gradient_allreduce_op": "max"}, "gradient_allreduce_op: got 'max', expected one of 'mean', 'sum'"),
        ({"managed_gradient_accumulation": False}, r"managed_gradient_acc.*: got False, .*step\(boundary=True\)"),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "torch_autocast: got .*leave it out, and use"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel: got .*only data parallelism"),
        ({"amp": {"enabled": True}}, "amp: got .* not supported: .*fp16 or bf16"),
        ({"communication_data_type": "int8"}, "communication_data_type: got 'int8', expected one of 'fp32'"),
        (half(initial_scale_power=128), "fp16.initial_scale_power: got 128, expected at most 127"),
        (half(hysteresis=0), "fp16.hysteresis: got 0, expected an integer of at least 1"),
        ({"gradient_clipping": "1.0", "bf16": {}}, "gradient_clipping: got '1.0', expected a number"),
        ({"scheduler": {"type": "WarmupLr"}}, "scheduler.type: got 'WarmupLr'; did you mean 'WarmupLR'.*torch.optim"),
        ({"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 9}}}, "WarmupLR has no such key"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "scheduler.params.total_num_steps: missing; WarmupDecayLR needs it"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
            "scheduler.params.warmup_num_steps: got 0",
        ),
        ({"scheduler": {"params": {"warmup_max_lr": 1e-3}}}, "scheduler.type: missing; expected one of 'WarmupLR'"),
        (optimizer(lr=10**400), "optimizer.params.lr: got 10+, expected a number"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [1, 2]}}},
            r"warmup_max_lr: got \[1, 2\], expected a n",
        ),
    ],
    ids=str,
)
def test_wrong_values_and_contradictions_are_refused(config, match):
    with pytest.raises(ConfigError, match=f"^DeepSpeed configuration: .*{match}"):
        OffloadConfig.resolve(config)


@law(200)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 5), st.sets(st.integers(0, 2)), st.booleans())
def test_two_batch_sizes_give_the_third(micro, steps, ranks, left_out, auto):
    sizes = {
        "train_batch_size": micro * steps * ranks,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    given = {name: value for i, (name, value) in enumerate(sizes.items()) if i not in left_out}
    config = {**(dict.fromkeys(sizes, AUTO) if auto else {}), "bf16": {}, **given}
    if auto and 2 in left_out and left_out != {2}:
        with pytest.raises(ConfigError, match="'auto' .*gradient_accumulation_steps;"):
            read(config, world_size=ranks)
    else:
        derived = steps if 2 not in left_out or left_out == {2} else 1
        assert read(config, world_size=ranks).gradient_accumulation_steps == derived
        if 0 not in left_out:  # no odd number is a multiple
            config["train_batch_size"] = 2 * micro * steps * ranks + 1
            with pytest.raises(ConfigError, match=r"train_batch_size: got \d+, expected .*ranks \("):
                read(config, world_size=2 * ranks)
            config["train_batch_size"] = micro * steps * ranks
    assert read(config, world_size=ranks, gradient_accumulation_steps=steps).gradient_accumulation_steps == steps


# --- schedules -------------------------------------------------------------------------------------


def close(value, expected):
    return math.isclose(value, expected, rel_tol=1e-12, abs_tol=1e-18)


@law(100)
@given(st.integers(2, 30), st.integers(-30, 30), st.integers(0, 70))
def test_warmup_follows_a_line_or_a_logarithm_and_decays_along_a_line(length, rest, n):
    low, high, total = Fraction(1, 64), Fraction(1, 4), max(1, length + rest)
    step = n - 1  # DeepSpeed sets the rate of step s after update s
    line = low + (high - low) * Fraction(min(max(step, 0), length), length)
    args = {"warmup_min_lr": float(low), "warmup_max_lr": float(high), "warmup_num_steps": length}
    assert close(WarmupLR(**args, warmup_type="linear")(n), float(line))
    down = low + (high - low) * max(Fraction(0), Fraction(total - step, max(1, rest)))
    decaying = WarmupDecayLR(**args, warmup_type="linear", total_num_steps=total)
    assert close(decaying(n), float(line if step < length else down))
    for schedule in (WarmupLR(**args), WarmupDecayLR(**args, total_num_steps=total)):
        if 0 <= step < length:  # length ** height == step + 1
            height = (schedule(n) - float(low)) / float(high - low)
            assert math.isclose(length**height, step + 1, rel_tol=1e-9)
    assert WarmupLR(**args)(0) == WarmupLR(**args)(1) == float(low)


@law(60)
@given(st.integers(2, 20), st.integers(-30, 30), st.integers(1, 60))
def test_a_cosine_halves_its_way_at_half_its_time_and_ends_at_its_least(length, rest, n):
    schedule = WarmupCosineLR(
        lr=0.5,
        total_num_steps=max(1, length + rest),
        warmup_min_ratio=0.25,
        warmup_num_steps=length,
        cos_min_ratio=0.125,
        warmup_type="linear",
    )
    assert schedule(0) == 0.0
    step = n - 1
    if step < length:
        assert close(schedule(n), 0.5 * (0.25 + 0.75 * step / length))
    else:
        done = min(1.0, (step - length + 1) / max(1, rest))
        assert close(schedule(n), 0.5 * (0.125 + 0.875 * math.cos(math.pi / 2 * done) ** 2))
    assert close(schedule(length + max(0, rest) + n), 0.5 * 0.125)


def test_a_range_test_grows_evenly_or_in_stairs():
    even = LRRangeTest(lr_range_test_min_lr=0.5, lr_range_test_step_size=4, lr_range_test_step_rate=2.0)
    stairs = LRRangeTest(0.5, 4, 2.0, lr_range_test_staircase=True)
    assert [even(n) for n in range(6)] == [0.5, 0.75, 1.0, 1.25, 1.5, 1.75]
    assert [stairs(n) for n in range(9)] == [0.5] * 4 + [1.5] * 4 + [2.5]


def test_one_cycle_goes_up_and_down_and_decays():
    cycle = OneCycle(
        cycle_min_lr=1.0,
        cycle_max_lr=5.0,
        cycle_first_step_size=4,
        cycle_second_step_size=2,
        decay_lr_rate=1.0,
        decay_step_size=2,
        cycle_min_mom=0.5,
        cycle_max_mom=0.75,
        decay_mom_rate=0.125,
    )
    assert [cycle(n) for n in range(9)] == [1, 2, 3, 4, 5, 3, 1, 1 / 1.5, 1 / 2]
    moms = [cycle.betas(n)[0] for n in range(9)]
    assert moms == [0.5, 0.6875, 0.625, 0.5625, 0.5, 0.625, 0.75, 0.75 * 1.0625, 0.75 * 1.125]
    assert {cycle.betas(n)[1] for n in range(9)} == {0.99}
    stairs = OneCycle(1.0, 5.0, cycle_first_step_size=4, cycle_first_stair_count=2, cycle_second_stair_count=1)
    assert [stairs(n) for n in range(10)] == [1, 1, 3, 3, 5, 1, 1, 1, 1, 1]
    saw = OneCycle(1.0, 5.0, cycle_first_step_size=4, cycle_second_step_size=0)
    assert [saw(n) for n in range(6)] == [1, 2, 3, 4, 1, 1]
    assert OneCycle(1.0, 2.0, cycle_momentum=False).betas is None


@pytest.mark.parametrize(
    ("make_schedule", "match"),
    [
        (lambda: WarmupLR(-1.0), "warmup_max_lr: got -1.0"),
        (lambda: WarmupLR(1.0, warmup_type="cubic"), "warmup_type: got 'cubic', expected one of 'log', 'linear'"),
        (lambda: WarmupDecayLR(warmup_num_steps=5, total_num_steps=0), "total_num_steps: got 0, expected an integer"),
        (lambda: LRRangeTest(lr_range_test_step_size=0), "lr_range_test_step_size: got 0"),
        (lambda: OneCycle(1.0, 2.0, cycle_max_mom=1.0), "cycle_max_mom: got 1.0"),
    ],
)
def test_wrong_schedules_are_refused(make_schedule, match):
    with pytest.raises(ConfigError, match=match):
        make_schedule()


@pytest.mark.parametrize(
    ("scheduler", "overrides", "lr"),
    [
        (SCHEDULED, {}, WarmupLR(1e-3)),
        ({"type": "WarmupLR"}, {}, WarmupLR(5e-5)),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": AUTO, "warmup_min_lr": AUTO}}, {"lr": 0.5}, WarmupLR(0.5)),
        ({"type": "WarmupDecayLR", "params": {"total_num_steps": 2e3}}, {}, WarmupDecayLR(total_num_steps=2000)),
        (
            {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_max_lr": AUTO}},
            {},
            WarmupDecayLR(5e-5, warmup_num_steps=3, total_num_steps=9),
        ),
        (
            {"type": "WarmupCosineLR", "params": {"total_num_steps": 9000, "last_batch_iteration": -1}},
            {"lr": 0.5},
            WarmupCosineLR(0.5, 9000),
        ),
        ({"type": None}, {}, 5e-5),
        (SCHEDULED, {"lr": math.sqrt}, math.sqrt),
    ],
    ids=str,
)
def test_a_scheduler_becomes_a_learning_rate(scheduler, overrides, lr):
    got = read({**optimizer(lr=5e-5), "scheduler": scheduler}, **overrides).lr
    assert getattr(got, "schedule", got) == lr


def test_a_number_that_the_schedule_would_not_look_at_is_refused():
    with pytest.raises(ConfigError, match=r"got lr=0.5 and scheduler.type 'WarmupLR', which sets .* by itself"):
        OffloadConfig.resolve({"scheduler": SCHEDULED}, lr=0.5)
    with pytest.raises(ConfigError, match="lr: got None, expected a number"):
        OffloadConfig.resolve({"scheduler": {"type": "WarmupLR"}}, lr=None)


def test_a_tier_beside_it_without_a_folder_is_refused():
    for config in (zero(offload_optimizer={"device": "cpu"}), zero(), zero(offload_optimizer={"device": "nvme"})):
        with pytest.raises(ConfigError, match="^offload_optimizer='nvme' without nvme_path; expected nvme_path="):
            OffloadConfig.resolve(config, offload_optimizer="nvme")


def test_a_stage_beside_it_that_offload_param_does_not_go_with_is_named():
    with pytest.raises(ConfigError, match=r"offload_param: got 'cpu' with stage 2, .*offload_param=None"):
        OffloadConfig.resolve(zero(stage=3, offload_param={"device": "cpu"}), stage=2)


def test_a_cycle_moves_betas_too_and_an_optimizer_without_rate_has_the_default():
    cycle = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 4}
    config = read({"scheduler": {"type": "OneCycle", "params": cycle}})
    assert config.hyperparameters(2) == (OneCycle(**cycle)(2), (pytest.approx(0.85), 0.99))
    assert read({"scheduler": {"type": "OneCycle", "params": {**cycle, "cycle_momentum": False}}}).betas == (0.9, 0.999)
    without = {"scheduler": {"type": "OneCycle", "params": {**cycle, "cycle_momentum": False}}}
    assert OffloadConfig.resolve(without, optimizer="sgd").hyperparameters(2)[0] == config.hyperparameters(2)[0]
    with pytest.raises(ConfigError, match=r"'OneCycle' moves betas, which optimizer='sgd' lacks; expected .*false"):
        OffloadConfig.resolve({"scheduler": {"type": "OneCycle", "params": cycle}}, optimizer="sgd")
    assert read({"scheduler": {"type": "WarmupLR"}}).lr.schedule == WarmupLR(OffloadConfig().lr)
    assert OffloadConfig().lr == OWN_LR


# --- training --------------------------------------------------------------------------------------

WARM = {
    **optimizer(lr=1e-2, weight_decay=0.1),
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_min_lr": 1e-3},
    },
    "gradient_clipping": 1.0,
}


def run(engine, seeds):
    for seed in seeds:
        engine.backward(loss_of(engine, seed))
        engine.step()


def test_a_file_trains_as_its_fields_do(tmp_path):
    path = written(
        tmp_path,
        json.dumps({**optimizer(lr=1e-2), **zero(stage=1), "gradient_clipping": 0.5, "bf16": {"enabled": True}}),
    )
    ours, theirs = make(), make()
    mine = wrap(ours, path)
    own = {"skip_nonfinite": True, "average_plain_backward": True}
    yours = wrap(theirs, stage=1, lr=1e-2, weight_decay=0.0, gradient_clipping=0.5, param_dtype="bfloat16", **own)
    assert mine.offload_config == yours.offload_config
    for engine in (mine, yours):
        run(engine, range(3))
    assert_same(ours, theirs, mine.optimizer, yours.optimizer)


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_a_configuration_clips_and_skips_as_deepspeed_does_where_it_says_nothing(precision):
    """DeepSpeed 0.19.8 clips at 1.0, and skips an update whose gradient has an inf."""
    ours, theirs = make(), make()
    mine = wrap(ours, {"optimizer": {"type": "AdamW"}, **precision})
    yours = wrap(theirs, weight_decay=0.0, gradient_clipping=1.0, param_dtype=mine.offload_config.param_dtype)
    unclipped = wrap(make(), {"optimizer": {"type": "AdamW"}, "gradient_clipping": 0, **precision})
    for seed, factor in ((0, 100.0), (1, math.inf), (2, 100.0)):
        for engine in (mine, yours, unclipped):
            engine.backward(loss_of(engine, seed) * factor)
        reports = [engine.step() for engine in (mine, yours, unclipped)]
        assert [report.updated for report in reports] == [seed != 1] * 3
        assert [report.clip_coefficient < 1 for report in reports] == [seed != 1, seed != 1, False]
    assert_same(ours, theirs, mine.optimizer, yours.optimizer)


@pytest.mark.parametrize("config", [{}, {"bf16": {"enabled": True}}, zero(stage=3)], ids=["fp32", "bf16", "stage 3"])
def test_a_plain_backward_is_averaged_as_in_deepspeed(config):
    """Mixed with ``engine.backward``, too; without a configuration of DeepSpeed's it sums, as in torch."""
    config = {"train_batch_size": 8, "gradient_accumulation_steps": 4, **config}
    ours, theirs = make(), make()
    mine, yours = wrap(ours, config), wrap(theirs, config)
    fields = {"gradient_accumulation_steps": 4, "gradient_clipping": 1.0}
    torchs = wrap(make(), fields, param_dtype=mine.offload_config.param_dtype)
    for seed in range(8):
        loss_of(mine, seed).backward() if seed % 2 else mine.backward(loss_of(mine, seed))
        yours.backward(loss_of(yours, seed))
        loss_of(torchs, seed).backward()
        report, expected, summed = (engine.step() for engine in (mine, yours, torchs))
        assert report == expected
        if seed == 3:
            assert summed.grad_norm == pytest.approx(4 * report.grad_norm)
    assert_same(ours, theirs, mine.optimizer, yours.optimizer)


def test_a_loss_of_two_engines_follows_the_backward_of_one():
    config = {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
    for average in (True, False):
        first, second = (wrap(torch.nn.Linear(4, 4), {**config, "bf16": {}}) for _ in range(2))
        alone = wrap(torch.nn.Linear(4, 4), config)
        alone.module.load_state_dict(first.module.state_dict())
        for _ in range(2):
            second.backward(second(first(torch.ones(2, 4))).sum(), average=average)
            factor = second.module.weight.detach().sum(0)
            alone.backward((alone(torch.ones(2, 4)) * factor).sum(), average=average)
            second.step()
            norms = [engine.step().grad_norm for engine in (first, alone)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.filterwarnings("ignore::offload_core.ConfigWarning")
def test_the_tutorial_of_stage_3_trains_as_stage_2_does(tmp_path):
    ours, theirs = make(), make()
    mine, yours = wrap(ours, written(tmp_path, STAGE_3_TUTORIAL)), wrap(theirs)
    assert mine.offload_config.offload_param == "cpu"
    for engine in (mine, yours):
        run(engine, range(3))
        engine.close()
    assert_same(ours, theirs)


@pytest.mark.parametrize("schedule", ["overlap", "serial"])
def test_a_schedule_in_torch_is_what_setting_the_rate_before_each_update_is(schedule):
    ours, theirs = make(), make()
    mine = wrap(ours, WARM, schedule=schedule)
    yours = wrap(theirs, lr=1.0, weight_decay=0.1, gradient_clipping=1.0, schedule=schedule)
    rates = [1e-3, 1e-3, 3.25e-3, 5.5e-3, 7.75e-3, 1e-2, 1e-2]
    for seed, rate in enumerate(rates):
        yours.optimizer.param_groups[0]["lr"] = WarmupLR(1e-2, 1e-3, 4, "linear")(seed)
        for engine in (mine, yours):
            run(engine, [seed])
        assert mine.optimizer.param_groups[0]["lr"] == pytest.approx(rate)
    assert_same(ours, theirs, mine.optimizer, yours.optimizer)


def test_only_updates_move_a_schedule_on():
    engine = wrap(make(), {**WARM, "gradient_accumulation_steps": 2})
    run(engine, range(4))
    assert engine.optimizer.updates == 2
    for seed in (4, 5):
        engine.backward(loss_of(engine, seed) * math.inf)
        report = engine.step()
    assert report.skipped == "non-finite"
    assert engine.optimizer.updates == 2


def test_a_resumed_schedule_goes_on():
    whole, first, second = make(), make(), make(seed=5)
    run(wrap(whole, WARM), range(6))
    before = wrap(first, WARM)
    run(before, range(3))
    second.load_state_dict(first.state_dict())
    saved = pickle.loads(pickle.dumps(before.optimizer.state_dict()))
    after = wrap(second, WARM)
    after.optimizer.load_state_dict(saved)
    run(after, range(3, 6))
    assert_same(whole, second)
    assert after.optimizer.updates == 6
    del saved["updates"]  # as in states of torch's own AdamW
    after.optimizer.load_state_dict(saved)
    assert after.optimizer.updates == 3


def test_a_copied_optimizer_goes_on_with_its_schedule():
    model = make()
    optimizer = OffloadedAdamW(model.parameters(), lr=WarmupLR(1e-2, 1e-3, 4, "linear"))
    for seed in range(3):
        loss_of(model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()
    copied = pickle.loads(pickle.dumps(optimizer))
    assert copied.updates == 3
    for param in (p for group in copied.param_groups for p in group["params"]):
        param.grad = torch.ones_like(param)
    copied.step()
    assert copied.param_groups[0]["lr"] == WarmupLR(1e-2, 1e-3, 4, "linear")(3)


def test_a_cycle_moves_the_betas_of_torch_and_jax_alike():
    cycle = OneCycle(1e-3, 1e-2, cycle_first_step_size=3, cycle_min_mom=0.5)
    config = {"scheduler": {"type": "OneCycle", "params": {k: v for k, v in vars(cycle).items() if v is not None}}}
    model = make()
    engine = wrap(model, config)
    offloaded = frontends.jax.wrap({"w": jnp.ones(4)}, config)
    seen = []
    hypers = offloaded._updates._hypers
    offloaded._updates._hypers = lambda *rate: seen.append(hypers(*rate)[0]) or hypers(*rate)
    for n in range(5):
        run(engine, [n])
        offloaded.update({"w": jnp.ones(4)})
        group = engine.optimizer.param_groups[0]
        assert group["lr"] == seen[n].lr == cycle(n)
        assert group["betas"] == seen[n].betas == cycle.betas(n)


def test_a_group_with_a_rate_of_its_own_and_a_schedule_are_refused():
    model = make()
    groups = [{"params": list(model[0].parameters()), "lr": 1e-3}, {"params": list(model[2].parameters())}]
    with pytest.raises(ConfigError, match="lr=0.001 of a parameter group, and lr is a function.*lr_scheduler"):
        OffloadedAdamW(groups, lr=lambda updates: 1e-3)


@pytest.mark.draws(1)
@pytest.mark.parametrize(
    ("scheduler", "rates"),
    [
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}, ([0, 0, 25], [0, 0, 250])),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": 8e-3, "warmup_num_steps": 2}}, ([0, 0, 800],) * 2),
        (
            {"type": "WarmupCosineLR", "params": {"total_num_steps": 1, "warmup_num_steps": 2, "cos_min_ratio": 0.5}},
            ([0, 0, 100, 50], [0, 0, 1000, 500]),
        ),
        ({"type": "LRRangeTest", "params": {"lr_range_test_step_size": 1}}, ([100, 200, 300],) * 2),
        ({"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 4e-3, "cycle_first_step_size": 4}},
         ([0, 100, 200],) * 2),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_scheduler_section_does_with_a_groups_own_rate_what_deepspeed_does(scheduler, rates):
    """The rates are in units of 1e-5; they go on after a resumption, and for a group that comes later."""

    def make_engine():
        model = make()
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 1e-2, "betas": (0.8, 0.9)}]
        return wrap(model, {**optimizer(lr=1e-3), "scheduler": scheduler}, params=groups)

    engine = make_engine()
    for n in range(len(rates[0])):
        if n == 2:
            saved, engine = engine.optimizer.state_dict(), make_engine()
            engine.optimizer.load_state_dict(saved)
        run(engine, [n])
        groups = engine.optimizer.param_groups
        assert [group["lr"] for group in groups] == pytest.approx([rate[n] * 1e-5 for rate in rates], abs=1e-12)
        assert (groups[1]["betas"] == (0.8, 0.9)) == (scheduler["type"] != "OneCycle")
    engine.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "lr": 2e-2})
    ratio = 2 if rates[0] != rates[1] else 1
    run(engine, [9])
    assert engine.optimizer.param_groups[2]["lr"] == pytest.approx(ratio * engine.optimizer.param_groups[1]["lr"])


def test_a_schedule_that_leaves_its_range_is_an_error_before_the_update():
    engine = wrap(make(), lr=lambda updates: 1e-3 if updates < 1 else -1.0)
    run(engine, [0])
    before = [p.detach().clone() for p in engine.module.parameters()]
    engine.backward(loss_of(engine, 1))
    with pytest.raises(ConfigError, match="parameter group 0: lr: got -1.0"):
        engine.step()
    assert all(torch.equal(p, q) for p, q in zip(engine.module.parameters(), before, strict=True))
    assert engine.optimizer.updates == 1


# --- what has no effect, and the document ----------------------------------------------------------


def test_what_asks_for_nothing_is_not_listed():
    assert not [
        path
        for path, key in walk()
        if key.convert is None and any(key.wants(value) for value in (None, AUTO, {}, {"enabled": False}, *key.agrees))
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OffloadConfig.resolve(
            {"bf16": {}, "wall_clock_breakdown": False, "tensorboard": {"enabled": False}, "amp": None}
        )
    off = {"torch_autocast": {"dtype": "bf16"}, "hybrid_engine": {"max_out_tokens": 9}, "tensor_parallel": {"dtype": 1}}
    assert OffloadConfig.resolve({**off, "gradient_allreduce_op": "MEAN"}) == OffloadConfig.resolve({"bf16": {}})
    assert OffloadConfig.resolve({"bf16": {}}).average_over_ranks
    assert not OffloadConfig.resolve({"bf16": {}, "gradient_allreduce_op": "SUM"}).average_over_ranks
    assert ignored({"bf16": {}, "steps_per_print": 10, "tensorboard": {"enabled": True}}) == {
        "steps_per_print",
        "tensorboard",
    }
    assert ignored({**zero(stage=1, stage3_prefetch_bucket_size=5)}) == {
        "zero_optimization.stage3_prefetch_bucket_size"
    }
    assert ignored(zero(cpu_offload=False, stage=0)) == {"zero_optimization.stage"}


IN_EXAMPLES = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "pin_memory": True,
            "buffer_count": 4,
            "pipeline_read": True,
            "pipeline_write": False,
            "fast_init": False,
            "ratio": 0.5,
        },
        "offload_param": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "pin_memory": True,
            "buffer_count": 5,
            "buffer_size": 1e8,
            "max_in_cpu": 1e9,
        },
    },
    "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False, "overlap_events": True},
}


def test_an_example_with_all_on_disk_lists_what_has_no_effect_with_its_reason():
    """That of Hugging Face's pages, and more."""
    fields = {**ALL_ON_DISK, "nvme_path": ("/local_nvme",), "param_dtype": "bfloat16"}
    assert changed(IN_EXAMPLES) == fields
    states, params = (f"zero_optimization.offload_{name}." for name in ("optimizer", "param"))
    assert ignored(IN_EXAMPLES) == {
        "aio",
        *(states + name for name in ("buffer_count", "pipeline_write", "ratio")),
        *(params + name for name in ("buffer_count", "buffer_size", "max_in_cpu")),
    }
    assert ignored(zero(offload_optimizer={"device": "cpu", "nvme_path": "/a"})) == {states + "nvme_path"}


def test_states_on_the_device_are_listed_as_ignored_where_parameters_leave_it():
    params = {"stage": 3, "offload_param": {"device": "cpu"}}
    section = "zero_optimization.offload_optimizer"
    assert ignored(zero(**params, offload_optimizer={"device": "none"})) == {section}
    assert ignored(zero(**params, offload_optimizer={"device": "cpu", "ratio": 0.5})) == {f"{section}.ratio"}
    assert ignored(zero(offload_optimizer={"device": "none", "ratio": 0.5})) == {f"{section}.ratio"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OffloadConfig.resolve(zero(offload_optimizer={"device": "none"}))
        OffloadConfig.resolve(zero(offload_optimizer={"device": "cpu", "ratio": 0.5}))
        OffloadConfig.resolve(zero(**params, offload_optimizer={}), offload_optimizer="cpu")


def test_two_folders_of_states_and_of_parameters_are_used_for_both():
    with pytest.warns(
        ConfigWarning, match=r"differs .*: zero.*optimizer.nvme_path and zero.*param.nvme_path \(.*share both"
    ):
        OffloadConfig.resolve(zero(stage=3, offload_optimizer=ON_DISK, offload_param={**ON_DISK, "nvme_path": "/b"}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OffloadConfig.resolve(zero(stage=3, offload_optimizer=ON_DISK, offload_param=ON_DISK))


def test_one_warning_says_what_differs_from_deepspeed():
    with pytest.warns(ConfigWarning) as caught:
        OffloadConfig.resolve({"bf16": {"enabled": True, "bf16_optimizer_states": True}, "timers": {"a": 1}})
    assert re.fullmatch(
        r"DeepSpeed configuration: remove the keys without effect here: timers \(.*\)\. the run differs from that of "
        r"DeepSpeed 0.19.8: "
        r"bf16.bf16_optimizer_states \(rounded stochastically.*: leave it out for fp32\)",
        str(caught.pop().message),
    )
    assert not caught.list


def table():
    """The rows of docs/deepspeed.md; a section that is refused may be there with ``enabled`` false."""
    rows = []
    for path, key in walk():
        names = f"`{path}`" + "".join(f", `{name}`" for name in key.old)
        off = " or ".join(f"`{json.dumps(value)}`" for value in key.agrees)
        verdict = "" if key.convert else f"an error unless {off}: " if key.refused else "ignored: "
        rows.append(f"| {names} | {verdict}{key.meaning} | {key.auto} |")
    return rows


def test_the_document_says_what_the_code_does():
    tables = DOCUMENT.read_text().split('| key | here | `"auto"` |\n|---|---|---|\n')[1:]
    rows = [row for text in tables for row in text.partition("\n\n")[0].splitlines()]
    assert rows == table(), "docs/deepspeed.md: the rows of its tables should be\n" + "\n".join(table())


def test_the_document_names_fields_that_exist():
    names = {name for _, key in walk() if key.convert for name in _code(key.meaning)}
    built = {*FIELDS, *(name for path, _ in walk() for name in path.split("."))}
    assert {name.partition("=")[0].partition(".")[0] for name in names if name[0] != '"'} <= built | {*SCHEDULES}


def _code(text):
    return text.split("`")[1::2]
