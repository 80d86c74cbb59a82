"""Warnings that point at the line of the user's program that they are about."""

import sys
import warnings
from typing import Any, NamedTuple, Self

_OWN = ("offload_core", "frontends", "contextlib")
"""Packages whose lines are not the user's. A context manager of this package is called by ``contextlib``."""


class UserLine(NamedTuple):
    """A line of a program that uses this package."""

    filename: str
    number: int
    module: str
    registry: dict[Any, Any]
    """The module's ``__warningregistry__``, by which Python avoids to repeat a warning."""

    @classmethod
    def now(cls, *besides: str) -> Self:
        """The innermost line of this thread's stack that is outside this package, and outside those ``besides``."""
        frame, skipped = sys._getframe(1), (*_OWN, *besides)
        while frame.f_globals.get("__name__", "").partition(".")[0] in skipped and frame.f_back is not None:
            frame = frame.f_back
        names = frame.f_globals
        registry = names.setdefault("__warningregistry__", {})
        return cls(frame.f_code.co_filename, frame.f_lineno, names.get("__name__", "<unknown>"), registry)

    def warn(self, warning: Warning) -> None:
        """Issue the warning for this line; from any thread, at any time."""
        warnings.warn_explicit(warning, None, self.filename, self.number, self.module, self.registry)
