"""The benchmark of phases: bytes over the link, and contenders that are absent."""

import json
from dataclasses import asdict

import pytest

pytest.importorskip("torch")
from bench.harness.processes import ContenderError
from bench.parts import phases
from bench.parts.phases_run import CPU, DS, DS_OFFLOADED, LORA, OURS, SIMULATED, Run
from offload_core.commands.model_shapes import GPTS
from tests.support import simulated


def recorded(monkeypatch, tmp_path, runs, *arguments):
    """The exit status and the record, of contenders that run as ``runs`` says."""

    def run(contender, settings):
        found = runs[contender, settings["device"]]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(phases, "run", run)
    monkeypatch.setattr(phases, "find_spec", lambda name: object())
    status = phases.main(["--quick", f"--json={tmp_path / 'result.jsonl'}", *arguments])
    return status, json.loads((tmp_path / "result.jsonl").read_text())


def test_a_round_is_compared_with_deepspeeds_and_with_a_plain_copy_of_its_bytes(monkeypatch, tmp_path):
    ours = Run(10**9, [1.0, 2.0], [3.0, 4.0], 0, 2 * 10**9, [], [1.0, 0.5], [0.1], (2 * 10**9, 512), {"torch": "2"})
    theirs = Run(10**9, [8.0, 8.0], [8.0, 8.0], 2 * 10**9, 2 * 10**9, [1.0], [1.0], [0.1, 0.1], (2 * 10**9, 0), {})
    failed = ContenderError("RuntimeError: no luck")
    runs = {(OURS, SIMULATED): ours, (DS_OFFLOADED, SIMULATED): theirs, (DS, SIMULATED): failed}
    arguments = ["--devices", SIMULATED, "--contenders", OURS, DS, DS_OFFLOADED]
    status, known = recorded(monkeypatch, tmp_path, runs, *arguments)
    assert status == 1
    assert known["missing"] == [{"name": f"{DS}, {SIMULATED}", "why": "RuntimeError: no luck"}]
    rows = {(row["metric"], row["unit"]): row["p50"] for row in known["rows"] if row["name"] == OURS}
    assert rows["away, crossed", "bytes/parameter"] == 0.0
    assert rows["back, crossed", "bytes/parameter"] == 2.0
    assert rows["back, plain copy", "GB/s"] == pytest.approx(3.0)
    assert ("away", "GB/s") not in rows  # nothing crosses
    back, whole = known["ratios"]
    assert back["p50"] == pytest.approx((8 / 3 + 8 / 4) / 2)
    assert whole["p50"] == pytest.approx((16 / 4 + 16 / 6) / 2)
    assert whole["note"] == "one gc.collect() there takes 100 ms"


@pytest.mark.slow
@pytest.mark.parametrize("contender", [OURS, LORA])
def test_a_round_brings_all_parameters_back_once_and_takes_only_frozen_ones_to_the_host(contender):
    if (missing := simulated.why_not()) is not None:
        pytest.skip(missing)
    if contender == LORA:
        pytest.importorskip("peft")
    settings = {"gpt": asdict(GPTS["tiny"]), "rounds": 1, "threads": 1, "context": 8, "device": SIMULATED}
    known = phases.run(contender, settings)
    numel = GPTS["tiny"].numel
    assert known.to_device == 2 * known.params
    assert known.to_host == (2 * numel if contender == LORA else 0)
    before, after = known.held
    assert before >= 2 * known.params
    assert after < 2048  # the batch
    assert len(known.away) == len(known.back) == 1
    assert phases.run(contender, {**settings, "device": CPU}).to_device == 0
