"""The report of a run of ``make bench``: Markdown and pictures, the README's figures, two runs compared.

The words are in this module, and all figures come from the results.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench import plots
from bench.gpu import figures, results
from bench.markdown import cell, number, spread, table
from bench.parts import PARTS
from bench.record import bound, missed_by, module_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PICTURES = ROOT / "build" / "pictures"
"""The folder for pictures, one below it for each results file. Git ignores it: `make docs` draws them again."""
README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
BEGIN = "<!-- what follows is written by: python -m bench.report --write -->\n"
END = "<!-- here it ends -->\n"

Record = dict[str, Any]
Records = dict[str, Record]
"""The last record of each part, in the order in which they ran."""


class ReportError(Exception):
    """A file holds no results to report on."""


def read(path: Path) -> Records:
    """The records of a file; those of an older form, without rows, are none. Measurements of a part on an accelerator
    are joined into one."""
    path.stat()  # or say that it is not there
    known: Records = {}
    lines = results.lines(path)
    for record in lines:
        if "rows" in record and "ratios" in record and "measurement" not in record:
            known.pop(record["bench"], None)
            known[record["bench"]] = record
    known |= results.joined(record for record in lines if "measurement" in record)
    if not known:
        raise ReportError(f"{path}: no record with rows and ratios in it, expected those that make bench writes")
    return known


def whole_runs(folder: Path, parts: Iterable[str]) -> list[Path]:
    """The files with a record of every part, oldest first."""
    runs = []
    for path in folder.glob("*.jsonl"):
        try:
            known = read(path)
        except ReportError:
            continue
        if set(parts) <= set(known):
            runs.append((max(record["date"] for record in known.values()), path))
    return [path for _, path in sorted(runs)]


def printed(record: Record) -> list[Record]:
    """The ratios of a part that two runs are compared by: those with a target, or all where none has one."""
    ratios: list[Record] = record["ratios"]
    return [ratio for ratio in ratios if ratio["target"] is not None] or ratios


def ratio_lines(ratios: list[Record]) -> list[list[str]]:
    lines = []
    for ratio in ratios:
        target, verdict = "", ""
        if ratio["target"] is not None:
            target = bound(ratio)
            beyond = missed_by(ratio)
            verdict = f"**missed** by {100 * beyond:.0f} %" if beyond else "met"
        lines.append([ratio["name"], spread(ratio), target, verdict])
    return lines


def row_table(record: Record) -> list[str]:
    """A line a contender and what tells it from others, a column a metric."""
    metrics = list(dict.fromkeys((row["metric"], row["unit"]) for row in record["rows"]))
    told = list(dict.fromkeys(key for row in record["rows"] for key in plots.extras(row)))
    lines: dict[tuple[str, ...], dict[tuple[str, str], str]] = {}
    for row in record["rows"]:
        key = (row["name"], *(number(row.get(extra, "")) for extra in told))
        lines.setdefault(key, {})[row["metric"], row["unit"]] = spread(row)
    head = ["", *(extra.replace("_", " ") for extra in told), *(f"{metric}, {unit}" for metric, unit in metrics)]
    return table(head, ([*key, *(cells.get(metric, "") for metric in metrics)] for key, cells in lines.items()))


def settings(config: dict[str, Any]) -> str:
    """The values of a configuration that fit a line."""

    def plain(value: Any) -> str | None:
        if isinstance(value, list) and all(not isinstance(each, dict | list) for each in value):
            return ", ".join(map(number, value))
        return None if isinstance(value, dict | list) else number(value)

    known = {key.replace("_", " "): plain(value) for key, value in config.items()}
    return "; ".join(f"{key} {value}" for key, value in known.items() if value is not None)


def remarks(record: Record) -> list[str]:
    absent = [f"- {absent['name']} could not run: {cell(absent['why'])}" for absent in record["missing"]]
    return [*absent, *(f"- {note}" for note in record["notes"])]


def where(records: Records) -> list[str]:
    """The machine, dates, commits and versions: one each, or all there are."""

    def all_of(key: str) -> str:
        return " and ".join(dict.fromkeys(str(record[key]) for record in records.values()))

    commits = dict.fromkeys(each for record in records.values() for each in record.get("commits", [record["commit"]]))
    days = dict.fromkeys(record["date"].partition("T")[0] for record in records.values())
    sizes = dict.fromkeys(f"{record['memory'] / 2**30:.1f} GiB" for record in records.values())
    known = {name: version for record in records.values() for name, version in record["versions"].items()}
    packages = ", ".join(f"{name} {version}" for name, version in known.items())
    return [
        f"On {all_of('machine')}, {' and '.join(sizes)} of memory; {' and '.join(days)}, "
        f"commit {' and '.join(commits)}; {packages}."
    ]


RESOLUTION = 0.01
"""Ratios that differ by less are the same: some hardly vary within a run, bytes of memory for example."""
HOW = (
    "Contenders take turns within one run, and each repetition starts new processes. A ratio divides what the first "
    "contender needed by what the second one needed in the same round. It is given as the median, with the 20th to the "
    "80th percentile in brackets. A target was set before the measurement."
)
KEPT = (
    "In training steps and updates, the allocator of all contenders (glibc's malloc) is told to keep the memory that "
    "they free. By default it gives large blocks back to the kernel, and each page of a new block costs a page fault. "
    "On a virtual machine the price of a page fault changes from hour to hour, and DeepSpeed has most of them."
)


def how(records: Records) -> list[str]:
    """Return paragraphs on the way in which all figures were measured."""
    default = ' What users see by default is under "default allocator".' if "default_allocator" in records else ""
    kept = any(record["config"].get("malloc") for part, record in records.items() if part != "memory")
    return [HOW, "", KEPT + default] if kept else [HOW]


@dataclass(frozen=True)
class Figure:
    """A line of the README's table: a ratio of a part, in words."""

    part: str
    ratio: str
    """The ratio's name in the results."""
    words: str
    """The measured thing, and the thing that it is compared with."""
    as_factor: bool = False
    """True to print "2.05 times as fast", of a ratio of their time to ours; False for "0.84 of its time"."""
    of: str = "time"


