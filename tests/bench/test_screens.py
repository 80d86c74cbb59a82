"""The pictures of real runs are drawn from the files that runs write."""

import json
import re

import pytest

from bench import screens
from offload_core.device.trace import COMPUTE, LANES, UPDATE, Span, Trace


def words(picture):
    return set(re.findall(r">([^<>]+)</text>", picture.read_text()))


@pytest.mark.integration
def test_a_trace_is_drawn_with_all_its_lanes_phases_and_buckets(tmp_path):
    trace = Trace(rank=0, processes=1)
    with trace.to_file(tmp_path / "step.json"):
        trace.note(Span(COMPUTE, "forward", None, None, 0, 1_000_000))
        trace.note(Span(UPDATE, "", 3, None, 1_000_000, 3_000_000))
        trace.note(Span(COMPUTE, "wait", 3, None, 1_000_000, 3_000_000))
    screens.draw_trace(tmp_path / "step.json", tmp_path / "trace.svg")
    assert {*LANES, "forward", "bucket 3", "waiting"} <= words(tmp_path / "trace.svg")


@pytest.mark.integration
def test_the_picture_of_losses_says_how_many_differ(tmp_path):
    losses = [(2.0, 2.0), (1.5, 1.25), (1.0, 1.0)]
    records = [{"step": i + 1, "loss": ours, "plain_loss": plain} for i, (ours, plain) in enumerate(losses)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    screens.draw_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.svg")
    assert "1 of 3 losses differ in any bit" in words(tmp_path / "loss.svg")


def test_the_pictures_of_the_pages_are_those_that_it_draws_and_small():
    for name in screens.SCREENS:
        assert (screens.PICTURES / f"{name}.svg").stat().st_size < 100_000
