"""Real signals at random times, and another thread, that save or interrupt in the middle of training.

Gradients follow from the number of updates, so that there is one right state for each number. Every save must be one of
these, and so must the run's own state at its end.
"""

import copy
import hashlib
import random
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from frontends.torch import wrap
from frontends.torch.ranks import device_ranks
from offload_core import CheckpointError, StateError
from tests.support.processes import SECONDS, on_ranks
from tests.support.slow_torch_device import SlowTorchDevice

LATE = {"param_dtype": "bfloat16", "reduce_bucket_size": 64}
CASES = {
    "host": {},
    "overlap": {**LATE, "gradient_clipping": 0.05},
    "serial": {**LATE, "schedule": "serial"},
    "delayed": {**LATE, "schedule": "delayed", "delay_warmup_steps": 1},
    "in backward": {**LATE, "update_in_backward": True, "gradient_clipping": 1e3},  # else it cannot be taken back
}


class Interrupt(KeyboardInterrupt):
    pass


def engine_of(case):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4, bias=False))
    return wrap(model, lr=1e-3, num_threads=1, **CASES[case])


def step(engine):
    generator = torch.Generator().manual_seed(engine.optimizer.updates)
    engine.backward(engine(torch.randn(4, 8, generator=generator)).float().pow(2).mean())
    engine.step()


def bits(tensors):
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def states(entries):
    return bits(entry[name] for entry in entries for name in sorted(entry))


def states_of(engine):
    return states([dict(engine.optimizer.state[p]) for p in engine.parameters()])


def moments(entries):
    return bits(entry[name] for entry in entries for name in ("step", "exp_avg", "exp_avg_sq"))


def weights(engine):
    return bits(engine.state_dict().values())


class Saves:
    """Saves in each way in turn, with what was saved, and the number of updates that it claims to be of."""

    def __init__(self, engine, folder, n_signals):
        self.engine, self.folder, self.n_signals = engine, folder, n_signals
        self.found, self.refused, self.asked = [], 0, 0
        self.ways = [self.checkpoint, self.state_dict, self.torch_state_dict, self.export, self.model]
        if engine.offload_config.schedule == "delayed":
            self.ways = [self.checkpoint]  # the others flush, and so move parameters to another step's gradients

    def enough(self, *, refused=True):
        """True once so many were asked for, some beside a step, and some in it."""
        return self.asked >= self.n_signals and len(self.found) > 5 and (self.refused > 0 or not refused)

    def __call__(self):
        self.asked += 1
        try:
            self.ways[self.asked % len(self.ways)]()
        except StateError:
            self.refused += 1
            raise

    def checkpoint(self):
        self.found.append(["checkpoint", str(self.engine.save_checkpoint(self.folder / "checkpoints"))])

    def state_dict(self):
        saved = copy.deepcopy(self.engine.optimizer.state_dict())
        entries = [entry for _, entry in sorted(saved["state"].items())]
        self.found.append(["states", int(entries[0]["step"]), states(entries)])

    def torch_state_dict(self):
        saved = self.engine.optimizer.torch_state_dict()
        entries = [entry for _, entry in sorted(saved["state"].items())]
        if entries:
            self.found.append(["moments", int(entries[0]["step"]), moments(entries)])

    def export(self):
        folder = self.folder / f"export-{self.asked}"
        self.engine.export_safetensors(folder)
        self.found.append(["export", str(folder)])

    def model(self):
        self.engine.flush()
        self.found.append(["weights", None, weights(self.engine)])


def check(case, engine, found):
    """Compare what was saved, and the run itself, with a run without signals."""
    twin, updates = engine_of(case), engine.optimizer.updates
    expected = {name: {} for name in ("states", "moments", "weights")}
    for number in range(updates + 1):
        expected["states"][number] = states_of(twin)
        expected["moments"][number] = moments([twin.optimizer.state[p] for p in twin.parameters()])
        expected["weights"][number] = weights(twin)
        if number < updates:
            step(twin)
    other = engine_of(case)
    for kind, *entry in found:
        if kind == "checkpoint":
            other.load_checkpoint(entry[0])
            number, kind = other.optimizer.updates, "states"
            got = states_of(other)
        elif kind == "export":
            named = load_file(Path(entry[0]) / "model.safetensors")
            number, kind, got = None, "weights", bits(named[name] for name in engine.module.state_dict())
        else:
            number, got = entry
        allowed = [expected[kind][number]] if number is not None else expected[kind].values()
        assert got in allowed, f"{kind} after {number} of {updates} updates are of no step"
    assert states_of(engine) == expected["states"][updates], "the run itself has other states"


