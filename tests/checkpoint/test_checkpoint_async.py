"""Saves while training goes on: they hold the moment of the call, and training goes on as if nothing were saved."""

import gc
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.checkpoint.checkpoints import Checkpoints, Contents
from offload_core.checkpoint.reader import Checkpoint
from offload_core.checkpoint.shard_writer import ShardWriter, Source
from offload_core.config.options import OffloadConfig
from offload_core.device.host import HostDevice
from offload_core.dtypes import BFLOAT16, FLOAT32
from offload_core.errors import CheckpointError, CheckpointWarning
from offload_core.layout.partition import ParamSpec
from offload_core.layout.regions import Region
from offload_core.rules.adam import AdamHyper
from offload_core.step.decision import StepArguments
from offload_core.step.state_access import StateAccess
from offload_core.support.threads import Condition
from offload_core.testing.fake_device import FakeDevice, FakeTensor
from offload_core.testing.thread_ranks import run_ranks
from tests.support.checkpoints import Slow, load, names_of, save
from tests.support.late_stores import over_all_stores
from tests.support.pipelines import Subject, bits, overwrite
from tests.support.strategies import law
from tests.support.waiting import until_one_is_in

ROOT = Path(__file__).resolve().parents[2]
HYPERS = [AdamHyper(1e-2)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr("offload_core.checkpoint.shard_writer.BLOCK_BYTES", 256)


def subject_of(device=None, dtype=BFLOAT16, rank=None, **fields):
    rng = np.random.default_rng(0)
    masters = [rng.standard_normal(n).astype(np.float32) for n in (40, 100, 7)]
    config = OffloadConfig(num_threads=1, reduce_bucket_size=32, **fields)
    return Subject(device or HostDevice(), masters, [dtype] * 3, [0] * 3, config, collectives=rank)


def give(subject, value=0.5):
    for i, spec in enumerate(subject.specs):
        subject.add_gradient(i, np.linspace(-value, value, spec.numel).astype(spec.dtype.numpy))


def step(subject, value=0.5):
    subject.pipeline.early.expect_step(StepArguments(HYPERS, subject.tensors))
    give(subject, value)
    subject.pipeline.gradients.end_micro_step()
    subject.pipeline.step(StepArguments(HYPERS, subject.tensors))


def drop(subject, value):
    if subject.pipeline.config.update_in_backward:
        return  # they are used as they come
    give(subject, value)
    subject.pipeline.gradients.drop()


def memory(tensor):
    return tensor.memory if isinstance(tensor, FakeTensor) else tensor


def change_from_outside(subject, value, i=1):
    subject.pipeline.last_step.finish()
    memory(subject.tensors[i])[::3] = value


def adopt(subject, value):
    change_from_outside(subject, value)
    StateAccess(subject.pipeline).adopt(1, subject.tensors[1])


def reload_master(subject, value):
    change_from_outside(subject, value)
    StateAccess(subject.pipeline).reload_master(1, subject.tensors[1])


def write_states(subject, value):
    """As a front end's load_state_dict does."""
    overwrite(subject.pipeline, 1, value)


def add_a_parameter(subject, value):
    name = f"p{len(subject.specs)}"
    spec = ParamSpec(name, 11, subject.specs[0].dtype, 0)
    tensor = subject.put(np.full(11, value, spec.dtype.numpy))
    subject.pipeline.add_parameters([spec], [tensor])
    subject.specs.append(spec)
    subject.tensors.append(tensor)


def flush(subject, value):
    subject.pipeline.parameters.flush(subject.tensors)


ACTS = (step, step, step, drop, adopt, reload_master, write_states, add_a_parameter, flush)


class Stalling:
    """A disk that writes as many blocks at once as it is given, and others after a while."""

    def __init__(self, patch):
        self.allowed = threading.Semaphore(0)
        put = ShardWriter._put

        def slowly(writer, data, at):
            self.allowed.acquire(timeout=0.003)
            put(writer, data, at)

        patch.setattr(ShardWriter, "_put", slowly)


@pytest.mark.draws(1)
@over_all_stores
@law(60)
@given(
    acts=st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 6), st.floats(0.5, 4, width=16)), max_size=7),
    before=st.integers(0, 2),
    buffers=st.sampled_from([1, 2, 8, 1000]),
    late=st.booleans(),
    dtype=st.sampled_from([BFLOAT16, FLOAT32]),
    fields=st.sampled_from(
        [
            *({"schedule": "overlap"}, {"schedule": "serial"}, {"schedule": "delayed", "delay_warmup_steps": 1}),
            *({"update_in_backward": True}, {"update_in_backward": True, "gradient_clipping": 1e3}),
        ]
    ),
)
def test_a_save_sees_nothing_of_what_is_done_meanwhile_and_is_not_seen(
    tmp_path_factory, acts, before, buffers, late, dtype, fields
):
    def new():
        return subject_of(FakeDevice(max_delay=1e-4) if late else HostDevice(), dtype, **fields)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offload_core.checkpoint.shard_writer.BUFFERS", buffers)
        saving, twin, disk = new(), new(), Stalling(patch)
        for subject in (saving, twin):
            for n in range(before):
                step(subject, 1.0 + n)
            subject.pipeline.last_step.finish()
        there, twins_steps = bits(saving), [float(s) for s in saving.pipeline.counts.steps]
        folder, held = tmp_path_factory.mktemp("async"), saving.pipeline.memory.n_bytes
        path, checkpoints = save(saving, folder, wait=False)
        assert saving.pipeline.memory.n_bytes <= held + buffers * 256
        for act, blocks, value in acts:
            disk.allowed.release(blocks) if blocks else None
            for subject in (saving, twin):
                act(subject, value)
        checkpoints.wait()
        for subject in (saving, twin):
            subject.pipeline.parameters.flush(subject.tensors)
        assert bits(saving) == bits(twin)
        other = new()
        load(other, path)
        other.pipeline.last_step.finish()
        assert [float(s) for s in other.pipeline.counts.steps] == twins_steps
        if fields.get("schedule") == "delayed":  # one parameter is behind until the next flush
            assert bits(other)[3:] == there[3:]
        else:
            assert bits(other) == there
        for subject in (saving, twin, other):
            if late:
                subject.device.close()


