"""On which processors torch's fused AdamW has the bits of docs/numerics.md."""

import platform

import pytest

from offload_core.native import kernels
from tests.support import fused_adam
from tests.support.processes import torch_server

STEPS = """
import torch
from frontends.torch import OffloadedAdamW

draw = torch.Generator().manual_seed(0)
ours, theirs = (torch.nn.Parameter(torch.full((1000,), 0.5)) for _ in range(2))
optimizers = OffloadedAdamW([ours], lr=1e-2), torch.optim.AdamW([theirs], lr=1e-2, fused=True)
for _ in range(3):
    ours.grad = torch.randn(1000, generator=draw)
    theirs.grad = ours.grad.clone()
    for optimizer in optimizers:
        optimizer.step()
print(torch.backends.cpu.get_cpu_capability(), torch.equal(ours, theirs))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere torch's vectors have FMA, or are unknown")
def test_torchs_fused_adamw_is_the_definition_where_its_vectors_have_fma_and_only_there():
    capabilities = ["default", *["avx2"] * ("avx2" in kernels.kernel_info().supported)]
    environments = [{"ATEN_CPU_CAPABILITY": capability} for capability in capabilities]
    done = torch_server().run(*[["-c", STEPS]] * len(environments), environments=environments)  # torch reads it once
    assert [each.stderr for each in done] == [""] * len(done)
    assert [each.stdout.split() for each in done] == [["DEFAULT", "False"], ["AVX2", "True"]][: len(done)]


def test_tests_compare_with_the_definition_where_torchs_own_adamw_is_not(monkeypatch):
    """Elsewhere they compare with torch's: the two are the same there, also of Adam, and for what a GradScaler says."""
    torch = pytest.importorskip("torch")
    for cls, adam_mode in ((torch.optim.AdamW, "adamw"), (torch.optim.Adam, "adam")):
        found = []
        for replaced in (False, True):
            if replaced:
                name = f"_fused_{adam_mode}_"
                monkeypatch.setattr(
                    torch, name, fused_adam.by_definition(getattr(torch, name), fused_adam.adam(adam_mode))
                )
            draw = torch.Generator().manual_seed(0)
            params = [torch.nn.Parameter(torch.randn(4, 8, generator=draw)) for _ in range(2)]
            optimizer = cls(params, lr=1e-2, weight_decay=0.1, maximize=True, fused=True)
            for overflow in (0.0, 1.0, 0.0):
                for param in params:
                    param.grad = torch.randn(4, 8, generator=draw)
                optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(overflow)
                optimizer.step()
            found.append([*params, *(state[key] for state in optimizer.state.values() for key in state)])
        assert all(map(torch.equal, *found))


@pytest.mark.skipif("avx2" not in kernels.kernel_info().supported, reason="torch's vectors have no FMA")
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
def test_tensors_of_a_multiple_of_8_elements_have_the_bits_of_torch(name):
    """Others need not: torch computes the last elements of a tensor in another order."""
    torch = pytest.importorskip("torch")
    import frontends.torch

    draw = torch.Generator().manual_seed(13)
    sizes = [8 * n for n in range(1, 9)] * 4
    theirs = [torch.nn.Parameter(torch.randn(size, generator=draw)) for size in sizes]
    ours = [torch.nn.Parameter(param.detach().clone()) for param in theirs]
    fields = {"momentum": 0.9} if name == "SGD" else {}
    torchs = getattr(torch.optim, name)(theirs, lr=1e-2, fused=True, **fields)
    optimizer = getattr(frontends.torch, f"Offloaded{name}")(ours, lr=1e-2, **fields)
    for _ in range(5):
        for param, own in zip(theirs, ours, strict=True):
            param.grad = torch.randn(param.shape, generator=draw)
            own.grad = param.grad.clone()
        torchs.step()
        optimizer.step()
    assert all(torch.equal(own, param) for own, param in zip(ours, theirs, strict=True))
