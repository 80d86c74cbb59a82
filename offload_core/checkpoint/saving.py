"""Writes a checkpoint to the disk, in a thread of each process.

Process 0 makes the folder. Every process writes its file, and then its *part*, which describes the file. When all parts
are there, the thread of process 0 joins them to the manifest and renames the folder.
"""

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError, CheckpointWarning
from ..ranks.collectives import Collectives
from ..ranks.consistency import combine, together
from ..support.checkpoint_folder import (
    LATEST,
    UNFINISHED,
    check_name,
    clean,
    commit,
    discard,
    durable,
    free_name,
    make_folder,
    refuse_of_others,
    rotate,
)
from ..support.living import Living
from ..support.progress import progress
from ..support.user_line import UserLine
from .manifest import file_record, write_manifest
from .shard_writer import ShardWriter

_POLL_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 0.2
_PATIENCE_SECONDS = 600.0
"""Process 0 gives up if no file of the others has grown for so long."""


def all_or_none(collectives: Collectives, what: str) -> AbstractContextManager[None]:
    """Return a context that fails on all processes if it fails on one: the others raise :class:`CheckpointError`."""
    return together(collectives, f"checkpoint: {what}", partial(failed_elsewhere, what))


def failed_elsewhere(what: str, others: str) -> CheckpointError:
    """The error for a process if saving or loading failed in others."""
    return CheckpointError(f"{what} of a checkpoint failed in process {others}, and so in all; it says there why")


