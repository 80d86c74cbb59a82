"""Shards change no bit of this kernel's update, and a contender whose they change is counted."""

import json

import numpy as np
import pytest

from bench.parts import exactness


def test_an_update_that_knows_where_it_was_cut_is_counted():
    def update(arrays, parts):
        param = arrays[0].copy()
        for part in parts[1:]:
            param[part.start] += 1
        return param, param, np.zeros_like(param)

    arrays = [np.ones(103, np.float32)] * 2
    assert exactness.changed(update, arrays, [1, 2, 5]) == {1: (0, 0), 2: (1, 1), 5: (4, 4)}


def test_this_kernels_bits_are_the_same_in_any_shards(tmp_path, monkeypatch):
    pytest.importorskip("torch")

    def absent(params):
        raise ImportError("no such peer")

    monkeypatch.setattr(exactness, "deepspeed", absent)  # it would compile
    path = tmp_path / "result.jsonl"
    exactness.main(["--numel=10007", "--steps=3", f"--json={path}"])
    record = json.loads(path.read_text())
    ours = [row for row in record["rows"] if row["name"] == "this"]
    assert {row["shards"] for row in ours} == {1, 2, 5, 200}
    assert all(row["p50"] == 0 for row in ours)
    torchs = {row["shards"]: row["p50"] for row in record["rows"] if row["name"].startswith("torch")}
    assert set(torchs) == {1, 2, 5, 200}
    assert record["missing"] == [{"name": "DeepSpeedCPUAdam", "why": "ImportError: no such peer"}]
