"""``bench.parts.fsdp2``: its ratios and targets, resumes that cannot run or load other bits, and every contender on a
model too small to time."""

import importlib.util
import json
from collections import namedtuple

import pytest

from bench.harness.contenders import Measurement, Result
from bench.parts import fsdp2
from bench.parts.fsdp2_run import CHECKPOINT, DCP_OURS, DCP_TORCH
from bench.parts.torch_contenders import (
    FSDP2,
    FSDP2_ALONE,
    FSDP2_ALONE_UNCLIPPED,
    FSDP2_ON_DEVICE,
    FSDP2_OURS,
    FSDP2_OURS_NARROW,
    FSDP2_OURS_UNCLIPPED,
    FSDP2_UNCLIPPED,
)
from offload_core.commands.model_shapes import GPTConfig

TINY = GPTConfig(layers=1, width=64, heads=8, vocabulary=256, positions=64)


def result(compute: float, update: float, cpu: float) -> Result:
    phases = {"forward": compute / 2, "backward": compute / 2, "step": update, "total": compute + update}
    return Result([Measurement([phases], [], 0.0, 0.0, 0.0, 0.0, 0, cpu=cpu) for _ in range(3)], 0, [])


RESULTS = {
    FSDP2_OURS: result(8.0, 2.0, 1.0),
    FSDP2: result(12.0, 3.0, 4.0),
    FSDP2_ON_DEVICE: result(6.0, 2.0, 3.0),
}


def test_the_target_is_for_offload_and_the_most_that_is_possible_stands_beside_it():
    known = {each["name"]: each for each in fsdp2.ratios_of(RESULTS, 9 * 10**6, 2, targets=True)}
    assert {name: (each["p50"], each["target"]) for name, each in known.items()} == {
        f"9 M, 2 ranks, at most possible: {FSDP2} / forward and backward of {FSDP2_ON_DEVICE}": (2.5, None),
        f"9 M, 2 ranks: {FSDP2} / {FSDP2_OURS}": (1.5, 1.3),
        f"9 M, 2 ranks, processor time: {FSDP2} / {FSDP2_OURS}": (4.0, None),
        f"9 M, 2 ranks: {FSDP2_ON_DEVICE} / {FSDP2_OURS}": (0.8, None),
        f"9 M, 2 ranks, processor time: {FSDP2_ON_DEVICE} / {FSDP2_OURS}": (3.0, None),
    }
    notes = {name: each["note"] for name, each in known.items() if "note" in each}
    assert [(name, note.split()[-1]) for name, note in notes.items()] == [
        (f"9 M, 2 ranks: {FSDP2} / {FSDP2_OURS}", "2.50")
    ]
    assert not any(each["target"] for each in fsdp2.ratios_of(RESULTS, 9 * 10**6, 2, targets=False))


def recorded(path):
    return json.loads(path.read_text().splitlines()[-1])


def test_a_resume_that_lacks_memory_is_missing_and_starts_nothing(tmp_path, monkeypatch, capsys):
    memory = namedtuple("memory", "available total")
    monkeypatch.setattr(fsdp2.psutil, "virtual_memory", lambda: memory(5 * 10**9, 8 * 10**9))
    monkeypatch.setattr(fsdp2, "ProcessGroup", None)
    out = tmp_path / "results.jsonl"
    assert fsdp2.main(["--only", "resume", "--numel=1000000000", f"--json={out}"]) == 1
    [missing] = recorded(out)["missing"]
    assert missing["name"] == "resume"
    assert "GB of memory are needed, and 5 GB are free: a lower --numel" in missing["why"]


class Group:
    """The processes of a resume, whose loads give these sums of bits."""

    def __init__(self, sums):
        self.sums = sums

    def answers(self):
        return []

    def ask(self, act):
        seconds = {"write": 1.0} if act == "save" else {"read": 2.0}
        return [{"seconds": seconds, "sums": [1] if act == "save" else self.sums}]

    def peak(self):
        return 10**9

    def forget_peak(self):
        pass

    def close(self):
        pass


def test_loaded_bits_that_were_not_saved_are_no_resume(tmp_path, monkeypatch, capsys):
    groups = {DCP_OURS: Group([2]), CHECKPOINT: Group([1]), DCP_TORCH: Group([1])}
    monkeypatch.setattr(fsdp2.Resumes, "_start", lambda self, name, ranks: groups[name])
    out = tmp_path / "results.jsonl"
    command = ["--only", "resume", "--numel=1000000", "--resumes=2", f"--folder={tmp_path}", f"--json={out}"]
    assert fsdp2.main(command) == 1
    record = recorded(out)
    assert [(entry["name"], entry["why"].partition(":")[0]) for entry in record["missing"]] == [
        (f"resume, {DCP_OURS}", "ValueError")
    ]
    assert [ratio["name"].partition(": ")[2] for ratio in record["ratios"]] == [f"{DCP_TORCH} / {CHECKPOINT}"]
    totals = {row["name"]: row for row in record["rows"] if row["metric"] == "resume, total"}
    assert {name: (row["p50"], row["n"]) for name, row in totals.items()} == {CHECKPOINT: (2.0, 2), DCP_TORCH: (2.0, 2)}


needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@needs_torch
@pytest.mark.slow
def test_every_contender_trains_alike_and_holds_the_bytes_of_its_offload(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(fsdp2.MODELS, "34m", TINY)
    out = tmp_path / "results.jsonl"
    command = ["--only", "steps", "--repetitions=1", "--rounds=1", "--steps=2", "--context=16", f"--json={out}"]
    assert fsdp2.main(command) == 0, capsys.readouterr().out
    rows = {(row["name"], row["metric"]): row for row in recorded(out)["rows"]}
    losses = {name: row["curve"] for (name, metric), row in rows.items() if metric == "loss, last"}
    assert losses[FSDP2_OURS_UNCLIPPED] == losses[FSDP2_ALONE_UNCLIPPED] == losses[FSDP2_UNCLIPPED]
    assert losses[FSDP2_OURS] == losses[FSDP2_ALONE] == pytest.approx(losses[FSDP2], rel=1e-3)
    assert losses[FSDP2_OURS_NARROW] == pytest.approx(losses[FSDP2], rel=1e-2)

    def bytes_of(name):
        places = [rows[name, f"{place} bytes after backward"]["p50"] * 1e6 for place in ("host", "device")]
        return [round(2 * n_bytes / TINY.numel, 1) for n_bytes in places]

    # Parameters, gradients and two states in fp32; without our offload each lies with the others.
    assert (bytes_of(FSDP2), bytes_of(FSDP2_ON_DEVICE)) == ([16.0, 0.0], [0.0, 16.0])
    assert bytes_of(FSDP2_OURS) == bytes_of(FSDP2_ALONE) == [8.0, 8.0]
    assert bytes_of(FSDP2_OURS_NARROW) == [12.0, 4.0]


@needs_torch
@pytest.mark.slow
def test_every_checkpoint_of_four_ranks_is_loaded_by_two_with_its_bits(tmp_path, capsys):
    out = tmp_path / "results.jsonl"
    command = ["--only", "resume", "--numel=1000000", "--resumes=1", f"--folder={tmp_path}", f"--json={out}"]
    assert fsdp2.main(command) == 0, capsys.readouterr().out
    metrics = {(row["name"], row["metric"]) for row in recorded(out)["rows"]}
    assert {(name, "resume, read") for name in (DCP_OURS, CHECKPOINT, DCP_TORCH)} <= metrics
    assert len(recorded(out)["ratios"]) == 2
