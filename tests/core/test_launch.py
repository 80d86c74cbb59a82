"""A process's place among the ranks, as torchrun, Open MPI and Slurm tell it, and its share of the machine."""

import os
import queue
import socket
import sys
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.errors import CollectiveError, ConfigError, ConfigWarning, StateError
from offload_core.support import launchers, processors, topology
from offload_core.support.launchers import Launched, first_host, local_processes, share_of_cpus
from tests.support.launched import BATCH, OPEN_MPI, SLURM, TORCHRUN
from tests.support.strategies import law

HETEROGENEOUS = {
    **SLURM,
    "SLURM_HET_SIZE": "2",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2),2",
    "SLURM_STEP_NODELIST": "fat1,thin[2-3]",
}
"""As ``srun --het-group=0,1``: of two components as of one."""
DEEPSPEED = {name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"} | {
    "LOCAL_SIZE": TORCHRUN["LOCAL_WORLD_SIZE"]
}
"""As DeepSpeed's launcher sets them."""
JOINED = {**SLURM, "SLURM_CPUS_ON_NODE": "16", **Launched.read(SLURM).variables()}
"""As it is left to those who come after the first that joined."""


def test_without_a_launcher_a_process_is_alone():
    assert Launched.read({}) == Launched() == Launched(None, 0, 1, 0, 1, None, None)
    assert Launched.read({"MASTER_ADDR": "here", "LOCAL_RANK": "1"}) == Launched()  # a shell's leftovers


@pytest.mark.parametrize("environment", [TORCHRUN, OPEN_MPI, SLURM], ids=["torchrun", "Open MPI", "Slurm"])
def test_who_trains_alone_beside_others_is_warned_of_his_own_line(environment):
    started = f"{Launched.read(environment).launcher} started 4 processes, and each trains alone.*; expected a remedy"
    with pytest.warns(ConfigWarning, match=started) as caught:
        launchers.warn_if_launched("a remedy", environment)
    assert caught[0].filename == __file__
    with pytest.raises(ConfigError, match=started):
        launchers.refuse_if_launched("a remedy", environment)


@pytest.mark.parametrize("environment", [{}, {"RANK": "1"}, {"RANK": "0", "WORLD_SIZE": "1"}, BATCH], ids=str)
def test_who_is_alone_is_not_warned(environment):
    launchers.warn_if_launched("a remedy", environment)  # a warning would be an error here
    launchers.refuse_if_launched("a remedy", environment)


@pytest.mark.parametrize(
    ("environment", "launcher", "address"),
    [
        (TORCHRUN, "torchrun", "here"),
        (DEEPSPEED, "torchrun", "here"),
        (OPEN_MPI, "Open MPI", None),
        (SLURM, "Slurm", "node03"),
        (HETEROGENEOUS, "Slurm", "fat1"),
    ],
    ids=["torchrun", "DeepSpeed", "Open MPI", "Slurm", "heterogeneous job"],
)
def test_each_launcher_says_the_same_in_its_own_words(environment, launcher, address):
    place = Launched.read(environment)
    assert (place.launcher, place.address) == (launcher, address)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (3, 4, 1, 2)
    assert place.several_machines
    assert local_processes(environment) == 2


