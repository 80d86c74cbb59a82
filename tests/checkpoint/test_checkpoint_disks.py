"""Disks that fill, folders that cannot be written or vanish, others that save there: an error, and nothing is lost."""

import os
import resource
import shutil
import subprocess
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from offload_core.checkpoint.reader import Checkpoint
from offload_core.config.options import OffloadConfig
from offload_core.device.host import HostDevice
from offload_core.dtypes import BFLOAT16
from offload_core.errors import CheckpointError
from offload_core.support.checkpoint_folder import commit
from tests.support.checkpoints import Slow, load, one_step, save
from tests.support.pipelines import Subject, bits, make

PAGE = 4096
NUMEL = 30_000


def large():
    """A model whose checkpoint takes 88 pages, and more than those few that the rest of it takes."""
    masters = [np.random.default_rng(0).standard_normal(NUMEL).astype(np.float32)]
    return Subject(HostDevice(), masters, [BFLOAT16], [0], OffloadConfig(num_threads=1))


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def mounted(folder, size):
    """A file system of its own."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() or shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("file systems can be mounted by root only")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def no_preallocation(monkeypatch):
    def refuse(*args):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("offload_core.checkpoint.shard_writer.os.posix_fallocate", refuse)


@pytest.mark.parametrize("preallocates", [True, False])
def test_a_disk_that_fills_leaves_the_checkpoint_before(tmp_path, monkeypatch, preallocates):
    if not preallocates:
        no_preallocation(monkeypatch)
    with mounted(tmp_path, 130 * PAGE):
        subject = large()
        one_step(subject)
        first, _ = save(subject, tmp_path, step=1)
        before = bits(subject)
        one_step(subject)
        with pytest.raises(CheckpointError, match=r"shard-00000-of-00001.*: No space left on device.*make room"):
            save(subject, tmp_path, step=2)
        assert left_in(tmp_path) == ["latest", first.name]
        other = large()
        load(other, tmp_path)
        assert bits(other) == before
        subprocess.run(["mount", "-o", f"remount,size={300 * PAGE}", str(tmp_path)], check=True)
        save(subject, tmp_path, step=2)
        assert load(other, tmp_path).step == 2
        assert bits(other) == bits(subject)


@pytest.mark.parametrize("tag", [None, "best"])
def test_with_any_room_the_checkpoint_is_there_or_nothing_of_it(tmp_path, tag):
    """The disk fills in the last block, in the part, in the manifest, in ``latest``: one page at a time. With a tag the
    new checkpoint takes the place of the old one."""
    with mounted(tmp_path, 400 * PAGE):
        subject, filler = large(), tmp_path / "filler"
        first, _ = save(subject, tmp_path, step=1, tag=tag)
        needed = -(-Checkpoint(first).n_bytes // PAGE)
        outcomes = []
        for extra in range(-1, 6):
            room = os.statvfs(tmp_path).f_bavail
            filler.write_bytes(bytes((room - needed - extra) * PAGE))
            try:
                second, _ = save(subject, tmp_path, step=2, tag=tag)
            except CheckpointError as error:
                outcomes.append(False)
                assert "No space left" in str(error), error  # noqa: PT017
                assert left_in(tmp_path) == sorted({"filler", "latest", first.name})
                assert load(subject, tmp_path).step == 1
                filler.unlink()
                continue
            outcomes.append(True)
            assert left_in(tmp_path) == sorted({"filler", "latest", first.name, second.name})
            assert load(subject, tmp_path).step == 2
            filler.unlink()
            shutil.rmtree(second)
            save(subject, tmp_path, step=1, tag=tag) if tag else (tmp_path / "latest").write_text(first.name)
        assert outcomes == sorted(outcomes)
        assert set(outcomes) == {False, True}


def test_a_limit_on_the_size_of_files(tmp_path):
    subject = large()
    first, _ = save(subject, tmp_path, step=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (NUMEL * 4, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"shard-00000-of-00001.*: File too large"):
            save(subject, tmp_path, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert left_in(tmp_path) == ["latest", first.name]
    save(subject, tmp_path, step=2)
    assert load(subject, tmp_path).step == 2


def test_a_file_system_that_is_read_only(tmp_path):
    with mounted(tmp_path, 200 * PAGE):
        subject = large()
        save(subject, tmp_path, step=1)
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        with pytest.raises(CheckpointError, match=f"{tmp_path}: Read-only file system; expected a folder"):
            save(subject, tmp_path, step=2)
        assert load(subject, tmp_path).step == 1


@contextmanager
def nobody():
    """Without root's rights."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_a_folder_without_permission(mode):
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top) / "checkpoints"
        subject = make()
        save(subject, folder, step=1)
        os.chmod(top, 0o755)
        folder.chmod(mode)
        with nobody():
            with pytest.raises(CheckpointError, match=f"{folder}: Permission denied; expected a folder"):
                save(subject, folder, step=2)
            if mode:
                assert load(subject, folder).step == 1
            else:
                with pytest.raises(CheckpointError, match=f"{folder}: no checkpoint.*Permission denied"):
                    load(subject, folder)
        folder.chmod(0o755)
        assert save(subject, folder, step=2)[0].name == "step-00000002"


