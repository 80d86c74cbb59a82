"""``frontends.torch.deepspeed`` without DeepSpeed: what ``initialize`` takes, and what an engine says and does."""

import copy
import gc
import json
import math
import os
import threading
import types
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset

from frontends.torch import deepspeed, gathered_parameters, wrap
from frontends.torch.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from frontends.torch.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from frontends.torch.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from frontends.torch.deepspeed.runtime.lr_schedules import OneCycle, WarmupCosineLR, WarmupLR
from offload_core import CheckpointError, ConfigError, ConfigWarning, ParameterError, StateError
from offload_core.config.options import OffloadConfig
from offload_core.errors import GradientError
from tests.support.interrupts import first_passes, interrupt_before
from tests.support.processes import on_ranks
from tests.support.torch_lion import Lion
from tests.support.torch_models import assert_all_same, batch, everything, loss_of, make, same_bits

ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
BATCH = {"train_micro_batch_size_per_gpu": 8}
CONFIG = {**BATCH, **ADAMW}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}}}
pytestmark = pytest.mark.filterwarnings("ignore::offload_core.ConfigWarning")


@pytest.fixture(autouse=True)
def no_group_is_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def stage(number):
    zero = {"stage": number}
    if number == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "offload_param": {"device": "cpu"}}
    return {"zero_optimization": zero}


def start(model=None, config=CONFIG, **arguments):
    return deepspeed.initialize(model=make() if model is None else model, config=config, **arguments)


def train(engine, seeds):
    for seed in seeds:
        engine.backward(loss_of(engine, seed))
        engine.step()


def beside(model, optimizer, seeds, clip=1.0):
    """Plain torch, with the clipping that the face does by default."""
    for seed in seeds:
        loss_of(model, seed).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def assert_close(engine, model, **tolerance):
    engine.flush()
    for (name, found), expected in zip(engine.module.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.detach(), expected.detach(), **tolerance, msg=name)


# --- initialize ----------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    found = tmp_path / "ds.json"
    found.write_text("// with a comment\n" + json.dumps(CONFIG))
    return found


WAYS = {
    "a dict": lambda file: {"config": CONFIG},
    "a path": lambda file: {"config": str(file)},
    "its old name": lambda file: {"config_params": CONFIG},
    "arguments": lambda file: {"args": types.SimpleNamespace(deepspeed_config=str(file))},
    "arguments of an old name": lambda file: {"args": types.SimpleNamespace(deepscale_config=str(file))},
    "arguments without one": lambda file: {"args": types.SimpleNamespace(local_rank=0), "config": CONFIG},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_configuration_comes_in_each_way_that_scripts_have(way, file):
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=make(), **WAYS[way](file))
    assert (optimizer, loader, scheduler) == (engine.optimizer, None, None)
    assert engine.get_lr() == [1e-2]
    assert engine.train_batch_size() == 8


def test_arguments_of_the_command_line_are_added():
    import argparse

    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    given = parser.parse_args(["--deepspeed", "--deepspeed_config", "here.json"])
    assert (given.deepspeed, given.deepspeed_config, given.deepscale, given.deepscale_config) == (
        True,
        "here.json",
        False,
        None,
    )


def groups_of(model):
    named = [*model.named_parameters()]
    return [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1, "lr": 3e-2},
        {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0},
    ]


def test_parameters_come_as_groups_as_a_generator_or_as_some_of_the_models():
    engine = start(model := make(), model_parameters=groups_of(model))[0]
    assert engine.get_lr() == [3e-2, 1e-2]
    assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.1, 0.0]
    plain = make()
    beside(plain, torch.optim.AdamW(groups_of(plain), lr=1e-2, fused=True), range(3))
    train(engine, range(3))
    assert_close(engine, plain, rtol=1e-6, atol=1e-7)

    engine = start(model := make(), model_parameters=(p for p in model.parameters()))[0]
    assert len(engine.optimizer.param_groups[0]["params"]) == 4

    engine = start(model := make(), model_parameters=[model[0].weight])[0]
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match="'0.bias', '2.weight', '2.bias'; they are not trained"):
        train(engine, range(2))
    changed = {name for name, value in model.state_dict().items() if not same_bits(value, before[name])}
    assert changed == {"0.weight"}


@pytest.mark.parametrize("number", range(4))
def test_without_an_optimizer_a_model_computes_and_its_backward_is_one_error(number):
    model = make()
    expected = model(batch(0))
    engine, optimizer, _, scheduler = start(model, {**BATCH, **stage(number), **WARMUP})
    assert (optimizer, scheduler) == (None, None)
    assert same_bits(engine(batch(0)), expected)
    assert all(p.requires_grad for p in engine.module.parameters())
    for act in (lambda: engine.backward(engine(batch(0)).sum()), engine.step):
        with pytest.raises(StateError, match="of an engine without an optimizer; expected an `optimizer` section"):
            act()
    assert same_bits(engine.eval()(batch(0)), expected)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(20.0).view(10, 2))


def test_training_data_becomes_a_loader():
    data = [(torch.full((3,), float(i)), i) for i in range(20)]
    engine, _, loader, _ = start(training_data=data)
    assert engine.training_dataloader is loader
    seen = [labels for _, labels in loader]
    assert [len(labels) for labels in seen] == [8, 8, 4]
    assert sorted(torch.cat(seen).tolist()) == [*range(20)]
    config = {**CONFIG, "dataloader_drop_last": True}
    engine, _, loader, _ = start(config=config, training_data=data, collate_fn=lambda rows: [i for _, i in rows])
    assert [len(labels) for labels in loader] == [8, 8]
    assert engine.collate_fn is loader.collate_fn
    assert [len(rows) for rows in start(training_data=Stream())[2]] == [8, 2]


def test_an_error_of_collate_fn_is_the_callers_and_the_engine_goes_on():
    def fails(rows):
        raise ZeroDivisionError("in collate_fn")

    engine, _, loader, _ = start(training_data=[1] * 8, collate_fn=fails)
    with pytest.raises(ZeroDivisionError, match="in collate_fn"):
        next(iter(loader))
    train(engine, [0])
    assert engine.global_steps == 1


# --- schedulers ----------------------------------------------------------------------------------------------------


def test_a_scheduler_comes_as_an_object_as_a_function_or_from_the_section():
    step_lr = torch.optim.lr_scheduler.StepLR
    optimizer = torch.optim.AdamW((model := make()).parameters(), lr=1e-2)
    given = step_lr(optimizer, 2, 0.5)
    engine, _, _, scheduler = start(model, optimizer=optimizer, lr_scheduler=given)
    assert scheduler is given is engine.lr_scheduler
    other = start(lr_scheduler=lambda optimizer: step_lr(optimizer, 2, 0.5))[0]
    assert other.lr_scheduler.optimizer is other.optimizer
    for each in (engine, other):
        rates = [each.get_lr()[0]]
        for seed in range(4):
            train(each, [seed])
            rates.append(each.get_lr()[0])
        assert rates == pytest.approx([1e-2, 1e-2, 5e-3, 5e-3, 2.5e-3])
        assert each.lr_scheduler.get_last_lr() == each.get_lr()
    engine, _, _, scheduler = start(config={**CONFIG, **WARMUP})
    assert type(scheduler).__name__ == "WarmupLR"
    rates = [engine.get_lr()[0]]
    for seed in range(5):
        train(engine, [seed])
        rates.append(engine.get_lr()[0])
    assert rates == pytest.approx([0, *(1e-2 * math.log(i, 4) for i in (1, 2, 3, 4)), 1e-2])
    saved = scheduler.state_dict()
    assert saved == {"last_batch_iteration": 4}
    scheduler.step(0)
    scheduler.load_state_dict(saved)
    assert scheduler.last_batch_iteration == 4


