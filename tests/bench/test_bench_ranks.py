"""``bench.parts.ranks`` on a model too small to time: every contender trains alike, one that cannot run is named."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from offload_core.support.bfloat16 import why_bfloat16_is_slow

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMALL = [
    "--repetitions=1",
    "--rounds=1",
    "--steps=2",
    "--warm-up=1",
    "--layers=1",
    "--width=64",
    "--vocabulary=256",
    "--context=16",
]


def run(*arguments: str, path: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "bench.parts.ranks", *SMALL, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(path), **variables}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)


@pytest.fixture(autouse=True)
def _torch() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")


@pytest.mark.parametrize("variables", [{}, {"ONEDNN_MAX_CPU_ISA": "AVX2"}], ids=["here", "where bf16 is slow"])
def test_contenders_train_alike_and_one_that_cannot_run_is_named(variables: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "deepspeed.py").write_text("raise ImportError('no such peer')\n")
    out = tmp_path / "result.jsonl"
    names = ("offload-core", "offload-core, stage 3", "DeepSpeed", "DDP, no offload")
    done = run("--ranks=2", "--contenders", *names, f"--json={out}", path=tmp_path, **variables)
    assert done.returncode == 1, f"{done.stdout}\n{done.stderr}"
    assert "DeepSpeed: COULD NOT RUN" in done.stdout
    assert "no such peer" in done.stdout

    record = json.loads(out.read_text())
    is_slow = why_bfloat16_is_slow(environ={**os.environ, **variables}) is not None
    assert record["config"]["param_dtype"] == ("float32" if is_slow else "bfloat16")
    assert [note.partition(":")[0] for note in record["notes"]] == ["in fp32"] * is_slow
    assert [(entry["name"], "no such peer" in entry["why"]) for entry in record["missing"]] == [("DeepSpeed", True)]
    totals = {row["name"]: row for row in record["rows"] if row["metric"] == "total"}
    assert totals.keys() == set(names) - {"DeepSpeed"}
    ours, sharded, plain = (totals[name] for name in names if name != "DeepSpeed")
    assert ours["n"] == 2
    for metric in ("loss, last", "gradient norm, last"):
        last = {row["name"]: row for row in record["rows"] if row["metric"] == metric}
        ours, sharded, plain = (last[name] for name in names if name != "DeepSpeed")
        assert ours["p50"] == pytest.approx(plain["p50"], rel=1e-2)
        assert sharded["p50"] == ours["p50"]
    losses = {row["name"]: row["curve"] for row in record["rows"] if row["metric"] == "loss, last"}
    assert len(losses["offload-core"]) == 1 + 3  # the warm-up, and a step that is not counted
    assert losses["offload-core, stage 3"] == losses["offload-core"]
    compared = {ratio["name"].rpartition(": ")[2] for ratio in record["ratios"]}
    assert compared == {"offload-core, stage 3 / offload-core", "DDP, no offload / offload-core"}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--ranks=0", "--ranks: got '0', expected a count"),
        ("--ranks=40", "--ranks: got 40, expected at most 31 on one machine"),
        ("--steps=0", "--steps: got '0', expected a count"),
        ("--width=60", "--width: got 60, expected a multiple of the 8 heads"),
        ("--vocabulary=64", "--vocabulary: got 64, expected at least 256"),
        ("--contenders=Megatron", "invalid choice: 'Megatron'"),
    ],
)
def test_a_wrong_argument_is_named(argument: str, message: str) -> None:
    done = run(argument)
    assert done.returncode == 2
    assert message in done.stderr
