"""Saves in the middle of a step, in a signal's handler or another thread: whole steps, errors, no hang."""

import copy
import gc
import os
import signal
import threading
import time
from functools import partial

import pytest
import torch

from frontends.torch import wrap
from frontends.torch.params.pending import PendingParameter
from frontends.torch.ranks import device_ranks
from offload_core.errors import CheckpointError, StateError
from offload_core.step.state_lock import StateLock
from offload_core.support import threads
from offload_core.support.threads import Task
from tests.support.interrupts import handled_at_each_line, read_at_each_line
from tests.support.slow_torch_device import SlowTorchDevice
from tests.support.waiting import until_one_is_in


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


def engine_of(schedule):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4, bias=False))
    return wrap(model, lr=0.1, num_threads=1, param_dtype="bfloat16", reduce_bucket_size=64, schedule=schedule)


def step(engine, seed):
    generator = torch.Generator().manual_seed(seed)
    engine.backward(engine(torch.randn(4, 8, generator=generator)).float().pow(2).mean())
    engine.step()


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
        until_one_is_in(StateLock._run, torch_state_dict, thread=saving)
        saved.append("the step goes on")
        slow.gate.set()

    other = threading.Thread(target=save_and_go_on)

    def begin(place):
        if not other.ident and "in_section" not in place and engine.optimizer.core.state_lock.changing.locked():
            other.start()

    handled_at_each_line(engine.step, begin)
    other.join()
    saving.join()
    assert saved == ["the step goes on", state_dict(engine)]
    assert saved[1] != before


def in_another_thread(act):
    task = Task(act)
    threading.Thread(target=task.run).start()
    return task.result()


def without_a_thread(act):
    """Sections run in the main thread, as at the first section of a process that can start no thread."""
    before, sections = threading.stack_size(2**46), threads._sections  # more than there is
    threads._sections = None
    try:
        return act()
    finally:
        threads._sections = sections
        threading.stack_size(before)


def load(engine, other):
    engine.optimizer.load_state_dict(other.optimizer.state_dict())


def assign(engine, other):
    for param, given in zip(engine.parameters(), other.parameters(), strict=True):
        engine.optimizer.state[param] = {name: each.clone() for name, each in other.optimizer.state[given].items()}


@pytest.mark.draws(1)
@pytest.mark.parametrize("act", [load, assign])
@pytest.mark.parametrize("where", [in_another_thread, without_a_thread])
def test_states_are_loaded_and_assigned_wherever_the_section_runs(act, where):
    engine, other, twin = (engine_of("overlap") for _ in range(3))
    for each in (engine, twin):
        step(each, 1)
    for seed in (2, 3):
        step(other, seed)
    where(partial(act, engine, other))
    act(twin, other)
    assert state_dict(engine) == state_dict(twin) == state_dict(other)
    for each in (engine, twin):
        step(each, 4)
    assert state_dict(engine) == state_dict(twin)
    assert bits(engine.parameters()) == bits(twin.parameters())


def test_an_engine_is_copied_in_another_thread():
    engine = engine_of("overlap")
    step(engine, 1)
    twin = in_another_thread(lambda: copy.deepcopy(engine))
    assert state_dict(twin) == state_dict(engine)
    for each in (engine, twin):
        step(each, 2)
    assert state_dict(twin) == state_dict(engine)
    assert bits(twin.parameters()) == bits(engine.parameters())


@pytest.mark.parametrize("where", [in_another_thread, without_a_thread])
def test_a_load_that_is_refused_changes_nothing_wherever_it_is_asked_for(where):
    engine, other = engine_of("overlap"), engine_of("overlap")
    step(engine, 1)
    before, given = state_dict(engine), other.optimizer.state_dict()
    given["param_groups"][0]["lr"] = 0.5
    given["state"] = {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}}
    with pytest.raises(StateError):
        where(lambda: engine.optimizer.load_state_dict(given))
    assert state_dict(engine) == before
    assert engine.optimizer.param_groups[0]["lr"] == 0.1


def test_a_handler_in_a_load_that_no_thread_takes_over_gets_whole_states_or_an_error():
    engine, other = engine_of("overlap"), engine_of("overlap")
    step(engine, 1)
    allowed = [state_dict(engine)]
    for seed in (2, 3):
        step(other, seed)
    allowed.append(state_dict(other))
    seen, refused = read_at_each_line(
        lambda: states(engine), lambda: without_a_thread(lambda: load(engine, other)), allowed
    )
    assert seen == {0, 1}
    assert any("in the middle of load_state_dict(), in the same thread" in error for error in refused)


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