def test_a_schedulers_rates_go_into_the_tensor_that_an_optimizer_has_for_them():
    rate = torch.full((), 0.1, dtype=torch.float64)
    optimizer = torch.optim.SGD(make().parameters(), lr=rate)
    scheduler = WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear")
    assert optimizer.param_groups[0]["lr"] is rate
    rates = [rate.item()]
    for _ in range(4):
        scheduler.step()
        rates.append(rate.item())
    assert rates == pytest.approx([0, 0, 0.025, 0.05, 0.075])
    assert optimizer.param_groups[0]["lr"] is rate


def test_a_cycles_momentum_begins_at_its_highest_and_the_first_update_has_the_lowest():
    cycle = {
        "cycle_min_lr": 1e-3,
        "cycle_max_lr": 1e-2,
        "cycle_min_mom": 0.08,
        "cycle_max_mom": 0.09,
        "cycle_first_step_size": 10,
    }
    optimizer = torch.optim.Adam(make().parameters())
    scheduler = OneCycle(optimizer, **cycle)
    said = []
    for _ in range(3):
        said.append((scheduler.get_mom()[0][0], optimizer.param_groups[0]["betas"][0]))
        scheduler.step()
    assert said == [pytest.approx(each) for each in ((0.09, 0.08), (0.089, 0.089), (0.088, 0.088))]  # as DeepSpeed's


def test_a_scheduler_says_how_it_is_configured():
    two = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.2)]
    optimizer = torch.optim.Adam(two)
    schedule = WarmupCosineLR(optimizer, total_num_steps=100, warmup_num_steps=10, cos_min_ratio=0.1)
    assert (schedule.warmup_num_steps, schedule.warmup_type, schedule.cos_min_ratio) == (10, "log", 0.1)
    assert schedule.get_lr_ratio() == 0.0
    for step in (1, 5, 9, 60, 100):
        schedule.step(step)
        assert schedule.get_lr() == pytest.approx([0.1 * schedule.get_lr_ratio(), 0.2 * schedule.get_lr_ratio()])
    assert schedule.get_lr_ratio() == pytest.approx(0.1)
    with pytest.raises(AttributeError, match="nonsense"):
        schedule.nonsense  # noqa: B018
    copy.deepcopy(schedule).step()
    warmup = WarmupLR(torch.optim.Adam([{**group, "lr": lr} for group, lr in zip(two, (0.1, 0.2), strict=True)]), 0.001)
    assert (warmup.min_lrs, warmup.max_lrs) == ([0.001, 0.001], [0.1, 0.2])
    cycle = OneCycle(optimizer, 0.001, 0.1, cycle_first_step_size=30, cycle_second_step_size=10)
    assert (cycle.step_ratio, cycle.min_lrs, cycle.max_lrs) == (0.75, [0.001, 0.001], [0.1, 0.1])
    for wrong in (None, -5, 0, 2.5):
        with pytest.raises(ValueError, match=f"warmup_num_steps: got {wrong}, expected an integer of at least 1"):
            WarmupLR(optimizer, warmup_num_steps=wrong)


POSITIONAL = {
    "WarmupLR": (0.001, 0.1, 10, "linear", 4),
    "WarmupDecayLR": (100, 0.001, 0.1, 10, "linear", 4),
    "WarmupCosineLR": (100, 0.1, 10, 0.01, "linear", 4),
    "LRRangeTest": (0.001, 10, 0.5, True, 4),
    "OneCycle": (0.001, 0.1, 0.5, 5, 6, 2, 3, 4, True, 0.7, 0.8, 0.1, 4),
}
"""Values of every argument of a scheduler, in DeepSpeed's order."""


@pytest.mark.parametrize("name", POSITIONAL)
def test_a_scheduler_takes_its_arguments_by_position(name):
    kind, values = getattr(deepspeed.runtime.lr_schedules, name), POSITIONAL[name]
    names = (*kind.order, "last_batch_iteration")
    assert len(names) == len(values)

    def rates(schedule):
        found = []
        for _ in range(20):
            schedule.step()
            found.append((schedule.get_lr(), schedule.get_mom()))
        return found

    def fresh():
        return torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.01)

    by_name = kind(fresh(), **dict(zip(names, values, strict=True)))
    assert by_name.last_batch_iteration == 4
    assert rates(kind(fresh(), *values)) == rates(by_name)
    for n in range(len(values)):
        first = kind(fresh(), *values[: n + 1], **dict(zip(names[n + 1 :], values[n + 1 :], strict=True)))
        assert rates(first) == rates(kind(fresh(), *values))
    with pytest.raises(TypeError, match=f"got {len(values) + 1} arguments by position, expected {names[0]}, "):
        kind(fresh(), *values, 1)
    with pytest.raises(TypeError, match=f"got {names[0]} twice"):
        kind(fresh(), values[0], **{names[0]: values[0]}, **dict(zip(names[1:], values[1:], strict=True)))
    with pytest.raises(ConfigError, match=r"last_batch_iteration: got 0\.5, expected an integer of at least -1"):
        kind(fresh(), *values[:-1], 0.5)


def test_lr_kwargs_go_to_the_scheduler():
    class Scheduler:
        def __init__(self, optimizer):
            self.seen = []

        def step(self, metrics=None):
            self.seen.append(metrics)

    engine, _, _, scheduler = start(lr_scheduler=Scheduler)
    train(engine, [0])
    engine.backward(loss_of(engine, 1))
    engine.step(lr_kwargs={"metrics": 3.0})
    assert scheduler.seen == [None, 3.0]


# --- counts, rates, attributes -------------------------------------------------------------------------------------


def test_the_counts_of_a_run_that_accumulates():
    config = {"train_batch_size": 16, "gradient_accumulation_steps": 2, **ADAMW}
    engine = start(config=config)[0]
    assert engine.get_batch_info() == (16, 8, 2)
    assert engine.train_micro_batch_size_per_gpu() == 8
    assert engine.get_global_grad_norm() is None
    names = ("micro_steps", "global_steps", "global_samples", "skipped_steps")
    seen = [(*(getattr(engine, name) for name in names), engine.is_gradient_accumulation_boundary())]
    for seed in range(4):
        loss = loss_of(engine, seed)
        assert same_bits(engine.backward(loss), loss / 2)
        engine.step()
        seen.append((*(getattr(engine, name) for name in names), engine.is_gradient_accumulation_boundary()))
        assert engine.was_step_applied() is (seed % 2 == 1)
    assert seen == [
        (0, 0, 0, 0, False),
        (1, 0, 0, 0, True),
        (2, 1, 16, 0, False),
        (3, 1, 16, 0, True),
        (4, 2, 32, 0, False),
    ]
    assert engine.get_global_grad_norm() > 0


