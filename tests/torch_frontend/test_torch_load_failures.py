"""Loading that fails: before anything has changed, or it says that it broke off, at what, and what is loaded."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from frontends.torch import OffloadedAdamW, wrap
from frontends.torch.integrations.shards import Shards
from frontends.torch.weights.checkpoint import ModelCheckpoints, load_weights
from offload_core.checkpoint.manifest import read_manifest, write_manifest
from offload_core.errors import CheckpointError, ConfigError, StateError
from offload_core.support.checkpoint_folder import MANIFEST
from tests.support.checkpoints import Loader
from tests.support.torch_models import place, same_bits

everywhere = pytest.mark.usefixtures("device")


class Remembers(nn.Linear):
    """A layer with a state that is no tensor, and that it may refuse."""

    def __init__(self, seen=0):
        super().__init__(4, 4)
        self.seen, self.refuses = seen, False

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        if self.refuses:
            raise KeyError("set_extra_state")
        self.seen = state["seen"]


def new(seed, **fields):
    torch.manual_seed(seed)
    model = nn.Sequential(Remembers(seed), nn.Linear(4, 2)).to(place())
    engine = wrap(model, lr=1e-2, **{"param_dtype": "bfloat16", **fields})
    return engine, {"schedule": LambdaLR(engine.optimizer, lambda n: 1 / (1 + n)), "loader": Loader(seed)}


def train(engine, stateful, steps=2):
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 4, device=place())).float().square().mean())
        engine.step()
        stateful["schedule"].step()


def everything(engine, stateful):
    """All that loading may change."""
    optimizer = engine.optimizer
    tensors = {
        name: t.detach().clone() for name, t in engine.module.state_dict().items() if isinstance(t, torch.Tensor)
    }
    for i, state in enumerate(optimizer.state.values()):
        tensors |= {f"{i} {name}": torch.as_tensor(value).clone() for name, value in state.items()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    plain = (
        optimizer.updates,
        copy.deepcopy(groups),
        stateful["schedule"].state_dict(),
        stateful["loader"].at,
        engine.module[0].seen,
        random.getstate(),
        [*map(str, np.random.get_state(legacy=True))],
        torch.get_rng_state().tolist(),
    )
    return tensors, str(plain)


def assert_unchanged(before, after):
    assert before[1] == after[1]
    assert before[0].keys() == after[0].keys()
    for name, tensor in before[0].items():
        assert same_bits(tensor, after[0][name]), name


@pytest.fixture
def saved(tmp_path):
    engine, stateful = new(1)
    train(engine, stateful, 3)
    return engine.save_checkpoint(tmp_path, stateful=stateful, extras={"epoch": 2})


def forge(path, change):
    content = read_manifest(path / MANIFEST)
    change(content)
    write_manifest(path, content)


def test_without_the_random_state_a_wrong_one_does_not_matter(saved):
    forge(saved, lambda c: c["own"][0]["random"].update(numpy=None))
    engine, stateful = new(2)
    with pytest.raises(CheckpointError, match="random_state=False"):
        engine.load_checkpoint(saved, stateful=stateful)
    assert engine.load_checkpoint(saved, stateful=stateful, random_state=False) == {"epoch": 2}
    assert stateful["loader"].at == 1


# --- what runs code of others ----------------------------------------------------------------------


@pytest.mark.draws(1)
@pytest.mark.parametrize(
    ("what", "done", "left"),
    [
        ("module", {"the parameter groups"}, {"stateful['schedule']", "stateful['loader']", "the random generators"}),
        ("loader", {"'0._extra_state'", "stateful['schedule']"}, {"the random generators"}),
    ],
)
@everywhere
def test_code_of_others_runs_last_and_its_failure_says_what_is_loaded(saved, what, done, left):
    engine, stateful = new(2)
    train(engine, stateful)
    failing = {"module": engine.module[0], "loader": stateful["loader"]}[what]
    failing.refuses = True
    with pytest.raises(CheckpointError, match="loading broke off in") as caught:
        engine.load_checkpoint(saved, stateful=stateful)
    loaded, _, missing = str(caught.value).partition("loaded are")[2].partition(", and not ")
    assert isinstance(caught.value.__cause__, KeyError)
    assert all(name in loaded and name not in missing for name in ("weights", "optimizer states", *done))
    assert all(name in missing and name not in loaded for name in left)
    with pytest.raises(StateError, match="loading a checkpoint broke off"):
        train(engine, stateful)
    failing.refuses = False
    engine.load_checkpoint(saved, stateful=stateful)
    again, others = new(3)
    again.load_checkpoint(saved, stateful=others)
    assert_unchanged(everything(again, others), everything(engine, stateful))
    train(engine, stateful)


@pytest.mark.parametrize("end", ["close", "wrap"])
def test_an_engine_whose_load_broke_off_can_be_closed_and_its_model_wrapped_anew(saved, end):
    engine, stateful = new(2)
    engine.module[0].refuses = True
    with pytest.raises(CheckpointError, match="loading broke off in"):
        engine.load_checkpoint(saved, stateful=stateful)
    if end == "close":
        engine.close()
    engine.module[0].refuses = False
    anew = wrap(engine.module, lr=1e-2)
    anew.load_checkpoint(saved, stateful=stateful)
    anew.backward(anew(torch.ones(2, 4, dtype=anew.module[0].weight.dtype)).float().pow(2).mean())
    assert anew.step().updated


@everywhere
def test_weights_alone_come_before_the_states_of_modules(saved):
    model = nn.Sequential(Remembers(), nn.Linear(4, 2)).to(place(), torch.bfloat16)
    model[0].refuses = True
    with pytest.raises(CheckpointError, match=r"broke off in set_extra_state\(\) of '0._extra_state'"):
        load_weights(model, saved)
    engine, stateful = new(3)
    engine.load_checkpoint(saved, stateful=stateful)
    for mine, theirs in zip(model.parameters(), engine.module.parameters(), strict=True):
        assert same_bits(mine.detach(), theirs.detach())


@everywhere
def test_weights_alone_of_a_damaged_file_say_that_they_are_mixed(saved):
    [shard] = saved.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"loading broke off \(.*are not those that were written"):
        load_weights(nn.Sequential(Remembers(), nn.Linear(4, 2)).to(place(), torch.bfloat16), saved)


@pytest.mark.draws(1)
@pytest.mark.parametrize("extras", [None, 3, {}, {"global_step": "3"}, {"global_step": 4}])
def test_the_checkpoint_of_another_step_is_refused_before_anything_changes(tmp_path, extras):
    """Callbacks load such checkpoints for other libraries, whose own count of steps is in the extras."""

    def accept(step):
        if step != 3:
            raise CheckpointError(f"extras: of step {step}")

    saver, _ = new(1)
    path = saver.save_checkpoint(tmp_path, extras=extras)
    engine, stateful = new(2)
    before = everything(engine, stateful)
    with pytest.raises(CheckpointError, match="extras"):
        Shards().load(path, engine.module, engine.optimizer, accept=accept)
    assert_unchanged(before, everything(engine, stateful))


# --- groups ----------------------------------------------------------------------------------------


def grouped(order, decay, seed=0, which=None):
    """An optimizer with a group for weights and one for biases."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    chosen = which or (lambda name: "bias" if name.endswith("bias") else "weight")
    groups = {kind: [] for kind in order}
    for name, param in model.named_parameters():
        groups[chosen(name)].append((name, param))
    engine = wrap(model, lr=1e-2)
    engine.close()
    optimizer = OffloadedAdamW(
        [{"params": groups[kind], "weight_decay": decay[kind], "lr": torch.tensor(1e-2)} for kind in order]
    )
    return model, optimizer


