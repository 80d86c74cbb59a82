"""The folder that checkpoints are saved to: their names, the complete ones, and the latest.

A checkpoint is written in a folder whose name begins with a dot, and renamed when it is complete. ``latest`` names the
last one.
"""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from ..errors import CheckpointError
from .checks import shown
from .disks import exchange, names_to_disk, to_disk
from .files import read_regular

MANIFEST = "manifest.json"
LATEST = "latest"
UNFINISHED = ".saving"
_DISCARDED = ".discarded"
_REPLACED = ".replaced"
PREPARED = ".new"
_LONGEST_NAME = 4096
CHECKPOINT_NAME = re.compile(r"step-([0-9]{8,})(\.[0-9]+)?")
"""The name of a checkpoint that was given none."""
_GIVEN_NAME = re.compile(r"[^./\x00-\x1f][^/\x00-\x1f]{0,99}")
FILE_NAME = re.compile(r"shard-[0-9]{5,}-of-[0-9]{5,}\.safetensors")


def file_name(rank: int, world_size: int) -> str:
    """The name of the file that a process writes."""
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


def durable(path: Path, text: str) -> None:
    """Write a small file to the disk, and only then give it its name: readers see all of it or nothing."""
    _prepare(path, text).replace(path)


def _prepare(path: Path, text: str) -> Path:
    """Write the file to the disk under a temporary name, and return that."""
    temporary = path.with_name(f".{path.name}{PREPARED}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            to_disk(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def latest_name(folder: Path) -> str:
    """The name in the file ``latest``. Raises OSError and ValueError if it cannot be read."""
    return read_regular(folder / LATEST, most_bytes=_LONGEST_NAME).decode("utf-8").strip()


def refuse_of_others(folder: Path) -> None:
    """Raise :class:`CheckpointError` if another program's ``latest`` is there: a save would replace it."""
    try:
        named = latest_name(folder)
    except (OSError, ValueError):  # there is none, or it cannot be read
        return
    damaged = _GIVEN_NAME.fullmatch(named) is None
    if not damaged and os.path.exists(folder / named) and not is_ours(folder / named):
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


def is_ours(path: Path) -> bool:
    """True if the folder is, or was, a checkpoint of ours, or the name of one that no longer exists."""
    return CHECKPOINT_NAME.fullmatch(path.name) is not None or os.path.exists(path / MANIFEST)


def commit(unfinished: Path, name: str, *, latest: str | None = LATEST) -> Path:
    """Rename a complete checkpoint to ``name``, in place of an earlier one of that name, and make it the latest.

    Args:
        latest: the file that names the latest one; None: the latest one stays the latest.
    """
    folder = unfinished.parent
    names = None if latest is None else _prepare(folder / latest, f"{name}\n")  # first: the disk may be full
    temporary, exchanged = _replaced(folder / name), False
    try:
        if os.path.exists(folder / name):
            exchanged = exchange(unfinished, folder / name)
            if not exchanged:
                (folder / name).rename(temporary)
        if not exchanged:
            unfinished.rename(folder / name)
        names_to_disk(folder)
        if names is not None and latest is not None:
            names.replace(folder / latest)
    except BaseException:
        if names is not None:
            names.unlink(missing_ok=True)
        if exchanged:
            exchange(unfinished, folder / name)
        elif not unfinished.exists():
            (folder / name).rename(unfinished)
        put_back(folder / name)
        raise
    names_to_disk(folder)
    for earlier in (unfinished, temporary):
        if earlier.exists():
            discard(earlier)
    return folder / name


def _replaced(path: Path) -> Path:
    """The name of a checkpoint while another one takes its place."""
    return path.with_name(f".{path.name}{_REPLACED}")


def put_back(path: Path) -> None:
    """Give a checkpoint its name again if a process was killed while it was being replaced."""
    if not os.path.exists(path) and _replaced(path).exists():
        with suppress(FileNotFoundError):  # another process has done it
            _replaced(path).rename(path)


def check_name(folder: Path, name: str, step: int) -> None:
    """Raise :class:`CheckpointError` unless the checkpoint of this step may have this name in this folder."""
    if not isinstance(name, str) or _GIVEN_NAME.fullmatch(name) is None or name in (LATEST, MANIFEST):
        raise CheckpointError(
            f"tag: got {shown(name)}, expected a name for a folder: 1 to 100 characters, no '/', no '.' at its start"
        )
    counted = CHECKPOINT_NAME.fullmatch(name)
    if counted and int(counted[1]) != step:
        raise CheckpointError(f"tag: got {name!r} for step {step}; expected another name, or none, which gives its own")
    if os.path.exists(folder / name) and not is_ours(folder / name):
        raise CheckpointError(
            f"{folder / name} is no checkpoint of ours, and would be replaced; expected another folder or another tag"
        )


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
        if path.name.startswith(".") and path.name.endswith(_REPLACED):
            put_back(path.with_name(path.name.removeprefix(".").removesuffix(_REPLACED)))
            if path.exists():
                discard(path)
        elif path.name.startswith(".") and path.name.endswith((UNFINISHED, _DISCARDED)):
            discard(path)
        elif path.name == f".{LATEST}{PREPARED}":
            path.unlink()


def committed(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder that were given no name, oldest first; none if it cannot be read."""
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
    put_back(folder)
    if os.path.exists(folder / MANIFEST):
        return folder
    try:
        named = latest_name(folder)
    except (OSError, ValueError) as error:
        there = _last_of(folder)
        raise CheckpointError(
            f"{folder}: no checkpoint: neither {MANIFEST} nor {LATEST} can be read there ({error})"
            + (f"; expected one of its folders instead: {there}" if there else "")
        ) from None
    proper = _GIVEN_NAME.fullmatch(named) is not None
    if proper:
        put_back(folder / named)
    if not proper or not (is_ours(folder / named) or not os.path.exists(folder / named)):
        raise CheckpointError(
            f"{folder / LATEST} names {named[:80]!r}, which is no checkpoint of ours; expected one of those that are: "
            f"{_last_of(folder) or 'none'}. If DeepSpeed wrote it, frontends.torch.zero_checkpoint(folder).load(engine)"
            " goes on from it, and `python -m frontends.torch.deepspeed.utils.zero_to_fp32` takes its weights out"
        )
    if not os.path.exists(folder / named / MANIFEST):
        raise CheckpointError(
            f"{folder / LATEST} names {named[:80]!r}, which is no complete checkpoint there; expected one of those "
            f"that are: {_last_of(folder) or 'none'}"
        )
    return folder / named


def checked_tag(tag: str, where: Path | str) -> str:
    """The tag, if it is the name of a folder.

    Args:
        where: says in errors where it was found.

    Raises:
        CheckpointError: it is none.
    """
    if tag in ("", ".", "..") or Path(tag).name != tag or "\0" in tag:
        raise CheckpointError(f"{where}: got {shown(tag)}, expected the name of a folder there")
    return tag


def find_tag(folder: Path, tag: str | None) -> Path | None:
    """The checkpoint of this name in a folder, ours or another program's; None: its name is not given, and no file
    ``latest`` says it.

    Raises:
        CheckpointError: there is no such folder, or the name is none.
    """
    where: Path | str = "tag"
    if tag is None:
        where = folder / LATEST
        try:
            tag = latest_name(folder)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{folder / LATEST}: it cannot be read ({error}); expected a checkpoint's name"
            ) from None
    put_back(folder / checked_tag(tag, where))
    if not (folder / tag).is_dir():
        there = sorted(path.name for path in folder.glob("[!.]*") if path.is_dir())
        expected = f"one of {', '.join(there)}" if there else "a folder with checkpoints, and this one has none"
        raise CheckpointError(f"{folder / tag}: no such checkpoint; expected {expected}")
    return folder / tag


def _last_of(folder: Path) -> str:
    return ", ".join(path.name for path in committed(folder)[-5:])
