"""A plugin of pytest that measures each case: ``pytest -p tests.support.times --times FOLDER`` (``make test-times``).

Processor time is that of the process and of all its descendants, also those that go on: servers of forks, ranks.
"""

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest


def processor_seconds() -> float:
    """What this process and its descendants have spent so far, with those that have ended."""
    me, total = psutil.Process(), 0.0
    for process in [me, *me.children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue  # its parent has its time now
    return total


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", metavar="FOLDER", help="a folder in which each worker writes a row a case")


class Times:
    def __init__(self, path: Path) -> None:
        self.rows = path.open("w")
        self.at = self.begun()

    def begun(self) -> tuple[float, float]:
        return time.monotonic(), processor_seconds()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[object]:
        result = yield
        was, self.at = self.at, self.begun()
        wall, spent = (now - then for now, then in zip(self.at, was, strict=True))
        self.rows.write(f"{spent:.2f}\t{wall:.2f}\t{item.nodeid}\n")
        return result

    def pytest_sessionfinish(self) -> None:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        self.rows.write(
            f"# {sum(u.ru_nvcsw for u in used)} {sum(u.ru_nivcsw for u in used)} {processor_seconds():.1f}\n"
        )
        self.rows.close()


def pytest_collection_finish(session: pytest.Session) -> None:
    if (folder := session.config.getoption("times")) and not session.config.getoption("collectonly"):
        worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
        if worker != "alone" or not session.config.getoption("numprocesses", None):
            session.config.pluginmanager.register(Times(Path(folder) / f"{worker}.tsv"))
