"""``deepspeed.ops.adagrad``: Adagrad with its sums in host memory."""

from collections.abc import Iterable
from typing import Any

from offload_core.errors import ConfigError

from ...optim.optimizer import OffloadedAdagrad


class DeepSpeedCPUAdagrad(OffloadedAdagrad):
    """:class:`OffloadedAdagrad` with the arguments of DeepSpeed's class."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad:
            raise ConfigError("DeepSpeedCPUAdagrad: amsgrad=True; expected False: there is no third moment")
        formats = "fp32" if fp32_optimizer_states else "bf16"
        super().__init__(model_params, lr, eps=eps, weight_decay=float(weight_decay), state_format=formats)