@pytest.mark.draws(2)
@pytest.mark.parametrize("act", [step, adopt, reload_master, write_states], ids=lambda act: act.__name__)
@pytest.mark.parametrize("schedule", ["serial", "overlap", "delayed"])
def test_who_changes_states_copies_them_first(tmp_path, monkeypatch, act, schedule):
    """The disk writes nothing until the change has been made."""
    monkeypatch.setattr("offload_core.checkpoint.shard_writer.BUFFERS", 1000)
    subject, slow = subject_of(schedule=schedule, delay_warmup_steps=0), Slow(monkeypatch)
    step(subject)
    subject.pipeline.last_step.finish()
    path, checkpoints = save(subject, tmp_path, wait=False)
    before = bits(subject)
    act(subject, 3.0)
    subject.pipeline.last_step.finish()
    assert bits(subject) != before
    slow.go_on()
    checkpoints.wait()
    other = subject_of(schedule=schedule, delay_warmup_steps=0)
    load(other, path)
    assert bits(other)[3:] == before[3:]


def test_nobody_is_told_of_changes_when_all_has_been_written(tmp_path):
    subject = subject_of()
    _, checkpoints = save(subject, tmp_path, wait=False)
    writer = checkpoints._save.writer
    checkpoints._save._thread.join()
    writer._changed = None  # whoever took this lock would say so
    step(subject)
    checkpoints.wait()


