"""Ten steps in the installed DeepSpeed and ten here, or the other way round, against twenty in DeepSpeed."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frontends.torch import export_deepspeed, wrap, zero_checkpoint
from frontends.torch.integrations.zero_files.loading import _scale
from frontends.torch.integrations.zero_files.reading import read_contents
from offload_core.deepspeed.keys import VERSION
from offload_core.step.loss_scale import LossScaler
from tests.support.deepspeed_checkpoints import model
from tests.support.deepspeed_runs import configuration, even_model, groups_of, in_deepspeed, losses_of
from tests.support.processes import on_ranks
from tests.support.strategies import law

deepspeed = pytest.importorskip("deepspeed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(deepspeed.__version__ != VERSION, reason=f"the runs are those of DeepSpeed {VERSION}"),
    pytest.mark.filterwarnings("ignore"),
]
ON = {"enabled": True}
SCHEDULE = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 15}}}
OVERFLOWS = {"fp16": {**ON, "initial_scale_power": 20, "loss_scale_window": 3, "hysteresis": 2}}
NO_UPDATE = {"fp16": {**ON, "initial_scale_power": 24, "hysteresis": 2}}
"""Right after an overflow DeepSpeed doubles one update later: here it doubles in neither."""
FP16 = {"fp16": {**ON, "initial_scale_power": 6, "loss_scale_window": 4}}
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def fused(groups):
    """The one of torch whose bits are ours."""
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=True)


def saved(folder, tag):
    """The fp32 weights and the states of a checkpoint, as tensors."""
    contents = read_contents(Path(folder), tag)
    if contents.unnamed:
        made = model()
        names = {p: name for name, p in made.named_parameters()}
        contents.unnamed.named(contents, [[names[p] for p in group["params"]] for group in groups_of(made)])
    contents.with_states()
    return {
        name: {"master": value.read(), **{state: held.read() for state, held in contents.states[name].items()}}
        for name, value in contents.trained.items()
    }


def wrapped(config, make=model):
    made = make()
    return wrap(made, config, params=groups_of(made))


def states_of(engine):
    names = {id(p): name for name, p in engine.module.named_parameters()}
    return {names[id(slot.param)]: engine.optimizer.whole_states(slot.param) for slot in engine.optimizer.slots}


def ten_there_ten_here(folder, there, here, *, n_save, n_load, optimizer=None, scale=1.0, even=False):
    """Ten steps in DeepSpeed, and then ten there and ten here.

    Args:
        there, here: configurations.
        even: a model and batches that give DeepSpeed's arithmetic no choice: all ranks have the same batches, so that
            its averages in bfloat16 are exact.

    Returns:
        Of DeepSpeed and of this engine the losses and the states after twenty steps.
    """
    make = even_model if even else model

    @on_ranks(n_save)
    def theirs(rank):
        data = (0, 1) if even else (rank, n_save)
        engine = in_deepspeed(rank, there, optimizer, make)
        losses_of(engine, range(10), *data, scale)
        engine.save_checkpoint(folder, tag="ten", client_state={"epoch": 2})
        found = losses_of(engine, range(10, 20), *data, scale)
        engine.save_checkpoint(folder, tag="twenty")
        return found, engine.skipped_steps

    @on_ranks(n_load)
    def ours(rank):
        data = (0, 1) if even else (rank, n_load)
        engine = wrapped(here, make)
        checkpoint = zero_checkpoint(folder, "ten")
        checkpoint.load(engine)
        assert checkpoint.client_state == {"epoch": 2}
        assert checkpoint.global_steps == 10
        assert engine.optimizer.updates == 10 - checkpoint.skipped_steps
        loaded, written = states_of(engine), saved(folder, "ten")
        for name, states in loaded.items():
            for state, values in states.items():
                begun = written[name].get(state, torch.zeros_like(values))  # there was no update yet
                assert torch.equal(values, begun), (name, state)
        return losses_of(engine, range(10, 20), *data, scale), states_of(engine)

    mean = [sum(each) / len(each) for each in zip(*[losses for losses, _ in theirs], strict=True)]
    mine = [sum(each) / len(each) for each in zip(*[losses for losses, _ in ours], strict=True)]
    return mean, saved(folder, "twenty"), mine, ours[0][1], theirs[0][1]


def assert_close(theirs, ours):
    for name, states in ours.items():
        for state, values in states.items():
            torch.testing.assert_close(values, theirs[name][state], **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("n_save", "n_load"), [(1, 1), (2, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize(("stage", "mine"), [(1, 1), (2, 3), (3, 3), (3, 2)])
def test_ten_steps_there_and_ten_here_are_twenty_there(stage, mine, n_save, n_load, tmp_path):
    """With clipping, a schedule and two groups."""
    there, here = configuration(stage, n_save, **SCHEDULE), configuration(mine, n_load, **SCHEDULE)
    losses, states, my_losses, my_states, _ = ten_there_ten_here(tmp_path, there, here, n_save=n_save, n_load=n_load)
    assert my_losses == pytest.approx(losses, rel=1e-5)
    assert_close(states, my_states)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_master_weights_in_bfloat16_runs_have_the_bits_of_twenty_steps_there(stage, n, tmp_path):
    """Without clipping, whose factor DeepSpeed rounds another way, and with exact averages."""
    config = configuration(stage, n, bf16=ON, gradient_clipping=0, **SCHEDULE)
    config["train_micro_batch_size_per_gpu"] = 4
    losses, states, my_losses, my_states, _ = ten_there_ten_here(
        tmp_path, config, config, n_save=n, n_load=n, optimizer=fused, even=True
    )
    assert my_losses == losses
    for name, found in my_states.items():
        assert torch.equal(found["master"], states[name]["master"]), name


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("fp16", "scale"), [(FP16, 1.0), (OVERFLOWS, 30.0), (NO_UPDATE, 30.0)], ids=["grows", "overflows", "no update"]
)
def test_a_loss_scale_goes_on(stage, fp16, scale, tmp_path):
    config = configuration(stage, 1, **fp16, **SCHEDULE)
    losses, states, my_losses, my_states, skipped = ten_there_ten_here(
        tmp_path, config, config, n_save=1, n_load=1, scale=scale
    )
    assert bool(skipped) is (fp16 is not FP16)
    assert my_losses == pytest.approx(losses, rel=1e-4)
    assert_close(states, my_states)


def sgd(groups):
    return torch.optim.SGD(groups, lr=1e-2, weight_decay=0.1, momentum=0.9, nesterov=True)


def cpu_adam(groups):
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(groups, lr=1e-2, weight_decay=0.1)


def cpu_lion(groups):
    from deepspeed.ops.lion import DeepSpeedCPULion

    return DeepSpeedCPULion(groups, lr=1e-4, weight_decay=0.1)


def cpu_adagrad(groups):
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

    return DeepSpeedCPUAdagrad(groups, lr=1e-2, weight_decay=0.1)


OPTIMIZERS = {
    sgd: {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.5, "nesterov": True}},
    cpu_adam: {"type": "AdamW", "params": {"lr": 0.5}},
    cpu_lion: {"type": "Lion", "params": {"lr": 0.5}},
    cpu_adagrad: {"type": "Adagrad", "params": {"lr": 0.5}},
}
"""Optimizers of DeepSpeed's side, and their sections here: the hyperparameters come from the checkpoint."""


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: each.__name__)
def test_other_optimizers_go_on_with_their_hyperparameters(optimizer, stage, tmp_path):
    zero = {"stage": stage, **({} if optimizer is sgd else {"offload_optimizer": {"device": "cpu"}})}
    there = configuration(stage, 2, zero_optimization=zero)
    here = configuration(stage, 1, optimizer=OPTIMIZERS[optimizer])
    _, states, _, my_states, _ = ten_there_ten_here(tmp_path, there, here, n_save=2, n_load=1, optimizer=optimizer)
    assert_close(states, my_states)


