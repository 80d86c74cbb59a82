"""The ends of what was started: copies, exchanges, updates."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from .trace import Span, Trace


class Event(Protocol):
    """The end of something that was started."""

    def wait(self) -> None:
        """Block until it is done; raise what went wrong."""

    def order(self) -> None:
        """See to it that what this thread asks of the device from now on comes after; may block, need not."""

    def done(self) -> bool:
        """Whether it is known to be done; never blocks."""


class Done:
    """The event of what was done at once."""

    def wait(self) -> None:
        pass

    def order(self) -> None:
        pass

    def done(self) -> bool:
        return True


class Waiting:
    """The event of what is done by the one who waits for it."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def wait(self) -> None:
        self._finish()

    def order(self) -> None:
        self._finish()

    def done(self) -> bool:
        return False


class AfterAll:
    """The event of several."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events

    def wait(self) -> None:
        for event in self._events:
            event.wait()

    def order(self) -> None:
        for event in self._events:
            event.order()

    def done(self) -> bool:
        return all(event.done() for event in self._events)


class _Watched:
    """An event that is noted in a trace when it has been waited for."""

    def __init__(self, event: Event, note: Callable[[], None]) -> None:
        self._event = event
        self._note = note

    def wait(self) -> None:
        self._event.wait()
        self._note()

    def order(self) -> None:
        self._event.order()

    def done(self) -> bool:
        return self._event.done()


def traced(trace: Trace, lane: str, bucket: int, n_bytes: int, start: Callable[[], Event]) -> Event:
    """Start a copy, and have the trace note when it ran: as its event knows (``ran``, nanoseconds), or as seen."""
    if not trace.on:
        return start()
    asked = time.perf_counter_ns()
    event = start()

    def note() -> None:
        began, ended = getattr(event, "ran", None) or (max(asked, trace.end_of(lane)), time.perf_counter_ns())
        trace.note(Span(lane, "", bucket, n_bytes, began, ended))

    if isinstance(event, Done):
        note()
        return event
    return _Watched(event, note)
