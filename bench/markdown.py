"""Tables and figures as the pages print them."""

import math
from collections.abc import Iterable, Mapping
from typing import Any


def number(value: Any) -> str:
    """Return a number as text: three digits, or all digits of an integer."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if math.isfinite(value) and (value == int(value) or abs(value) >= 1000):
        return f"{value:,.0f}"
    digits = f"{value:#.3g}"
    return f"{value:.2e}" if "e" in digits else digits.rstrip(".")


def spread(measured: Mapping[str, Any]) -> str:
    """The median and, where they differ from it, the 20th and 80th percentile."""
    low, middle, high = (number(measured[key]) for key in ("p20", "p50", "p80"))
    return middle if low == high == middle else f"{middle} ({low} to {high})"


def cell(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def table(head: list[str], lines: Iterable[list[Any]]) -> list[str]:
    return [f"| {' | '.join(map(cell, line))} |" for line in (head, ["---"] * len(head), *lines)]
