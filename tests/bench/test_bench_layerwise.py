"""``bench.parts.layerwise``: its ratios and targets, a disk that is too small, and every contender on a model too small
to time."""

import json
import re
import shutil
from collections import namedtuple

import pytest

pytest.importorskip("torch")
from bench.harness.contenders import Measurement, Result
from bench.parts import layerwise
from bench.parts.layerwise_run import ACCUMULATE, LOOP
from bench.parts.torch_contenders import ACCUMULATE_3, DS_3, FSDP2
from offload_core.commands.model_shapes import GPTConfig

TINY = GPTConfig(layers=3, width=64, heads=8, vocabulary=256, positions=64)
ON_DISK = GPTConfig(layers=3, width=256, heads=4, vocabulary=256, positions=None)


def result(total: float, cpu: float, sent: float) -> Result:
    return Result([Measurement([{"total": total}], [], sent, 0.0, 0.0, 0.0, 0, cpu=cpu) for _ in range(3)], 0, [])


RESULTS = {
    layerwise.LOOP_3: result(10.0, 8.0, 100.0),
    ACCUMULATE_3: result(5.0, 6.0, 25.0),
    FSDP2: result(20.0, 12.0, 200.0),
}


def recorded(path):
    return json.loads(path.read_text().splitlines()[-1])


def test_the_target_is_for_the_loop_and_bytes_stand_beside_times():
    experiment = layerwise.EXPERIMENTS[layerwise.RANKS]
    known = [*layerwise.ratios_of(experiment, RESULTS, "9 M", targets=True)]
    assert {each["name"].removeprefix("9 M"): (each["p50"], each["target"]) for each in known} == {
        f": {ACCUMULATE_3} / {layerwise.LOOP_3}": (0.5, 0.6),
        f", processor time: {ACCUMULATE_3} / {layerwise.LOOP_3}": (0.75, None),
        f", bytes sent: {ACCUMULATE_3} / {layerwise.LOOP_3}": (0.25, None),
        f": {ACCUMULATE_3} / {FSDP2}": (0.25, None),
        f", processor time: {ACCUMULATE_3} / {FSDP2}": (0.5, None),
        f", bytes sent: {ACCUMULATE_3} / {FSDP2}": (0.125, None),
    }
    assert not any(each["target"] for each in layerwise.ratios_of(experiment, RESULTS, "9 M", targets=False))
    without_ours = {name: of for name, of in RESULTS.items() if name != ACCUMULATE_3}
    assert not [*layerwise.ratios_of(experiment, without_ours, "9 M", targets=True)]


@pytest.mark.parametrize(("options", "needed"), [([], "84"), (["--one-engine"], "42")])
def test_a_disk_that_is_too_small_is_missing_and_starts_nothing(options, needed, tmp_path, monkeypatch, capsys):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 4 * 10**9))
    monkeypatch.setattr(layerwise, "ProcessGroup", None)
    monkeypatch.setattr(layerwise, "working_dtype", lambda threads: layerwise.WorkingDtype("bfloat16", 1.0))
    out = tmp_path / "results.jsonl"
    assert layerwise.main(["--only", "disk", f"--folder={tmp_path}", f"--json={out}", *options]) == 1
    [missing] = recorded(out)["missing"]
    assert missing["why"].startswith(f"{needed} GB of disk in {tmp_path} are needed, and 4 GB are free")
    assert "--one-engine" in missing["why"]


@pytest.mark.slow
def test_every_contender_trains_alike(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(layerwise.MODELS, "34m", TINY)
    out = tmp_path / "results.jsonl"
    command = ["--only", "ranks", "one", "--repetitions=1", "--rounds=1", "--steps=1", "--context=8", f"--json={out}"]
    status, known = layerwise.main(command), recorded(out)
    missing = {each["name"] for each in known["missing"]}
    assert missing <= {DS_3}, capsys.readouterr().out
    assert status == bool(missing)
    for part, experiment in layerwise.EXPERIMENTS.items():
        rows = [row for row in known["rows"] if row["part"] == part]
        losses = {row["name"]: row["curve"] for row in rows if row["metric"] == "loss, last"}
        assert losses.keys() == experiment.contenders.keys() - missing
        for name, curve in losses.items():
            assert len(curve) == 3
            assert curve == pytest.approx(losses[experiment.loop], rel=1e-2), name
        compared = {ratio["name"].rpartition(": ")[2] for ratio in known["ratios"]}
        assert {f"{experiment.ours} / {name}" for name in losses if name != experiment.ours} <= compared


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--one-engine"]])
def test_steps_on_disk_train_alike_and_leave_nothing_there(options, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(layerwise.SIZES, "0.1b", ON_DISK)
    folder, out = tmp_path / "disk", tmp_path / "results.jsonl"
    folder.mkdir()
    status = layerwise.main(["--only", "disk", "--quick", f"--folder={folder}", f"--json={out}", *options])
    output, errors = capsys.readouterr()
    assert status == 0, output
    assert not [*folder.iterdir()]
    losses: dict[str, list[float]] = {ACCUMULATE: [], LOOP: []}
    for name, loss in re.findall(r"^(.+): [\d.]+ s, loss ([\d.]+)$", errors, re.MULTILINE):
        losses[name].append(float(loss))
    assert {name: len(each) for name, each in losses.items()} == {ACCUMULATE: 3, LOOP: 2}
    if not options:  # each engine begins with the same weights
        assert losses[LOOP] == pytest.approx(losses[ACCUMULATE][:2], rel=1e-3)
    known = recorded(out)
    peaks = {row["name"]: row["p50"] for row in known["rows"] if row["metric"] == "peak memory"}
    assert peaks.keys() == {ACCUMULATE, LOOP}
    assert min(peaks.values()) > 0
    assert [each["target"] for each in known["ratios"] if "bytes read" not in each["name"]] == [0.4, 1.0]
