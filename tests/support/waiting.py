"""Waits for another thread to wait."""

import sys
import threading
import time
from collections.abc import Callable


def until_one_is_in(*functions: Callable[..., object], thread: threading.Thread) -> None:
    """Return when a thread, whichever, is in these functions, one called by the other, or this one has ended."""
    codes = {function.__code__ for function in functions}
    while thread.is_alive() and not any(codes <= _codes(frame) for frame in sys._current_frames().values()):
        time.sleep(0.001)


def _codes(frame):
    found = set()
    while frame is not None:
        found.add(frame.f_code)
        frame = frame.f_back
    return found
