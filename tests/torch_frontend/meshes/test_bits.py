"""Without clipping, every rank has the bits of torch's fused AdamW on its own shards, in every mesh."""

import re

import pytest
import torch
import torch.distributed as dist

from frontends.torch.ranks import device_ranks
from tests.support.mesh_runs import STEPS, WAYS, OneProcess, Torchs, TorchsOnLocals, compared, no_errors
from tests.support.meshes import WORLD, Sharded
from tests.support.processes import on_ranks
from tests.support.slow_torch_device import SlowTorchDevice

CASES = [
    *(Sharded("gpt", mesh) for mesh in ("fsdp", "hsdp", "tp", "fsdp x tp")),
    Sharded("gpt of experts", "experts"),
    *(Sharded("uneven", mesh) for mesh in ("fsdp", "hsdp")),
    *(Sharded(model, mesh) for model in ("frozen", "computed again") for mesh in ("fsdp", "fsdp x tp")),
    Sharded("tied", "hsdp"),
    *(Sharded("gpt", mesh, columns=True) for mesh in ("fsdp", "fsdp x tp")),
    *(Sharded("gpt", narrow=narrow, reshard=False) for narrow in (torch.float32, torch.bfloat16)),
    Sharded("gpt", "fsdp x tp", narrow=torch.bfloat16),
    Sharded("gpt of experts", "experts", reshard=False, narrow=torch.float32),
]


class OffOnRank2(Torchs):
    def found(self, param):
        found = super().found(param)
        if dist.get_rank() == 2 and found["exp_avg_sq"].numel():
            found["exp_avg_sq"].view(torch.int32).flatten()[-1] ^= 1
        return found


@pytest.mark.slow
def test_gathering_waits_for_updates_that_are_late():
    """Parameters are NaN until they arrive."""

    @on_ranks(WORLD)
    def found(rank):
        device_ranks.memory_of = lambda device: SlowTorchDevice(0.005 * (1 + rank))
        cases = [Sharded("uneven", "fsdp"), Sharded("gpt", "fsdp", reshard=False), Sharded("gpt", "fsdp x tp")]
        return compared([(how, "wrap") for how in cases], 3)

    no_errors(found)


@pytest.mark.slow
def test_torchs_own_optimizer_passes_and_a_moment_that_is_off_in_one_bit_is_noticed_on_all_ranks():
    """The harness itself, with either reference."""
    uneven = Sharded("uneven", "fsdp")

    @on_ranks(WORLD)
    def found(rank):
        passed = compared([(how, Torchs) for how in CASES[:6]], 3)
        one = compared([(uneven, Torchs)], 3, OneProcess)
        return passed, one, [compared([(uneven, OffOnRank2)], 3, each) for each in (TorchsOnLocals, OneProcess)]

    no_errors([passed for passed, _, _ in found])
    no_errors([one for _, one, _ in found])
    for _, _, off in found:
        for _, errors in off:
            [said] = errors.values()
            assert re.search(r"AssertionError: step 1: rank 2: exp_avg_sq of embed_tokens.weight.* differ \(\d\)", said)


@pytest.mark.slow
@pytest.mark.parametrize("how", CASES, ids=str)
def test_twenty_steps_have_the_bits_of_torchs_fused_adamw(how):
    @on_ranks(WORLD)
    def found(rank):
        return compared([(how, way) for way in WAYS], STEPS)

    for results in no_errors(found):
        assert {len(reports) for reports in results.values()} == {STEPS}


@pytest.mark.slow
def test_updates_in_backward_and_in_the_callers_thread_have_the_bits_of_torchs_fused_adamw():
    @on_ranks(WORLD)
    def found(rank):
        cases = [(how, "wrap") for how in CASES[:6]]
        return [compared(cases, 5, **fields) for fields in ({"update_in_backward": True}, {"schedule": "serial"})]

    for results in zip(*found, strict=True):
        no_errors(results)
