"""The held-out loss of ``bench.train`` with each optimizer, five seeds each, at a learning rate found beforehand.

``python -m bench.optimizers`` searches the rates, trains, prints the table and appends to
``bench/results/optimizers.jsonl``; with ``--write`` it draws ``docs/pictures/optimizers.svg`` too. The search has a
seed of its own, which is none of the five. It tries rates three times as far apart, and goes on from the best one until
both of its neighbours are worse.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import losses
from bench.record import commit, machine
from bench.train.presets import OPTIMIZERS
from offload_core.memory.plan import format_table

RESULTS = Path(__file__).resolve().parent / "results" / "optimizers.jsonl"
PICTURE = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "optimizers.svg"
FIRST = {"adamw": 3e-3, "sgd": 1e-1, "lion": 1e-3, "adagrad": 3e-2, "muon": 1e-2}
"""The learning rate from which the search starts."""
SEED_OF_SEARCH = 100
MOST = 12
"""The most rates that a search tries."""


def near(rate: float, steps: int) -> float:
    """Return the rate so many steps up from a rate of 1 or 3 times a power of ten: 1e-3, 3e-3, 1e-2, …"""
    mantissa, exponent = f"{rate:.0e}".split("e")
    position = 2 * int(exponent) + (mantissa == "3") + steps
    return float(f"{3 if position % 2 else 1}e{position // 2}")


def search(first: float, loss_of: Callable[[float], float]) -> dict[float, float]:
    """Return the loss of each rate that was tried, the rates in order. The lowest loss has a higher one on each side,
    unless ``MOST`` were tried."""
    tried = {first: loss_of(first)}
    while len(tried) < MOST:
        best = min(tried, key=tried.__getitem__)
        new = [rate for rate in (near(best, 1), near(best, -1)) if rate not in tried]
        if not new:
            break
        tried[new[0]] = loss_of(new[0])
    return dict(sorted(tried.items()))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.optimizers", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="runs of each optimizer (default: 5)")
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="of each run (default: 400)")
    parser.add_argument("--train", default="", metavar="ARGUMENTS", help="more arguments for bench.train")
    parser.add_argument("--write", action="store_true", help=f"draw docs/pictures/{PICTURE.name}")
    args = parser.parse_args(arguments)
    more = ["--steps", str(args.steps), *args.train.split()]

    def at(optimizer: str, rate: float) -> list[str]:
        return ["--optimizer", optimizer, "--lr", str(rate)]

    searches, options = {}, {}
    for optimizer in OPTIMIZERS:

        def loss_of(rate: float, optimizer: str = optimizer) -> float:
            return losses.train(f"{optimizer} at {rate:g}", SEED_OF_SEARCH, [*at(optimizer, rate), *more]).held_out

        searches[optimizer] = found = search(FIRST[optimizer], loss_of)
        options[optimizer] = at(optimizer, min(found, key=found.__getitem__))
    runs = losses.train_all(options, args.seeds, more)
    held_out = {optimizer: [run.held_out for run in each] for optimizer, each in runs.items()}
    rates = {optimizer: arguments[-1] for optimizer, arguments in options.items()}
    rows = [
        [optimizer, rates[optimizer], f"{statistics.mean(values):.4f}", f"{losses.spread(values):.4f}"]
        for optimizer, values in held_out.items()
    ]
    print(format_table(rows, ["optimizer", "rate", "held-out loss, mean", "standard deviation"]))
    if args.write:
        losses.draw(held_out, PICTURE)
    record: dict[str, Any] = {"bench": "optimizers", "machine": machine(), "commit": commit(), "config": vars(args)}
    record |= {"settings": OPTIMIZERS, "search": searches, "rates": rates, "loss": held_out}
    with RESULTS.open("a") as out:
        out.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