def checkpoints_of(model, optimizer):

    return ModelCheckpoints(model, optimizer)


SAVE = {"stateful": None, "extras": None, "keep": None, "wait": True}
LOAD = {"stateful": None, "names": None, "random_state": True}


@pytest.mark.filterwarnings("ignore:.*the run goes on with its hyperparameters")
def test_groups_are_told_apart_by_their_parameters_and_not_by_their_order(tmp_path):
    decay = {"weight": 0.25, "bias": 0.0}
    path = checkpoints_of(*grouped(("weight", "bias"), decay)).save(tmp_path, **SAVE)
    model, optimizer = grouped(("bias", "weight"), {"weight": 9.0, "bias": 8.0}, 1)
    rates = [group["lr"] for group in optimizer.param_groups]
    checkpoints_of(model, optimizer).load(path, **LOAD)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.25]
    assert [group["lr"] for group in optimizer.param_groups] == rates
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates, strict=True))


@pytest.mark.filterwarnings("ignore:.*the run goes on with its hyperparameters")
def test_groups_are_saved_as_they_are_now(tmp_path):
    """A user may have moved a parameter since the optimizer took it on."""
    model, optimizer = grouped(("weight", "bias"), {"weight": 0.25, "bias": 0.0})
    for group in optimizer.param_groups:
        group["params"].reverse()
    optimizer.param_groups.reverse()
    path = checkpoints_of(model, optimizer).save(tmp_path, **SAVE)
    model, optimizer = grouped(("weight", "bias"), {"weight": 9.0, "bias": 8.0}, 1)
    checkpoints_of(model, optimizer).load(path, **LOAD)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]


