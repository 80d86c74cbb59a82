"""Host arrays: exact, aligned, given back; pinning through the driver; budgets."""

import ctypes
import gc
import mmap
import os
import subprocess
import sys
import threading
from _thread import start_new_thread
from functools import partial

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core import ConfigError, HostMemoryError, HostMemoryWarning, OffloadConfig, kernel_info
from offload_core.memory import host_memory, pinning
from offload_core.memory.host_memory import HostMemory, Lease, StagingRing, available_bytes, format_bytes
from offload_core.memory.pinning import Allocated, Cuda, Hip, Registered, ways_to_pin
from offload_core.memory.plan import MemoryPlan, PlanRow
from offload_core.native import kernels
from offload_core.support import processors, topology
from offload_core.support.threads import Task
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
    lease = Lease(ring)
    a, b = lease.borrow(16, np.dtype(np.float32)), lease.borrow(8, np.dtype(np.uint16))
    assert (a.size, a.dtype, b.size, b.dtype) == (16, np.float32, 8, np.uint16)
    assert not np.shares_memory(a, b)
    with pytest.raises(IndexError):
        Lease(ring).borrow(1, np.dtype(np.uint8))
    lease.release()
    lease.release()  # what is given back is given back once
    again = Lease(ring).borrow(1, np.dtype(np.uint8)), Lease(ring).borrow(1, np.dtype(np.uint8))
    assert not np.shares_memory(*again)
    with pytest.raises(IndexError):
        Lease(ring).borrow(1, np.dtype(np.uint8))


FAKE_DRIVER = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
enum { INVALID_VALUE = 1, OUT_OF_MEMORY, NOT_INITIALIZED, INVALID_DEVICE = 101, INVALID_CONTEXT = 201 };
static __thread void *stack[8];
static __thread int depth;
static int retained[2], contexts[2];
static int noted(int code, const char *what, void *p, unsigned long n) {
    FILE *f = fopen(getenv("FAKE_DRIVER_LOG"), "a");
    fprintf(f, "%s %lu %lu\\n", what, (unsigned long)p, n);
    fclose(f);
    const char *fails = getenv("FAKE_DRIVER_FAILS"), *after = getenv("FAKE_DRIVER_FAILS_AFTER");
    static int tried;
    return fails && strstr(fails, what) == fails && tried++ >= (after ? atoi(after) : 0) ? OUT_OF_MEMORY : code;
}
static int allocated(void **p, unsigned long n, int code) {
    if (!(code = noted(code, "allocate", 0, n)))
        memset(*p = malloc(n), 7, n);
    return code;
}
static int freed(void *p, int code) {
    code = noted(code, "free", p, 0);
    free(p);
    return code;
}
static int number_of(void *context) { return (int *)context - contexts; }
int cuDeviceGet(int *device, int number) {
    *device = number;
    return number < 2 ? 0 : INVALID_DEVICE;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = &contexts[device];
    retained[device]++;
    return noted(0, "retain", 0, device);
}
int cuDevicePrimaryCtxRelease_v2(int device) {
    return noted(--retained[device] < 0 ? INVALID_CONTEXT : 0, "release", 0, device);
}
int cuCtxPushCurrent_v2(void *context) {
    int code = noted(0, "push", 0, number_of(context));
    if (!code)
        stack[depth++] = context;
    return code;
}
int cuCtxPopCurrent_v2(void **context) {
    if (!depth)
        return INVALID_CONTEXT;
    *context = stack[--depth];
    return noted(0, "pop", 0, number_of(*context));
}
static int in_context() { return depth && retained[number_of(stack[depth - 1])] > 0; }
int cuMemHostRegister_v2(void *p, unsigned long n, unsigned flags) {
    return noted(!in_context() ? INVALID_CONTEXT : flags != 1, "register", p, n);
}
int cuMemHostAlloc(void **p, unsigned long n, unsigned flags) {
    return allocated(p, n, !in_context() ? INVALID_CONTEXT : flags != 1);
}
int cuMemFreeHost(void *p) { return freed(p, in_context() ? 0 : INVALID_CONTEXT); }
int hipHostMalloc(void **p, unsigned long n, unsigned flags) { return allocated(p, n, flags != 1); }
int hipHostFree(void *p) { return freed(p, 0); }
int cuMemHostUnregister(void *p) { return noted(in_context() ? 0 : INVALID_CONTEXT, "unregister", p, 0); }
int hipHostRegister(void *p, unsigned long n, unsigned flags) { return noted(flags != 1, "register", p, n); }
int hipHostUnregister(void *p) { return noted(0, "unregister", p, 0); }
"""
RELEASED = ["release", "0", "1"]


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A driver that notes what is asked of it and does nothing without a context, and what reads the notes."""
    from tests.support import c_build  # skips these tests where there is no compiler

    source, library, log = tmp_path / "cuda.c", tmp_path / "libcuda.so.1", tmp_path / "log"
    source.write_text(FAKE_DRIVER)
    c_build.run("gcc", "-shared", "-fPIC", source, "-o", library)
    monkeypatch.setenv("FAKE_DRIVER_LOG", str(log))
    notes = lambda: [line.split() for line in log.read_text().splitlines()] if log.exists() else []  # noqa: E731
    return str(library), notes