def test_what_an_engine_says_of_itself():
    config = {**CONFIG, **WARMUP, **stage(2), "gradient_clipping": 0.5, "bf16": {"enabled": True}}
    engine, optimizer, _, _ = start(config=config)
    said = {
        "zero_optimization_stage": 2,
        "zero_optimization": True,
        "zero_optimization_partition_gradients": True,
        "zero_optimization_partition_weights": False,
        "bfloat16_enabled": True,
        "fp16_enabled": False,
        "gradient_clipping": 0.5,
        "optimizer_name": "AdamW",
        "scheduler_name": "WarmupLR",
        "gradient_accumulation_steps": 1,
        "get_mom": [(0.9, 0.999)],
        "dynamic_loss_scale": False,
    }
    assert {name: getattr(engine, name)() for name in said} == said
    assert (engine.global_rank, engine.local_rank, engine.world_size, engine.dp_world_size) == (0, 0, 1, 1)
    assert engine.device == torch.device(deepspeed.get_accelerator().current_device_name())
    assert engine.config == config
    assert engine.optimizer is optimizer
    assert engine.module[0].weight.dtype == torch.bfloat16
    assert engine.train() is engine
    assert engine.training
    assert not engine.eval().module.training


def test_the_loss_scale_of_fp16_and_its_overflows():
    config = {**CONFIG, "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
    engine, optimizer, _, _ = start(config=config)
    assert (optimizer.cur_scale, optimizer.loss_scale, engine.dynamic_loss_scale()) == (256, 256, True)
    train(engine, [0])
    assert not optimizer.overflow
    engine.backward(loss_of(engine, 1) * math.inf)
    engine.step()
    assert optimizer.overflow
    assert optimizer.cur_scale == 128
    assert (engine.global_steps, engine.skipped_steps, engine.was_step_applied()) == (2, 1, False)
    with pytest.raises(GradientError, match=r"scale\(\) under loss scaling; expected engine.backward"):
        engine.scale(loss_of(engine, 2))


def test_without_loss_scaling_a_scaled_loss_is_the_loss():
    engine, plain = start()[0], make()
    engine.scale(loss_of(engine, 0)).backward()
    engine.step()
    beside(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0, fused=True), [0])
    assert engine.global_steps == 1
    assert_close(engine, plain, rtol=1e-6, atol=1e-7)


def test_a_larger_batch_is_more_accumulation():
    engine = start()[0]
    train(engine, range(2))
    engine.set_train_batch_size(24)
    assert (engine.gradient_accumulation_steps(), engine.train_batch_size()) == (3, 24)
    assert engine.global_samples == 16
    train(engine, range(3))
    assert (engine.global_steps, engine.global_samples) == (3, 40)
    engine.backward(loss_of(engine, 9))
    engine.step()
    with pytest.raises(StateError, match="gradients"):
        engine.set_train_batch_size(8)
    with pytest.raises(ConfigError, match=r"got 13, expected a multiple of train_micro_batch_size_per_gpu \(8\)"):
        engine.set_train_batch_size(13)
    for change, bad in ((engine.set_train_batch_size, "a"), (engine.set_train_micro_batch_size, 0)):
        with pytest.raises(ConfigError, match=f"batch_size: got {bad!r}, expected an integer of at least 1"):
            change(bad)
    assert engine.train_batch_size() == 24
    train(engine, range(2))
    engine.set_gradient_accumulation_steps(1)
    assert (engine.train_batch_size(), engine.global_samples) == (8, 64)
    train(engine, [0])
    assert engine.global_samples == 72


def test_the_boundary_is_set_by_hand_until_it_is_given_back():
    engine = start(config={**CONFIG, "gradient_accumulation_steps": 2})[0]
    engine.set_gradient_accumulation_boundary(False)
    train(engine, range(3))
    assert (engine.global_steps, engine.is_gradient_accumulation_boundary()) == (0, False)
    engine.set_gradient_accumulation_boundary(True)
    train(engine, [3])
    assert engine.global_steps == 1
    engine.set_gradient_accumulation_boundary(None)
    train(engine, range(2))
    assert engine.global_steps == 2


def test_without_managed_accumulation_each_step_is_an_update():
    config = {**CONFIG, "gradient_accumulation_steps": 4, "managed_gradient_accumulation": False}
    engine, plain = start(config=config)[0], make()
    for seed in range(3):
        engine.backward(loss_of(engine, seed))
        assert not engine.is_gradient_accumulation_boundary()
    engine.step()
    for seed in range(3):
        (loss_of(plain, seed) / 4).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0, fused=True).step()
    assert (engine.global_steps, engine.global_samples) == (1, 24)
    assert_close(engine, plain, rtol=1e-6, atol=1e-7)
    with pytest.raises(StateError, match="each step"):
        engine.set_gradient_accumulation_boundary(True)


def test_no_sync_keeps_step_out_and_is_for_stages_0_and_1():
    engine = start(config={**CONFIG, **stage(1)})[0]
    with engine.no_sync():
        engine.backward(loss_of(engine, 0))
        with pytest.raises(StateError, match=r"Engine\.step\(\) inside no_sync context.*expected it after the block"):
            engine.step()
        with pytest.raises(StateError, match="reentry is unsupported.*; expected one block"), engine.no_sync():
            pass
    train(engine, [1])
    assert engine.global_steps == 1
    for number in (2, 3):
        other = start(config={**CONFIG, **stage(number)})[0]
        with pytest.raises(StateError, match=f"ZeRO stage {number}, which keeps no whole gradients"), other.no_sync():
            pass


def test_losses_that_are_divided_already_are_not_divided_again():
    engine, other = (start(config={**CONFIG, "gradient_accumulation_steps": 2})[0] for _ in range(2))
    for seed in range(2):
        train(engine, [seed])
        other.backward(loss_of(other, seed) / 2, scale_wrt_gas=False)
        other.step()
    assert_all_same(everything(engine), everything(other))


def test_a_graph_that_is_retained_goes_backward_again():
    engine = start()[0]
    loss = loss_of(engine, 0)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    with pytest.raises(RuntimeError, match="second time"):
        engine.backward(loss)


# --- memory, files, the end ----------------------------------------------------------------------------------------


def test_states_leave_the_device_and_come_back():
    engine, other = start()[0], start()[0]
    train(engine, [0])
    engine.offload_states(include=None, device="cpu", pin_memory=True, non_blocking=False)
    with pytest.raises(StateError, match="released parameters have no memory"):
        engine(batch(0))
    engine.reload_states(non_blocking=False)
    train(engine, [1])
    train(other, [0, 1])
    assert_all_same(everything(engine), everything(other))
    with pytest.raises(ConfigError, match="offload_states.*'nvme'.*expected 'cpu'"):
        engine.offload_states(device="nvme")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(3))

    def forward(self, ids):
        return self.head(torch.tanh(self.frozen(self.embed(ids))))


