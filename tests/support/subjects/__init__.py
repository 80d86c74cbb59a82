"""All that must keep the laws of ``tests/laws``: a row for each way to train, which says how it trains and is checked.

A new integration gets all laws by a row of ``table.SUBJECTS`` and a subclass of :class:`Run`.
"""

import importlib
import importlib.util
import random
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest


def nothing(*_: Any) -> None:
    """Do nothing."""


class Wrong(NamedTuple):
    """A call that must be refused.

    ``act(run, folder)`` makes the call; ``match`` is in the text of the error. ``prepare(run, folder)``, in an empty
    folder, comes before the comparison begins, and ``mend(run)`` before it ends: it takes back what the caller itself
    has done for the call, such as a rate that it set.
    """

    act: Callable[[Any, Path], object]
    error: type[Exception] | tuple[type[Exception], ...]
    match: str | None = None
    prepare: Callable[[Any, Path], object] = nothing
    mend: Callable[[Any], object] = nothing


class Call(NamedTuple):
    """A call that an interrupt may cut. ``begin`` prepares a run for it, and ``end`` goes on after it, cut or whole."""

    act: Callable[[Any, Path], object]
    begin: Callable[[Any, Path], object] = nothing
    end: Callable[[Any, Path], object] = nothing


class Run:
    """A model in training.

    A subclass says how it is made, from a seed of its parameters and the fields of its row, and how it does the rest.
    """

    resumes: ClassVar[Mapping[str, Callable[..., "Run"]]]
    """Ways to go on in another run: ``resume(run, begin, folder, go_on)`` keeps the run's state, calls ``go_on``, which
    trains the run further, and returns another run, made by ``begin(seed)``, which has the kept state."""
    wrong: ClassVar[Mapping[str, Wrong]] = {}
    reads: ClassVar[Mapping[str, Callable[["Run", Path], Any]]] = {}
    """What a reader may ask right after a step. Results are compared by :func:`plain`."""
    calls: ClassVar[Mapping[str, Call]] = {}
    peeks: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}
    """States that the handler of a signal may ask for at any moment."""
    peeked: ClassVar[tuple[str, ...]] = ()
    """The calls in the middle of which a handler asks."""
    also_traced: ClassVar[tuple[str, ...]] = ()
    """Files of others before whose lines an interrupt may come, too."""

    def step(self, number: int | None = None) -> None:
        """Train one step on data that follow from the number; None: from the generators of this process."""
        raise NotImplementedError

    def update(self, number: int) -> None:
        """Train one step, without a schedule that the caller moves after it."""
        self.step(number)

    def values(self) -> dict[str, Any]:
        """Wait for all that is in flight, and return copies of what a step changes: parameters, states and counts by
        name."""
        raise NotImplementedError

    def everything(self) -> dict[str, Any]:
        """``values``, and what else the training goes on from: schedules and generators."""
        return {**self.values(), "random": plain([random.getstate(), np.random.get_state()])}

    def forget(self) -> None:
        """Drop gradients of a step that has not been, as a script does that goes on after an error."""

    @property
    def in_part(self) -> bool:
        """True if an interrupted step may have updated some elements, as where backward updates them in place."""
        return False

    def left_behind(self) -> Any:
        """What a call may leave in this thread, and must not: modes, locks."""
        return None

    def put_back(self, left: Any) -> None:
        """Undo what a failure has left, for the next test."""

    def close(self) -> None:
        """End it."""


Script = Callable[[Any], Generator[int, None, Any]]
"""``script(run)`` yields the number of each step that it wants trained, and may act in between. It returns a result."""


def drive(run: Run, script: Script) -> Any:
    """Train the steps that a script wants, and return its result."""
    wanted = script(run)
    try:
        while True:
            run.step(next(wanted))
    except StopIteration as end:
        return end.value


