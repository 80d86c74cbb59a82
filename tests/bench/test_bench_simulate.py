"""The simulated machines: their clock, who says what to whom, and the pipeline's order of events on them."""

import json
from collections import defaultdict
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.parts import overlap, simulate
from bench.parts.overlap import CASES
from bench.virtual.clock import Clock, DeadlockError
from bench.virtual.cluster import BLOCK, WAITING, Job, Machines, SimulatedGroup, SimulatedRank, on_ranks
from bench.virtual.cluster import simulate as step_on
from bench.virtual.machine import GB, SCHEDULES, Case, Run, virtual
from offload_core.config.options import OffloadConfig
from offload_core.device.trace import COMPUTE, REDUCTION, TO_DEVICE, TO_HOST, UPDATE
from offload_core.testing.thread_ranks import run_ranks
from tests.support.strategies import law

pytestmark = pytest.mark.slow

ONE = Machines(gpus=1, machines=1, flops=40e12, link=12 * GB, dram=200 * GB, peer=120 * GB, network=80 * GB)
CLUSTER = Machines(gpus=4, machines=2, flops=40e12, link=12 * GB, dram=200 * GB, peer=120 * GB, network=80 * GB)
JOB = Job(1e9, 10, 10240)


LATE = 1e-2
"""Microseconds: times in a trace are rounded."""


# --- the clock -----------------------------------------------------------------------------------------------


@law(100)
@given(st.lists(st.lists(st.integers(0, 9).map(float), max_size=5), min_size=1, max_size=4))
def test_threads_take_turns_by_the_time(sleeps):
    clock, seen = Clock(), []

    def thread(number, seconds):
        for each in seconds:
            clock.sleep(each)
            seen.append((clock.now, number))
        return clock.now

    running = [clock.thread("a thread").submit(partial(thread, *each)) for each in enumerate(sleeps)]
    assert [each.result() for each in running] == [sum(seconds) for seconds in sleeps]
    assert [at for at, _ in seen] == sorted(at for at, _ in seen)
    assert clock.now == max(map(sum, sleeps))


def test_a_thread_does_one_thing_after_the_other_and_an_error_reaches_who_waits():
    clock = Clock()
    thread = clock.thread("a thread")
    first, second = thread.submit(partial(clock.sleep, 2.0)), thread.submit(partial(clock.sleep, 3.0))
    failed = thread.submit(lambda: 1 / 0)
    assert not first.done()
    second.result()
    assert first.done()
    assert clock.now == 5.0
    with pytest.raises(ZeroDivisionError):
        failed.result()


def test_threads_that_all_wait_are_told():
    clock = Clock()
    with pytest.raises(DeadlockError, match="every thread waits"):
        clock.thread("a thread").submit(clock.future().result).result()


# --- the pipeline on it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_the_pipeline_takes_the_time_of_the_closed_forms(name, clips):
    expected = overlap.model(8, overlap.Times.of(CASES[name], 2**20, 8, clips))
    for schedule in ("serial", "overlap", "delayed"):
        taken = overlap.predicted(CASES[name], 2**20, 8, 1, clips, schedule, 4)
        assert taken == pytest.approx(expected[schedule], rel=1e-9), schedule