@pytest.mark.parametrize("number", [1, 3])
def test_a_16_bit_model_is_whole_with_tied_weights_and_buffers(number, tmp_path):
    config = {**CONFIG, **stage(number), "bf16": {"enabled": True}}
    engine = start(Tied(), config)[0]
    ids = torch.arange(16)
    engine.backward(nn.functional.cross_entropy(engine(ids).float(), (ids + 1) % 16))
    engine.step()
    assert engine.save_16bit_model(tmp_path / "a") is True
    found = torch.load(tmp_path / "a" / "pytorch_model.bin", weights_only=True)
    plain = Tied().bfloat16()
    plain.load_state_dict(found)
    with gathered_parameters(engine.module.parameters()):
        for name, expected in engine.module.state_dict().items():
            assert same_bits(found[name], expected), name
    assert same_bits(found["head.weight"], found["embed.weight"])
    assert same_bits(found["frozen.weight"], Tied().bfloat16().frozen.weight)
    assert found["count"] == 3
    engine.save_16bit_model(tmp_path / "b", "few.bin", exclude_frozen_parameters=True)
    few = torch.load(tmp_path / "b" / "few.bin", weights_only=True)
    assert found.keys() - few.keys() == {"frozen.weight", "frozen.bias"}


def test_weights_are_read_and_loaded_by_name():
    engine, other = start()[0], start(make(seed=1))[0]
    train(engine, [0])
    other.load_module_state_dict({"module": engine.module_state_dict()})
    assert_all_same(other.module.parameters(), engine.module.parameters())
    engine.module[0].requires_grad_(False)
    assert set(engine.module_state_dict(exclude_frozen_parameters=True)) == {"2.weight", "2.bias"}


def test_a_model_that_was_given_back_can_have_another_engine():
    model = make()
    engine = start(model)[0]
    train(engine, [0])
    engine.destroy()
    with pytest.raises(StateError, match="this optimizer was closed"):
        train(engine, [1])
    other = start(model)[0]
    train(other, [1])
    assert other.global_steps == 1


# --- checkpoints ---------------------------------------------------------------------------------------------------


def test_tags_and_the_file_latest(tmp_path):
    engine = start()[0]
    assert engine.load_checkpoint(tmp_path / "nothing") == (None, {})
    assert engine.save_checkpoint(tmp_path) is True
    train(engine, [0])
    engine.save_checkpoint(tmp_path, client_state={"epoch": 1})
    engine.save_checkpoint(tmp_path, tag="best", save_latest=False, client_state={"epoch": 7})
    engine.save_checkpoint(tmp_path, tag=12, save_latest=False)
    assert (tmp_path / "latest").read_text().strip() == "global_step1"
    assert {"global_step0", "global_step1", "best", "12"} <= set(os.listdir(tmp_path))
    path, state = engine.load_checkpoint(tmp_path)
    assert (os.path.basename(path), state) == ("global_step1", {"epoch": 1})
    assert engine.load_checkpoint(str(tmp_path), tag="best")[1] == {"epoch": 7}
    assert engine.load_checkpoint(tmp_path, 12)[1] == {}
    with pytest.raises(CheckpointError, match="none: no such checkpoint; expected a folder with checkpoints"):
        engine.load_checkpoint(tmp_path / "empty", "none")
    with pytest.raises(CheckpointError, match="nowhere: no such checkpoint; expected one of .*best"):
        engine.load_checkpoint(tmp_path, tag="nowhere")
    assert engine.global_steps == 1


def test_no_file_of_a_checkpoint_is_a_pickle(tmp_path):
    engine = start(config={**CONFIG, **WARMUP})[0]
    train(engine, [0])
    engine.save_checkpoint(tmp_path, client_state={"a": torch.ones(3)})
    for folder, _, files in os.walk(tmp_path):
        for name in files:
            with open(os.path.join(folder, name), "rb") as file:
                begin = file.read(4)
            assert begin[:2] not in (b"\x80\x02", b"\x80\x04", b"PK"), name
    with pytest.raises(CheckpointError, match=r"\['a'\] is a builtins.object; expected plain values"):
        engine.save_checkpoint(tmp_path, "again", client_state={"a": object()})
    assert not (tmp_path / "again").exists()


def saved(folder):
    engine = start(config={**CONFIG, **WARMUP})[0]
    train(engine, range(3))
    engine.save_checkpoint(folder, client_state={"epoch": 2})
    return engine


def moments_of(engine):
    return [engine.optimizer.whole_states(p)["exp_avg"] for p in engine.module.parameters()]


def test_weights_alone_states_alone_and_the_scheduler_are_chosen(tmp_path):
    first = saved(tmp_path)
    config = {**CONFIG, **WARMUP}

    def loaded(**arguments):
        engine = start(make(seed=5), config)[0]
        _, state = engine.load_checkpoint(tmp_path, **arguments)
        assert state == {"epoch": 2}
        assert_all_same(engine.module.parameters(), first.module.parameters())
        return engine

    engine = loaded(load_module_only=True)
    assert (engine.global_steps, engine.get_lr()) == (0, [0.0])
    assert not any(value.any() for value in moments_of(engine))
    engine = loaded(load_optimizer_states=False)
    assert engine.global_steps == 3
    assert not any(value.any() for value in moments_of(engine))
    engine = loaded(load_lr_scheduler_states=False)
    assert engine.lr_scheduler.last_batch_iteration != first.lr_scheduler.last_batch_iteration
    assert_all_same(moments_of(engine), moments_of(first))


def test_names_that_do_not_fit_are_an_error_unless_strict_is_false(tmp_path):
    first = saved(tmp_path)
    model = nn.Sequential(*make(seed=5), nn.Linear(16, 2))
    engine = start(model)[0]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match=r"3\.(weight|bias)"):
        engine.load_checkpoint(tmp_path)
    assert_all_same(model.state_dict().values(), before.values())
    path, _ = engine.load_checkpoint(tmp_path, load_module_strict=False)
    assert path is not None
    assert_all_same(model[:3].parameters(), first.module.parameters())
    assert same_bits(model[3].weight, before["3.weight"])


def test_frozen_parameters_are_left_out_when_asked(tmp_path):
    def partly_frozen(seed):
        model = make(seed=seed)
        model[0].requires_grad_(False)
        return model

    engine = start(partly_frozen(0))[0]
    engine.save_checkpoint(tmp_path / "all")
    engine.save_checkpoint(tmp_path / "few", exclude_frozen_parameters=True)
    for name, own in (("all", False), ("few", True)):
        other = start(partly_frozen(1))[0]
        other.load_checkpoint(tmp_path / name)
        assert same_bits(other.module[0].weight, engine.module[0].weight) is not own
        assert same_bits(other.module[2].weight, engine.module[2].weight)


# --- a client's optimizer ------------------------------------------------------------------------------------------

CLIENTS = {
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1), "adamw"),
    "Adam with L2": (lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1), "adamw"),
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01), "sgd"),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1), "adagrad"),
    "Muon": (lambda p: torch.optim.Muon([each for each in p if each.dim() == 2], lr=0.02), "muon"),
}


