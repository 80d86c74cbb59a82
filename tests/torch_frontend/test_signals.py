"""Real signals, and another thread, that save or interrupt in the middle of training: whole steps, errors, no hang.

``signals_worker.py`` compares every save, and the run itself, with a run without signals.
"""

import json
import os
import signal
import tempfile
import threading

import pytest
import torch

from frontends.torch import wrap
from frontends.torch.ranks import device_ranks
from offload_core.errors import CheckpointError, StateError
from tests.support.interrupts import handled_at_each_line
from tests.support.processes import ROOT, torch_server
from tests.support.slow_torch_device import SlowTorchDevice

CASES = ("host", "overlap", "serial", "delayed", "in backward")
SCENARIOS = ("saves", "raised", "interrupts", "threads")


def run(scenario, case, n_signals, seed, folder, seconds=60.0):
    command = [str(ROOT / "tests" / "workers" / "signals_worker.py"), scenario, case, str(n_signals), str(seed)]
    [done] = torch_server().run([*command, str(folder)], seconds=seconds)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    print(scenario, case, counts)
    assert counts["signals"] >= n_signals
    return counts


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("case", ["host", "overlap"])
def test_a_save_in_the_middle_of_a_step_is_whole_or_an_error(scenario, case, tmp_path):
    counts = run(scenario, case, 30, 0, tmp_path)
    if scenario in ("saves", "raised"):
        assert counts["refused"]
    if scenario != "interrupts":
        assert sum(counts["compared"].values()) > 5


def bits(tensors):
    return [tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


def state_dict(engine):
    entries = engine.optimizer.state_dict()["state"].values()
    return bits(entry[name] for entry in entries for name in ("step", "exp_avg", "exp_avg_sq"))


def torch_state_dict(engine):
    entries = engine.optimizer.torch_state_dict()["state"].values()
    return bits(entry[name] for entry in entries for name in ("step", "exp_avg", "exp_avg_sq"))


def states(engine):
    entries = [engine.optimizer.state[p] for p in engine.parameters()]
    return bits(entry[name] for entry in entries for name in ("step", "exp_avg", "exp_avg_sq"))


def checkpoint(engine):
    with tempfile.TemporaryDirectory() as folder:
        path = engine.save_checkpoint(folder)
        other = engine_of(engine.config.schedule)
        other.load_checkpoint(path)
        return state_dict(other)


def engine_of(schedule):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4, bias=False))
    return wrap(model, lr=0.1, num_threads=1, param_dtype="bfloat16", reduce_bucket_size=64, schedule=schedule)


def step(engine, seed):
    generator = torch.Generator().manual_seed(seed)
    engine.backward(engine(torch.randn(4, 8, generator=generator)).float().pow(2).mean())
    engine.step()


@pytest.mark.parametrize(
    ("schedule", "save"),
    [("overlap", state_dict), ("overlap", torch_state_dict), ("overlap", states), ("serial", checkpoint)],
)
def test_a_handler_that_saves_at_any_line_of_a_step_gets_a_whole_step_or_an_error(schedule, save, monkeypatch):
    slow = SlowTorchDevice(0.0)
    monkeypatch.setattr(device_ranks, "memory_of", lambda device: slow)
    twin, allowed = engine_of(schedule), []
    for seed in (1, 2):
        step(twin, seed)
        allowed.append(state_dict(twin))
    engine, seen, refused = engine_of(schedule), set(), []
    step(engine, 1)

    def handler(place):
        try:
            saved = save(engine)
        except StateError as error:
            refused.append(str(error))
            return
        assert saved in allowed, place
        seen.add(allowed.index(saved))

    handled_at_each_line(lambda: step(engine, 2), handler)
    assert seen == {0, 1}
    assert sum("in the middle of step(), in the same thread" in error for error in refused) > 30
    assert state_dict(engine) == allowed[1]


def test_a_save_of_another_thread_waits_for_the_steps_end(monkeypatch, tmp_path):
    slow = SlowTorchDevice(0.0)
    monkeypatch.setattr(device_ranks, "memory_of", lambda device: slow)
    engine = engine_of("serial")
    step(engine, 1)
    before, saved = state_dict(engine), []
    engine.backward(engine(torch.ones(4, 8)).float().pow(2).mean())
    slow.gate.clear()
    saving = threading.Thread(target=lambda: saved.append(torch_state_dict(engine)))

    def save_and_go_on():
        saving.start()
        saving.join(0.3)
        saved.append("the step goes on")
        slow.gate.set()

    other = threading.Thread(target=save_and_go_on)

    def begin(place):
        if not other.ident and "in_section" not in place and engine.optimizer.pipeline.state_lock._of_change.locked():
            other.start()

    handled_at_each_line(engine.step, begin)
    other.join()
    saving.join()
    assert saved == ["the step goes on", state_dict(engine)]
    assert saved[1] != before


def test_a_signal_is_noted_and_saved_for_after_the_next_step(tmp_path):
    engine, before = engine_of("overlap"), signal.getsignal(signal.SIGUSR1)
    schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda epoch: 1 / (1 + epoch))
    with engine.save_on_signal(tmp_path, [signal.SIGUSR1], stateful={"schedule": schedule}, keep=1) as saver:
        step(engine, 1)
        schedule.step()
        assert saver.save() is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert saver.save() is None  # the other ranks do not know of it yet
        step(engine, 2)
        schedule.step()
        path = saver.save({"epoch": 7})
        assert path == tmp_path / "step-00000002"
        step(engine, 3)
        assert saver.save() is None
    assert signal.getsignal(signal.SIGUSR1) == before
    other = engine_of("overlap")
    theirs = torch.optim.lr_scheduler.LambdaLR(other.optimizer, lambda epoch: 1 / (1 + epoch))
    assert other.load_checkpoint(path, stateful={"schedule": theirs}) == {"epoch": 7}
    assert theirs.last_epoch == 2


def test_a_save_that_fails_is_tried_again(tmp_path):
    engine = engine_of("overlap")
    (tmp_path / "file").write_text("")
    with engine.save_on_signal(tmp_path / "file", [signal.SIGUSR1]) as saver:
        os.kill(os.getpid(), signal.SIGUSR1)
        step(engine, 1)
        for _ in range(2):
            with pytest.raises(CheckpointError, match="expected a folder that can be written"):
                saver.save()


def test_signals_are_received_in_the_main_thread_alone(tmp_path):
    engine, said = engine_of("overlap"), []

    def ask():
        try:
            engine.save_on_signal(tmp_path)
        except StateError as error:
            said.append(str(error))

    other = threading.Thread(target=ask)
    other.start()
    other.join()
    assert said == [
        "save_on_signal() in a thread; expected it in the main thread, which alone can receive Python's signals"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("case", CASES)
def test_a_hundred_signals(scenario, case, tmp_path):
    counts = run(scenario, case, 100, 1, tmp_path)
    assert sum(counts["compared"].values()) > 5


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("case", CASES)
def test_two_thousand_signals(scenario, case, tmp_path):
    counts = run(scenario, case, 2000, 1, tmp_path, seconds=800)
    assert sum(counts["compared"].values()) > 100


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_ten_minutes_of_interrupts(tmp_path):
    for seed, case in enumerate(("overlap", "in backward", "delayed")):
        run("interrupts", case, 9000, seed, tmp_path, seconds=1000)
