"""``deepspeed.ops.adam``: Adam and AdamW with states in host memory."""

from collections.abc import Iterable
from typing import Any

from offload_core.errors import ConfigError

from ...optim.optimizer import OffloadedAdamW


class DeepSpeedCPUAdam(OffloadedAdamW):
    """:class:`OffloadedAdamW` with the arguments of DeepSpeed's class; ``adamw_mode=False`` is Adam with L2 decay."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad or not bias_correction:
            got = f"amsgrad={amsgrad}, bias_correction={bias_correction}"
            raise ConfigError(f"{type(self).__name__}: {got}; expected no third moment, and moments that are corrected")
        super().__init__(
            model_params,
            lr,
            betas=betas,
            eps=eps,
            weight_decay=float(weight_decay),
            adam_mode="adamw" if adamw_mode else "adam",
            state_format="fp32" if fp32_optimizer_states else "bf16",
        )


class FusedAdam(DeepSpeedCPUAdam):
    """:class:`DeepSpeedCPUAdam` with the arguments of DeepSpeed's ``FusedAdam``; states are in host memory, too."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)