def in_a_new_thread(act):
    task = Task(act)
    start_new_thread(task.run, ())
    return task.result()


@pytest.mark.parametrize("vendor", ["CUDA", "HIP"])
def test_pinned_memory_is_registered_at_its_exact_size_and_unregistered(library, vendor):
    library, notes = library
    driver = Cuda(1, library) if vendor == "CUDA" else Hip(library)
    array = HostMemory(1, [Registered(driver.register)]).allocate("staging", 1000, np.dtype(np.float32), pinned=True)
    address = str(array.ctypes.data)
    asked = [note for note in notes() if note[1] != "0"]
    assert asked == [["register", address, "4000"]]
    view, before = array[10:], len(notes())
    del array
    gc.collect()
    assert len(notes()) == before
    del view
    gc.collect()
    assert [note for note in notes()[before:] if note[1] != "0"] == [["unregister", address, "0"]]


def test_memory_is_registered_in_the_devices_context_from_a_thread_that_has_none(library):
    """As JAX's threads; and it is given back from another such thread."""
    library, notes = library
    memory = HostMemory(1, [Registered(Cuda(1, library).register)])
    held = [in_a_new_thread(lambda: memory.allocate("staging", 1000, np.dtype(np.float32), pinned=True))]
    address = str(held[0].ctypes.data)
    registered = [["retain", "0", "1"], ["push", "0", "1"], ["register", address, "4000"], ["pop", "0", "1"]]
    assert notes() == registered
    in_a_new_thread(held.clear)
    gc.collect()
    unregistered = [["push", "0", "1"], ["unregister", address, "0"], ["pop", "0", "1"], RELEASED]
    assert notes()[len(registered) :] == unregistered


def test_a_context_that_was_current_is_so_again(library):
    library, notes = library
    driver, theirs, popped = ctypes.CDLL(library), ctypes.c_void_p(), ctypes.c_void_p()
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(theirs), 0)
    driver.cuCtxPushCurrent_v2(theirs)
    array = HostMemory(1, [Registered(Cuda(1, library).register)]).allocate("s", 1000, np.dtype(np.uint8), pinned=True)
    assert ["push", "0", "1"] in notes()
    assert driver.cuCtxPopCurrent_v2(ctypes.byref(popped)) == 0
    assert popped.value == theirs.value
    driver.cuCtxPushCurrent_v2(theirs)
    del array
    gc.collect()
    assert driver.cuCtxPopCurrent_v2(ctypes.byref(popped)) == 0
    assert popped.value == theirs.value
    assert notes().count(RELEASED) == 1


@pytest.mark.parametrize(
    ("fails", "function", "asked"),
    [
        ("retain", "cuDevicePrimaryCtxRetain", ["retain"]),
        ("push", "cuCtxPushCurrent_v2", ["retain", "push", "release"]),
        ("register", "cuMemHostRegister_v2", ["retain", "push", "register", "pop", "release"]),
        ("allocate", "cuMemHostAlloc", ["retain", "push", "allocate", "pop", "release"]),
    ],
)
def test_memory_that_the_only_way_refuses_is_pageable_with_one_warning(library, fails, function, asked, monkeypatch):
    library, notes = library
    monkeypatch.setenv("FAKE_DRIVER_FAILS", fails)
    [way] = ways_to_pin(Cuda(0, library).ways, "allocate" if fails == "allocate" else "register")
    memory = HostMemory(1, [way])
    told = rf"staging: 3.9 KiB of .* could not be pinned \({function} failed with CUDA error 2; .*ulimit -l"
    with pytest.warns(HostMemoryWarning, match=told) as warned:
        arrays = [memory.allocate("staging", 1000, np.dtype(np.float32), pinned=True) for _ in range(2)]
    assert len(warned) == 1
    assert memory.n_bytes == 8000
    del arrays
    gc.collect()
    assert memory.n_bytes == 0
    assert [what for what, *_ in notes()] == asked


def test_a_driver_that_has_ended_before_the_memory_does_not_disturb_the_end(library, monkeypatch):
    library, notes = library
    for fails in ("push", "unregister", "release"):
        array = HostMemory(1, [Registered(Cuda(0, library).register)]).allocate("s", 10, np.dtype("u1"), pinned=True)
        with monkeypatch.context() as patch:
            patch.setenv("FAKE_DRIVER_FAILS", fails)
            del array  # pytest takes an error in a finalizer for a failure
            gc.collect()
        assert notes()[-1][0] in ("push", "pop", "release")