FIGURES = (
    Figure(
        "step",
        "319 M, whole step: DeepSpeed / offload-core",
        "a training step, 319 M parameters, beside DeepSpeed's (ZeRO-2)",
        True,
    ),
    Figure(
        "default_allocator",
        "319 M, whole step: DeepSpeed / offload-core",
        "the same with the allocator as it comes",
        True,
    ),
    Figure(
        "step",
        "319 M, whole step: FSDP2, CPUOffloadPolicy / offload-core, serial",
        "the same, beside FSDP2 with CPU offload",
        True,
    ),
    Figure("ranks", "2 ranks, 2 windows each: DeepSpeed / offload-core", "a step on 2 ranks, beside DeepSpeed's", True),
    Figure(
        "jax_step",
        "JAX, step: optax.adamw, in memory / offload-core",
        "the step in JAX, beside `optax.adamw` on the host",
        True,
    ),
    Figure("update", "fp32 update / torch fused", "the update of 100 M parameters, beside torch's fused AdamW"),
    Figure("update", "fp32 update / DeepSpeedCPUAdam", "the same, beside DeepSpeedCPUAdam"),
    Figure(
        "memory",
        "host memory a parameter: offload-core / DeepSpeed",
        "host memory a parameter, beside DeepSpeed's",
        of="memory",
    ),
)


def section(records: Records, figures: Sequence[Figure] = FIGURES, page: str = "docs/performance.md") -> str:
    """The README's figures: those that decide, in words, with links to the parts of the page."""
    lines = []
    for figure in figures:
        record = records.get(figure.part, {"ratios": []})
        for ratio in record["ratios"]:
            if ratio["name"] == figure.ratio:
                measured = number(ratio["p50"])
                words = f"{measured} times as fast" if figure.as_factor else f"{measured} of its {figure.of}"
                lines.append([f"[{figure.words}]({page}#{anchor(record['title'])})", words])
    machines = dict.fromkeys(record["machine"] for record in records.values())
    return "\n".join([*table([f"on {' and '.join(machines)}, no GPU", ""], lines), ""])


def anchor(title: str) -> str:
    """The link target of a heading."""
    return "".join(c if c.isalnum() else "-" if c == " " else "" for c in title.lower())


