"""A refusal changes nothing: over every subject, each call that must be refused."""

from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.subjects import Subject, assert_same
from tests.support.subjects.table import SUBJECTS, cases

pytestmark = pytest.mark.filterwarnings("ignore::offload_core.ConfigWarning")  # of DeepSpeed's configuration


def refuses(subject: Subject, call: str, folder: Path) -> None:
    """The call is an error, after which all is as before it, and the run goes on as one without the call."""
    act, error, match, prepare, mend = subject.run.wrong[call]

    def script(run: Any, own: Path | None) -> Generator[int, None, Any]:
        yield from (1, 2)
        if own is not None:
            prepare(run, own)
        before = run.everything()  # in each run: it brings parameters of the delayed schedule level
        if own is not None:
            with pytest.raises(error, match=match) as raised:
                act(run, own)
            assert "broke off" not in str(raised.value)
            mend(run)
            assert_same(run.everything(), before)
            run.forget()
        yield from (3, 4)
        return run.values()

    for name in ("own", "with", "without"):
        (folder / name).mkdir(exist_ok=True)
    found = subject.train(partial(script, own=folder / "own"), folder / "with")
    assert_same(found, subject.train(partial(script, own=None), folder / "without"))


@pytest.mark.draws(80)
@pytest.mark.quick
@pytest.mark.parametrize(("device", "subject", "call"), [*cases("wrong")], indirect=["device"])
def test_a_refusal_changes_nothing(device, subject, call, tmp_path):
    SUBJECTS[subject].check(refuses, call, tmp_path)