def test_of_launchers_that_nest_the_inner_one_is_right():
    """mpirun's daemons are tasks of Slurm, and so is each machine's torchrun; scripts translate Slurm's by hand."""
    daemon = {**SLURM, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert Launched.read({**daemon, **TORCHRUN}) == Launched.read(TORCHRUN)
    place = Launched.read({**daemon, **OPEN_MPI})
    assert place == Launched.read(OPEN_MPI), "the daemons' step has neither mpirun's machine nor rank 0"
    by_hand = Launched.read({**SLURM, "RANK": "3", "WORLD_SIZE": "4"})
    assert (by_hand.launcher, by_hand.local_rank, by_hand.local_world_size, by_hand.address) == (
        "Slurm", 1, 2, "node03"
    )  # fmt: skip
    assert Launched.read({**SLURM, "MASTER_ADDR": "other", "MASTER_PORT": "5"}).meeting_point() == ("other", 5)
    assert Launched.read({**SLURM, "LOCAL_RANK": "0"}) == Launched.read(SLURM)  # a shell's leftover


def test_a_batch_script_is_none_of_the_tasks():
    with pytest.raises(ConfigError, match=r"batch script of a Slurm job of 4 tasks.*started by srun"):
        Launched.read(BATCH)
    assert Launched.read({**BATCH, "SLURM_NTASKS": "1"}) == Launched()
    assert local_processes(BATCH) == 1
    assert launchers.granted_cpus(BATCH) is None


def test_a_shell_in_an_allocation_counts_itself():
    shell = {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "4",
             "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_ID": "4294967290"}  # fmt: skip
    assert Launched.read(shell).world_size == 1


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"RANK": "1"}, "has RANK=1 and no WORLD_SIZE; expected both"),
        ({"WORLD_SIZE": "2"}, "has WORLD_SIZE=2 and no RANK; expected both"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "no RANK"),
        ({**SLURM, "RANK": "1"}, "no WORLD_SIZE"),
        ({**TORCHRUN, "RANK": "one"}, "RANK: got 'one' from the environment, expected an integer of at least 0"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK: got '-1'"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE: got '0'.* at least 1"),
        ({**TORCHRUN, "RANK": "4"}, "rank 4 of 4, on this machine rank 1 of 2"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "on this machine rank 2 of 2"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, "no more on this machine than in all"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": ""}, "rank 1 of 1; expected"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT: got 'http'"),
        ({**TORCHRUN, "MASTER_PORT": "65536"}, "MASTER_PORT: got '65536'.* from 1 to 65535"),
        ({**SLURM, "SLURM_NODEID": "4"}, r"got '2\(x2\)' for machine 4"),
        ({**SLURM, "SLURM_STEP_NODELIST": "node[01"}, r"got 'node\[01' for a list of hosts"),
    ],
)
def test_an_environment_that_is_half_set_is_refused(environment, complaint):
    with pytest.raises(ConfigError, match=complaint):
        Launched.read(environment)


def test_who_has_no_place_to_meet_is_told_what_to_set():
    with pytest.raises(ConfigError, match=r"MASTER_ADDR is not set, and Open MPI does not tell; .*mpirun -x"):
        Launched.read(OPEN_MPI).meeting_point()
    with pytest.raises(ConfigError, match="MASTER_PORT is not set"):
        Launched.read({**OPEN_MPI, "MASTER_ADDR": "here"}).variables()


def test_what_others_read_is_what_torchrun_would_have_set():
    assert Launched.read(TORCHRUN).variables() == TORCHRUN
    translated = Launched.read(SLURM).variables()
    assert {**translated, "MASTER_ADDR": "here", "MASTER_PORT": "29500"} == TORCHRUN
    assert Launched.read(JOINED) == Launched.read(SLURM)
    by_mpirun = {**SLURM, **OPEN_MPI, "MASTER_ADDR": "here", "MASTER_PORT": "29500"}
    joined = {**by_mpirun, **Launched.read(by_mpirun).variables()}
    assert Launched.read(joined) == Launched.read(by_mpirun)


def test_all_tasks_of_a_step_take_one_port_and_other_steps_another():
    def port(**changed):
        return Launched.read({**SLURM, **changed}).port

    assert port() == port(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0")
    ports = {port(SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step)) for job in range(7001, 7021) for step in range(4)}
    assert len(ports) == 80
    low, high = 32768, 60999  # what Linux gives to whoever connects
    assert all(high < port < 65536 for port in ports), low


# --- lists of hosts ----------------------------------------------------------------------------------------------

names = st.from_regex(r"[a-z][a-z-]{0,5}", fullmatch=True)


@st.composite
def brackets(draw):
    """A compressed part, and the first that it stands for."""
    width = draw(st.integers(1, 3))
    numbers = draw(st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True).map(sorted))
    runs = []
    for number in numbers:
        last = number + draw(st.integers(0, 5))
        runs.append(f"{number:0{width}}-{last:0{width}}" if last > number else f"{number:0{width}}")
    return f"[{','.join(runs)}]", f"{numbers[0]:0{width}}"