def lanes_of(path):
    """What was done in each lane, in its order; who waited for whom depends on who was faster."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    lanes = defaultdict(list)
    for event in sorted(events, key=lambda event: event["ts"] + event["dur"]):
        if not event["name"].endswith(("wait", "waits")):
            lanes[event["cat"]].append(event["name"])
    return dict(lanes)


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("schedule", ["serial", "overlap", "delayed"])
def test_every_lane_does_in_virtual_time_what_it_does_by_the_wall_clock(schedule, clips, tmp_path):
    def trace(path):
        run = Run(Case(1e-3, 2e-3, 1 * GB, 10 * GB), 2**14, 4, 1, clips, schedule)
        run.step()
        with run.pipeline.trace(path):
            run.step_times(1)
        run.close()
        return lanes_of(path)

    with virtual(10 * GB):
        simulated = trace(tmp_path / "simulated.json")
    assert set(simulated) >= {COMPUTE, TO_HOST, UPDATE, TO_DEVICE}
    assert simulated == trace(tmp_path / "real.json")


def spans_of(path):
    """``{lane: [(what, bucket, start, end)]}`` in order of their start."""
    lanes = defaultdict(list)
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X":
            span = (event["name"], event["args"].get("bucket"), event["ts"], event["ts"] + event["dur"])
            lanes[event["cat"]].append(span)
    return lanes


@pytest.mark.parametrize("machines", [ONE, CLUSTER])
def test_nothing_begins_before_what_it_needs(machines, tmp_path):
    job = JOB._replace(tokens=1024)  # so few that the forward waits for parameters
    step_on(machines, job, "overlap", tmp_path / "trace.json")
    lanes = spans_of(next(tmp_path.glob("*.json")))
    for lane in (TO_HOST, TO_DEVICE, UPDATE):
        assert all(before[3] <= after[2] + LATE for before, after in pairwise(lanes[lane])), lane
    of_matrix = [
        0.0,
        *np.cumsum([job.parameters / job.layers * share / sum(BLOCK) for share in job.layers * BLOCK[::-1]]),
    ]
    bucket_numel = OffloadConfig().reduce_bucket_size
    buckets = len({bucket for _, bucket, _, _ in lanes[UPDATE]})
    done = {name: [span for span in lanes[COMPUTE] if span[0].startswith(name)] for name in ("forward", "backward")}
    exchange = machines.all_to_all(2 * bucket_numel) if machines.world_size > 1 else 0.0
    boundary = [end for what, _, _, end in lanes[REDUCTION] if "norm" in what][buckets - (machines.world_size == 1)]
    of_bucket = {lane: [[s for s in spans if s[1] == k] for k in range(buckets)] for lane, spans in lanes.items()}
    last_sent = 0.0
    for i, (start, end) in enumerate(pairwise(of_matrix)):  # in the order of backward
        gone, again = done["backward"][i], done["forward"][-1 - i]
        for k in range(int(start // bucket_numel), int(end // bucket_numel) + 1):
            copied = of_bucket[TO_HOST][k][0]
            assert copied[2] >= gone[3] + 0.99e6 * exchange * (k < buckets - 1) - LATE
            [updated] = [span for span in of_bucket[UPDATE][k] if copied[3] < span[2] < again[2]]
            [sent] = [span for span in of_bucket[TO_DEVICE][k] if copied[3] < span[2] < again[2]]
            assert copied[3] <= boundary <= updated[2] + LATE, "the norm is of all gradients"
            assert updated[3] <= sent[2] + LATE
            assert sent[3] <= again[2] + LATE
            last_sent = max(last_sent, sent[3])
    assert of_bucket[TO_HOST][0][0][2] < done["backward"][len(of_matrix) // 2][2], "gradients leave during backward"
    assert again[2] < last_sent, "parameters come during forward"


# --- ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 5])
def test_two_ranks_that_run_hear_what_all_would(world_size):
    def talk(ranks):
        mine = np.arange(world_size * 3, dtype=np.float32) + (100 if ranks.rank == 0 else 7)
        received, gathered, summed = np.empty_like(mine), np.empty(world_size * 3, np.float32), np.empty(3, np.float32)
        ranks.exchange(mine, received, "a")
        ranks.gather(mine[:3], gathered, "b")
        ranks.reduce_scatter(mine, summed, "c")
        total, given = mine.astype(np.int64), mine.copy()
        ranks.sum_integers(total, "d")
        ranks.broadcast(given, "e")
        return [array.tolist() for array in (received, gathered, summed, total, given)]

    clock = Clock()
    group = SimulatedGroup(clock, world_size, lambda n_bytes: 2.0, lambda n_bytes: 3.0)
    assert on_ranks(clock, world_size, lambda rank: talk(SimulatedRank(group, rank))) == run_ranks(world_size, talk)[:2]
    assert clock.now == 2.0 + 4 * 3.0


@law(60)
@given(st.integers(1, 5), st.integers(1, 5))
def test_an_all_to_all_takes_what_the_busiest_wire_takes(gpus, machines):
    n = gpus * machines
    inside = across = 0
    for there in range(1, n):  # from rank 0, of the first machine
        inside, across = inside + (there < gpus), across + (there >= gpus)
    cluster = Machines(gpus, machines, 1.0, 1.0, 1.0, peer=3.0, network=7.0, latency=0.0)
    assert cluster.all_to_all(n) == pytest.approx(max(inside / 3, gpus * across / 7))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_as_much_is_done_as_the_bytes_take(schedule):
    busy = step_on(ONE, JOB, schedule).busy
    update = {"in backward": 16 + 26, "delayed": 6 + 26}.get(schedule, 28)
    if schedule == "in backward":  # what has not been sent by the boundary is updated in one
        assert 28 <= busy[UPDATE] * ONE.dram / JOB.parameters <= update
    else:
        assert busy[UPDATE] == pytest.approx(update * JOB.parameters / ONE.dram, rel=1e-3)
    assert busy[TO_HOST] == pytest.approx(2 * JOB.parameters / ONE.link, rel=1e-3)
    assert busy[REDUCTION] == pytest.approx(2 * JOB.parameters / ONE.dram, rel=1e-3)


def test_accumulated_gradients_are_summed_in_fp32():
    accumulated = step_on(ONE, JOB._replace(micro_steps=2), "overlap").busy
    first, second, norm = 2 + 4, 2 + 4 + 4, 4
    assert accumulated[REDUCTION] == pytest.approx((first + second + norm) * JOB.parameters / ONE.dram, rel=1e-3)
    assert accumulated[UPDATE] == pytest.approx(30 * JOB.parameters / ONE.dram, rel=1e-3)


def test_ranks_share_the_update_and_the_links():
    one, eight = (step_on(machines, JOB, "overlap") for machines in (ONE, CLUSTER))
    # gradients summed on the GPUs cross in fp32: 30 bytes instead of 28
    assert eight.busy[UPDATE] == pytest.approx(one.busy[UPDATE] / CLUSTER.machines * 30 / 28, rel=1e-2)
    slow = step_on(CLUSTER.scaled(10), JOB, "overlap")
    assert slow.seconds > eight.seconds
    assert eight.seconds >= JOB.operations / CLUSTER.flops


# --- the command ---------------------------------------------------------------------------------------------------


def test_ones_own_machines_are_simulated_traced_and_recorded(tmp_path, capsys):
    own = ["--gpus=2", "--machines=2", "--parameters=100M", "--layers=4", "--flops=10T", "--links=20GB"]
    simulate.main([*own, f"--json={tmp_path / 'out.jsonl'}", f"--trace={tmp_path}"])
    record = json.loads((tmp_path / "out.jsonl").read_text())
    assert record["bench"] == "simulate"
    assert record["config"]["machines"]["links"] == 20e9
    seconds = {row["schedule"]: row["p50"] for row in record["rows"]}
    assert seconds["overlap"] < seconds[WAITING] < seconds["serial"]
    assert len(list(tmp_path.glob("*.rank0.json"))) == len(SCHEDULES) + 1
    assert "in backward" in capsys.readouterr().out


def test_two_real_ranks_are_measured_beside_the_simulated():
    cells = simulate.on_two_ranks({"small": Case(1e-3, 2e-3, 1 * GB, 8 * GB)}, 1, 1)
    assert len(cells) == len(SCHEDULES)
    assert all(seconds > 3e-3 for cell in cells for seconds in (*cell.measured, *cell.predicted))
    assert simulate.together(cells)["name"].endswith(f"2 gloo ranks, {len(SCHEDULES)} regimes")
