"""Scratch files: preallocated space on one disk or several, without a name, read and written past the page cache.

The files have no name from the beginning (``O_TMPFILE``) or as soon as they are open, so that their space is free again
when the process ends, however it ends. Their space is allocated at once: a disk that is too small is an error then, and
not in the middle of a step.
"""

import errno
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from ..errors import ConfigWarning, DiskError
from ..support.disks import reserve
from ..support.living import Living
from ..support.threads import Task, TaskThread
from ..support.user_line import UserLine

ALIGNMENT = 4096
"""Places, lengths and addresses are whole multiples of this, in bytes."""
PIECE_BYTES = 8 * 2**20
"""The most bytes of one system call, and the unit in which several disks take turns."""
THREADS = 2
"""Threads that read, and as many that write, for each disk: no read waits for writes before it."""


_NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR)


def aligned(n_bytes: int) -> int:
    """Return the least multiple of ``ALIGNMENT`` that is at least ``n_bytes``."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


class Transfer:
    """Bytes on their way to or from disk: tasks of several threads."""

    def __init__(self, tasks: Sequence[Task[None]]) -> None:
        self._tasks = tasks

    def done(self) -> bool:
        """True if all has ended. Never blocks."""
        return all(task.done() for task in self._tasks)

    def error(self) -> BaseException | None:  # waits
        """Wait for the end, and return the first error; None: there was none."""
        errors = [task.exception() for task in self._tasks]
        return next((error for error in errors if error is not None), None)

    def result(self) -> None:  # waits
        """Wait for the end, and raise the first error."""
        if (error := self.error()) is not None:
            raise error


@dataclass(frozen=True)
class _File:
    """A scratch file of one disk."""

    folder: str
    descriptor: int

    def move(self, call: Callable[[int, Sequence[Any], int], int], verb: str, at: int, memory: np.ndarray) -> None:
        """Read or write all of ``memory`` at this place of the file.

        Raises:
            DiskError: the system refused it, or the file ends before.
        """
        rest = memoryview(memory)  # type: ignore[arg-type]
        while rest:
            try:
                n = call(self.descriptor, [rest], at)
            except OSError as error:
                raise self._failed(verb, at, len(rest), error.strerror or str(error)) from error
            # What is left over of a page that was moved in part is moved again: the rest must begin one.
            if (whole := n if n == len(rest) else n // ALIGNMENT * ALIGNMENT) <= 0:
                raise self._failed(verb, at, len(rest), f"only {n} bytes were moved")
            rest, at = rest[whole:], at + whole

    def _failed(self, verb: str, at: int, n_bytes: int, why: str) -> DiskError:
        return DiskError(
            f"the scratch file in {self.folder} (it has no name) could not be {verb} at byte {at:,}, {n_bytes:,} "
            f"bytes: {why}. Look at this disk (its log: dmesg), then resume from the last checkpoint, with another "
            "nvme_path if it fails again"
        )


class ScratchFiles:
    """Space that is numbered from 0 on, in turns of ``PIECE_BYTES`` on each of the disks.

    Args:
        folders: one on each disk.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self.n_bytes = 0
        """The bytes that are allocated."""
        self._files: list[_File] = []
        self._folders = folders
        self._readers: list[TaskThread] = []
        self._writers: list[TaskThread] = []
        self._next = count()
        self._process = os.getpid()
        _ALL.add(self)

    def grow(self, n_bytes: int) -> int:
        """Allocate so many bytes more, and return where they begin.

        Raises:
            DiskError: a disk has no room, or no file can be made there. Nothing has changed.
        """
        start, end = self.n_bytes, self.n_bytes + aligned(n_bytes)
        if not self._files:
            n_threads = THREADS * len(self._folders)
            self._readers, self._writers = (
                [TaskThread(name) for _ in range(n_threads)] for name in ("scratch files read", "scratch files written")
            )
            self._files = self._opened()
        share = self._share(end)
        for file in self._files:
            try:
                reserve(file.descriptor, share)
            except OSError as error:
                for each in self._files:
                    os.ftruncate(each.descriptor, self._share(start))
                raise DiskError(
                    f"nvme_path {file.folder}: no room for {share:,} bytes of states ({error.strerror}); expected a "
                    "disk with more free space, or fewer states on disk (nvme_host_bytes, state_format)"
                ) from error
        self.n_bytes = end
        return start

    def _share(self, n_bytes: int) -> int:
        n = len(self._files)
        return n_bytes if n == 1 else -(-n_bytes // (PIECE_BYTES * n)) * PIECE_BYTES

    def _opened(self) -> list[_File]:
        files: list[_File] = []
        buffered = []
        try:
            for folder in self._folders:
                try:
                    descriptor, direct = _open(folder)
                except OSError as error:
                    raise DiskError(
                        f"nvme_path {folder}: no file can be made there ({error.strerror}); expected a folder that can "
                        "be written, on a local disk"
                    ) from error
                files.append(_File(folder, descriptor))
                buffered += [] if direct else [folder]
        except BaseException:
            for file in files:
                os.close(file.descriptor)
            raise
        if buffered:
            UserLine.now().warn(
                ConfigWarning(
                    f"nvme_path {', '.join(buffered)}: this file system does not read and write past the page cache "
                    "(O_DIRECT): states take memory there, too, and steps are slower; expected a folder on ext4, xfs "
                    "or btrfs"
                )
            )
        return files

    def read(self, at: int, out: np.ndarray, then: Callable[[], object] | None = None) -> Transfer:
        """Begin to read the bytes from ``at`` on to ``out``.

        Args:
            out: bytes; its address and length, like ``at``, are whole multiples of ``ALIGNMENT``.
            then: called in another thread when all has ended, with or without an error.
        """
        return self._move(self._readers, os.preadv, "read", at, out, then)

    def write(self, at: int, data: np.ndarray, then: Callable[[], object] | None = None) -> Transfer:
        """Begin to write these bytes. ``data`` and ``then`` are as :meth:`read`'s."""
        return self._move(self._writers, os.pwritev, "written", at, data, then)

    def _move(
        self,
        threads: Sequence[TaskThread],
        call: Callable[[int, Sequence[Any], int], int],
        verb: str,
        at: int,
        memory: np.ndarray,
        then: Callable[[], object] | None,
    ) -> Transfer:
        assert at % ALIGNMENT == memory.size % ALIGNMENT == memory.ctypes.data % ALIGNMENT == 0
        assert at + memory.size <= self.n_bytes
        pieces = []
        done = 0
        while done < memory.size:
            unit, inside = divmod(at + done, PIECE_BYTES)
            numel = min(PIECE_BYTES - inside, memory.size - done)
            n = len(self._files)
            pieces.append((self._files[unit % n], unit // n * PIECE_BYTES + inside, memory[done : done + numel]))
            done += numel
        ended, last = count(1), len(pieces)

        def move(file: _File, start: int, part: np.ndarray) -> None:
            try:
                file.move(call, verb, start, part)
            finally:
                if next(ended) == last and then is not None:
                    then()

        return Transfer([threads[next(self._next) % len(threads)].submit(partial(move, *p)) for p in pieces])

    def close(self) -> None:
        """Return when all transfers have ended, and the space is free."""
        for thread in (*self._readers, *self._writers):
            thread.close()
        if os.getpid() == self._process:
            self._close_files()
        self._readers, self._writers, self._files, self.n_bytes = [], [], [], 0

    def _close_files(self) -> None:
        for file in self._files:
            os.close(file.descriptor)


_ALL: Living[ScratchFiles] = Living()


def _close_in_child() -> None:
    """Close the parent's files in a fork: it can neither read nor write them, and would keep their space."""
    for files in _ALL:
        if files._process != os.getpid():
            files._close_files()


os.register_at_fork(after_in_child=_close_in_child)


def _open(folder: str) -> tuple[int, bool]:
    """Return the descriptor of a new file without a name, and True if it is read and written past the page cache."""
    direct = getattr(os, "O_DIRECT", 0)
    for flag in (direct, 0) if direct else (0,):
        try:
            return _unnamed(folder, flag), bool(flag)
        except OSError as error:
            if not flag or error.errno != errno.EINVAL:
                raise
    raise AssertionError


def _unnamed(folder: str, flag: int) -> int:
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | flag, 0o600)
        except OSError as error:
            if error.errno not in _NO_UNNAMED_FILES:
                raise
    descriptor, name = tempfile.mkstemp(prefix=".offload-", dir=folder)
    try:
        if flag:
            direct = os.open(name, os.O_RDWR | flag)
            os.close(descriptor)
            descriptor = direct
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        os.unlink(name)
    return descriptor
