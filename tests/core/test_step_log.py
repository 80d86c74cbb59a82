"""Reports of steps, written down: whole lines, valid JSON, files that TensorBoard reads, runs that go on."""

import csv
import json
import math
import os
import subprocess
import sys
import warnings
from io import FileIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.errors import CheckpointWarning, ConfigError, StateError
from offload_core.memory.plan import PlanRow
from offload_core.memory.report import DeviceUse, MemoryReport
from offload_core.step.pipeline import StepReport
from offload_core.step_log import Csv, MLflow, ProgressBar, StepLog, TensorBoard, WandB, Writer, measures
from offload_core.step_log.files import _append
from offload_core.support.user_line import UserLine
from tests.support.strategies import law

ROOT = Path(__file__).resolve().parents[2]


class Kept(Writer):
    def __init__(self):
        self.records, self.opened, self.closed = [], [], 0

    def open(self, rank):
        self.opened.append(rank)

    def write(self, step, record):
        self.records.append({"step": step, **record})

    def close(self):
        self.closed += 1


def done(step, **fields):
    return StepReport(**{"updated": True, "grad_norm": 1.5, "lr": (0.1,), "step": step} | fields)


def accumulating(step):
    return StepReport(updated=False, skipped="accumulating", step=step)


def lines(path):
    text = path.read_text()
    assert not text or text.endswith("\n")
    return [
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        for line in text.split("\n")[:-1]
    ]


def steps(path):
    return [line["step"] for line in lines(path)]


# --- records ---------------------------------------------------------------------------------------------


def test_a_record_has_what_the_report_has_and_the_mean_of_the_micro_steps():
    kept = Kept()
    log = StepLog(kept)
    for i in range(3):
        log(accumulating(1), loss=np.float32(i), words="train")
    log(done(1, clip_coefficient=0.5, loss_scale=8.0, lr=(0.1, 0.1, 0.3)), loss=np.array(5.0), words="train", tokens=7)
    [record] = kept.records
    assert record.pop("seconds") >= 0
    assert record.pop("tokens_per_second") > 0
    assert record.pop("host_peak_bytes") >= record.pop("host_bytes") > 2**20
    assert record == {
        "step": 1, "lr": 0.1, "lr_2": 0.3, "grad_norm": 1.5, "clip_coefficient": 0.5, "loss_scale": 8.0,
        "skipped": None, "loss": 2.0, "words": "train", "tokens": 7,
    }  # fmt: skip
    assert type(record["tokens"]) is int
    assert type(record["loss"]) is float


class Unread:
    """A value that the device would have to be waited for."""

    def __float__(self):
        raise AssertionError("read between records")


def test_between_records_nothing_is_read_and_what_was_skipped_is_always_there():
    kept = Kept()
    log = StepLog(kept, every=3)
    for step in range(1, 7):
        log(done(step), loss=float(step) if step % 3 == 0 else Unread())
    log(done(7, updated=False, skipped="overflow", grad_norm=math.inf), loss=math.nan)
    assert [(r["step"], r["skipped"]) for r in kept.records] == [(3, None), (6, None), (7, "overflow")]
    log(None, loss=1.0)  # offloaded.report before the first update
    assert len(kept.records) == 3
    with pytest.raises(ConfigError, match="every: got 0"):
        StepLog(kept, every=0)


def test_a_value_that_is_no_number_is_named():
    log = StepLog(Kept())
    with pytest.raises(TypeError) as caught:
        log(done(1), loss=np.ones(3))
    assert caught.value.__notes__ == ["in the log as 'loss'; expected a number, or a tensor or array of one"]
    log(done(2), loss=1.0)  # what was given with it is gone
    with pytest.raises(ConfigError, match="step: a record has its update's number under this name"):
        log(done(3), step=17)


