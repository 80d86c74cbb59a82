"""Faults of disks with states: every one is an error that says so or loses nothing, and none gives wrong bits.

Gradients follow from the number of updates, so that there is one right state for each number.
"""

import gc
import hashlib
import re
from contextlib import contextmanager, suppress
from functools import partial

import pytest
import torch

from frontends.torch import wrap
from frontends.torch.ranks import device_ranks
from offload_core import CheckpointError, DiskError, StateError
from tests.support import torch_models
from tests.support.disk_faults import FOREVER, KINDS, READ, WAYS, WRITTEN, Faults, scratch_files, with_faults
from tests.support.slow_torch_device import SlowTorchDevice

PARAMETERS_TOO = {"stage": 3, "offload_param": "nvme", "param_persistence_threshold": 0}
CASES = {
    "direct": {"schedule": "serial"},
    "clipped, 8 bits": {"gradient_clipping": 0.05, "state_format": "8bit"},
    "overlap": {},
    "delayed": {"schedule": "delayed", "delay_warmup_steps": 1},
    "parameters too": PARAMETERS_TOO,
}
LATE = ("overlap", "delayed")
"""Cases in which parameters cross to a device, while updates are made in another thread."""
PATIENCE = 12
"""Attempts, after which an act has failed too often."""
LOADS_AGAIN = "loading a checkpoint broke off .*expected another one to be loaded next"
BROKEN = "the last update broke off .* could not be completed .*expected a checkpoint to be loaded next"
SAYS = (
    r"the scratch file in {folder} \(it has no name\) could not be (read|written) at byte [\d,]+, [\d,]+ bytes: .+\. "
    "Look at this disk .*, then resume from the last checkpoint"
)


class Sum(torch.nn.Sequential):
    """Its layers side by side. With a linear loss, gradients do not depend on parameters: after a step that broke off
    those of a delayed one may be older."""

    def forward(self, x):
        return sum(layer(x) for layer in self)


def engine_of(folder, fields):
    torch.manual_seed(0)
    model = Sum(*(torch.nn.Linear(32, 32) for _ in range(8)))
    on_disk = {"offload_optimizer": "nvme", "nvme_path": str(folder), "nvme_host_bytes": 0}
    fields = {"param_dtype": "bfloat16", "reduce_bucket_size": 1024, "num_threads": 1, **on_disk, **fields}
    return wrap(model, lr=1e-2, **fields)


def step(engine):
    engine.backward(engine(torch_models.batch(engine.optimizer.updates)).float().mean())
    engine.step()


def digest(tensors):
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


class GivenUp(Exception):
    """Each attempt was an error of the disk."""


class Run:
    """Training that saves, reads its states and loads. It goes on after errors of the disk."""

    def __init__(self, case, folder, checkpoints):
        if case in LATE:
            slow = SlowTorchDevice(0.0)
            device_ranks.memory_of = lambda device: slow
        self.folder, self.checkpoints = folder, checkpoints
        self.engine = engine_of(folder, CASES[case])
        self.saved = False
        self.done = 0
        self.errors = []
        self.seen = []

    @contextmanager
    def noting(self):
        """Note an error of the disk."""
        try:
            yield
        except (DiskError, CheckpointError) as error:
            assert re.search(SAYS.format(folder=re.escape(str(self.folder))), str(error)), error
            self.errors.append(str(error))
            with suppress(DiskError):  # it waits for the last update, too
                self.engine.optimizer.zero_grad()

    def do(self, act):
        """The result of this, which is tried again after an error of the disk."""
        for _ in range(PATIENCE):
            with self.noting():
                return act()
        raise GivenUp(self.errors)

    def train(self, until):
        """Train until so many steps count, also those that broke off."""
        for _ in range(PATIENCE):
            if self.engine.optimizer.updates == until:
                return
            with self.noting():
                step(self.engine)
        raise GivenUp(self.errors)

    def save(self):
        self.do(partial(self.engine.save_checkpoint, self.checkpoints))
        self.saved = True

    def read(self):
        self.seen.append(self.do(lambda: digest(torch_models.everything(self.engine))))

    def load(self):
        self.do(partial(self.engine.load_checkpoint, self.checkpoints))

    def acts(self):
        """By name. After the load it is as it was after the save."""
        return {
            "first steps": lambda: self.train(2),
            "save": self.save,
            "steps": lambda: self.train(4),
            "states": self.read,
            "load": self.load,
            "last steps": lambda: self.train(4),
            "last states": self.read,
        }

    def all(self):
        """Do all acts that have not been done, and return what was read."""
        for act in [*self.acts().values()][self.done :]:
            act()
            self.done += 1
        self.close()
        return self.seen

    def close(self):
        self.do(self.engine.close)  # parameters come from the disk once more
        assert not scratch_files()