@st.composite
def hosts(draw):
    parts = draw(st.lists(names.map(lambda name: (name, name)) | brackets(), min_size=1, max_size=4))
    written, meant = ("n" + "".join(part) for part in zip(*parts, strict=True))
    return written, meant


@law()
@given(st.lists(hosts(), min_size=1, max_size=3))
def test_the_first_host_is_found_in_any_compressed_list(listed):
    assert first_host(",".join(written for written, _ in listed)) == listed[0][1]


@pytest.mark.parametrize(
    ("written", "first"),
    [
        ("node[01-03,07]", "node01"),
        ("node[7]", "node7"),
        ("login", "login"),
        ("a.example.org,b", "a.example.org"),
        ("rack[1-2]n[03-05,9],gpu1", "rack1n03"),
        ("gpu-[001,007-015]-ib,host2", "gpu-001-ib"),
    ],
)
def test_lists_as_slurm_writes_them(written, first):
    assert first_host(written) == first


@pytest.mark.parametrize("written", ["", "node[", "node]", "[]", ",a", "node[1]]", "a b"])
def test_what_is_no_list_of_hosts_is_refused(written):
    with pytest.raises(ConfigError, match="for a list of hosts"):
        first_host(written)


@law(100)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.data())
def test_tasks_on_a_machine_are_found_in_any_compressed_list(tasks, data):
    runs: list[list[int]] = []
    for count in tasks:
        if runs and runs[-1][0] == count and data.draw(st.booleans()):
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    written = ",".join(f"{count}(x{machines})" if machines > 1 else f"{count}" for count, machines in runs)
    for node, count in enumerate(tasks):
        step = {"SLURM_STEP_TASKS_PER_NODE": written, "SLURM_NODEID": str(node), "SLURM_NTASKS_PER_NODE": "99"}
        assert local_processes({**SLURM, **step}) == count


# --- a rank's share of the processors ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "environment", "share"),
    [
        (16, {}, 16),
        (16, {"LOCAL_WORLD_SIZE": "4"}, 4),
        (16, {"LOCAL_WORLD_SIZE": "5"}, 3),
        (16, {"LOCAL_WORLD_SIZE": "99"}, 1),
        (16, {"LOCAL_WORLD_SIZE": "nonsense"}, 16),
        (16, {"LOCAL_WORLD_SIZE": "0"}, 16),
        (16, OPEN_MPI, 8),
        (16, {**SLURM, "SLURM_CPUS_ON_NODE": "16"}, 8),  # not bound: tasks share what they all see
        (8, {**SLURM, "SLURM_CPUS_ON_NODE": "16"}, 8),  # bound: what it sees is its own
        (64, {**SLURM, "SLURM_CPUS_ON_NODE": "16"}, 8),  # not confined at all
        (8, JOINED, 8),  # whose torchrun's variables are Slurm's
        (16, SLURM, 8),
        (16, {**SLURM, "SLURM_CPUS_ON_NODE": "16", **TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, 4),
        (16, {**SLURM, "SLURM_STEP_NODELIST": "node[", "SLURM_CPUS_ON_NODE": "16"}, 16),  # others complain
        (16, BATCH, 16),
    ],
)  # fmt: skip
def test_ranks_on_a_machine_share_its_processors(seen, environment, share):
    assert share_of_cpus(seen, environment) == share


def test_a_slurm_task_takes_no_more_than_it_was_given(monkeypatch, tmp_path):
    """Slurm does not bind the task to its processors here."""
    for name in {**TORCHRUN, **OPEN_MPI, **SLURM, **BATCH}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    monkeypatch.setattr(processors, "_quota", lambda: None)
    monkeypatch.setattr(topology, "SYSFS", tmp_path)
    assert processors.default_threads() == 16
    for name, value in {**SLURM, "SLURM_CPUS_PER_TASK": "3", "SLURM_CPUS_ON_NODE": "16"}.items():
        monkeypatch.setenv(name, value)
    assert (processors.available_cpus(), processors.default_threads()) == (3, 3)
    for name, value in {**TORCHRUN, "LOCAL_WORLD_SIZE": "3", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)  # a task that is torchrun
    assert (processors.available_cpus(), processors.default_threads()) == (3, 1)


