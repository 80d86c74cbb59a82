"""Faults of disks with states: every one is an error that says so or loses nothing, and none gives wrong bits.

Gradients follow from the number of updates, so that there is one right state for each number.
"""

import gc
import hashlib
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from contextlib import contextmanager, suppress
from functools import partial

import pytest
import torch

from frontends.torch import wrap
from frontends.torch.ranks import device_ranks
from offload_core import CheckpointError, CollectiveError, ConfigError, ConfigWarning, DiskError, StateError
from offload_core.checkpoint.reader import Checkpoint
from tests.support import torch_models
from tests.support.disk_faults import FOREVER, KINDS, READ, WAYS, Faults, scratch_files, with_faults
from tests.support.mounts import mounted
from tests.support.processes import ROOT, environment_of
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
            self.errors.append(str(error))
            if re.search(SAYS.format(folder=re.escape(str(self.folder))), str(error)) is None:
                raise AssertionError("an error of another kind") from error
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
        with suppress(StateError):  # it may need a step's parameters
            run.engine.close()
        run.engine = None
        for _ in range(2):  # what clears up after the engine keeps it for a moment
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
        broke_off = None
        try:
            assert run.all() == expected, at
        except StateError as error:
            broke_off = str(error)
        except GivenUp:
            assert times > 1, at
            if [*run.acts(), "close"][run.done] == "load":
                check_uses(run, LOADS_AGAIN)
            faults.mend()
            assert run.all() == expected, at
        assert len(run.errors) <= 1 or times > 1, (at, run.errors)
        if broke_off is not None:
            assert re.match(BROKEN, broke_off), at
            assert run.errors, at
            go_on(run, at, expected)
        broken += broke_off is not None
        found += len(run.errors) > 0
        faults.mend()
    return found, broken, n_calls


@pytest.fixture
def place(tmp_path):
    (tmp_path / "disk").mkdir()
    return tmp_path


SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.long("a run for each of the calls that fail")
@pytest.mark.draws(1)
@pytest.mark.parametrize("share", [49, pytest.param(1, marks=SLOW)])
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


