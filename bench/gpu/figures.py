"""The tables of what was measured on an accelerator, for the README and docs/performance.md."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.gpu.results import DOES_NOT_FIT, TRAINED, Record, is_absent
from bench.markdown import cell, number, table
from bench.parts.torch_contenders import DS_2, FSDP2, FUSED, LATE, ON_HOST, OURS, TORCHAO

Rows = Iterable[Mapping[str, Any]]


IN_SHORT = (FUSED, OURS, LATE, ON_HOST, DS_2, FSDP2, TORCHAO)
"""The contenders that the README names."""


def figures(records: Mapping[str, Record], in_short: bool = False) -> list[str]:
    """Return lines on steps beside others, the largest models and JAX, as far as they were measured. ``in_short``
    leaves JAX out."""
    made = {part: make for part, make in _TABLES.items() if part in records and not (in_short and part == "gpu_jax")}
    parts = [make(records[part], IN_SHORT if in_short else ()) for part, make in made.items()]
    lines = [line for each in parts if each for line in ["", *each]]
    return lines[1:]


def accelerator(record: Record) -> str:
    known = record["accelerator"]
    return f"{known['name']} ({known['bytes'] / 2**30:.0f} GiB){', in a rehearsal' if record['rehearsal'] else ''}"


def _median(rows: Rows, metric: str, **extra: Any) -> float | None:
    """Return the median of the rounds' medians."""
    of = [row["p50"] for row in rows if row["metric"] == metric and all(row.get(k) == v for k, v in extra.items())]
    return statistics.median(of) if of else None


def _cell(value: float | None, unit: str) -> str:
    return "" if value is None else f"{number(value)} {unit}"


def _memory(rows: Rows, **extra: Any) -> list[str]:
    """Return cells for device and host memory. The host's is the larger of two counts, because a process's own count
    may lack pinned memory."""
    of_host = [_median(rows, metric, **extra) for metric in ("peak memory", "memory taken of the host")]
    host = max((each for each in of_host if each is not None), default=None)
    return [_cell(_median(rows, "peak device memory", **extra), "GB"), _cell(host, "GB")]


def _names(record: Record, **extra: Any) -> list[str]:
    rows = (row for row in record["rows"] if row["metric"] == "total")
    return list(dict.fromkeys(row["name"] for row in rows if all(row.get(k) == v for k, v in extra.items())))


def _steps(record: Record, only: Sequence[str]) -> list[str]:
    rows, context = record["rows"], record["config"].get("context", 0)
    windows = sorted({row["micro_batch"] for row in rows if row["metric"] == "total"})
    if not windows:
        return _absent(record)
    head = [f"on {accelerator(record)}", *(f"a step of {n * context:,} tokens" for n in windows), "device", "host"]
    lines = []
    for name in (name for name in _names(record) if name in only or not only):
        times = [_cell(_median(rows, "total", name=name, micro_batch=n), "ms") for n in windows]
        lines.append([name, *times, *_memory(rows, name=name, micro_batch=windows[0])])
    return [*table(head, lines), *_absent(record)]


def _absent(record: Record) -> list[str]:
    """Return a line for each contender that never ran."""
    ran = {row["name"] for row in record["rows"]}
    why = {each["name"]: each["why"] for each in record["missing"] if each["name"] not in ran}
    words = [
        f"- {name} {'was not installed' if is_absent(said) else f'could not run: {cell(said)}'}."
        for name, said in why.items()
    ]
    return ["", *words] if words else []


def _largest(record: Record, only: Sequence[str]) -> list[str]:
    """Return, for each contender, the largest model that trained, and the memory that the next one did not fit."""
    lines = []
    for name in dict.fromkeys(trial["name"] for trial in record["trials"]):
        tried = [trial for trial in record["trials"] if trial["name"] == name]
        fits = max((size for size in tried if size["outcome"] == TRAINED), key=_parameters, default=None)
        beyond = [size for size in tried if size["outcome"] in DOES_NOT_FIT]
        next_one = min(beyond, key=_parameters, default=None)
        rows = [row for row in record["rows"] if fits and row.get("size") == fits["size"] and row["name"] == name]
        bound = f"{next_one['size']}: {next_one['outcome']}" if next_one else "not found"
        lines.append([name, fits["size"] if fits else "none of them", *_memory(rows), bound])
    cap = number(record["config"].get("device_bytes", 0) / 1e9)
    head = [f"under {cap} GB of device memory", "the largest that trains", "device", "host", "does not fit"]
    return table(head, lines)


def _parameters(size: Mapping[str, Any]) -> int:
    known: int = size["parameters"]
    return known


def _jax(record: Record, only: Sequence[str]) -> list[str]:
    rows = record["rows"]
    sizes = list(dict.fromkeys(row["size"] for row in rows if row["metric"] == "total"))
    lines = []
    for size in sizes:
        for name in _names(record, size=size):
            time = _cell(_median(rows, "total", name=name, size=size), "ms")
            lines.append([f"{name}, {size}", time, *_memory(rows, name=name, size=size)])
    steps = table(["in JAX", "a step", "device", "host"], lines) if lines else []
    ratios = [[row["name"], number(row["p50"])] for row in rows if row["metric"] == "ratio"]
    sharded = ["", *table(["in JAX, parameters sharded over all devices, and on one", ""], ratios)] if ratios else []
    return [*steps, *sharded, *_absent(record)] if lines or ratios else []


_TABLES = {"gpu_step": _steps, "gpu_largest": _largest, "gpu_jax": _jax}
