"""What a disk is told, as far as the system has words for it. macOS has its own for some, and for others none."""

import errno
import fcntl
import os
import sys
from contextlib import suppress
from pathlib import Path

_NO_PREALLOCATION = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


def to_disk(descriptor: int) -> None:
    """Return when the file or folder would outlast a loss of power."""
    if sys.platform == "darwin":  # whose fsync stops at the disk's own cache
        with suppress(OSError):  # a file system without it
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def names_to_disk(folder: Path) -> None:
    """The same of a folder's entries, new and renamed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        to_disk(descriptor)
    finally:
        os.close(descriptor)


def reserve(descriptor: int, n_bytes: int) -> None:
    """Take the room for a file, so that a disk which is too small is known at once (OSError)."""
    if sys.platform != "darwin":
        try:
            os.posix_fallocate(descriptor, 0, n_bytes)
        except OSError as error:
            if error.errno not in _NO_PREALLOCATION:
                raise


def begin_writing(descriptor: int) -> None:
    """Have what was written go to the disk now, and keep none of it in memory after that."""
    if sys.platform != "darwin":
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def begin_reading(descriptor: int, at: int, n_bytes: int) -> None:
    """Have these bytes brought to memory."""
    if sys.platform != "darwin":
        os.posix_fadvise(descriptor, at, n_bytes, os.POSIX_FADV_WILLNEED)
