"""The laws of bits, clipping, accumulation and skipped steps, once on each kind of mesh: all in one start of ranks.

``make test`` draws a mesh for each law.
"""

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


CASES = {
    "bits": [(UNEVEN, "wrap"), (HSDP, "plain"), (TP, "early"), (TWO, "wrap"), (EXPERTS, "early")],
    "clipped": [(FSDP, "early"), (HSDP, "wrap"), (TP, "wrap"), (TWO, "plain"), (EXPERTS, "wrap")],
    "sums": [
        (FSDP, "wrap", {"own": True, "kept": True, "steps": 2}),
        (EXPERTS, "wrap", {"deferred": True, "steps": 2}),
        (TP, "plain", {"steps": 2}),
    ],
    "skipped": [(FSDP, "wrap", SCALED, 2), (TWO, "plain", HIGH, 3)],
}


def everything(cases, rank):
    return {
        "bits": compared(cases["bits"], 2),
        "clipped": clipped(cases["clipped"], 2),
        "sums": every_sum(cases["sums"]),
        "skipped": each((str(case[0]), partial(skipping, *case)) for case in cases["skipped"]),
    }


@pytest.fixture(scope="module")
def cases(drawn_of_file):
    return {law: drawn_of_file(of_law, 1) for law, of_law in CASES.items()}


@pytest.fixture(scope="module")
def found(cases):
    """What each law has found, on each rank."""
    return on_ranks(WORLD)(partial(everything, cases))


def of(found, law):
    return no_errors([of_one[law] for of_one in found])


@pytest.mark.long("DTensors on two to four ranks: torch works out each operator's sharding anew for each mesh")
def test_a_few_steps_have_the_bits_of_torchs_fused_adamw(cases, found):
    assert len(of(found, "bits")[0]) == len(cases["bits"])


def test_a_few_clipped_steps_are_those_of_one_process_given_the_whole_gradients(cases, found):
    results = of(found, "clipped")
    assert_some_clipped(results)
    assert len(results[0]) == len(cases["clipped"])


def test_two_micro_steps_are_one_update_of_their_mean(cases, found):
    assert len(of(found, "sums")[0]) == len(cases["sums"])


def test_an_infinity_on_one_rank_skips_the_step_on_all(cases, found):
    results = of(found, "skipped")
    for how, _, fields, _ in cases["skipped"]:
        why, scales = ("overflow", HALVED) if fields is SCALED else ("non-finite", (1.0,) * 4)
        assert_skipped_once([{str(how): of_one[str(how)]} for of_one in results], why, scales)