def test_groups_of_other_parameters_are_refused(tmp_path):
    decay = {"weight": 0.25, "bias": 0.0}
    path = checkpoints_of(*grouped(("weight", "bias"), decay)).save(tmp_path, **SAVE)
    model, optimizer = grouped(("weight", "bias"), decay, 1, lambda name: "weight" if name[0] == "0" else "bias")
    with pytest.raises(CheckpointError, match="'0.bias' and '0.weight' are in one group here and in two there"):
        checkpoints_of(model, optimizer).load(path, **LOAD)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]


@everywhere
def test_a_hook_after_loading_finds_everything_loaded():
    """It may fail: then all of the states are the loaded ones, the number of updates too."""
    engine, stateful = new(1)
    train(engine, stateful, 3)
    state = copy.deepcopy(engine.optimizer.state_dict())
    other, _ = new(2)

    def fail(optimizer):
        raise KeyError(optimizer.updates)

    other.optimizer.register_load_state_dict_post_hook(fail, prepend=True)
    with pytest.raises(KeyError, match="3"):
        other.optimizer.load_state_dict(state)
    assert other.optimizer.updates == 3


@pytest.mark.parametrize("threads", ["2**31", "2**63", "10**5000", "0", "1.5"])
def test_a_number_of_threads_is_one_that_can_be(threads):
    with pytest.raises(ConfigError, match="num_threads: got .*, expected an integer of at"):
        wrap(nn.Linear(2, 2), num_threads=eval(threads))
    wrap(nn.Linear(2, 2), num_threads=2**31 - 1).close()


def test_what_a_users_object_reads_while_it_is_loaded_is_the_checkpoints(tmp_path):
    class Average:
        """As an average of weights does, it takes places and types from the engine."""

        def __init__(self, engine):
            self.engine = engine

        def state_dict(self):
            return {"weight": self.engine.module.weight.detach().clone()}

        def load_state_dict(self, state):
            now = self.engine.state_dict()["module.weight"]
            assert same_bits(now, state["weight"].to(now))
            [weight, _] = self.engine.optimizer.state.values()
            self.moment = weight["exp_avg"].clone()

    def engine_of(seed):
        torch.manual_seed(seed)
        engine = wrap(nn.Linear(4, 4), lr=0.1)
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        return engine

    engine, other = engine_of(0), engine_of(1)
    path = engine.save_checkpoint(tmp_path, stateful={"average": Average(engine)})
    average = Average(other)
    other.load_checkpoint(path, stateful={"average": average})
    assert same_bits(average.moment, engine.optimizer.state[engine.module.weight]["exp_avg"])