class TargetFolder:
    """The folder in which a checkpoint is written.

    Args:
        given: the checkpoint's name in it; None: one of its step.
        latest: False: the checkpoint that ``latest`` names stays the latest.
    """

    def __init__(
        self, folder: Path, collectives: Collectives, given: str | None = None, *, latest: bool = True
    ) -> None:
        self.folder = folder
        self.collectives = collectives
        self.latest = latest
        self._given = given
        self._lock: int | None = None
        self.name = self._token = ""

    def make(self, step: int) -> None:
        """Make the folder, in process 0, and tell its name to the others.

        Raises:
            CheckpointError: on all processes, if it cannot be made or a process does not see it.
        """
        collectives, folder = self.collectives, self.folder
        said = np.zeros(512, np.uint8)
        with all_or_none(collectives, "save"):
            if collectives.rank == 0:
                try:
                    text = self._make(step)
                except OSError as error:
                    raise CheckpointError(
                        f"{folder}: {error.strerror}; expected a folder that can be written"
                    ) from error
                said[: len(text)] = np.frombuffer(text, np.uint8)
        collectives.broadcast(said, "checkpoint: save")
        self.name, self._token = said.tobytes().rstrip(b"\0").decode().split("/")
        with all_or_none(collectives, "save"):
            if not self.unfinished.is_dir():
                raise CheckpointError(
                    f"{self.unfinished}: made by process 0 and not seen by process {collectives.rank}; expected a "
                    "file system that all processes share"
                )

    @property
    def unfinished(self) -> Path:
        return self.folder / f".{self.name}.{self._token}{UNFINISHED}"

    def _make(self, step: int) -> bytes:
        if self._given is not None:
            check_name(self.folder, self._given, step)
        if self.latest:
            refuse_of_others(self.folder)
        make_folder(self.folder)
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"{self.folder}: another run is saving there; expected a folder for each run"
            ) from None
        except OSError:
            pass  # a file system without locks
        clean(self.folder)
        self.name, self._token = self._given or free_name(self.folder, step), os.urandom(4).hex()
        self.unfinished.mkdir()
        return f"{self.name}/{self._token}".encode()

    def release(self) -> None:
        """Release the lock, so that other runs can save here."""
        lock, self._lock = self._lock, None
        if lock is not None:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)  # a process that C code forked may hold the descriptor, too
            os.close(lock)

    def leave(self) -> None:
        """Let go of the lock in a forked process: it is the parent's, and must end with the parent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def lost(self) -> CheckpointError:
        """The error for a folder that has been removed or given up."""
        return CheckpointError(
            f"{self.unfinished}: saving failed in another process, which says there why, or somebody removed it; "
            "checkpoints before it are untouched"
        )

    def give_up(self) -> None:
        """Delete the folder. Call it only if the checkpoint cannot be complete: process 0 might be renaming it."""
        if self._token:
            discard(self.unfinished)
        self.release()


class Save:
    """One process's part in writing a checkpoint.

    Args:
        keep: the number of checkpoints to keep; None: all.
        quiet: do not warn of a failure, because the caller waits and gets the error.
    """

    def __init__(self, place: TargetFolder, keep: int | None, quiet: bool) -> None:
        self._place = place
        self._keep = keep
        self._quiet = quiet
        self._asked_at = UserLine.now()
        self._error: Exception | None = None
        self._given_up = False
        self._writer: ShardWriter | None = None
        self._thread = threading.Thread(target=self._run, name="offload-core checkpoint")
        _SAVES.add(self)

    @property
    def writer(self) -> ShardWriter:
        """The writer of this process's file, once it is prepared."""
        assert self._writer is not None
        return self._writer

    def prepare(self, step: int, prepare: Callable[[Path], tuple[ShardWriter, dict[str, Any]]]) -> None:
        """Make the folder and this process's file.

        Args:
            prepare: given the folder, makes the writer of this process's file and its part of the manifest.

        Raises:
            CheckpointError: on all processes.
        """
        self._place.make(step)
        with all_or_none(self._place.collectives, "save"):
            self._writer, self._part = prepare(self._place.unfinished)
            self._record = file_record(self.writer)

    def start(self) -> None:
        """Begin to write. Call it where no signal can interrupt it (``uninterrupted``)."""
        self._thread.start()

    def give_up(self) -> None:
        """Delete what :meth:`prepare` has made, all or a part of it, in place of :meth:`start`."""
        if self._writer is not None:
            self._writer.close()
        self._place.give_up()

    def leave(self) -> None:
        """Let go of the save in a forked process: it is the parent's."""
        self._place.leave()
        if self._writer is not None:
            self._writer.leave()

    def wait(self) -> None:  # waits
        """Return when the checkpoint is complete in all processes. Writing goes on after an interrupt.

        The processes poll each other: one collective that waited for a slow disk might time out.
        """
        collectives, pause = self._place.collectives, 0.001
        ended = failed = 0
        try:
            while ended < collectives.world_size and not failed:
                self._thread.join(pause)
                status = not self.running, self._error is not None
                ended, failed = combine(collectives, "checkpoint: save", sums=status).sums
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            if failed:
                self._abandon()
                combine(collectives, "checkpoint: save", sums=[1])  # after this no process writes there
        except Exception:
            self._abandon()
            raise
        finally:
            if self._given_up and collectives.rank == 0:
                self._place.give_up()
        self._thread.join()
        if self._error is not None:
            raise self._error
        if failed:
            raise self._place.lost()

    def _abandon(self) -> None:
        self._given_up = True
        self.writer.cancel(self._place.lost())
        self._thread.join()

    @property
    def running(self) -> bool:
        """True if this process is still writing."""
        return self._thread.is_alive()

    def _run(self) -> None:
        place = self._place
        try:
            # A save in the background would draw its bar over that of the training.
            shown = place.collectives.rank if self._quiet else -1
            with progress(f"saving {place.name}", self.writer.n_bytes, rank=shown) as advance:
                self.writer.write(advance)
            self._record["blocks"] = self.writer.checksums
            part = json.dumps(self._part | {"files": self._record})
            durable(self._part_of(place.collectives.rank), part)
            if place.collectives.rank == 0:
                self._complete()
        except Exception as error:
            explained = self._explained(error)
            place.give_up()
            try:
                if not self._quiet and not self._given_up:
                    self._asked_at.warn(CheckpointWarning(f"{explained}; the next wait or save raises this error"))
            finally:
                self._error = explained
        finally:
            place.release()

    def _explained(self, error: Exception) -> CheckpointError:
        place = self._place
        exists = place.unfinished.is_dir() or (place.folder / place.name).is_dir()
        if not exists or isinstance(error, FileNotFoundError):  # while another process removes it, it still exists
            return place.lost()
        if isinstance(error, CheckpointError):
            return error
        path, why = place.unfinished, repr(error)
        if isinstance(error, OSError):
            path, why = error.filename or path, error.strerror or str(error)
        return CheckpointError(f"{path}: {why}; the checkpoint is given up, and those before it are untouched")

    def _part_of(self, rank: int) -> Path:
        return self._place.unfinished / f"part-{rank:05d}.json"

    def _complete(self) -> None:
        paths = [self._part_of(rank) for rank in range(self._place.collectives.world_size)]
        self._await(paths)
        parts = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        content = parts[0] | {key: [part[key] for part in parts] for key in ("own", "files")}
        for path in paths:
            path.unlink()
        write_manifest(self._place.unfinished, content)
        commit(self._place.unfinished, self._place.name, latest=LATEST if self._place.latest else None)
        if self._keep is not None:
            try:
                rotate(self._place.folder, self._place.name, self._keep)
            except OSError as error:
                # The warning does not name the new checkpoint: its text stays the same, and Python shows it once.
                path = error.filename or self._place.folder
                why = f"{path}: {error.strerror or error}; it was to be deleted, for keep={self._keep}"
                self._asked_at.warn(CheckpointWarning(f"{why}. Checkpoints take more and more room: delete it by hand"))

    def _await(self, paths: Sequence[Path]) -> None:
        """Wait until all of these exist. Give up if nothing is written for ``_PATIENCE_SECONDS``."""
        seen: Any = None
        since = time.monotonic()
        while missing := [path for path in paths if not path.exists()]:
            if self._given_up or not self._place.unfinished.is_dir():
                raise self._place.lost()
            now = [(path.name, path.stat().st_mtime_ns) for path in sorted(self._place.unfinished.glob("shard-*"))]
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > _PATIENCE_SECONDS:
                raise CheckpointError(
                    f"{missing[0]}: not written, and nothing has been for {_PATIENCE_SECONDS:.0f} s; was its process "
                    "lost? The checkpoint is given up"
                )
            time.sleep(_POLL_SECONDS)


_SAVES: Living[Save] = Living()


def _after_fork() -> None:
    for save in _SAVES:
        save.leave()


os.register_at_fork(after_in_child=_after_fork)
