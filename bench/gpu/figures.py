"""The tables of what was measured on an accelerator, for the README and docs/performance.md."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.gpu.parts import ACCUMULATED, BESIDE, CURVE, OF_JAX, SHARES, TIERS
from bench.gpu.results import DOES_NOT_FIT, TRAINED, Record, is_absent
from bench.markdown import cell, number, table
from bench.parts.torch_contenders import DS_2, FSDP2, FUSED, LATE, ON_HOST, OURS, TORCHAO
from offload_core.commands.model_shapes import GPTConfig

Rows = Iterable[Mapping[str, Any]]


IN_SHORT = (FUSED, OURS, LATE, ON_HOST, DS_2, FSDP2, TORCHAO)
"""The contenders that the README names."""
CHANGED_SINCE = {
    ("gpu_jax", "0a20d9e7278f"): (
        "JAX's step of 124 M parameters was measured at commit 0a20d9e, which copied gradients to the host through "
        "pageable memory, at 1.4 GB/s where the link has 55. Commit 15d0106 copies them through pinned memory: "
        "an update of 69 M parameters, which took 221 ms, takes 41 ms. The step has not been measured since."
    ),
}
"""Remarks on figures of a part and a commit that a later commit means to change."""


def shown(records: Mapping[str, Record], in_short: bool = False) -> dict[str, Record]:
    """Return the parts that have tables. ``in_short`` leaves JAX and micro-batches out."""
    return {part: records[part] for part in _TABLES if part in records and not (in_short and part in _IN_FULL)}


def figures(records: Mapping[str, Record], in_short: bool = False) -> list[str]:
    """Return lines on steps beside others, the largest models, JAX and micro-batches, as far as they were measured.
    ``in_short`` leaves the last two and some contenders out."""
    lines = []
    for part, record in shown(records, in_short).items():
        if made := _TABLES[part](record, IN_SHORT if in_short else ()):
            remarks = [CHANGED_SINCE[part, commit] for commit in record["commits"] if (part, commit) in CHANGED_SINCE]
            lines += ["", *made, *(line for remark in remarks for line in ("", remark))]
    return lines[1:]


def accelerator(record: Record) -> str:
    known = record["accelerator"]
    return f"{known['name']} ({known['bytes'] / 2**30:.0f} GiB){', in a rehearsal' if record['rehearsal'] else ''}"


def median(rows: Rows, metric: str, **extra: Any) -> float | None:
    """Return the median of the rounds' medians."""
    of = [row["p50"] for row in rows if row["metric"] == metric and all(row.get(k) == v for k, v in extra.items())]
    return statistics.median(of) if of else None


def _cell(value: float | None, unit: str) -> str:
    return "" if value is None else f"{number(value)} {unit}"


def _memory(rows: Rows, **extra: Any) -> list[str]:
    """Return cells for device and host memory. The host's is the larger of two counts, because a process's own count
    may lack pinned memory."""
    of_host = [median(rows, metric, **extra) for metric in ("peak memory", "memory taken of the host")]
    host = max((each for each in of_host if each is not None), default=None)
    return [_cell(median(rows, "peak device memory", **extra), "GB"), _cell(host, "GB")]


def _names(record: Record, **extra: Any) -> list[str]:
    rows = (row for row in record["rows"] if row["metric"] == "total")
    return list(dict.fromkeys(row["name"] for row in rows if all(row.get(k) == v for k, v in extra.items())))


def _steps(record: Record, only: Sequence[str]) -> list[str]:
    rows, context = record["rows"], record["config"].get("context", 0)
    windows = sorted({row["micro_batch"] for row in rows if row["metric"] == "total"})
    if not windows:
        return _absent(record, only or BESIDE)
    head = [f"on {accelerator(record)}", *(f"a step of {n * context:,} tokens" for n in windows), "device", "host"]
    lines = []
    for name in (name for name in _names(record) if name in only or not only):
        times = [_cell(median(rows, "total", name=name, micro_batch=n), "ms") for n in windows]
        lines.append([name, *times, *_memory(rows, name=name, micro_batch=windows[0])])
    words = ["", " ".join(filter(None, [_model(record["config"]), _beside(rows, windows, context), _counts(rows)]))]
    return [*table(head, lines), *words, *_absent(record, () if only else BESIDE)]


