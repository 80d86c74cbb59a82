"""``python -m offload_core inspect DIR``: the contents of a checkpoint, and a check of every block."""

import argparse
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from ..checkpoint.reader import Checkpoint, Loaded
from ..errors import CheckpointError, NewerCheckpointError
from ..memory.host_memory import format_bytes
from ..support.checkpoint_folder import LATEST, MANIFEST, committed, find

HELP = "the contents of a checkpoint, or of a folder of checkpoints, and a check of every block"
EXAMPLE = """example: the checkpoints in a folder
  python -m offload_core inspect checkpoints"""
DAMAGED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="a checkpoint, or the folder that it was saved to")
    parser.add_argument("--json", action="store_true", help="print one JSON object; sizes in bytes")


def run(args: argparse.Namespace) -> int:
    folder = args.directory
    if (folder / MANIFEST).exists():
        one = _describe(folder)
        print(json.dumps(one) if args.json else _text(one))
        return DAMAGED if one["errors"] else 0
    latest, errors = None, []
    try:
        latest = find(folder).name
    except CheckpointError as error:
        errors.append(str(error))
    found = [_describe(path) for path in committed(folder)]
    if args.json:
        print(json.dumps({"path": str(folder), "latest": latest, "errors": errors, "checkpoints": found}))
    else:
        for one in found:
            mark = f"  <- {LATEST}" if Path(one["path"]).name == latest else ""
            print(_line(one) + mark, *one["errors"], sep="\n  ")
        print(*errors, sep="\n", end="\n" if errors else "")
    return DAMAGED if errors or any(one["errors"] for one in found) else 0


def _describe(path: Path) -> dict[str, Any]:
    """Describe a checkpoint, as far as damage permits. Reads all its blocks."""
    about: dict[str, Any] = {"path": str(path), "errors": []}
    try:
        checkpoint = Checkpoint(path)
        about["errors"] = [str(error) for error in checkpoint.errors()]
        loaded = Loaded(checkpoint, None)
    except CheckpointError as error:
        about["errors"].append(str(error))
        return about | {"newer": isinstance(error, NewerCheckpointError)}
    parameters = {
        name: {"shape": entry["shape"], "dtype": entry["dtype"], "trained": name in loaded.parameters}
        | {key: entry[key] for key in ("step", "group", "behind") if key in entry}
        for name, entry in {**loaded.parameters, **loaded.others}.items()
    }
    return about | {
        "step": loaded.step,
        "written": checkpoint.content.get("written"),
        "bytes": checkpoint.n_bytes,
        "loss_scale": checkpoint.content.get("loss_scale"),
        "files": [
            {"file": record["file"], "bytes": record["bytes"], "tensors": len(record["tensors"])}
            for record in checkpoint.files
        ],
        "parameters": parameters,
        "left_out": [*loaded.left_out],
    }


def _line(about: dict[str, Any]) -> str:
    name = Path(about["path"]).name
    if "step" not in about:
        return f"{name}  {'of a newer format, not checked' if about['newer'] else 'damaged'}"
    state = f"DAMAGED ({len(about['errors'])})" if about["errors"] else "whole"
    return f"{name}  step {about['step']}  {format_bytes(about['bytes'])}  {_by_whom(about)}  {state}"


def _by_whom(about: dict[str, Any]) -> str:
    written = about["written"] if isinstance(about["written"], dict) else {}
    return (
        f"{written.get('date', 'at an unknown time')} by {written.get('front_end') or 'offload-core'} "
        f"(offload-core {written.get('version') or 'of unknown version'}), stage {written.get('stage', '?')}, "
        f"{written.get('world_size', '?')} processes"
    )


def _text(about: dict[str, Any]) -> str:
    lines = [about["path"]]
    if "step" in about:
        lines += [f"  step {about['step']}, {format_bytes(about['bytes'])}", f"  written {_by_whom(about)}"]
        if about["loss_scale"]:
            lines.append(f"  loss scale {json.dumps(about['loss_scale'])}")
        numel: Counter[tuple[bool, str]] = Counter()
        for entry in about["parameters"].values():
            numel[entry["trained"], entry["dtype"]] += math.prod(entry["shape"])
        for (trained, dtype), n in sorted(numel.items(), reverse=True):
            lines.append(f"  {n:,} {'trained' if trained else 'other'} elements of {dtype}")
        if about["left_out"]:
            lines.append(f"  {len(about['left_out'])} frozen tensors are left out (save_checkpoint(frozen=False))")
        for record in about["files"]:
            lines.append(f"  {record['file']}  {format_bytes(record['bytes'])}, {record['tensors']} tensors")
        width = max(map(len, about["parameters"]), default=0)
        for name, entry in about["parameters"].items():
            steps = f", {entry['step']} updates, group {entry['group']}" if entry["trained"] else ", not trained"
            lines.append(f"  {name:{width}}  {entry['dtype']} {entry['shape']}{steps}")
    lines += about["errors"] or ["every block is as it was written"]
    return "\n".join(lines)
