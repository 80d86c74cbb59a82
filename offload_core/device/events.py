"""Events: the ends of copies, exchanges and updates that were started."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from .trace import Span, Trace


class Event(Protocol):
    """The end of an asynchronous operation."""

    def wait(self) -> None:  # waits
        """Block until it is done. Raise its error if it failed."""

    def order(self) -> None:  # waits
        """Make the device do later work of this thread after it. It may block, but need not."""

    def done(self) -> bool:
        """True if it is known to be done. Never blocks."""


class Done:
    """The event of an operation that is already done."""

    def wait(self) -> None:  # waits
        pass

    def order(self) -> None:  # waits
        pass

    def done(self) -> bool:
        return True


class Waiting:
    """The event of an operation that the waiting thread itself does."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish  # waits

    def wait(self) -> None:  # waits
        self._finish()

    def order(self) -> None:  # waits
        self._finish()

    def done(self) -> bool:
        return False


class AfterAll:
    """The event of several operations together."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events

    def wait(self) -> None:  # waits
        for event in self._events:
            event.wait()

    def order(self) -> None:  # waits
        for event in self._events:
            event.order()

    def done(self) -> bool:
        return all(event.done() for event in self._events)


class WaitedOnce:
    """The event of an operation for one thread, which waits for it, and others, which ask if it is :meth:`done`. It
    keeps no memory of the operation alive once it has been waited for."""

    def __init__(self, event: Event) -> None:
        self._event: Event | None = event
        self._done = False

    def wait(self) -> None:  # waits
        """As :meth:`Event.wait`."""
        if (event := self._event) is not None:
            event.wait()
            self._done, self._event = event.done(), None

    def done(self) -> bool:
        """As :meth:`Event.done`."""
        return self._done if (event := self._event) is None else event.done()


class _Watched:
    """An event that a trace notes after it was waited for."""

    def __init__(self, event: Event, note: Callable[[], None]) -> None:
        self._event = event
        self._note = note

    def wait(self) -> None:  # waits
        self._event.wait()
        self._note()

    def order(self) -> None:  # waits
        self._event.order()

    def done(self) -> bool:
        return self._event.done()


def traced(trace: Trace, lane: str, bucket: int, n_bytes: int, start: Callable[[], Event]) -> Event:
    """Start a copy, and note its times in the trace: those of the event's ``ran`` (nanoseconds), else those seen
    here."""
    if not trace.on:
        return start()
    asked = time.perf_counter_ns()
    event = start()

    def note() -> None:
        began, ended = getattr(event, "ran", None) or (max(asked, trace.end_of(lane)), time.perf_counter_ns())
        trace.record(Span(lane, "", bucket, n_bytes, began, ended))

    if isinstance(event, Done):
        note()
        return event
    return _Watched(event, note)
