"""The exchanges of one rank: the one that it waits for, and the last one."""

import time
from itertools import count


class _Exchange:
    """One exchange, which lasts as long as its context."""

    __slots__ = ("_of", "ended", "failed", "number", "since", "what")

    def __init__(self, of: "Exchanges", number: int, what: str) -> None:
        self._of, self.number, self.what = of, number, what
        self.since = time.monotonic()

    def __enter__(self) -> None:
        self._of._running.append(self)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.failed, self.ended = kind is not None, time.monotonic()
        self._of._last = self
        self._of._running.remove(self)

    def __str__(self) -> str:
        return f"number {self.number}, {self.what!r}"


class Exchanges:
    """Notes each exchange when it begins and when it ends. :meth:`where` only reads, and takes no lock.

    Ranks make the same exchanges in the same order. So the rank whose numbers are lowest is the one that is late.
    """

    def __init__(self) -> None:
        self._numbers = count(1)
        self._running: list[_Exchange] = []
        """More than one only where several threads exchange at once."""
        self._last: _Exchange | None = None

    def over(self, what: str) -> _Exchange:
        """Return a context around an exchange; ``what`` is its name."""
        return _Exchange(self, next(self._numbers), what)

    def where(self, awaited: str = "the other ranks") -> str:
        """Return a line for each exchange that is running, and one for the last that has ended.

        Args:
            awaited: what a running exchange waits for.
        """
        now, last = time.monotonic(), self._last
        lines = [f"exchange: {each} has waited for {awaited} for {now - each.since:.1f} s" for each in [*self._running]]
        if last is not None:
            lines.append(f"last exchange: {last} {'failed' if last.failed else 'ended'} {now - last.ended:.1f} s ago")
        return "\n".join(lines or ["exchange: none so far"])
