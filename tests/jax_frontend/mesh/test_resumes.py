"""Resuming is invisible in JAX: other processes, devices and stages have the bits of a run that was not stopped."""

import random
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from offload_core.checkpoint.reader import Checkpoint
from offload_core.errors import CheckpointError, StateError
from tests.support.jax_meshes import processes
from tests.support.jax_pair import MEMBER, Pair
from tests.support.jax_resumes import Loader, begin, differences, outcome, resume, save, train
from tests.support.late_stores import STATES_ON_DISK

OFFLOADED = {"stage": 3, "offload_param": "cpu"}
SAVED = {
    "fp32 one": ("fp32", None, {}),
    "fp16 one": ("fp16", None, {}),
    "late one": ("late", None, {}),
    "bf16 stage 1": ("bf16", 4, {"stage": 1}),
    "fp32 stage 2": ("fp32", 4, {}),
    "fp16 stage 2": ("fp16", 4, {}),
    "late stage 2": ("late", 4, {}),
    "fp32 stage 3": ("fp32", 4, {"stage": 3}),
    "bf16 stage 3": ("bf16", 4, OFFLOADED),
    "bf16 on disk": ("bf16", 4, {**OFFLOADED, **STATES_ON_DISK}),
    "fp32 half on disk": ("fp32", None, {**STATES_ON_DISK, "nvme_host_bytes": 10_000}),
    "fp16 stage 3": ("fp16", 4, {"stage": 3}),
}
"""Kind, devices and fields of what is saved."""
ELSEWHERE = [
    ("fp32 stage 3", 2, {"stage": 3, "reduce_bucket_size": 100}),
    ("fp32 stage 3", None, {}),
    ("fp16 stage 2", 2, {"stage": 3}),
    ("bf16 stage 1", 2, OFFLOADED),
    ("late stage 2", None, {}),
    ("bf16 on disk", None, {}),
    ("bf16 stage 3", 2, {**OFFLOADED, **STATES_ON_DISK}),
]


@pytest.fixture(autouse=True)
def generators_as_before():
    states = random.getstate(), np.random.get_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folders of what was saved, by name, each made when it is first asked for."""
    folders = {}

    def folder_of(name):
        if name not in folders:
            kind, devices, fields = SAVED[name]
            folders[name] = tmp_path_factory.mktemp("saved")
            assert differences(save(folders[name], kind, devices, **fields), kind) == []
        return folders[name]

    return folder_of


@pytest.mark.draws(1)
@pytest.mark.parametrize("name", SAVED)
def test_a_run_that_saves_and_one_that_resumes_have_the_bits_of_one_at_a_stretch(name, saved):
    kind, devices, fields = SAVED[name]
    assert differences(resume(saved(name), kind, devices, **fields), kind) == []


@pytest.mark.draws(1)
@pytest.mark.parametrize(("name", "devices", "fields"), ELSEWHERE)
def test_who_resumes_on_other_devices_has_them_too(name, devices, fields, saved):
    kind = SAVED[name][0]
    assert differences(resume(saved(name), kind, devices, **fields), kind) == []


@pytest.mark.long("two processes, each of which compiles its programs with XLA")
@pytest.mark.draws(1)
@pytest.mark.parametrize(("kind", "devices", "fields"), [("fp32", 1, {"stage": 3}), ("late", 4, {})])
def test_two_processes_and_one_that_resumes_what_they_have_saved_have_them_too(kind, devices, fields, tmp_path, pair):
    pair.check(f"test_two_processes_save_and_resume[{kind}]", tmp_path)
    assert differences(resume(tmp_path, kind, devices, **fields), kind) == []


@pytest.fixture
def saved_by_one(request, folder):
    """Saved by pytest's process, before those of a pair begin."""
    if not request.config.pluginmanager.has_plugin(MEMBER):
        kind, devices, fields = SAVED[request.param]
        save(folder, kind, devices, **fields)
    return request.param.split()[0], folder


@pytest.mark.long("two processes, each of which compiles its programs with XLA")
@pytest.mark.draws(1)
@processes(2)
@pytest.mark.parametrize(
    ("saved_by_one", "fields"), [("bf16 stage 3", OFFLOADED), ("fp16 one", {})], indirect=["saved_by_one"]
)
def test_two_processes_resume_what_one_has_saved(saved_by_one, fields):
    kind, folder = saved_by_one
    # A second process that was not there when this was saved has no generators to go on with.
    expected = ["random"] if jax.process_index() else []
    assert differences(resume(folder, kind, 4, **fields), kind) == expected


@pytest.mark.long("two processes, each of which compiles its programs with XLA")
@processes(2)
def test_where_one_process_fails_all_say_so_and_the_checkpoint_before_is_whole(folder, monkeypatch):
    (offloaded, _), second = begin("fp32", 4, stage=3), jax.process_index() == 1
    train(offloaded, Loader(), 1)
    good = offloaded.save_checkpoint(folder)
    train(offloaded, Loader(), 1)
    before = outcome(offloaded, Loader())
    # The other process may find the folder of the checkpoint that is given up gone, and say that.
    elsewhere = "it says there why|failed in another process|the checkpoint is given up"

    with pytest.raises(CheckpointError, match="expected an object with state_dict" if second else elsewhere):
        offloaded.save_checkpoint(folder, stateful={"loader": None if second else Loader()})

    def no_space(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if second:
            patch.setattr("offload_core.checkpoint.shard_writer.ShardWriter._put", no_space)
        with pytest.raises(CheckpointError, match="No space left on device" if second else elsewhere):
            offloaded.save_checkpoint(folder)
    assert outcome(offloaded, Loader()) == before
    assert {path.name for path in folder.iterdir()} == {"latest", good.name}

    read, calls = Checkpoint._read_block, []

    def flipped(checkpoint, i, block, *arguments):
        calls.append(block)
        if second and len(calls) > 1:  # not in what is read before anything changes
            raise CheckpointError("bytes are not those that were written")
        return read(checkpoint, i, block, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "_read_block", flipped)
        with pytest.raises(CheckpointError, match="bytes are not those" if second else elsewhere):
            offloaded.load_checkpoint(folder)
    with pytest.raises(StateError, match="loading a checkpoint broke off"):
        train(offloaded, Loader(), 1)
    offloaded.load_checkpoint(folder)
    train(offloaded, Loader(), 1)
    assert outcome(offloaded, Loader()) == before


@pytest.mark.long("two processes, each of which compiles its programs with XLA")
def test_a_process_that_is_killed_in_a_save_is_an_error_in_the_other_and_what_was_saved_before_is_whole(
    tmp_path, tmp_path_factory
):
    pair = Pair(tmp_path_factory.mktemp("pair"), Path(__file__).with_name("asked_for.py"))
    assert pair.ask("test_the_second_is_killed_in_its_second_save", tmp_path) == [[], None]
    with pytest.raises(pytest.fail.Exception, match=f"process 1 has ended with {-signal.SIGKILL}"):
        pair.check("test_two_processes_save_and_resume[fp32]", tmp_path)
    assert None not in pair.codes()
    assert differences(resume(tmp_path, "fp32"), "fp32") == []