def test_an_interrupt_of_waiting_leaves_the_save_and_its_moment(tmp_path, monkeypatch):
    subject, slow = subject_of(), Slow(monkeypatch)
    monkeypatch.setattr("offload_core.checkpoint.shard_writer.BUFFERS", 1000)
    step(subject)
    before = bits(subject)
    _, checkpoints = save(subject, tmp_path, wait=False)

    def interrupted(timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints._save._thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.wait()
    step(subject)
    slow.go_on()
    checkpoints.wait()
    other = subject_of()
    load(other, tmp_path)
    assert bits(other) == before


def test_an_interrupt_of_save_gives_it_up(tmp_path, monkeypatch):
    """The save cannot go on, because the caller may change tensors that have not been copied."""
    subject, slow, tensor = subject_of(), Slow(monkeypatch), np.ones(4000, np.float32)
    wait_for = Condition.wait_for

    def interrupted(condition, holds):
        main = threading.current_thread() is threading.main_thread()
        if main and checkpoints._save and len(checkpoints._save.writer._full) > 6:
            raise KeyboardInterrupt
        wait_for(condition, holds)

    checkpoints = Checkpoints(subject.pipeline, StateAccess(subject.pipeline))
    contents = Contents(
        names_of(subject),
        sources=[Source.of("frozen", "param", Region((4000,), 0, 4000), tensor)],
        shapes={"frozen": ((4000,), tensor.dtype)},
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with monkeypatch.context() as patch:
            patch.setattr(Condition, "wait_for", interrupted)
            with pytest.raises(KeyboardInterrupt):
                checkpoints.save(tmp_path, contents, subject.tensors, step=1, keep=None, wait=False)
        tensor[:] = 2
        slow.go_on()
        with pytest.raises(CheckpointError, match="given up, because of KeyboardInterrupt"):
            checkpoints.wait()
    assert [warning.category for warning in warned] == [CheckpointWarning]
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_copied_is_the_saves_error_and_not_the_steps(tmp_path, monkeypatch):
    subject, twin, slow = subject_of(), subject_of(), Slow(monkeypatch)
    runs = Checkpoints._sources_of

    def failing(checkpoints, i, *args):
        def fail(start, out):
            raise RuntimeError("the copy failed, as asked")

        sources = runs(checkpoints, i, *args)
        return [Source(s.name, s.kind, s.region, s.dtype, fail, i) if i == 2 else s for s in sources]

    monkeypatch.setattr(Checkpoints, "_sources_of", failing)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        _, checkpoints = save(subject, tmp_path, wait=False)
        for each in (subject, twin):
            step(each)
        slow.go_on()
        with pytest.raises(CheckpointError, match="given up, because of .*the copy failed, as asked"):
            checkpoints.wait()
    assert [warning.category for warning in warned] == [CheckpointWarning]
    assert bits(subject) == bits(twin)
    assert not list(tmp_path.iterdir())


def test_a_failure_is_warned_of_when_it_happens_and_raised_once(tmp_path, monkeypatch):
    subject = subject_of()
    first, _ = save(subject, tmp_path, step=1)

    def fail(*args):
        raise OSError(28, "No space left on device")

    with warnings.catch_warnings(record=True) as warned, monkeypatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr("offload_core.checkpoint.shard_writer.os.pwrite", fail)
        _, checkpoints = save(subject, tmp_path, wait=False, step=2)
        checkpoints._save._thread.join()
        assert [str(warning.message) for warning in warned if "No space left on device" in str(warning.message)]
        step(subject)
        with pytest.raises(CheckpointError, match="No space left"):
            save(subject, tmp_path, checkpoints=checkpoints, step=3)
    checkpoints.wait()
    save(subject, tmp_path, checkpoints=checkpoints, step=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", first.name, "step-00000003"]


def test_a_second_save_and_a_load_wait_for_the_first(tmp_path, monkeypatch):
    subject, slow = subject_of(), Slow(monkeypatch)
    monkeypatch.setattr("offload_core.checkpoint.shard_writer.BUFFERS", 1000)
    saved = []
    checkpoints = Checkpoints(subject.pipeline, StateAccess(subject.pipeline))

    def act():
        for n in (1, 2):
            subject.pipeline.last_step.finish()
            saved.append(bits(subject))
            save(subject, tmp_path, wait=False, step=n, checkpoints=checkpoints)
            step(subject, n)

    thread = threading.Thread(target=act)
    thread.start()
    until_one_is_in(act, threading.Thread.join, thread=thread)
    assert len(saved) == 2
    slow.go_on()
    thread.join()
    checkpoints.load(
        tmp_path, names_of(subject), (), subject.tensors, lambda: subject.pipeline.parameters.flush(subject.tensors)
    )
    assert bits(subject) == saved[1]
    load(subject, tmp_path / "step-00000001")
    assert bits(subject) == saved[0]


def test_a_run_that_is_dropped_is_saved(tmp_path, monkeypatch):
    subject, slow = subject_of(), Slow(monkeypatch)
    step(subject)
    before = bits(subject)
    path, checkpoints = save(subject, tmp_path, wait=False)
    thread = checkpoints._save._thread
    del subject, checkpoints
    gc.collect()
    slow.go_on()
    thread.join()
    other = subject_of()
    load(other, path)
    assert bits(other) == before


@pytest.mark.draws(1)
@pytest.mark.parametrize("device", [HostDevice, FakeDevice])
def test_ranks_meet_for_the_save_after_all_that_was_asked_for(tmp_path, device):
    """``wait()`` is called while the step before goes on behind the caller's back, whose exchanges come first."""

    def act(rank):
        subject = subject_of(device(), rank=rank, schedule="overlap")
        checkpoints = Checkpoints(subject.pipeline, StateAccess(subject.pipeline))
        for n in range(15):
            save(subject, tmp_path, wait=False, step=n, keep=1, checkpoints=checkpoints)
            step(subject, 0.1 * n)
            checkpoints.wait()
            step(subject, 0.2 * n)
        subject.pipeline.last_step.finish()

    run_ranks(2, act)
    assert Checkpoint(tmp_path).content["step"] == 14


EXIT = """
import sys, threading
import numpy as np
from tests.workers import checkpoint_crash_worker as worker
from offload_core.checkpoint.shard_writer import ShardWriter
from offload_core.step.decision import StepArguments
put = ShardWriter._put
ShardWriter._put = lambda *args: (threading.main_thread().join(), put(*args))
run = worker.Run()
run.become(4)
run.checkpoints.save(sys.argv[1], worker.Contents(run.names, sources=[worker.Source.of(
    "buffer", "param", run.region, run.buffer)], shapes={{"buffer": ((9,), run.buffer.dtype)}},
    state={{"step": 4, "table": np.full(5, 4)}}, own=np.full(3, 4)), run.tensors, step=4, keep=1, wait=False)
run.buffer[:] = 5
{end}
"""


@pytest.mark.draws(1)
@pytest.mark.parametrize("end", ["", "run.train()", "raise SystemExit(3)", "raise ValueError"])
def test_a_program_that_ends_right_after_is_saved(tmp_path, end):
    code = EXIT.format(end=end)
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == {"": 0, "run.train()": 0, "raise SystemExit(3)": 3}.get(end, 1), done.stderr
    check = (
        "import sys; from tests.workers import checkpoint_crash_worker as worker; print(worker.Run().load(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", check, tmp_path], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "4", done.stderr


def load_optimizer_state():
    torch = pytest.importorskip("torch")
    from frontends.torch import wrap

    engine = wrap(torch.nn.Linear(8, 8), param_dtype="bfloat16")
    engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)).sum())
    engine.step()
    state = engine.optimizer.state_dict()
    state["state"] = {i: {k: torch.full_like(v, 3.0) for k, v in e.items()} for i, e in state["state"].items()}
    optimizer = engine.optimizer
    return (
        optimizer.core._pipeline,
        optimizer.components.registration.tensors(),
        lambda: optimizer.load_state_dict(state),
    )


