"""A resumed run is the uninterrupted one: over every subject, in each way in which it can go on."""

from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.subjects import Program, Subject, assert_same
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
    found = other.everything()
    assert all(kept[name] == value for name, value in run.values().items())  # the other has changed nothing of it
    if "another stage" in way:  # where a state may be the parameter itself, which has no entry of its own
        assert (found.keys() ^ kept.keys()) <= {name for name in {**found, **kept} if name.startswith("master of")}
        found, kept = ({name: each[name] for name in found.keys() & kept.keys()} for each in (found, kept))
    assert_same(found, kept)
    for each in (run, other):
        each.close()


def resumes_a_program(subject: Subject, way: str, folder: Path) -> None:
    """A program saves by itself; one that begins with what it saved trains on to the same bits."""

    def script(run: Any, steps: int) -> Generator[int, None, Any]:
        yield from range(steps)
        return run.everything()

    kept = subject.train(partial(script, steps=subject.run.saved_at + MORE), folder)
    since = subject.run.resumes[way](folder)
    assert_same(subject.train(partial(script, steps=MORE), folder / "again", since=since), kept)


@pytest.mark.draws(20)
@pytest.mark.quick
@pytest.mark.parametrize(("device", "subject", "way"), [*cases("resumes")], indirect=["device"])
def test_a_resumed_run_is_the_uninterrupted_one(device, subject, way, tmp_path):
    found = SUBJECTS[subject]
    found.check(resumes_a_program if issubclass(found.run, Program) else resumes, way, tmp_path)