def what_was_asked(notes):
    return [what for what, *_ in notes() if what in ("register", "unregister", "allocate", "free")]


@pytest.mark.parametrize("vendor", ["CUDA", "HIP"])
def test_memory_that_cannot_be_registered_is_allocated_by_the_driver_and_freed_by_it_once(library, vendor, monkeypatch):
    library, notes = library
    monkeypatch.setenv("FAKE_DRIVER_FAILS", "register")
    driver = Cuda(0, library) if vendor == "CUDA" else Hip(library)
    memory = HostMemory(1, driver.ways)
    told = "3.9 KiB of .* could not be registered with the device's driver .* it is allocated by the device's driver"
    with pytest.warns(HostMemoryWarning, match=told) as warned:
        arrays = [memory.allocate("staging", 1000, np.dtype(np.float32), pinned=True) for _ in range(2)]
    assert len(warned) == 1
    assert memory.pinned() == {"allocated by the device's driver": 8000}
    assert not any(array.any() for array in arrays)  # this driver's memory is not zeroed
    places, view = [str(array.ctypes.data) for array in arrays], arrays[1][5:]
    arrays.clear()
    gc.collect()
    assert what_was_asked(notes) == ["register", "allocate", "allocate", "free"]
    del view
    gc.collect()
    assert sorted(place for what, place, _ in notes() if what == "free") == sorted(places)
    assert what_was_asked(notes) == ["register", "allocate", "allocate", "free", "free"]
    retained = sum((what == "retain") - (what == "release") for what, *_ in notes())
    assert (memory.n_bytes, retained) == (0, 0)


HELD_TO_THE_END = """
import ctypes
import numpy as np
from offload_core.memory.host_memory import HostMemory
from offload_core.memory.pinning import Allocated

def take(n_bytes):
    there = (ctypes.c_uint8 * n_bytes)()
    return ctypes.addressof(there), lambda: print("freed", there[0])

memory = HostMemory(1, [Allocated(take)])
held, dead = (memory.allocate("states", 1000, np.dtype("u1"), pinned=True) for _ in range(2))
held[0], dead[0] = 1, 2
del dead
"""


def test_memory_of_the_driver_that_lives_to_the_end_of_the_process_is_not_freed_before_its_last_reader():
    """A function of ``atexit`` may read it, or a thread."""
    said = subprocess.run([sys.executable, "-c", HELD_TO_THE_END], capture_output=True, text=True, check=True)
    assert said.stdout == "freed 2\n"


def test_two_threads_whose_memory_is_refused_are_told_once():
    first, given_up = threading.Event(), threading.Event()

    def refuse(address, n_bytes):
        if n_bytes == 2:
            first.set()
            assert given_up.wait(30)
        raise HostMemoryError("no")

    memory = HostMemory(1, [Registered(refuse)])
    allocate = partial(memory.allocate, "staging", dtype=np.dtype("u1"), pinned=True)

    def meet():
        thread = threading.Thread(target=allocate, args=(2,))
        thread.start()
        assert first.wait(30)
        allocate(numel=1)
        given_up.set()
        thread.join()

    with pytest.warns(HostMemoryWarning, match="could not be pinned") as warned:
        meet()
    assert len(warned) == 1


def test_blocks_that_were_registered_before_a_refusal_are_unregistered_and_all_are_allocated(library, monkeypatch):
    library, notes = library
    monkeypatch.setenv("FAKE_DRIVER_FAILS", "register")
    monkeypatch.setenv("FAKE_DRIVER_FAILS_AFTER", "2")
    memory = HostMemory(1, Cuda(0, library).ways)
    with pytest.warns(HostMemoryWarning, match="could not be registered") as warned:
        reserved = memory.reserve("staging", 3 * [4096], pinned=True)
    assert len(warned) == 1
    gc.collect()
    half_way = [*3 * ["register"], *3 * ["allocate"]]
    assert sorted(what_was_asked(notes)) == sorted([*half_way, "unregister", "unregister"])
    assert memory.pinned() == {"allocated by the device's driver": 3 * 4096}
    lent = [reserved.borrow(1024, np.dtype(np.float32)) for _ in range(3)]
    assert what_was_asked(notes).count("allocate") == 3
    del lent
    del reserved
    gc.collect()
    asked = what_was_asked(notes)
    assert [asked.count(what) for what in ("unregister", "free")] == [2, 3]
    assert memory.pinned() == {}


