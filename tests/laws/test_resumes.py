"""A resumed run is the uninterrupted one: over every subject, in each way in which it can go on."""

from pathlib import Path

import pytest

from tests.support.subjects import Subject, assert_same
from tests.support.subjects.table import SUBJECTS, cases

pytestmark = pytest.mark.filterwarnings("ignore::offload_core.ConfigWarning")  # of DeepSpeed's configuration

STEPS, MORE = 5, 4


def resumes(subject: Subject, way: str, folder: Path) -> None:
    """Train, keep the state, and train on; another run that takes the state trains on to the same bits."""
    run = subject.begin()
    run.step(7)  # seeds the generators, from which the others are drawn
    for _ in range(STEPS - 1):
        run.step()
    kept = {}

    def go_on() -> None:
        for _ in range(MORE):
            run.step()
        kept.update(run.everything())

    other = subject.run.resumes[way](run, subject.begin, folder, go_on)
    for _ in range(MORE):
        other.step()
    assert_same(other.everything(), kept)
    assert_same(run.values(), {name: kept[name] for name in run.values()})
    for each in (run, other):
        each.close()


@pytest.mark.draws(20)
@pytest.mark.quick
@pytest.mark.parametrize(("device", "subject", "way"), [*cases("resumes")], indirect=["device"])
def test_a_resumed_run_is_the_uninterrupted_one(device, subject, way, tmp_path):
    SUBJECTS[subject].check(resumes, way, tmp_path)
