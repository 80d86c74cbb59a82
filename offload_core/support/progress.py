"""A bar for what takes long: saves, loads, exports, and building a model.

Rank 0 shows it where standard error is a terminal and tqdm is installed, after a second, and removes it at the end.
``OFFLOAD_CORE_PROGRESS=1`` in the environment shows it elsewhere, too, from the beginning, and ``0`` shows none.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .optional import library

ASK = "OFFLOAD_CORE_PROGRESS"
_DELAY_SECONDS = 1.0
"""What is done earlier shows no bar."""


@contextmanager
def progress(
    what: str, n_bytes: int | None, *, rank: int, environ: Mapping[str, str] = os.environ
) -> Iterator[Callable[[int], object]]:
    """Show a bar while the body runs. Yield a function to call with the number of bytes that were done since.

    Args:
        what: the words before the bar, such as ``"saving step-00000100"``.
        n_bytes: all bytes; None: not known, and the bar shows only what was done.
        rank: this process's rank; rank 0 shows the bar.

    Raises:
        ModuleNotFoundError: the environment asks for the bar, and tqdm is not installed.
    """
    asked = environ.get(ASK)
    bar = None if rank != 0 or asked == "0" else _bar(what, n_bytes, asked=asked == "1")
    if bar is None:
        yield lambda n: None
        return
    with bar:
        yield bar.update


def _bar(what: str, n_bytes: int | None, *, asked: bool) -> Any:
    if not asked and not (sys.stderr is not None and sys.stderr.isatty()):
        return None
    try:
        tqdm = library("tqdm", "log", f"{ASK}=1").tqdm
    except ModuleNotFoundError:
        if asked:
            raise
        return None
    units = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    delay = 0.0 if asked else _DELAY_SECONDS
    return tqdm(desc=what, total=n_bytes, leave=False, dynamic_ncols=True, delay=delay, file=sys.stderr, **units)