def test_a_folder_that_is_a_file(tmp_path):
    path = tmp_path / "checkpoints"
    path.write_text("mine")
    with pytest.raises(CheckpointError, match=f"{path}: File exists; expected a folder"):
        save(make(), path)
    with pytest.raises(CheckpointError, match="Not a directory; expected a folder"):
        save(make(), path / "below")
    with pytest.raises(CheckpointError, match=f"{path}: no checkpoint"):
        load(make(), path)
    assert path.read_text() == "mine"


def test_a_folder_that_vanishes_in_mid_save(tmp_path, monkeypatch):
    monkeypatch.setattr("offload_core.checkpoint.shard_writer.BLOCK_BYTES", 256)
    subject, slow, folder = make(), Slow(monkeypatch), tmp_path / "checkpoints"
    _, checkpoints = save(subject, folder, wait=False)
    shutil.rmtree(folder)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        slow.go_on()
        with pytest.raises(CheckpointError, match="somebody removed it"):
            checkpoints.wait()
    assert ["somebody removed it" in str(warning.message) for warning in warned] == [True]
    one_step(subject)
    save(subject, folder, checkpoints=checkpoints, step=7)
    assert load(make(), folder).step == 7


@pytest.mark.parametrize("step", [-1, 1.0, None, True])
def test_a_step_that_is_none(tmp_path, step):
    with pytest.raises(CheckpointError, match="step: got"):
        save(make(), tmp_path, step=step)


# --- others -----------------------------------------------------------------------------------------------


def test_two_runs_do_not_save_into_one_folder_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("offload_core.checkpoint.shard_writer.BLOCK_BYTES", 256)
    one, other, slow = make(), make(), Slow(monkeypatch)
    _, checkpoints = save(one, tmp_path, wait=False, step=1)
    child = os.dup(checkpoints._save._place._lock)  # what a process has that is forked now
    with pytest.raises(CheckpointError, match=f"{tmp_path}: another run is saving there"):
        save(other, tmp_path, step=2)
    slow.go_on()
    checkpoints.wait()
    save(other, tmp_path, step=2)
    os.close(child)
    assert left_in(tmp_path) == ["latest", "step-00000001", "step-00000002"]


def test_a_refused_save_holds_no_file_descriptor(tmp_path, monkeypatch):
    monkeypatch.setattr("offload_core.checkpoint.shard_writer.BLOCK_BYTES", 256)
    slow = Slow(monkeypatch)
    _, checkpoints = save(make(), tmp_path, wait=False)
    other = make()
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(CheckpointError, match="another run"):
            save(other, tmp_path)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    slow.go_on()
    checkpoints.wait()


