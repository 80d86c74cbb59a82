"""Runs that DeepSpeed has saved go on here; the files are written as DeepSpeed writes them."""

import argparse
import codecs
import copy
import errno
import math
import os
import shutil
import signal
import warnings
import zipfile
from collections import OrderedDict

import pytest
import torch

from frontends.torch import export_deepspeed, load_deepspeed, wrap, zero_checkpoint
from frontends.torch.integrations.zero_files.pickles import load_any
from frontends.torch.params.tensors import NUMPY_DTYPES
from offload_core.errors import CheckpointError, CheckpointWarning, StateError
from offload_core.support import checkpoint_folder
from tests.support.deepspeed_checkpoints import (
    FROZEN,
    Run,
    engine_of,
    groups_of,
    importable_scalers,
    model,
    scaler,
    write,
)
from tests.support.hostile import not_forever
from tests.support.interrupts import first_passes, interrupt_at
from tests.support.processes import on_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*the run goes on with its hyperparameters"),
    pytest.mark.filterwarnings("ignore:.*its state of 'lr_scheduler' is not loaded"),
]

STAGE_3 = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 10, "reduce_bucket_size": 1000}
LAYOUTS = [(0, 1), (1, 1), (1, 3), (2, 2), (3, 1), (3, 2), (3, 3)]
"""Stages, and ranks that saved."""


def states_of(engine):
    """All states by the model's names, and the counts and values that a load sets."""
    optimizer = engine.optimizer
    names = {id(p): name for name, p in engine.module.named_parameters()}
    found = {names[id(slot.param)]: optimizer.whole_states(slot.param) for slot in optimizer.slots}
    steps = {names[id(slot.param)]: int(optimizer.state[slot.param]["step"]) for slot in optimizer.slots}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return found, steps, groups, optimizer.updates


def assert_taken_over(engine, run, kinds=None):
    found, steps, groups, updates = states_of(engine)
    for name, states in found.items():
        assert torch.equal(states["master"], run.trained[name]), name
        for kind, values in run.states[name].items():
            assert torch.equal(states[(kinds or {}).get(kind, kind)], values), (name, kind)
    assert set(steps.values()) == {run.updates}
    assert updates == run.updates
    for mine, theirs in zip(groups, run.groups, strict=True):
        assert {key: mine[key] for key in theirs} == theirs


