"""Two sources of one value: a checkpoint and ``wrap``, a function and a scheduler. One wins, and the other is named."""

import copy
import warnings

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from frontends.torch import OffloadedAdamW, wrap
from offload_core.errors import CheckpointWarning, ConfigError


def model():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 4)


def train(engine, steps=1):
    """Return the rate of the last update."""
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 4)).sum())
        report = engine.step()
    [lr] = report.lr
    return lr


def loaded(engine, *args, **kwargs):
    """Load a checkpoint, and return the texts of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.load_checkpoint(*args, **kwargs)
    assert all(w.category is CheckpointWarning and w.filename == __file__ for w in caught)
    return [str(w.message).partition(": ")[2] for w in caught]


# --- a checkpoint and wrap --------------------------------------------------------------------------


def test_a_state_that_no_object_takes_is_named(tmp_path):
    engine = wrap(model(), lr=1e-2)
    schedule, other = StepLR(engine.optimizer, 1, 0.5), torch.nn.Linear(1, 1)
    train(engine)
    schedule.step()
    path = engine.save_checkpoint(tmp_path, stateful={"s": schedule, "t": other})
    again = wrap(model(), lr=1e-2)
    [said] = loaded(again, path)
    assert said.startswith("its state of 's', 't' is not loaded, because no object was given for it")
    [said] = loaded(again, path, stateful={"t": other})
    assert said.startswith("its state of 's' is not loaded")
    assert "stateful={'s': object}" in said
    resumed = StepLR(again.optimizer, 1, 0.5)
    assert loaded(again, path, stateful={"s": resumed, "t": None}) == []
    assert resumed.last_epoch == schedule.last_epoch
    assert loaded(again, path, optimizer_states=False) == []  # weights alone: nothing goes on


def test_the_checkpoints_numbers_win_and_each_difference_is_told_once(tmp_path):
    engine = wrap(model(), lr=1e-3, weight_decay=0.01)
    train(engine)
    path = engine.save_checkpoint(tmp_path)
    assert loaded(wrap(model(), lr=1e-3, weight_decay=0.01), path) == []
    other = wrap(model(), lr=5e-4, weight_decay=0.5)
    [said] = loaded(other, path)
    assert said.startswith(
        "the run goes on with its hyperparameters, lr=0.001 in place of 0.0005 (group 0), weight_decay=0.01 in place "
        "of 0.5 (group 0); expected"
    )
    assert loaded(other, path) == []  # they are the same now
    assert train(other) == 1e-3
    for dtype in (torch.float64, torch.float32):
        assert loaded(wrap(model(), lr=torch.tensor(1e-3, dtype=dtype), weight_decay=0.01), path) == []


@pytest.mark.parametrize(
    ("scheduler", "claimed"),
    [
        (lambda optimizer: StepLR(optimizer, 1, 0.5), True),
        (lambda optimizer: StepLR(optimizer, 1, 0.5), False),
        (lambda optimizer: OneCycleLR(optimizer, 1e-2, total_steps=9), True),  # it sets the first rate, too
    ],
)
def test_rates_that_a_scheduler_has_changed_are_no_difference(scheduler, claimed, tmp_path):
    engine = wrap(model(), lr=1e-2)
    schedule = scheduler(engine.optimizer)
    for _ in range(3):
        train(engine)
        schedule.step()
    path = engine.save_checkpoint(tmp_path, stateful={"s": schedule} if claimed else None)
    again = wrap(model(), lr=1e-2)
    stateful = {"s": scheduler(again.optimizer)} if claimed else None
    assert loaded(again, path, stateful=stateful) == []
    assert again.optimizer.param_groups[0]["lr"] == engine.optimizer.param_groups[0]["lr"] != 1e-2


def test_rates_that_a_loop_has_set_are_no_difference(tmp_path):
    """As ``ReduceLROnPlateau`` sets them, too: nothing in a group says with which rate it began."""
    engine = wrap(model(), lr=1e-2)
    for n in range(3):
        engine.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + n)
        train(engine)
    path = engine.save_checkpoint(tmp_path)
    again = wrap(model(), lr=1e-2)
    assert loaded(again, path) == []
    assert again.optimizer.param_groups[0]["lr"] == 1e-2 / 3
    engine.optimizer.param_groups[0]["lr"] = 1e-4
    assert loaded(engine, path) == []  # a run that goes back
    [said] = loaded(wrap(model(), lr=1e-2, weight_decay=0.5), path)
    assert said.startswith("the run goes on with its hyperparameters, weight_decay=0.01 in place of 0.5 (group 0)")


def test_a_function_of_wrap_wins_over_the_checkpoints_number_and_goes_on_from_its_updates(tmp_path):
    engine = wrap(model(), lr=1e-3)
    train(engine, 3)
    path = engine.save_checkpoint(tmp_path)
    again = wrap(model(), lr=lambda n: 0.1 / (1 + n))
    assert loaded(again, path) == []
    assert train(again) == 0.1 / 4


# --- a function and a scheduler ----------------------------------------------------------------------


def test_values_that_are_set_by_hand_beside_a_function_are_an_error():
    for fields, name, value in (
        ({"lr": lambda n: 1e-3}, "lr", 5.0),
        ({"lr": 1e-3, "betas": lambda n: (0.9, 0.99)}, "betas", (0.5, 0.9)),
    ):
        for steps in (0, 2):
            engine = wrap(model(), **fields)
            if steps:
                train(engine, steps)
            engine.optimizer.param_groups[0][name] = value
            with pytest.raises(ConfigError, match=rf"{name}=.* was set, by a scheduler or by hand"):
                train(engine)


@pytest.mark.parametrize("update_in_backward", [False, True])
def test_a_function_goes_on_after_loads_copies_and_added_groups(update_in_backward, tmp_path):
    """What changes groups as a load does is no hand: the function sets them again."""
    fields = {"lr": lambda n: 1e-3 / (1 + n), "update_in_backward": update_in_backward}
    engine = wrap(model(), **fields)
    train(engine, 2)
    path = engine.save_checkpoint(tmp_path)
    saved = copy.deepcopy(engine.optimizer.state_dict())
    train(engine, 2)
    engine.load_checkpoint(path)
    assert train(engine) == 1e-3 / 3
    engine.optimizer.load_state_dict(saved)
    assert train(engine) == 1e-3 / 3
    engine.optimizer.updates = 7
    assert train(engine) == 1e-3 / 8
    alone = OffloadedAdamW(model().parameters(), lr=lambda n: 1e-3 / (1 + n))
    twin = copy.deepcopy(alone)
    twin.param_groups[0]["params"][0].grad = torch.ones(4, 4)
    twin.step()
    twin.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    twin.step()
    assert [group["lr"] for group in twin.param_groups] == [5e-4, 5e-4]