@pytest.mark.long("a run for each of the calls that fail")
@pytest.mark.draws(1)
@pytest.mark.parametrize("share", [71, pytest.param(29, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["half", "odd", "end", "full"])
def test_a_call_that_comes_back_short_is_gone_on_with_or_is_an_error(kind, way, share, place):
    @with_faults()
    def result(rank):
        return one_failure("parameters too", WAYS[way], KINDS[kind], share, place)

    [(errors, broken, _)] = result
    assert not broken
    assert kind == "odd" or bool(errors) == (kind in ("end", "full"))  # odd: less than a page is an error


@pytest.mark.draws(1)
@pytest.mark.parametrize("share", [37, pytest.param(1, marks=SLOW)])
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


# --- updates in backward, ranks --------------------------------------------------------------------------


@pytest.mark.draws(1)
@pytest.mark.parametrize("way", WAYS)
def test_after_an_update_in_backward_that_failed_a_load_gives_the_right_bits(way, place):
    """Until then, each parameter has the number of its updates."""
    way = WAYS[way]

    @with_faults()
    def _(rank):
        faults, failed, expected = Faults.here(), 0, None
        for at in (None, *range(2, 40, 9)):
            engine = engine_of(place / "disk", {"update_in_backward": True})
            for _ in range(2):
                step(engine)
            engine.save_checkpoint(place / f"{at}")
            if at is not None:
                faults.come(way, KINDS["fails"], at, FOREVER)
            try:
                for _ in range(4):
                    step(engine)
            except DiskError:
                failed += 1
                with suppress(StateError):  # the update could not be completed
                    engine.optimizer.zero_grad()
            faults.mend()
            engine.load_checkpoint(place / f"{at}")
            while engine.optimizer.updates < 4:
                step(engine)
            found = digest(torch_models.everything(engine))
            expected = expected or found
            assert found == expected, at
            engine.close()
        assert failed


@pytest.mark.draws(1)
@pytest.mark.parametrize("fields", [{}, PARAMETERS_TOO], ids=["states", "parameters too"])
def test_a_disk_that_fails_on_one_rank_ends_the_training_of_all(fields, place):
    """The other rank is told as soon as this one ends."""

    @with_faults(2, killed=[1])
    def _(rank):
        engine = engine_of(place / "disk", fields)
        step(engine)
        step(engine)
        if rank == 1:
            Faults.here().come(READ, KINDS["fails"], 2, FOREVER)
            with pytest.raises((DiskError, StateError)):  # noqa: PT012
                for _ in range(3):
                    step(engine)
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(CollectiveError):  # noqa: PT012
            for _ in range(3):
                step(engine)
        with pytest.raises((CollectiveError, StateError)):
            step(engine)


# --- folders and file systems ----------------------------------------------------------------------------


def weights_of(model):
    return [tensor.clone() for tensor in model.state_dict().values()]


@pytest.mark.draws(1)
@pytest.mark.parametrize("fields", [{}, PARAMETERS_TOO], ids=["states", "parameters too"])
@pytest.mark.parametrize("how", ["a limit of files", "a full disk"])
def test_a_disk_that_fills_in_wrap_is_an_error_that_leaves_nothing_and_the_model_as_it_was(how, fields, place):
    @with_faults()
    def _(rank):
        model = torch.nn.Linear(64, 64)
        before = weights_of(model)
        on_disk = {"offload_optimizer": "nvme", "nvme_path": str(place / "disk"), "nvme_host_bytes": 0, **fields}
        if how == "a limit of files":
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
        else:
            Faults.here().no_room = 28
        with pytest.raises(DiskError, match=r"no room for [\d,]+ bytes of states \(.*\); expected a disk with more"):
            wrap(model, lr=1e-2, num_threads=1, **on_disk)
        for _ in range(2):
            gc.collect()
        assert not scratch_files()
        assert not [*(place / "disk").iterdir()]
        torch_models.assert_all_same(weights_of(model), before)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        Faults.here().no_room = 0
        engine = wrap(model, lr=1e-2, num_threads=1, **on_disk)
        engine.backward(engine(torch.ones(2, 64)).mean())
        assert engine.step().updated


@pytest.mark.draws(1)
@pytest.mark.parametrize("refused", ["no_direct", "no_unnamed", "both"])
def test_a_file_system_that_lacks_a_kind_of_file_changes_no_bit_and_has_no_names_left(refused, place):
    @with_faults()
    def _(rank):
        faults = Faults.here()
        expected = Run("parameters too", place / "disk", place / "0").all()
        faults.no_direct = 22 * (refused != "no_unnamed")
        faults.no_unnamed = 95 * (refused != "no_direct")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            run = Run("parameters too", place / "disk", place / "1")
        direct = [str(w.message) for w in caught if issubclass(w.category, ConfigWarning)]
        assert {w.filename for w in caught if issubclass(w.category, ConfigWarning)} <= {__file__}
        assert len(direct) == (refused != "no_unnamed"), direct
        assert all("does not read and write past the page cache (O_DIRECT)" in message for message in direct)
        assert scratch_files()
        assert not [*(place / "disk").iterdir()]
        assert run.all() == expected


def test_two_runs_in_one_folder_and_one_whose_folder_vanishes_have_their_bits(place):
    @with_faults()
    def _(rank):
        expected = Run("parameters too", place / "disk", place / "0").all()
        runs = [Run("parameters too", place / "disk", place / f"{1 + i}") for i in range(2)]
        before = scratch_files()
        assert len(before) == len({*map(os.fstat, before)}) > 1
        acts = [iter(run.acts().values()) for run in runs]
        shutil.rmtree(place / "disk")
        for both in zip(*acts, strict=True):
            for act in both:
                act()
        assert [run.seen for run in runs] == [expected] * 2
        runs[0].engine.close()
        assert 0 < len(scratch_files()) < len(before)  # each has its own
        runs[1].close()
        with pytest.raises(ConfigError, match="which does not exist"):
            engine_of(place / "disk", {})


def test_a_folder_that_becomes_read_only_does_not_matter_to_a_run_that_has_begun(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "more").mkdir()
    with mounted(tmp_path / "disk", "size=64m"):

        @with_faults()
        def _(rank):
            expected = Run("direct", tmp_path / "more", tmp_path / "0").all()
            run = Run("direct", tmp_path / "disk", tmp_path / "1")
            os.chmod(tmp_path / "disk", 0o500)
            assert run.all() == expected


# --- interrupts, forks, ends -----------------------------------------------------------------------------


@pytest.mark.draws(1)
@pytest.mark.parametrize("case", ["direct", "overlap", "parameters too"])
@pytest.mark.parametrize("way", WAYS)
def test_an_interrupt_while_the_disk_is_waited_for_leaves_the_step_before_or_after(case, way, place):
    """A real signal, while a read or a write is held back: in steps, saves and reads of states."""
    way = WAYS[way]

    @with_faults()
    def _(rank):
        faults = Faults.here()
        expected = Run(case, place / "disk", place / "0").all()
        run, interrupted = Run(case, place / "disk", place / "1"), 0

        def interrupt():
            while not faults.waiting[way] and not ended.is_set():
                time.sleep(1e-4)
            time.sleep(0.02)  # most often the main thread waits then
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.02)
            faults.closed[way] = 0
            sent.set()

        def save():
            """One that was interrupted may still be on its way."""
            for _ in range(PATIENCE):
                try:
                    run.engine.wait_for_checkpoint()
                    run.engine.save_checkpoint(run.checkpoints)
                    return
                except CheckpointError as error:
                    said.append(str(error))
                    time.sleep(0.05)
            raise AssertionError(said)

        said = []
        for act in {**run.acts(), "save": save}.values():
            for _ in range(3):
                sent, ended = threading.Event(), threading.Event()
                other = threading.Thread(target=interrupt)
                faults.closed[way] = 1
                other.start()
                try:
                    try:
                        act()
                    finally:
                        ended.set()
                        sent.wait(60)
                        time.sleep(0)
                except KeyboardInterrupt:
                    interrupted += 1
                    run.seen = run.seen[: len(expected)]
                    run.engine.optimizer.zero_grad()
                else:
                    break
                finally:
                    other.join()
            else:
                act()
        assert interrupted
        assert {*run.seen} == {*expected}
        run.close()


@pytest.mark.draws(1)
@pytest.mark.parametrize("case", ["direct", "overlap", "parameters too"])
def test_a_fork_has_none_of_its_parents_files_and_leaves_them_alone(case, place):
    """As a data loader's: it neither hangs nor keeps the space."""

    @with_faults()
    def _(rank):
        expected = Run(case, place / "disk", place / "0").all()
        run = Run(case, place / "disk", place / "1")
        run.train(2)
        child = os.fork()
        if child == 0:
            signal.alarm(100)
            status = 0
            try:
                assert not scratch_files()
                own = os.memfd_create("takes a number that was the parent's")
                with pytest.raises(StateError, match="forked"):
                    torch_models.everything(run.engine)
                unheard = []
                sys.unraisablehook = unheard.append
                del run
                gc.collect()
                assert not unheard or case == "parameters too"  # which cannot become whole in the child
                os.fstat(own)
            except BaseException:
                traceback.print_exc()
                status = 1
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        loader = torch.utils.data.DataLoader(torch.arange(len(run.acts())), num_workers=1)
        for _, act in zip(loader, run.acts().values(), strict=True):
            act()
        run.close()
        assert run.seen == expected


def trains(folder, checkpoints, told):
    """Train for ever, saving after each second step; tell of each save."""
    run = Run("parameters too", folder, checkpoints)
    with suppress(CheckpointError):
        run.engine.load_checkpoint(checkpoints)
    while True:
        step(run.engine)
        step(run.engine)
        run.engine.save_checkpoint(checkpoints, keep=2)
        os.write(told, run.engine.optimizer.updates.to_bytes(4, "little"))


def in_fork(act):
    """The number of a child process that does this, and its end."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            act()
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    return child


@pytest.mark.parametrize("times", [2, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_a_run_that_is_killed_at_any_time_leaves_no_file_no_space_and_a_whole_checkpoint(times, tmp_path):
    (tmp_path / "disk").mkdir()
    with mounted(tmp_path / "disk", "size=64m"):

        @with_faults(seconds=1700)
        def _(rank):
            rng, saved, took = random.Random(times), 0, 1.0
            free = os.statvfs(tmp_path / "disk").f_bfree
            for _ in range(times):
                if saved >= 8:  # the twin below trains as long
                    shutil.rmtree(tmp_path / "saves")
                    saved = 0
                heard, told = os.pipe()
                begun = time.monotonic()
                child = in_fork(partial(trains, tmp_path / "disk", tmp_path / "saves", told))
                os.close(told)
                said = os.read(heard, 4) if not saved else b""
                took = time.monotonic() - begun if said else took
                time.sleep(rng.uniform(0, took))
                os.kill(child, signal.SIGKILL)
                assert os.waitpid(child, 0)[1] == signal.SIGKILL
                while part := os.read(heard, 4096):
                    said += part
                os.close(heard)
                saved = int.from_bytes(said[-4:], "little") if said else saved
                assert not [*(tmp_path / "disk").iterdir()]
                assert os.statvfs(tmp_path / "disk").f_bfree == free

                def check(saved=saved):
                    run = Run("parameters too", tmp_path / "disk", tmp_path / "none")
                    twin = Run("parameters too", tmp_path / "disk", tmp_path / "none")
                    run.engine.load_checkpoint(tmp_path / "saves")
                    assert run.engine.optimizer.updates in (saved, saved + 2)
                    step(run.engine)
                    while twin.engine.optimizer.updates < run.engine.optimizer.updates:
                        step(twin.engine)
                    both = [digest(torch_models.everything(each.engine)) for each in (run, twin)]
                    assert both[0] == both[1]

                assert os.waitpid(in_fork(check), 0)[1] == 0
                saved = Checkpoint(tmp_path / "saves").content["step"]  # it may have been killed before it told


END = """
import sys, os, torch
from tests.core.test_disk_faults import engine_of, step
engine = engine_of(sys.argv[1], {fields})
step(engine)
step(engine)
class Ends(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 1
    @staticmethod
    def backward(context, gradient):
        {end}
        return gradient
engine.backward(Ends.apply(engine(torch.ones(8, 32))).float().mean())
{after}
"""


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, PARAMETERS_TOO], ids=["states", "parameters too"])
def test_a_process_that_ends_in_the_middle_of_a_step_neither_hangs_nor_leaves_a_file(fields, place):
    ends = {
        "sys.exit(3)": 3,
        "raise ValueError('mine')": 1,
        "os._exit(4)": 4,
        "os.kill(os.getpid(), 2)": -2,
    }
    codes = [END.format(fields=fields, end=end, after="") for end in ends]
    codes += [END.format(fields=fields, end="pass", after="engine.optimizer.step(); sys.exit(5)")]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(place / "disk")], env=environment_of(ROOT), stderr=subprocess.PIPE
        )
        for code in codes
    ]
    said = [process.communicate(timeout=200)[1].decode() for process in running]
    assert not [*(place / "disk").iterdir()]
    for process, expected, text in zip(running, [*ends.values(), 5], said, strict=True):
        assert process.returncode == expected, text
