"""Any order of what a script may call leaves the bits of plain torch: on one process, on ranks, over FSDP2."""

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from tests.support import programs
from tests.support.processes import on_ranks
from tests.support.programs import Program, run_on_ranks

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
