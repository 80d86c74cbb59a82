"""Saves that a signal asks for. The signal is noted at once; all ranks save after the same step."""

import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from ..errors import StateError
from ..step.pipeline import Pipeline


class SaveOnSignal(AbstractContextManager["SaveOnSignal"]):
    """Notes signals; :meth:`save`, called at the end of each turn of the training loop, saves after one came.

    A step tells all ranks whether one of them had a signal, so that all save after the same step, also if only one had
    it. Used in ``with``, or until :meth:`close`; then the signals do what they did before.

    Args:
        save: saves with these extras, and returns the checkpoint's folder.
        signals: the signals to note. Their present handlers are not called.

    Raises:
        StateError: this is not the main thread, which alone can receive signals.
    """

    def __init__(self, pipeline: Pipeline, save: Callable[[Any], Path], signals: Iterable[int]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise StateError(
                "save_on_signal() in a thread; expected it in the main thread, which alone can receive Python's signals"
            )
        self._pipeline = pipeline
        self._save = save
        self._before: dict[int, Any] = {}
        try:
            for number in dict.fromkeys(map(int, signals)):
                self._before[number] = signal.getsignal(number)  # first: an interrupt must not leave ours behind
                signal.signal(number, self._note)
        except BaseException:
            self.close()
            raise

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pipeline.save_asked = True
        before = getattr(self._before.get(number), "__self__", None)
        if isinstance(before, SaveOnSignal):  # another engine's: both save
            before._note(number, frame)

    def save(self, extras: Any = None) -> Path | None:
        """Save if a rank had a signal before the last step's update ended, and return the checkpoint's folder; else
        None.

        All ranks call it after the same steps, and all save or none does. A signal that comes later is served by a
        later call; between micro-steps it returns None.

        Args:
            extras: as in ``save_checkpoint``.

        Raises:
            CheckpointError, StateError: as ``save_checkpoint``; the next call tries again.
        """
        if not self._pipeline.save_agreed or self._pipeline.gradients.micro_steps:
            return None
        path = self._save(extras)
        self._pipeline.save_asked = self._pipeline.save_agreed = False
        return path

    def close(self) -> None:
        """Give the signals back to what received them before."""
        while self._before:
            number, before = next(reversed(self._before.items()))
            with suppress(OSError):  # a signal that nobody can receive
                signal.signal(number, signal.SIG_DFL if before is None else before)
            del self._before[number]

    def __exit__(self, *error: object) -> None:
        self.close()