ABOUT = {
    "step": (
        "GPTs of 34 and 319 million parameters, trained on one rank. A *whole step* is forward, backward and update; a "
        "*step* is the call of the optimizer, with clipping. The *streaming limit* is a plain loop that reads and "
        "writes the bytes of the update."
    ),
    "default_allocator": (
        "The same steps with glibc's malloc as it comes. This is what you get if you set nothing. The difference is "
        "page faults."
    ),
    "ranks": (
        "The smaller GPT on several processes of this machine, which exchange gradients and parameters over gloo. A "
        "window is one sequence; each rank takes so many a step."
    ),
    "fsdp2": (
        "The smaller GPT under FSDP2, whose own forward and backward all contenders share: with torch's fused AdamW, "
        "on the host by its CPUOffloadPolicy or without offload, and with ours. A *resume* is the time from an "
        "optimizer without states to its loaded ones, with files that are not in memory."
    ),
    "jax_step": "The same in JAX, beside optax with its states in host memory.",
    "jax_mesh": (
        "JAX on one device and on meshes, whose devices are the host's here: parameters sharded over both axes, beside "
        "optax on the devices and with its moments in host memory."
    ),
    "update": (
        "The update alone: the C kernel beside other implementations and the machine's memory bandwidth. [Update "
        "rules](optimizers.md#time) has all rules."
    ),
    "small_params": (
        "Models of thousands of small parameters, where Python counts and not the update: the optimizer alone beside "
        "torch's, and what an engine's hooks add to backward."
    ),
    "memory": "Bytes a parameter: those that are planned, and those that processes hold.",
    "profile": "Samples of the processor during training steps, sorted by what it was doing.",
    "exactness": "How many parameters change a bit when the same training is cut into other shards.",
    "overlap": (
        "The real pipeline, its thread and its kernels with a device that is simulated: how much of copies and update "
        "the schedules hide behind compute."
    ),
    "nvme": (
        "Updates of states on disk, with no forward and no backward in them: beside the disk's own speed, which fio "
        "measures in the same rounds, with parts of the states in memory, and with 8-bit states. Whole steps of a GPT "
        "beside DeepSpeed's, with states on the same disk."
    ),
    "layerwise": (
        "All micro-batches of an update pass one block after the other (`engine.accumulate()`), beside a loop over "
        "them: with parameters and states on disk, on two ranks that exchange parameters over gloo, and with one "
        "micro-batch, where there is nothing to save."
    ),
    "peers": "The libraries that are measured beside ours, and how long each takes to be ready.",
}
"""A sentence on the measurement of each part of the page, in the order of the page."""


@dataclass(frozen=True)
class Meaning:
    """A sentence on what a ratio means for a user; it is left out where the results lack the ratio."""

    part: str
    ratio: str
    sentence: str
    """The sentence; ``{}`` stands for the ratio's median."""


MEANINGS = (
    Meaning(
        "step", "319 M, whole step: DeepSpeed / offload-core", "A training step is {} times as fast as DeepSpeed's."
    ),
    Meaning(
        "default_allocator",
        "319 M, whole step: DeepSpeed / offload-core",
        "If you leave the allocator as it comes, it is {} times as fast: DeepSpeed has more page faults.",
    ),
    Meaning(
        "step",
        "34 M, whole step: PyTorch, fused AdamW / offload-core",
        "PyTorch with its own fused AdamW, on a model that fits without offload, takes {} of our time. Offload buys "
        "memory, not time.",
    ),
    Meaning(
        "update",
        "bf16 update / streaming limit",
        "The update takes {} of the time of a plain loop over the same bytes. Memory bandwidth bounds it, not "
        "arithmetic.",
    ),
    Meaning(
        "memory",
        "host memory a parameter: offload-core / DeepSpeed",
        "It needs {} of the host memory that DeepSpeed needs, so a larger model fits the same machine.",
    ),
)


def found(records: Records, part: str, name: str) -> Record | None:
    """A ratio of a part by its name."""
    return next((ratio for ratio in records.get(part, {"ratios": []})["ratios"] if ratio["name"] == name), None)


def meanings(records: Records, on_a_gpu: bool = False) -> list[str]:
    """Return the sentences of :data:`MEANINGS`, and one on GPUs."""
    known = [(each, found(records, each.part, each.ratio)) for each in MEANINGS]
    said = [f"- {each.sentence.format(number(ratio['p50']))}" for each, ratio in known if ratio]
    return [
        *said,
        "- On a GPU copies over the link come on top, unless compute hides them"
        f"{': [steps on a GPU](#on-a-gpu)' if on_a_gpu else ''}. `python -m offload_core plan` "
        "estimates a step of your machine, and `make bench` measures it.",
        "- Not everything went as we wanted: [the last section](#targets-missed) lists the targets that were missed.",
    ]


