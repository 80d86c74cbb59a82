"""The model of time against a simulation of its machine, and the bench as a user runs it."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.parts import overlap
from bench.parts.overlap_run import Times
from offload_core.native import kernels
from tests.support.strategies import law

pytestmark = pytest.mark.slow

seconds = st.integers(0, 20).map(float)


def through(jobs, stages):
    """Return when each job leaves the last stage. A stage takes one job at a time, for its duration, in order."""
    ready = list(jobs)
    for stage in stages:
        free = 0.0
        for i, at in enumerate(ready):
            ready[i] = free = max(free, at) + stage
    return ready


@law(200)
@given(st.integers(1, 9), st.builds(Times, *[seconds] * 8))
def test_the_models_are_what_the_machine_takes(buckets, t):
    expected = overlap.model(buckets, t)
    in_backward = list(itertools.accumulate([t.backward] * buckets))
    boundary = through(in_backward, [t.copy, t.norm])[-1]
    assert expected["overlap"] == through([boundary] * buckets, [t.update, t.copy, t.forward])[-1]
    forward = through([0.0] * buckets, [t.round, t.copy, t.forward])[-1]
    published = through([0.0] * buckets, [t.round, t.copy])[-1]
    updated = through([published] * buckets, [t.advance])
    at, arrived = forward, []
    for i in range(buckets):
        at = max(at + t.backward, updated[i])
        arrived.append(at)
    on_host = [max(at, updated[-1]) for at in through(arrived, [t.copy])]
    assert expected["delayed"] == through(on_host, [t.norm])[-1]
    assert expected["serial"] == buckets * (t.forward + t.backward + 2 * t.copy + t.norm + t.update)
    assert expected["limit"] <= expected["overlap"] <= expected["serial"]


@law(200)
@given(st.integers(1, 9), st.builds(Times, *[seconds] * 8), seconds, st.booleans())
def test_parameters_that_keep_pace_with_backward_delay_the_forward_by_the_last_of_them(buckets, t, margin, clips):
    t = t._replace(norm=1.0 if clips else 0.0)
    pace = max(t.copy, t.norm + max(t.emit, t.update), t.advance) + margin
    t = t._replace(backward=2 * buckets * pace, forward=2 * buckets * pace)
    tail = t.copy + t.norm + t.update + t.copy
    assert overlap.in_backward(buckets, t) == buckets * (t.forward + t.backward) + tail


def test_a_run_measures_every_schedule_and_writes_its_traces(tmp_path, capsys):
    small = ["--params=1024", "--scale=1", "--buckets=2", "--rounds=1", "--steps=1", "--cases=compute"]
    overlap.main([*small, f"--json={tmp_path / 'result.jsonl'}", f"--trace={tmp_path}"])
    [record] = [json.loads(line) for line in (tmp_path / "result.jsonl").read_text().splitlines()]
    assert [(row["name"], row["clipping"]) for row in record["rows"]] == [
        (schedule, clips) for clips in (True, False) for schedule in overlap.SCHEDULES
    ]
    assert all(0 < row["p20"] <= row["p50"] <= row["p80"] for row in record["rows"])
    [ratio] = [ratio for ratio in record["ratios"] if ratio["name"].startswith("in backward / limit")]
    [row] = [row for row in record["rows"] if (row["name"], row["clipping"]) == ("in backward", True)]
    assert ratio["p50"] == pytest.approx(row["p50"] / row["limit_ms"])
    assert "off its model" in capsys.readouterr().out
    assert len(list(tmp_path.glob("compute-2-*-*.json"))) == 8
    assert kernels.update.__module__ == kernels.__name__, "as it was"
