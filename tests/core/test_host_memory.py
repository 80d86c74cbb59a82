"""Host arrays: exact, aligned, given back; pinning through the driver; budgets."""

import gc
import mmap
import os
import subprocess
import threading
from dataclasses import replace

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core import HostMemoryError, HostMemoryWarning, kernel_info
from offload_core.memory import host_memory
from offload_core.memory.host_memory import HostMemory, StagingRing, available_bytes, format_bytes
from offload_core.memory.pinning import CUDA, Registered
from offload_core.memory.plan import MemoryPlan, PlanRow
from offload_core.support import processors, topology
from tests.support.strategies import law


def resident() -> int:
    return psutil.Process().memory_info().rss


@law(50)
@given(st.integers(0, 100_000), st.sampled_from(["u1", "f4"]), st.integers(1, 4))
def test_an_array_is_zeroed_aligned_and_accounted_exactly(numel, dtype, threads):
    memory = HostMemory(threads)
    array = memory.allocate("a", numel, np.dtype(dtype))
    assert array.size == numel
    assert not array.any()
    assert array.flags.writeable
    assert numel == 0 or array.ctypes.data % mmap.PAGESIZE == 0
    assert memory.n_bytes == array.nbytes
    assert memory.report() == ({"a": array.nbytes} if numel else {})


def test_memory_is_resident_to_the_page_and_given_back():
    size = 64 * 2**20 + 12345  # a power-of-two allocator would take twice as much
    gc.collect()
    before = resident()
    memory = HostMemory(2)
    array = memory.allocate("states", size, np.dtype(np.uint8))
    view = array[100:200]
    assert size <= resident() - before + 2**21
    assert resident() - before <= size + 4 * 2**20
    del array
    gc.collect()
    assert memory.n_bytes == size  # a view keeps it
    del view
    gc.collect()
    assert memory.n_bytes == 0
    assert resident() - before < 8 * 2**20


def test_a_refused_mapping_is_one_clear_error():
    with pytest.raises(HostMemoryError, match=r"states: the system refused 8192.0 TiB of host memory"):
        HostMemory(1).allocate("states", 2**53, np.dtype(np.uint8))


def test_staging_slots_are_lent_one_at_a_time_and_come_back_together():
    ring = StagingRing(HostMemory(1), slots=2, n_bytes=64, pinned=False)
    lease = ring.lease()
    a, b = lease.borrow(16, np.dtype(np.float32)), lease.borrow(8, np.dtype(np.uint16))
    assert (a.size, a.dtype, b.size, b.dtype) == (16, np.float32, 8, np.uint16)
    assert not np.shares_memory(a, b)
    with pytest.raises(IndexError):
        ring.lease().borrow(1, np.dtype(np.uint8))
    lease.release()
    lease.release()  # what is given back is given back once
    again = ring.lease().borrow(1, np.dtype(np.uint8)), ring.lease().borrow(1, np.dtype(np.uint8))
    assert not np.shares_memory(*again)
    with pytest.raises(IndexError):
        ring.lease().borrow(1, np.dtype(np.uint8))


