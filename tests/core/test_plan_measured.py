"""The plan that wrap checks, beside what real processes then hold: ``pytest -s`` shows the table.

Host: the account of the arrays that the engine allocated. Device: the storages of parameters, shards, gathered
parameters and gradients when they are the most together, looked at whenever a gradient comes and a module ends; the
device is the CPU. Process: by how much the resident memory of the whole process grew from before the model was made to
the peak of a step, beside host and device together; activations of 8 tokens, and what libraries allocate, are in it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from offload_core.memory.host_memory import format_bytes
from offload_core.memory.plan import format_table

ROOT = Path(__file__).resolve().parents[2]
SHARE = 0.03
SLACK = {"host": 0, "device": 4 * 2**20, "process": 16 * 2**20}
"""Bytes: what is whole under ``max_live_parameters`` is so by whole parameters; libraries are in a process."""


@pytest.fixture(scope="module")
def measured() -> dict[str, dict]:
    """By ranks and case."""
    pytest.importorskip("torch")
    from tests.support import plan_of_torch, processes

    with pytest.MonkeyPatch.context() as patch:
        # Fixed, or glibc keeps freed blocks of up to 32 MiB: what is measured would depend on what came before.
        patch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**20))
        found = {n: processes.on_ranks(n, alone=True, group=n > 1)(plan_of_torch.measured) for n in (1, 2)}
    return {
        f"rank {rank} of {n}, {case}": result
        for n, ranks in found.items()
        for rank, cases in enumerate(ranks)
        for case, result in cases.items()
    }


@pytest.mark.slow
def test_host_and_device_bytes_are_as_planned(measured: dict[str, dict]) -> None:
    lines, wrong = [], []
    for case, result in measured.items():
        planned = dict(result["planned"])
        planned["process"] = sum(planned.values())
        took = {"host": result["host"], "device": result["device"]["bytes"], "process": result["process"]}
        lines.append([case, *(format_bytes(n) for what in took for n in (planned[what], took[what]))])
        for what, n_bytes in took.items():
            if abs(planned[what] - n_bytes) > max(SHARE * n_bytes, SLACK[what]):
                wrong.append((case, what, planned[what], n_bytes, result["rows"]))
    header = [f"{what} {word}" for what in ("host", "device", "process") for word in ("planned", "measured")]
    print(f"\n{format_table(lines, ['', *header])}")
    assert len(lines) == 48
    assert not wrong


@pytest.mark.slow
def test_jax_arrays_are_as_planned(tmp_path: Path) -> None:
    """Arrays at the peak of an update whose gradients are given away, and the host's account; what XLA takes besides is
    not looked at."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests" / "workers" / "plan_worker_jax.py"), str(tmp_path)]
    subprocess.run(command, env=environment, check=True, timeout=250)
    lines, wrong = [], []
    for case, result in json.loads((tmp_path / "jax.json").read_text()).items():
        took = {"host": result["host"], "device": result["device"]["bytes"]}
        lines.append([case, *(format_bytes(n) for what in took for n in (result["planned"][what], took[what]))])
        for what, n_bytes in took.items():
            if abs(result["planned"][what] - n_bytes) > SHARE * n_bytes:
                wrong.append((case, what, n_bytes, result))
        if command := result.get("command"):
            assert command == {what: n_bytes for what, n_bytes in result["rows"].items() if n_bytes}, case
    header = [f"{what} {word}" for what in ("host", "device") for word in ("planned", "measured")]
    print(f"\n{format_table(lines, ['JAX', *header])}")
    assert len(lines) == 14
    assert not wrong


@pytest.mark.slow
def test_what_is_measured_is_there_at_all(measured: dict[str, dict]) -> None:
    """The table would agree on nothing, too."""
    for case, result in measured.items():
        states = 8 if "float32" in case else 10
        ranks = int(case.split()[3].rstrip(","))
        trained = result["numel"] / (2 if "frozen" in case else 1)
        assert result["host"] > 0.95 * states * trained / ranks, case
        assert result["process"] > result["host"], case