def part_lines(part: str, record: Record, whole: bool, pictures: Sequence[Path] = ()) -> list[str]:
    """A part's section. If not ``whole``, rows are left out where there are ratios, and so are nested settings."""
    about = f"{ABOUT[part]} " if part in ABOUT else ""
    if whole:  # a report beside the results, while these links are those of a page in docs/
        about = about.replace("](", "](../../docs/")
    known = settings(record["config"])
    lines = ["", f"## {record['title']}", "", f"{about}(`python -m {module_of(part)}`{f'; {known}' if known else ''})"]
    if record["ratios"]:
        lines += ["", *table(["", "ratio", "target", ""], ratio_lines(record["ratios"]))]
    for picture in pictures:
        lines += ["", f"![{record['title']}](../{picture.relative_to(ROOT)})"]
    if record["rows"] and (whole or not record["ratios"]):
        lines += ["", *row_table(record)]
    notes = remarks(record)
    if notes and not whole and any(missed_by(ratio) for ratio in record["ratios"]):
        notes = [note for note in notes if not note.startswith(tuple(f"- {r['name']}" for r in record["ratios"]))]
    if notes:
        lines += ["", *notes]
    nested = {key: value for key, value in record["config"].items() if isinstance(value, dict)}
    for key, value in nested.items() if whole else ():
        lines += ["", f"{key}:", "", "```json", json.dumps(value, indent=1), "```"]
    return lines


def missed(records: Records) -> list[str]:
    """The targets that were missed, a line each."""
    over = [(record, ratio) for record in records.values() for ratio in record["ratios"] if missed_by(ratio)]
    lines = ["", "## Targets missed", ""]
    if not over:
        return [*lines, "None."]
    rows = []
    for record, ratio in over:
        reached = ratio["p20"] <= ratio["target"] <= ratio["p80"]
        why = ratio.get("note") or ("the target lies within the spread" if reached else "")
        what = f"[{record['title']}](#{anchor(record['title'])}): {ratio['name']}"
        beyond = f"missed by {100 * missed_by(ratio):.0f} %"
        rows.append([what, spread(ratio), bound(ratio), ": ".join(filter(None, [beyond, why]))])
    return [*lines, *table(["what", "measured", "wanted", "how far"], rows)]


FORMATS = "- States may take fewer bytes: [formats](formats.md) has losses, curves of training and times of the update."


def document(
    records: Records,
    rest: str | None = None,
    beside_it: str = "",
    gpu: Sequence[str] = (),
    pictures: Mapping[str, Sequence[Path]] = MappingProxyType({}),
) -> str:
    """Return the complete report; or without the rows and settings, which are at ``rest``.

    Args:
        pictures: the pictures of each part; links lead to them from a page in docs/.
    """
    parts = [*(part for part in ABOUT if part in records), *(part for part in records if part not in ABOUT)]
    on_a_gpu = bool(gpu) and list(gpu) != [NOT_ON_GPU]
    but = "all but [those on a GPU](#on-a-gpu)" if on_a_gpu else "all"
    lines = [
        "# Performance",
        "",
        "Training steps, updates and memory, measured beside the libraries that do the same. A step is forward, "
        f"backward and update; {but} ran on the processors of one machine:",
        "",
        section(records, page=""),
        "In words:",
        "",
        *meanings(records, on_a_gpu),
        *([FORMATS] if rest else []),
        "",
        "## How to read the figures",
        "",
        *where(records),
        "",
        *how(records),
    ]
    if rest:
        said = "has every row behind these ratios, and all settings. `make docs` builds this page with pictures."
        lines += ["", f"`{rest}` {said}"]
    if gpu:
        lines += ["", "## On a GPU", "", *gpu]
    for part in parts:
        lines += part_lines(part, records[part], rest is None, pictures.get(part, ()))
    if beside_it:
        lines += ["", "## Two runs beside each other", "", beside_it.rstrip()]
    return "\n".join([*lines, *missed(records)]) + "\n"