FAKE_DRIVER = """
#include <stdio.h>
#include <stdlib.h>
static void note(const char *what, void *p, unsigned long n) {
    FILE *f = fopen(getenv("FAKE_DRIVER_LOG"), "a");
    fprintf(f, "%s %lu %lu\\n", what, (unsigned long)p, n);
    fclose(f);
}
int cuMemHostRegister_v2(void *p, unsigned long n, unsigned flags) {
    note("register", p, n);
    return getenv("FAKE_DRIVER_FAILS") ? 2 : flags != 1;
}
int cuMemHostUnregister(void *p) { note("unregister", p, 0); return 0; }
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A driver that notes what is registered; returns it, and a function that reads the notes."""
    source, library, log = tmp_path / "cuda.c", tmp_path / "libcuda.so.1", tmp_path / "log"
    source.write_text(FAKE_DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    monkeypatch.setenv("FAKE_DRIVER_LOG", str(log))
    notes = lambda: [line.split() for line in log.read_text().splitlines()] if log.exists() else []  # noqa: E731
    return replace(CUDA, library=str(library)), notes


def registered(driver):
    return Registered(driver.register, driver.unregister)


def test_pinned_memory_is_registered_at_its_exact_size_and_unregistered(driver):
    driver, notes = driver
    array = HostMemory(1, registered(driver)).allocate("staging", 1000, np.dtype(np.float32), pinned=True)
    address = str(array.ctypes.data)
    assert notes() == [["register", address, "4000"]]
    view = array[10:]
    del array
    gc.collect()
    assert len(notes()) == 1
    del view
    gc.collect()
    assert notes()[1:] == [["unregister", address, "0"]]


def test_memory_whose_registration_is_refused_is_pageable_with_one_warning(driver, monkeypatch):
    driver, notes = driver
    monkeypatch.setenv("FAKE_DRIVER_FAILS", "1")
    memory = HostMemory(1, registered(driver))
    told = r"staging: 3.9 KiB of .* could not be pinned \(cuMemHostRegister_v2 failed with CUDA error 2; .*ulimit -l"
    with pytest.warns(HostMemoryWarning, match=told) as warned:
        arrays = [memory.allocate("staging", 1000, np.dtype(np.float32), pinned=True) for _ in range(2)]
    assert len(warned) == 1
    assert memory.n_bytes == 8000
    del arrays
    gc.collect()
    assert memory.n_bytes == 0
    assert [what for what, *_ in notes()] == ["register"]


def test_pinning_without_a_driver_says_what_to_set():
    memory = HostMemory(1, registered(replace(CUDA, library="libcuda-that-is-not-there.so")))
    with pytest.warns(HostMemoryWarning, match=r"CUDA driver library cannot be loaded.*pin_memory=False"):
        memory.allocate("staging", 1000, np.dtype(np.float32), pinned=True)


def test_memory_of_a_device_that_needs_no_pinning_is_registered_nowhere():
    assert not HostMemory(1).allocate("staging", 1000, np.dtype(np.float32), pinned=True).any()


def test_a_plan_names_what_needs_how_much_and_what_shrinks_it():
    plan = MemoryPlan(
        (PlanRow("exp_avg", "host", 4000, "more ranks"), PlanRow("parameters", "device", 2000, "-")), 1000
    )
    plan.check(4000)
    with pytest.raises(HostMemoryError) as caught:
        plan.check(3999)
    for part in (
        "3.9 KiB of host memory for 1,000 parameters",
        "nothing was allocated",
        "exp_avg",
        "4.00",
        "more ranks",
    ):
        assert part in str(caught.value)


def test_the_control_groups_limit_is_the_least_that_bounds_anything(monkeypatch):
    total = psutil.virtual_memory().total
    for groups, limit in (([], None), ([(2 * total, 5)], None), ([(2**40, 5), (2**20, 5), (2**21, 5)], 2**20)):
        monkeypatch.setattr(host_memory, "_cgroups", lambda groups=groups: groups)
        assert host_memory.control_group_limit() == limit


def test_available_memory_is_no_more_than_the_system_has():
    assert 0 < available_bytes() <= psutil.virtual_memory().total


def test_a_control_groups_headroom_counts_the_cache_it_can_drop_and_its_parents(tmp_path):
    def group(path, **files):
        folder = tmp_path / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text)

    group("a", memory__max="1000", memory__current="900", memory__stat="anon 1\ninactive_file 300\n")
    group("a/b", memory__max="max", memory__current="5", memory__stat="")
    group("a/b/c", memory__max="700", memory__current="100", memory__stat="inactive_file 0")
    limits = {"memory__limit_in_bytes": "50", "memory__usage_in_bytes": "20", "memory__stat": "total_inactive_file 7"}
    group("memory/v1", **limits)
    membership = tmp_path / "cgroup"
    membership.write_text("0::/a/b/c\n")
    assert sorted(host_memory._cgroup_headrooms(tmp_path, membership)) == [400, 600]
    membership.write_text("3:memory:/v1\n2:cpu:/x\n")
    assert host_memory._cgroup_headrooms(tmp_path, membership) == [37]
    assert host_memory._cgroup_headrooms(tmp_path, tmp_path / "none") == []


@pytest.mark.parametrize(("n", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (2**40, "1.0 TiB")])
def test_bytes_are_printed_in_binary_units(n, text):
    assert format_bytes(n) == text


def test_threads_follow_affinity_and_local_ranks_not_the_launchers_omp_setting(monkeypatch, tmp_path):
    allowed = os.sched_getaffinity(0)
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cores = len(topology.Topology.read().cores(allowed))
    assert processors.default_threads() == min(cores, processors.available_cpus()) <= len(allowed)
    seen = []

    def on_one_processor():  # affinity is a thread's own
        os.sched_setaffinity(0, {min(allowed)})
        seen.append(processors.available_cpus())

    thread = threading.Thread(target=on_one_processor)
    thread.start()
    thread.join()
    assert seen == [1]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.setattr(processors, "_quota", lambda: None)
    monkeypatch.setattr(topology, "SYSFS", tmp_path)
    assert processors.default_threads() == 16
    for ranks, threads in (("4", 4), ("5", 3), ("99", 1), ("nonsense", 16), ("0", 16)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert processors.default_threads() == threads


def test_kernel_info_reports_what_runs():
    info = kernel_info()
    assert info.instruction_set in info.supported
    assert "scalar" in info.supported
    assert info.num_threads == processors.default_threads()
