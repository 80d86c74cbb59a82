"""Resuming is invisible in JAX: other processes, devices and stages have the bits of a run that was not stopped."""

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.processes import ROOT

pytestmark = pytest.mark.slow

WORKER = ROOT / "tests" / "workers" / "jax_checkpoint_worker.py"
BF16, FP16 = {"param_dtype": "bfloat16"}, {"param_dtype": "float16"}
LATE = {**BF16, "schedule": "delayed", "delay_warmup_steps": 2}
OFFLOADED = {**BF16, "offload_param": "cpu"}


def cases(what, *found):
    return [{"what": what, **each} for each in found]


def case(name, devices, saved_as=None, **fields):
    """One begins with the name of what it must equal."""
    return {"name": name, "devices": devices, "fields": fields, "saved_as": saved_as}


STRAIGHT = cases(
    "straight", case("fp32", None), case("bf16", None, **BF16), case("fp16", None, **FP16), case("late", None, **LATE)
)
SAVED = cases(
    "save",
    case("fp32 one", None),
    case("fp16 one", None, **FP16),
    case("late one", None, **LATE),
    case("bf16 stage 1", 4, stage=1, **BF16),
    case("fp32 stage 2", 4),
    case("fp16 stage 2", 4, **FP16),
    case("late stage 2", 4, **LATE),
    case("fp32 stage 3", 4, stage=3),
    case("bf16 stage 3", 4, stage=3, **OFFLOADED),
    case("fp16 stage 3", 4, stage=3, **FP16),
)
SAVED_BY_TWO = cases("save", case("fp32 by two", 4, stage=3), case("late by two", 4, **LATE))
LOST = [*cases("fail", case("failing", 4, stage=3)), *cases("lose", case("lost", 4, stage=3))]
RESUMED = cases(
    "resume",
    *(case(f"{each['name']} again", each["devices"], each["name"], **each["fields"]) for each in SAVED),
    case("fp32 stage 3 at 2", 2, "fp32 stage 3", reduce_bucket_size=100),
    case("fp32 stage 3 at 1", None, "fp32 stage 3"),
    case("fp16 stage 2 at 2", 2, "fp16 stage 2", stage=3, **FP16),
    case("bf16 stage 1 at 2", 2, "bf16 stage 1", stage=3, **OFFLOADED),
    case("late stage 2 at 1", None, "late stage 2", **LATE),
    case("fp32 by two at 1", 1, "fp32 by two", stage=3),
    case("late by two at 4", 4, "late by two", **LATE),
    case("fp32 before a process was lost", None, "lost"),
)
RESUMED_BY_TWO = cases(
    "resume",
    case("fp32 by two again", 4, "fp32 by two", stage=3),
    case("bf16 stage 3 in two", 4, "bf16 stage 3", stage=3, **OFFLOADED),
    case("fp16 one in two", 4, "fp16 one", **FP16),
)


def run(folder, name, cases, n_processes=1, codes=(0, 0)):
    """What becomes of all cases in new processes, which have 4 devices together; one dictionary a process."""
    (folder / f"{name}.cases").write_text(json.dumps(cases))
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    workers, results = [], [folder / f"{name}-{process}.json" for process in range(n_processes)]
    for process in range(n_processes):
        peers = [address, str(process)] if n_processes > 1 else []
        command = [sys.executable, str(WORKER), str(folder), str(folder / f"{name}.cases"), str(results[process])]
        with results[process].with_suffix(".log").open("w") as log:
            workers.append(subprocess.Popen([*command, *peers], env=environment, stdout=log, stderr=log))
    try:
        for worker in workers:
            worker.wait(timeout=600)
    finally:
        for worker in workers:
            worker.kill()
    said = "\n".join(result.with_suffix(".log").read_text()[-3000:] for result in results)
    assert [worker.returncode for worker in workers] == list(codes[:n_processes]), said
    return [json.loads(result.read_text()) for result in results]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What became of each case in each process, by name and process."""
    folder = tmp_path_factory.mktemp("checkpoints")
    found = {}
    with ThreadPoolExecutor() as pool:
        for phase in (
            [("saved", [*STRAIGHT, *SAVED]), ("saved by two", [*SAVED_BY_TWO, *LOST], 2, (0, -signal.SIGKILL))],
            [("resumed", RESUMED), ("resumed by two", RESUMED_BY_TWO, 2)],
        ):
            for done in [pool.submit(run, folder, *arguments) for arguments in phase]:
                for i, results in enumerate(done.result()):
                    found |= {(name, i): result for name, result in results.items()}
    return found


BY_ONE, BY_TWO = [*SAVED, *RESUMED], [*SAVED_BY_TWO, *RESUMED_BY_TWO]


@pytest.mark.parametrize("name", [each["name"] for each in BY_ONE])
def test_the_bits_are_those_of_a_run_that_was_neither_saved_nor_stopped(name, outcomes):
    assert differences(outcomes, name) == []


@pytest.mark.parametrize("name", [each["name"] for each in BY_TWO])
def test_in_two_processes_they_are_too(name, outcomes):
    assert differences(outcomes, name) == []
    # A second process that was not there when this was saved had no generators to go on with.
    assert differences(outcomes, name, process=1) == ([] if "by two" in name else ["random"])


def differences(outcomes, name, process=0):
    """What differs from the run of this kind that was not stopped."""
    expected, found = outcomes[name.partition(" ")[0], 0], outcomes[name, process]
    assert found.keys() == expected.keys()
    return [what for what in expected if found[what] != expected[what]]


def test_where_one_process_fails_all_say_so_and_the_checkpoint_before_is_whole(outcomes):
    assert [outcomes["failing", process] for process in (0, 1)] == ["passed", "passed"]


def test_a_process_that_is_killed_in_a_save_is_an_error_in_the_other(outcomes):
    """What it had saved before is resumed above."""
    assert outcomes["lost", 0] == "passed"