LAYOUTS = {
    "elastic": {"stage": 2, "elastic_checkpoint": True},
    "round robin": {"stage": 2, "round_robin_gradients": True},
    "small parts": {"stage": 3, "sub_group_size": 20, "stage3_param_persistence_threshold": 0},
    "persistent": {"stage": 3, "stage3_param_persistence_threshold": 10},
    "offloaded": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_of_another_layout_goes_on(layout, tmp_path):
    there = configuration(0, 2, zero_optimization=LAYOUTS[layout], **SCHEDULE)
    here = configuration(2, 2, **SCHEDULE)
    _, states, _, my_states, _ = ten_there_ten_here(tmp_path, there, here, n_save=2, n_load=2)
    assert_close(states, my_states)


@pytest.mark.parametrize(
    "sections", [{}, {"bf16": ON}, {"bf16": ON, "data_types": {"grad_accum_dtype": "fp32"}}], ids=str
)
def test_a_run_without_zero_goes_on(sections, tmp_path):
    stage = 1 if "data_types" in sections else 0  # the optimizer of bfloat16 with gradients in fp32
    there = configuration(stage, 1, **sections, **SCHEDULE)
    here = configuration(2, 1, **{key: value for key, value in sections.items() if key == "bf16"}, **SCHEDULE)
    _, states, _, my_states, _ = ten_there_ten_here(tmp_path, there, here, n_save=1, n_load=1)
    assert_close(states, my_states)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("stage", "optimizer"), [(1, None), (2, None), (2, cpu_adam), (3, cpu_adam)])
