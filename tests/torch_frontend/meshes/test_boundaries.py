"""Accumulation, loss scaling and skipped steps over meshes."""

from functools import partial

import pytest
import torch

from tests.support.mesh_runs import (
    HALVED,
    HIGH,
    SCALED,
    WAYS,
    Ours,
    TorchsOnLocals,
    assert_same,
    assert_skipped_once,
    each,
    every_sum,
    no_errors,
    skipping,
)
from tests.support.meshes import WORLD, Sharded, blocks_of
from tests.support.processes import on_ranks

FSDP, EXPERTS, TWO, TP = (
    Sharded("gpt", "fsdp"),
    Sharded("gpt of experts", "experts"),
    Sharded("gpt", "fsdp x tp"),
    Sharded("gpt", "tp"),
)


@pytest.mark.slow
def test_two_micro_steps_are_one_update_of_their_mean():
    @on_ranks(WORLD)
    def found(rank):
        kinds = [FSDP, EXPERTS, TWO, TP, Sharded("gpt", "hsdp"), Sharded("uneven", "fsdp", narrow=torch.bfloat16)]
        cases = [(how, way, {}) for how in kinds for way in ("plain", "early", "wrap")]
        cases += [(how, "wrap", {"own": True}) for how in kinds]
        deferring = [how for how in kinds if how.mesh != "tp"]
        cases += [(how, "wrap", {"kept": True, "own": own}) for how in deferring for own in (False, True)]
        cases += [(how, way, {"deferred": True}) for how in deferring for way in ("plain", "early", "wrap")]
        return every_sum(cases)

    no_errors(found)


@pytest.mark.slow
@pytest.mark.parametrize("spoiler", range(WORLD))
def test_an_infinity_on_one_rank_skips_the_step_on_all(spoiler):
    @on_ranks(WORLD)
    def found(rank):
        kinds = (FSDP, EXPERTS, TWO, Sharded("gpt", "hsdp"))
        scaled = [(how, "wrap", SCALED, spoiler) for how in kinds]
        clipped = [(how, way, HIGH, spoiler) for how in kinds for way in WAYS]
        return [
            each((f"{case[0]}, {case[1]}", partial(skipping, *case)) for case in cases) for cases in (scaled, clipped)
        ]

    scaled, clipped = (no_errors(results) for results in zip(*found, strict=True))
    assert_skipped_once(scaled, "overflow", HALVED)
    assert_skipped_once(clipped, "non-finite", (1.0,) * 4)


def with_gathered_parameters(how, gather):
    """A step while FSDP2 has some gathered parameters in their modules."""
    model, other = how.make(), how.make()
    ours, theirs = Ours(model, "wrap"), TorchsOnLocals(other)
    for step in range(2):
        for run, of_run in ((ours, model), (theirs, other)):
            run.backward(of_run.loss(step))
            gather(of_run)
            run.step()
            for module in (of_run, *blocks_of(of_run)):
                module.reshard()
        assert_same(ours, theirs, other)
    ours.close()


@pytest.mark.slow
def test_parameters_that_fsdp2_has_gathered_at_a_step_are_no_new_ones():
    """Someone gathers a block ahead; a forward for evaluation keeps what it has gathered."""

    @on_ranks(WORLD)
    def found(rank):
        kept = Sharded("gpt", "fsdp", reshard=False)
        return each([
            ("ahead", lambda: with_gathered_parameters(FSDP, lambda model: model.layers[0].unshard())),
            ("evaluated", lambda: with_gathered_parameters(kept, lambda model: model.loss(9))),
        ])  # fmt: skip

    no_errors(found)
