"""A reader sees finished values: over every subject, each way to read, right after a step."""

from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.subjects import Subject, assert_same, plain
from tests.support.subjects.table import SUBJECTS, cases

pytestmark = pytest.mark.filterwarnings("ignore::offload_core.ConfigWarning")  # of DeepSpeed's configuration


def reads(subject: Subject, read: str, folder: Path) -> None:
    """A read right after a step gives what it gives once the step has ended, and changes nothing of the run."""

    def script(run: Any, name: str) -> Generator[int, None, Any]:
        yield from (1, 2)
        if name == "later":
            run.values()  # waits for all that is in flight
        (folder / name).mkdir(exist_ok=True)
        found = plain(subject.run.reads[read](run, folder / name))
        run.values()
        yield 3
        return found, run.values()

    found, expected = (
        subject.train(partial(script, name=name), folder / f"run {name}") for name in ("at once", "later")
    )
    assert found[0] == expected[0]
    assert_same(found[1], expected[1])


@pytest.mark.draws(40)
@pytest.mark.quick
@pytest.mark.parametrize(("device", "subject", "read"), [*cases("reads")], indirect=["device"])
def test_a_reader_sees_finished_values(device, subject, read, tmp_path):
    SUBJECTS[subject].check(reads, read, tmp_path)
