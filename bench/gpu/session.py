"""One call of one part: its remaining time, and its processes, which are bounded and recorded."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench import record
from bench.gpu.results import FAILED, TRAINED, Record, Results, is_absent
from bench.gpu.sizes import Sizes
from bench.harness.contenders import Contender, Result
from bench.harness.processes import ContenderError, ProcessGroup

LOG = "log.txt"
_LEAST = 5.0
"""A measurement begins only if more seconds than these are left."""
_LAST_LINES = 15
Rows = list[dict[str, Any]]
Read = tuple[Rows, list[dict[str, str]], list[str]]
"""Rows, failures and notes."""


class TimeIsUpError(Exception):
    """The part's time is over. The running measurement is not recorded."""


@dataclass
class Session:
    part: str
    title: str
    folder: Path
    results: Results
    sizes: Sizes
    accelerator: dict[str, Any]
    rehearsal: bool
    deadline: float
    again: bool = False
    only: str = ""
    """Only measurements with these words in their name are made."""
    began: float = field(default_factory=time.monotonic)
    wrong: list[str] = field(default_factory=list)
    """The measurements that failed in this call."""
    _measured: set[str] = field(default_factory=set)

    def done(self, measurement: str) -> bool:
        """True if this call need not make the measurement."""
        if self.only not in measurement:
            return True
        if self.again and measurement not in self._measured:
            return False
        return self.results.done(self.part, measurement) is not None

    def seconds(self, limit: float) -> float:
        """Return the seconds that the next process may take, ``limit`` at most."""
        left = self.deadline - time.monotonic()
        if left < _LEAST:
            raise TimeIsUpError
        return min(limit, left)

    def add(self, measurement: str, **fields: Any) -> Record:
        self._measured.add(measurement)
        on = {"title": self.title, "accelerator": self.accelerator, "rehearsal": self.rehearsal}
        known = self.results.add(self.part, measurement, **on, **fields)
        for each in known["missing"]:
            absent = is_absent(each["why"])
            self.say(f"{measurement}: {'NOT HERE' if absent else 'FAILED'}: {each['why']}")
            if not absent:
                self.wrong.append(measurement)
        return known

    def say(self, words: str) -> None:
        print(f"[{time.monotonic() - self.began:4.0f} s] {words}", flush=True)

    def command(
        self, measurement: str, arguments: Sequence[str], limit: float, read: Callable[[str, str, float], Read]
    ) -> None:
        """Run a module of Python; ``read`` gets its output, why it failed (nothing: it did not), and its seconds."""
        if self.done(measurement):
            return
        seconds, start, log = self.seconds(limit), time.monotonic(), self.folder / LOG
        self.say(f"== {measurement}: {' '.join(arguments)}")
        with log.open("a+b") as file:
            begin = file.seek(0, os.SEEK_END)
            command = [sys.executable, "-m", *arguments]
            process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
            try:
                status = process.wait(seconds)
                why = f"exit status {status}" if status else ""
            except subprocess.TimeoutExpired:
                why = f"took longer than its {seconds:.0f} s"
            finally:
                _end(process)
            file.seek(begin)
            words = file.read().decode(errors="replace")
        if why and seconds < limit and "longer" in why:
            raise TimeIsUpError
        rows, missing, notes = read(words, why, time.monotonic() - start)
        self.say("\n".join(words.strip().splitlines()[-_LAST_LINES:] if missing else words.strip().splitlines()[-1:]))
        self.add(measurement, rows=rows, missing=missing, notes=notes, config={"arguments": list(arguments)})

    def steps(
        self,
        name: str,
        start: Callable[[], ProcessGroup],
        workloads: Mapping[str, Mapping[str, int]],
        limit: float,
        config: Mapping[str, Any],
        counts: tuple[int, int],
        of_failure: Callable[[str], dict[str, Any] | None] = lambda why: None,
        about: Mapping[str, Any] = {},
        **extra: Any,
    ) -> None:
        """Build a contender and have it take the steps of each workload, of which each is a measurement.

        ``counts`` are steps: those that warm it up, and those that are counted after one more.

        ``of_failure`` makes a result of an error that is one, such as a model that does not fit. The record has what
        ``about`` says, and its rows have ``extra``.
        """
        open_ones = {measurement: each for measurement, each in workloads.items() if not self.done(measurement)}
        if not open_ones:
            return
        seconds, over = self.seconds(limit), threading.Event()
        self.say(f"== {', '.join(open_ones)}")
        before = _taken()
        contender = Contender(start())
        alarm = threading.Timer(seconds, lambda: (over.set(), contender.group.kill()))
        alarm.start()
        try:
            contender.imported()
            contender.build(counts[0])
            for measurement, workload in open_ones.items():
                measured = contender.measure(counts[1], [workload])
                if measured is None:
                    raise contender.failure or ContenderError("ended without a word")
                result = Result(measured, contender.setup_peak, [*contender.losses, *measured[0].losses])
                rows = result.rows(name, **workload, **extra)
                total = result.samples("total")
                speed = [workload["micro_batch"] * self.sizes.context / (1e-3 * ms) for ms in total]
                rows.append(record.row(name, "speed", "tokens/s", speed, **workload, **extra))
                taken = max(_taken() - before, 0) / 1e9
                rows.append(record.row(name, "memory taken of the host", "GB", [taken], **workload, **extra))
                self.say(f"{measurement}: {record.quantiles(total)[1]:.1f} ms a step")
                known = {"rows": rows, "versions": contender.versions, "config": {**config, **workload}}
                self.add(measurement, **known, **about, outcome=TRAINED)
        except ContenderError as error:
            if over.is_set() and seconds < limit:
                raise TimeIsUpError from None
            why = f"took longer than its {seconds:.0f} s" if over.is_set() else error.why
            with (self.folder / LOG).open("a") as log:
                log.write(f"== {', '.join(open_ones)}\n{error}\n")
            for measurement in open_ones:
                if measurement not in self._measured:
                    fields = of_failure(why) or {"missing": [record.missing(name, why)], "outcome": FAILED}
                    self.add(measurement, config={**config, **open_ones[measurement]}, **about, **fields)
        finally:
            alarm.cancel()
            contender.group.close()


def _taken() -> int:
    """Bytes of the machine's memory that are not available: pinned memory is in no process's own count."""
    memory = psutil.virtual_memory()
    return memory.total - memory.available


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
