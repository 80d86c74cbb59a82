"""Waits for another thread to wait."""

import faulthandler
import tempfile
import threading
import time
from collections.abc import Callable


def until_one_is_in(*functions: Callable[..., object], thread: threading.Thread) -> None:
    """Return when a thread, whichever, is in these functions, one called by the other, or this one has ended."""
    codes = [function.__code__ for function in functions]
    with tempfile.TemporaryFile("w+") as file:
        while thread.is_alive():
            file.seek(0)
            file.truncate()
            faulthandler.dump_traceback(file)  # in C: of frames that Python code reads, some may end meanwhile
            file.seek(0)
            stacks = [_functions(stack) for stack in file.read().split("\n\n")]
            if any(all((code.co_filename, code.co_name) in stack for code in codes) for stack in stacks):
                return
            time.sleep(0.001)


def _functions(stack: str) -> set[tuple[str, str]]:
    """The file and the name of each function in a traceback by faulthandler."""
    lines = [line.strip().removeprefix('File "') for line in stack.splitlines()]
    return {(line.partition('", line ')[0], line.rpartition(" in ")[2]) for line in lines}
