"""Accumulation, loss scaling and skipped steps over meshes."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.support.mesh_runs import Ours, TorchsOnLocals, assert_same, each, no_errors, said, spoiled
from tests.support.meshes import WORLD, Sharded, blocks_of
from tests.support.processes import on_ranks

STEPS = 4
FSDP, EXPERTS, TWO, TP = (
    Sharded("gpt", "fsdp"),
    Sharded("gpt of experts", "experts"),
    Sharded("gpt", "fsdp x tp"),
    Sharded("gpt", "tp"),
)


def accumulated(how, way, *, deferred=False, own=False, kept=False):
    """Two micro-steps an update.

    Args:
        deferred: FSDP2 itself sums the gradients of both, and reduces once.
        own: ``gradient_accumulation_steps=2``.
        kept: FSDP2 keeps gathered parameters in their modules from the first micro-step to the second.
    """
    model, other = how.make(), how.make()
    ours, theirs = Ours(model, way, {"gradient_accumulation_steps": 2} if own else {}), TorchsOnLocals(other)
    for step in range(STEPS):
        for i in range(2):
            for run, of_run in ((ours, model), (theirs, other)):
                if deferred:
                    of_run.set_requires_gradient_sync(i == 1)
                if kept:
                    of_run.set_reshard_after_backward(i == 1)
                loss = of_run.loss(2 * step + i)
                run.backward(loss if own and run is ours else loss / 2)
            if way != "plain" and not deferred:  # torch's own p.grad may sum Partial gradients before they are reduced
                theirs.take()
            if own or i == 1:
                ours.step()
        theirs.step()
        with said(f"step {step}"):
            assert_same(ours, theirs, other)
    ours.close()


def every_sum(cases):
    return each((f"{how}, {way}, {fields}", partial(accumulated, how, way, **fields)) for how, way, fields in cases)


def test_two_micro_steps_are_one_update_of_their_mean():
    @on_ranks(WORLD)
    def found(rank):
        return every_sum([
            (FSDP, "wrap", {"own": True, "kept": True}),
            (FSDP, "wrap", {"deferred": True}),
            (EXPERTS, "early", {}),
            (TP, "plain", {}),
        ])  # fmt: skip

    no_errors(found)


@pytest.mark.slow
def test_two_micro_steps_are_one_update_of_their_mean_in_every_way():
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


def skipping(how, way, fields, spoiler):
    """Steps of which the second has an infinity on one rank; the reports' words."""
    model, other = how.make(), how.make()
    ours, theirs = Ours(model, way, fields), TorchsOnLocals(other)
    told = []
    for step in range(STEPS):
        for run, of_run in ((ours, model), (theirs, other)):
            with spoiled(of_run, step == 1 and dist.get_rank() == spoiler):
                run.backward(of_run.loss(step))
            run.step()
        told.append((ours.report.updated, ours.report.skipped, ours.report.loss_scale, ours.report.clip_coefficient))
        with said(f"step {step}"):
            assert_same(ours, theirs, other)
    ours.close()
    return told


SCALED = {"loss_scale": "dynamic", "initial_loss_scale": 2.0**10}
HIGH = {"gradient_clipping": 1e6}


def assert_skipped_once(results, why, scales):
    assert all(each == results[0] for each in results)
    for name, told in results[0].items():
        updated, skipped, scale, clip = zip(*told, strict=True)
        assert updated == (True, False, True, True), name
        assert skipped == (None, why, None, None), name
        assert scale == scales, name
        assert set(clip) == {1.0}, name


def test_an_infinity_on_one_rank_skips_the_step_on_all():
    """Loss scales are powers of two: the scaled run has the bits of the one that is not."""

    @on_ranks(WORLD)
    def found(rank):
        scaled = [(FSDP, "wrap", SCALED, 2), (EXPERTS, "wrap", SCALED, 1)]
        clipped = [(TWO, "plain", HIGH, 3), (FSDP, "early", HIGH, 0)]
        return [
            each((f"{case[0]}, {case[1]}", partial(skipping, *case)) for case in cases) for cases in (scaled, clipped)
        ]

    scaled, clipped = (no_errors(results) for results in zip(*found, strict=True))
    assert_skipped_once(scaled, "overflow", (2.0**10, 2.0**10, 2.0**9, 2.0**9))
    assert_skipped_once(clipped, "non-finite", (1.0,) * STEPS)


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