class Counting:
    """A scheduler that changes no rate."""

    def __init__(self, optimizer):
        self.steps = 0

    def step(self):
        self.steps += 1


def trained_of(model, optimizer):
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for p in model.parameters():
        p.requires_grad_(id(p) in held)
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.draws(2)
@pytest.mark.parametrize("before", [0, 3], ids=["new", "with states"])
@pytest.mark.parametrize("name", CLIENTS)
def test_a_clients_optimizer_goes_on_as_the_rule_of_its_name(name, before):
    make_optimizer, rule = CLIENTS[name]
    models = make(), make()
    optimizers = [make_optimizer([*model.parameters()]) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        trained_of(model, optimizer)
        beside(model, optimizer, range(20, 20 + before))
    with pytest.warns(ConfigWarning, match="has taken over its groups, hyperparameters and states"):
        engine, optimizer, _, scheduler = start(models[0], BATCH, optimizer=optimizers[0], lr_scheduler=Counting)
    assert optimizer.rule_name == rule
    assert not optimizers[0].state
    train(engine, range(4))
    assert (engine.global_steps, engine.global_samples, scheduler.steps) == (4, 32, 4)
    beside(models[1], optimizers[1], range(4))
    assert_close(engine, models[1], rtol=1e-5, atol=1e-6)
    assert optimizer.param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]


@pytest.mark.draws(1)
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("updates", [0, 2])
def test_a_group_without_parameters_of_a_clients_optimizer_stays(updates, first):
    """With states and a scheduler, whose rates are those of all groups."""
    ours, theirs = make(), make()
    clients = []
    for model in (ours, theirs):
        groups = [{"params": [], "lr": 0.5}, {"params": [*model.parameters()]}]
        clients.append(torch.optim.AdamW(groups if first else groups[::-1], lr=0.01, fused=True))
    schedules = [torch.optim.lr_scheduler.StepLR(client, 1, gamma=0.5) for client in clients]

    def update(model, client, schedule, seed):
        loss_of(model, seed).backward()
        client.step()
        client.zero_grad()
        schedule.step()

    for seed in range(updates):
        for each in zip((ours, theirs), clients, schedules, strict=True):
            update(*each, seed)
    with pytest.warns(ConfigWarning, match="has taken over its groups"):
        engine = start(ours, BATCH, optimizer=clients[0], lr_scheduler=schedules[0])[0]
    for seed in (7, 8):
        engine.backward(loss_of(engine, seed))
        engine.step()
        update(theirs, clients[1], schedules[1], seed)
    assert [group["lr"] for group in engine.optimizer.param_groups] == [g["lr"] for g in clients[1].param_groups]
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert same_bits(mine, other)


def test_a_clients_optimizer_follows_the_engines_and_trains_nothing_by_itself():
    client = torch.optim.AdamW((model := make()).parameters(), lr=0.5)
    before = torch.optim.lr_scheduler.StepLR(client, 1, gamma=0.5)
    engine = start(model, BATCH, optimizer=client, lr_scheduler=before)[0]
    train(engine, range(1))
    engine.optimizer.load_state_dict(copy.deepcopy(engine.optimizer.state_dict()))
    assert client.param_groups is engine.optimizer.param_groups
    after = torch.optim.lr_scheduler.StepLR(client, 1, gamma=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(engine, range(1))
        after.step()
    assert engine.get_lr() == [client.param_groups[0]["lr"]] == pytest.approx([0.0125])
    extra = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(StateError, match=r"AdamW\.step\(\): OffloadedAdamW has taken over .* engine\.step\(\)"):
        client.step()
    with pytest.raises(StateError, match=r"expected engine\.optimizer\.add_param_group\(\)"):
        client.add_param_group({"params": [extra]})
    with pytest.raises(StateError, match=r"expected engine\.optimizer\.load_state_dict\(\)"):
        client.load_state_dict(client.state_dict())
    assert len(engine.optimizer.param_groups) == 1
    del engine, before, after
    gc.collect()
    start(model)  # the client keeps no engine alive
    assert len(client.param_groups) == 1


def test_a_client_keeps_its_states_and_trains_on_where_initialize_fails():
    model, other = make(), make()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True) for each in (model, other)]
    for each, optimizer in zip((model, other), optimizers, strict=True):
        beside(each, optimizer, range(2))
    with pytest.raises(ZeroDivisionError):
        start(model, BATCH, optimizer=optimizers[0], lr_scheduler=lambda optimizer: 1 / 0)
    for each, optimizer in zip((model, other), optimizers, strict=True):
        beside(each, optimizer, range(2, 4))
    assert_all_same(model.state_dict().values(), other.state_dict().values())


OURS = {
    "DeepSpeedCPUAdam": lambda p: DeepSpeedCPUAdam(p, lr=1e-2, weight_decay=0.1),
    "DeepSpeedCPUAdam, L2": lambda p: DeepSpeedCPUAdam(p, lr=1e-2, weight_decay=0.1, adamw_mode=False),
    "FusedAdam": lambda p: FusedAdam(p, lr=1e-2, weight_decay=0.1),
    "FusedAdam, L2": lambda p: FusedAdam(p, lr=1e-2, weight_decay=0.1, adam_w_mode=False),
    "DeepSpeedCPUAdagrad": lambda p: DeepSpeedCPUAdagrad(p, lr=1e-2),
    "DeepSpeedCPULion": lambda p: DeepSpeedCPULion(p, lr=1e-3),
    "FusedLion": lambda p: FusedLion(p, lr=1e-3, betas=(0.9, 0.99)),
}
TORCHS = {
    "DeepSpeedCPUAdam": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "DeepSpeedCPUAdam, L2": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, fused=True),
    "FusedAdam": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "FusedAdam, L2": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, fused=True),
    "DeepSpeedCPUAdagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "DeepSpeedCPULion": lambda p: Lion(p, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0),
    "FusedLion": lambda p: Lion(p, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0),
}


@pytest.mark.draws(2)
@pytest.mark.parametrize("name", OURS)
def test_an_optimizer_of_deepspeeds_name_works_alone_and_as_a_client(name):
    alone, client, plain = make(), make(), make()
    optimizer = OURS[name](alone.parameters())
    beside(alone, optimizer, range(3))
    beside(plain, expected := TORCHS[name](plain.parameters()), range(3))
    engine, own, _, _ = start(client, BATCH, optimizer=OURS[name](client.parameters()))
    train(engine, range(3))
    assert type(own).__name__.startswith("Offloaded")
    assert_close(engine, plain, rtol=1e-6, atol=1e-7)
    for found, wanted in zip(alone.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.detach(), wanted.detach(), rtol=1e-6, atol=1e-7)
    assert expected.param_groups[0]["lr"] == own.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_a_function_makes_the_optimizer_of_the_parameters_that_are_given():
    seen = []

    def make_optimizer(params):
        seen.append(params)
        return torch.optim.SGD(params, lr=0.5)

    engine, optimizer, _, _ = start(model := make(), BATCH, optimizer=make_optimizer)
    assert [id(p) for p in seen[0]] == [id(p) for p in model.parameters()]
    assert (optimizer.rule_name, engine.get_lr(), engine.get_mom()) == ("sgd", [0.5], [0])
    start(model := make(), BATCH, optimizer=make_optimizer, model_parameters=groups_of(model))
    assert [group["weight_decay"] for group in seen[1]] == [0.1, 0.0]


