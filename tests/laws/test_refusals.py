"""A refusal changes nothing: over every subject, each call that must be refused."""

from pathlib import Path

import pytest

from tests.support.subjects import Subject, assert_same
from tests.support.subjects.table import SUBJECTS, cases

pytestmark = pytest.mark.filterwarnings("ignore::offload_core.ConfigWarning")  # of DeepSpeed's configuration


def refuses(subject: Subject, call: str, folder: Path) -> None:
    """The call is an error, after which all is as before it, and the run goes on as one without the call."""
    run, twin = subject.begin(), subject.begin()
    for each in (run, twin):
        each.step(1)
        each.step(2)
    act, error, match, prepare, mend = subject.run.wrong[call]
    prepare(run, folder)
    before, _ = run.everything(), twin.everything()  # which bring parameters of the delayed schedule level
    with pytest.raises(error, match=match) as raised:
        act(run, folder)
    assert "broke off" not in str(raised.value)
    mend(run)
    assert_same(run.everything(), before)
    run.forget()
    for each in (run, twin):
        each.step(3)
        each.step(4)
    assert_same(run.values(), twin.values())
    for each in (run, twin):
        each.close()


@pytest.mark.draws(80)
@pytest.mark.quick
@pytest.mark.parametrize(("device", "subject", "call"), [*cases("wrong")], indirect=["device"])
def test_a_refusal_changes_nothing(device, subject, call, tmp_path):
    SUBJECTS[subject].check(refuses, call, tmp_path)
