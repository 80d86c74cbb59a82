"""The laws of bits, clipping, accumulation and skipped steps, once on each kind of mesh: all in one start of ranks."""

from functools import partial

import pytest

from tests.support.mesh_runs import (
    HALVED,
    HIGH,
    SCALED,
    assert_skipped_once,
    assert_some_clipped,
    clipped,
    compared,
    each,
    every_sum,
    no_errors,
    skipping,
)
from tests.support.meshes import WORLD, Sharded
from tests.support.processes import on_ranks

pytestmark = pytest.mark.quick

UNEVEN, FSDP, HSDP, TP, TWO = (
    Sharded("uneven", "fsdp"),
    Sharded("gpt", "fsdp"),
    Sharded("gpt", "hsdp"),
    Sharded("gpt", "tp"),
    Sharded("gpt", "fsdp x tp"),
)
EXPERTS = Sharded("gpt of experts", "experts")


def everything(rank):
    return {
        "bits": compared([(UNEVEN, "wrap"), (HSDP, "plain"), (TP, "early"), (TWO, "wrap"), (EXPERTS, "early")], 3),
        "clipped": clipped([(FSDP, "early"), (HSDP, "wrap"), (TP, "wrap"), (TWO, "plain"), (EXPERTS, "wrap")], 2),
        "sums": every_sum([
            (FSDP, "wrap", {"own": True, "kept": True, "steps": 2}),
            (EXPERTS, "wrap", {"deferred": True, "steps": 2}),
            (TP, "plain", {"steps": 2}),
        ]),
        "scaled": each([("FSDP", partial(skipping, FSDP, "wrap", SCALED, 2))]),
        "examined": each([("2-D", partial(skipping, TWO, "plain", HIGH, 3))]),
    }  # fmt: skip


@pytest.fixture(scope="module")
def found():
    """What each law has found, on each rank."""
    return on_ranks(WORLD)(everything)


def of(found, law):
    return no_errors([of_one[law] for of_one in found])


def test_a_few_steps_have_the_bits_of_torchs_fused_adamw(found):
    assert len(of(found, "bits")[0]) == 5


def test_a_few_clipped_steps_are_those_of_one_process_given_the_whole_gradients(found):
    results = of(found, "clipped")
    assert_some_clipped(results)
    assert len(results[0]) == 5


def test_two_micro_steps_are_one_update_of_their_mean(found):
    assert len(of(found, "sums")[0]) == 3


def test_an_infinity_on_one_rank_skips_the_step_on_all(found):
    assert_skipped_once(of(found, "scaled"), "overflow", HALVED)
    assert_skipped_once(of(found, "examined"), "non-finite", (1.0,) * 4)
