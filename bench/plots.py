"""Pictures of a run of ``make bench``, one SVG a picture. The only importer of matplotlib, which is no dependency."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Row = dict[str, Any]

_MEASURED = ("name", "metric", "unit", "p20", "p50", "p80", "n")
_MOST_BARS = 40


def pyplot() -> Any:
    """Return matplotlib's ``pyplot``, set to draw to files, the same bytes for the same figures."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {
        "svg.hashsalt": "offload-core",
        "svg.fonttype": "none",
        "font.size": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.constrained_layout.use": True,
    }
    from matplotlib import pyplot

    return pyplot


def extras(row: Row) -> dict[str, Any]:
    """The values that tell a row from others of its name and metric."""
    return {
        key: value for key, value in row.items() if key not in _MEASURED and isinstance(value, str | int | float | bool)
    }


def draw(records: dict[str, Record], folder: Path) -> dict[str, list[Path]]:
    """Write all pictures, and return those of each part; raises ImportError without matplotlib."""
    plt = pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[str, list[Path]] = {}
    for part, record in records.items():
        if not record["rows"]:  # it could not run
            continue
        for name, picture in PICTURES.get(part, (("bars", bars), ("curves", curves))):
            figure = picture(plt, record)
            if figure is not None:
                path = folder / f"{part}-{name}.svg"
                figure.savefig(path, metadata={"Date": None})
                written.setdefault(part, []).append(path)
                plt.close(figure)
    return written


def whiskers(rows: list[Row]) -> list[list[float]]:
    """Return the distances from the median to the percentiles, down and up."""
    return [[max(sign * (row[end] - row["p50"]), 0.0) for row in rows] for end, sign in (("p20", -1), ("p80", 1))]


def by_size(plt: Any, record: Record) -> Any:
    """Nanoseconds a parameter against parameters, one panel a number of threads."""
    rows = [row for row in record["rows"] if row["metric"] in ("update", "norm") and "instruction_set" not in row]
    threads = sorted({row["threads"] for row in rows})
    names = list(dict.fromkeys(row["name"] for row in rows))
    figure, panels = plt.subplots(1, len(threads), sharey=True, figsize=(5 * len(threads), 5), squeeze=False)
    for panel, count in zip(panels[0], threads, strict=True):
        for i, name in enumerate(names):
            points = sorted(
                (r for r in rows if r["name"] == name and r["threads"] == count), key=lambda row: row["params"]
            )
            middle = [row["p50"] for row in points]
            style = {"linestyle": "--" if "limit" in name else "-", "color": plt.get_cmap("tab20")(i % 20)}
            at = [row["params"] for row in points]
            panel.errorbar(at, middle, whiskers(points), label=name, marker="o", markersize=3, capsize=2, **style)
        panel.set(xscale="log", yscale="log", xlabel="parameters", title=f"{count} thread{'s' if count > 1 else ''}")
    panels[0][0].set_ylabel("ns a parameter, median, p20 to p80")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def roofline(plt: Any, record: Record) -> Any:
    """Bytes a second of each contender beside those of the streaming limit, at the size of the ratios."""
    size = record["config"]["ratios at"]
    metrics = ("update", "norm")
    rows = [
        row
        for row in record["rows"]
        if row["metric"] in metrics and row["params"] == size and "bytes" in row and "instruction_set" not in row
    ]
    threads = sorted({row["threads"] for row in rows})
    figure, panels = plt.subplots(1, len(threads), sharey=True, figsize=(5 * len(threads), 4), squeeze=False)
    for panel, count in zip(panels[0], threads, strict=True):
        rates = {row["name"]: row["bytes"] / row["p50"] for row in rows if row["threads"] == count}
        for name, style in (("streaming limit, fp32", "-"), ("streaming limit, bf16", "--")):
            panel.axvline(rates[name], linestyle=style, color="black", linewidth=1, label=name)
        others = {name: rate for name, rate in rates.items() if "limit" not in name}
        colors = ["tab:orange" if name.startswith(("this", "norm")) else "tab:gray" for name in others]
        panel.barh(list(others), list(others.values()), color=colors)
        panel.set(
            xlabel="GB/s read and written", title=f"{size:,} parameters, {count} thread{'s' if count > 1 else ''}"
        )
    panels[0][0].invert_yaxis()  # of all panels: they share it
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def plain(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def bars(plt: Any, record: Record) -> Any:
    """A panel a metric and unit, a bar a contender from zero to its median, with its p20 to p80."""
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in record["rows"]:
        panels.setdefault((row["metric"], row["unit"]), []).append(row)
    panels = {key: rows[:_MOST_BARS] for key, rows in panels.items() if len(rows) > 1}
    if not panels:
        return None
    heights = [len(rows) + 2 for rows in panels.values()]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(9, 0.2 * sum(heights) + 0.5), squeeze=False, height_ratios=heights
    )
    for axis, ((metric, unit), rows) in zip(axes[:, 0], panels.items(), strict=True):
        alike = {key for key, value in extras(rows[0]).items() if all(row.get(key) == value for row in rows)}
        labels = []
        for row in rows:
            told = [f"{key} {plain(value)}" for key, value in extras(row).items() if key not in alike]
            labels.append(textwrap.shorten(", ".join([row["name"], *told]), 90))
        ours = [row["name"].startswith(("this", "offload-core")) for row in rows]
        at = range(len(rows))
        axis.barh(
            at,
            [row["p50"] for row in rows],
            xerr=whiskers(rows),
            color=["tab:orange" if o else "tab:gray" for o in ours],
        )
        axis.set_yticks(at, labels)
        axis.invert_yaxis()
        axis.set(title=metric, xlabel=unit)
    return figure