def test_what_slurm_gave_a_daemon_of_mpiruns_is_not_what_each_rank_has():
    given = {**SLURM, "SLURM_CPUS_PER_TASK": "3", "SLURM_CPUS_ON_NODE": "16"}
    assert launchers.granted_cpus(given) == 3
    assert launchers.granted_cpus({**given, **OPEN_MPI}) is None
    assert share_of_cpus(32, {**given, **OPEN_MPI}) == 16


@pytest.mark.parametrize(
    ("files", "bound"),
    [
        ({"a/b/cpu.max": "150000 100000"}, 2),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000"}, 4),
        ({"a/b/cpu.max": "600000 100000", "a/cpu.max": "300000 100000", "cpu.max": "max 100000"}, 3),
        ({"cpu/a/b/cpu.cfs_quota_us": "250000", "cpu/a/b/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/a/b/cpu.cfs_quota_us": "-1", "cpu/a/b/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),  # as in a container
        ({}, None),
    ],
)
def test_the_tightest_control_group_bounds_the_processors(files, bound, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    version1 = any(name.startswith("cpu/") for name in files)
    membership = tmp_path / "membership"
    membership.write_text("4:cpu,cpuacct:/a/b\n3:cpuset:/elsewhere\n" if version1 else "0::/a/b\n")
    assert processors._quota(tmp_path, membership) == bound
    assert processors._quota(tmp_path, tmp_path / "none") is None


# --- joining -----------------------------------------------------------------------------------------------------


@pytest.fixture
def launched():
    """Sets the environment; what joining adds to it goes again."""
    before = dict(os.environ)

    def launch(**environment):
        for name in {**TORCHRUN, **OPEN_MPI, **SLURM, **BATCH, "GLOO_SOCKET_IFNAME": ""}:
            os.environ.pop(name, None)
        os.environ.update(environment)

    yield launch
    os.environ.clear()
    os.environ.update(before)


def torch_launch():
    pytest.importorskip("torch")
    from frontends.torch.ranks import launch

    return launch


def reachable():
    """An address of this machine that others may reach, and its interface."""
    for interface, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return address.address, interface
    pytest.skip("this machine has a loopback interface alone")


def test_torch_ranks_join_under_slurm_as_under_torchrun(launched, monkeypatch):
    """And are told of the network interface, and what other libraries read."""
    module = torch_launch()
    address, interface = reachable()
    joined = []
    monkeypatch.setattr(module.dist, "init_process_group", lambda backend, timeout: joined.append((backend, timeout)))
    launched(**SLURM, MASTER_ADDR=address)
    assert str(module.init_process_group("cpu")) == "cpu"
    timeout = module.timedelta(seconds=9)
    module.init_process_group("cpu", backend="mpi", timeout=timeout)
    assert joined == [("gloo", None), ("mpi", timeout)]
    expected = {**TORCHRUN, "MASTER_ADDR": address, "MASTER_PORT": str(Launched.read(SLURM).port)}
    assert {name: os.environ[name] for name in expected} == expected
    assert os.environ["GLOO_SOCKET_IFNAME"] == interface


def test_an_interface_that_was_chosen_is_kept_and_one_machine_needs_none(launched, monkeypatch):
    module = torch_launch()
    monkeypatch.setattr(module.dist, "init_process_group", lambda backend, timeout: None)
    launched(**TORCHRUN, GLOO_SOCKET_IFNAME="ib0")
    module.init_process_group("cpu")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    launched(**{**TORCHRUN, "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "localhost"})
    module.init_process_group("cpu")
    assert "GLOO_SOCKET_IFNAME" not in os.environ


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("127.0.0.1", "is 127.0.0.1 here, where no other machine finds it"),
        ("no-such-host.invalid", "not to be reached"),
    ],
)
def test_ranks_of_several_machines_are_told_of_an_address_that_leads_nowhere(address, complaint, launched):
    module = torch_launch()
    launched(**{**TORCHRUN, "MASTER_ADDR": address})
    with pytest.raises(ConfigError, match=f"MASTER_ADDR '{address}' .*{complaint}.*set GLOO_SOCKET_IFNAME to"):
        module.init_process_group("cpu")


def test_ranks_of_one_machine_that_do_not_say_so_are_told_what_to_set(launched):
    module = torch_launch()
    launched(RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="29500")
    with pytest.raises(ConfigError, match="or LOCAL_RANK and LOCAL_WORLD_SIZE where all ranks run on this machine"):
        module.init_process_group("cpu")


def test_a_process_that_is_alone_is_a_group_of_one_and_joins_once(launched):
    module = torch_launch()
    for environment in ({}, {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}):
        launched(**environment)
        assert str(module.init_process_group("cpu")) == "cpu"
        try:
            assert (module.dist.get_rank(), module.dist.get_world_size(), module.dist.get_backend()) == (0, 1, "gloo")
            with pytest.raises(StateError, match="in a process group already; expected one call"):
                module.init_process_group("cpu")
        finally:
            module.dist.destroy_process_group()


def test_a_rank_that_meets_nobody_says_whom_it_expected_and_where(launched):
    module = torch_launch()
    launched(**{**TORCHRUN, "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    timeout = module.timedelta(seconds=1)
    with pytest.raises(CollectiveError, match=r"rank 3 of 4 did not meet the others at 127\.0\.0\.1, port 1 \("):
        module.init_process_group("cpu", timeout=timeout)


@pytest.mark.parametrize(
    ("gpus", "environment", "device"),
    [
        (0, TORCHRUN, "cpu"),
        (2, TORCHRUN, "cuda:1"),
        (1, SLURM, "cuda:0"),  # --gpus-per-task
        (1, JOINED, "cuda:0"),
        (2, SLURM, "cuda:1"),
    ],
)
def test_a_rank_takes_the_gpu_of_its_place_on_the_machine(gpus, environment, device, monkeypatch):
    module = torch_launch()
    monkeypatch.setattr(module, "usable_accelerator", lambda: module.torch.device("cuda") if gpus else None)
    monkeypatch.setattr(module.torch.accelerator, "device_count", lambda: gpus)
    place = Launched.read(environment)
    assert str(module.device_of(place)) == device
    assert str(module.device_of(place, "cpu")) == "cpu"
    if not gpus:
        with pytest.raises(ConfigError, match="got 'cuda', expected 'cpu', the only device that torch sees"):
            module.device_of(place, "cuda")
    expected = "expected 'cuda' or 'cpu'" if gpus else "expected 'cpu', the only"
    with pytest.raises(ConfigError, match=f"got 'tpu', {expected}"):
        module.device_of(place, "tpu")
    with pytest.raises(ConfigError, match="got 'mps': MPS has one stream.*; expected 'cpu' or another"):
        module.device_of(place, "mps")


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    module = torch_launch()
    monkeypatch.setattr(module, "usable_accelerator", lambda: module.torch.device("cuda"))
    monkeypatch.setattr(module.torch.accelerator, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="2 ranks on this machine and 1 cuda devices"):
        module.device_of(Launched.read(TORCHRUN))


def jax_launch(monkeypatch):
    """The module, and what jax.distributed.initialize() is called with."""
    pytest.importorskip("jax")
    from frontends.jax.devices import launch

    joined = []
    monkeypatch.setattr(launch.jax.distributed, "initialize", lambda *place, **options: joined.append((place, options)))
    monkeypatch.setattr(launch.atexit, "register", lambda function: None)
    return launch, joined


@pytest.mark.parametrize(
    ("environment", "address", "devices"),
    [
        (TORCHRUN, "here:29500", [1]),
        ({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}, "here:29501", [1]),  # the agent listens there itself
        ({**SLURM, **TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}, "here:29501", [1]),
        ({**TORCHRUN, "MASTER_ADDR": "fd00::7"}, "[fd00::7]:29500", [1]),
        ({**TORCHRUN, "CUDA_VISIBLE_DEVICES": "5"}, "here:29500", None),
        ({**TORCHRUN, "CUDA_VISIBLE_DEVICES": "GPU-5ad0f1c2"}, "here:29500", None),
        ({**TORCHRUN, "CUDA_VISIBLE_DEVICES": "4,5"}, "here:29500", [1]),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}, "node03:64345", None),
    ],
)
def test_jax_processes_join_with_the_device_of_their_place_or_all(environment, address, devices, launched, monkeypatch):
    module, joined = jax_launch(monkeypatch)
    launched(TORCHELASTIC_USE_AGENT_STORE="", CUDA_VISIBLE_DEVICES="")
    os.environ.update(environment)
    module.initialize()
    module.initialize([2, 3])
    options = {"cluster_detection_method": "deactivate"}
    assert joined == [((address, 4, 3, ids), options) for ids in (devices, [2, 3])]


def test_jax_processes_that_wait_a_time_say_why_before_heartbeats_end_them(launched, monkeypatch):
    module, joined = jax_launch(monkeypatch)
    monkeypatch.setattr(module, "_watch", None)
    launched(**TORCHRUN)
    module.initialize(timeout_seconds=60)
    assert module._watch is not None
    [(_, options)] = joined
    assert options["heartbeat_timeout_seconds"] > options["shutdown_timeout_seconds"] == 60


def test_a_jax_process_that_is_alone_joins_nobody(launched, monkeypatch):
    module, joined = jax_launch(monkeypatch)
    launched()
    module.initialize(timeout_seconds=60)
    assert not joined
    assert module._watch is None


def test_jax_processes_that_meet_nobody_say_whom_they_expected(launched, monkeypatch):
    module, _ = jax_launch(monkeypatch)

    def refuse(*place, **options):
        raise RuntimeError("deadline")

    monkeypatch.setattr(module.jax.distributed, "initialize", refuse)
    launched(**TORCHRUN)
    with pytest.raises(CollectiveError, match="process 3 of 4 did not meet the others at here, port 29500 .*deadline"):
        module.initialize()


@pytest.mark.parametrize("front_end", ["torch", "jax"])
def test_a_port_that_another_program_has_taken_is_one_error(front_end, launched, monkeypatch):
    """JAX alone would end the process by SIGSEGV."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        place = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
        launched(**{**TORCHRUN, **place, "MASTER_PORT": port})
        said = rf"0 of 4 did not meet the others at 127\.0\.0\.1, port {port} .*in use.*free there \(MASTER_PORT\)$"
        if front_end == "torch":
            with pytest.raises(CollectiveError, match=f"(?s){said}"):
                torch_launch().init_process_group("cpu")
        else:
            module, joined = jax_launch(monkeypatch)
            with pytest.raises(CollectiveError, match=said):
                module.initialize()
            assert not joined


def test_a_wait_that_takes_too_long_is_told_of_and_others_are_not(monkeypatch):
    module, _ = jax_launch(monkeypatch)
    now = 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now, sleep=lambda seconds: None))
    told = queue.Queue()
    watch = module.Watch(0.2, told.put)
    for bucket in range(3):
        with watch.over(0, f"bucket {bucket}"):
            pass
    with watch.over(7, "bucket 3: exchange"), watch.over(7, "bucket 4"):
        now = 1.0
        assert told.get(timeout=60).startswith(
            "rank 7: bucket 3: exchange failed (no answer in 0.2 seconds); a rank was"
        )
    assert told.empty()


def test_an_error_ends_a_jax_process_at_once_and_a_good_end_does_not(monkeypatch):
    module, _ = jax_launch(monkeypatch)
    left = []
    monkeypatch.setattr(module.os, "_exit", left.append)
    monkeypatch.setattr(module.jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    module._leave_at_once_after_an_error()
    assert left == []
    monkeypatch.setattr(sys, "last_value", CollectiveError("lost"))
    module._leave_at_once_after_an_error()
    assert left == [1]
