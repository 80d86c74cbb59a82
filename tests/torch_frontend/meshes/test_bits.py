"""Without clipping, every rank has the bits of torch's fused AdamW on its own shards, in every mesh."""

import re

import pytest
import torch
import torch.distributed as dist

from tests.support.mesh_runs import STEPS, WAYS, OneProcess, Torchs, TorchsOnLocals, beside, each, no_errors
from tests.support.meshes import WORLD, Sharded
from tests.support.processes import on_ranks

CASES = [
    *(Sharded(model, mesh) for model in ("gpt", "llama", "mixtral") for mesh in ("fsdp", "hsdp", "tp", "fsdp x tp")),
    *(Sharded(model, "experts") for model in ("gpt of experts", "mixtral")),
    *(Sharded("uneven", mesh) for mesh in ("fsdp", "hsdp")),
    *(Sharded("gpt", mesh, columns=True) for mesh in ("fsdp", "fsdp x tp")),
    *(Sharded("gpt", narrow=narrow, reshard=False) for narrow in (torch.float32, torch.bfloat16)),
    Sharded("llama", "fsdp x tp", narrow=torch.bfloat16),
    Sharded("gpt of experts", "experts", reshard=False, narrow=torch.float32),
]
QUICK = [
    (Sharded("gpt", "fsdp", reshard=False), "wrap"),
    (Sharded("uneven", "fsdp"), "early"),
    (Sharded("gpt", "hsdp"), "plain"),
    (Sharded("gpt", "tp"), "early"),
    (Sharded("gpt", "fsdp x tp"), "wrap"),
    (Sharded("gpt of experts", "experts"), "wrap"),
]


def compared(cases, steps, reference=TorchsOnLocals):
    """A run of each case and way beside a reference, on this rank."""
    return each((f"{how}, {way}", lambda: len(beside(how, way, reference, steps))) for how, way in cases)  # noqa: B023


@pytest.mark.quick
def test_a_few_steps_on_each_kind_of_mesh_have_the_bits_of_torchs_fused_adamw():
    @on_ranks(WORLD)
    def found(rank):
        return compared(QUICK, 4)

    for results in no_errors(found):
        assert len(results) == len(QUICK)


class OffOnRank2(Torchs):
    def found(self, param):
        found = super().found(param)
        if dist.get_rank() == 2 and found["exp_avg_sq"].numel():
            found["exp_avg_sq"].view(torch.int32).flatten()[-1] ^= 1
        return found


@pytest.mark.parametrize("reference", [TorchsOnLocals, OneProcess])
def test_torchs_own_optimizer_passes_and_a_moment_that_is_off_in_one_bit_is_noticed_on_all_ranks(reference):
    @on_ranks(WORLD)
    def found(rank):
        cases = [(how, Torchs) for how, _ in QUICK]
        passed = compared(cases, 3, reference)
        return passed, compared([(Sharded("uneven", "fsdp"), OffOnRank2)], 3, reference)

    no_errors([passed for passed, _ in found])
    for _, (_, errors) in found:
        [said] = errors.values()
        assert re.search(r"AssertionError: step 1: rank 2: exp_avg_sq of embed_tokens.weight.* differ \(\d\)", said), said


@pytest.mark.slow
@pytest.mark.parametrize("how", CASES, ids=str)
def test_twenty_steps_have_the_bits_of_torchs_fused_adamw(how):
    @on_ranks(WORLD)
    def found(rank):
        return compared([(how, way) for way in WAYS], STEPS)

    for results in no_errors(found):
        assert set(results.values()) == {STEPS}