def _model(config: Mapping[str, Any]) -> str:
    if "gpt" not in config:
        return ""
    kept = "with" if config["activation_checkpointing"] else "without"
    return (
        f"The model is a GPT of {GPTConfig(**config['gpt']).numel:,} bf16 parameters, {kept} activation checkpointing."
    )


def _beside(rows: Rows, windows: Sequence[int], context: int) -> str:
    """Return a sentence on our times beside AdamW on the device and beside DeepSpeed, as far as they were measured."""
    times = {
        name: {n: ms for n in windows if (ms := median(rows, "total", name=name, micro_batch=n)) is not None}
        for name in (OURS, FUSED, DS_2)
    }
    measured = [n for n in windows if all(n in of for of in times.values() if of)]
    said = [
        (OURS, FUSED, "takes {} of the time of PyTorch's fused AdamW on the device"),
        (DS_2, OURS, "is {} times as fast as DeepSpeed"),
    ]
    words = [
        sentence.format(" and ".join(number(times[top][n] / times[bottom][n]) for n in measured))
        for top, bottom, sentence in said
        if times[top] and times[bottom]
    ]
    of = " and ".join(f"{n * context:,}" for n in measured)
    return f"With {of} tokens a step, {OURS} {', and '.join(words)}." if measured and words else ""


def _counts(rows: Rows) -> str:
    """Return a sentence on the number of steps behind a time."""
    totals = [row for row in rows if row["metric"] == "total"]
    steps = {row["n"] for row in totals}
    rounds = set(Counter((row["name"], row["micro_batch"]) for row in totals).values())
    return f"A time is the median of {_spread(steps, 'step')}, in {_spread(rounds, 'round')}."


def _spread(counts: set[int], what: str) -> str:
    least, most = min(counts), max(counts)
    return f"{least if least == most else f'{least} to {most}'} {what}{'s' * (most > 1)}"


def _absent(record: Record, expected: Sequence[str]) -> list[str]:
    """Return a line for each contender that could not run, and one for those that the time did not suffice for."""
    ran = {row["name"] for row in record["rows"]}
    why = {each["name"]: each["why"] for each in record["missing"] if each["name"] not in ran}
    words = [
        f"- {name} {'was not installed' if is_absent(said) else f'could not run: {cell(said)}'}."
        for name, said in why.items()
    ]
    left = [name for name in expected if name not in ran and name not in why]
    words += [f"- Not measured yet: {'; '.join(left)}."] if left else []
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
            time = _cell(median(rows, "total", name=name, size=size), "ms")
            lines.append([f"{name}, {size}", time, *_memory(rows, name=name, size=size)])
    steps = table(["in JAX", "a step", "device", "host"], lines) if lines else []
    ratios = [[row["name"], number(row["p50"])] for row in rows if row["metric"] == "ratio"]
    sharded = ["", *table(["in JAX, parameters sharded over all devices, and on one", ""], ratios)] if ratios else []
    return [*steps, *sharded, *_absent(record, OF_JAX)] if lines or ratios else []


def _accumulated(record: Record, only: Sequence[str]) -> list[str]:
    """Return the speed of each contender by the tokens of a step, and its memory with most of them."""
    rows, context = record["rows"], record["config"].get("context", 0)
    windows = sorted({row["micro_batch"] for row in rows if row["metric"] == "speed"})
    unfit = list(dict.fromkeys(note.partition(": ")[0] for note in record["notes"] if ": does not fit the " in note))
    expected = [name for name in ACCUMULATED if not any(words.startswith(f"{name}, ") for words in unfit)]
    said = [f"- {words}: steps without a figure do not fit." for words in unfit]
    rest = [*([""] if said else []), *said, *_absent(record, expected)]
    if not windows:
        return rest
    sizes = list(dict.fromkeys(row["size"] for row in rows if row["metric"] == "speed"))
    each = record["config"]["windows"] * context
    head = [f"in micro-batches of {each:,} tokens", *(f"a step of {n * context:,} tokens" for n in windows)]
    lines = []
    for size in sizes:
        for name in _names(record, size=size):
            own = {"name": name, "size": size}
            speeds = [_cell(median(rows, "speed", micro_batch=n, **own), "tokens/s") for n in windows]
            most = max(row["micro_batch"] for row in rows if row["name"] == name and row.get("size") == size)
            lines.append([f"{name}, {size}", *speeds, *_memory(rows, micro_batch=most, **own)])
    return [*table([*head, "device", "host"], lines), *rest]