def test_a_handler_that_waits_for_a_checkpoint_in_the_middle_of_a_save_gets_an_error(tmp_path, monkeypatch):
    """The writer may wait for what the interrupted call copies."""
    engine, said = engine_of("overlap"), []
    step(engine, 1)

    def handler(place):
        try:
            engine.wait_for_checkpoint()
        except StateError as error:
            said.append(str(error))

    handled_at_each_line(lambda: engine.save_checkpoint(tmp_path, wait=False), handler)
    engine.wait_for_checkpoint()
    assert sum("wait_for_checkpoint() in the middle of save_checkpoint(), in the same thread" in s for s in said) > 30


def test_two_engines_save_after_one_signal(tmp_path):
    before, engines = signal.getsignal(signal.SIGUSR1), [engine_of("overlap"), engine_of("overlap")]
    with (
        engines[0].save_on_signal(tmp_path / "first", [signal.SIGUSR1]) as first,
        engines[1].save_on_signal(tmp_path / "second", [signal.SIGUSR1, signal.SIGUSR1]) as second,
    ):
        os.kill(os.getpid(), signal.SIGUSR1)
        for engine in engines:
            step(engine, 1)
        assert [first.save(), second.save()] == [tmp_path / name / "step-00000001" for name in ("first", "second")]
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_signal_that_nobody_can_receive_is_an_error_and_leaves_the_others_as_they_were(tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(OSError, match="Invalid argument"):
        engine_of("overlap").save_on_signal(tmp_path, [signal.SIGUSR1, signal.SIGKILL])
    assert signal.getsignal(signal.SIGUSR1) == before


def test_further_interrupts_while_a_broken_step_is_waited_for_leave_parameters_that_are_waited_for(monkeypatch):
    slow = SlowTorchDevice(0.0)
    monkeypatch.setattr(device_ranks, "memory_of", lambda device: slow)
    engine = engine_of("overlap")
    step(engine, 1)
    engine.flush()
    slow.gate.clear()
    pipeline = engine.optimizer.core._pipeline
    whole, waits = pipeline.step, [pipeline.last_step.finish]

    def interrupted_after(*args, **kwargs):
        whole(*args, **kwargs)
        pipeline.last_step.finish = interrupted
        raise KeyboardInterrupt

    def interrupted():
        pipeline.last_step.finish = waits[0]
        raise KeyboardInterrupt

    pipeline.step = interrupted_after
    with pytest.raises(KeyboardInterrupt):
        step(engine, 2)
    assert {type(p) for p in engine.module.parameters()} == {PendingParameter}
    slow.gate.set()
    assert not any(p.isnan().any() for p in engine.module.parameters())


def become_whole(params):
    """True once the parameters of an engine that is gone are plain ones; it is cleared up in another thread."""
    until = time.monotonic() + 60
    while (pending := any(isinstance(p, PendingParameter) for p in params)) and time.monotonic() < until:
        time.sleep(0.01)
    return not pending


def test_garbage_of_an_engine_that_its_own_thread_collects_does_not_wait_there(monkeypatch):
    """Python collects in whatever thread allocates; the thread would wait for itself."""
    collect, collected, armed = threading.Event(), threading.Event(), []

    class Collecting(SlowTorchDevice):
        def to_device(self, host, copies, after):
            if armed:
                armed.clear()
                collect.wait(60)
                gc.collect()
                collected.set()
            return super().to_device(host, copies, after)

    slow = Collecting(0.0)
    monkeypatch.setattr(device_ranks, "memory_of", lambda device: slow)
    holder = [engine_of("overlap")]
    holder.append(holder)  # a cycle: only the collector finds it
    step(holder[0], 1)
    holder[0].flush()
    params = list(holder[0].module.parameters())
    gc.disable()
    try:
        armed.append(True)
        step(holder[0], 2)
        del holder
        collect.set()
        assert collected.wait(60)
    finally:
        gc.enable()
    assert become_whole(params)
    assert not any(p.isnan().any() for p in params)


def test_garbage_of_an_engine_in_stage_3_that_anothers_copies_collect_does_not_wait_for_its_step(monkeypatch):
    """The step waits for the copies."""
    streamed = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0}
    holder = [wrap(torch.nn.Sequential(torch.nn.Linear(8, 8)), **streamed)]
    holder.append(holder)  # a cycle: only the collector finds it
    params = list(holder[0].module.parameters())

    class Collecting(SlowTorchDevice):
        def to_device(self, host, copies, after):
            self._lanes[1].submit(gc.collect)
            return super().to_device(host, copies, after)

    slow = Collecting()
    monkeypatch.setattr(device_ranks, "memory_of", lambda device: slow)
    engine = engine_of("serial")
    gc.disable()
    try:
        del holder
        step(engine, 1)
    finally:
        gc.enable()
    assert become_whole(params)


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
