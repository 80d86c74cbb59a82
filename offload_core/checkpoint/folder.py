"""The folder that checkpoints are saved to: their names, the complete ones, and the latest.

A checkpoint is written in a folder whose name begins with a dot, and renamed when it is complete. ``latest`` names the
last one.
"""

import os
import re
import shutil
from pathlib import Path

from ..errors import CheckpointError
from ..support.disks import names_to_disk, to_disk
from ..support.files import read_regular

MANIFEST = "manifest.json"
LATEST = "latest"
UNFINISHED = ".saving"
_DISCARDED = ".discarded"
_PREPARED = ".new"
_LONGEST_NAME = 4096
CHECKPOINT_NAME = re.compile(r"step-([0-9]{8,})(\.[0-9]+)?")
FILE_NAME = re.compile(r"shard-[0-9]{5,}-of-[0-9]{5,}\.safetensors")


def file_name(rank: int, world_size: int) -> str:
    """The name of the file that a process writes."""
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


def durable(path: Path, text: str) -> None:
    """Write a small file to the disk, and only then give it its name: readers see all of it or nothing."""
    _prepare(path, text).replace(path)


def _prepare(path: Path, text: str) -> Path:
    """Write the file to the disk under a temporary name, and return that."""
    aside = path.with_name(f".{path.name}{_PREPARED}")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            to_disk(file.fileno())
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return aside


def refuse_of_others(folder: Path) -> None:
    """Raise :class:`CheckpointError` if another program's ``latest`` is there: a save would replace it."""
    try:
        named = read_regular(folder / LATEST, most_bytes=_LONGEST_NAME).decode("utf-8").strip()
    except (OSError, ValueError):  # there is none, or it cannot be read
        return
    ours = CHECKPOINT_NAME.fullmatch(named) or Path(named).name != named  # or damaged
    if not ours and os.path.exists(folder / named):
        raise CheckpointError(
            f"{folder / LATEST} names {named[:80]!r}, a checkpoint of another program (DeepSpeed has such a file too), "
            "and would be replaced; expected a folder for ours alone"
        )


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, and sync them to the disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        names_to_disk(path.parent)


def commit(unfinished: Path, name: str) -> Path:
    """Rename a complete checkpoint to ``name``, and make it the latest."""
    folder = unfinished.parent
    latest = _prepare(folder / LATEST, f"{name}\n")  # before the rename, because the disk may be full
    try:
        unfinished.rename(folder / name)
        names_to_disk(folder)
        latest.replace(folder / LATEST)
    except BaseException:
        latest.unlink(missing_ok=True)
        if not unfinished.exists():
            (folder / name).rename(unfinished)
        raise
    names_to_disk(folder)
    return folder / name


def free_name(folder: Path, step: int) -> str:
    """An unused name for a checkpoint of a step. The folder may have one of that step already."""
    name, n = f"step-{step:08d}", 0
    while (folder / (chosen := f"{name}.{n}" if n else name)).exists():
        n += 1
    return chosen


def rotate(folder: Path, last: str, keep: int) -> None:
    """Delete all but ``keep`` checkpoints: ``last``, and those that were written most recently before it.

    Raises:
        OSError: a checkpoint cannot be deleted.
    """
    others = [path for path in committed(folder) if path.name != last]
    for path in others[: max(len(others) + 1 - keep, 0)]:
        discard(path)


def discard(path: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a partly deleted one does not look complete."""
    if not path.name.startswith("."):
        path = path.rename(path.with_name(f".{path.name}{_DISCARDED}"))
    shutil.rmtree(path, ignore_errors=True)


def clean(folder: Path) -> None:
    """Delete the leftovers of killed processes."""
    for path in folder.iterdir():
        if path.name.startswith(".") and path.name.endswith((UNFINISHED, _DISCARDED)):
            discard(path)
        elif path.name == f".{LATEST}{_PREPARED}":
            path.unlink()


def committed(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first; none if the folder cannot be read."""
    found = []
    try:
        for path in folder.iterdir():
            if CHECKPOINT_NAME.fullmatch(path.name) and os.path.exists(path / MANIFEST):
                found.append(((path / MANIFEST).stat().st_mtime_ns, path.name))
    except (OSError, ValueError):  # a null byte
        pass
    return [folder / name for _, name in sorted(found)]


def has_none(path: str | os.PathLike[str]) -> bool:
    """True if no checkpoint was saved to a folder, or the folder is missing. One that cannot be read may have some."""
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):  # a null byte
        return False
    return not ({MANIFEST, LATEST} & {*names} or committed(Path(path)))


def find(path: str | os.PathLike[str]) -> Path:
    """The checkpoint at a path: the folder itself, or the latest checkpoint in it.

    Raises:
        CheckpointError: there is none.
    """
    folder = Path(path)
    if os.path.exists(folder / MANIFEST):
        return folder
    try:
        named = read_regular(folder / LATEST, most_bytes=_LONGEST_NAME).decode("utf-8").strip()
    except (OSError, ValueError) as error:
        there = _last_of(folder)
        raise CheckpointError(
            f"{folder}: no checkpoint: neither {MANIFEST} nor {LATEST} can be read there ({error})"
            + (f"; expected one of its folders instead: {there}" if there else "")
            + ("; load_checkpoint(..., missing_ok=True) goes on without one" if has_none(folder) else "")
        ) from None
    if not CHECKPOINT_NAME.fullmatch(named):
        raise CheckpointError(
            f"{folder / LATEST} names {named[:80]!r}, which is no checkpoint of ours; expected one of those that are: "
            f"{_last_of(folder) or 'none'}. If DeepSpeed wrote it, frontends.torch.load_deepspeed reads its weights"
        )
    if not os.path.exists(folder / named / MANIFEST):
        raise CheckpointError(
            f"{folder / LATEST} names {named[:80]!r}, which is no complete checkpoint there; expected one of those "
            f"that are: {_last_of(folder) or 'none'}"
        )
    return folder / named


def _last_of(folder: Path) -> str:
    return ", ".join(path.name for path in committed(folder)[-5:])
