"""A reader sees finished values: over every subject, each way to read, right after a step."""

from pathlib import Path

import pytest

from tests.support.subjects import Subject, assert_same, plain
from tests.support.subjects.table import SUBJECTS, cases

pytestmark = pytest.mark.filterwarnings("ignore::offload_core.ConfigWarning")  # of DeepSpeed's configuration


def reads(subject: Subject, read: str, folder: Path) -> None:
    """A read right after a step gives what it gives once the step has ended, and changes nothing of the run."""
    run, twin = subject.begin(), subject.begin()
    for each in (run, twin):
        each.step(1)
        each.step(2)
    for name in ("right after", "later"):
        (folder / name).mkdir(exist_ok=True)
    found = plain(subject.run.reads[read](run, folder / "right after"))
    twin.values()  # waits for all that is in flight
    assert found == plain(subject.run.reads[read](twin, folder / "later"))
    run.values()
    for each in (run, twin):
        each.step(3)
    assert_same(run.values(), twin.values())
    for each in (run, twin):
        each.close()


@pytest.mark.draws(40)
@pytest.mark.quick
@pytest.mark.parametrize(("device", "subject", "read"), [*cases("reads")], indirect=["device"])
def test_a_reader_sees_finished_values(device, subject, read, tmp_path):
    SUBJECTS[subject].check(reads, read, tmp_path)
