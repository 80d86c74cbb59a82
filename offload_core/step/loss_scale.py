"""Loss scaling for float16 gradients.

Micikevicius et al., "Mixed Precision Training" (ICLR 2018), section 3.2; the dynamic rule of section 4's
footnote as PyTorch and DeepSpeed apply it: halve on overflow, double after a window without one.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ..config.options import OffloadConfig
from ..dtypes import FLOAT16, ElementType
from ..support.checks import LARGEST, shown


class LossScaler:
    """A loss scale. ``scale`` applies to all backwards until the next :meth:`update`.

    Args:
        scale: the first scale.
        window: the scale doubles after this number of consecutive updates without overflow; None: the scale is fixed.
        least: the smallest scale to which an overflow can lower the scale.
        hysteresis: the number of overflows, since the scale doubled, at which the scale begins to fall. With 3, the
            first two overflows leave the scale unchanged, and each later overflow halves it.
        consecutive: True to count overflows since the last update without overflow, instead of since the scale doubled.
    """

    GROWTH = 2.0
    BACKOFF = 0.5
    MOST = 2.0**24

    def __init__(
        self, scale: float, window: int | None, *, least: float = 1.0, hysteresis: int = 1, consecutive: bool = False
    ) -> None:
        self.scale = float(scale)
        self.window = window
        self.least = float(least)
        self.hysteresis = hysteresis
        self.consecutive = consecutive
        self.good_steps = 0
        self.tolerated = hysteresis - 1
        """The number of further overflows that leave the scale unchanged."""

    @classmethod
    def of(cls, config: OffloadConfig, dtypes: Iterable[ElementType]) -> "LossScaler | None":
        """Return the loss scaler of a configuration; None: losses are not scaled.

        Args:
            dtypes: the element types of the parameters. With float16 the default is a dynamic scale.
        """
        scale = config.loss_scale
        if scale is None and FLOAT16 in dtypes:
            scale = "dynamic"
        if scale is None or scale == 1:
            return None
        if scale != "dynamic":
            return cls(float(scale), None)
        return cls(
            config.initial_loss_scale,
            config.loss_scale_window,
            least=config.min_loss_scale,
            hysteresis=config.loss_scale_hysteresis,
            consecutive=config.loss_scale_consecutive_hysteresis,
        )

    def update(self, *, overflow: bool) -> None:
        """Count one update, and change the scale.

        Args:
            overflow: True if a gradient had an inf or a NaN, so that the update was skipped.
        """
        if self.window is None:
            return
        if overflow:
            if self.tolerated:
                self.tolerated -= 1
            else:
                self.scale = min(self.scale, max(self.scale * self.BACKOFF, self.least))
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.scale = max(self.scale, min(self.scale * self.GROWTH, self.MOST))
            self.good_steps = 0
            self.tolerated = self.hysteresis - 1
        if self.consecutive:
            self.tolerated = self.hysteresis - 1

    def state_dict(self) -> dict[str, float | int]:
        return {"scale": self.scale, "good_steps": self.good_steps, "tolerated": self.tolerated}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Load a ``state_dict``. If it is not valid, raise the error of :meth:`checked` and change nothing."""
        self.scale, self.good_steps, self.tolerated = self.checked(state)

    @staticmethod
    def checked(state: Mapping[str, Any]) -> tuple[float, int, int]:
        """Return the values of a ``state_dict``: ``(scale, good_steps, tolerated)``.

        Raises:
            ValueError, KeyError, TypeError, OverflowError: ``state`` is not a valid ``state_dict``.
        """
        scale, counts = float(state["scale"]), [int(state[name]) for name in ("good_steps", "tolerated")]
        if not 0 < scale < math.inf or any(not 0 <= n <= LARGEST for n in counts):
            raise ValueError(f"expected a positive scale and two counts, got {shown(state)}")
        return scale, counts[0], counts[1]