def performance(
    path: Path,
    before: Path | None,
    gpu: Path | None = None,
    pictures: Mapping[str, Sequence[Path]] = MappingProxyType({}),
) -> str:
    """Return ``docs/performance.md``: this run, a comparison with the run ``before`` it, and the results on an
    accelerator."""
    source = f"<!-- written by: python -m bench.report --write; from bench/results/{path.name} -->\n"
    rest = f"bench/results/{path.stem}.md"
    every = "" if gpu is None else f"\nEvery row: `bench/results/{gpu.stem}.md`."
    compared = "" if before is None else beside(before, path)
    return source + document(read(path), rest, compared, on_gpu(gpu, every), pictures)


def illustrated() -> str:
    """Draw the pictures of the newest whole run, and return ``docs/performance.md`` with links to them."""
    *_, before, newest = whole_runs(RESULTS, PARTS)
    pictures = plots.draw(read(newest), PICTURES / newest.stem)
    return performance(newest, before, newest_on_gpu(RESULTS), pictures)


NOT_ON_GPU = "On a GPU nothing has been measured yet: `bench/on_gpu.sh` does it where there is one."


def on_gpu(path: Path | None, rest: str = "") -> list[str]:
    """Return lines on the results on an accelerator, or one that says that there are none. Without a ``rest`` they are
    the shortest."""
    if path is None:
        return [NOT_ON_GPU]
    in_short = not rest
    records = figures.shown(read(path), in_short)
    return [*figures.figures(records, in_short), "", *where(records), *([rest] if rest else [])]


def is_on_gpu(records: Records) -> bool:
    return any("measurement" in record for record in records.values())


def newest_on_gpu(folder: Path) -> Path | None:
    """The newest results of ``bench/on_gpu.sh``; those of a rehearsal are none."""
    runs = []
    for path in folder.glob("*.jsonl"):
        known = [line for line in results.lines(path) if "measurement" in line and not line["rehearsal"]]
        runs += [(max(line["date"] for line in known), path)] if known else []
    return max(runs, default=(None, None))[1]


def measured(readme: str, path: Path, gpu: Path | None = None) -> str:
    """The README with this run's figures between its marks."""
    known = "\n".join([section(read(path)), *on_gpu(gpu), ""])
    head, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ReportError(f"README.md: expected the marks {BEGIN.strip()} and {END.strip()}; the figures go between")
    return head + begin + known + end + after


def compare(one: Records, other: Records) -> list[tuple[str, Record, Record | None, str]]:
    """Return the :func:`agreement` of each :func:`printed` ratio of either run."""

    def named(record: Record, ratios: list[Record]) -> dict[str, Record]:
        return {f"{record['title']}: {ratio['name']}": ratio for ratio in ratios}

    names = [name for run in (one, other) for record in run.values() for name in named(record, printed(record))]
    first, second = (
        {name: ratio for record in run.values() for name, ratio in named(record, record["ratios"]).items()}
        for run in (one, other)
    )
    lines = []
    for name in dict.fromkeys(names):
        a, b = first.get(name), second.get(name)
        if a is None or b is None:
            lines.append((name, a or b, None, DIFFER))
        else:
            lines.append((name, a, b, agreement(a, b)))
    return lines


CLOSE, OVERLAP, DIFFER = "close", "overlap", "DIFFER"


def agreement(a: Record, b: Record) -> str:
    """``CLOSE`` if each median lies within the other's 20th to 80th percentile, or they differ by at most
    :data:`RESOLUTION`; ``OVERLAP`` where these intervals do."""
    within = a["p20"] <= b["p50"] <= a["p80"] and b["p20"] <= a["p50"] <= b["p80"]
    if within or abs(a["p50"] / b["p50"] - 1) <= RESOLUTION:
        return CLOSE
    return OVERLAP if max(a["p20"], b["p20"]) <= min(a["p80"], b["p80"]) else DIFFER


def agreements(lines: list[tuple[str, Record, Record | None, str]]) -> str:
    """Return a sentence on the number of ratios that agree."""
    close, overlap = (sum(agree in known for *_, agree in lines) for known in ((CLOSE,), (CLOSE, OVERLAP)))
    return (
        f"{overlap} agree: their 20th to 80th percentiles overlap, or their medians differ by at most "
        f"{RESOLUTION:.0%}. {close} of these agree closely: each median lies within the other's percentiles, or within "
        f"{RESOLUTION:.0%} of it"
    )


