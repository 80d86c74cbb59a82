"""``wrap(model) -> Engine``: a module, its offloaded optimizer, accumulation and loss scaling."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from offload_core.config import OffloadConfig
from offload_core.dtypes import FLOAT16
from offload_core.errors import GradientError, ParameterError, StateError
from offload_core.loss_scale import LossScaler
from offload_core.memory_plan import MemoryReport
from offload_core.pipeline import StepReport

from .optimizer import OffloadedAdamW, cast_param
from .tensors import TORCH_DTYPES


def wrap(
    model: nn.Module,
    config: OffloadConfig | Mapping[str, Any] | None = None,
    *,
    params: Iterable[Any] | None = None,
    **overrides: Any,
) -> "Engine":
    """Put a model's optimizer states in host memory.

    Args:
        model: any module; its trainable parameters keep their identity and become ``param_dtype``.
        config: an ``OffloadConfig``, or a dict of its fields.
        params: what to train, as torch optimizers take it (tensors, named tensors or parameter groups);
            None trains every parameter that requires a gradient.
        overrides: fields of ``OffloadConfig``.

    Raises:
        ConfigError, ParameterError, StateError, HostMemoryError: before the model is changed.
    """
    return Engine(model, config, params=params, **overrides)


class Engine(nn.Module):
    """A module that trains with offloaded AdamW: ``loss = engine(batch); engine.backward(loss); engine.step()``.

    Gradients leave for the host during backward; ``p.grad`` is then a stand-in that raises when used.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OffloadConfig | Mapping[str, Any] | None = None,
        *,
        params: Iterable[Any] | None = None,
        **overrides: Any,
    ) -> None:
        super().__init__()
        if isinstance(model, Engine):
            raise StateError("wrap() of an Engine; expected a plain module: this model is wrapped already")
        if not isinstance(model, nn.Module):
            raise ParameterError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
        if params is None:
            params = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
            if not params:
                raise ParameterError(
                    f"{type(model).__name__} has no parameter that requires a gradient; expected at least one: "
                    "unfreeze what is to be trained"
                )
        self.optimizer = OffloadedAdamW(params, config=config, early_copy=True, **overrides)
        self.config = self.optimizer.config
        if self.config.target_dtype is not None:
            for param in model.parameters():
                if param.is_floating_point():  # frozen ones take part in the same products
                    cast_param(param, TORCH_DTYPES[self.config.target_dtype])
        self.optimizer.pipeline.scaler = self._make_scaler()
        self.module = model
        self._micro_steps = 0
        self._arrivals_seen = 0
        """Gradients that had arrived when ``step`` was last called."""
        self._arrivals_before = 0
        """Gradients that had arrived when the last accumulation ended."""
        self._averaged_arrivals = 0
        """Of those since, how many came through :meth:`backward`."""

    def _make_scaler(self) -> LossScaler | None:
        scale = self.config.loss_scale
        if scale is None and any(spec.dtype is FLOAT16 for spec in self.optimizer.pipeline.params):
            scale = "dynamic"
        if scale is None or scale == 1:
            return None
        if scale == "dynamic":
            return LossScaler(self.config.initial_loss_scale, self.config.loss_scale_window)
        return LossScaler(float(scale), None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward; with ``param_dtype``, floating-point tensor arguments are cast to it."""
        if self.config.target_dtype is not None:
            dtype = TORCH_DTYPES[self.config.target_dtype]
            args, kwargs = tree_map_only(
                torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs)
            )
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagate; gradients are averaged over the accumulation steps, and scaled under loss scaling.

        Raises:
            GradientError: the loss is not a tensor of one element.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
            raise GradientError(f"backward: the loss is {got}, expected a tensor of one element: take its mean or sum")
        before = self.optimizer.arrivals
        with self.optimizer.scaled_backward() as scale:
            (loss if scale is None else loss.float() * scale).backward()
        self._averaged_arrivals += self.optimizer.arrivals - before

    def step(self) -> StepReport:
        """Update at the accumulation boundary; before it, only count the micro-step.

        Raises:
            StateError: no gradient arrived since the last call.
            GradientError: averaged and summed gradients are mixed; nothing was updated.
        """
        arrived = self.optimizer.arrivals - self._arrivals_seen
        if not arrived:
            raise StateError(
                "step() without backward(): no gradient arrived since the last step(); expected "
                "engine.backward(loss) first (does the loss depend on a trained parameter?)"
            )
        since_boundary = self.optimizer.arrivals - self._arrivals_before
        if self._averaged_arrivals not in (0, since_boundary):
            raise GradientError(
                "both engine.backward(loss), which averages over the accumulation steps, and loss.backward(), which "
                "sums, were used for one update; expected one of them throughout: discard with engine.zero_grad()"
            )
        self._arrivals_seen = self.optimizer.arrivals
        steps = self.config.gradient_accumulation_steps
        if self._micro_steps + 1 < steps:
            self._micro_steps += 1
            return StepReport(updated=False, skipped="accumulating", loss_scale=self.optimizer.pipeline.loss_scale)
        self.optimizer.gradient_divisor = float(steps) if self._averaged_arrivals else 1.0
        self.optimizer.step()
        self._begin_accumulation()
        assert self.optimizer.report is not None
        return self.optimizer.report

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients, those on the host too, and begin the accumulation anew."""
        self.module.zero_grad(set_to_none=True)
        self.optimizer.zero_grad(set_to_none)
        self._begin_accumulation()

    def _begin_accumulation(self) -> None:
        self._micro_steps = 0
        self._arrivals_before = self._arrivals_seen = self.optimizer.arrivals
        self._averaged_arrivals = 0

    def memory_report(self) -> MemoryReport:
        """Planned and measured bytes, on the device and on the host."""
        return self.optimizer.memory_report()

    def close(self) -> None:
        """Let the model go: remove the hooks and free the host memory; the parameters keep their values."""
        self.optimizer.close()
