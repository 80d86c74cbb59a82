"""The targets of whole steps are the large model's, and what could be reached at most stands beside them."""

import json

import pytest

from bench import record
from bench.harness import working_dtype
from bench.harness.contenders import Measurement, Result
from bench.parts import step


def result(forward, backward, update):
    phases = {"forward": forward, "backward": backward, "step": update, "total": forward + backward + update}
    return Result([Measurement([phases], [], 0.0, 0.0, 0.0, 0.0, 0) for _ in range(3)], 0, [])


RESULTS = {
    step.OURS: result(2.0, 4.0, 2.0),
    step.DS_2: result(1.0, 20.0, 11.0),
    step.GRADIENTS_ONLY: result(1.0, 4.0, 0.5),
    step.STREAM: Result([Measurement([{"total": 1.0}], [], 0.0, 0.0, 0.0, 0.0, 0) for _ in range(3)], 0, []),
}


def test_ratios_and_targets():
    known = {each["name"]: (each["p50"], each["target"]) for each in step.ratios_of(RESULTS, "9 M", targets=True)}
    limit = "backward of PyTorch and the streaming limit"
    assert known == {
        "9 M, whole step: DeepSpeed / offload-core": (4.0, 3.5),
        "9 M, step: DeepSpeed / offload-core": (11 / 3, 1.25),  # what the update moved into the next forward counts
        "9 M, backward + step: DeepSpeed / offload-core": (31 / 7, 4.0),
        f"9 M, whole step: offload-core / forward and {limit}": (8 / 6, 1.1),
        f"9 M, at most possible: whole step, DeepSpeed / forward and {limit}": (32 / 6, None),
        f"9 M, at most possible: backward + step, DeepSpeed / {limit}": (31 / 5, None),
    }
    notes = {each["name"]: each["note"] for each in step.ratios_of(RESULTS, "9 M", targets=True) if "note" in each}
    assert [(name, note.partition(";")[0].split()[-1]) for name, note in notes.items()] == [
        ("9 M, whole step: DeepSpeed / offload-core", "5.33"),
        ("9 M, backward + step: DeepSpeed / offload-core", "6.20"),
    ]
    assert not any(each["target"] for each in step.ratios_of(RESULTS, "9 M", targets=False))
    assert step.LARGEST in step.MODELS


def last(path):
    return json.loads(path.read_text().splitlines()[-1])


@pytest.mark.draws(1)
@pytest.mark.parametrize(("slowdown", "dtype"), [(0.7, "bfloat16"), (180.0, "float32")])
def test_where_bf16_is_slow_a_step_is_in_fp32_and_the_record_says_so(slowdown, dtype, tmp_path, monkeypatch, capsys):
    """The table shows it, no target of bf16 counts, and each round's rows are in the file at once."""
    asked, kept, path = [], [], tmp_path / "results.jsonl"
    result = RESULTS[step.OURS]

    def measure_all(groups, each_round, **counts):
        for n in (1, 2):
            each_round({step.OURS: [Result(result.measurements[:n], 0, [])]})
            kept.append(last(path))
        return {step.OURS: [result]}, {}, {"torch": "2"}

    monkeypatch.setattr(step, "measure_all", measure_all)
    monkeypatch.setattr(step, "start", lambda settings, ranks, name: asked.append(settings))
    monkeypatch.setattr(step, "working_dtype", lambda threads: working_dtype.of(slowdown))
    monkeypatch.setattr(step, "TARGETS", [step.Comparison(step.OURS, step.OURS, target=2.0)])
    record.append(path, {"bench": "another"})
    assert step.main([f"--models={step.LARGEST}", "--quick", f"--json={path}"]) == 0
    assert {settings["param_dtype"] for settings in asked} == {dtype}
    totals = [[row["n"] for row in each["rows"] if row["metric"] == "total"] for each in kept]
    assert totals[:2] == [[1], [2]]
    said = [missing["why"] for each in kept for missing in each["missing"]]
    assert said == ["the part was ended before it was measured"] * len(kept)
    assert len(path.read_text().splitlines()) == 2
    known = last(path)
    assert known["missing"] == []
    assert {row["n"] for row in known["rows"] if row["metric"] == "total"} == {9}
    notes = [note for note in known["notes"] if note.startswith("in fp32: ")]
    assert ["180 times as long" in note for note in notes] == [True] * (dtype == "float32")
    assert {ratio["target"] for ratio in known["ratios"]} == {2.0 if dtype == "bfloat16" else None}
    assert known["config"]["param_dtype"] == dtype
    assert f"parameters in {'fp32' if notes else 'bf16'}, 2 x 64 tokens" in capsys.readouterr().out
