"""``deepspeed.ops.lion``: Lion with its momentum in host memory."""

from typing import Any

from ...optim.optimizer import OffloadedLion

_BETAS = (0.9, 0.999)


class DeepSpeedCPULion(OffloadedLion):
    """:class:`OffloadedLion` with the arguments of DeepSpeed's class."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: Any = _BETAS,
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        formats = "fp32" if fp32_optimizer_states else "bf16"
        super().__init__(model_params, lr, betas=betas, weight_decay=float(weight_decay), state_format=formats)


class FusedLion(DeepSpeedCPULion):
    """:class:`DeepSpeedCPULion` with the arguments of DeepSpeed's ``FusedLion``."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: Any = _BETAS, weight_decay: float = 0.0, set_grad_none: bool = True
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)
