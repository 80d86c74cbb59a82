"""Checks of values that users give."""

import difflib
import math
import operator
from collections.abc import Collection, Sequence
from typing import Any

from ..errors import ConfigError

LARGEST = 2**62
"""The largest count that a user may ask for: sums of a few of them still fit in 64 bits."""
_SHOWN = 500


def shown(value: object) -> str:
    """A value as an error shows it: its ``repr``, cut short, or its type if that has several lines or an address.

    It may be a number of thousands of digits, which Python refuses to write, or nested so deep that its ``repr`` fails.
    """
    try:
        text = repr(value)
    except Exception:
        text = f"{kind_of(value)} that is too large to be shown"
    if "\n" in text or " at 0x" in text:
        text = kind_of(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def kind_of(value: object) -> str:
    """The type of a value with its article: ``an int``, ``a list``; None is None."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def named(key: object) -> str:
    """A key as an error names it: a string as it is, a longer one cut short."""
    return shown(key) if not isinstance(key, str) or len(key) > _SHOWN else key


def number(
    name: str,
    value: object,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
) -> None:
    """Raise :class:`ConfigError` unless ``value`` is a finite number within the bounds."""
    try:
        if isinstance(value, str | bool):
            raise TypeError
        converted = float(value)  # type: ignore[arg-type]
    except Exception:  # 10**400 overflows, an array of several elements raises its library's own error
        raise ConfigError(f"{name}: got {shown(value)}, expected a number") from None
    if not (math.isfinite(converted) and least <= converted <= most and above < converted < below):
        bounds = [
            f">= {least:g}" * (least > -math.inf),
            f"> {above:g}" * (above > -math.inf),
            f"<= {most:g}" * (most < math.inf),
            f"< {below:g}" * (below < math.inf),
        ]
        raise ConfigError(
            f"{name}: got {shown(value)}, expected a finite number {' and '.join(b for b in bounds if b)}"
        )


def integer(name: str, value: object, *, least: int = 1, most: int = LARGEST) -> None:
    """Raise :class:`ConfigError` unless ``value`` is an integer from ``least`` to ``most``."""
    try:
        converted = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except Exception:
        converted = None
    if converted is None or converted < least:
        raise ConfigError(f"{name}: got {shown(value)}, expected an integer of at least {least}")
    if converted > most:
        raise ConfigError(f"{name}: got {shown(value)}, expected an integer of at most {most}")


def boolean(name: str, value: object) -> None:
    """Raise :class:`ConfigError` unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: got {shown(value)}, expected True or False")


def choice(name: str, value: object, choices: Collection[object]) -> None:
    """Raise :class:`ConfigError` unless ``value`` is one of ``choices``."""
    if not is_in(value, choices):
        raise ConfigError(f"{name}: got {shown(value)}, expected one of {', '.join(map(repr, choices))}")


def is_in(value: object, choices: Collection[object]) -> bool:
    """True if a value of any type is one of ``choices``."""
    try:
        return bool(value in choices)
    except Exception:  # an array is compared element by element; a list is not hashable
        return False


def nearest(name: object, known: Collection[str], also: Collection[str] = ()) -> str:
    """The hint for an unknown name: the nearest known one, else all of ``known``. Names in ``also`` count only if
    near."""
    near = difflib.get_close_matches(name if isinstance(name, str) else shown(name), [*known, *also], n=1)
    return f"did you mean {near[0]!r}?" if near else f"known ones: {', '.join(known)}"


def some_of(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many others there are: one other is named."""
    most += len(names) == most + 1
    rest = len(names) - most
    return ", ".join(map(repr, names[:most])) + (f" and {rest} others" if rest > 0 else "")


def checked_count(value: Any) -> int:
    """Return a number of updates as an int, from an int, a float or a one-element array: a whole number, at least 0.

    Raises:
        ValueError, TypeError, OverflowError: ``value`` is not such a number.
    """
    number = float(value)
    if not 0 <= number <= LARGEST or number != int(number):
        raise ValueError(f"got {shown(value)}, expected a number of updates")
    return int(number)