def test_a_clients_optimizer_and_scheduler_go_before_the_sections():
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5)
    with pytest.warns(ConfigWarning) as warned:
        engine, _, _, scheduler = start(model, {**CONFIG, **WARMUP}, optimizer=optimizer, lr_scheduler=schedule)
    said = "\n".join(str(each.message) for each in warned)
    assert "initialize(optimizer=...) goes before its section 'optimizer'" in said
    assert "initialize(scheduler=...)" not in said
    assert "initialize(lr_scheduler=...) goes before its section 'scheduler'" in said
    assert (engine.optimizer.rule_name, engine.get_lr(), scheduler) == ("sgd", [0.25], schedule)


class OfTheirOwn(torch.optim.AdamW):
    pass


def one_of_each(params):
    return torch.optim.Adam([{"params": [p], "decoupled_weight_decay": p.dim() > 1} for p in params], weight_decay=0.1)


REFUSED = {
    "both kinds of decay": (one_of_each, "Adam with decoupled_weight_decay=True in one group and False in another"),
    "RMSprop": (lambda p: torch.optim.RMSprop(p), "RMSprop, of which there is no rule here; expected AdamW"),
    "a subclass": (OfTheirOwn, r"test_face\.OfTheirOwn, of which there is no rule here"),
    "amsgrad": (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True in group 0"),
    "maximize": (lambda p: torch.optim.SGD(p, lr=1.0, maximize=True), "maximize=True in group 0: negate the loss"),
    "a word": (lambda p: "adam", "got a builtins.str, of which there is no rule here"),
    "another model's": (lambda p: torch.optim.AdamW(make().parameters()), "is no parameter of the model"),
    "amsgrad of CPUAdam": (lambda p: DeepSpeedCPUAdam(p, amsgrad=True), "DeepSpeedCPUAdam: amsgrad=True"),
    "no correction": (lambda p: FusedAdam(p, bias_correction=False), "FusedAdam: .*bias_correction=False"),
    "amsgrad of Adagrad": (lambda p: DeepSpeedCPUAdagrad(p, amsgrad=True), "amsgrad=True"),
}


@pytest.mark.draws(2)
@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_without_a_rule_is_refused_by_name_and_nothing_changes(name):
    make_optimizer, match = REFUSED[name]
    model = make().requires_grad_()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((ConfigError, ParameterError), match=match):
        start(model, {**BATCH, "bf16": {"enabled": True}}, optimizer=make_optimizer(model.parameters()))
    assert_all_same(model.state_dict().values(), before.values())
    start(model)


def test_the_kind_of_weight_decay_is_that_of_the_groups():
    def optimizer(params):
        made = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.3, fused=True)
        made.param_groups[0]["decoupled_weight_decay"] = False
        return made

    engine, plain = start(config=BATCH, optimizer=optimizer)[0], make()
    train(engine, range(3))
    beside(plain, optimizer(plain.parameters()), range(3))
    assert_close(engine, plain, rtol=1e-6, atol=1e-7)


# --- bad input -----------------------------------------------------------------------------------------------------


def two_batch_sizes():
    return {"config": {**CONFIG, "train_batch_size": 6, "gradient_accumulation_steps": 2}}


WRONG = {
    "no model": (lambda: {"model": None}, AssertionError, r"model is None; expected model=\.\.\."),
    "a class": (lambda: {"model": nn.Linear}, AssertionError, "model is a type"),
    "no configuration": (lambda: {"config": None}, ConfigError, "got no configuration; expected one: config="),
    "two": (
        lambda: {"args": types.SimpleNamespace(deepspeed_config=CONFIG)},
        ConfigError,
        "both as an argument and as args.deepspeed_config",
    ),
    "a number": (lambda: {"config": 3}, ConfigError, "config: got int, expected a dict, or the path of a file"),
    "no such file": (lambda: {"config": "nowhere.json"}, ConfigError, "'nowhere.json' cannot be read"),
    "no batch size": (lambda: {"config": ADAMW}, ConfigError, "train_batch_size or train_micro_batch_size_per_gpu"),
    "batch sizes": (two_batch_sizes, ConfigError, r"got 6, expected .* = 16; change one of them"),
    "mpu": (lambda: {"mpu": object()}, ConfigError, "there is no tensor, pipeline, expert or sequence parallelism"),
    "a mesh": (lambda: {"mesh_param": (1, 1)}, ConfigError, r"mesh_param=\.\.\.\): DeepSpeed has it"),
    "an optimizer's type": (
        lambda: {"config": {**BATCH, "optimizer": {"type": "OneBitAdam"}}},
        ConfigError,
        "optimizer.type: got 'OneBitAdam', expected one of",
    ),
    "a scheduler's type": (
        lambda: {"config": {**CONFIG, "scheduler": {"type": "Cyclic"}}},
        ConfigError,
        "scheduler.type: got 'Cyclic', expected one of WarmupLR",
    ),
    "a rate": (
        lambda: {"config": {**BATCH, "optimizer": {"type": "Adam", "params": {"lr": "fast"}}}},
        ConfigError,
        "lr: got 'fast', expected a number",
    ),
    "a scheduler": (
        lambda: {"lr_scheduler": "cosine"},
        ConfigError,
        "lr_scheduler: got 'cosine', expected a scheduler",
    ),
    "a scheduler of no optimizer": (
        lambda: {"lr_scheduler": torch.optim.lr_scheduler.StepLR(torch.optim.SGD(make().parameters()), 1)},
        StateError,
        "lr_scheduler: its optimizer was not given",
    ),
    "data": (lambda: {"training_data": 3}, ConfigError, "training_data: got 3, expected a torch Dataset"),
    "parameters": (
        lambda: {"model_parameters": 3},
        ParameterError,
        "params: got an int, expected parameters or groups",
    ),
    "used up": (lambda: {"model_parameters": iter(())}, ParameterError, "got none, expected at least one parameter"),
    "of another": (lambda: {"model_parameters": make().parameters()}, ParameterError, "is no parameter of the model"),
    "on meta": (
        lambda: {"model": make(device="meta")},
        ParameterError,
        "'0.weight' is on the meta device and holds no values; .* materialise the model first",
    ),
    "no group": (
        lambda: {"dist_init_required": False},
        StateError,
        "dist_init_required=False, and this process is in no group",
    ),
    "an engine": (lambda: {"model": start()[0]}, StateError, "belongs to another engine"),
    "dropped": (lambda: {"param_dict": {}}, TypeError, "unexpected keyword argument 'param_dict'"),
}


@pytest.mark.draws(5)
@pytest.mark.parametrize("what", WRONG)
def test_each_wrong_argument_is_one_error_and_the_model_stays(what):
    arguments, kind, match = WRONG[what]
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(kind, match=match):
        deepspeed.initialize(**{"model": model, "config": CONFIG, **arguments()})
    assert_all_same(model.state_dict().values(), before.values())
    if not dist.is_initialized() or what != "no group":
        start(model)


