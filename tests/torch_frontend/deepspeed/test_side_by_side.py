"""One script, run with the installed DeepSpeed and with ``frontends.torch.deepspeed``: one line differs."""

import math
import os
import subprocess
import sys
import warnings

import pytest
import torch

from offload_core.deepspeed.names import VERSION
from tests.support.deepspeed_cases import CASES, FOR_TWO
from tests.support.processes import ROOT, free_port

pytestmark = pytest.mark.slow
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    deepspeed = pytest.importorskip("deepspeed")
if deepspeed.__version__ != VERSION:
    pytest.skip(f"the face is that of DeepSpeed {VERSION}", allow_module_level=True)

ROUNDS_ELSEWHERE = {1: {"stage 0, bf16"}, 2: {f"stage {stage}, bf16" for stage in range(4)}}
"""Where DeepSpeed rounds in other places, by the number of ranks: the face warns."""
SAME_BITS = {"a client's SGD"}
"""Where no library computes with a square root of its own."""


def run(library, out, ranks, cases):
    """What each rank saw."""
    port = free_port()
    started = []
    for rank in range(ranks):
        place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_SIZE": ranks, "MASTER_PORT": port}
        settings = {
            "MASTER_ADDR": "127.0.0.1",
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", "tests.workers.deepspeed_script", library, str(out), *cases]
        env = {**os.environ, **settings, **{name: str(value) for name, value in place.items()}}
        with out.with_name(f"{out.name}.{rank}.log").open("wb") as log:
            started.append(subprocess.Popen(command, env=env, cwd=out.parent, stdout=log, stderr=subprocess.STDOUT))
    codes = [process.wait(timeout=600) for process in started]
    said = [out.with_name(f"{out.name}.{rank}.log").read_text()[-3000:] for rank in range(ranks)]
    assert not any(codes), "\n".join(said)
    return [torch.load(f"{out}.{rank}.pt", weights_only=True) for rank in range(ranks)]


def compare(tmp_path, ranks, cases):
    theirs, ours = (run(library, tmp_path / library, ranks, cases) for library in ("deepspeed", "face"))
    wrong = []
    for rank in range(ranks):
        for name, expected in theirs[rank].items():
            found = ours[rank][name]
            differing = {key for a, b in zip(expected["seen"], found["seen"], strict=True) for key in differs(a, b)}
            apart = max((expected["masters"][n] - found["masters"][n]).abs().max().item() for n in found["masters"])
            if apart > 1e-6 or (name in SAME_BITS and apart):
                differing.add(f"weights by {apart:.1e}")
            if (name in ROUNDS_ELSEWHERE[ranks]) != bool(differing) or apart > 0.05:
                wrong.append(f"{name}: {differing or 'no difference'}")
    assert not wrong, "\n".join(wrong)


def differs(expected, found):
    """The names of the values in which a step differs."""
    for name, value in expected.items():
        if name in ("loss", "norm"):
            # DeepSpeed has no norm in stage 0, fp32
            if value is not None and not (value == found[name] or math.isclose(value, found[name], rel_tol=1e-6)):
                yield name
        elif name in ("lr", "last"):
            if not all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(value, found[name], strict=True)):
                yield name
        elif value != found[name]:
            yield name


def test_every_case_on_one_rank(tmp_path):
    assert len(CASES) >= 30
    compare(tmp_path, 1, list(CASES))


def test_cases_on_two_ranks(tmp_path):
    compare(tmp_path, 2, FOR_TWO)
