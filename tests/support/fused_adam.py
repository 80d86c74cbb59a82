"""``torch.optim.AdamW(fused=True)``, with which tests compare, has the bits of docs/numerics.md where torch's vectors
have FMA: on x86 with AVX2. Elsewhere torch rounds products and sums apart, and tests compare with the definition.
"""

import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def rounds_apart() -> bool:
    """True if torch's vectors have no FMA here. This does not import torch."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    cpuinfo = Path("/proc/cpuinfo")
    lacks_avx2 = cpuinfo.exists() and "avx2" not in cpuinfo.read_text().split()
    return lacks_avx2 or os.environ.get("ATEN_CPU_CAPABILITY") == "default"


def follow_the_definition() -> None:
    """Have torch's fused Adam and AdamW compute what ``oracles.adam`` does, in this process."""
    import torch

    torch._fused_adamw_ = by_definition(torch._fused_adamw_, "adamw")
    torch._fused_adam_ = by_definition(torch._fused_adam_, "adam")


def by_definition(torchs: Callable[..., None], adam_mode: str) -> Callable[..., None]:
    def update(params: Sequence[Any], grads: Any, exp_avgs: Any, exp_avg_sqs: Any, *rest: Any, **given: Any) -> None:
        import torch

        from tests.support import kernel_calls, oracles

        here = all(p.device.type in ("cpu", "simulated") and p.dtype is torch.float32 for p in params)
        if not here or given["amsgrad"]:
            return torchs(params, grads, exp_avgs, exp_avg_sqs, *rest, **given)
        if given["found_inf"] is not None and given["found_inf"]:
            return None
        for p, grad, exp_avg, exp_avg_sq, step in zip(params, grads, exp_avgs, exp_avg_sqs, rest[-1], strict=True):
            if given["grad_scale"] is not None:
                grad.div_(given["grad_scale"])
            tensors = (-grad if given["maximize"] else grad, p, exp_avg, exp_avg_sq)
            state = kernel_calls.AdamState(*(t.detach().cpu().numpy() for t in tensors))
            named = {name: float(given[name]) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")}
            hyper = oracles.Hyper(**named, step=int(step))
            after = oracles.adam(state, hyper, op_order="torch", adam_mode=adam_mode, param_dtype=None)
            for tensor, array in zip(tensors[1:], (after.master, after.exp_avg, after.exp_avg_sq), strict=True):
                tensor.copy_(torch.from_numpy(array.reshape(tensor.shape)))
        return None

    return update