def load_pytree():
    jnp = pytest.importorskip("jax.numpy")
    from frontends.jax import wrap

    offloaded = wrap({"w": jnp.ones((8, 8), jnp.bfloat16), "b": jnp.ones(8, jnp.bfloat16)})
    tree = offloaded.to_pytree()
    tree |= {name: {k: v + 3 for k, v in tree[name].items()} for name in ("master", "exp_avg", "exp_avg_sq")}
    return offloaded._core._pipeline, list(offloaded._tree.leaves), lambda: offloaded.load_pytree(tree)


@pytest.mark.draws(1)
@pytest.mark.parametrize("front_end", [load_optimizer_state, load_pytree], ids=lambda f: f.__name__)
def test_front_ends_that_replace_states_copy_them_first(tmp_path, monkeypatch, front_end):
    monkeypatch.setattr("offload_core.checkpoint.shard_writer.BUFFERS", 1000)
    pipeline, tensors, replace_states = front_end()
    checkpoints, slow = Checkpoints(pipeline, StateAccess(pipeline)), Slow(monkeypatch)
    names = [spec.name for spec in pipeline.params]

    def states():
        return [
            {name: view.copy() for name, view in views.items()}
            for i in range(len(names))
            for _, views in pipeline.state_lock.change("a test", StateAccess(pipeline).states, i)
        ]

    before = states()
    path = checkpoints.save(tmp_path, Contents(names), tensors, step=1, keep=None, wait=False)
    replace_states()
    assert all((a["exp_avg"] != b["exp_avg"]).any() for a, b in zip(states(), before, strict=True))
    slow.go_on()
    checkpoints.wait()
    checkpoint = Checkpoint(path)
    for name, views in zip(names, before, strict=True):
        for kind, values in views.items():
            assert np.array_equal(checkpoint.array(name, kind).reshape(-1), values), (name, kind)