def test_rotation_never_deletes_what_was_just_written(tmp_path):
    """Clocks are set back, and folders are copied."""
    subject = make()
    for step in (1, 2):
        path, _ = save(subject, tmp_path, step=step)
        os.utime(path / "manifest.json", (4e9, 4e9 + step))
    path, _ = save(subject, tmp_path, step=3, keep=2)
    assert left_in(tmp_path) == ["latest", "step-00000002", "step-00000003"]
    assert load(subject, tmp_path).checkpoint.path == path


def test_old_ones_that_cannot_be_deleted_are_a_warning(tmp_path, monkeypatch):
    subject = make()
    save(subject, tmp_path, step=1)

    def refuse(path):
        raise PermissionError(13, "Permission denied", path.name)

    monkeypatch.setattr("offload_core.support.checkpoint_folder.discard", refuse)
    with pytest.warns(UserWarning, match="it was to be deleted, for keep=1. .*delete it by hand"):
        save(subject, tmp_path, step=2, keep=1)
    assert load(subject, tmp_path).step == 2


@pytest.mark.parametrize("call", ["names_to_disk", "rename", "replace"])
def test_a_checkpoint_that_cannot_be_made_known_is_not_left_there(tmp_path, monkeypatch, call):
    subject = make()
    save(subject, tmp_path, step=1)

    def failing(unfinished, name, **options):
        def fail(path, *args):
            raise OSError(5, "Input/output error", str(path))

        with pytest.MonkeyPatch.context() as patch:
            if call == "names_to_disk":
                patch.setattr(f"offload_core.support.checkpoint_folder.{call}", fail)
            else:
                original = getattr(Path, call)
                if call == "rename":  # but not back
                    patch.setattr(Path, call, lambda p, to: fail(p) if to.name == name else original(p, to))
                else:
                    patch.setattr(Path, call, fail)
            return commit(unfinished, name, **options)

    monkeypatch.setattr("offload_core.checkpoint.saving.commit", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(subject, tmp_path, step=2)
    assert left_in(tmp_path) == ["latest", "step-00000001"]
    assert load(subject, tmp_path).step == 1


def test_all_is_on_the_disk_before_the_name_says_so(tmp_path, monkeypatch):
    """In the order in which power may fail: files, their folder, the name, its folder, ``latest``, its folder."""
    events = []

    def noting(name, what):
        original = getattr(os, name)

        def note(*args, **options):
            events.append(what(*args))
            return original(*args, **options)

        monkeypatch.setattr(os, name, note)

    def base(path):
        return "UNFINISHED" if str(path).endswith(".saving") else Path(path).name.replace(".new", "").lstrip(".")

    noting("fsync", lambda fd: ("sync", base(os.readlink(f"/proc/self/fd/{fd}"))))
    noting("rename", lambda a, b: ("rename", base(b)))
    noting("replace", lambda a, b: ("rename", base(b)))
    folder = tmp_path / "new" / "run"
    save(make(), folder, step=3)
    shard, part, name = "shard-00000-of-00001.safetensors", "part-00000.json", "step-00000003"
    assert events == [
        *(("sync", "new"), ("sync", tmp_path.name)),
        *(("sync", shard), ("sync", part), ("rename", part)),
        *(("sync", "manifest.json"), ("rename", "manifest.json"), ("sync", "UNFINISHED")),
        *(("sync", "latest"), ("rename", name), ("sync", "run"), ("rename", "latest"), ("sync", "run")),
    ]


def test_a_checkpoint_is_found_by_its_own_name_too(tmp_path):
    subject = make()
    first, _ = save(subject, tmp_path, step=1)
    save(subject, tmp_path, step=2)
    assert load(subject, first).step == 1
    shutil.copytree(first, tmp_path / "best")
    assert load(subject, tmp_path / "best").step == 1
    (tmp_path / "latest").unlink()
    with pytest.raises(CheckpointError, match="expected one of its folders instead: step-00000001, step-00000002"):
        load(subject, tmp_path)


def test_the_thread_that_cannot_be_started_leaves_nothing(tmp_path, monkeypatch):
    subject = make()

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("offload_core.checkpoint.saving.threading.Thread.start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            save(subject, tmp_path)
    assert not left_in(tmp_path)
    save(subject, tmp_path)