def test_arguments_of_methods_that_were_dropped_are_named():
    engine = start()[0]
    for name in ("allreduce_gradients", "release_loss"):
        with pytest.raises(TypeError, match=name):
            engine.backward(loss_of(engine, 0), **{name: False})
    with pytest.raises(ConfigError, match="custom_load_fn.*not taken here"):
        engine.load_checkpoint("here", custom_load_fn=print)
    with pytest.raises(ConfigError, match="schedule"):
        engine.compile(schedule=[])


@pytest.mark.draws(1)
@pytest.mark.parametrize("numbers", [(2, 2), (2, 3), (3, 2), (3, 3)], ids=str)
def test_a_second_engine_over_a_model_is_an_error_and_the_first_goes_on(numbers):
    model, plain = make(), make()
    first, second = ({**CONFIG, **stage(number)} for number in numbers)
    engine, alone = start(model, first)[0], start(plain, first)[0]
    train(engine, [0])
    with pytest.raises(StateError, match=r"'0.weight' belongs to another engine .*destroy\(\) the other one first"):
        start(model, second)
    with pytest.raises(StateError, match=r"'1.0.weight' belongs to another engine"):
        start(nn.Sequential(nn.Linear(4, 4), model), second)
    train(engine, [1, 2])
    train(alone, range(3))
    assert_all_same(everything(engine), everything(alone))
    assert engine.global_steps == 3
    engine.destroy()
    assert start(model, second)[0].global_steps == 0


def test_a_model_whose_engine_is_garbage_can_have_another():
    model = make()
    cycle = [start(model)[0]]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        train(start(model)[0], [0])
    finally:
        gc.enable()


# --- devices, and parameters of stage 3 ----------------------------------------------------------------------------


def test_the_accelerator_has_the_names_that_scripts_call():
    found = deepspeed.get_accelerator()
    assert found.device_name() == found.current_device_name() == torch.device(found.device_name(0)).type
    assert found.communication_backend_name() == dist.get_default_backend_for_device(found.device_name())
    found.manual_seed_all(3)
    first = torch.rand(2)
    torch.manual_seed(3)
    assert same_bits(first, torch.rand(2))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "memory_cached", "max_memory_cached"):
        assert getattr(found, name)() >= 0
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
        getattr(found, name)()
    assert found.on_accelerator(tensor := torch.ones(2, device=found.device_name()))
    assert not found.on_accelerator(tensor.to("meta"))
    assert same_bits(found.pin_memory(torch.ones(2)), torch.ones(2))
    with pytest.raises(AttributeError, match=r"get_accelerator\(\).nonsense: torch has no such name"):
        found.nonsense  # noqa: B018


def test_parameters_of_stage_3_say_whether_they_are_in_shards():
    """As ``maybe_zero_3`` of scripts for chat models, and PEFT, ask them."""
    from frontends.torch.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    engine = start(config={**CONFIG, **stage(3)})[0]
    params = [*engine.module.parameters()]
    assert [param.ds_id - params[0].ds_id for param in params] == [0, 1, 2, 3]
    assert [(param.ds_numel, param.ds_shape) for param in params] == [(p.numel(), p.shape) for p in make().parameters()]
    for param in params:
        assert param.ds_status == ZeroParamStatus.NOT_AVAILABLE
        with deepspeed.zero.GatheredParameters([param]):
            assert param.ds_status == ZeroParamStatus.AVAILABLE
            assert copy.deepcopy(param.ds_status) is ZeroParamStatus.AVAILABLE
        assert param.ds_status != ZeroParamStatus.AVAILABLE
    assert not hasattr(start(config={**CONFIG, **stage(2)})[0].module[0].weight, "ds_id")
    alone = start(config={**CONFIG, "zero_optimization": {"stage": 3}})[0].module[0].weight  # nothing is cut
    assert (alone.ds_status, alone.ds_persist) == (ZeroParamStatus.AVAILABLE, True)
    cut = {**CONFIG, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    cut["zero_optimization"]["stage3_param_persistence_threshold"] = 100
    with deepspeed.zero.Init(config_dict_or_path=cut):
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 16))
        model.register_parameter("none", None)
        assert model[0].weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
    numbers = [param.ds_id for param in model.parameters()]
    assert len({*numbers}) == 4
    assert [param.ds_persist for param in model.parameters()] == [False, True, False, True]
    with deepspeed.zero.GatheredParameters(model[0].weight):
        assert model[0].weight.ds_status == ZeroParamStatus.AVAILABLE
    assert not hasattr(torch.nn.Linear(2, 2).weight, "ds_id")
    deepspeed.initialize(model=model, config=cut)
    assert [param.ds_id for param in model.parameters()] == numbers
    again = torch.nn.Linear(16, 16)
    deepspeed.zero.Init(module=again, config_dict_or_path=cut)
    assert again.weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
    assert again.weight.ds_status in {ZeroParamStatus.NOT_AVAILABLE}
    assert again.weight.ds_status.name == "NOT_AVAILABLE"
    assert again.weight.ds_status == again.weight.ds_status
    assert again.bias.ds_persist
    assert again.bias.ds_status is ZeroParamStatus.AVAILABLE


