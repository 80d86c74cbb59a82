"""Processors that a rank's kernels run on: on fake machines the choice, on this one the threads' own affinity."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from offload_core.commands import info, machine
from offload_core.memory import numa
from offload_core.memory.pinning import Cuda
from offload_core.native import kernels
from offload_core.support import launchers, processors, topology
from offload_core.support.processors import choose, nodes_of_ranks, share_near
from offload_core.support.topology import Topology, cache_bytes, node_of_device, numbers, pci_devices, ranges
from tests.support import sysfs
from tests.support.launched import BATCH, OPEN_MPI, SLURM, TORCHRUN
from tests.support.processes import ROOT, environment_of
from tests.support.strategies import law
from tests.support.sysfs import DGX, TWO_NODES, Gpu, eight_nodes, one_node, two_nodes, write

BOTH = frozenset(range(32))
"""The processors of ``two_nodes``."""


def on(*nodes):
    return [frozenset({node}) for node in nodes]


def test_lists_of_processors_are_read_and_written_as_linux_writes_them():
    assert numbers("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert ranges(numbers("0-3,8,10-11")) == "0-3,8,10-11"
    for nothing in ("", "\n", "none", "0-", "0-x"):
        assert numbers(nothing) == frozenset()
    assert ranges([]) == ""


# --- what sysfs shows --------------------------------------------------------------------------------------------


def test_a_small_machine_has_one_node_and_a_core_for_each_processor(tmp_path):
    found = Topology.read(one_node(tmp_path))
    assert found.nodes == {0: {0, 1}}
    assert found.cores({0, 1}) == [0, 1]
    assert pci_devices(tmp_path) == []


def test_siblings_count_once_and_the_one_that_may_be_used_stands_for_the_core(tmp_path):
    found = Topology.read(two_nodes(tmp_path))
    assert found.cores(BOTH) == list(range(16))
    assert found.cores({0, 16, 17, 2, 31}) == [0, 2, 17, 31]
    assert found.cores({24, 1, 9}) == [1, 9, 24]  # node 1 after node 0


def test_the_older_name_of_siblings_is_read_and_cores_may_differ_in_their_number(tmp_path):
    """As in processors with fast cores, which have two threads, and slow ones, which have one."""
    root = sysfs.sysfs(tmp_path, {0: range(6)}, [[0, 1], [2, 3], [4], [5]], siblings="thread_siblings_list")
    assert Topology.read(root).cores(range(6)) == [0, 2, 4, 5]


def test_nodes_of_memory_alone_and_processors_that_are_offline_are_in_nobodys_way(tmp_path):
    root = sysfs.sysfs(tmp_path, {0: [0, 1], 1: [2], 4: []}, [[0], [1], [2]], [Gpu("0000:01:00.0", 4)])
    (root / "devices/system/cpu/cpu3").mkdir()  # offline: without a topology
    found = Topology.read(root)
    assert found.nodes[4] == frozenset()
    share = choose(found, frozenset({0, 1, 2}), on(4), 0, 1)
    assert (share.cpus, share.nodes, share.threads) == ((0, 1, 2), (), 3)
    assert "node 4" in share.why


@pytest.mark.parametrize("missing", ["devices/system/node", "devices/system/cpu", "bus", ""])
def test_what_sysfs_does_not_show_is_unknown(missing, tmp_path):
    root = two_nodes(tmp_path / "whole")
    (root / missing).rename(tmp_path / "away")
    found, node = Topology.read(root), node_of_device(TWO_NODES[2].address, root)
    assert bool(found.nodes) == (missing not in ("devices/system/node", ""))
    assert node == (1 if missing == "devices/system/cpu" else None)
    share = choose(found, BOTH, [] if node is None else on(node), 0, 1)
    cores = len(found.cores(BOTH))
    assert cores == (32 if missing in ("devices/system/cpu", "") else 16)
    assert share.threads == (cores // 2 if node == 1 else cores)


@pytest.mark.parametrize("text", ["-1", "", "7", "many"])
def test_a_device_that_is_on_no_node_is_near_none(text, tmp_path):
    root = two_nodes(tmp_path, [Gpu("0000:3b:00.0", text)])
    assert node_of_device("0000:3b:00.0", root) is None
    assert node_of_device("0000:ff:00.0", root) is None


def test_devices_have_a_node_and_a_link(tmp_path):
    gpus = [*TWO_NODES, Gpu("0000:e0:00.0", -1, "Unknown", "63"), Gpu("0000:e1:00.0", 1, "2.5 GT/s PCIe", "8")]
    root = two_nodes(tmp_path, gpus)
    write(root / "bus/pci/devices/0000:00:00.0", {"class": "0x060000", "vendor": "0x8086", "numa_node": 0})
    assert [(device.address, device.kind, device.node, device.link) for device in pci_devices(root)] == [
        *((gpu.address, "10de:20b0", gpu.node, "PCIe 4 x16") for gpu in TWO_NODES),
        ("0000:e0:00.0", "10de:20b0", None, None),
        ("0000:e1:00.0", "10de:20b0", 1, "PCIe 1 x8"),
    ]


def test_caches_of_the_last_level_count_once_for_each_group_that_shares_one(tmp_path):
    assert cache_bytes(one_node(tmp_path)) == 0
    for cpu in range(4):
        shared = "0-1" if cpu < 2 else "2-3"
        for level, size, cpus in [(1, "48K", cpu), (2, "2048K", cpu), (3, "32768K", shared)]:
            folder = f"devices/system/cpu/cpu{cpu}/cache/index{level}"
            said = {"level": level, "size": size, "shared_cpu_list": cpus}
            write(tmp_path, {f"{folder}/{name}": text for name, text in said.items()})
    assert cache_bytes(tmp_path) == 2 * 32 * 2**20
    write(tmp_path, {"devices/system/cpu/cpu3/cache/index3/size": "unknown"})
    assert cache_bytes(tmp_path) == 2 * 32 * 2**20


# --- the choice --------------------------------------------------------------------------------------------------


def test_one_process_takes_the_cores_of_its_devices_node(tmp_path):
    found = Topology.read(two_nodes(tmp_path))
    share = choose(found, BOTH, on(1), 0, 1)
    assert (share.cpus, share.threads, share.nodes) == (tuple(range(8, 16)), 8, (1,))
    share = choose(found, BOTH, [frozenset({0, 1})], 0, 1)
    assert (share.threads, share.nodes) == (16, (0, 1))
    share = choose(found, BOTH, [], 0, 1)
    assert (share.cpus, share.nodes) == (tuple(range(16)), ())


def test_ranks_split_their_node_in_the_order_of_ranks(tmp_path):
    found = Topology.read(two_nodes(tmp_path))
    cut = [choose(found, BOTH, on(0, 1, 1, 0), rank, 4).cpus for rank in range(4)]
    assert cut == [(0, 1, 2, 3), (8, 9, 10, 11), (12, 13, 14, 15), (4, 5, 6, 7)]
    alone = [choose(found, BOTH, on(0, 0, 0, 1), rank, 4).cpus for rank in range(4)]
    assert alone == [(0, 1), (2, 3), (5, 6), tuple(range(8, 16))]


def test_ranks_of_a_dgx_have_half_the_cores_of_their_node(tmp_path):
    found = Topology.read(eight_nodes(tmp_path))
    nodes = on(*(node_of_device(gpu.address, tmp_path) for gpu in DGX))
    for rank, gpu in enumerate(DGX):
        first = 16 * gpu.node + 8 * (rank % 2)
        share = choose(found, frozenset(range(256)), nodes, rank, 8)
        assert share.cpus == tuple(range(first, first + 8))
        assert share.nodes == (gpu.node,)


def test_ranks_without_devices_split_all_cores_node_after_node(tmp_path):
    found = Topology.read(eight_nodes(tmp_path))
    cut = [choose(found, frozenset(range(256)), [], rank, 16).cpus for rank in range(16)]
    assert cut == [tuple(range(8 * rank, 8 * rank + 8)) for rank in range(16)]


def test_more_ranks_than_cores_share_them(tmp_path):
    found = Topology.read(two_nodes(tmp_path))
    cut = [choose(found, frozenset({3, 19, 12}), on(*[0] * 5), rank, 5) for rank in range(5)]
    assert [(share.cpus, share.threads) for share in cut] == [((3,), 1)] * 5
    assert "shared by 5 ranks" in cut[0].why


def test_processors_that_its_launcher_bound_a_rank_to_are_used_as_they_are(tmp_path):
    found = Topology.read(two_nodes(tmp_path))
    share = choose(found, frozenset({2, 3, 18, 19, 9}), on(0, 1), 1, 2, own=True)
    assert (share.cpus, share.nodes, share.threads) == ((2, 3, 9), (), 3)


def test_a_mask_without_any_rank_devices_node_is_split_among_all(tmp_path):
    """A container on node 0, with devices of both nodes."""
    found, mask = Topology.read(two_nodes(tmp_path)), frozenset(range(8))
    cut = [choose(found, mask, on(0, 0, 1, 1), rank, 4).cpus for rank in range(4)]
    assert cut == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_masks_that_a_launcher_gave_to_the_ranks_of_each_node_are_split_among_these(tmp_path):
    """As torchrun --numa-binding=node and mpirun --bind-to numa do."""
    found = Topology.read(two_nodes(tmp_path))
    cut = [
        choose(found, found.nodes[node], on(0, 1, 0, 1), rank, 4, alike=False) for rank, node in enumerate([0, 1] * 2)
    ]
    assert [share.cpus for share in cut] == [(0, 1, 2, 3), (8, 9, 10, 11), (4, 5, 6, 7), (12, 13, 14, 15)]
    elsewhere = choose(found, found.nodes[0], on(0, 1, 0, 1), 3, 4, alike=False)
    assert elsewhere.cpus == (6, 7)  # bound far from its device: to cores that others have, too, for all it knows


def test_a_rank_without_a_number_may_run_where_all_do(tmp_path):
    share = choose(Topology.read(two_nodes(tmp_path)), BOTH, on(1, 1), None, 2)
    assert (share.cpus, share.threads) == (tuple(range(8, 16)), 4)


def test_a_bound_on_threads_leaves_the_processors(tmp_path):
    share = choose(Topology.read(two_nodes(tmp_path)), BOTH, on(1), 0, 1, limit=3)
    assert (len(share.cpus), share.threads) == (8, 3)
    assert "allows 3 of 8" in share.why


@st.composite
def machines(draw):
    """Nodes, cores of one to four processors whose numbers are mixed, a mask, and ranks with and without devices."""
    per_core = draw(st.lists(st.integers(1, 4), min_size=1, max_size=24))
    cpus = draw(st.permutations(range(sum(per_core))))
    cores, nodes = [], {}
    n_nodes = draw(st.integers(1, 8))
    for i, n in enumerate(per_core):
        cores.append(frozenset(cpus[:n]))
        cpus = cpus[n:]
        nodes.setdefault(draw(st.integers(0, n_nodes - 1)) if i else 0, set()).update(cores[-1])
    found = Topology(dict(sorted(nodes.items())), {cpu: core for core in cores for cpu in core})
    mask = draw(st.sets(st.integers(0, sum(per_core) - 1), min_size=1))
    ranks = draw(st.integers(1, 16))
    near_to = draw(
        st.one_of(st.just([]), st.lists(st.integers(0, 8), min_size=ranks, max_size=ranks).map(lambda x: on(*x)))
    )
    return found, frozenset(mask), near_to, ranks


@law(300)
@given(machines())
@example((Topology({}, {}), frozenset({7}), [], 16))
def test_shares_lie_in_the_mask_and_no_core_is_taken_twice(drawn):
    found, mask, near_to, ranks = drawn
    shares = [choose(found, mask, near_to, rank, ranks) for rank in range(ranks)]
    for share in shares:
        assert 1 <= share.threads == len(share.cpus) == len(set(share.cpus))
        assert mask >= set(share.cpus)
        assert len({found.siblings.get(cpu, frozenset({cpu})) for cpu in share.cpus}) == len(share.cpus)
        assert {found.node_of(cpu) for cpu in share.cpus} <= set(share.nodes) or not share.nodes
    groups = {}
    for share in shares:
        groups.setdefault(share.nodes, []).append(share)
    assert len(groups) == 1 or () not in groups  # ranks of a machine choose alike
    for nodes, sharing in groups.items():
        room = [cpu for cpu in found.cores(mask) if not nodes or found.node_of(cpu) in nodes]
        taken = [cpu for share in sharing for cpu in share.cpus]
        if len(room) >= len(sharing):
            assert len(taken) == len(set(taken))
            assert len(room) - len(taken) < len(sharing)  # no core is left over that all could have had
        else:
            assert all(share.threads == 1 for share in sharing)


# --- what a process knows ----------------------------------------------------------------------------------------


def test_a_rank_that_sees_all_devices_knows_the_nodes_of_all_ranks():
    node_of = {0: 0, 1: 0, 2: 1, 3: 1}.get
    assert nodes_of_ranks({2}, node_of, 2, 4) == on(0, 0, 1, 1)
    assert nodes_of_ranks({2}, node_of, 2, 3) == on(0, 0, 1)


@pytest.mark.parametrize(
    ("ordinals", "rank", "ranks", "nodes"),
    [
        ({0}, 3, 4, on(0, 0, 0, 0)),  # it sees its own device alone
        ({2}, 2, 8, on(*[1] * 8)),  # more ranks than devices
        ({0}, None, 2, on(0, 0)),
        ({1, 2}, 0, 1, [frozenset({0, 1})]),  # one process with several devices
        ({1, 2}, 1, 2, [frozenset({0, 1})] * 2),
        (set(), 0, 2, []),
        ({9}, 0, 2, []),
        ({0, 9}, 0, 2, []),
    ],
)
def test_a_rank_that_does_not_know_the_others_takes_them_to_be_where_it_is(ordinals, rank, ranks, nodes):
    assert nodes_of_ranks(ordinals, {0: 0, 1: 0, 2: 1, 3: 1}.get, rank, ranks) == nodes


@pytest.fixture
def alone(monkeypatch):
    """No launcher, no quota, and the processors of ``two_nodes``; sets variables and the mask."""
    for name in {**TORCHRUN, **OPEN_MPI, **SLURM, **BATCH}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(processors, "_quota", lambda: None)

    def become(mask=BOTH, **environment):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(mask), raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    become()
    return become


def proc(root, mask, *, cgroup="0::/job\n"):
    """A ``/proc`` in which the parent of this process may use the processors of ``mask``."""
    write(root / str(os.getppid()), {"status": f"Name:\tagent\nCpus_allowed_list:\t{ranges(mask)}", "cgroup": cgroup})
    write(root / "self", {"cgroup": "0::/job\n"})
    return root


RANK_1_OF_2 = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_a_rank_with_the_mask_of_its_launcher_splits_it_and_one_that_was_bound_does_not(alone, tmp_path):
    root = two_nodes(tmp_path / "sys")
    alone(**RANK_1_OF_2)
    for parent in (proc(tmp_path / "same", BOTH), tmp_path / "none"):
        share = share_near([], root, parent)
        assert (share.cpus, share.threads) == (tuple(range(8, 16)), 8)
    alone({0, 1, 16, 17})
    share = share_near([], root, proc(tmp_path / "wider", BOTH))
    assert (share.cpus, share.threads) == ((0, 1), 2)
    assert "its launcher bound it to" in share.why
    share = share_near(on(0, 0), root, proc(tmp_path / "two", {0, 1, 2, 3, 16, 17}))
    assert (share.cpus, share.nodes) == ((1,), (0,))
    for name, parent in {
        "as narrow": proc(tmp_path / "as narrow", {0, 1, 16, 17}),
        "too few for two": proc(tmp_path / "too few", {0, 1, 2, 16, 17}),
        "elsewhere": proc(tmp_path / "elsewhere", {4, 5, 6, 7, 8, 9, 10, 11}),
        "another group": proc(tmp_path / "another", BOTH, cgroup="0::/daemons\n"),
    }.items():
        share = share_near([], root, parent)
        assert (share.cpus, share.threads) == ((1,), 1), name


def test_a_quota_is_of_all_ranks_together(alone, monkeypatch, tmp_path):
    root = two_nodes(tmp_path / "sys")
    monkeypatch.setattr(processors, "_quota", lambda: 6)
    assert share_near(on(1), root, tmp_path).threads == 6
    alone(**RANK_1_OF_2)
    share = share_near(on(0, 1), root, tmp_path)
    assert (share.cpus, share.threads) == (tuple(range(8, 16)), 3)
    alone(range(8))
    assert share_near([], root, proc(tmp_path / "wider", BOTH)).threads == 3


def test_a_slurm_task_takes_what_slurm_gave_it(alone, tmp_path):
    root = two_nodes(tmp_path / "sys")
    alone(**SLURM, SLURM_CPUS_ON_NODE="8", SLURM_CPUS_PER_TASK="4")
    rank = int(SLURM["SLURM_LOCALID"])
    share = share_near([], root, tmp_path)  # not bound
    assert (share.cpus, share.threads) == (tuple(range(8 * rank, 8 * rank + 8)), 4)
    alone({4, 5, 20, 21})
    share = share_near([], root, tmp_path)
    assert (share.cpus, share.threads) == ((4, 5), 2)


def test_a_small_machine_is_as_it_was(alone, tmp_path):
    alone({0, 1})
    share = share_near([], one_node(tmp_path / "sys"), tmp_path)
    assert (share.cpus, share.threads, share.nodes) == ((0, 1), 2, ())


# --- the driver --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("visible", "nodes"), [("0,1,2,3", [0, 0, 1, 1]), ("3,0", [1, 0]), ("2", [1])])
def test_a_device_is_found_by_its_number_among_those_that_are_visible(visible, nodes, monkeypatch, tmp_path):
    root, driver = two_nodes(tmp_path / "sys"), sysfs.driver(tmp_path, TWO_NODES)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(topology, "SYSFS", root)
    absent = Cuda(0, str(tmp_path / "absent.so"))
    without = Cuda(0, None)  # this process's own symbols: a library without these calls
    assert not absent.start()
    assert not without.start()
    drivers = [absent, without, driver]
    assert numa.node_near(drivers, 0) is None  # nobody has started the driver
    assert driver.start()
    assert [numa.node_near(drivers, i) for i in range(-1, len(nodes) + 1)] == [None, *nodes, None]


# --- the threads of a real process ---------------------------------------------------------------------------------


def in_process(code, folder, **environment):
    """Return the JSON that a process prints. ``affinity()`` is that of its workers and of its main thread."""
    prelude = """if True:
        import json, os
        from pathlib import Path
        def affinity():
            said = {}
            for task in Path("/proc/self/task").iterdir():
                try:
                    text = (task / "status").read_text()
                except FileNotFoundError:  # the thread has ended
                    continue
                status = dict(line.split(":\\t", 1) for line in text.splitlines())
                ours = "workers" if status["Name"].strip() == "offload-core" else "others"
                said.setdefault(ours, set()).add(status["Cpus_allowed_list"].strip())
            return {name: sorted(masks) for name, masks in said.items()}
    """
    env = environment_of(ROOT) | environment
    for name in {**TORCHRUN, **OPEN_MPI, **SLURM, **BATCH}.keys() - environment.keys():
        env.pop(name, None)
    command = [sys.executable, "-c", prelude + code]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def mine():
    return sorted(os.sched_getaffinity(0))


two_processors = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(mine()) < 2, reason="it takes Linux and two processors"
)


WRAPPED = {
    "rank 0": ("0", {}),
    "rank 1": ("1", {}),
    "not bound": ("1", {"bind_threads": False, "num_threads": 3}),
    "more threads than processors": ("1", {"num_threads": 1 + (os.cpu_count() or 1)}),
}
"""A rank of two, and the fields of its engine."""
WRAP = f"""
import torch, torch._dynamo
from frontends.torch import wrap
for number, (rank, fields) in enumerate({[*WRAPPED.values()]}):
    if not os.fork():
        os.environ.update(LOCAL_RANK=rank, LOCAL_WORLD_SIZE="2")
        engine = wrap(torch.nn.Linear(1000, 1000), lr=1e-2, **fields)
        engine.backward(engine(torch.ones(3, 1000)).square().sum())
        assert engine.step().updated
        print("," if number else "[", json.dumps(affinity()), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
print("]")
"""


@pytest.fixture(scope="module")
def affinities(tmp_path_factory):
    """The processors that threads may use after one step of a torch model, in processes forked from one."""
    pytest.importorskip("torch")
    return dict(zip(WRAPPED, in_process(WRAP, tmp_path_factory.mktemp("wrapped")), strict=True))


@pytest.mark.long("starts interpreters that import the frameworks")
@pytest.mark.draws(1)
@two_processors
@pytest.mark.parametrize("rank", [0, 1])
def test_an_engines_workers_are_bound_to_the_ranks_share_and_its_caller_is_not(rank, affinities):
    cores = Topology.read().cores(mine())
    if len(cores) < 2:
        pytest.skip("it takes two physical cores")
    first = len(cores) * rank // 2
    share = ranges(cores[first : first + len(cores) // 2])
    assert affinities[f"rank {rank}"] == {"workers": [share], "others": [ranges(mine())]}


@two_processors
@pytest.mark.parametrize("case", ["not bound", "more threads than processors"])
def test_workers_may_run_wherever_the_process_may(case, affinities):
    assert affinities[case] == {"workers": [ranges(mine())], "others": [ranges(mine())]}


@two_processors
def test_workers_follow_the_devices_of_the_process_and_a_child_begins_anew(tmp_path):
    """Two nodes of one processor each; the first engine has no device, the next one the second node's."""
    one, other = mine()[:2]
    gpus = [Gpu("0000:3b:00.0", 0), Gpu("0000:d8:00.0", 1)]
    root = sysfs.sysfs(tmp_path / "sys", {0: [one], 1: [other]}, [[one], [other]], gpus)
    library = sysfs.driver(tmp_path, gpus).library
    code = f"""
from dataclasses import replace
os.sched_setaffinity(0, {{ {one}, {other} }})
from offload_core.config.options import OffloadConfig
from offload_core.memory import numa
from offload_core.memory.pinning import Cuda
from offload_core.memory.host_memory import HostMemory
from offload_core.native import kernels
from offload_core.support import topology
import numpy as np
topology.SYSFS = Path({str(root)!r})
driver = Cuda(0, {library!r})
config, seen = OffloadConfig(), []
def engine(*ordinals):
    numa.bind_threads_near(config, ordinals, [driver])
    HostMemory(config.threads).allocate("states", 8 * 2**20, np.dtype(np.float32))
    seen.append([config.threads, kernels.kernel_info().pool_workers, affinity()])
engine()
driver.start()
engine(0)
engine()
engine(1)
numa.bind_threads_near(OffloadConfig(num_threads=2), [0], [driver])
seen.append(affinity())
reading, writing = os.pipe()
if not os.fork():
    HostMemory(2).allocate("states", 8 * 2**20, np.dtype(np.float32))
    os.write(writing, json.dumps(affinity()).encode())
    os._exit(0)
os.close(writing)
os.wait()
seen.append(json.loads(os.read(reading, 10000)))
print(json.dumps(seen))
"""
    both = ranges([one, other])
    everywhere, there = {"workers": [both], "others": [both]}, {"workers": [str(other)], "others": [both]}
    assert in_process(code, tmp_path, CUDA_VISIBLE_DEVICES="1,0") == [
        [2, 1, everywhere],
        [1, 1, there],
        [1, 1, there],
        [2, 1, everywhere],
        everywhere,
        everywhere,
    ]


# --- info --------------------------------------------------------------------------------------------------------


@pytest.fixture
def shown(alone, monkeypatch, tmp_path, capsys):
    """The text and the JSON that ``info`` prints on a fake machine."""

    def show(root, driver=None):
        monkeypatch.setattr(machine, "DRIVERS", [driver] if driver else [])
        monkeypatch.setattr(topology, "SYSFS", root)
        monkeypatch.setattr(info, "measure_bandwidths", lambda threads: machine.Bandwidths(1e9, 2e9))
        monkeypatch.setattr(kernels, "bind_workers", lambda cpus: None)
        for json_ in (False, True):
            info.run(info.argparse.Namespace(json=json_, nvme_path=None))
        text, _, data = capsys.readouterr().out.rpartition("\n{")
        return text, json.loads("{" + data)

    return show


def test_info_shows_nodes_devices_links_and_what_was_chosen(shown, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    text, about = shown(two_nodes(tmp_path / "sys"), sysfs.driver(tmp_path, TWO_NODES))
    for line in (
        "node 0               8 physical cores, 16 with SMT siblings: processors 0-7,16-23",
        "node 1               8 physical cores, 16 with SMT siblings: processors 8-15,24-31",
        "device 0000:af:00.0  10de:20b0, nearest to node 1, PCIe 4 x16",
        "threads              8 on processors 8-15: the cores of node 1, which its devices are nearest to",
    ):
        assert f"\n{line}\n" in text, text
    assert about["chosen"]["processors"] == list(range(8, 16))
    assert about["chosen"]["nodes"] == [1]
    assert about["nodes"][1] == {"node": 1, "processors": [*range(8, 16), *range(24, 32)], "physical cores": 8}
    assert about["devices"][3] == {"address": "0000:d8:00.0", "kind": "10de:20b0", "node": 1, "link": "PCIe 4 x16"}


def test_info_is_of_the_rank_that_asks(shown, alone, monkeypatch, tmp_path):
    root, driver = two_nodes(tmp_path / "sys"), sysfs.driver(tmp_path, TWO_NODES)
    alone(LOCAL_RANK="3", LOCAL_WORLD_SIZE="4", CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert shown(root, driver)[1]["chosen"]["processors"] == [12, 13, 14, 15]
    alone(CUDA_VISIBLE_DEVICES="3")  # a launcher that shows each rank its own device
    assert shown(root, driver)[1]["chosen"]["processors"] == [14, 15]
    assert shown(root)[1]["chosen"]["processors"] == [12, 13, 14, 15]  # no driver, no node


def test_info_of_a_machine_with_one_node_is_short(shown, alone, tmp_path):
    alone({0, 1})
    text, _ = shown(one_node(tmp_path / "sys"))
    assert "\nnode              one, 2 physical cores\n" in text
    assert "\nthreads           2 on processors 0-1: all cores that it may use\n" in text
    memory_alone = sysfs.sysfs(tmp_path / "cxl", {0: [0, 1], 2: []}, [[0, 1]])
    text, _ = shown(memory_alone)
    assert "\nnode 0            1 physical core, 2 with SMT siblings: processors 0-1\n" in text
    assert "\nnode 2            memory alone\n" in text
    empty, about = shown(tmp_path / "nothing")
    assert about["nodes"] == []
    assert "\nthreads           2 on processors 0-1: all cores that it may use\n" in empty


def test_a_place_on_a_machine_makes_sense_or_is_none():
    read = launchers.place_on_machine
    assert read({}) == read({"LOCAL_RANK": "3"}) == (0, 1)
    assert read({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}) == (3, 4)
    for wrong in ({}, {"LOCAL_RANK": "4"}, {"LOCAL_RANK": "x"}):
        assert read({**wrong, "LOCAL_WORLD_SIZE": "4"}) == (None, 4)
