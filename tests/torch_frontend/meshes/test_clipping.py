"""The norm of all ranks is exact, and clipping by it has the bits of one process with the same whole gradients."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from tests.support.mesh_runs import (
    STEPS,
    WAYS,
    OneProcess,
    Ours,
    assert_some_clipped,
    clipped,
    each,
    no_errors,
    together,
)
from tests.support.meshes import WORLD, Sharded, local, places, whole
from tests.support.processes import on_ranks
from tests.support.torch_models import same_bits

CASES = [
    *(Sharded("gpt", mesh) for mesh in ("fsdp", "hsdp", "tp", "fsdp x tp")),
    Sharded("gpt of experts", "experts"),
    Sharded("uneven", "hsdp"),
    Sharded("gpt", "fsdp x tp", columns=True),
    Sharded("gpt", dtype=torch.bfloat16),
    Sharded("gpt", narrow=torch.bfloat16),
]


@pytest.mark.slow
@pytest.mark.parametrize("how", CASES, ids=str)
def test_twenty_clipped_steps_are_those_of_one_process_given_the_whole_gradients(how):
    @on_ranks(WORLD)
    def found(rank):
        return clipped([(how, way) for way in WAYS], STEPS)

    results = no_errors(found)
    assert_some_clipped(results)
    assert len({tuple(steps) for steps in results[0].values()}) == 1


def given(model, seed):
    """Give each parameter this rank's part of a whole gradient that is the same in each mesh; return their norm."""
    generator, squares = torch.Generator().manual_seed(seed), 0
    for p in model.parameters():
        of_whole = torch.randint(-(2**10), 2**10, p.shape, generator=generator).float()
        squares += int(of_whole.double().square().sum())
        part = of_whole.flatten()[places(p)].reshape(local(p).shape)
        grad = torch.empty_like(p)
        local(grad).copy_(part)
        p.grad = grad
    return math.sqrt(squares)


def of_given(how, way):
    """Norms, coefficients and whole parameters of three steps with given gradients."""
    model = how.make()
    ours = Ours(model, way, {"gradient_clipping": 100.0})
    told = []
    for seed in range(3):
        norm = given(model, seed)
        ours.step()
        together([] if ours.report.grad_norm == norm else [f"step {seed}: {ours.report.grad_norm} for {norm}"])
        told.append((ours.report.grad_norm, ours.report.clip_coefficient))
    wholes = [whole(p) for p in model.parameters()]
    ours.close()
    return told, wholes


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain", "early"])
def test_every_mesh_that_holds_the_same_gradients_has_the_same_coefficient_and_update(way):
    """All sums are of integers below 2^53, so that a double holds the exact one."""
    kinds = [
        *(("gpt", mesh) for mesh in ("fsdp", "hsdp", "tp", "fsdp x tp")),
        *(("gpt of experts", mesh) for mesh in ("fsdp", "experts")),
    ]

    @on_ranks(WORLD)
    def found(rank):
        return each((f"{model}, {mesh}", partial(of_given, Sharded(model, mesh), way)) for model, mesh in kinds)

    results = no_errors(found)
    for model in ("gpt", "gpt of experts"):
        first, *others = (of_one[name] for of_one in results for name in of_one if name.startswith(f"{model}, "))
        for told, wholes in others:
            assert told == first[0], model
            assert all(map(same_bits, wholes, first[1])), model


@pytest.mark.slow
def test_clipping_from_outside_keeps_its_meaning():
    """``torch.nn.utils.clip_grad_norm_`` scales gradients in place, which an optimizer without hooks then reads."""
    how = Sharded("gpt", "fsdp")

    @on_ranks(WORLD)
    def found(rank):
        model, other = how.make(), how.make()
        ours, theirs = Ours(model, "plain"), OneProcess(other)
        for seed in range(3):
            for run, of_run in ((ours, model), (theirs, other)):
                run.backward(of_run.loss(seed))
                nn.utils.clip_grad_norm_(of_run.parameters(), 0.1)
                run.step()
        return all(same_bits(whole(p), whole(q)) for p, q in zip(model.parameters(), other.parameters(), strict=True))

    assert found == [True] * WORLD
