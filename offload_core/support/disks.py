"""System calls that move files between page cache and disk. Those that macOS lacks do nothing there."""

import ctypes
import errno
import fcntl
import os
import sys
from contextlib import suppress
from pathlib import Path

_RENAMEAT2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
_HERE, _EXCHANGE = -100, 2
_NO_PREALLOCATION = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


def to_disk(descriptor: int) -> None:
    """Return when the file or folder would survive a loss of power."""
    if sys.platform == "darwin":  # its fsync stops at the disk's own cache
        with suppress(OSError):  # a file system without it
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def names_to_disk(folder: Path) -> None:
    """Return when a folder's new and renamed entries would survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        to_disk(descriptor)
    finally:
        os.close(descriptor)


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders at once, so that a process that is killed leaves both. Return False where the
    system or the file system cannot."""
    if _RENAMEAT2 is None:
        return False
    if _RENAMEAT2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    if (code := ctypes.get_errno()) in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(other))


def reserve(descriptor: int, n_bytes: int) -> None:
    """Allocate disk space for a file, so that a disk that is too small raises OSError now and not while it is
    written."""
    if sys.platform != "darwin":
        try:
            os.posix_fallocate(descriptor, 0, n_bytes)
        except OSError as error:
            if error.errno not in _NO_PREALLOCATION:
                raise


def begin_writing(descriptor: int) -> None:
    """Start to write the file's dirty pages to the disk, and drop its clean pages from the page cache."""
    if sys.platform != "darwin":
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def begin_reading(descriptor: int, at: int, n_bytes: int) -> None:
    """Start to read these bytes into the page cache."""
    if sys.platform != "darwin":
        os.posix_fadvise(descriptor, at, n_bytes, os.POSIX_FADV_WILLNEED)
