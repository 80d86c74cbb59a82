"""State machines, each with a literal table of its transitions."""

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from ..errors import StateError

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class Named(Enum):
    """A state or an event."""

    __hash__ = object.__hash__  # in C; an enum's hash is in Python, and each gradient needs two


class StateMachine(Generic[S, E]):
    """The state of ``subject``; :meth:`on` moves it along its table."""

    def __init__(self, subject: str, start: S, table: Mapping[tuple[S, E], S]) -> None:
        self.subject = subject
        self.state = start
        self._table = table

    def on(self, event: E) -> None:
        """Move to the state after ``event``. Raise :class:`StateError`, and keep the state, if it is not allowed."""
        following = self._table.get((self.state, event))
        if following is None:
            allowed = ", ".join(repr(e.value) for (s, e) in self._table if s is self.state)
            raise StateError(
                f"{self.subject}: {event.value!r} is not allowed while its {type(self.state).__name__.lower()} "
                f"is {self.state.value!r}; expected one of {allowed}"
            )
        self.state = following
