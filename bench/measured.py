"""The README's first picture: steps on a GPU and the memory that they take, beside other libraries.

``python -m bench.measured`` writes ``docs/pictures/measured.svg`` from the newest results of ``bench/on_gpu.sh``.
"""

from pathlib import Path

from bench.gpu import figures
from bench.markdown import number
from bench.plots import pyplot
from bench.report import RESULTS, newest_on_gpu, read

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "measured.svg"
PART = "gpu_step"
OURS, OTHERS = "#2a6f97", "#a9a9a9"


def main() -> None:
    path = newest_on_gpu(RESULTS)
    assert path is not None, f"no results of bench/on_gpu.sh in {RESULTS}"
    record = read(path)[PART]
    windows = sorted({row["micro_batch"] for row in record["rows"] if row["metric"] == "total"})
    names = [name for name in figures.IN_SHORT if any(row["name"] == name for row in record["rows"])][::-1]
    panels = [
        (f"ms a step of {n * record['config']['context']:,} tokens", "total", {"micro_batch": n}) for n in windows
    ]
    panels.append(("GB on the GPU", "peak device memory", {"micro_batch": windows[0]}))
    plt = pyplot()
    figure, axes = plt.subplots(1, len(panels), figsize=(8.4, 1.7), sharey=True)
    for axis, (title, metric, which) in zip(axes, panels, strict=True):
        values = [figures.median(record["rows"], metric, name=name, **which) or 0.0 for name in names]
        colors = [OURS if name.startswith("offload-core") else OTHERS for name in names]
        bars = axis.barh(names, values, color=colors)
        axis.bar_label(bars, [number(value) for value in values], padding=3)
        axis.set_title(title, loc="left", fontsize=8)
        axis.set_xlim(0, 1.25 * max(values))
        axis.xaxis.set_visible(False)
        axis.spines["bottom"].set_visible(False)
    title = f"measured on one {figures.accelerator(record)}: a GPT of 1.56 billion bf16 parameters, with clipping"
    figure.suptitle(title, x=0.01, ha="left", fontsize=8)
    figure.savefig(PICTURE, metadata={"Date": None})
    print(PICTURE)


if __name__ == "__main__":
    main()
