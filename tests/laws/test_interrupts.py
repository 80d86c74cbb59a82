"""An interrupt leaves the state before or after: over every subject, at lines of each call that it may cut."""

import itertools
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.interrupts import Armed, FewerLines, Interrupt, first_passes, interrupt_at, read_at_each_line
from tests.support.subjects import Program, Run, Subject, plain
from tests.support.subjects.table import ROWS, SUBJECTS, cases

pytestmark = pytest.mark.filterwarnings("ignore::offload_core.ConfigWarning")  # of DeepSpeed's configuration


def elements(values: dict[str, Any], name: str) -> np.ndarray:
    """The bytes of each element of a parameter and of its states, a row an element."""
    arrays = [found for key, found in values.items() if key.endswith(f" of {name}") and not key.startswith("step ")]
    n = max(int(np.prod(shape)) for _, shape, _ in arrays)
    return np.concatenate([np.frombuffer(data, np.uint8).reshape(n, -1) for _, _, data in arrays], axis=1)


def assert_in_part(found: dict[str, Any], before: dict[str, Any], whole: dict[str, Any]) -> None:
    """Each element with its states is as before the step or as after it. Counts say which parameters were updated."""

    def count(values: dict[str, Any], name: str) -> float:
        return float(np.frombuffer(values[f"step of {name}"][2], np.float32)[0])

    names = [key.removeprefix("step of ") for key in before if key.startswith("step of ")]
    for name in names:
        mine, was, becomes = (elements(values, name) for values in (found, before, whole))
        updated = (mine == becomes).all(axis=1)
        assert ((mine == was).all(axis=1) | updated).all(), name
        assert count(found, name) == count(before, name) + updated.any(), name
    assert found["updates"] == max(count(found, name) for name in names)