def curves(plt: Any, record: Record) -> Any:
    """Every row's ``curve``, a list of numbers, laid over the others of its metric and config."""
    rows = [row for row in record["rows"] if row.get("curve")]
    if not rows:
        return None
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["metric"], *extras(row).items()), []).append(row)
    figure, axes = plt.subplots(1, len(groups), figsize=(5 * len(groups), 4), squeeze=False)
    for axis, ((metric, *told), alike) in zip(axes[0], groups.items(), strict=True):
        for i, row in enumerate(alike):  # dashes of other lengths, so that equal curves can all be seen
            axis.plot(row["curve"], label=row["name"], linestyle=(3 * i, (3, 3 * (len(alike) - 1))), linewidth=2)
        axis.set(xlabel="step", ylabel=metric, title=", ".join(f"{key} {value}" for key, value in told))
        axis.legend()
    return figure


def by_share(plt: Any, record: Record) -> Any:
    """Milliseconds of an update against the share of the states that is on disk, and those of 8-bit states."""
    rows = [row for row in record["rows"] if row["metric"] == "update"]
    points = sorted((row for row in rows if "share" in row), key=lambda row: row["share"])
    if not points:
        return None
    figure, axis = plt.subplots(figsize=(5, 4))
    at = [100 * row["share"] for row in points]
    style = {"marker": "o", "markersize": 3, "capsize": 2}
    axis.errorbar(at, [row["p50"] for row in points], whiskers(points), label="fp32 states", **style)
    for row in rows:
        if row["name"].startswith("8-bit") and row["params"] == points[0]["params"]:
            axis.errorbar([100], [row["p50"]], whiskers([row]), label=row["name"], color="tab:orange", **style)
    axis.set(xlabel="states on disk, %", ylabel=f"ms, {points[0]['params'] / 1e6:,.0f} M parameters", ylim=(0, None))
    axis.legend()
    return figure


PICTURES: dict[str, tuple[tuple[str, Callable[[Any, Record], Any]], ...]] = {
    "peers": (),
    "update": (("size", by_size), ("roofline", roofline)),
    "nvme": (("share", by_share),),
}
"""The pictures of a part; other parts have bars and curves."""
