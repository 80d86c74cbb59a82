"""A timeline of steps, as JSON that https://ui.perfetto.dev and chrome://tracing show.

Times are the host's (``time.perf_counter_ns``, so files of ranks on one machine have one clock). A copy's span begins
when it is asked for, or when the copy before it ends, and ends when a waiting thread sees that it is done. If the
device computes asynchronously (CUDA, JAX), the lane ``compute`` shows the calls that asked for work, and waits on the
device itself are not visible.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import StateError

COMPUTE = "compute"
"""The caller: forward, backward, step, and its waits for the other lanes."""
TO_HOST = "device to host"
REDUCTION = "reduction"
"""Exchange between ranks, sums and norms."""
UPDATE = "update"
GATHER = "gather"
TO_DEVICE = "host to device"
MATRICES = "matrices"
"""To the device, computing there, and back."""
LANES = (COMPUTE, TO_HOST, REDUCTION, UPDATE, GATHER, TO_DEVICE, MATRICES)

_NOTHING = nullcontext()


class Span(NamedTuple):
    """One activity, with its times in nanoseconds."""

    lane: str
    what: str
    bucket: int | None
    n_bytes: int | None
    start: int
    end: int


class Trace:
    """The spans of one process, recorded while ``on``.

    Args:
        rank: the first rank whose shards the process holds.
        processes: their number; each writes its own file.
    """

    def __init__(self, rank: int, processes: int) -> None:
        self.on = False
        self._rank = rank
        self._processes = processes
        self._spans: list[Span] = []
        self._ends: dict[str, int] = {}

    def span(
        self, lane: str, what: str = "", bucket: int | None = None, n_bytes: int | None = None
    ) -> AbstractContextManager[None]:
        """Record the body as a span, if the trace is on."""
        return self._noted(lane, what, bucket, n_bytes) if self.on else _NOTHING

    @contextmanager
    def _noted(self, lane: str, what: str, bucket: int | None, n_bytes: int | None) -> Iterator[None]:
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self.record(Span(lane, what, bucket, n_bytes, start, time.perf_counter_ns()))

    def record(self, span: Span) -> None:
        """Record a span, from any thread."""
        self._spans.append(span)
        self._ends[span.lane] = span.end

    def end_of(self, lane: str) -> int:
        """The end of the last span of a lane, in nanoseconds; 0 without one."""
        return self._ends.get(lane, 0)

    @contextmanager
    def to_file(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Record the body, and write its spans to a file at the end, also after an error.

        With several processes each writes its rank before the suffix of ``path``: ``step.rank0.json``.

        Raises:
            StateError: a trace is being recorded already.
            OSError: the file cannot be written.
        """
        if self.on:
            raise StateError("trace() inside trace(); expected one at a time")
        target = Path(path)
        if self._processes > 1:
            target = target.with_name(f"{target.stem}.rank{self._rank}{target.suffix}")
        partial = target.with_name(target.name + ".partial")
        partial.touch()  # an error now, not after the steps
        self._spans, self._ends = [], {}
        self.on = True
        try:
            yield
        finally:
            self.on = False
            partial.write_text(json.dumps(self._as_json(list(self._spans))))
            os.replace(partial, target)

    def _as_json(self, spans: list[Span]) -> dict[str, Any]:
        events: list[dict[str, Any]] = [self._name("process_name", 0, f"rank {self._rank}")]
        events += [self._name("thread_name", lane, name) for lane, name in enumerate(LANES)]
        for span in sorted(spans, key=lambda span: span.start):
            args = {"bucket": span.bucket, "bytes": span.n_bytes}
            name = ": ".join(filter(None, ["" if span.bucket is None else f"bucket {span.bucket}", span.what]))
            events.append(
                {
                    "ph": "X",
                    "name": name,
                    "cat": span.lane,
                    "pid": self._rank,
                    "tid": LANES.index(span.lane),
                    "ts": span.start / 1e3,
                    "dur": (span.end - span.start) / 1e3,
                    "args": {key: value for key, value in args.items() if value is not None},
                }
            )
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def _name(self, what: str, lane: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": self._rank, "tid": lane, "args": {"name": name}}
