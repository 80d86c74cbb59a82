"""The comparison of Trainer with DeepSpeed's integration and OffloadTrainer ends in an error where they differ."""

import json
import math

import pytest

pytest.importorskip("transformers")
from bench.harness.processes import ContenderError
from bench.parts import trainer
from bench.parts.trainer_run import CPU, DS_2, DS_3, OURS, OURS_3, SIMULATED, TORCH, Run

pytestmark = pytest.mark.integration


def compared(monkeypatch, tmp_path, changed):
    """The exit status and the record, of runs that are alike but for what is ``changed`` of some."""

    def run(contender, device, folder, settings):
        assert json.loads((folder / "ds_config-3.json").read_text())["zero_optimization"]["stage"] == 3
        found = changed.get((contender, device), {})
        if isinstance(found, Exception):
            raise found
        held = (8.0, 4.0) if device == SIMULATED else None
        return Run(**{"losses": [2.0, 1.0], "norms": [4.0, 2.0], "bytes": held, "versions": {}, **found})

    monkeypatch.setattr(trainer, "run", run)
    monkeypatch.setattr(trainer, "save_model", lambda folder: 1)
    status = trainer.main(["--steps=2", f"--json={tmp_path / 'result.jsonl'}"])
    return status, json.loads((tmp_path / "result.jsonl").read_text())


def test_runs_that_agree_to_their_roundings_give_the_bytes_of_all(monkeypatch, tmp_path):
    near = {(OURS, CPU): {"losses": [2.0, 1.0 + 1e-7]}, (OURS_3, SIMULATED): {"bytes": (2.0, 1.0)}}
    status, record = compared(monkeypatch, tmp_path, near)
    assert status == 0
    apart = {(row["name"], row["device"]): row["p50"] for row in record["rows"] if row["metric"] == "losses apart"}
    assert apart.pop((OURS, CPU)) == pytest.approx(1e-7, rel=1e-6)
    assert set(apart.values()) == {0.0}
    held = {row["name"]: row["p50"] for row in record["rows"] if row["metric"] == "most on the device, whole run"}
    assert (held[TORCH], held[DS_3], held[OURS_3]) == (8.0, 8.0, 2.0)
    assert record["ratios"][-1]["p50"] == 0.25


@pytest.mark.parametrize(
    ("contender", "device", "changed"),
    [
        (OURS, CPU, {"losses": [2.0, 1.00001]}),
        (DS_3, SIMULATED, {"norms": [4.0001, 2.0]}),
        (DS_2, SIMULATED, {"norms": [math.nan, 2.0]}),
        (DS_2, CPU, ContenderError("ImportError: no such peer")),
    ],
)
def test_a_difference_beyond_roundings_and_a_contender_that_does_not_run_fail(
    monkeypatch, tmp_path, contender, device, changed
):
    status, record = compared(monkeypatch, tmp_path, {(contender, device): changed})
    assert status == 1
    assert [each["name"] for each in record["missing"]] == [f"{DS_2}, {CPU}"] * isinstance(changed, Exception)


def test_a_run_that_broke_off_is_no_comparison(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="1 losses, of 2"):
        compared(monkeypatch, tmp_path, {(DS_2, CPU): {"losses": [2.0]}})