def uses(engine, checkpoints):
    return {
        "step": partial(step, engine),
        "states": partial(torch_models.everything, engine),
        "state_dict": lambda: str(engine.optimizer.state_dict()),
        "save": partial(engine.save_checkpoint, checkpoints),
        "flush": engine.flush,
    }


def check_uses(run, match):
    """Each use of the states, or of the parameters, says that they are of no step."""
    for use in uses(run.engine, run.checkpoints / "none").values():
        with pytest.raises(StateError, match=match):
            use()
        run.engine.optimizer.zero_grad()


def go_on(run, at, expected):
    """After a broken-off step: each use says so, and training goes on from the checkpoint."""
    check_uses(run, BROKEN)
    Faults.here().mend()
    if not run.saved:
        if not run.engine.offload_config.offload_param:
            run.close()
            return
        with pytest.raises(StateError, match=BROKEN):  # whole parameters are asked for
            run.engine.close()
        run.engine = None
        gc.collect()
        assert not scratch_files()
        return
    before = len(run.errors)
    run.load()
    run.train(4)
    run.read()
    assert len(run.errors) == before, at
    assert run.seen[-1] == expected[-1], at
    run.close()


def one_failure(case, way, kind, share, folder, times=1):
    """Have each call of a way fail in turn, or each ``share``-th; return how many errors and broken steps there were,
    and how many calls."""
    faults = Faults.here()
    run = Run(case, folder / "disk", folder / "0")
    start = faults.seen[way]
    expected = run.all()
    assert not run.errors
    assert expected[0] == expected[1]
    n_calls, found, broken = faults.seen[way] - start, 0, 0
    for at in range(share // 2, n_calls, share):
        run = Run(case, folder / "disk", folder / f"{at}")
        faults.come(way, kind, at, times)
        broke_off = False
        try:
            assert run.all() == expected, at
        except StateError as error:
            assert re.match(BROKEN, str(error)), at
            assert run.errors, at
            broke_off = True
        except GivenUp:
            assert times > 1, at
            if [*run.acts()][run.done] == "load":
                check_uses(run, LOADS_AGAIN)
            faults.mend()
            assert run.all() == expected, at
        assert len(run.errors) <= 1 or times > 1, (at, run.errors)
        if broke_off:
            go_on(run, at, expected)
        broken += broke_off
        found += len(run.errors) > 0
        faults.mend()
    return found, broken, n_calls


@pytest.fixture
def place(tmp_path):
    (tmp_path / "disk").mkdir()
    return tmp_path


SHARES = pytest.mark.parametrize("share", [17, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])


@SHARES
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_one_call_that_fails_is_one_error_at_most_and_changes_no_bit(case, way, share, place):
    @with_faults(seconds=1700)
    def result(rank):
        return one_failure(case, WAYS[way], KINDS["fails"], share, place)

    [(errors, broken, n_calls)] = result
    print(case, way, errors, broken, n_calls)
    assert errors
    assert not broken


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["half", "odd", "end", "full"])
def test_a_call_that_comes_back_short_is_gone_on_with_or_is_an_error(kind, way, place):
    @with_faults()
    def result(rank):
        return one_failure("parameters too", WAYS[way], KINDS[kind], 29, place)

    [(errors, broken, _)] = result
    assert not broken
    assert kind == "odd" or bool(errors) == (kind in ("end", "full"))  # odd: less than a page is an error


@SHARES
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_a_disk_that_goes_on_failing_breaks_the_training_until_a_checkpoint_is_loaded(case, way, share, place):
    """Errors come first; wrong bits never."""

    @with_faults(seconds=1700)
    def result(rank):
        return one_failure(case, WAYS[way], KINDS["fails"], share, place, times=FOREVER)

    [(errors, broken, n_calls)] = result
    print(case, way, errors, broken, n_calls)
    assert errors
    assert broken
