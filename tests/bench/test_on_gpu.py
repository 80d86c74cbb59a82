"""bench/on_gpu.sh, rehearsed on the simulated accelerator: every part leaves records, and none is lost."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from bench import record, report
from bench.gpu import figures, host_memory, parts, results
from bench.gpu.parts import ACCUMULATED, BESIDE, CURVE, LARGEST, OF_JAX, PARTS, SHARES, TIERS
from bench.gpu.sizes import FULL, TINY
from bench.parts.torch_contenders import (
    ACCUMULATE,
    ACCUMULATE_ON_HOST,
    ALL_THERE,
    DS_2,
    DS_ON_HOST,
    FSDP2,
    FUSED,
    HALF_THERE,
    LATE,
    ON_HOST,
    OURS,
    QUARTER_THERE,
    SERIAL,
    TORCHAO,
)
from offload_core.support.processors import available_cpus
from tests.support import simulated

ROOT = Path(__file__).parents[2]
ABSENT = {DS_2: "deepspeed", TORCHAO: "torchao"}


@pytest.fixture
def rehearse(tmp_path):
    """Starts the script, into one folder; torch and JAX take their stand-ins for backends that are installed."""
    if (missing := simulated.why_not()) is not None:
        pytest.skip(missing)
    installed = tmp_path / "installed" / "stand_ins-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: stand_ins\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(
        "[torch.backends]\nsimulated = tests.support.simulated.collectives:register\n"
        "[jax_plugins]\nstand_in = tests.support.jax_stand_in\n"
    )
    for library in ABSENT.values():  # torchao's optimizer, where it is installed, takes CUDA or XPU
        (installed.parent / f"{library}.py").write_text(f"raise ModuleNotFoundError('no {library} here')\n")
    environment = os.environ | {
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(installed.parent)]),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    running = []

    def start(*arguments):
        command = ["bash", str(ROOT / "bench" / "on_gpu.sh"), str(tmp_path / "out"), "--rehearse", *arguments]
        running.append(
            subprocess.Popen(
                command, cwd=tmp_path, env=environment, start_new_session=True, stdout=subprocess.PIPE, text=True
            )
        )
        return running[-1]

    yield start
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def measurements(path):
    return [(each["bench"], each["measurement"]) for each in results.lines(path)]


@pytest.mark.slow
def test_a_killed_call_loses_nothing_measured_and_the_next_one_goes_on(rehearse, tmp_path):
    path = tmp_path / "out" / "results.jsonl"
    first = rehearse("b", "--only", "1 windows")
    while first.poll() is None and not results.lines(path):
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    kept = path.read_bytes()
    assert measurements(path)[0] == ("gpu_step", f"{FUSED}, 1 windows, round 1")
    with path.open("a") as file:
        file.write('{"bench": "gpu_st')  # as one that is killed while it writes
    second = rehearse("b", "--only", FUSED)
    printed, _ = second.communicate()
    assert second.returncode == 0, printed
    assert path.read_bytes().startswith(kept)
    names = [name for _, name in measurements(path)]
    assert len(names) == len(set(names))
    assert names[-1] == f"{FUSED}, 2 windows, round 1"
    rows = results.joined(results.lines(path))["gpu_step"]["rows"]
    for metric in ("forward", "backward", "step", "total", "speed", "peak memory", "peak device memory"):
        of = {row["micro_batch"]: row["p50"] for row in rows if row["metric"] == metric and row["name"] == FUSED}
        assert set(of) == {1, 2}, metric
        assert min(of.values()) > 0, metric


@pytest.mark.slow
def test_a_part_ends_in_its_time_and_says_that_more_is_to_do(rehearse, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "accelerator.json").write_text('{"type": "simulated"}')  # known from an earlier call
    call = rehearse("c", "--seconds", "1")
    printed, _ = call.communicate()
    assert call.returncode == 1
    assert "(c): the time is up; another call" in printed
    assert not (tmp_path / "out" / "results.jsonl").exists()


@pytest.mark.slow
def test_a_step_of_one_and_of_many_micro_batches_trains_alike_in_a_loop_and_block_by_block(rehearse, tmp_path):
    call = rehearse("f")
    printed, _ = call.communicate()
    assert call.returncode == 0, printed
    known = report.read(tmp_path / "out" / "results.jsonl")["gpu_accumulate"]
    ran = {(row["name"], row["micro_batch"]): row for row in known["rows"] if row["metric"] == "speed"}
    absent = {each["name"] for each in known["missing"]}
    assert absent == {DS_ON_HOST}
    assert ran.keys() == {(n, windows) for n in ACCUMULATED if n not in absent for windows in TINY.accumulated_windows}
    losses = {(row["name"], row["micro_batch"]): row["curve"] for row in known["rows"] if row["metric"] == "loss, last"}
    for windows in TINY.accumulated_windows:
        ours = losses[ACCUMULATE_ON_HOST, windows]
        for name in (ON_HOST, FUSED):
            assert losses[name, windows] == pytest.approx(ours, rel=1e-2), name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_script_leaves_records_of_every_part(rehearse, tmp_path):
    path = tmp_path / "out" / "results.jsonl"
    call = rehearse()
    printed, _ = call.communicate()
    assert call.returncode == 0, printed
    known = report.read(path)
    assert set(known) == {part.bench for part in PARTS.values()}
    tests = known["gpu_tests"]
    passed = {row["name"]: row["p50"] for row in tests["rows"] if row["metric"] == "passed"}
    assert passed.keys() == TINY.tests.keys()
    assert min(passed.values()) > 0
    assert not tests["missing"]

    ran = {row["name"] for row in known["gpu_step"]["rows"] if row["metric"] == "total"}
    absent = {each["name"] for each in known["gpu_step"]["missing"]}
    assert ran | absent == set(BESIDE)
    assert absent <= set(ABSENT)
    assert all(results.is_absent(each["why"]) for each in known["gpu_step"]["missing"])
    assert {row["name"] for row in known["gpu_jax"]["rows"] if row["metric"] == "total"} == set(OF_JAX)
    ratios = {row["name"] for row in known["gpu_jax"]["rows"] if row["metric"] == "ratio"}
    assert len([name for name in ratios if "one jit" in name]) == 5  # three meshes, two sizes on one device

    outcomes = {}
    for trial in known["gpu_largest"]["trials"]:
        outcomes.setdefault(trial["name"], {})[trial["size"]] = trial["outcome"]
    assert outcomes.keys() == set(LARGEST)
    place = {size: i for i, size in enumerate(TINY.ladder)}
    for tried in outcomes.values():  # the bound is between two neighbours
        fits = max(place[size] for size, outcome in tried.items() if outcome == results.TRAINED)
        beyond = min(place[size] for size, outcome in tried.items() if outcome == results.ON_DEVICE)
        assert beyond == fits + 1
    assert max(place[s] for s, o in outcomes[OURS].items() if o == results.TRAINED) > max(
        place[s] for s, o in outcomes[FUSED].items() if o == results.TRAINED
    )

    written = path.read_bytes()
    again = rehearse()
    printed, _ = again.communicate()
    assert again.returncode == 0, printed
    before, after = written.splitlines(), path.read_bytes().splitlines()
    assert before == after
    assert report.main([str(path)]) == 0
    page = path.with_suffix(".md").read_text()
    for name in (*ran, *OF_JAX, *ratios):
        assert f"| {name}" in page


# --- the reader ----------------------------------------------------------------------------------------------------


def measured(path, part, measurement, *rows, missing=(), rehearsal=False, **fields):
    fields = {"accelerator": {"name": "a card", "bytes": 2**35}, "rehearsal": rehearsal, "title": part, **fields}
    results.Results(path).add(part, measurement, rows=list(rows), missing=list(missing), **fields)


def steps(name, ms, windows=2, number=1, **extra):
    extra = {"micro_batch": windows, "round": number, **extra}
    return [
        record.row(name, "total", "ms", [ms], **extra),
        record.row(name, "peak device memory", "GB", [7.0], **extra),
        record.row(name, "peak memory", "GB", [3.0], **extra),
        record.row(name, "memory taken of the host", "GB", [5.0], **extra),
    ]


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "card.jsonl"
    config = {"context": 1000, "device_bytes": 32 * 10**9}
    measured(path, "gpu_step", "a", *steps(OURS, 100.0), config=config)
    measured(path, "gpu_step", "b", *steps(OURS, 300.0, number=2), config=config)
    measured(path, "gpu_step", "a", *steps(OURS, 200.0), config=config)  # again: it counts
    measured(path, "gpu_step", "c", missing=[record.missing(DS_2, ModuleNotFoundError("No module named 'x'"))])
    measured(path, "gpu_step", "d", missing=[record.missing(TORCHAO, RuntimeError("no stream"))])
    for size, parameters, outcome in (("9 B", 9, results.TRAINED), ("10 B", 10, results.ON_HOST), ("6 B", 6, "failed")):
        trial = {"name": OURS, "size": size, "parameters": parameters}
        rows = steps(OURS, 1.0, size=size) if outcome == results.TRAINED else []
        measured(path, "gpu_largest", size, *rows, config=config, trial=trial, outcome=outcome)
    return path


def test_the_tables_have_the_median_of_rounds_and_who_was_absent(written):
    lines = figures.figures(report.read(written))
    assert "| on a card (32 GiB) | a step of 2,000 tokens | device | host |" in lines
    assert f"| {OURS} | 250 ms | 7 GB | 5 GB |" in lines
    assert "A time is the median of 1 step, in 2 rounds." in lines
    [left] = [line for line in lines if line.startswith("- Not measured yet: ")]
    assert FSDP2 in left
    assert not any(name in left.split("; ") for name in (DS_2, TORCHAO, OURS))
    assert f"- {DS_2} was not installed." in lines
    assert f"- {TORCHAO} could not run: RuntimeError: no stream." in lines
    assert "| under 32 GB of device memory | the largest that trains | device | host | does not fit |" in lines
    assert f"| {OURS} | 9 B | 7 GB | 5 GB | 10 B: host memory |" in lines


def test_a_sentence_compares_steps_with_adamw_on_the_device_and_with_deepspeed(tmp_path):
    path = tmp_path / "card.jsonl"
    gpt = {"layers": 48, "width": 1600, "heads": 25, "vocabulary": 50304, "positions": 1024}
    config = {"context": 1000, "gpt": gpt, "activation_checkpointing": True}
    for windows, times in ((2, (100.0, 50.0, 200.0)), (8, (400.0, 500.0, 600.0))):
        for name, ms in zip((OURS, FUSED, DS_2), times, strict=True):
            measured(path, "gpu_step", f"{name}, {windows}", *steps(name, ms, windows), config=config)
    [words] = [line for line in figures.figures(report.read(path)) if line.startswith("The model is")]
    assert words == (
        "The model is a GPT of 1,557,686,400 bf16 parameters, with activation checkpointing. With 2,000 and 8,000 "
        "tokens a step, offload-core takes 2 and 0.800 of the time of PyTorch's fused AdamW on the device, and is 2 "
        "and 1.50 times as fast as DeepSpeed. A time is the median of 1 step, in 1 round."
    )
    measured(path, "gpu_step", f"{OURS}, 9", *steps(OURS, 900.0, 9), config=config)  # the others did not come so far
    measured(path, "gpu_step", f"{OURS}, again", *steps(OURS, 900.0, 9, number=2), config=config)
    [more] = [line for line in figures.figures(report.read(path)) if line.startswith("The model is")]
    assert more == words.replace("in 1 round.", "in 1 to 2 rounds.")


def test_the_table_of_micro_batches_has_speeds_by_tokens_and_says_what_does_not_fit(tmp_path):
    path = tmp_path / "card.jsonl"
    config = {"context": 1000, "windows": 8}
    for windows, speed in ((8, 100.0), (32, 200.0)):
        rows = [*steps(ACCUMULATE_ON_HOST, 1.0, windows, size="8 B")]
        rows.append(record.row(ACCUMULATE_ON_HOST, "speed", "tokens/s", [speed], micro_batch=windows, size="8 B"))
        measured(path, "gpu_accumulate", f"ours, {windows}", *rows, config=config)
    unfit = parts.does_not_fit(f"{FUSED}, 8 B", "CUDA out of memory")
    measured(path, "gpu_accumulate", "on the device", config=config, **unfit)
    measured(path, "gpu_accumulate", "DeepSpeed", missing=[record.missing(DS_ON_HOST, ModuleNotFoundError("none"))])
    known = report.read(path)
    lines = figures.figures(known)
    assert lines[0] == (
        "| in micro-batches of 8,000 tokens | a step of 8,000 tokens | a step of 32,000 tokens | device | host |"
    )
    assert f"| {ACCUMULATE_ON_HOST}, 8 B | 100 tokens/s | 200 tokens/s | 7 GB | 5 GB |" in lines
    assert f"- {FUSED}, 8 B: steps without a figure do not fit." in lines
    assert f"- {DS_ON_HOST} was not installed." in lines
    assert f"- Not measured yet: {ON_HOST}." in lines
    assert not figures.figures(known, in_short=True)


def test_the_table_of_shares_has_each_time_beside_adamws_on_the_device(tmp_path):
    path = tmp_path / "card.jsonl"
    for windows, fused in ((16, 400.0), (64, 1000.0)):
        for name, ms in ((FUSED, fused), (OURS, 1.5 * fused), (HALF_THERE, 1.04 * fused)):
            measured(path, "gpu_tiers", f"{name}, {windows}", *steps(name, ms, windows), config={"context": 1000})
    known = report.read(path)
    lines = figures.figures(known)
    assert "| states there | a step of 16,000 tokens | of fused AdamW's | a step of 64,000 tokens | of" in lines[0]
    assert f"| {FUSED} |  | 400 ms |  | 1,000 ms |  | 7 GB | 5 GB |" in lines
    assert f"| {OURS} | 0% | 600 ms | 1.50 | 1,500 ms | 1.50 | 7 GB | 5 GB |" in lines
    assert f"| {HALF_THERE} | 50% | 416 ms | 1.04 | 1,040 ms | 1.04 | 7 GB | 5 GB |" in lines
    assert f"- Not measured yet: {QUARTER_THERE}; {ALL_THERE}." in lines
    assert not figures.figures(known, in_short=True)


@pytest.mark.slow
def test_steps_with_any_share_of_the_states_on_the_device_have_the_same_losses(rehearse, tmp_path):
    call = rehearse("g")
    printed, _ = call.communicate()
    assert call.returncode == 0, printed
    known = report.read(tmp_path / "out" / "results.jsonl")["gpu_tiers"]
    assert not known["missing"]
    losses = {(row["name"], row["micro_batch"]): row["curve"] for row in known["rows"] if row["metric"] == "loss, last"}
    assert losses.keys() == {(name, windows) for name in TIERS for windows in TINY.windows}
    for windows in TINY.windows:
        for name in SHARES:
            assert losses[name, windows] == losses[OURS, windows], name
        assert losses[FUSED, windows] == pytest.approx(losses[OURS, windows], rel=1e-2)


@pytest.mark.slow
def test_steps_of_few_and_many_tokens_train_alike_in_each_schedule_and_say_where_states_are(rehearse, tmp_path):
    call = rehearse("h")
    printed, _ = call.communicate()
    assert call.returncode == 0, printed
    assert f"{OURS}, states on the host, clipped to 1, 64 tokens: " in printed
    path = tmp_path / "out" / "results.jsonl"
    known = report.read(path)["gpu_curve"]
    assert {each["name"] for each in known["missing"]} == set(ABSENT)
    losses = {(row["name"], row["micro_batch"]): row["curve"] for row in known["rows"] if row["metric"] == "loss, last"}
    ran = [name for name in CURVE if name not in ABSENT]
    assert losses.keys() == {(name, windows) for name in ran for windows in TINY.accumulated_windows}
    for windows in TINY.accumulated_windows:
        assert losses[SERIAL, windows] == losses[OURS, windows]
        for name in ran:
            assert losses[name, windows] == pytest.approx(losses[OURS, windows], rel=1e-2), name
    assert {(row["name"], row["states"], row["clipping"]) for row in known["rows"]} == {
        (name, *CURVE[name]) for name in ran
    }


def test_the_curve_names_the_states_the_clipping_and_the_sums_of_each_time(tmp_path):
    path = tmp_path / "card.jsonl"
    config = {"context": 1000, "windows": 8, "wide_sums": True}
    for windows, fused in ((8, 100.0), (512, 5000.0)):
        for name, ms in ((FUSED, fused), (LATE, 1.1 * fused), (TORCHAO, 3 * fused)):
            states, clipping = CURVE[name]
            rows = steps(name, ms, windows, states=states, clipping=clipping)
            measured(path, "gpu_curve", f"{name}, {windows}", *rows, config=config)
    measured(path, "gpu_curve", "d", missing=[record.missing(DS_2, ModuleNotFoundError("No module named 'x'"))])
    measured(path, "gpu_curve", "f", config=config, **parts.does_not_fit(f"{FSDP2}, x", "CUDA out of memory"))
    known = report.read(path)
    lines = figures.figures(known)
    assert "| states on the | clips | 8,000 tokens a step | 512,000 tokens a step | device | host |" in lines[0]
    assert f"| {FUSED} | device | to 1 | 100 ms | 5,000 ms | 7 GB | 5 GB |" in lines
    assert f"| {LATE} | host | to 1 | 110 ms (1.10) | 5,500 ms (1.10) | 7 GB | 5 GB |" in lines
    assert f"| {TORCHAO} | host | no | 300 ms (3.00) | 15,000 ms (3.00) | 7 GB | 5 GB |" in lines
    [words] = [line for line in lines if "Matrices" in line]
    assert "Micro-batches have 8,000 tokens. Matrices are multiplied in bf16, with sums in fp32." in words
    assert f"- {FSDP2}, x: steps without a figure do not fit." in lines
    assert f"- {DS_2} was not installed." in lines
    assert f"- Not measured yet: {OURS}; {ACCUMULATE}; {SERIAL}." in lines
    assert not figures.figures(known, in_short=True)


def test_figures_of_a_commit_that_was_changed_since_say_so_until_all_are_measured_again(tmp_path, monkeypatch):
    path = tmp_path / "card.jsonl"
    monkeypatch.setattr(figures, "CHANGED_SINCE", {("gpu_jax", "old"): "Changed since."})
    for commit, names, old in (("old", ("a", "b"), True), ("new", ("a",), True), ("new", ("b",), False)):
        monkeypatch.setattr(record, "commit", lambda commit=commit: commit)
        for name in names:
            measured(path, "gpu_jax", name, *steps(OURS, 1.0, size=name))
        known = report.read(path)
        assert ("Changed since." in figures.figures(known)) == old
        assert "Changed since." not in figures.figures(known, in_short=True)
        commits = {("old", "a"): "old", ("new", "a"): "new and old", ("new", "b"): "new"}[commit, names[0]]
        assert f"commit {commits};" in report.where(known)[0]


def test_what_failed_is_measured_again_and_what_is_absent_or_does_not_fit_is_not(written):
    known = results.Results(written)
    assert known.done("gpu_step", "a")
    assert known.done("gpu_step", "c")
    assert known.done("gpu_step", "d") is None
    assert known.done("gpu_largest", "10 B")["outcome"] == results.ON_HOST
    assert known.done("gpu_step", "unknown") is None


def test_the_pages_get_the_newest_run_on_a_gpu_and_no_rehearsal(written, tmp_path):
    measured(tmp_path / "later.jsonl", "gpu_step", "a", *steps(OURS, 1.0), rehearsal=True)
    assert report.newest_on_gpu(tmp_path) == written
    *_, run = report.whole_runs(report.RESULTS, report.PARTS)
    marks = f"{report.BEGIN}{report.END}"
    assert report.NOT_ON_GPU in report.measured(marks, run)
    for page in (report.measured(marks, run, written), report.performance(run, None, written)):
        assert report.NOT_ON_GPU not in page
        assert f"| {OURS} | 250 ms | 7 GB | 5 GB |" in page


def test_the_pages_say_what_a_gpu_has_run():
    passed = [path for path in report.RESULTS.glob("gpu-*/tests.txt") if " failed" not in path.read_text()]
    known = [re.findall(r"^PASSED (\S+?)::", path.read_text(), re.MULTILINE) for path in passed]
    tests = Counter(max(known, key=len))
    for page in ("README.md", "docs/index.md", "docs/reliability.md"):
        assert f" {tests.total()} tests" in (ROOT / page).read_text(), page
    for name, count in tests.items():
        assert re.search(rf"`{name}`[^`]*\b{count}\b", (ROOT / "docs" / "reliability.md").read_text()), name
    assert report.NOT_ON_GPU not in report.README.read_text() + report.PERFORMANCE.read_text()
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        assert "have never run on a GPU" not in page.read_text(), page


@pytest.mark.parametrize(
    ("why", "outcome"),
    [
        ("offload_core.errors.HostMemoryError: training needs 140 GiB of host memory", results.ON_HOST),
        ("offload_core.errors.DeviceMemoryError: training needs 7.0 MiB of device memory", results.ON_DEVICE),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", results.ON_DEVICE),
        ("jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying", results.ON_DEVICE),
        ("RuntimeError: no kernel image is available", None),
        ("took longer than its 150 s", None),
    ],
)
def test_a_model_that_does_not_fit_is_a_result_and_any_other_error_a_failure(why, outcome):
    found = parts.does_not_fit("a model", why)
    assert (found and found["outcome"]) == outcome


def test_tests_are_counted_as_far_as_they_came():
    words = "tests/a.py::test_x[a b, 0] PASSED [1%]\ntests/a.py::test_y FAILED [2%]\ntests/b.py::test_z SKIPPED (no)"
    rows, missing, notes = parts.outcomes_of("laws", words, "took longer than its 9 s", 9.0)
    assert {row["metric"]: row["p50"] for row in rows} == {"passed": 1, "failed": 1, "skipped": 1, "time": 9.0}
    assert missing == [record.missing("laws", "took longer than its 9 s")]
    assert notes == ["laws: tests/a.py::test_y failed"]
    assert parts.outcomes_of("laws", "tests/b.py::test_z SKIPPED (no)", "", 9.0)[1]


def test_tests_are_counted_that_ran_in_several_processes():
    words = (
        "2 workers [3 items]\n\ntests/a.py::test_x[a b, 0] \ntests/a.py::test_y \n"
        "[gw1] [ 33%] FAILED tests/a.py::test_y \n"
        "[gw0] [ 66%] PASSED tests/a.py::test_x[a b, 0] \n[gw10] [100%] SKIPPED tests/b.py::test_z \n"
        "=== short test summary ===\nSKIPPED [1] tests/b.py:3: no\nFAILED tests/a.py::test_y - assert 0\n"
    )
    rows, missing, notes = parts.outcomes_of("laws", words, "exit status 1", 9.0)
    assert {row["metric"]: row["p50"] for row in rows} == {"passed": 1, "failed": 1, "skipped": 1, "time": 9.0}
    assert missing == [record.missing("laws", "exit status 1")]
    assert notes == ["laws: tests/a.py::test_y failed"]


def test_a_rehearsal_runs_tests_of_the_files_that_a_gpu_runs():
    assert FULL.tests.keys() == TINY.tests.keys()
    for name, arguments in FULL.tests.items():
        files = [argument for argument in arguments if argument.startswith("tests/")]
        assert all((ROOT / file).is_file() for file in files), name
        assert {argument for argument in TINY.tests[name] if argument.startswith("tests/")} <= set(files), name


def test_the_models_that_are_tried_grow():
    for sizes in (FULL, TINY):
        numels = [gpt.numel for gpt in sizes.ladder.values()]
        assert numels == sorted(numels)
        assert sizes.first in sizes.ladder
    for name, gpt in (FULL.ladder | FULL.accumulated).items():
        assert gpt.numel == pytest.approx(float(name.removesuffix(" B")) * 1e9, rel=0.06), name


def test_all_memory_is_written_to_once_also_where_it_grows_meanwhile():
    left, page = [4, 2, 0, 3, 1], 1 << 12
    pieces = sum(min(n, available_cpus()) for n in left)
    of_machine = iter(left)
    assert host_memory.touch(lambda: page * next(of_machine, 0), page, patience=0.2) == pieces * page


def test_a_line_that_was_cut_off_takes_no_other_along(tmp_path):
    path = tmp_path / "results.jsonl"
    record.append(path, {"bench": "a"})
    whole = path.read_text()
    for cut in (whole[:-1], whole[:10]):
        path.write_text(whole + cut)
        record.append(path, {"bench": "b"})
        lines = path.read_text().splitlines()
        assert json.loads(lines[0])["bench"] == "a"
        assert json.loads(lines[-1])["bench"] == "b"
