"""Loss scaling for float16 gradients.

Micikevicius et al., "Mixed Precision Training" (ICLR 2018), section 3.2; the dynamic rule of section 4's
footnote as PyTorch and DeepSpeed apply it: halve on overflow, double after a window without one.
"""

from collections.abc import Iterable

from .config import OffloadConfig
from .dtypes import FLOAT16, ElementType


class LossScaler:
    """A fixed (``window=None``) or dynamic loss scale. ``scale`` holds for all backwards until the next ``update``."""

    GROWTH = 2.0
    BACKOFF = 0.5
    LEAST = 1.0
    MOST = 2.0**24

    def __init__(self, scale: float, window: int | None) -> None:
        self.scale = float(scale)
        self.window = window
        self.good_steps = 0

    def update(self, *, overflow: bool) -> None:
        """Account for one update, skipped because of an overflow or not."""
        if self.window is None:
            return
        if overflow:
            self.scale = min(self.scale, max(self.scale * self.BACKOFF, self.LEAST))
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.scale = max(self.scale, min(self.scale * self.GROWTH, self.MOST))
            self.good_steps = 0

    def state_dict(self) -> dict[str, float | int]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])


def scaler_for(config: OffloadConfig, dtypes: Iterable[ElementType]) -> LossScaler | None:
    """The loss scaler that a configuration asks for, given the parameters' element types; None for no scaling."""
    scale = config.loss_scale
    if scale is None and FLOAT16 in dtypes:
        scale = "dynamic"
    if scale is None or scale == 1:
        return None
    if scale == "dynamic":
        return LossScaler(config.initial_loss_scale, config.loss_scale_window)
    return LossScaler(float(scale), None)
