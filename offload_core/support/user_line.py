"""Warnings that point at the line of the user's program that they are about."""

import sys
import warnings
from typing import Any, NamedTuple, Self

_OWN = ("offload_core", "frontends")


class UserLine(NamedTuple):
    """A line of a program that uses this package."""

    filename: str
    number: int
    module: str
    registry: dict[Any, Any]
    """What Python has said there already: the same warning is not said twice."""

    @classmethod
    def now(cls) -> Self:
        """The one that led here, in this thread."""
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__", "").partition(".")[0] in _OWN and frame.f_back is not None:
            frame = frame.f_back
        names = frame.f_globals
        registry = names.setdefault("__warningregistry__", {})
        return cls(frame.f_code.co_filename, frame.f_lineno, names.get("__name__", "<unknown>"), registry)

    def warn(self, warning: Warning) -> None:
        """Say it, in any thread and at any time, of this line."""
        warnings.warn_explicit(warning, None, self.filename, self.number, self.module, self.registry)