class Program(Run):
    """A run whose loop is another library's: a callback of it asks the script for more."""

    saved_at: ClassVar = 2
    """The step after which it saves."""

    def __init__(self, script: Script, folder: Path, **fields: Any) -> None:
        self.fields, self._wanted, self.result = fields, script(self), None

    def train(self, since: Path | None) -> None:
        """Run the library's loop in the run's folder, from a checkpoint on, until the script ends."""
        raise NotImplementedError

    def wants_more(self) -> bool:
        """Act as the script does here; False if it has ended. The loop calls it before its first step and after each
        step."""
        try:
            next(self._wanted)
        except StopIteration as end:
            self.result = end.value
            return False
        return True


def plain(value: Any) -> Any:
    """Return the value with its tensors and arrays as bytes, for comparisons bit for bit. It may be a tree of them."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if hasattr(value, "untyped_storage") or hasattr(value, "__array__"):
        return _bytes_of(value)
    return value if value is None or isinstance(value, str | bytes | int | float | bool) else repr(value)


def _bytes_of(value: Any) -> tuple[Any, ...]:
    if hasattr(value, "to_local"):
        value = value.to_local()
    if hasattr(value, "untyped_storage"):
        import torch

        value = value.detach().cpu()
        value = (value * 1 if type(value) is not torch.Tensor else value).contiguous()
        return str(value.dtype), tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().tobytes()
    if str(value.dtype).startswith("key<"):
        import jax

        value = jax.random.key_data(value)
    array = np.asarray(value)
    return str(array.dtype), array.shape, array.tobytes()


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    differ = [name for name in expected if found[name] != expected[name]]
    assert not differ, differ


ASKED_BY_HANDLERS = ("engine, stage 2", "engine, stage 2, late", "engine, half on disk", "tree, fp32", "tree, on disk")
"""The subjects of which the handler of a signal asks for states."""


@dataclass(frozen=True)
class Subject:
    """A row: what trains, and how it is set."""

    name: str
    kind: str
    """The subclass of :class:`Run`, as ``module:class`` in this package."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    device: str = "host"
    """Where the model lies, as the fixture ``device`` has it."""
    ranks: int = 1
    """More than 1: each law is checked in so many processes."""
    needs: tuple[str, ...] = ("torch",)
    integration: bool = False
    slow: bool = False
    without: frozenset[str] = frozenset()
    """Names of ``resumes``, ``wrong``, ``reads`` and ``calls`` that it has not."""

    @cached_property
    def run(self) -> type[Run]:
        module, _, name = self.kind.partition(":")
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)

    def begin(self, seed: int = 0) -> Run:
        return self.run(seed, **self.fields)

    def train(self, script: Script, folder: Path, seed: int = 0, since: Path | None = None) -> Any:
        """Train as a script wants, a run from a seed or, of a program, from a checkpoint on; return its result."""
        if issubclass(self.run, Program):
            made = self.run(script, folder, **self.fields)
            made.train(since)
            return made.result
        run = self.begin(seed)
        try:
            return drive(run, script)
        finally:
            run.close()

    def check(self, law: Callable[..., None], *arguments: Any) -> None:
        """Check a law ``law(subject, *arguments)``, in processes of its own if the subject has ranks."""
        if self.ranks == 1:
            law(self, *arguments)
            return
        from tests.support.processes import on_ranks
        from tests.support.subjects.table import SUBJECTS

        name = self.name

        @on_ranks(self.ranks)
        def _(rank: int) -> None:
            law(SUBJECTS[name], *arguments)

    def names(self, what: str) -> list[str]:
        """The names of its ``resumes``, ``wrong``, ``reads`` or ``calls``; none where a package is missing."""
        if not self.is_here:
            return [f"{self.needs[-1]} is not installed"]
        return [name for name in getattr(self.run, what) if name not in self.without]

    @property
    def asked_by_handlers(self) -> bool:
        return self.name in ASKED_BY_HANDLERS

    @property
    def is_here(self) -> bool:
        return all(importlib.util.find_spec(name) is not None for name in self.needs)

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        marks = [pytest.mark.integration] * self.integration + [pytest.mark.slow] * self.slow
        missing = not self.is_here
        return [*marks, *[pytest.mark.skip(reason=f"{self.needs[-1]} is not installed")] * missing]
