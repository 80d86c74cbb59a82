"""Updates on disk are compared with fio's best way over as many bytes, and with the update where that is slower."""

import json
import os
import shutil
import stat
import sys
from typing import ClassVar

import pytest

from bench.harness import disk
from bench.harness.contenders import Measurement, Result
from bench.harness.processes import ContenderError
from bench.parts import nvme

_FIO = """#!{python}
import json, os, sys
assert "hugetlb=1" in os.environ["GLIBC_TUNABLES"]
jobs, of = [], {{}}
for word in sys.argv[1:]:
    name, _, value = word.partition("=")
    if name == "--name":
        jobs.append(of := {{}})
    of[name] = value
with open({log!r}, "a") as log:
    print(json.dumps(jobs), file=log)
print("note: before the results")
print(json.dumps({{"jobs": [
    {{"jobname": of["--name"], "read": {{"runtime": 100 * (i + 1)}}, "write": {{"runtime": 10 * (i + 1)}}}}
    for of in jobs
    for i in range(int(of.get("--numjobs", 1)))
]}}))
"""


@pytest.fixture
def fio(tmp_path, monkeypatch):
    """A program in place of fio, whose threads took 100, 200, ... ms to read and 10, 20, ... to write; returns its
    jobs, call by call."""
    folder, log = tmp_path / "bin", tmp_path / "log"
    folder.mkdir()
    program = folder / "fio"
    program.write_text(_FIO.format(python=sys.executable, log=str(log)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", os.pathsep.join([str(folder), os.environ["PATH"]]))
    return lambda: [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.draws(1)
@pytest.mark.parametrize("way", disk.WAYS, ids=lambda way: way.name)
def test_fio_reads_and_writes_every_byte_once_past_the_page_cache(way, fio, tmp_path):
    file = disk.DiskFile(tmp_path, 3 * disk.UNIT + 5)
    assert len(file.steps(way, 2)) == 2
    fill, first, *counted = fio()
    assert counted == [first, first]
    jobs = first
    assert [job["--rw"] for job in (*fill, *jobs)] == ["write", "read", "write"]
    for job in (*fill, *jobs):
        assert job["--direct"] == "1"
        n = int(job.get("--numjobs", 1))
        assert int(job["--size"]) * n == 3 * disk.UNIT
        assert n == 1 or job["--offset_increment"] == job["--size"]
        assert int(job["--size"]) % disk.PIECE == 0
    assert ["--stonewall" in job for job in jobs] == [False, not way.at_once]


def test_what_takes_turns_adds_up_and_what_goes_at_once_takes_as_long_as_the_slower(fio, tmp_path):
    file = disk.DiskFile(tmp_path, disk.UNIT)
    ms = {(way.engine, way.at_once): file.steps(way, 1)[0]["total"] for way in disk.WAYS}
    assert ms[("io_uring", True)] == 100
    assert ms[("io_uring", False)] == pytest.approx(110)
    assert ms[("pvsync", True)] == 100 * disk.DEPTH
    assert ms[("pvsync", False)] == pytest.approx(110 * disk.DEPTH)


def test_times_are_in_proportion_to_the_bytes_that_count(fio, tmp_path):
    [step] = disk.DiskFile(tmp_path, disk.UNIT // 2).steps(disk.WAYS[0], 1)
    assert step["total"] == 50


def test_without_fio_the_message_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ContenderError, match="Debian: fio"):
        disk.DiskFile(tmp_path, 1)


def samples(**ms):
    found = nvme.Samples()
    for of_round in zip(*ms.values(), strict=True):
        found.add({name: [{"total": each}] for name, each in zip(ms, of_round, strict=True)})
    return found


def test_the_limit_is_the_best_way_of_all_rounds_or_the_update_where_that_is_slower():
    """The least of each round would be of no way, and lower than the disk's speed."""
    taken = samples(**{"a": [10.0, 20.0, 30.0], "b": [5.0, 21.0, 31.0], nvme.IN_MEMORY: [1.0, 50.0, 2.0]})
    assert nvme.limit(taken, ["a", "b"]) == ("a", [10.0, 50.0, 30.0])


def test_a_bucket_is_a_small_part_of_a_model_and_four_fit_in_the_memory_that_is_allowed():
    for numel in (1, 31, 10**6, 10**9, 10**12):
        bucket = nvme.bucket_numel(numel)
        assert 1 <= bucket <= max(numel / nvme.BUCKETS, 1)
        assert 4 * nvme.STATE_BYTES * bucket < nvme.MOST_HOST_BYTES


class Stand:
    """A contender whose steps take 100 ms for all states on disk, and 10 beside that."""

    opened: ClassVar[list] = []
    fails_at = None

    def __init__(self, numel, fields, counted=None):
        if len(Stand.opened) == Stand.fails_at:
            raise ContenderError("out of memory")
        Stand.opened.append(self)
        self.numel, self.open = numel, True
        in_memory = fields.get("nvme_host_bytes", nvme.STATE_BYTES * numel)
        self.share = 1 - in_memory / (nvme.STATE_BYTES * numel)
        self.narrow = "state_format" in fields
        self.peak_of_building = self.host_bytes = 4 * nvme.STATE_BYTES * fields["reduce_bucket_size"]

    def steps(self, n):
        ms = 10 + 100 * self.share * (0.4 if self.narrow else 1)
        return [{"total": ms, "read": 12 * self.share, "written": 12 * self.share}] * n

    def close(self):
        self.open = False


@pytest.fixture
def stands(monkeypatch):
    monkeypatch.setattr(Stand, "opened", [])
    monkeypatch.setattr(Stand, "fails_at", None)
    monkeypatch.setattr(nvme, "Contender", Stand)
    return Stand.opened


def run(path, *words):
    status = nvme.main(["--quick", "--numel=8M", f"--folder={path.parent}", f"--json={path}", *words])
    return status, json.loads(path.read_text().splitlines()[-1])


def test_ratios_are_of_the_states_on_disk(stands, fio, tmp_path):
    status, known = run(tmp_path / "results.jsonl", "--only", "disk", "shares")
    ratios = {each["name"].removeprefix("8 M, "): (each["p50"], each["target"]) for each in known["ratios"]}
    slower = "the slower of fio's best and the update in memory"
    assert status == 0
    assert {name: target for name, (_, target) in ratios.items()} == {
        f"{nvme.ON_DISK} / {slower}": 1.15,
        "host memory of states on disk / 1 GiB": 1.0,
        "host memory of states on disk: 8 M / 2 M parameters": 1.05,
        "half of the states in memory / none": 0.6,
        "8-bit states / fp32, on disk": 0.6,
    }
    size = round(nvme.STATE_BYTES * 8e6 / disk.UNIT) * disk.UNIT
    fastest = 100 * nvme.STATE_BYTES * 8e6 / size
    assert ratios[f"{nvme.ON_DISK} / {slower}"][0] == pytest.approx(110 / fastest)
    assert ratios["host memory of states on disk: 8 M / 2 M parameters"][0] == 1.0
    assert ratios["half of the states in memory / none"][0] == pytest.approx(60 / 110)
    assert ratios["8-bit states / fp32, on disk"][0] == pytest.approx(50 / 110)
    shares = {row["share"]: row["p50"] for row in known["rows"] if row["metric"] == "update" and "share" in row}
    assert shares == pytest.approx({share: 10 + 100 * share for share in nvme.SHARES})
    assert not any(each.open for each in stands)
    assert not list(tmp_path.glob("tmp*"))


def test_without_fio_the_rest_is_measured(stands, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    status, known = run(tmp_path / "results.jsonl", "--only", "disk", "shares")
    assert status == 1
    assert [each["name"] for each in known["missing"]] == ["fio"]
    assert len(known["ratios"]) == 4


@pytest.mark.draws(1)
@pytest.mark.parametrize("fails_at", [1, 2, 5])
def test_after_an_error_nothing_is_left_behind(fails_at, stands, fio, tmp_path, monkeypatch):
    monkeypatch.setattr(Stand, "fails_at", fails_at)
    with pytest.raises(ContenderError):
        run(tmp_path / "results.jsonl", "--only", "disk", "shares")
    assert not any(each.open for each in stands)
    assert not list(tmp_path.glob("tmp*"))


def test_a_disk_that_is_too_small_is_refused_before_anything_is_measured(stands, tmp_path, capsys):
    with pytest.raises(SystemExit):
        nvme.main([f"--folder={tmp_path}", "--numel=1T"])
    assert "expected 24,001,073,741,824 for 1,000,000,000,000 parameters" in capsys.readouterr().err
    assert not stands


def test_deepspeeds_time_and_memory_are_divided_by_ours():
    def result(ms, peak):
        phases = {"forward": 1.0, "backward": ms, "step": ms, "total": 2 * ms + 1.0}
        return Result([Measurement([phases], [], 0.0, 0.0, 0.0, 0.0, peak)], 0, [])

    results = {nvme.OURS_ON_DISK: result(2.0, 100), nvme.DS_PIPELINED: result(7.0, 300)}
    assert [each["p50"] for each in nvme.of_peers(results, "9 M")] == [3.0, 3.5, 3.0]
    assert nvme.of_peers({nvme.OURS_ON_DISK: result(2.0, 1)}, "9 M") == []