def _tiers(record: Record, only: Sequence[str]) -> list[str]:
    """Return a line for each share of the states on the device: times, their ratios to AdamW's there, and memory."""
    rows, context = record["rows"], record["config"].get("context", 0)
    windows = sorted({row["micro_batch"] for row in rows if row["metric"] == "total"})
    if not windows:
        return _absent(record, TIERS)
    times = {(name, n): median(rows, "total", name=name, micro_batch=n) for name in TIERS for n in windows}
    lines = []
    for name in (name for name in TIERS if name in _names(record)):
        cells = ["" if name == FUSED else f"{SHARES[name]:.0%}"]
        for n in windows:
            own, fused = times[name, n], times[FUSED, n]
            cells += [_cell(own, "ms"), "" if name == FUSED or not own or not fused else f"{own / fused:.2f}"]
        lines.append([name, *cells, *_memory(rows, name=name, micro_batch=windows[0])])
    steps = [head for n in windows for head in (f"a step of {n * context:,} tokens", "of fused AdamW's")]
    head = [f"on {accelerator(record)}", "states there", *steps, "device", "host"]
    words = ["", " ".join(filter(None, [_model(record["config"]), _counts(rows)]))]
    return [*table(head, lines), *words, *_absent(record, TIERS)]


def _curve(record: Record, only: Sequence[str]) -> list[str]:
    """Return the time of each contender's step by its tokens, and its ratio to that of AdamW on the device."""
    rows, context = record["rows"], record["config"].get("context", 0)
    windows = sorted({row["micro_batch"] for row in rows if row["metric"] == "total"})
    unfit = list(dict.fromkeys(note.partition(": ")[0] for note in record["notes"] if ": does not fit the " in note))
    expected = [name for name in CURVE if not any(words.startswith(f"{name}, ") for words in unfit)]
    said = [f"- {words}: steps without a figure do not fit." for words in unfit]
    rest = [*([""] if said else []), *said, *_absent(record, expected)]
    if not windows:
        return rest
    times = {(name, n): median(rows, "total", name=name, micro_batch=n) for name in CURVE for n in windows}
    lines = []
    for name, (states, clipping) in CURVE.items():
        if name in _names(record):
            cells = [states, "no" if clipping is None else f"to {clipping:g}"]
            for n in windows:
                own, fused = times[name, n], times[FUSED, n]
                ratio = "" if name == FUSED or not own or not fused else f" ({own / fused:.2f})"
                cells.append(_cell(own, "ms") + ratio)
            lines.append([name, *cells, *_memory(rows, name=name, micro_batch=windows[-1])])
    tokens = [f"{n * context:,} tokens a step" for n in windows]
    head = [f"on {accelerator(record)}", "states on the", "clips", *tokens, "device", "host"]
    # The last contender's configuration has the same model and sums as the others'.
    config = {**record["config"], "activation_checkpointing": True}
    each = f"Micro-batches have {config['windows'] * context:,} tokens. " if "windows" in config else ""
    sums = "fp32" if config.get("wide_sums") else "fp32 or, where torch reduces parts of a product, bf16"
    words = (
        f"{_model(config)} {each}Matrices are multiplied in bf16, with sums in {sums}. In brackets: the ratio to "
        f"{FUSED}. {_counts(rows)}"
    )
    return [*table(head, lines), "", words.strip(), *rest]


_IN_FULL = ("gpu_jax", "gpu_accumulate", "gpu_tiers", "gpu_curve")
_TABLES = {
    "gpu_step": _steps,
    "gpu_largest": _largest,
    "gpu_jax": _jax,
    "gpu_accumulate": _accumulated,
    "gpu_tiers": _tiers,
    "gpu_curve": _curve,
}