def test_ten_steps_here_and_ten_there_are_twenty_there(stage, optimizer, n, tmp_path):
    """In stage 3 DeepSpeed's own Adam: it gives all parts of groups one count of steps, a tensor to torch's."""
    config = configuration(stage, n, **SCHEDULE)
    if optimizer is not None:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}

    @on_ranks(n)
    def _(rank):
        engine = wrapped(config)
        losses_of(engine, range(10), rank, n)
        export_deepspeed(engine, tmp_path, client_state={"epoch": 3})

    @on_ranks(n)
    def losses(rank):
        engine = in_deepspeed(rank, {**config, "checkpoint": {"load_universal": True}}, optimizer)
        path, client_state = engine.load_checkpoint(str(tmp_path))
        assert path.startswith(str(tmp_path / "global_step10_universal"))
        assert client_state["epoch"] == 3
        assert engine.global_steps == 10
        assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.1, 0.0]
        found = losses_of(engine, range(10, 20), rank, n)
        engine.save_checkpoint(str(tmp_path), tag="ten and ten")
        whole = in_deepspeed(rank, config, optimizer)
        expected = losses_of(whole, range(20), rank, n)[10:]
        whole.save_checkpoint(str(tmp_path), tag="twenty")
        return found, expected

    for found, expected in losses:
        assert found == pytest.approx(expected, rel=1e-5)
    assert_close(saved(tmp_path, "twenty"), saved(tmp_path, "ten and ten"))


@law(50)
@given(
    st.lists(st.sampled_from([False] * 5 + [True]), max_size=40),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 30),
)
def test_a_loss_scale_taken_over_is_that_of_the_installed_deepspeed_until_it_overflows(
    before, window, hysteresis, good
):
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    theirs = DynamicLossScaler(2.0**8, window, 1.0, hysteresis, False, raise_error_at_min_scale=False)
    theirs.update_scale(False)
    for overflow in [*(each for each in before if not each), False]:
        theirs.update_scale(overflow)
    ours = LossScaler(1.0, window, least=1.0, hysteresis=hysteresis)
    state = _scale(vars(theirs), ours)
    assert state is not None
    ours.load_state_dict(state)
    for _ in range(good):
        theirs.update_scale(False)
        ours.update(overflow=False)
        assert ours.scale == min(theirs.cur_scale, LossScaler.MOST) or math.isclose(ours.scale, LossScaler.MOST)
