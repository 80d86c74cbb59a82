"""Opens files that somebody else may have made: regular ones only, and small ones up to a bound.

Opening a FIFO blocks, a socket cannot be read, and reading a device may change it or never end.
"""

import errno
import os
import stat

_PART_BYTES = 2**20


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading, and return its descriptor.

    Raises:
        OSError: it cannot be opened, or is a folder, a FIFO, a socket or a device; these are not opened at all.
    """
    name = os.fspath(path)
    try:
        _check_kind(os.stat(name).st_mode, name)
        # Another file may have taken the name since: without O_NONBLOCK a FIFO would block here.
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    except ValueError as error:  # a null byte, or a character that no file name can have
        raise OSError(errno.EINVAL, str(error), name) from None
    try:
        _check_kind(os.fstat(descriptor).st_mode, name)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: str | os.PathLike[str], *, most_bytes: int) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: as :func:`open_regular`, or it has more bytes than ``most_bytes``.
    """
    too_long = OSError(errno.EFBIG, f"more than {most_bytes:,} bytes, too many for such a file", os.fspath(path))
    content = bytearray()
    with open(open_regular(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise too_long
        while len(content) <= most_bytes and (part := file.read(_PART_BYTES)):  # it may say that it has another size
            content += part
    if len(content) > most_bytes:
        raise too_long
    return bytes(content)


def _check_kind(mode: int, name: str) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(mode), "a device")
        raise OSError(errno.EINVAL, f"{kind}, expected a regular file", name)
