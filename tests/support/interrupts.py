"""An interrupt at each line of the project's code in turn, raised as Ctrl-C is: in the main thread, between lines."""

import gc
import linecache
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offload_core.errors import StateError

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = tuple(f"{ROOT / name}/" for name in ("offload_core", "frontends"))
SIMULATED = f"{ROOT / 'offload_core' / 'testing'}/"
"""Devices made of threads: their locks are the hardware's, which nobody interrupts."""


class Interrupt(KeyboardInterrupt):
    """Ours, and not that of somebody who wants the tests to stop."""


def lines_of(act: Callable[[], object]) -> int:
    """Return the number of lines of the project that the main thread runs in an act."""
    return len(_run(act, -1))


def numbers_of(act: Callable[[], object], of: str) -> list[int]:
    """The numbers of the lines of an act: of the ``"first pass"`` of each, or of ``"each pass"``."""
    return sorted(first_passes(act).values()) if of == "first pass" else [*range(lines_of(act))]


def first_passes(act: Callable[[], object], also: tuple[str, ...] = ()) -> dict[str, int]:
    """Each line of the project, and of the files ``also``, that the main thread runs in an act, and the number of its
    first pass. Lines of ``also`` count once for each line of the project that calls them."""
    found: dict[str, int] = {}
    for number, place in enumerate(own := _run(act, -1, also=also)):
        caller = next((other for other in reversed(own[:number]) if other.startswith(PACKAGES)), "")
        found.setdefault(place if place.startswith(PACKAGES) else f"{place} of {caller}", number)
    return found


class FewerLines(AssertionError):
    """The act has ended before that line: how many it takes depends on the threads a little."""


def interrupt_at(number: int, act: Callable[[], object], also: tuple[str, ...] = ()) -> None:
    """Act, and raise :class:`Interrupt` before that line (counted from 0); it must come out of the act.

    Args:
        also: files whose lines count, besides the project's.
    """
    try:
        n_lines = len(_run(act, number, also=also))
    except Interrupt:
        return
    if n_lines <= number:
        raise FewerLines(f"no line {number}, of {n_lines}")
    raise AssertionError(f"the interrupt before line {number} was lost")


def handled_at_each_line(act: Callable[[], object], handler: Callable[[str], object]) -> None:
    """Act, and call the handler before the first pass of each line, with its place, as a signal's is called."""
    places = set()

    def handle(place: str) -> None:
        if place not in places:
            places.add(place)
            handler(place)

    _run(act, -1, handle)


def interrupt_before(line: str, act: Callable[[], object]) -> bool:
    """Act, and raise :class:`Interrupt` before the first pass of a line (a key of :func:`first_passes`), however many
    lines came before it; False if it never comes."""

    def interrupt(place: str) -> None:
        if place == line:
            raise Interrupt(line)

    try:
        handled_at_each_line(act, interrupt)
    except Interrupt:
        return True
    return False


def read_at_each_line(read: Callable[[], Any], act: Callable[[], object], allowed: list[Any]) -> tuple[set, list]:
    """Act, and read in a handler at each line: the numbers of the allowed values that it found, and its errors."""
    seen, refused = set(), []

    def handler(place: str) -> None:
        try:
            found = read()
        except StateError as error:
            refused.append(str(error))
            return
        assert found in allowed, place
        seen.add(allowed.index(found))

    handled_at_each_line(act, handler)
    return seen, refused


class Armed:
    """Raises :class:`Interrupt` before a line of the project that comes after ``start``, wherever this thread is then.

    Lines of functions that run already are not counted. ``passed`` has the places of the lines so far.
    """

    def __init__(self, number: int | None = None) -> None:
        self.passed: list[str] = []
        self._number = number

    def start(self) -> None:
        gc.disable()
        sys.settrace(self._call)

    def stop(self) -> None:
        sys.settrace(None)
        gc.enable()

    def _call(self, frame: Any, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        return self._line if file.startswith(PACKAGES) and not file.startswith(SIMULATED) else None

    def _line(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "line" and "with " not in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
            self.passed.append(place := f"{frame.f_code.co_filename}:{frame.f_lineno}")
            if self._number is not None and len(self.passed) > self._number:
                self.stop()
                raise Interrupt(place)
        return self._line


def interrupt_at_event(number: int, act: Callable[[], object]) -> bool:
    """Act, and raise :class:`Interrupt` in the main thread at an event (a line, or the end of a function) of any Python
    code, the standard library's too; False if there are fewer."""
    left = number

    def event(frame, what, argument):
        nonlocal left
        if what in ("line", "return") and frame.f_code.co_filename != __file__:
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise Interrupt(f"{frame.f_code.co_filename}:{frame.f_lineno}, {what}")
        return event

    before = sys.gettrace()
    gc.disable()
    sys.settrace(event)
    try:
        act()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
        gc.enable()
    return False


def _run(
    act: Callable[[], object],
    number: int,
    handle: Callable[[str], object] = lambda place: None,
    also: tuple[str, ...] = (),
) -> list[str]:
    passed: list[str] = []
    entered = set()

    def ends_a_with(frame):
        """Python comes back to the line of a ``with`` at its end, where it takes no signal before ``__exit__`` runs."""
        if not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            return False
        place = (frame, frame.f_lineno)
        ends = place in entered
        entered.add(place)
        return ends

    def in_finalizer(frame):
        """Python takes a signal there, prints it and goes on: it is lost, as in a collection of garbage."""
        while frame is not None and frame.f_code is not weakref.finalize.__call__.__code__:
            frame = frame.f_back
        return frame is not None

    def line(frame, event, argument):
        if event == "line" and not ends_a_with(frame):
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            passed.append(place)
            if len(passed) > number >= 0 and not in_finalizer(frame):
                sys.settrace(None)
                raise Interrupt(place)
            handle(place)
        return line

    def call(frame, event, argument):
        file = frame.f_code.co_filename
        return line if file.startswith((*PACKAGES, *also)) and not file.startswith(SIMULATED) else None

    before = sys.gettrace()
    gc.disable()  # in a finalizer an interrupt is lost
    sys.settrace(call)
    try:
        act()
    finally:
        sys.settrace(before)
        gc.enable()
    return passed