def test_what_has_no_values_yet_has_no_marks_under_init_and_copies_have_their_own(tmp_path):
    cut = {**CONFIG, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    cut["zero_optimization"]["stage3_param_persistence_threshold"] = 100
    others = []
    with deepspeed.zero.Init(config_dict_or_path=cut):
        lazy = torch.nn.LazyLinear(4)
        with torch.device("meta"):
            meta = torch.nn.Linear(16, 16)
        small = torch.nn.Linear(2, 2)
        torch.nn.Linear(16, 16)
        encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        thread = threading.Thread(target=lambda: others.extend([torch.nn.Linear(16, 16), torch.nn.LazyLinear(2)]))
        thread.start()
        thread.join()
    assert not any(hasattr(p, "ds_id") for module in (lazy, meta, *others) for p in module.parameters())
    assert len({p.ds_id for p in encoder.parameters()}) == len([*encoder.parameters()]) == 24
    assert {p.ds_persist for p in encoder.parameters()} == {True, False}
    torch.utils.swap_tensors(small.weight, torch.nn.Parameter(torch.ones(2, 2)))  # as .to() may do
    torch.save(dict(small.named_parameters()), tmp_path / "small")
    torch.testing.assert_close(torch.load(tmp_path / "small")["bias"], small.bias)
    deepspeed.zero.Init(module=meta, config_dict_or_path=cut)
    assert [p.ds_persist for p in meta.parameters()] == [False, True]
    deepspeed.zero.Init(module=lazy, config_dict_or_path=cut)


def test_the_optimizer_inside_the_optimizer_is_the_same_and_the_last():
    engine = start()[0]
    inner = engine.optimizer.optimizer
    train(engine, [0])
    assert inner.param_groups is engine.optimizer.param_groups
    assert inner.state[inner.param_groups[0]["params"][0]]["step"] == 1
    assert not hasattr(inner, "optimizer")
    assert "optimizer" not in engine.optimizer.state_dict()
    copy.copy(inner)


def test_a_model_is_built_in_shards_and_written_by_one_rank():
    config = {**CONFIG, **stage(3)}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
    values = make().state_dict()
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters(param, modifier_rank=0):
            param.data.copy_(values[name])
    with deepspeed.zero.Init(enabled=False):
        plain = make()
    engine, other = start(model, config)[0], start(plain, config)[0]
    train(engine, range(2))
    train(other, range(2))
    assert_all_same(everything(engine), everything(other))


# --- the hints of wrap ---------------------------------------------------------------------------------------------

HINTS = {
    "model_parameters": r"expected params=\.\.\., parameters or groups",
    "config_params": r"expected config=\.\.\., or the second argument",
    "config_dict_or_path": r"expected config=\.\.\., or the second argument",
    "lr_scheduler": "expected a scheduler of torch on engine.optimizer",
    "training_data": "expected a data loader of your own",
    "mpu": r"expected process_group=\.\.\.",
}


@pytest.mark.parametrize("argument", HINTS)
def test_wrap_says_what_it_has_in_place_of_an_argument_of_initialize(argument):
    with pytest.raises(ConfigError, match=f"'{argument}'; {HINTS[argument]}"):
        wrap(make(), **{argument: []})
    with pytest.raises(ConfigError, match=HINTS[argument]):
        OffloadConfig.resolve(None, **{argument: []})


def test_methods_of_an_engine_say_what_they_have_in_place_of_deepspeeds_arguments(tmp_path):
    engine = wrap(make(), lr=1e-2)
    calls = [
        (
            lambda: engine.backward(loss_of(engine, 0), scale_wrt_gas=False),
            r"backward\(\) got scale_wrt_gas=.*average=",
        ),
        (lambda: engine.save_checkpoint(tmp_path, client_state={}), "got client_state=.*expected extras="),
        (lambda: engine.save_checkpoint(tmp_path, save_latest=False), "got save_latest=.*expected latest="),
        (lambda: engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True), "expected frozen=False"),
        (lambda: engine.load_checkpoint(tmp_path, tag="a"), r"got tag=.*load_checkpoint\(folder / tag\)"),
        (lambda: engine.load_checkpoint(load_dir=tmp_path), "the folder as the first argument"),
        (lambda: engine.load_checkpoint(tmp_path, load_module_strict=False), r"expected strict=\.\.\."),
        (lambda: engine.load_checkpoint(tmp_path, load_module_only=True), "expected optimizer_states=False"),
    ]
    for call, match in calls:
        with pytest.raises(TypeError, match=match):
            call()
    assert not os.listdir(tmp_path)
    train(engine, [0])


def test_a_model_can_have_an_engine_after_its_scheduler_or_loader_was_an_error():
    model, errors = make(), []
    for wrong in ({"lr_scheduler": lambda optimizer: 1 / 0}, {"training_data": iter([])}):
        with pytest.raises((ZeroDivisionError, TypeError)) as error:
            start(model, **wrong)
        errors.append(error)  # it holds the frames, as a notebook does
    train(start(model)[0], [0])


# --- ranks ---------------------------------------------------------------------------------------------------------


@pytest.mark.long("starts two ranks")
@pytest.mark.draws(1)
@pytest.mark.parametrize("number", [2, 3])
def test_a_scheduler_that_one_rank_cannot_make_is_an_error_of_all(number):
    @on_ranks(2)
    def said(rank):
        model, config = make(), {**CONFIG, **stage(number)}
        with pytest.raises((ZeroDivisionError, StateError)) as error:
            start(model, config, lr_scheduler=lambda optimizer: 1 / 0 if rank else None)
        train(start(model, config)[0], [0])
        return str(error.value)

    assert said == ["initialize() failed in process 1, and so in all; it says there why", "division by zero"]


def test_what_one_rank_cannot_read_or_write_is_an_error_of_all_and_the_run_goes_on(tmp_path):
    @on_ranks(2)
    def said(rank):
        engine = start()[0]
        train(engine, [0])
        engine.save_checkpoint(tmp_path / "0", "first")
        (tmp_path / "file").write_text("")
        mine, nothing = tmp_path / str(rank), tmp_path / "file" / "folder"
        calls = [
            lambda: engine.load_checkpoint(mine),
            lambda: engine.load_checkpoint(mine, "first"),
            lambda: engine.save_16bit_model(nothing),
        ]
        found = []
        for call in calls:
            with pytest.raises((CheckpointError, NotADirectoryError)) as error:
                call()
            found.append(str(error.value))
        train(engine, [1])
        return found, engine.global_steps

    loads, saves = (f"{what} of a checkpoint failed in process" for what in ("load", "save"))
    differs = "no checkpoint on process 1, and another on process 0; expected one folder"
    expected = [loads, loads, "Not a directory"], [differs, "no such checkpoint", saves]
    for (of_rank, steps), texts in zip(said, expected, strict=True):
        assert steps == 2
        assert [text in got for got, text in zip(of_rank, texts, strict=True)] == [True] * 3, of_rank


# --- interrupts ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*the run goes on with its hyperparameters")
def test_a_scheduler_of_torch_refuses_the_state_of_another_kind(tmp_path):
    """As when a script's ``scheduler`` section gives way to a scheduler of its own: torch's takes any state."""
    engine = start(config={**CONFIG, **WARMUP})[0]
    train(engine, range(3))
    engine.save_checkpoint(tmp_path)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    other = start(model, {**BATCH}, optimizer=optimizer, lr_scheduler=schedule)[0]
    before = everything(other)
    with pytest.raises(CheckpointError, match=r"saved of a scheduler with 'last_batch_iteration', which no StepLR has"):
        other.load_checkpoint(tmp_path)
    assert_all_same(everything(other), before)
    assert (schedule.last_epoch, other.global_steps) == (0, 0)
    other.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert (schedule.last_epoch, other.global_steps) == (0, 3)


def test_a_scheduler_goes_on_with_a_checkpoint_whose_load_was_interrupted_at_its_end(tmp_path):
    config = {**CONFIG, **WARMUP}
    saving = start(config=config)[0]
    train(saving, range(3))
    saving.save_checkpoint(tmp_path)
    train(saving, [7])
    expected = saving.global_steps, saving.lr_scheduler.last_batch_iteration

    def begun():
        engine = start(config=config)[0]
        train(engine, [0])
        return engine

    counted = begun()
    lines = [*first_passes(lambda: counted.load_checkpoint(tmp_path))]
    counted.destroy()
    outcomes, interrupts = [], 0
    for line in lines[-12:]:
        engine = begun()
        interrupts += interrupt_before(line, lambda engine=engine: engine.load_checkpoint(tmp_path))
        try:
            train(engine, [7])
            outcomes.append((engine.global_steps, engine.lr_scheduler.last_batch_iteration))
        except StateError:  # the states themselves are half loaded
            continue
    assert interrupts  # a line that only the first load runs does not come
    assert set(outcomes) == {expected}