@pytest.mark.integration
def test_one_rank_writes_or_each_a_file_of_its_own(tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX")
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    kept = Kept()
    for log in (StepLog(kept, tmp_path / "no.jsonl"), StepLog(kept, rank=3)):
        log(done(1), loss=Unread())
    assert (kept.opened, kept.records, list(tmp_path.iterdir())) == ([], [], [])
    with StepLog(kept, tmp_path / "a" / "steps.jsonl", TensorBoard(tmp_path / "b"), every_rank=True) as log:
        log(done(1))
    assert (kept.opened, kept.closed) == ([1], 1)
    assert lines(tmp_path / "a" / "steps.rank1.jsonl")[0]["step"] == 1
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["rank1"]
    with StepLog(tmp_path / "steps.jsonl", rank=0) as log:
        log(done(1))
    assert steps(tmp_path / "steps.jsonl") == [1]


def test_writers_that_have_begun_end_where_another_cannot(tmp_path):
    kept = Kept()
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        StepLog(kept, tmp_path / "file" / "steps.jsonl")
    assert (kept.opened, kept.closed) == ([None], 1)


class Clock:
    """In place of ``time``: each record comes ``seconds`` after the last one."""

    def __init__(self, seconds):
        self.now, self._seconds = 0.0, seconds

    def monotonic(self):
        self.now += self._seconds
        return self.now


class Devices:
    def __init__(self, *use):
        self._use = DeviceUse(*use) if use else None

    def device_use(self):
        return self._use


def test_tokens_of_all_micro_steps_and_updates_since_the_last_record_give_the_speed(monkeypatch):
    monkeypatch.setattr(measures, "time", Clock(4.0))
    kept = Kept()
    log = StepLog(kept, every=2, total=10, flops_per_token=3e9, peak_flops=1e12)
    for step in range(1, 7):
        log(accumulating(step), tokens=np.int64(100))
        log(done(step), tokens=60)
    assert [r["step"] for r in kept.records] == [2, 4, 6]
    assert [r["tokens"] for r in kept.records] == [160] * 3  # of the record's own update
    assert [r["seconds"] for r in kept.records] == [2.0] * 3
    assert [r["tokens_per_second"] for r in kept.records] == [80.0] * 3
    assert [r["flops_per_second"] for r in kept.records] == [2.4e11] * 3
    assert [r["mfu"] for r in kept.records] == [0.24] * 3
    assert [r["seconds_left"] for r in kept.records] == [16, 12, 8]


@pytest.mark.parametrize(
    ("use", "given", "peak"),
    [
        (("NVIDIA H200", 7, 9), None, 989e12),
        (("NVIDIA H200", 7, 9, 4), None, 4 * 989e12),
        (("NVIDIA H200 MIG 1g.18gb", 7, 9), None, None),
        (("some new device", 7, 9), None, None),
        (("some new device", 7, 9, 2), 5e12, 10e12),
        ((), None, None),
        ((), 2e12, 2e12),
    ],
)
def test_the_share_of_the_peak_is_told_only_where_the_peak_is_known(use, given, peak, monkeypatch):
    monkeypatch.setattr(measures, "time", Clock(1.0))
    kept = Kept()
    log = StepLog(kept, engine=Devices(*use), flops_per_token=1e9, peak_flops=given)
    log(done(1), tokens=1000)
    [record] = kept.records
    assert record["flops_per_second"] == 1e12
    assert record.get("mfu") == (None if peak is None else pytest.approx(1e12 / peak))
    assert [record.get("device_bytes"), record.get("device_peak_bytes")] == ([7, 9] if use else [None, None])
    assert "seconds_left" not in record  # without the number of updates


@pytest.mark.parametrize("wrong", [{"flops_per_token": 0.0}, {"peak_flops": math.inf}, {"total": 0}])
def test_a_speed_that_is_not_positive_is_refused(wrong):
    [name] = wrong
    with pytest.raises(ConfigError, match=f"{name}: got"):
        StepLog(Kept(), **wrong)


def test_host_memory_is_that_of_this_process(monkeypatch, tmp_path):
    """Its peak is not that of ``getrusage``, which a child process takes over from its parent."""
    before = measures.host_memory()
    large = bytearray(b"1") * (64 << 20)
    during = measures.host_memory()
    assert during["host_bytes"] >= before["host_bytes"] + len(large) - (8 << 20)
    assert during["host_peak_bytes"] >= during["host_bytes"]
    monkeypatch.setattr(measures, "_STATUS", tmp_path / "status")
    (tmp_path / "status").write_text(f"Name:\tpython\nVmHWM:\t {1 << 30} kB\nVmRSS:\t 1 kB\n")
    assert measures.host_memory()["host_peak_bytes"] == 1 << 40


# --- lines ------------------------------------------------------------------------------------------------

values = st.one_of(st.floats(), st.integers(-(2**70), 2**70), st.text(max_size=5), st.none())


@law(50)
@given(records=st.lists(st.dictionaries(st.text(min_size=1, max_size=5), values, max_size=4), max_size=4))
def test_any_record_is_one_line_of_json(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("lines") / "steps.jsonl"
    with StepLog(path) as log:
        for step, record in enumerate(records):
            log.write(step, {f"_{name}": value for name, value in record.items()} | {"step": -1})
    for step, (line, record) in enumerate(zip(lines(path) if records else [], records, strict=True)):
        expected = {f"_{n}": None if isinstance(v, float) and not math.isfinite(v) else v for n, v in record.items()}
        assert line == {"step": step, **expected}


CHILD = """
import os, sys
from offload_core.step_log import StepLog
log = StepLog(sys.argv[1])
for step in range(1, 4):
    log.write(step, {"loss": 0.5})
os.kill(os.getpid(), 9)
"""


def test_a_killed_process_loses_no_line_and_the_next_goes_on_where_the_checkpoint_was(tmp_path):
    path = tmp_path / "steps.jsonl"
    subprocess.run([sys.executable, "-c", CHILD, str(path)], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert steps(path) == [1, 2, 3]
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # as a machine that lost its power may leave it
    with StepLog(path) as log:
        log.write(3, {"loss": 0.25})
        log.write(4, {})
    assert [(line["step"], line.get("loss")) for line in lines(path)] == [(1, 0.5), (2, 0.5), (3, 0.25), (4, None)]
    aside = (tmp_path / "steps.superseded.jsonl").read_text()
    assert aside == '{"step": 3, "loss": 0.5}\n{"step": 4, "lo\n'


@law(60)
@given(
    made=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    reopened=st.sets(st.integers(0, 11)),
    foreign=st.booleans(),
)
def test_the_file_holds_the_last_word_on_each_step_in_order_and_nothing_is_lost(
    tmp_path_factory, made, reopened, foreign
):
    """Whenever it goes back, in one process or in the next."""
    path = tmp_path_factory.mktemp("again") / "steps.jsonl"
    if foreign:
        path.write_text('# by hand\n{"other": 1}\n')
    expected, last, log = [], None, StepLog(path)
    for i, step in enumerate(made):
        if i in reopened:
            log.close()
            log, last = StepLog(path), None
        if last is None or step < last:
            expected = [(s, n) for s, n in expected if s < step]
        log.write(step, {"i": i})
        expected, last = [*expected, (step, i)], step
    log.close()
    found = [line for line in path.read_text().splitlines() if '"i"' in line]
    assert [(json.loads(line)["step"], json.loads(line)["i"]) for line in found] == expected
    assert path.read_text().startswith("# by hand\n") or not foreign
    aside = path.with_name("steps.superseded.jsonl")
    everything = found + (aside.read_text().splitlines() if aside.exists() else [])
    assert sorted(json.loads(line)["i"] for line in everything) == list(range(len(made)))


def test_two_processes_do_not_write_to_one_file(tmp_path):
    with StepLog(tmp_path / "steps.jsonl") as log:
        log.write(1, {})
        log.write(1, {})  # has read the file, too
        code = f"from offload_core.step_log import StepLog; StepLog({str(tmp_path / 'steps.jsonl')!r})"
        other = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "another process is writing to it; expected a file for each run, and of several ranks one" in other.stderr
    assert steps(tmp_path / "steps.jsonl") == [1, 1]


def test_of_two_logs_of_a_process_the_last_to_begin_writes(tmp_path):
    """As where a notebook's cell is run again. What two write by turns would be taken back by each other."""
    first = StepLog(tmp_path / "steps.jsonl")
    first.write(1, {"of": 1})
    (tmp_path / "link.jsonl").symlink_to("steps.jsonl")
    with StepLog(tmp_path / "link.jsonl") as second:
        second.write(2, {"of": 2})
        with pytest.raises(StateError, match=r"steps.jsonl: another log of this process has begun to write to it"):
            first.write(3, {"of": 1})
    assert [(line["step"], line["of"]) for line in lines(tmp_path / "steps.jsonl")] == [(1, 1), (2, 2)]


class FullDisk(FileIO):
    room = 10

    def write(self, content):
        if self.room == 0:
            raise OSError(28, "No space left on device")
        content, self.room = content[: self.room], max(self.room - len(content), 0)
        return super().write(content)


def test_of_a_record_that_the_disk_does_not_take_nothing_stays(tmp_path):
    with FullDisk(tmp_path / "file", "ab") as file:
        _append(file, b"eight ..")
        with pytest.raises(OSError, match="No space left"):
            _append(file, b"more than two")
    assert (tmp_path / "file").read_bytes() == b"eight .."


# --- tables ----------------------------------------------------------------------------------------------


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_column_that_appears_later_breaks_no_row(tmp_path):
    path = tmp_path / "a" / "steps.csv"
    with StepLog(Csv(path)) as log:
        log.write(1, {"loss": 0.5, "words": 'a "b", c\nd'})
        log.write(2, {"loss": math.nan, "eval_loss": 0.75})
        log.write(3, {"skipped": None})
    empty = {"words": "", "eval_loss": "", "skipped": ""}
    assert table(path) == [
        {"step": "1", "loss": "0.5", **empty, "words": 'a "b", c\nd'},
        {"step": "2", "loss": "nan", **empty, "eval_loss": "0.75"},
        {"step": "3", "loss": "", **empty},
    ]
    assert [each.name for each in path.parent.iterdir()] == ["steps.csv"]


def test_a_table_is_continued_and_repeated_rows_move_beside_it(tmp_path):
    path = tmp_path / "steps.csv"
    with StepLog(Csv(path)) as log:
        for step in (1, 2, 3):
            log.write(step, {"loss": step})
    with path.open("a") as file:
        file.write("4")  # as a machine that lost its power may leave it
    with StepLog(Csv(path)) as log:
        log.write(3, {"loss": 30, "new": 1})
        log.write(4, {"loss": 40})
        log.write(2, {"loss": 20})
    assert [(row["step"], row["loss"]) for row in table(path)] == [("1", "1"), ("2", "20")]
    moved = [(row["step"], row["loss"]) for row in table(tmp_path / "steps.superseded.csv")]
    assert moved == [("3", "3"), ("4", ""), ("2", "2"), ("3", "30"), ("4", "40")]


def test_each_rank_has_its_table(tmp_path):
    with StepLog(Csv(tmp_path / "steps.csv"), rank=1, every_rank=True) as log:
        log.write(1, {"loss": 1})
    assert [each.name for each in tmp_path.iterdir()] == ["steps.rank1.csv"]


# --- W&B and MLflow --------------------------------------------------------------------------------------


class Calls:
    """In place of a package or a run: notes the calls."""

    def __init__(self, **attributes):
        self.calls = []
        vars(self).update(attributes)

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, *args, kwargs) if kwargs else (name, *args))
            return vars(self).get(f"from_{name}")

        return call


RECORD = {"loss": 0.5, "words": "train", "skipped": None}


@pytest.mark.parametrize("is_running", [False, True])
def test_wandb_gets_each_record_over_the_number_of_the_update(is_running, monkeypatch):
    run = Calls()
    wandb = Calls(run=run if is_running else None, from_init=run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with StepLog(WandB(project="a", mode="offline")) as log:
        log.write(7, RECORD)
        log.write(5, RECORD)
    assert wandb.calls == ([] if is_running else [("init", {"project": "a", "mode": "offline"})])
    assert run.calls == [
        ("define_metric", "*", {"step_metric": "step"}),
        ("log", {"loss": 0.5, "words": "train", "step": 7}),
        ("log", {"loss": 0.5, "words": "train", "step": 5}),
        *([] if is_running else [("finish",)]),
    ]


@pytest.mark.parametrize("is_running", [False, True])
def test_mlflow_gets_the_numbers_of_each_record(is_running, monkeypatch):
    run = Calls(info=Calls(run_id="r"))
    mlflow = Calls(from_start_run=run, from_active_run=run if is_running else None)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    with StepLog(MLflow(run_name="a"), rank=1, every_rank=True) as log:
        log.write(7, RECORD)
    assert mlflow.calls == [
        ("active_run",),
        *([] if is_running else [("start_run", {"run_name": "a-rank1"})]),
        ("log_metrics", {"loss": 0.5}, {"step": 7, "run_id": "r"}),
        *([] if is_running else [("end_run",)]),
    ]


@pytest.mark.parametrize(("writer", "module"), [(WandB, "wandb"), (MLflow, "mlflow")])
def test_a_tracker_that_is_not_installed_is_named_with_pips_command(writer, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ModuleNotFoundError, match=f"{writer.__name__} needs {module}, .*expected it: pip install {module}$"
    ):
        StepLog(writer())


# --- TensorBoard -----------------------------------------------------------------------------------------


def scalars(folder):
    """Return the values that TensorBoard's own reader finds, by tag."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports
        module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        accumulator = module.EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


@pytest.mark.integration
def test_tensorboard_reads_what_is_written_and_forgets_what_is_done_again(tmp_path):
    pytest.importorskip("tensorboardX")
    with StepLog(TensorBoard(tmp_path)) as log:
        for step in (1, 2, 300):
            log.write(step, {"loss": step / 8, "grad/norm": math.inf, "skipped": "overflow", "none": None, "n" * 99: 3})
        log.write(300, {"loss": 1e300})
    found = scalars(tmp_path)
    assert found == {
        "loss": [(1, 0.125), (2, 0.25), (300, 37.5), (300, math.inf)],
        "grad/norm": [(step, math.inf) for step in (1, 2, 300)],
        "n" * 99: [(step, 3.0) for step in (1, 2, 300)],
    }
    with StepLog(TensorBoard(tmp_path)) as log:
        log.write(2, {"loss": -1.0})
        log.write(3, {"loss": math.nan})
    assert scalars(tmp_path)["loss"][:2] == [(1, 0.125), (2, -1.0)]
    assert math.isnan(scalars(tmp_path)["loss"][2][1])


@pytest.mark.integration
def test_tensorboard_forgets_what_is_done_again_in_one_process(tmp_path):
    pytest.importorskip("tensorboardX")
    with StepLog(TensorBoard(tmp_path)) as log:
        for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 4.0)):
            log.write(step, {"loss": loss})
    assert scalars(tmp_path) == {"loss": [(1, 1.0), (2, 4.0)]}


# --- the bar ---------------------------------------------------------------------------------------------


def test_the_bar_goes_from_the_resumed_step_to_the_end(capsys):
    with StepLog(ProgressBar(5, show=("loss", "rate"))) as log:
        for step in (3, 4, 4, 5):
            log.write(step, {"loss": 2.34567, "rate": 12345.6, "skipped": "overflow" if step == 4 else None, "lr": 1})
    last = capsys.readouterr().err.rsplit("\r", 1)[-1]
    assert " 5/5 [" in last
    assert "loss 2.346, rate 12,346]" in last


def test_the_bar_shows_speed_and_memory_in_their_units(capsys):
    with StepLog(ProgressBar(5)) as log:
        record = {"loss": 2.5, "tokens_per_second": 12345.6, "device_bytes": 2**34, "device_peak_bytes": 2**35}
        log.write(5, {**record, "host_bytes": 1536, "mfu": 0.41234})
    last = capsys.readouterr().err.rsplit("\r", 1)[-1]
    assert "loss 2.5, tokens/s 12,346, mfu 0.4123, device 16.0 GiB, host 1.5 KiB]" in last


def test_a_library_that_is_not_there_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"ProgressBar needs tqdm.*pip install 'offload-core\[log\]'"
    ) as caught:
        StepLog(ProgressBar(5))
    assert caught.value.name == "tqdm"


# --- what the front ends report ---------------------------------------------------------------------------


def test_torch_reports_the_rate_and_the_number_of_each_update_through_checkpoints(tmp_path):
    torch = pytest.importorskip("torch")
    from frontends.torch import wrap

    def run(n, resume=None):
        engine = wrap(
            torch.nn.Linear(3, 1), lr=lambda updates: 0.5**updates, gradient_clipping=1.0, gradient_accumulation_steps=2
        )
        if resume is not None:
            engine.load_checkpoint(resume)
        for i in range(n):
            for x in (1.0, math.inf if i == 1 else 3.0):
                loss = engine(torch.full((2, 3), x)).mean()
                engine.backward(loss)
                report = engine.step()
                assert (report.skipped == "accumulating") is (x == 1.0)
                log(report, loss=loss)
            if i == 0:
                engine.save_checkpoint(tmp_path / "saved")

    with StepLog(tmp_path / "steps.jsonl") as log:
        run(3)
    rates = [(1, None, 1.0), (2, "non-finite", 0.5), (2, None, 0.5)]
    assert [(line["step"], line["skipped"], line["lr"]) for line in lines(tmp_path / "steps.jsonl")] == rates
    assert [line["loss"] is None for line in lines(tmp_path / "steps.jsonl")] == [False, True, False]
    with StepLog(tmp_path / "steps.jsonl") as log:
        run(1, tmp_path / "saved")
    assert [(line["step"], line["lr"]) for line in lines(tmp_path / "steps.jsonl")] == [(1, 1.0), (2, 0.5)]


def test_jax_reports_the_rate_and_the_number_of_each_update(tmp_path):
    jnp = pytest.importorskip("jax.numpy")
    from frontends.jax import wrap

    offloaded = wrap({"w": jnp.ones(4)}, lr=lambda count: 0.5**count, gradient_accumulation_steps=2)
    with StepLog(tmp_path / "steps.jsonl") as log:
        for i in range(4):
            offloaded.update({"w": jnp.ones(4)})
            log(offloaded.report, loss=jnp.float32(i))
    found = [(line["step"], line["lr"], line["loss"]) for line in lines(tmp_path / "steps.jsonl")]
    assert found == [(1, 1.0, 0.5), (2, 0.5, 2.5)]


# --- warnings ----------------------------------------------------------------------------------------------


def test_a_warning_is_of_the_users_line_and_said_there_once():
    from offload_core import OffloadConfig

    ignored = {"bf16": {"enabled": True}, "steps_per_print": 10}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            OffloadConfig.resolve(ignored)  # here
        warning = CheckpointWarning("the disk is full")
        for _ in range(2):
            UserLine.now().warn(warning)
    source = Path(__file__).read_text().splitlines()
    assert [source[w.lineno - 1].strip() for w in caught] == [
        "OffloadConfig.resolve(ignored)  # here",
        "UserLine.now().warn(warning)",
    ]
    assert {w.filename for w in caught} == {__file__}
    assert "remove the keys without effect here: steps_per_print (" in str(caught[0].message)


OF_THE_PACKAGE = """
from contextlib import contextmanager
from offload_core.support.user_line import UserLine
from offload_core.errors import CheckpointWarning

@contextmanager
def context():
    UserLine.now().warn(CheckpointWarning("the disk is full"))
    yield

def act():
    with context():
        pass
"""


def test_a_warning_in_a_context_of_the_package_is_of_the_users_line_too():
    names = {"__name__": "offload_core.some_part"}
    exec(OF_THE_PACKAGE, names)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        names["act"]()
        with names["context"]():
            pass
    assert {w.filename for w in caught} == {__file__}
    assert len(caught) == 2


# --- memory ------------------------------------------------------------------------------------------------

PLANNED = [
    PlanRow("parameters", "device", 3 * 2**20, ""),
    PlanRow("gradients", "device", 2**20, "", brief=True),
    PlanRow("master", "host", 2**21, ""),
    PlanRow("master", "host", 2**21, ""),  # of parameters that came later
    PlanRow("the model while it is whole", "host", 2**30, "", passing=True),
]
HELD = {("device", "parameters"): 2**20, ("host", "master"): 2**22, ("host", "staging"): 512}


def test_a_report_sets_what_is_held_beside_what_was_planned():
    report = MemoryReport.of(2**20, PLANNED, HELD)
    assert (report.planned_device_bytes, report.device_bytes) == (3 * 2**20, 2**20)
    assert (report.planned_host_bytes, report.host_bytes) == (2**22, 2**22 + 512)
    assert report.host == {"master": 2**22, "staging": 512}
    assert str(report).splitlines() == [
        "where               what        planned  held       per parameter",
        "device              parameters  3.0 MiB  1.0 MiB    1.00",
        "device (in a step)  gradients   1.0 MiB  0 bytes    0.00",
        "device              in all      3.0 MiB  1.0 MiB    1.00",
        "host                master      4.0 MiB  4.0 MiB    4.00",
        "host                staging     0 bytes  512 bytes  0.00",
        "host                in all      4.0 MiB  4.0 MiB    4.00",
    ]


@pytest.mark.integration
def test_a_report_is_drawn_to_scale(tmp_path, monkeypatch):
    figures = pytest.importorskip("matplotlib.figure")
    drawn, save = [], figures.Figure.savefig
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, path: drawn.append(figure) or save(figure, path))
    MemoryReport.of(2**20, PLANNED, HELD).plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    device, host = drawn[0].axes
    assert [bar.get_width() for bar in device.patches] == [3, 1, 1, 0]  # MiB, planned, then held
    assert [bar.get_width() for bar in host.patches] == [4, 0, 4, 512 / 2**20]
    assert [label.get_text() for label in device.get_yticklabels()] == ["parameters", "gradients (in a step)"]
    assert device.get_title(loc="left") == "device: 1.0 of 3.0 MiB"
