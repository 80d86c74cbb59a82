"""The model of time against a simulation of its machine, and the bench as a user runs it."""

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st
from strategies import law

from bench import overlap
from bench.overlap import Times

seconds = st.integers(0, 20).map(float)


def through(jobs, stages):
    """When each job leaves the last of the stages; each takes one job at a time, for so long, in order."""
    ready = list(jobs)
    for stage in stages:
        free = 0.0
        for i, at in enumerate(ready):
            ready[i] = free = max(free, at) + stage
    return ready


@law(200)
@given(st.integers(1, 9), st.builds(Times, seconds, seconds, seconds, seconds, seconds))
def test_the_models_are_what_the_machine_takes(buckets, t):
    expected = overlap.model(buckets, t)
    in_backward = list(itertools.accumulate([t.backward] * buckets))
    boundary = through(in_backward, [t.copy, t.norm])[-1]
    assert expected["overlap"] == through([boundary] * buckets, [t.update, t.copy, t.forward])[-1]
    early = through(in_backward, [t.copy, t.update, t.copy])[-1]
    assert expected["early"] == early + buckets * t.forward
    assert expected["serial"] == buckets * (t.forward + t.backward + 2 * t.copy + t.norm + t.update)
    assert expected["limit"] <= expected["early"]
    assert expected["limit"] <= expected["overlap"] <= expected["serial"]


def test_a_run_measures_every_schedule_and_writes_its_traces(tmp_path, capsys):
    small = ["--params=1024", "--scale=1", "--buckets=2", "--rounds=1", "--steps=1", "--cases=compute"]
    overlap.main([*small, f"--json={tmp_path / 'result.jsonl'}", f"--trace={tmp_path}"])
    [record] = [json.loads(line) for line in (tmp_path / "result.jsonl").read_text().splitlines()]
    assert [row["clipping"] for row in record["results"]] == [True, False]
    for row in record["results"]:
        assert row["seconds"].keys() == {"overlap", "serial"}
        assert all(s > 0 for taken in row["seconds"].values() for s in taken)
    assert "largest deviation" in capsys.readouterr().out
    assert len(list(tmp_path.glob("compute-2-*-*.json"))) == 4