def test_a_context_that_cannot_be_left_has_memory_unregistered_at_once(library, monkeypatch):
    library, notes = library
    monkeypatch.setenv("FAKE_DRIVER_FAILS", "pop")
    memory = HostMemory(1, [Registered(Cuda(0, library).register)])
    with pytest.warns(HostMemoryWarning, match="cuCtxPopCurrent_v2 failed"):
        memory.allocate("staging", 1000, np.dtype(np.float32), pinned=True)
    asked = [what for what, *_ in notes()]
    assert asked == ["retain", "push", "register", "pop", "push", "unregister", "pop", "release"]


def test_memory_that_the_driver_neither_registers_nor_allocates_is_pageable_with_a_warning_for_each(
    library, monkeypatch
):
    library, notes = library
    monkeypatch.setenv("FAKE_DRIVER_FAILS", "push")
    monkeypatch.setattr(host_memory, "_locked_memory_limit", lambda: 65536)
    monkeypatch.setattr(host_memory, "control_group_limit", lambda: 2**30)
    memory = HostMemory(1, Cuda(0, library).ways)
    with pytest.warns(HostMemoryWarning) as warned:
        arrays = [memory.allocate("staging", 1000, np.dtype(np.float32), pinned=True) for _ in range(2)]
    first, second = (str(each.message) for each in warned)
    assert "could not be registered with the device's driver" in first
    for part in ("could not be pinned (", "lock 64.0 KiB", "memlock=-1", "grants 1.0 GiB", "pin_memory=False"):
        assert part in second
    assert memory.pinned() == {"pageable": 8000}
    assert all(array.ctypes.data % mmap.PAGESIZE == 0 for array in arrays)
    assert what_was_asked(notes) == []


@pytest.mark.parametrize(
    ("pin_memory", "in_windows", "expected"),
    [
        (True, False, ["register", "allocate"]),
        (True, True, ["allocate"]),
        ("register", False, ["register"]),
        ("register", True, ["register"]),  # as it was asked for: no kernel of this project reads such memory
        ("allocate", False, ["allocate"]),
        (False, False, []),
    ],
)
def test_the_setting_and_wsl2_choose_the_ways_to_pin(pin_memory, in_windows, expected, monkeypatch):
    monkeypatch.setattr(pinning, "in_wsl2", lambda: in_windows)
    driver = Cuda()
    assert [way.name for way in ways_to_pin(driver.ways, pin_memory)] == expected
    assert [*ways_to_pin((), pin_memory)] == []
    assert driver.ways == driver.ways  # engines share memory that is pinned in equal ways


def test_a_way_that_the_device_lacks_is_refused():
    [_, allocated] = Cuda().ways
    with pytest.raises(ConfigError, match=r"can only be allocated by .*; expected pin_memory=True, or 'allocate'"):
        ways_to_pin([allocated], "register")
    for wrong in ("registered", 1, None, ["register"]):
        with pytest.raises(ConfigError, match=r"pin_memory: got .*, expected True, False, 'register' or 'allocate'"):
            OffloadConfig(pin_memory=wrong)


def test_wsl2_is_known_by_its_kernel_or_its_device(tmp_path):
    version, device = tmp_path / "version", tmp_path / "dxg"
    assert not pinning.in_wsl2(version, device)
    version.write_text("Linux version 6.8.0-45-generic (buildd@lcy02) #45-Ubuntu SMP\n")
    assert not pinning.in_wsl2(version, device)
    version.write_text("Linux version 5.15.167.4-microsoft-standard-WSL2 (root@f9c) #1 SMP\n")
    assert pinning.in_wsl2(version, device)
    version.write_text("Linux version 6.8.0-45-generic\n")
    device.touch()
    assert pinning.in_wsl2(version, device)


class RoundsUp(Allocated):
    def taken(self, n_bytes):
        return 1 << (n_bytes - 1).bit_length()


def test_bytes_that_an_allocator_rounds_up_are_counted_apart():
    memory = HostMemory(1, [RoundsUp(lambda n: (kernels.address(held[-1]), lambda: None))])
    held = [np.ones(2**13, np.uint8)]
    array = memory.allocate("staging", 5000, np.dtype(np.uint8), pinned=True)
    assert not array.any()
    assert memory.report() == {"staging": 5000, host_memory.ROUNDING: 8192 - 5000}
    assert (memory.n_bytes, memory.pinned()) == (8192, {"allocated by the device's driver": 5000})


@pytest.mark.parametrize("driver", [Cuda(0, "libcuda-that-is-not-there.so"), Hip("libcuda-that-is-not-there.so")])
def test_pinning_without_a_driver_says_what_to_set(driver):
    memory = HostMemory(1, [Registered(driver.register)])
    with pytest.warns(HostMemoryWarning, match=rf"{driver.vendor} driver library cannot be loaded.*pin_memory=False"):
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
