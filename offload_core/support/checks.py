"""Checks of values that users give."""

import difflib
import math
import operator
from collections.abc import Collection

from ..errors import ConfigError


def number(
    name: str, value: object, *, least: float = -math.inf, above: float = -math.inf, below: float = math.inf
) -> None:
    """Raise :class:`ConfigError` unless ``value`` is a finite number within the bounds."""
    try:
        if isinstance(value, str | bool):
            raise TypeError
        converted = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):  # 10**400 overflows
        raise ConfigError(f"{name}: got {value!r}, expected a number") from None
    if not (math.isfinite(converted) and converted >= least and converted > above and converted < below):
        bounds = [
            f">= {least:g}" * (least > -math.inf),
            f"> {above:g}" * (above > -math.inf),
            f"< {below:g}" * (below < math.inf),
        ]
        raise ConfigError(f"{name}: got {value!r}, expected a finite number {' and '.join(b for b in bounds if b)}")


def integer(name: str, value: object, *, least: int = 1) -> None:
    """Raise :class:`ConfigError` unless ``value`` is an integer of at least ``least``."""
    if not hasattr(value, "__index__") or isinstance(value, bool) or operator.index(value) < least:
        raise ConfigError(f"{name}: got {value!r}, expected an integer of at least {least}")


def boolean(name: str, value: object) -> None:
    """Raise :class:`ConfigError` unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: got {value!r}, expected True or False")


def choice(name: str, value: object, choices: Collection[object]) -> None:
    """Raise :class:`ConfigError` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ConfigError(f"{name}: got {value!r}, expected one of {', '.join(map(repr, choices))}")


def nearest(name: object, known: Collection[str], also: Collection[str] = ()) -> str:
    """The hint for an unknown name: the nearest known one, else all of ``known``. Names in ``also`` count only if
    near."""
    near = difflib.get_close_matches(str(name), [*known, *also], n=1)
    return f"did you mean {near[0]!r}?" if near else f"known ones: {', '.join(known)}"