WHY = {
    "all-xeon-2core-2026-11-30-fd842ed": (
        "The machine is another one, with a processor of the same maker, and most of what changed comes with it: the "
        "tree of November 22, measured on this machine by one repetition of the step of 319 M parameters, was 1.66 "
        "(1.59 to 1.84) times as fast as DeepSpeed, and this tree 1.75 (1.66 to 1.82). In stage 3 they were 2.47 (2.25 "
        "to 2.48) and 1.95 (1.86 to 1.98) times as fast as DeepSpeed's stage 3; that is not explained by the machine, "
        "and has not been profiled. The norm takes less of the update's time because the update takes more here."
    ),
}
"""What is known of the reasons why a run's figures are not those of the run before, by the name of its file."""


def beside(before: Path, path: Path) -> str:
    """Return the section on a run's printed ratios that the run before does not confirm closely."""
    records = read(path)
    names = {f"{record['title']}: {ratio['name']}" for record in records.values() for ratio in printed(record)}
    lines = [line for line in compare(read(before), records) if line[0] in names and line[2] is not None]
    rest = [(name, a, b, agree) for name, a, b, agree in lines if b and agree != CLOSE]
    where = f"[the run before](../bench/results/{before.name})"
    said = [
        f"This run and {where} share {len(lines)} ratios. Of these, {agreements(lines)}."
        f"{' The others:' if rest else ''}"
    ]
    if rest:
        rows = ([name, spread(a), spread(b), agree] for name, a, b, agree in rest)
        said += ["", *table(["", "the run before", "this run", ""], rows)]
    said += ["", WHY[path.stem]] if path.stem in WHY else []
    return "\n".join(said) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__.splitlines()[0])
    parser.add_argument(
        "results", nargs="*", type=Path, help="one: report; two: compare (default: the newest whole run)"
    )
    parser.add_argument("--write", action="store_true", help="also write README's figures and docs/performance.md")
    args = parser.parse_args(arguments)
    if len(args.results) > 2 or (args.write and len(args.results) > 1):
        parser.error(f"got {len(args.results)} files, expected one to report on, or two to compare")
    try:
        return compared(*args.results) if len(args.results) == 2 else reported(args.results, args.write)
    except (OSError, ReportError) as error:
        parser.error(str(error))


def compared(one: Path, other: Path) -> int:
    lines = compare(read(one), read(other))
    for name, a, b, agree in lines:
        what = f"{spread(a)} and {spread(b)}" if b is not None else f"{spread(a)}, in one run only"
        print(f"{agree:8}{name}: {what}")
    print(f"{len(lines)} ratios: {agreements(lines)}")
    return 1 if any(agree == DIFFER for *_, agree in lines) else 0


def gpu_document(records: Records) -> str:
    """Return the document of all measurements on an accelerator."""
    lines = ["# On an accelerator", "", *figures.figures(records), "", *where(records)]
    for record in records.values():
        lines += part_lines(record["bench"], record, whole=True)
    return "\n".join(lines) + "\n"


def reported(given: list[Path], write: bool) -> int:
    runs, gpu = whole_runs(RESULTS, PARTS), newest_on_gpu(RESULTS)
    if given and is_on_gpu(read(given[0])):
        path, given = given[0], []
        path.with_suffix(".md").write_text(gpu_document(read(path)))
        print(path.with_suffix(".md"))
        if not write:
            return 0
    if not (given or runs):
        raise ReportError(f"{RESULTS}: no results of all of {', '.join(PARTS)}; make bench writes them")
    path = given[0] if given else runs[-1]
    records = read(path)
    try:
        plots.draw(records, PICTURES / path.stem)
        print(PICTURES / path.stem)
    except ImportError as error:
        print(f"no pictures: {error}", file=sys.stderr)
    path.with_suffix(".md").write_text(document(records))
    print(path.with_suffix(".md"))
    if write:
        earlier = runs[: runs.index(path.resolve())] if path.resolve() in runs else []
        README.write_text(measured(README.read_text(), path, gpu))
        PERFORMANCE.write_text(performance(path, earlier[-1] if earlier else None, gpu))
        print(README, PERFORMANCE, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