@pytest.mark.draws(5)
@pytest.mark.parametrize("fields", [{}, {"param_dtype": "bfloat16"}, {**STAGE_3, "param_dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize(("stage", "ranks"), LAYOUTS)
def test_an_engine_takes_over_every_state_of_every_layout(stage, ranks, fields, tmp_path):
    run = Run()
    write(tmp_path, run, stage, ranks, longest=20)
    engine = engine_of(**fields)
    checkpoint = zero_checkpoint(tmp_path)
    assert (checkpoint.path, checkpoint.tag) == (tmp_path / "now", "now")
    assert (checkpoint.global_steps, checkpoint.skipped_steps, checkpoint.global_samples) == (7, 2, 99)
    assert checkpoint.lr_scheduler == {"last_batch_iteration": 4}
    checkpoint.load(engine)
    assert_taken_over(engine, run)
    engine.optimizer.flush()
    weights = dict(engine.named_weights(dtype="float32"))
    for name in FROZEN:
        rounded = run.others[name].to(engine.module.get_parameter(name).dtype if name != "offset" else torch.float32)
        assert torch.equal(weights[name], rounded.float()), name
    twin = engine_of(**fields)
    load_deepspeed(twin, tmp_path, tag="now", states=True)
    for each in (engine, twin):  # and trains on
        each.backward(each(torch.arange(7)).float().pow(2).mean())
        assert each.step().updated
    assert states_of(engine)[1:] == states_of(twin)[1:]


@pytest.mark.draws(1)
@pytest.mark.parametrize("stage", [1, 3])
def test_two_ranks_take_over_what_three_have_saved(stage, tmp_path):
    run = Run()
    write(tmp_path, run, 3 if stage == 1 else 2, 3)

    @on_ranks(2)
    def _(rank):
        engine = engine_of(stage=stage, **({"param_persistence_threshold": 0} if stage == 3 else {}))
        zero_checkpoint(tmp_path).load(engine)
        assert_taken_over(engine, run)
        before = states_of(engine)
        with pytest.raises(CheckpointError, match="no such folder" if rank else "failed in process 1"):
            load_deepspeed(engine, tmp_path, tag="gone" if rank else None, states=True)
        assert str(states_of(engine)) == str(before)
        engine.backward(engine(torch.arange(7)).float().pow(2).mean())
        assert engine.step().updated


RULES = {
    "sgd": (["momentum_buffer"], {"momentum": 0.75, "dampening": 0.0, "nesterov": False}, {}),
    "lion": (["exp_avg"], {"betas": (0.8, 0.95)}, {}),
    "adagrad": (["exp_avg_sq"], {"eps": 1e-6}, {"exp_avg_sq": "sum"}),
}
"""The states of other optimizers in DeepSpeed, their hyperparameters, and our names of states."""


@pytest.mark.draws(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_other_optimizers_are_taken_over_and_their_names_are_said_where_they_differ(rule, stage, tmp_path):
    kinds, hypers, names = RULES[rule]
    run = Run(kinds)
    run.groups = [{"lr": 0.25, "weight_decay": decay, **hypers} for decay in (0.5, 0.0)]
    if rule == "sgd":
        run.step = {}  # it has no count
    write(tmp_path, run, stage, 1 if stage == 0 else 2)
    fields = {"momentum": 0.5} if rule == "sgd" else {}
    engine = engine_of(optimizer=rule, lr=1e-3, **fields)
    zero_checkpoint(tmp_path).load(engine)
    assert_taken_over(engine, run, names)
    adam = engine_of(lr=1e-3)
    before = states_of(adam)
    with pytest.raises(CheckpointError, match=f"optimizer='{rule}' there, and is by 'adamw' here"):
        zero_checkpoint(tmp_path).load(adam)
    assert str(states_of(adam)) == str(before)
    zero_checkpoint(tmp_path).load(adam, optimizer_states=False)
    found, steps, _, updates = states_of(adam)
    assert {*steps.values(), updates} == {0}
    assert all(torch.equal(found[name]["master"], run.trained[name]) for name in found)


def test_a_lion_of_the_cpu_keeps_a_second_moment_that_it_does_not_use(tmp_path):
    run = Run(["exp_avg", "exp_avg_sq"])
    run.groups = [{"lr": 0.25, "weight_decay": decay, "betas": (0.8, 0.95)} for decay in (0.5, 0.0)]
    write(tmp_path, run, 2, 2)
    engine = engine_of(optimizer="lion", lr=1e-3)
    zero_checkpoint(tmp_path).load(engine)
    for states in run.states.values():
        del states["exp_avg_sq"]
    assert_taken_over(engine, run)


def test_a_group_in_one_count_of_steps_and_without_hyperparameters_keeps_its_own(tmp_path):
    """DeepSpeed's elastic checkpoints hold states alone."""
    run = Run()
    run.step, run.optimizer = {}, {"base_optimizer_state_step": 5}
    write(tmp_path, run, 1, 2, elastic=True)
    engine = engine_of(lr=0.125)
    run.groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    zero_checkpoint(tmp_path).load(engine)
    assert_taken_over(engine, run)


@pytest.mark.draws(2)
@pytest.mark.parametrize(
    ("cur_iter", "last_overflow_iter", "good_steps"),
    [(0, -1, 0), (1, -1, 0), (4, -1, 3), (5, -1, 0), (10, -1, 1), (10, 9, 0), (10, 8, 0), (10, 7, 1)],
)
def test_a_dynamic_loss_scale_goes_on_where_it_was(cur_iter, last_overflow_iter, good_steps, tmp_path):
    run = Run()
    numbers = {"cur_iter": cur_iter, "last_overflow_iter": last_overflow_iter, "cur_hysteresis": 3}
    run.optimizer = {"loss_scaler": scaler(cur_scale=512.0, dynamic=True, dtype=torch.float16, **numbers)}
    write(tmp_path, run, 2, 2)
    engine = engine_of(param_dtype="float16", loss_scale_window=4)
    checkpoint = zero_checkpoint(tmp_path)
    assert checkpoint.loss_scale == {"cur_scale": 512.0, "dynamic": True, **numbers}
    checkpoint.load(engine)
    assert engine.optimizer.core.scaler.state_dict() == {"scale": 512.0, "good_steps": good_steps, "tolerated": 2}
    fixed = engine_of(param_dtype="float16", loss_scale=8.0)
    checkpoint.load(fixed)
    assert fixed.optimizer.core.scaler.scale == 8.0
    run.optimizer = {"loss_scaler": scaler(cur_scale=-1.0, dynamic=True, **numbers)}
    write(tmp_path, run, 2, 2, tag="damaged")
    before = states_of(engine)
    with pytest.raises(CheckpointError, match="the loss scale"):
        zero_checkpoint(tmp_path).load(engine)
    assert str(states_of(engine)) == str(before)


def test_objects_in_a_client_state_are_left_out_and_nothing_is_run(tmp_path):
    class Runs:
        def __reduce__(self):
            return eval, (f"__import__('os').mkdir({str(tmp_path / 'ran')!r})",)

    run = Run()
    run.described = {"epoch": 3, "best": [0.5, {"at": (1, None)}], "mask": torch.ones(2)}
    write(tmp_path, run, 2, 1, tag="plain")
    found = zero_checkpoint(tmp_path).client_state
    assert found.pop("mask").tolist() == [1, 1]
    assert found == {"epoch": 3, "best": [0.5, {"at": (1, None)}]}
    run.described = {"epoch": 3, "args": argparse.Namespace(seed=1), "code": [Runs()]}
    write(tmp_path, run, 2, 1)
    with pytest.warns(CheckpointWarning, match=r"leaves out 'args' \('argparse.Namespace'\), 'code' \(.*eval"):
        checkpoint = zero_checkpoint(tmp_path)
    assert checkpoint.client_state == {"epoch": 3}
    engine = engine_of()
    checkpoint.load(engine)
    assert_taken_over(engine, run)
    assert not (tmp_path / "ran").exists()


def changed(path, change):
    """Change what is in a file, and return a function that puts the file back."""
    whole = path.read_bytes()
    with importable_scalers():
        state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)
    return lambda: path.write_bytes(whole)


OPTIMIZER = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


def damages(stage):
    """Damages of a checkpoint of two ranks, each with what is said of it."""
    key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"

    def at(state):
        return state["optimizer_state_dict"][key]

    def cut(state):
        at(state)["state"][0]["exp_avg"] = at(state)["state"][0]["exp_avg"][:2]

    def turned(state):
        at(state)["state"][0]["exp_avg"] = at(state)["state"][0]["exp_avg"].view(1, -1)

    def lost(state):
        del at(state)["state"][0]["exp_avg_sq"]

    def added(state):
        at(state)["state"][0]["max_exp_avg_sq"] = torch.ones(3)

    def fewer(state):
        at(state)["param_groups"].pop()

    def no_groups(state):
        at(state)["param_groups"] = 7

    return {
        cut: "elements of exp_avg lie end to end",
        turned: "expected flat tensors",
        lost: r"has states 'exp_avg', and .* 'exp_avg', 'exp_avg_sq'",
        added: "keeps 'max_exp_avg_sq', which none of ours does",
        fewer: "groups of states, expected|parts, expected",
        no_groups: "'param_groups' is an int",
    }


@pytest.mark.draws(1)
@pytest.mark.parametrize("stage", [2, 3])
def test_damaged_states_are_refused_and_nothing_changes_but_weights_can_still_be_loaded(stage, tmp_path):
    run = Run()
    write(tmp_path, run, stage, 2)
    engine = engine_of()
    before = str(states_of(engine))
    for damage, said in damages(stage).items():
        put_back = changed(tmp_path / "now" / OPTIMIZER, damage)
        with pytest.raises(CheckpointError, match=said):
            zero_checkpoint(tmp_path).load(engine)
        assert str(states_of(engine)) == before, damage.__name__
        weights = engine_of()
        load_deepspeed(weights, tmp_path)
        assert torch.equal(states_of(weights)[0]["norm.bias"]["master"], run.trained["norm.bias"])
        put_back()
    zero_checkpoint(tmp_path).load(engine)
    assert_taken_over(engine, run)


def ways_to(tree, at=()):
    """The ways to everything in dicts and lists."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in pairs:
        yield (*at, key)
        yield from ways_to(value, (*at, key))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_any_damage_of_states_is_an_error_that_changes_nothing_or_loads(stage, tmp_path):
    run = Run()
    run.optimizer = {"loss_scaler": scaler(cur_scale=512.0, dynamic=True, cur_iter=3)} if stage else {}
    write(tmp_path, run, stage, 1)
    file = "zero_pp_rank_0_mp_rank_00_optim_states.pt" if stage else "mp_rank_00_model_states.pt"
    path = tmp_path / "now" / file
    with importable_scalers():
        state = torch.load(path, weights_only=False)
    state.pop("module", None) if stage else None
    refused = loaded = 0
    engine = engine_of(param_dtype="float16")
    before = str(states_of(engine))
    for way in ways_to(state):
        if "module" in way:
            continue
        for damage in (7, -1.5, math.nan, torch.zeros(1), torch.full((), math.nan), [], {}, "no values", None):
            wrong = copy.deepcopy(state)
            holder = wrong
            for key in way[:-1]:
                holder = holder[key]
            holder[way[-1]] = damage
            with importable_scalers():
                torch.save(wrong, path)
            refusal = None
            try:
                zero_checkpoint(tmp_path).load(engine)
            except CheckpointError as error:
                refusal = str(error)
            if refusal is not None:
                refused += 1
                assert str(tmp_path) in refusal, (way, damage)
                assert str(states_of(engine)) == before, (way, damage)
                continue
            loaded += 1
            engine.close()
            engine = engine_of(param_dtype="float16")
    assert min(refused, loaded) > 20


def test_other_checkpoints_are_refused_by_name(tmp_path):
    run = Run()
    write(tmp_path, run, 2, 2)
    path = tmp_path / "now"

    def refused(said, act=lambda: zero_checkpoint(tmp_path)):
        with pytest.raises(CheckpointError, match=said):
            act()

    for name in (
        "layer_00-model_00-model_states.pt",
        "mp_rank_01_model_states.pt",
        "layer_0_expert_0_mp_rank_00_model_states.pt",
    ):
        (path / name).write_bytes(b"")
        refused("is of a pipeline's, a tensor's or an expert's parallel ranks")
        (path / name).unlink()
    (path / "offloaded_tensors").mkdir()
    refused("had its states on disks")
    (path / "offloaded_tensors").rmdir()
    for name in [file.name for file in path.iterdir()]:
        os.rename(path / name, tmp_path / name)
        refused(r"no such file of rank|files such as|no such file|expected")
        os.rename(tmp_path / name, path / name)
    engine = engine_of()
    mine = engine.save_checkpoint(tmp_path / "ours")
    refused("is a checkpoint of ours", lambda: zero_checkpoint(tmp_path / "ours", mine.name))
    refused("tag: got '../now', expected the name of a folder", lambda: zero_checkpoint(tmp_path / "ours", "../now"))
    refused("states=True into a Model", lambda: load_deepspeed(model(), tmp_path, states=True))
    other = wrap(torch.nn.Linear(2, 2))
    refused("a checkpoint of another model", lambda: zero_checkpoint(tmp_path).load(other))
    l2 = engine_of(adam_mode="adam")
    write(tmp_path / "l2", Run(decoupled_weight_decay=True), 2, 1)
    refused(
        r"was trained with adam_mode='adamw' \(weight_decay=0.5\), and adam_mode='adam' here",
        lambda: zero_checkpoint(tmp_path / "l2").load(l2),
    )
    one_group = wrap(model())
    refused("2 parameter groups in it, expected 1", lambda: zero_checkpoint(tmp_path).load(one_group))
    run.described = {"global_steps": -1}
    write(tmp_path, run, 1, 1, tag="counts")
    refused("global_steps is -1, expected a count")


def test_without_zero_parameters_in_another_order_are_refused(tmp_path):
    run = Run()
    run.optimizer = {"fp32_groups": [[run.trained[n] for n in names] for names in run.names]}
    run.optimizer["fp32_groups"][1] = run.optimizer["fp32_groups"][1][::-1]
    write(tmp_path, run, 0, 1)
    masters = run.optimizer
    engine = engine_of()
    before = str(states_of(engine))

    def as_deepspeed_holds_it(state):
        optimizer = state["optimizer"]
        state["optimizer"] = {
            **masters,
            "optimizer_state_dict": {k: optimizer[k] for k in ("state", "param_groups")},
        }

    changed(tmp_path / "now" / "mp_rank_00_model_states.pt", as_deepspeed_holds_it)
    with pytest.raises(
        CheckpointError, match=r"number 2 is not 'back.bias'; expected the parameters in the same order"
    ):
        zero_checkpoint(tmp_path).load(engine)
    assert str(states_of(engine)) == before


def test_what_the_model_lacks_is_left_out_if_asked_for(tmp_path):
    run = Run()
    run.others.pop("frozen.bias")  # as exclude_frozen_parameters leaves it out
    run.others["gone"] = torch.ones(2)
    write(tmp_path, run, 2, 2)
    engine = engine_of()
    kept = engine.module.frozen.bias.clone()
    with pytest.raises(CheckpointError, match="it lacks 'frozen.bias'; this model lacks 'gone'"):
        zero_checkpoint(tmp_path).load(engine)
    zero_checkpoint(tmp_path).load(engine, strict=False)
    assert_taken_over(engine, run)
    assert torch.equal(engine.module.frozen.bias, kept)


def test_a_save_that_is_under_way_has_the_states_of_its_call(tmp_path):
    run = Run()
    write(tmp_path / "theirs", run, 2, 2)
    engine = engine_of()
    before = str(states_of(engine))
    engine.save_checkpoint(tmp_path / "ours", wait=False)
    zero_checkpoint(tmp_path / "theirs").load(engine)
    assert_taken_over(engine, run)
    engine.load_checkpoint(tmp_path / "ours")
    assert str(states_of(engine)) == before


def test_the_face_loads_what_deepspeed_has_saved(tmp_path):
    from frontends.torch import deepspeed

    run = Run()
    run.described = {"epoch": 3, "lr_scheduler": {"last_batch_iteration": 4}}
    write(tmp_path, run, 2, 2)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 1},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 20}},
    }
    made = model()
    engine, _, _, scheduler = deepspeed.initialize(model=made, model_parameters=groups_of(made), config=config)
    path, client_state = engine.load_checkpoint(tmp_path)
    assert (path, client_state) == (str(tmp_path / "now"), {"epoch": 3})
    assert (engine.global_steps, engine.skipped_steps, engine.global_samples) == (7, 2, 99)
    assert scheduler.last_batch_iteration == 4
    assert_taken_over(engine, run)
    made = model()
    weights = deepspeed.initialize(model=made, model_parameters=groups_of(made), config=config)[0]
    weights.load_checkpoint(tmp_path, load_module_only=True)
    assert (weights.global_steps, weights.optimizer.updates, weights.lr_scheduler.last_batch_iteration) == (0, 0, -1)
    assert torch.equal(states_of(weights)[0]["norm.bias"]["master"], run.trained["norm.bias"])
    with pytest.raises(CheckpointError, match="tag: got '..'"):
        engine.load_checkpoint(tmp_path, tag="..")


# --- to DeepSpeed ------------------------------------------------------------------------------------


def trained(engine, steps):
    for step in steps:
        ids = torch.randint(0, 7, (4,), generator=torch.Generator().manual_seed(step))
        engine.backward(engine(ids).float().pow(2).mean())
        engine.step()


@pytest.mark.draws(1)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "fields", [{"param_dtype": "bfloat16"}, {"stage": 3, "param_persistence_threshold": 0}], ids=str
)
def test_a_universal_checkpoint_holds_the_run(world_size, fields, tmp_path):
    (tmp_path / "photos").mkdir()

    @on_ranks(world_size)
    def _(rank):
        engine = engine_of(lr=1e-2, **fields)
        trained(engine, range(3))
        counts = {"global_steps": 4, "skipped_steps": 1, "global_samples": 12}
        path = export_deepspeed(engine, tmp_path, client_state={"epoch": 3}, counts=counts)
        assert path == tmp_path / "global_step4_universal"
        checkpoint = zero_checkpoint(tmp_path)
        assert (checkpoint.path, checkpoint.client_state) == (path, {"epoch": 3})
        assert (checkpoint.global_steps, checkpoint.skipped_steps, checkpoint.global_samples) == (4, 1, 12)
        twin = engine_of(lr=1e-2, **fields)
        checkpoint.load(twin)
        trained(twin, range(3, 5))
        trained(engine, range(3, 5))
        assert str(states_of(twin)) == str(states_of(engine))
        # again, in its place, and what is left of a failure
        export_deepspeed(engine, tmp_path, tag=path.name)
        assert zero_checkpoint(tmp_path).global_steps == 5
        assert {each.name for each in tmp_path.iterdir()} == {"latest_universal", path.name, "photos"}
        with pytest.raises(CheckpointError, match="tag: got 'a/b', expected the name of a folder"):
            export_deepspeed(engine, tmp_path, tag="a/b")
        said = "failed in process 0" if rank else "is there, and no universal checkpoint"
        with pytest.raises(CheckpointError, match=said):
            export_deepspeed(engine, tmp_path, tag="photos")


def test_a_universal_checkpoint_has_the_rates_of_the_update_to_come(tmp_path):
    """As DeepSpeed's own files have them; in stage 3 it takes what all groups share, and one count for all."""
    made = model()
    groups = groups_of(made)
    groups[1]["weight_decay"] = 0.0
    engine = wrap(made, lr=lambda updates: 0.5 ** (updates + 1), weight_decay=0.25, params=groups)
    trained(engine, range(2))
    path = export_deepspeed(engine, tmp_path, tag="two") / "zero" / "optimizer_state.pt"
    held = torch.load(path, weights_only=True)
    assert [(group["lr"], group["weight_decay"]) for group in held["param_groups"]] == [(0.125, 0.25), (0.125, 0.0)]
    inner = held["optimizer_state_dict"]
    assert type(inner["state"][0]["step"]) is int
    assert (inner["state"][0]["step"], inner["param_groups"][0]["lr"]) == (2, 0.125)
    assert "weight_decay" not in inner["param_groups"][0]


def test_what_deepspeed_has_no_place_for_is_refused(tmp_path):
    made = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    muon = wrap(made, optimizer="muon", lr=1e-2)
    with pytest.raises(CheckpointError, match="optimizer='muon', and DeepSpeed's Muon has another arithmetic"):
        export_deepspeed(muon, tmp_path)
    made = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    engine = wrap(made)
    engine.backward(made[0](torch.ones(1, 2)).sum())
    engine.step()
    with pytest.raises(CheckpointError, match=r"group 0 have had \[0, 1\] updates"):
        export_deepspeed(engine, tmp_path)
    assert not list(tmp_path.iterdir())


class Counting:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        self.state = state


class Refuses(Counting):
    def load_state_dict(self, state):
        raise KeyError("base_lrs")


def test_states_of_objects_are_loaded_with_the_rest_and_one_that_fails_stops_the_run(tmp_path):
    write(tmp_path, Run(), 2, 2)
    engine, scheduler, counts = engine_of(), Counting(), Counting()
    zero_checkpoint(tmp_path).load(engine, stateful={"lr_scheduler": scheduler, "deepspeed": counts})
    assert scheduler.state == {"last_batch_iteration": 4}
    assert counts.state == {"global_steps": 7, "global_samples": 99, "skipped_steps": 2}
    with pytest.raises(CheckpointError, match=r"broke off in load_state_dict\(\) of stateful\['lr_scheduler'\]"):
        zero_checkpoint(tmp_path).load(engine, stateful={"lr_scheduler": Refuses()})
    with pytest.raises(StateError, match="loading a checkpoint broke off"):
        engine.optimizer.step()
    zero_checkpoint(tmp_path).load(engine, stateful={"lr_scheduler": scheduler})
    assert_taken_over(engine, Run())


# --- exports that break off ---------------------------------------------------------------------------------


class Exported:
    """Two runs, the first of which is exported under a tag that exports of the second one replace."""

    def __init__(self, folder):
        self.folder = folder
        self.engines = [engine_of(num_threads=1), engine_of(num_threads=1)]
        for n, engine in enumerate(self.engines):
            for _ in range(n + 1):
                engine.backward(engine(torch.arange(6).view(2, 3)).pow(2).mean())
                engine.step()
        self.states = [str(states_of(engine)) for engine in self.engines]
        self.begin()

    def begin(self):
        shutil.rmtree(self.folder, ignore_errors=True)
        export_deepspeed(self.engines[0], self.folder, tag="best")

    def again(self):
        export_deepspeed(self.engines[1], self.folder, tag="best")

    def found(self):
        """The number of the run that a reader finds, which knows nothing of our names for what is unfinished."""
        assert (self.folder / (self.folder / "latest_universal").read_text().strip()).is_dir()
        engine = engine_of()
        zero_checkpoint(self.folder).load(engine)
        return self.states.index(str(states_of(engine)))

    def left(self):
        return {path.name for path in self.folder.iterdir()} - {"best", "latest_universal"}


def killed_at(number, act):
    """Make a call in a forked process that is killed before a system call, by its number. Return False if there are
    fewer."""
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL)
        return status != 0
    left = number

    def watched(call):
        def watching(*args, **options):
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return watching

    try:
        for name in ("mkdir", "open", "fsync", "rename", "replace", "unlink", "rmdir", "scandir", "stat"):
            setattr(os, name, watched(getattr(os, name)))
        checkpoint_folder.exchange, torch.save = watched(checkpoint_folder.exchange), watched(torch.save)
        act()
        os._exit(0)
    except BaseException:
        os._exit(1)


@pytest.mark.parametrize("stride", [150, pytest.param(1, marks=pytest.mark.slow)])
def test_an_export_that_is_killed_leaves_the_earlier_one_or_its_own(stride, tmp_path):
    exported, seen, number = Exported(tmp_path / "folder"), set(), 7
    while killed_at(number, exported.again):
        seen.add(exported.found())
        if number % 3 == 0:
            exported.again()  # it removes what the killed one has left
            assert exported.left() == set()
        exported.begin()
        number += stride
    assert exported.found() == 1
    assert seen == {0, 1} if stride == 1 else 0 in seen


@pytest.mark.parametrize("stride", [150, pytest.param(5, marks=pytest.mark.slow)])
def test_an_export_that_is_interrupted_leaves_the_earlier_one_or_its_own_and_nothing_else(stride, tmp_path):
    exported, seen = Exported(tmp_path / "folder"), set()
    numbers = sorted(first_passes(exported.again).values())
    for number in [*numbers[::stride], *numbers[-3:]]:
        exported.begin()
        interrupt_at(number, exported.again)
        seen.add(exported.found())
        assert exported.left() == set()
    assert 0 in seen


@pytest.mark.draws(2)
@pytest.mark.parametrize("error", [RuntimeError("PytorchStreamWriter failed"), OSError(errno.ENOSPC, "No space left")])
@pytest.mark.parametrize("number", [0, 5, 20])
def test_an_export_to_a_full_disk_is_one_error_and_the_earlier_one_stays(error, number, tmp_path, monkeypatch):
    exported, left, save = Exported(tmp_path / "folder"), number, torch.save

    def fails(*args, **options):
        nonlocal left
        left -= 1
        if left < 0:
            raise error
        return save(*args, **options)

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(CheckpointError, match=r"cannot be written \(.*(failed|No space left)"):
        exported.again()
    assert exported.found() == 0
    assert exported.left() == set()


@pytest.mark.draws(1)
@pytest.mark.parametrize("call", ["exchange", "names_to_disk", "_prepare"])
def test_a_replacement_that_fails_leaves_the_earlier_export(call, tmp_path, monkeypatch):
    exported = Exported(tmp_path / "folder")
    whole = getattr(checkpoint_folder, call)

    def fails(*args, **options):
        monkeypatch.setattr(checkpoint_folder, call, whole)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoint_folder, call, fails)
    with pytest.raises(CheckpointError, match=r"cannot be written \(Input/output error\)"):
        exported.again()
    assert exported.found() == 0
    assert exported.left() == set()
    monkeypatch.setattr(checkpoint_folder, "exchange", lambda one, other: False)  # as on other systems
    exported.again()
    assert exported.found() == 1
    assert exported.left() == set()


# --- files that a stranger has forged --------------------------------------------------------------------


def with_part(change):
    """Change the optimizer's part of a file of stage 2."""
    return lambda state: change(state["optimizer_state_dict"])


def with_master(make):
    return with_part(lambda part: part["single_partition_of_fp32_groups"].__setitem__(0, make(36)))


def with_name(name):
    def rename(state):
        state["param_shapes"][0] = {
            name if old == "embedding.weight" else old: shape for old, shape in state["param_shapes"][0].items()
        }

    return rename


def with_value(value):
    return lambda state: state.__setitem__("epoch", value)


def shared_twice(n):
    """A list that holds one list twice, which holds one twice: 2^n values."""
    value = []
    for _ in range(n):
        value = [value, value]
    return value


def in_itself():
    value = []
    value.append(value)
    return value


class Calls:
    """Pickled as a call of a function that torch's own reader of weights allows."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


FORGED = {
    "a flat tensor with gaps": ("optim", with_master(lambda n: torch.zeros(2 * n)[::2])),
    "a flat tensor of one element": ("optim", with_master(lambda n: torch.zeros(1).expand(n))),
    "a flat tensor of integers": ("optim", with_master(lambda n: torch.zeros(n, dtype=torch.int64))),
    "a flat tensor of complex numbers": ("optim", with_master(lambda n: torch.zeros(n, dtype=torch.complex64))),
    "1 GiB of four bytes": ("model", lambda state: state["module"].update(offset=torch.zeros(1).expand(2**28))),
    "4 TiB of four bytes": ("model", with_value(torch.zeros(1).expand(2**40))),
    "2^40 values in 40 lists": ("model", with_value(shared_twice(40))),
    "a list in itself": ("model", with_value(in_itself())),
    "a sparse tensor": ("model", lambda state: state["module"].update(x=torch.zeros(3).to_sparse())),
    "a name that is no text": ("model", with_name(7)),
    "a name with a null byte": ("model", with_name("a\0b")),
    "a negative size": ("model", lambda state: state["param_shapes"][0].update(x=(-1, -3))),
    "a size beyond all memory": ("model", lambda state: state["param_shapes"][0].update(x=(10**30, 3))),
    "no finite count": ("model", lambda state: state.update(global_steps=math.inf)),
    "a count that is text": (
        "optim",
        with_part(lambda part: part["base_optimizer_state"]["state"][0].update(step="5")),
    ),
    "10 GB of zeros": ("model", with_value(Calls(bytearray, 10**10))),
    "text that grows": ("model", with_value(Calls(codecs.encode, "a", "hex"))),
}


def forge(path, change):
    with importable_scalers():
        state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


@pytest.mark.draws(4)
@pytest.mark.parametrize("what", FORGED)
def test_a_forged_file_is_an_error_before_anything_changes(what, tmp_path):
    file, change = FORGED[what]
    write(tmp_path, Run(), 2, 1)
    forge(next((tmp_path / "now").glob(f"*{file}_states.pt")), change)
    engine = engine_of()
    before = str(states_of(engine))
    with not_forever(), pytest.raises(CheckpointError, match=str(tmp_path)) as refused:
        zero_checkpoint(tmp_path).load(engine)
    assert "broke off" not in str(refused.value)
    assert str(states_of(engine)) == before


def deflated(archive, records):
    for name, data in records:
        archive.writestr(name, data, zipfile.ZIP_DEFLATED)


def inflated(archive, records):
    """A pickle of 64 MB in 64 KB."""
    for name, data in records:
        grown = data + bytes(2**26) if name.endswith("data.pkl") else data
        archive.writestr(name, grown, zipfile.ZIP_DEFLATED if name.endswith("data.pkl") else zipfile.ZIP_STORED)


def twice(archive, records):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, data in [*records, *records[:1]]:
            archive.writestr(name, data)


def cut_short(archive, records):
    for name, data in records:
        archive.writestr(name, data[:4] if "/data/" in name else data)


def far_memo(archive, records):
    """C's reader of pickles makes 32 GB for an entry of that number."""
    for name, data in records:
        archive.writestr(name, b"\x80\x02}r\xff\xff\xff\xfe." if name.endswith("data.pkl") else data)


@pytest.mark.draws(1)
@pytest.mark.parametrize("archived", [deflated, inflated, twice, cut_short, far_memo], ids=lambda how: how.__name__)
def test_an_archive_that_torch_would_not_write_is_an_error(archived, tmp_path):
    write(tmp_path, Run(), 2, 1)
    path = tmp_path / "now" / "mp_rank_00_model_states.pt"
    with zipfile.ZipFile(path) as whole:
        records = [(entry.filename, whole.read(entry)) for entry in whole.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        archived(archive, records)
    with not_forever(), pytest.raises(CheckpointError, match=str(path)):
        zero_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["../../outside", "{}/outside", "..", "a/b"])
def test_a_parameter_of_a_universal_checkpoint_is_read_from_its_folder_alone(name, tmp_path):
    engine = engine_of()
    engine.backward(engine(torch.arange(6).view(2, 3)).pow(2).mean())
    engine.step()
    folder = export_deepspeed(engine, tmp_path / "universal")
    name = name.format(tmp_path)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "fp32.pt").write_bytes((folder / "zero" / "embedding.weight" / "fp32.pt").read_bytes())
    for path in folder.glob("*model_states.pt"):
        forge(path, with_name(name))
    with pytest.raises(CheckpointError, match="expected the name of a folder there"):
        zero_checkpoint(tmp_path / "universal")


