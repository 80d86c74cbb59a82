"""Sizes, counts and rates as a command line takes them."""

import argparse
import math
import re

from .checks import shown

_BYTES = {"B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _BYTES |= {_letter: 1000**_power, f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}
_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_MOST = 1e36
"""The largest size, count or rate: products of a few of them are finite floats."""
_MOST_DEVICES = 2**12
_NUMBER = re.compile(r"\s*(\d{1,3}(?:,\d{3})+|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*")


def size(text: str) -> int:
    """Bytes: ``"32GB"`` (10^9), ``"32GiB"`` (2^30). A number alone is refused: most people who give one mean GB."""
    return round(_scaled(text, _BYTES, "a size such as 32GB or 32GiB"))


def size_or_0(text: str) -> int:
    """Bytes as :func:`size`, or ``"0"``."""
    return 0 if text.strip() == "0" else size(text)


def bytes_or_share(text: str) -> int | float | str:
    """Bytes as :func:`size_or_0`, a share of all from ``"0.0"`` to ``"1.0"``, or ``"auto"``."""
    if text in ("auto", "0"):
        return text if text == "auto" else 0
    if re.fullmatch(r"0?\.\d+|1\.0*|0\.", text):
        return float(text)
    return round(_scaled(text, _BYTES, "a size such as 8GB, a share such as 0.25 or 1.0, or auto"))


def rate(text: str) -> float:
    """Bytes a second: a size, with or without ``/s``."""
    return _scaled(text.removesuffix("/s"), _BYTES, "bytes a second such as 25GB")


def count(text: str, *, least: int = 1, most: int | None = None) -> int:
    """A count: ``"10B"``, ``"124M"``, ``"7000000"``, ``"7,000,000"``."""
    bounds = f"at least {least:,}" + ("" if most is None else f", at most {most:,}")
    expected = f"a count such as 10B, 124M or {max(least, 8):,}, {bounds}"
    value = _scaled(text, _COUNTS, expected)
    if value != round(value):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}: a whole number")
    if value < least or (most is not None and value > most):
        raise argparse.ArgumentTypeError(f"got {shown(text)}, expected {expected}")
    return round(value)


def mesh(text: str) -> tuple[int, ...]:
    """The sizes of a mesh's axes: ``"8"``, ``"4x2"``."""
    sizes = text.split("x")
    if not all(re.fullmatch(r"[1-9]\d{0,5}", part) for part in sizes) or math.prod(map(int, sizes)) > _MOST_DEVICES:
        expected = f"the sizes of a mesh's axes, such as 8 or 4x2, of at most {_MOST_DEVICES:,} devices"
        raise argparse.ArgumentTypeError(f"got {shown(text)}, expected {expected}")
    return tuple(map(int, sizes))


def _scaled(text: str, units: dict[str, int], expected: str) -> float:
    match = _NUMBER.fullmatch(text)
    value = (
        float(match[1].replace(",", "")) * units[match[2].upper()] if match and match[2].upper() in units else math.nan
    )
    if not 1 <= value <= _MOST:
        raise argparse.ArgumentTypeError(f"got {shown(text)}, expected {expected}")
    return value
