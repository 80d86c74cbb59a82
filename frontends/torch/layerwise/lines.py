"""A line is the forward of one micro-batch, which stops before each block and goes on when it is asked to.

Lines are greenlets: each has a stack of its own, and all run in the caller's thread, one at a time. So signals, the
current device and stream, and the locks of a thread are the caller's. What torch keeps for a thread, and a ``with`` may
change around a block, belongs to a line: :class:`ThreadState` puts it back when the line goes on.
"""

from collections.abc import Callable
from contextvars import copy_context
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from ..internals.private import pop_saved_hooks, push_saved_hooks, top_saved_hooks

_Autocast = tuple[str, bool, torch.dtype]
_cuda = torch.backends.cuda
_ATTENTION = [
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
]
"""Functions that ask for and set what ``torch.nn.attention.sdpa_kernel`` changes."""


class ThreadState:
    """Grad mode, autocast, the hooks on saved tensors, and the kernels of attention that may be taken, as they are
    now."""

    def __init__(self, device: torch.device) -> None:
        self._kinds = dict.fromkeys(("cpu", device.type))
        self._grad = torch.is_grad_enabled()
        self._autocast = self._autocast_now()
        self._cache = torch.is_autocast_cache_enabled()
        self._saved = _saved_hooks()
        self._kernels = [asks() for asks, _ in _ATTENTION]

    def _autocast_now(self) -> list[_Autocast]:
        return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in self._kinds]

    def restore(self) -> None:
        """Give the thread this state again."""
        torch.set_grad_enabled(self._grad)
        if self._autocast_now() != self._autocast:
            torch.clear_autocast_cache()
            for kind, enabled, dtype in self._autocast:
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._cache)
        for (asks, sets), enabled in zip(_ATTENTION, self._kernels, strict=True):
            if asks() != enabled:
                sets(enabled)
        self.restore_saved_hooks()

    def restore_saved_hooks(self) -> None:
        """Replace the thread's hooks on saved tensors by the hooks of this state."""
        if _saved_hooks() == self._saved:
            return
        while top_saved_hooks(False) is not None:
            pop_saved_hooks()
        for pack, unpack in reversed(self._saved):
            push_saved_hooks(pack, unpack)


def _saved_hooks() -> list[Any]:
    """Return the hooks on saved tensors, innermost first."""
    found = []
    while (top := top_saved_hooks(False)) is not None:
        found.append(top)
        pop_saved_hooks()
    for pack, unpack in reversed(found):
        push_saved_hooks(pack, unpack)
    return found


class Line:
    """The forward of one micro-batch.

    Args:
        number: the micro-batch's, from 0.
        act: runs the forward and returns its loss.
        records: what stage 3 records of a forward (``Blocks.new_line``).
        switch: ``Blocks.switch``.
    """

    def __init__(
        self,
        number: int,
        act: Callable[[], torch.Tensor],
        device: torch.device,
        records: Any,
        switch: Callable[[Any], Any],
    ) -> None:
        self.number = number
        self.records = records
        self._switch = switch
        self._device = device
        self._state: ThreadState | None = None
        self._stack = greenlet(act)
        self._stack.gr_context = copy_context()

    @property
    def runs(self) -> bool:
        """True in code of this line."""
        return getcurrent() is self._stack

    @property
    def ended(self) -> bool:
        """True if it has returned its loss, or raised an error."""
        return self._stack.dead

    def go_on(self) -> Any:
        """Begin the line, or go on where it has stopped. Return what it gives to :meth:`stop` next, or its loss."""
        return self._run(self._stack.switch)

    def stop(self, reached: Any) -> None:
        """Called in the line: stop here, and have :meth:`go_on` return ``reached``."""
        self._stack.parent.switch(reached)

    def end(self) -> None:
        """End a line that has stopped: raise ``GreenletExit`` there."""
        if self._stack and not self.ended:
            self._run(self._stack.throw)

    def _run(self, act: Callable[[], Any]) -> Any:
        outside = ThreadState(self._device)
        self._stack.parent = getcurrent()
        if self._state is not None:
            self._state.restore()
        records = self._switch(self.records)
        try:
            return act()
        finally:
            self._switch(records)
            self._state = ThreadState(self._device)
            outside.restore()
