"""The README's picture: the largest GPT that one GPU of 24 GB trains, with and without offload.

``python -m bench.fits`` writes ``docs/pictures/fits.svg``. Nothing is measured: the sizes are those of ``python -m
offload_core plan``, which tests hold against the memory of processes. Activations come on top.
"""

from pathlib import Path
from typing import Any

from bench.plots import pyplot
from offload_core.commands.model_shapes import gpt_of, specs_of
from offload_core.config.options import OffloadConfig
from offload_core.device.exchange_sizes import planned_device
from offload_core.dtypes import BFLOAT16
from offload_core.plans.planner import Planner
from offload_core.plans.terms import BucketTerms

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "fits.svg"
DEVICE, HOST = 24e9, 256e9
"""Bytes."""
PLAIN = 16
"""Bytes a parameter without offload: bf16 weights and gradients, fp32 master weights, two fp32 moments."""
STEPS = 12
"""The steps of the search; each halves the interval."""


def fits(numel: float, **fields: Any) -> tuple[bool, int]:
    """Return True if a GPT of about ``numel`` parameters fits, and its exact number of parameters."""
    gpt = gpt_of(round(numel))
    config = OffloadConfig(param_dtype="bfloat16", **fields)
    terms = BucketTerms(config, planned_device(1, addressable=False))
    plan = Planner(terms).plan(specs_of(gpt.shapes, BFLOAT16, config, 1))
    return not plan.missing(int(HOST), int(DEVICE), processes=1), plan.numel


def largest(**fields: Any) -> int:
    """Parameters of the largest GPT that fits."""
    low, high, found = 1e8, 1e11, 0
    for _ in range(STEPS):
        middle = (low * high) ** 0.5
        does, numel = fits(middle, **fields)
        low, high, found = (middle, high, max(found, numel)) if does else (low, middle, found)
    return found


def sizes() -> dict[str, float]:
    """Return the parameters of the largest GPT, by the way to train it."""
    return {
        "all on the GPU (AdamW, bf16)": DEVICE / PLAIN,
        "offload-core": largest(),
        'offload-core, stage=3, offload_param="cpu"': largest(stage=3, offload_param="cpu"),
    }


def main() -> None:
    plt, known = pyplot(), sizes()
    figure, axes = plt.subplots(figsize=(7.2, 1.6))
    bars = axes.barh([*known][::-1], [n / 1e9 for n in known.values()][::-1], color=["#2a6f97", "#2a6f97", "#a9a9a9"])
    axes.bar_label(bars, [f"{n / 1e9:.1f} billion" for n in known.values()][::-1], padding=3)
    title = (
        f"largest GPT on one GPU of {DEVICE / 1e9:.0f} GB and {HOST / 1e9:.0f} GB of host memory, before activations"
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=8)
    axes.set_xlim(0, 1.15 * max(known.values()) / 1e9)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})
    print(PICTURE)


if __name__ == "__main__":
    main()
