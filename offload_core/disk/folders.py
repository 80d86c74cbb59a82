"""Checks of the folders that a configuration names for files on disk, and the space there."""

import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import ConfigError, ConfigWarning
from ..support.user_line import UserLine

MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "orangefs", "wekafs"),
    *("fuse.sshfs", "fuse.ceph-fuse", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone"),
}
_MEMORY = {"tmpfs", "ramfs"}


def check_folders(folders: Sequence[str]) -> None:
    """Check the folders of ``nvme_path`` before anything is allocated there.

    A :class:`ConfigWarning` says if two of them share a disk, beside those of :func:`check_folder`.

    Raises:
        ConfigError: as :func:`check_folder`, or two names lead to one folder.
    """
    disks: dict[int, str] = {}
    seen: dict[tuple[int, int], str] = {}
    for folder in folders:
        check_folder(folder)
        with _named(folder):
            there = os.stat(folder)
        disk, place = there.st_dev, (there.st_dev, there.st_ino)
        if place in seen:
            raise ConfigError(f"nvme_path: {seen[place]!r} and {folder!r} are one folder; expected each folder once")
        if disk in disks:
            _warn(
                f"nvme_path: {disks[disk]!r} and {folder!r} are on the same disk, and two are no faster than one; "
                "expected one folder on each disk"
            )
        seen[place] = disks[disk] = folder


def check_folder(folder: str) -> None:
    """Check that files can be made in a folder, on a disk of this machine.

    Nothing is written. On Linux, a :class:`ConfigWarning` says if the folder is on a network file system or in memory.

    Raises:
        ConfigError: there is no such folder, or this process cannot make files in it.
    """
    with _named(folder):
        is_folder = stat.S_ISDIR(os.stat(folder).st_mode)
        read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
        # Of the user that a process acts for, where the system can tell: it may differ from the one who started it.
        writable = os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)
    wrong = {
        "which is not a folder": not is_folder,
        "on a file system that is read-only": read_only,
        "in which this process may not make files": not writable,
    }
    reason = next((reason for reason, holds in wrong.items() if holds), None)
    if reason is not None:
        raise ConfigError(
            f"nvme_path: got {folder!r}, {reason}; expected an existing folder on a disk, in which this process may "
            "make files"
        )
    kind = file_system(folder, MOUNTS)
    if kind in _NETWORK:
        _warn(
            f"nvme_path: {folder!r} is on a network file system ({kind}): every step waits for the network, which "
            "other machines use, too; expected a disk of this machine"
        )
    elif kind in _MEMORY:
        _warn(
            f"nvme_path: {folder!r} is in memory ({kind}), of which states there save nothing; expected a disk of this "
            "machine, or offload_optimizer='cpu'"
        )


def free_bytes(folders: Sequence[str]) -> int:
    """Return how many bytes fit into these folders together, if each takes an equal share.

    Raises:
        ConfigError: there is no such folder.
    """
    free: list[tuple[int, int]] = []
    for folder in folders:
        with _named(folder):
            there = os.statvfs(folder)
            free.append((os.stat(folder).st_dev, there.f_bavail * there.f_frsize))
    on_disk = Counter(disk for disk, _ in free)
    return len(free) * min(n_bytes // on_disk[disk] for disk, n_bytes in free)


def file_system(folder: str, mounts: Path) -> str | None:
    """Return the type of the file system that a folder is on, as the kernel names it; None: it is not known.

    Args:
        mounts: the kernel's list of mounts. Systems other than Linux have none.
    """
    try:
        lines = mounts.read_text(errors="surrogateescape").split("\n")
    except OSError:
        return None
    resolved, found, depth = Path(os.path.realpath(folder)), None, 0
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5:
            continue
        place = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4]))
        # Of two mounts at one place the later one lies on top.
        if resolved.is_relative_to(place) and len(place.parts) >= depth:
            found, depth = after.partition(" ")[0], len(place.parts)
    return found


@contextmanager
def _named(folder: str) -> Iterator[None]:
    """Raise errors of the system about this folder as those of the configuration."""
    try:
        yield
        return
    except (FileNotFoundError, NotADirectoryError):
        reason = "which does not exist"
    except OSError as error:
        reason = f"which cannot be read ({error.strerror})"
    except ValueError as error:  # a name that the system cannot be asked for
        reason = f"which cannot be read ({error})"
    raise ConfigError(f"nvme_path: got {folder!r}, {reason}; expected an existing folder on a disk: make it first")


def _warn(message: str) -> None:
    UserLine.now().warn(ConfigWarning(message))