def test_tensors_of_any_type_and_order_are_read_as_torch_reads_them(tmp_path):
    """The oracle is torch's own reader."""
    base = torch.arange(24.0).view(2, 3, 4)
    saved = {
        **{str(dtype): torch.arange(5).to(dtype) for dtype in NUMPY_DTYPES},
        "transposed": base.transpose(0, 2),
        "a part": base[1, 1:, ::2],
        "expanded": torch.arange(3).expand(2, 3),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(1.5),
        "parameter": torch.nn.Parameter(base),
        "plain": [1, -(2**80), 1.5, math.inf, True, None, "\u00e9\ud800", b"\xff\0", (1, (2,)), {3}, 1j, {4: {}}],
        "ordered": OrderedDict(a=1),
        "shape": torch.Size([2, 3]),
        "type": torch.bfloat16,
    }
    saved["again"] = saved["a part"]
    torch.save(saved, tmp_path / "x.pt")
    found, expected = load_any(tmp_path / "x.pt"), torch.load(tmp_path / "x.pt", weights_only=True)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
            alike = found[name].detach().contiguous().view(-1).view(torch.uint8) if value.dim() else found[name].view(1)
            other = value.detach().contiguous().view(-1).view(torch.uint8) if value.dim() else value.view(1)
            assert torch.equal(alike, other), name
        else:
            assert (type(found[name]), found[name]) == (type(value), value), name
    assert found["again"].data_ptr() == found["a part"].data_ptr()
