"""The same training by the definition, by torch's optimizers, by FSDP2 with CPU offload and by DeepSpeed's CPU Adam."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from offload_core.prove import definition as rules
from offload_core.prove.worker import LeftOut, Place, write_arrays

from .training import Arrays, batches_of, joined, loss_of, model_of, sharded, states_of

MULTIPLE = 16
"""Torch's fused optimizers treat the last elements of a tensor otherwise, if their number is no multiple of 8."""


def backward(model: nn.Module, place: Place, step: int) -> dict[str, torch.Tensor]:
    """Torch's own backward, which sums gradients over micro-batches. Return them by name."""
    model.zero_grad()
    for tokens in batches_of(place, step):
        loss_of(model(tokens), tokens).backward()
    return {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}


def definition(place: Place) -> Arrays:
    """docs/numerics.md, operation by operation, in NumPy."""
    model, s = model_of(place), dict(place.settings)
    masters = {name: p.detach().cpu().numpy().copy() for name, p in model.named_parameters()}
    if s.get("param_dtype") == "bfloat16":
        model.bfloat16()
    kinds = ("exp_avg", "exp_avg_sq") if "betas" in s else ("momentum_buffer",)
    moments = {name: [np.zeros_like(p) for _ in kinds] for name, p in masters.items()}
    for step in range(place.first, place.last):
        grads = {name: grad.float().cpu().numpy() for name, grad in backward(model, place, step).items()}
        write_arrays(place.gradients(step), grads)
        scale = rules.clip_scale(grads.values(), len(batches_of(place, step)), s.get("gradient_clipping"))
        for name, p in model.named_parameters():
            rule = rules.adamw if "betas" in s else rules.sgd
            rule(masters[name], grads[name] * scale, moments[name], step + 1, s)
            p.data.copy_(torch.from_numpy(masters[name]))
    for name, p in model.named_parameters():
        yield f"weight/{name}", p.detach().float().cpu().numpy()
        yield f"master/{name}", masters[name]
        yield from ((f"{kind}/{name}", moment) for kind, moment in zip(kinds, moments[name], strict=True))


def torchs_adamw(place: Place) -> Arrays:
    """``torch.optim.AdamW(fused=True)`` over copies of the parameters, each padded with zeros."""
    if "AVX" not in torch.backends.cpu.get_cpu_capability():
        raise LeftOut(f"torch's vectors are {torch.backends.cpu.get_cpu_capability()} here, and round otherwise")
    model = model_of(place)

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(tensor.detach().flatten(), (0, -tensor.numel() % MULTIPLE)).cpu()

    flat = {name: nn.Parameter(padded(p)) for name, p in model.named_parameters()}
    made = torch.optim.AdamW(flat.values(), fused=True, **dict(place.settings))
    for step in range(place.first, place.last):
        for name, grad in backward(model, place, step).items():
            flat[name].grad = padded(grad)
        made.step()
        for name, p in model.named_parameters():
            p.data.copy_(flat[name].detach()[: p.numel()].view_as(p))
    for name, p in model.named_parameters():
        state = made.state[flat[name]]
        for kind, tensor in (("weight", p), ("master", p), *((k, state[k]) for k in ("exp_avg", "exp_avg_sq"))):
            yield f"{kind}/{name}", tensor.detach().flatten()[: p.numel()].view_as(p).cpu().numpy()


def torchs_whole(place: Place) -> Arrays:
    """Torch's fused AdamW over the parameters as they are."""
    return _over_parts(place, 1, lambda parts: torch.optim.AdamW(parts, fused=True, **dict(place.settings)))


def torchs_cut(place: Place) -> Arrays:
    """The same over halves of the parameters, as two ranks would have them."""
    return _over_parts(place, 2, lambda parts: torch.optim.AdamW(parts, fused=True, **dict(place.settings)))


def deepspeeds_whole(place: Place) -> Arrays:
    """DeepSpeed's Adam for the host over the parameters as they are."""
    return _over_parts(place, 1, _deepspeeds(place))


def deepspeeds_cut(place: Place) -> Arrays:
    """The same over halves."""
    return _over_parts(place, 2, _deepspeeds(place))


def _deepspeeds(place: Place) -> Callable[[Any], Any]:
    try:
        adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    except ImportError:
        raise LeftOut("needs DeepSpeed, which is not installed") from None
    return lambda parts: adam(parts, adamw_mode=True, fp32_optimizer_states=True, **dict(place.settings))


def _over_parts(place: Place, n: int, optimizer: Callable[[Any], Any]) -> Iterator[tuple[str, Any]]:
    """Train with an optimizer that is given each parameter as ``n`` separate tensors."""
    if place.device != "cpu":
        raise LeftOut("is of processors alone")
    model = model_of(place)
    parts = {name: p.detach().clone().flatten().chunk(n) for name, p in model.named_parameters()}
    parts = {name: tuple(nn.Parameter(part.clone()) for part in each) for name, each in parts.items()}
    made = optimizer([part for each in parts.values() for part in each])
    for step in range(place.first, place.last):
        for name, whole in backward(model, place, step).items():
            for part, grad in zip(parts[name], whole.flatten().chunk(n), strict=True):
                part.grad = grad.clone()
        made.step()
        for name, p in model.named_parameters():
            p.data.copy_(torch.cat([part.detach() for part in parts[name]]).view_as(p))
    for name, p in model.named_parameters():
        yield f"weight/{name}", p.detach().numpy()
        for kind in ("exp_avg", "exp_avg_sq"):
            yield f"{kind}/{name}", torch.cat([made.state[part][kind] for part in parts[name]]).numpy()


def fsdp2_alone(place: Place) -> Arrays:
    """FSDP2 with torch's optimizer, which updates shards in host memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    with joined(place):
        model = sharded(place, **({} if place.device == "cpu" else {"offload_policy": CPUOffloadPolicy()}))
        made = torch.optim.AdamW(model.parameters(), fused=True, **dict(place.settings))
        for step in range(place.first, place.last):
            backward(model, place, step)
            made.step()
        yield from states_of(made, model)
