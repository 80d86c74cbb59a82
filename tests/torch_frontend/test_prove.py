"""``python -m offload_core prove``: its table, its exit status, and that it sees a difference."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from frontends.torch import prove as programs
from offload_core.__main__ import main
from offload_core.commands import prove
from offload_core.prove import runner
from offload_core.prove.runner import Result, arrays_of
from offload_core.prove.ways import ADAMW, ON_HOST, Run, Task, Way, tasks
from offload_core.prove.worker import LeftOut, Place, write_arrays
from tests.support import simulated

ROOT = Path(__file__).resolve().parents[2]


def place_of(folder, program, device="cpu", micro_batches=1, ranks=1, **settings):
    folder.mkdir(exist_ok=True)
    return Place(program, {**ADAMW, **settings}, 0, 3, micro_batches, 0, ranks, None, device, folder, None, folder)


def arrays(folder, program, **given):
    """What a program makes in this process."""
    place = place_of(folder, program, **given)
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        write_arrays(place.made, dict(getattr(programs, program)(place)))
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
    return arrays_of(folder)


NOT_BUILT = pytest.mark.skipif((missing := simulated.why_not()) is not None, reason=missing or "")
DEVICES = ["cpu", pytest.param("simulated", marks=[NOT_BUILT, pytest.mark.integration])]


@pytest.mark.parametrize("device", DEVICES)
def test_programs_make_equal_bits_on_a_device(device, request, tmp_path):
    if device == "simulated":
        request.getfixturevalue("accelerator")
    expected = Result(Way("", ()), arrays=arrays(tmp_path / "definition", "definition", device=device, micro_batches=2))
    ways = [("engine", {}), ("released", ON_HOST), ("layerwise", ON_HOST)]
    for i, (program, settings) in enumerate(ways):
        made = arrays(tmp_path / str(i), program, device=device, micro_batches=2, **settings)
        assert not [*Result(Way("", ()), arrays=made).differences(expected)], program
        assert Result(Way("", ()), arrays=made).digest == expected.digest
    other = arrays(tmp_path / "other", "engine", device=device, micro_batches=2, lr=1e-3)
    said = [*Result(Way("", ()), arrays=other).differences(expected)]
    assert any(re.fullmatch(r"master/head\.bias: \d+ of 1001 elements, the first .*", line) for line in said), said


@pytest.mark.parametrize("lacks", ["is_available", "is_gloo_available"])
def test_a_torch_without_gloo_leaves_out_ways_with_ranks(lacks, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, lacks, lambda: False)
    with pytest.raises(LeftOut, match="gloo, which this build of torch lacks"):
        arrays(tmp_path / "a", "engine", ranks=2)


def ended(monkeypatch, results, contrast=False):
    """The exit status of ``prove`` whose ways end so."""

    class Ended:
        def __init__(self, *given):
            self.left = iter(results)

        def run(self, task, way):
            return replace(next(self.left), way=way)

    ways = tuple(Way(f"way {i}", (Run(),), True) for i in range(len(results)))
    monkeypatch.setattr(prove, "Runner", Ended)
    monkeypatch.setattr(prove, "tasks", lambda sets: (Task("a task", {}, ways, contrast=contrast),))
    return main(["prove"])


def test_a_weight_that_another_rank_has_otherwise_is_named(tmp_path):
    expected = {"weight/w": np.ones(2, np.float32)}
    for rank, value in enumerate([1, 1, 2]):
        place = replace(place_of(tmp_path, "engine", ranks=3), rank=rank)
        write_arrays(place.made, {"weight/w": np.full(2, value, np.float32)})
    found = Result(Way("", ()), arrays=arrays_of(tmp_path))
    assert [*found.differences(Result(Way("", ()), arrays=expected))] == ["only one of both has weight/w of rank 2"]
    assert found.digest != Result(Way("", ()), arrays=expected).digest


def test_a_way_of_stage_3_partitions_each_parameter_of_the_small_model():
    for task in tasks(("scalar",)):
        for way in task.ways:
            for part in way.runs:
                if part.settings.get("stage") == 3:
                    assert part.settings["param_persistence_threshold"] == 0, (task.name, way.name)


def test_states_on_the_device_are_left_out_where_it_is_the_processor(tmp_path):
    for settings in ({"offload_optimizer": None}, {"device_states_bytes": 0.5}):
        with pytest.raises(LeftOut, match="a device with memory of its own"):
            arrays(tmp_path / "a", "states_on_device", **settings)


def test_a_module_of_ours_that_is_missing_leaves_no_way_out(tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    monkeypatch.setitem(sys.modules, "frontends.torch.integrations.trainer", None)
    with pytest.raises(ModuleNotFoundError, match=r"frontends\.torch\.integrations\.trainer"):
        arrays(tmp_path / "a", "trainer")


def made(value):
    return Result(Way("", ()), arrays={"master/w": np.array([1, value], np.float32)})


def test_equal_ways_end_with_their_number(monkeypatch, capsys):
    left_out = Result(Way("", ()), left_out="needs a moon")
    assert ended(monkeypatch, [left_out, made(2), made(2)]) == 0
    said = capsys.readouterr().out
    assert "left out: needs a moon\n" in said
    assert re.search(r"way 1 .* to compare with\n  way 2 .* equal\n", said)
    assert "\n1 left out: needs a moon\n1 ways have the bits of the 1 that they were compared with, in 0 s\n" in said


def test_a_way_that_differs_or_fails_is_named_and_is_the_exit_status(monkeypatch, capsys):
    failed = Result(Way("", ()), failed="rank 1: no space left")
    assert ended(monkeypatch, [made(2), made(3), failed, made(2)]) == prove.DIFFER
    said = capsys.readouterr().out
    assert "master/w: 1 of 2 elements, the first [1] 3.0, expected 2.0\n" in said
    assert "failed\n      rank 1: no space left\n" in said
    assert "DIFFERS: a task: way 1\nFAILED: a task: way 2\n2 of 4 ways differ or failed" in said


def test_a_disk_that_is_full_by_now_is_one_error(monkeypatch, capsys):
    free = iter([10**9, 10**5])
    monkeypatch.setattr(prove.shutil, "disk_usage", lambda name: type("Usage", (), {"free": next(free)}))
    assert ended(monkeypatch, [made(2), Result(Way("", ()), failed="nothing was said")]) == 2
    assert "expected 9.5 MiB; free some, or name" in capsys.readouterr().err


@pytest.mark.integration
def test_a_device_that_torch_lacks_is_one_error(capsys):
    assert main(["prove", "--device", "moon"]) == 2
    said = capsys.readouterr()
    assert "prove: --device moon: rank 0 RuntimeError: Expected one of cpu" in said.err
    assert "AdamW" not in said.out


def killed(place):
    """A program of which rank 1 is killed, while rank 0 goes on."""
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    yield "never", np.zeros(1, np.float32)


@pytest.mark.integration
def test_the_rank_that_was_killed_is_the_one_that_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "MODULES", {"torch": __name__})
    monkeypatch.setattr(runner, "GRACE", 0.1)
    result = runner.Runner(tmp_path, "cpu", ["torch"]).run(Task("", {}, ()), Way("", (Run("killed", 2),)))
    assert result.failed.startswith("rank 1 was ended by signal 9: "), result.failed


def test_other_libraries_may_differ(monkeypatch, capsys):
    assert ended(monkeypatch, [made(2), made(3)], contrast=True) == 0
    assert re.search(r"way 1 .* differs\n", capsys.readouterr().out)


def test_zeros_of_other_signs_and_nans_count(monkeypatch):
    assert ended(monkeypatch, [made(0.0), made(-0.0)]) == prove.DIFFER
    assert ended(monkeypatch, [made(np.nan), made(np.nan)]) == 0


def test_without_space_or_a_framework_one_line_says_what_to_do(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(prove.shutil, "disk_usage", lambda name: type("Usage", (), {"free": 10**6}))
    assert main(["prove", "--folder", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("or name another folder: --folder FOLDER\n")
    assert not [*tmp_path.iterdir()]
    assert main(["prove", "--folder", str(tmp_path / "absent")]) == 2
    assert "absent" in capsys.readouterr().err
    monkeypatch.setattr(prove, "installed", lambda: {"torch": False, "jax": False})
    assert main(["prove"]) == 2
    assert "neither torch nor jax is installed" in capsys.readouterr().err


def test_a_launcher_with_several_processes_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert main(["prove"]) == 2
    assert "as it starts ranks itself" in capsys.readouterr().err


@pytest.mark.integration
def test_ctrl_c_ends_all_processes_and_leaves_no_file(tmp_path):
    command = [sys.executable, "-m", "offload_core", "prove", "--folder", str(tmp_path)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    for line in process.stdout:
        if "to compare with" in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == prove.INTERRUPTED, err
    assert "\ninterrupted\n" in out
    assert "Traceback" not in err
    assert not [*tmp_path.iterdir()]
    while True:  # the others of its group end when it has
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.01)


@pytest.mark.integration
def test_the_quick_ways_are_equal():
    command = [sys.executable, "-m", "offload_core", "prove", "--quick"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    assert re.search(r"\n\d\d ways have the bits of the \d that they were compared with, in \d+ s", process.stdout)
