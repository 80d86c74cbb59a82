"""A progress bar for a run."""

import sys
from collections.abc import Mapping

from ..memory.host_memory import format_bytes
from ..support.optional import library
from .writer import Value, Writer

_SHOWN = ("loss", "tokens_per_second", "mfu", "device_bytes", "host_bytes")


class ProgressBar(Writer):
    """A bar on the terminal, by tqdm; if the output is a file, a line now and then.

    Args:
        total: updates of the whole run; a continued run begins at its checkpoint's.
        show: names of values to show beside the bar, if a record has them. Values whose names end in ``_bytes`` are
            shown in GiB, and ``tokens_per_second`` as ``tokens/s``. The bar itself shows the time that is left.
    """

    def __init__(self, total: int, show: tuple[str, ...] = _SHOWN) -> None:
        self._total = total
        self._show = (*show, "skipped")
        self._begun = False

    def open(self, rank: int | None) -> None:
        tqdm = library("tqdm", "log", "ProgressBar").tqdm
        often = {"mininterval": 0.2} if sys.stderr.isatty() else {"mininterval": 10.0, "ascii": True}
        self._bar = tqdm(total=self._total, unit="step", dynamic_ncols=True, position=rank, **often)

    def write(self, step: int, record: Mapping[str, Value]) -> None:
        bar = self._bar
        if not self._begun or step < bar.n:
            self._begun = True
            bar.initial = bar.n = bar.last_print_n = step - 1
        shown = ((name, record.get(name)) for name in self._show)
        text = ", ".join(_shown(name, value) for name, value in shown if value is not None)
        bar.set_postfix_str(text, refresh=False)
        bar.update(step - bar.n)

    def close(self) -> None:
        self._bar.close()


def _shown(name: str, value: float | str) -> str:
    """``("device_bytes", 2**34)`` as ``"device 16.0 GiB"``, ``("loss", 2.34567)`` as ``"loss 2.346"``."""
    if name.endswith("_bytes") and not isinstance(value, str):
        return f"{name.removesuffix('_bytes').replace('_', ' ')} {format_bytes(value)}"
    return f"{name.replace('_per_second', '/s')} {value if isinstance(value, str) else _short(value)}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
