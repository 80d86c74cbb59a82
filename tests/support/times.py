"""A plugin of pytest that measures each case: ``pytest -p tests.support.times --times FOLDER`` (``make test-times``).

Each worker writes a file of rows: standard seconds, seconds, the case. Standard seconds are processor time of the
worker and of all its descendants, also of those that go on after the case: servers of forks, the second process of a
pair. They are divided by how much longer a piece of work takes here and now than on an AMD EPYC of the first generation
that does nothing else. So a slow hour, another machine or neighbours on the same cores change them little.
"""

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest


def processor_seconds() -> float:
    """Return what this process and its descendants have spent so far, with those that have ended."""
    me, total = psutil.Process(), 0.0
    for process in [me, *me.children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue  # its parent has its time now
    return total


STANDARD = 0.048
"""Processor seconds that :func:`yardstick` takes on that machine."""


def yardstick() -> float:
    """Return the processor seconds of a piece of work: in Python, in C, and over more memory than the caches hold."""
    began = time.thread_time()
    numbers = [i * i % 7919 for i in range(200_000)]
    assert len({*numbers}) <= 7919
    hashlib.sha256(b"".join(number.to_bytes(4, "little") for number in numbers) * 8).digest()
    return time.thread_time() - began


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", metavar="FOLDER", help="a folder in which each worker writes a row a case")


class Times:
    def __init__(self, path: Path) -> None:
        self._rows = path.open("w")
        self._file = Path()
        self._slowness = 1.0
        self._at = self._now()

    def _now(self) -> tuple[float, float]:
        began = time.process_time()
        spent = processor_seconds()
        return spent + time.process_time() - began, time.monotonic()  # to look is no part of a case

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[object]:
        if item.path != self._file:
            self._file, self._slowness = item.path, min(yardstick(), yardstick()) / STANDARD
            self._at = self._now()
        result = yield
        before, self._at = self._at, self._now()
        spent, passed = (now - then for now, then in zip(self._at, before, strict=True))
        self._rows.write(f"{spent / self._slowness:.2f}\t{passed:.2f}\t{item.nodeid}\n")
        self._rows.flush()
        return result


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin where the cases run: in the workers of pytest-xdist, if there are any."""
    options, worker = session.config.option, os.environ.get("PYTEST_XDIST_WORKER")
    if options.times and (worker or not getattr(options, "numprocesses", None)):
        session.config.pluginmanager.register(Times(Path(options.times) / f"{worker or 'alone'}.tsv"))
