"""Resuming is invisible in JAX: other processes, devices and stages have the bits of a run that was not stopped."""

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax_checkpoint_worker
import pytest

pytestmark = pytest.mark.slow

WORKER = Path(jax_checkpoint_worker.__file__)
BF16, FP16 = {"param_dtype": "bfloat16"}, {"param_dtype": "float16"}
DELAYED = {**BF16, "schedule": "delayed", "delay_warmup_steps": 2}
OFFLOADED = {**BF16, "offload_param": "cpu"}


def case(name, devices, saved_as=None, **fields):
    return {"name": name, "devices": devices, "fields": fields, "saved_as": saved_as}


STRAIGHT = [
    case("fp32", None),
    case("bf16", None, **BF16),
    case("fp16", None, **FP16),
    case("delayed", None, **DELAYED),
]
SAVED = [
    case("fp32 one", None),
    case("fp16 one", None, **FP16),
    case("delayed one", None, **DELAYED),
    case("bf16 stage 1", 4, stage=1, **BF16),
    case("fp32 stage 2", 4),
    case("fp16 stage 2", 4, **FP16),
    case("delayed stage 2", 4, **DELAYED),
    case("fp32 stage 3", 4, stage=3),
    case("bf16 stage 3", 4, stage=3, **OFFLOADED),
    case("fp16 stage 3", 4, stage=3, **FP16),
]
RESUMED = [
    *({**each, "name": f"{each['name']} again", "saved_as": each["name"]} for each in SAVED),
    case("fp32 stage 3 at 2", 2, "fp32 stage 3", reduce_bucket_size=100),
    case("fp32 stage 3 at 1", None, "fp32 stage 3"),
    case("fp16 stage 2 at 2", 2, "fp16 stage 2", stage=3, **FP16),
    case("fp16 stage 3 at 1", 1, "fp16 stage 3", **FP16),
    case("bf16 stage 1 at 2", 2, "bf16 stage 1", stage=3, **OFFLOADED),
    case("delayed stage 2 at 1", None, "delayed stage 2", **DELAYED),
]
SAVED_BY_TWO = [case("fp32 by two", 4, stage=3), case("delayed by two", 4, **DELAYED)]
RESUMED_FROM_TWO = [
    case("fp32 by two at 2", 2, "fp32 by two", stage=3),
    case("fp32 by two at 1", None, "fp32 by two"),
    case("delayed by two at 4", 4, "delayed by two", **DELAYED),
]
RESUMED_BY_TWO = [
    case("fp32 by two again", 4, "fp32 by two", stage=3),
    case("bf16 stage 3 in two", 4, "bf16 stage 3", stage=3, **OFFLOADED),
    case("fp16 one in two", 4, "fp16 one", **FP16),
]


def run(folder, what, cases, n_processes=1):
    """What becomes of all cases in new processes, which have 4 devices together; one dictionary a process."""
    (folder / f"{what}-{n_processes}.cases").write_text(json.dumps(cases))
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(WORKER.parent.parent), str(WORKER.parent)])}
    logs, workers = [], []
    for process in range(n_processes):
        peers = [address, str(process)] if n_processes > 1 else []
        command = [sys.executable, str(WORKER), what, str(folder), str(folder / f"{what}-{n_processes}.cases"), *peers]
        logs.append(folder / f"{what}-{process}-of-{n_processes}.log")
        with logs[-1].open("w") as log:
            workers.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        for worker in workers:
            worker.wait(timeout=600)
    finally:
        for worker in workers:
            worker.kill()
    said = "\n".join(log.read_text()[-3000:] for log in logs)
    if what == "lose":
        return [worker.returncode for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * n_processes, said
    return [json.loads((folder / f"{what}-{i}-of-{n_processes}.json").read_text()) for i in range(n_processes)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """By name: of the runs that were not stopped, those that were saved from, and those that went on."""
    folder = tmp_path_factory.mktemp("checkpoints")
    found = {}
    with ThreadPoolExecutor() as pool:
        for phase in (
            [("straight", STRAIGHT, 1), ("save", SAVED, 1), ("save", SAVED_BY_TWO, 2)],
            [("resume", [*RESUMED, *RESUMED_FROM_TWO], 1), ("resume", RESUMED_BY_TWO, 2)],
        ):
            for done in [pool.submit(run, folder, *arguments) for arguments in phase]:
                for i, results in enumerate(done.result()):
                    found |= {(name, i): result for name, result in results.items()}
    return found


BY_ONE, BY_TWO = [*SAVED, *RESUMED, *RESUMED_FROM_TWO], [*SAVED_BY_TWO, *RESUMED_BY_TWO]


@pytest.mark.parametrize("name", [case["name"] for case in BY_ONE])
def test_the_bits_are_those_of_a_run_that_was_neither_saved_nor_stopped(name, outcomes):
    assert differences(outcomes, name) == []


@pytest.mark.parametrize("name", [case["name"] for case in BY_TWO])
def test_in_two_processes_they_are_too(name, outcomes):
    assert differences(outcomes, name) == []
    # A second process that was not there when this was saved had no generators to go on with.
    assert differences(outcomes, name, process=1) == ([] if "by two" in name else ["random"])


def differences(outcomes, name, process=0):
    """What differs from the run of this kind that was not stopped."""
    expected, found = outcomes[name.partition(" ")[0], 0], outcomes[name, process]
    assert found.keys() == expected.keys()
    return [what for what in expected if found[what] != expected[what]]


def test_where_one_process_fails_all_say_so_and_the_checkpoint_before_is_whole(tmp_path):
    found = run(tmp_path, "fail", [case("fp32", 4, stage=3)], 2)
    assert found == [{"fp32": "passed"}] * 2


def test_a_process_lost_in_a_save_leaves_the_checkpoint_before(tmp_path, outcomes):
    codes = run(tmp_path, "lose", [case("lost", 4, stage=3)], 2)
    assert codes == [0, -signal.SIGKILL]
    [found] = run(tmp_path, "resume", [case("resumed", None, "lost")])
    assert differences(outcomes | {("fp32 resumed", 0): found["resumed"]}, "fp32 resumed") == []
