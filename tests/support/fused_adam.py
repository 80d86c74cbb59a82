"""torch's fused optimizers, with which tests compare, have the bits of docs/numerics.md where torch's vectors have
FMA: on x86 with AVX2. Elsewhere torch rounds products and sums apart, and tests compare with the definition.
"""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
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
    """Have torch's fused optimizers compute what ``oracles.update`` does, in this process."""
    import torch

    torch._fused_adamw_ = by_definition(torch._fused_adamw_, adam("adamw"))
    torch._fused_adam_ = by_definition(torch._fused_adam_, adam("adam"))
    torch._fused_sgd_ = by_definition(torch._fused_sgd_, sgd)
    torch._fused_adagrad_ = by_definition(torch._fused_adagrad_, adagrad)
    if hasattr(torch.optim, "Muon"):
        torch.optim._muon.muon = muon


def muon(params: Any, grads: Any, momenta: Any, **given: Any) -> None:
    """Muon's steps in place of ``torch.optim._muon.muon``. The iteration is torch's."""
    import torch

    from tests.support import oracles

    iteration = {name: given[name] for name in ("ns_coefficients", "ns_steps", "eps")}
    for param, grad, momentum in zip(params, grads, momenta, strict=True):
        named = {name: float(given[name]) for name in ("lr", "momentum", "weight_decay")}
        adjustment = torch.optim._muon._adjust_lr(1.0, given["adjust_lr_fn"], param.shape)
        own = {**named, "nesterov": given["nesterov"], "adjustment": adjustment}
        p, g, m = (tensor.detach().numpy() for tensor in (param, grad, momentum))
        direction, _ = oracles.MuonDirection(**own).arrays(g, p, (m,), "")
        made = torch.optim._muon._zeropower_via_newtonschulz(torch.from_numpy(direction), **iteration)
        p, (m, _) = oracles.Muon(**own).arrays(g, p, (m, made.float().numpy()), "")
        param.detach().copy_(torch.from_numpy(p))
        momentum.copy_(torch.from_numpy(m))


StepOf = Callable[[Mapping[str, Any], Sequence[Any], int], Any]
"""A parameter's step, of the keywords and the lists that torch's function is given, and the parameter's number."""


def adam(mode: str) -> StepOf:
    """Adam's step: its last list has the numbers of updates."""

    def step_of(given: Mapping[str, Any], lists: Sequence[Any], i: int) -> Any:
        from tests.support import oracles

        named = {name: float(given[name]) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")}
        return oracles.Adam(**named, step=int(lists[-1][i]), mode=mode)

    return step_of


def sgd(given: Mapping[str, Any], lists: Sequence[Any], i: int) -> Any:
    """SGD's step: torch says whether it is a parameter's first one."""
    from tests.support import oracles

    named = {name: float(given[name]) for name in ("lr", "momentum", "dampening", "weight_decay")}
    return oracles.Sgd(**named, nesterov=given["nesterov"], step=1 if given["is_first_step"] else 2)


def adagrad(given: Mapping[str, Any], lists: Sequence[Any], i: int) -> Any:
    """Adagrad's step: its last list has the numbers of updates."""
    from tests.support import oracles

    named = {name: float(given[name]) for name in ("lr", "lr_decay", "weight_decay", "eps")}
    return oracles.Adagrad(**named, step=int(lists[-1][i]))


def by_definition(torchs: Callable[..., None], step_of: StepOf) -> Callable[..., None]:
    def update(params: Sequence[Any], grads: Any, *lists: Any, **given: Any) -> None:
        import torch

        from tests.support import kernel_calls, oracles

        here = all(p.device.type in ("cpu", "simulated") and p.dtype is torch.float32 for p in params)
        if not here or given.get("amsgrad"):
            return torchs(params, grads, *lists, **given)
        if given["found_inf"] is not None and given["found_inf"]:
            return None
        for i, (p, grad) in enumerate(zip(params, grads, strict=True)):
            if given["grad_scale"] is not None:
                grad.div_(given["grad_scale"])
            step = step_of(given, lists, i)
            moments = [each[i] for each in lists[: step.n_moments]]
            tensors = (-grad if given["maximize"] else grad, p, *moments)
            g, master, *before = (t.detach().cpu().numpy() for t in tensors)
            state = kernel_calls.State(g, master, tuple(before))
            after = oracles.update(state, step, rule=f"{step.family}_torch", param_dtype=None)
            for tensor, array in zip(tensors[1:], (after.master, *after.moments), strict=True):
                tensor.copy_(torch.from_numpy(array.reshape(tensor.shape)))
        return None

    return update