def interrupted(subject: Subject, call: str, of: str, folder: Path) -> None:
    """The run goes on as if the call had not been, or had been whole, and no mode of the thread is left changed.

    Args:
        of: before which lines the interrupt comes: ``"some"``, each at its ``"first pass"``, or at ``"each pass"``.
    """
    act, begin, end = subject.run.calls[call]
    also = subject.run.also_traced

    def begun(number: Any) -> tuple[Run, Path]:
        run, own = subject.begin(), folder / str(number)
        own.mkdir()
        run.update(1)
        begin(run, own)
        return run, own

    def outcome(run: Run, own: Path, steps: tuple[int, ...] = (3, 4, 5)) -> dict[str, Any]:
        """What has become of the run some steps later."""
        end(run, own)
        run.forget()
        for number in steps:
            run.update(number)
        found = run.values()
        run.close()
        return found

    whole, own = begun("whole")
    act(whole, own)
    steps = () if whole.in_part and call in ("step", "backward") else (3, 4, 5)
    allowed = [outcome(*begun("without"), steps), outcome(whole, own, steps)]
    counted, own = begun("counted")
    passes = first_passes(lambda: act(counted, own), also)
    assert outcome(counted, own, steps) == allowed[1]
    numbers = [*range(max(passes.values()) + 1)] if of == "each pass" else sorted(passes.values())
    seen = set()
    for number in numbers[:: max(len(numbers) // 8, 1)] if of == "some" else numbers:
        run, own = begun(number)
        before = run.left_behind()
        try:
            with suppress(FewerLines):
                interrupt_at(number, lambda run=run, own=own: act(run, own), also)
            assert run.left_behind() == before, f"line {number}"
        finally:
            run.put_back(before)
        found = outcome(run, own, steps)
        if not steps:
            assert_in_part(found, *allowed)
            continue
        assert found in allowed, f"line {number}: {[place for place, n in passes.items() if n == number]}"
        seen.add(allowed.index(found))
    assert 0 in seen or not steps


def interrupted_program(subject: Subject, call: str, of: str, folder: Path) -> None:
    """An interrupt of a program's second step ends its loop; the states are those of one step or of two."""
    allowed: list[dict[str, Any]] = []
    runs: list[Any] = []

    def counted(run: Any) -> Generator[int, None, Any]:
        yield 1
        allowed.append(run.values())
        lines = Armed()
        lines.start()
        yield 2
        lines.stop()
        allowed.append(run.values())
        return lines.passed

    def cut(run: Any, number: int) -> Generator[int, None, None]:
        runs.append(run)
        yield 1
        run.values()
        Armed(number).start()
        yield 2

    places = subject.train(counted, folder / "counted")
    first = [*dict(zip(reversed(places), reversed(range(len(places))), strict=True)).values()][::-1]
    seen = set()
    for number in first[:: max(len(first) // 6, 1)] if of == "some" else first:
        with suppress(Interrupt, SystemExit):
            subject.train(partial(cut, number=number), folder / str(number))
            sys.settrace(None)
        found = runs.pop().values()
        assert found in allowed, f"line {number}: {places[number]}"
        seen.add(allowed.index(found))
    assert 0 in seen


FEW = {
    ("engine, stage 2", "step"),
    ("engine, stage 2, late", "step"),
    ("engine, stage 2, late", "named_weights, into"),
    ("engine, stage 3, on disk", "step"),
    ("engine, delayed", "load_checkpoint"),
    ("engine, in backward", "step"),
    ("alone, fp32", "step"),
    ("DeepSpeed's face, stage 2", "step"),
    ("tree, fp32", "update"),
    ("tree, fp32", "load_pytree"),
    ("tree, delayed", "update"),
    ("tree, mesh, stage 2", "update"),
    ("Accelerate", "step"),
    ("OffloadTrainer, stage 3", "step"),
    ("Lightning, the strategy", "step"),
}
"""The subjects and calls of which ``make test`` draws some."""


AT_ALL_LINES = (
    *(f"engine, {name}" for name in ("stage 2", "serial, bf16", "delayed", "sent early", "stage 3, on disk")),
    *("engine, in backward", "engine, stage 3, on the host, simulated, delays 0", "alone, fp32"),
    *("tree, fp32", "tree, on disk", "tree, delayed", "tree, mesh, stage 2", "DeepSpeed's face, stage 2"),
)
"""The subjects that are interrupted at each line of each call. Others are at some."""


def lines() -> Iterator[Any]:
    for case in cases("calls"):
        device, subject, call = case.values
        for of in ("some", "first pass", "each pass"):
            if (of != "some" and subject not in AT_ALL_LINES) or (of == "each pass" and call not in ("step", "update")):
                continue
            marks = [] if (subject, call) in FEW and of == "some" else [pytest.mark.slow]
            if of == "each pass":
                marks = [pytest.mark.soak, pytest.mark.timeout(1800)]
            yield pytest.param(device, subject, call, of, marks=[*case.marks, *marks], id=f"{case.id}, {of}")


@pytest.mark.long("an interrupt at several lines, each in a new run")
@pytest.mark.draws(3)
@pytest.mark.parametrize(("device", "subject", "call", "of"), [*lines()], indirect=["device"])
def test_an_interrupt_leaves_the_state_before_or_after(device, subject, call, of, tmp_path):
    found = SUBJECTS[subject]
    found.check(interrupted_program if issubclass(found.run, Program) else interrupted, call, of, tmp_path)


def handled(subject: Subject, call: str, peek: str, folder: Path) -> None:
    """A handler that asks for states at any line of a call gets those before or after it, or an error that says why."""
    act, begin, _ = subject.run.calls[call]
    ask = subject.run.peeks[peek]
    run, twin = subject.begin(), subject.begin()
    for each, name in ((run, "run"), (twin, "twin")):
        (folder / name).mkdir()
        each.update(1)
        begin(each, folder / name)
    allowed = [plain(ask(twin))]
    act(twin, folder / "twin")
    allowed.append(plain(ask(twin)))
    seen, said = read_at_each_line(lambda: plain(ask(run)), lambda: act(run, folder / "run"), allowed)
    assert 0 in seen
    assert any("in the same thread" in error for error in said)
    assert run.values() == twin.values()
    for each in (run, twin):
        each.close()


def handlers() -> Iterator[Any]:
    for subject in ROWS:
        if subject.is_here and subject.asked_by_handlers:
            for call, peek in itertools.product(subject.run.peeked, subject.run.peeks):
                case = f"{subject.name}: {call}, {peek}"
                yield pytest.param(subject.device, subject.name, call, peek, marks=subject.marks, id=case)


@pytest.mark.draws(4)
@pytest.mark.parametrize(("device", "subject", "call", "peek"), [*handlers()], indirect=["device"])
def test_a_handler_gets_the_state_before_or_after_or_an_error(device, subject, call, peek, tmp_path):
    SUBJECTS[subject].check(handled, call, peek, tmp_path)
