"""Any order of what a script may call leaves the bits of plain torch: on one process, on ranks, over FSDP2."""

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from tests import sampling
from tests.support import programs
from tests.support.processes import on_ranks
from tests.support.programs import ALL, Program, Setting, run_on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*the run goes on with its hyperparameters")

NUMBERS = pytest.mark.parametrize(
    "n",
    [
        2,
        pytest.param(20, marks=pytest.mark.slow),
        pytest.param(500, marks=[pytest.mark.soak, pytest.mark.timeout(7200)]),
    ],
)


@NUMBERS
def test_a_program_over_an_engine_has_the_bits_of_plain_torch(n, tmp_path_factory):
    @settings(max_examples=n, report_multiple_bugs=False)
    @given(programs.settings(), programs.programs)
    def law(setting, calls):
        Program(setting, tmp_path_factory.mktemp("program")).run(calls)

    law()


@pytest.mark.draws(1)
@pytest.mark.parametrize("fsdp", [False, True], ids=["stages", "FSDP2"])
@NUMBERS
def test_a_program_on_two_ranks_has_the_bits_of_plain_torch(n, fsdp, tmp_path_factory):
    """In stages 1 and 2 ranks leave out different parameters. Over FSDP2 shards are uneven, empty, tied and frozen."""
    each = min(n, 20)  # in one start of processes
    drawn = st.lists(st.tuples(programs.settings(fsdp=fsdp), programs.programs), min_size=each, max_size=each)

    @settings(max_examples=n // each, phases=[Phase.generate])  # a smaller list of programs says no more
    @given(drawn)
    def law(drawn):
        assume(any(program != drawn[0] for program in drawn))  # Hypothesis begins with the simplest one alone
        folder = tmp_path_factory.mktemp("programs")

        @on_ranks(2, seconds=1200)
        def _(rank):
            run_on_ranks(rank, 2, drawn, folder)

    law()


EACH_ITS_OWN = [
    # Of rank 1 a parameter has its second gradient in a bucket that is full on no other rank.
    [("backward", 8, 0b110, 0b1100100, None), ("backward", 9, 0b1111000, 0b1100100, None)],
    [("backward", 8, 0b1000, ALL, None), ("backward", 9, ALL, 0b1000, None), ("backward", 7, 0b1, 0b1, None)],
    # Rank 0 has no gradient at all: its one piece is frozen.
    [("backward", 8, 0b10000, 0b1101, None)],
    [("backward", 8, 0b10000, ALL, None), ("backward", 9, ALL, 0b10000, None)],
]
"""Backwards in one micro-step, in which ranks leave out different parameters."""


@pytest.mark.draws(1)
@pytest.mark.parametrize("backwards", EACH_ITS_OWN)
def test_ranks_that_leave_out_other_parameters_in_each_of_several_backwards_go_on_together(backwards, tmp_path, drawn):
    calls = [("step",), ("save",), ("whole_state_dict",), ("gradient", "c.bias"), ("zero_grad",), ("flush",)]
    settings = [
        Setting((way,), ("sgd", "adamw"), clipping=clipping)
        for way in ("serial", "stage 1", "stage 2", "states on disk")
        for clipping in (None, 0.5)
    ]
    each = [(setting, [*backwards, call, *backwards, ("step",)]) for setting in settings for call in calls]
    chosen = drawn(each, sampling.least(len(each)))

    @on_ranks(2)
    def _(rank):
        run_on_ranks(rank, 2, chosen, tmp_path)
