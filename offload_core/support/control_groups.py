"""The control groups (version 1 or 2) that bound this process."""

from pathlib import Path

ROOT, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def folders(controller: str, root: Path = ROOT, membership: Path = MEMBERSHIP) -> list[tuple[Path, int]]:
    """The folders with the limits of ``controller``, ``"cpu"`` or ``"memory"``, from this process's group upwards.

    Each comes with its control group version, 1 or 2. Some of the folders may not exist.
    """
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return []
    found = []
    for _, controllers, path in lines:
        if controllers == "":
            base, version = root, 2
        elif controller in controllers.split(","):
            base, version = root / controller, 1
        else:
            continue
        group = base / path.lstrip("/")
        above = [folder for folder in (group, *group.parents) if folder.is_relative_to(base)]
        found += [(folder, version) for folder in above]
    return found
