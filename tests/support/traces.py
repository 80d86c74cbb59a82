"""Trace files, read back."""

import json

from offload_core.device.trace import COMPUTE, LANES


def read(path):
    """The spans of a trace file, as ``(lane, name, bucket)`` by their ends; what else must be in it is checked."""
    content = json.loads(path.read_text())
    events = content["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tuple(lanes.values()) == LANES
    assert [e["name"] for e in events if e["ph"] == "M"].count("process_name") == 1
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) + len(lanes) + 1 == len(events)
    for span in spans:
        assert span["dur"] >= 0
        assert lanes[span["tid"]] == span["cat"]
    return spans


def ends(spans, bucket):
    """Return a bucket's activities in the order in which they ended, without the compute that waited for it."""
    of_bucket = [s for s in spans if s["args"].get("bucket") == bucket and s["cat"] != COMPUTE]
    prefix = f"bucket {bucket}"
    assert all(s["name"].startswith(prefix) for s in of_bucket)
    in_order = sorted(of_bucket, key=lambda s: s["ts"] + s["dur"])
    return [(s["cat"], s["name"].removeprefix(prefix).removeprefix(": ")) for s in in_order]