def alarmed(rng):
    signal.setitimer(signal.ITIMER_REAL, rng.uniform(5e-5, rng.choice([4e-3, 0.08])))


def saves(case, n_signals, rng, folder, raises=False):
    engine = engine_of(case)
    save, armed = Saves(engine, folder, n_signals), False

    def handler(number, frame):
        nonlocal armed
        try:
            save()
        except StateError:
            if raises and armed:  # the next one is raised when the loop has seen this one
                armed = False
                raise
        finally:
            alarmed(rng)

    signal.signal(signal.SIGALRM, handler)
    alarmed(rng)
    while not save.enough():
        try:
            armed = True  # also after an error that came in a finalizer, and is lost
            step(engine)
        except StateError:
            torch.set_grad_enabled(True)  # an interrupt of torch.no_grad() may leave it off
            engine.optimizer.zero_grad()
    return engine, save.found


def interrupts(case, n_signals, rng, folder):
    engine, came, found, armed = engine_of(case), 0, [], False

    def handler(number, frame):
        nonlocal came, armed
        came += armed
        alarmed(rng)
        if armed:  # the next interrupt comes when the loop has seen this one
            armed = False
            raise Interrupt

    def until_interrupted(act):
        nonlocal armed
        try:
            armed = True
            act()
            armed = False
            return False
        except Interrupt:
            return True

    def train():
        nonlocal armed
        while came < n_signals:
            armed = True  # an interrupt that came in a finalizer is lost
            for _ in range(rng.randrange(1, 20)):
                step(engine)
            with suppress(CheckpointError):  # the save before was interrupted
                path = engine.save_checkpoint(folder / "checkpoints", wait=bool(rng.randrange(2)))
                found.append(["checkpoint", str(path)])

    signal.signal(signal.SIGALRM, handler)
    alarmed(rng)
    while came < n_signals:
        until_interrupted(train)
        torch.set_grad_enabled(True)  # an interrupt of torch.no_grad() may leave it off
        while until_interrupted(engine.optimizer.zero_grad):
            pass
    armed = False
    with suppress(CheckpointError):
        engine.wait_for_checkpoint()
    return engine, [entry for entry in found if Path(entry[1]).exists()]


def threads(case, n_saves, rng, folder):
    engine = engine_of(case)
    save, errors = Saves(engine, folder, n_saves), []
    save.ways = [way for way in save.ways if way not in (save.state_dict, save.model)]  # which hold the live tensors

    def run():
        while not save.enough(refused=False):
            try:
                save()
            except StateError:
                pass
            except BaseException as error:
                errors.append(repr(error))
                return
            time.sleep(rng.uniform(0, 2e-3))

    other = threading.Thread(target=run)
    other.start()
    while other.is_alive():
        step(engine)
    other.join()
    assert not errors, errors
    return engine, save.found


SCENARIOS = {
    "saves": saves,
    "raised": partial(saves, raises=True),
    "interrupts": interrupts,
    "threads": threads,
}


def run(scenario, case, n_signals, seed, folder, seconds=SECONDS):
    @on_ranks(1, group=False, seconds=seconds)
    def _(rank):
        if case != "host":
            slow = SlowTorchDevice(5e-5)
            device_ranks.memory_of = lambda device: slow
        engine, found = SCENARIOS[scenario](case, n_signals, random.Random(seed), folder)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        check(case, engine, found)


@pytest.mark.draws(1)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("case", ["host", "overlap"])
def test_a_save_in_the_middle_of_a_step_is_whole_or_an_error(scenario, case, tmp_path):
    run(scenario, case, 30, 0, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("case", CASES)
def test_a_hundred_signals(scenario, case, tmp_path):
    run(scenario, case, 100, 1, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("case", CASES)
def test_two_thousand_signals(scenario, case, tmp_path):
    run(scenario, case, 2000, 1, tmp_path, seconds=800)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_ten_minutes_of_interrupts(tmp_path):
    for seed, case in enumerate(("overlap", "in backward", "delayed")):
        run("interrupts", case, 9000, seed, tmp_path / case, seconds=1000)
