"""The simulated accelerator shows what it is for: accesses, reuse and orders that a GPU would punish."""

import gc
import signal
import threading
import warnings
from collections import Counter
from functools import partial
from itertools import cycle, product
from types import SimpleNamespace

import pytest
import torch
from torch.accelerator import memory
from torch.utils._pytree import tree_leaves, tree_map_only

from frontends.torch import wrap
from frontends.torch.ranks.device import memory_of, told_by_allocator
from offload_core import HostMemoryWarning
from offload_core.device.events import Done
from offload_core.errors import HostMemoryError
from tests.support import simulated
from tests.support.processes import torch_server
from tests.support.torch_models import batch, make, same_bits
from tests.support.wait_mutants import Change, made, waits_of

pytestmark = pytest.mark.skipif((missing := simulated.why_not()) is not None, reason=missing or "")
D = simulated.NAME


@pytest.fixture(autouse=True)
def loaded(accelerator):
    yield
    torch.accelerator.synchronize()


def test_a_host_that_touches_device_memory_dies():
    program = (
        "import ctypes, torch\n"
        "from tests.support import simulated\n"
        "simulated.load()\n"
        "x = torch.arange(4.0).to('simulated')\n"
        "assert x.sum().item() == 6\n"
        "print('reads', flush=True)\n"
        "print(ctypes.c_float.from_address(x.data_ptr()))\n"
    )
    [ended] = torch_server().run(["-c", program])
    assert (ended.returncode, ended.stdout) == (-signal.SIGSEGV, "reads\n"), ended.stderr


def test_kernels_and_copies_run_when_their_stream_comes_to_them():
    source, target = torch.zeros(4, pin_memory=True), torch.zeros(4, pin_memory=True)
    stream = torch.accelerator.current_stream()
    with simulated.held(stream):
        x = torch.empty(4, device=D).copy_(source, non_blocking=True) * 2
        target.copy_(x, non_blocking=True)
        source.fill_(3.0)  # too early
        ended = stream.record_event()
        assert not ended.query()
        assert target.tolist() == [0] * 4
    ended.synchronize()
    assert target.tolist() == [6] * 4


def test_a_copy_that_does_not_wait_for_the_kernel_finds_what_was_there():
    other, current = torch.Stream(D), torch.accelerator.current_stream()
    x = torch.ones(4, device=D)
    hosts = [torch.zeros(4, pin_memory=True) for _ in range(2)]
    current.synchronize()
    with simulated.held(current):
        x += 1
        written = current.record_event()
        with other:
            hosts[0].copy_(x, non_blocking=True)
        other.synchronize()
        with other:
            other.wait_event(written)
            hosts[1].copy_(x, non_blocking=True)
    other.synchronize()
    assert [host.tolist() for host in hosts] == [[1] * 4, [2] * 4]


@pytest.mark.parametrize("recorded", [False, True])
def test_freed_memory_is_poisoned_under_a_stream_that_was_not_recorded(recorded):
    other, host = torch.Stream(D), torch.zeros(4, pin_memory=True)
    x = torch.ones(4, device=D)
    torch.accelerator.current_stream().synchronize()
    address = x.data_ptr()
    with simulated.held(other):
        with other:
            host.copy_(x, non_blocking=True)
        if recorded:
            x.record_stream(other)
        del x
        assert (torch.empty(4, device=D).data_ptr() == address) is not recorded  # reused at once
        torch.accelerator.current_stream().synchronize()
    other.synchronize()
    assert bool(host.isnan().all()) is not recorded
    assert recorded is (host.tolist() == [1] * 4)


def test_an_allocation_beyond_the_capacity_is_refused_and_fits_once_memory_is_free():
    gc.collect()
    torch.accelerator.empty_cache()
    with simulated.capacity(torch.accelerator.memory_reserved() + 2**20):
        x = torch.empty(2**19, dtype=torch.uint8, device=D)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            torch.empty(2**20, dtype=torch.uint8, device=D)
        used = torch.accelerator.memory_allocated()
        del x
        assert torch.accelerator.memory_allocated() == used - 2**19
        torch.empty(2**20, dtype=torch.uint8, device=D)
        assert torch.accelerator.max_memory_allocated() >= used
        free, total = torch.accelerator.get_memory_info()
        assert 0 <= free < total


def test_memory_in_use_counts_activations_and_the_peak_stays():
    engine = wrap(make().to(D), lr=1e-2)
    activations = torch.zeros(2**20, dtype=torch.uint8, device=D)
    use = engine.device_use()
    assert use == engine.optimizer.device_use()
    assert use.used == torch.accelerator.memory_allocated() >= 2**20
    del activations
    later = engine.device_use()
    assert later.used <= use.used - 2**20
    assert later.peak >= use.used
    assert wrap(make(), lr=1e-2).device_use() is None  # in host memory


@pytest.mark.parametrize("lacks", ["everything", "the free memory", "nothing"])
def test_memory_of_an_allocator_without_statistics_is_unknown(lacks, monkeypatch):
    """As of a backend that gives torch a ``c10::Allocator`` alone: torch raises these where it is asked."""

    def plain(*arguments):
        raise RuntimeError("device_allocator INTERNAL ASSERT FAILED: Allocator for simulated is not a DeviceAllocator.")

    def unwritten(*arguments):
        raise NotImplementedError("getMemoryInfo is not implemented for this allocator yet.")

    if lacks == "everything":
        monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", plain)
    monkeypatch.setattr(memory, "get_memory_info", {"nothing": memory.get_memory_info}.get(lacks, unwritten))
    monkeypatch.setattr(torch.accelerator, "get_memory_info", memory.get_memory_info)
    engine = wrap(make().to(D), lr=1e-2)
    engine.backward(engine(batch(0).to(D)).pow(2).mean())
    assert engine.step().updated
    assert (engine.optimizer.core.device.free_bytes() is None) == (lacks != "nothing")
    peak = told_by_allocator(torch.accelerator.max_memory_allocated, torch.device(D))
    assert (peak is None) == (lacks == "everything")


def test_a_copy_that_fails_is_reported_to_the_next_who_waits():
    x, host = torch.ones(4, device=D), torch.zeros(4, pin_memory=True)
    simulated.fail_copy(1)
    host.copy_(x, non_blocking=True)
    event = torch.accelerator.current_stream().record_event()
    with pytest.raises(RuntimeError, match="the copy failed, as asked"):
        event.synchronize()
    with pytest.raises(RuntimeError, match="the copy failed, as asked"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()
    assert host.tolist() == [0] * 4


def test_backward_runs_in_a_thread_of_the_device():
    threads = []
    x = torch.ones(4, device=D, requires_grad=True)
    x.register_hook(lambda g: threads.append(threading.get_ident()))
    (x * 2).sum().backward()
    assert x.grad.tolist() == [2] * 4
    assert threads != [threading.get_ident()]


def test_random_numbers_are_the_device_generators():
    torch.manual_seed(1)
    host = torch.get_rng_state()
    state = simulated.get_rng_state()
    first = [torch.randn(4, device=D), torch.nn.functional.dropout(torch.ones(64, device=D))]
    assert torch.equal(torch.get_rng_state(), host)
    second = torch.randn(4, device=D)
    simulated.set_rng_state(state)
    again = [torch.randn(4, device=D), torch.nn.functional.dropout(torch.ones(64, device=D))]
    assert all(same_bits(a.cpu(), b.cpu()) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], second)


def test_two_devices_exchange_what_is_there_when_it_is_due():
    with simulated.held(torch.accelerator.current_stream("simulated:0")):
        x = torch.ones(4, device="simulated:0") + 1
        y = x.to("simulated:1", non_blocking=True) + 1
    assert y.device == torch.device("simulated:1")
    assert y.tolist() == [3] * 4


# --- what its operators compute ----------------------------------------------------------------------------------


def operators_and_seconds():
    """All of torch's that act on each element, on lists of tensors, or reduce, except those that write to ``out=``."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        base, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if not name.startswith("aten::") or op is None or torch.Tag.out in op.tags:
            continue
        if {torch.Tag.pointwise, torch.Tag.reduction} & {*op.tags} or base.startswith("_foreach"):
            several = sum("Tensor" in str(a.type) for a in op._schema.arguments) > 1
            yield from ((op, second) for second in (SECONDS if several else ["a tensor"]))


SECONDS = {
    "a tensor": lambda draw, dtype, size: torch.randn(size, generator=draw).to(dtype),
    "a number": lambda draw, dtype, size: torch.randn((), generator=draw, dtype=torch.float64).item(),
    "one element": lambda draw, dtype, size: torch.randn((), generator=draw).to(dtype),
    "one element of the host": lambda draw, dtype, size: torch.randn((), generator=draw, dtype=torch.float64),
}
"""The last of the tensors that an operator takes. float64 stays on the host."""


def arguments_of(op, draw, dtype, size, second):
    schema = op._schema.arguments
    last = [a.name for a in schema if "Tensor" in str(a.type)][1:][-1:]

    def of(argument):
        kind = str(argument.type).removeprefix("Optional[").rstrip("]")
        if argument.name in ("condition", "mask"):
            return SECONDS["a tensor"](draw, dtype, size) > 0
        if kind == "Tensor":
            return SECONDS[second if argument.name in last else "a tensor"](draw, dtype, size)
        if kind in ("number", "float"):
            return SECONDS["a number"](draw, dtype, size)
        if kind in ("List[Tensor", "List[number"):
            make = SECONDS["a tensor" if "Tensor" in kind else "a number"]
            return [make(draw, dtype, n) for n in (size, 3, size)]
        return argument.default_value if argument.has_default_value() else int(argument.name != "dim")

    drawn = {a: of(a) for a in schema}
    return [x for a, x in drawn.items() if not a.kwarg_only], {a.name: x for a, x in drawn.items() if a.kwarg_only}


def outcome(op, arguments, device):
    """Return the operator's results, or its arguments if it returns None."""
    move = partial(tree_map_only, torch.Tensor, lambda t: t.clone().to("cpu" if t.dtype == torch.float64 else device))
    placed = move(arguments)
    returned = op(*placed[0], **placed[1])
    return [
        x.cpu() if isinstance(x, torch.Tensor) else x for x in tree_leaves(placed if returned is None else returned)
    ]


def alike(a, b):
    return same_bits(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.long("all operators of an element type on the simulated device")
@pytest.mark.filterwarnings("ignore")  # of some operators, about their arguments
def test_operators_give_the_hosts_bits_beside_numbers_and_tensors_without_dimensions(drawn):
    draw, sizes, compared, differ = torch.Generator().manual_seed(0), cycle((1, 3, 8, 17, 1000)), 0, []
    dtypes = drawn([torch.float32, torch.bfloat16, torch.float16], 1)
    with simulated.in_turn(ahead=True):
        for (op, second), dtype in product(operators_and_seconds(), dtypes):
            for size in ((), next(sizes)):
                arguments = arguments_of(op, draw, dtype, size, second)
                try:
                    expected = outcome(op, arguments, "cpu")
                except (RuntimeError, TypeError):  # not of this type, or not beside a number
                    break
                try:
                    found = outcome(op, arguments, D)
                except RuntimeError as error:  # as CUDA says of some operators
                    is_refused = second == "one element of the host" and "on the same device" in str(error)
                    found, expected = [str(error)], [str(error) if is_refused else None]
                compared += 1
                if not all(map(alike, found, expected)):
                    differ.append((str(op), second, dtype, size))
    assert not differ
    assert compared > 1333 * len(dtypes), compared


# --- the front end on it -----------------------------------------------------------------------------------------


def as_late_as_can_be(current=D, ahead=False):
    """A step and what it leaves, where streams do only what the host or another stream waits for."""
    torch.accelerator.set_device_index(0)
    engine, x = wrap(make().to(current), lr=1e-2), batch(0).to(current)
    with simulated.in_turn(ahead=ahead):
        engine.backward(engine(x).pow(2).mean())
        engine.step()
        found = [engine(x).detach().cpu(), *(p.detach().cpu() for p in engine.module.parameters())]
    engine.close()
    return found


def expected():
    engine = wrap(make(), lr=1e-2)
    engine.backward(engine(batch(0)).pow(2).mean())
    engine.step()
    return [engine(batch(0)).detach(), *(p.detach() for p in engine.module.parameters())]


@pytest.mark.draws(1)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("current", ["simulated:0", "simulated:1"])
def test_streams_wait_for_each_other_also_on_a_device_that_is_not_the_current_one(current, ahead):
    assert all(map(same_bits, as_late_as_can_be(current, ahead), expected()))


DEVICE = "frontends.torch.ranks.device"
MISSING = [
    *(wait for wait in waits_of(DEVICE) if wait.function in ("_StreamEvent.wait", "AcceleratorDevice._lane")),
    Change(DEVICE, "_StreamEvent.order", "current_stream(self._device).wait_event(self._event)", "current_stream()"),
    Change(DEVICE, "AcceleratorDevice.mark", "torch.accelerator.current_stream(self.device)", "self._to_device"),
]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MISSING, ids=str)
def test_a_wait_that_is_missing_shows(mutant):
    with made(mutant):
        found = as_late_as_can_be()
    assert not all(map(same_bits, found, expected()))


class Refusing:
    """The ways to pin memory of the simulated device, which refuse, and what they pinned."""

    def __init__(self, monkeypatch, registered=0, allocated=0):
        from frontends.torch.ranks import pinning

        self.left = {"registered": registered, "allocated": allocated}
        self.pinned, self.zeros, self.register = Counter(), torch.zeros, pinning.REGISTERED[D].register
        monkeypatch.setitem(pinning.REGISTERED, D, pinning.Registered(self.registers))
        monkeypatch.setattr(torch, "zeros", self.allocates)

    def _refuse(self, kind):
        if not self.left[kind]:
            raise (HostMemoryError if kind == "registered" else RuntimeError)("no more locked memory")
        self.left[kind] -= 1
        self.pinned[kind] += 1

    def registers(self, address, n_bytes):
        self._refuse("registered")
        end = self.register(address, n_bytes)
        return lambda: (self.pinned.update(registered=-1), end())

    def allocates(self, *arguments, pin_memory=False, **options):
        if pin_memory:
            self._refuse("allocated")
        return self.zeros(*arguments, pin_memory=pin_memory, **options)


@pytest.mark.draws(2)
@pytest.mark.parametrize(
    ("registered", "allocated", "setting", "in_windows", "told"),
    [
        (0, 99, True, False, ["registered with the device's driver"]),
        (1, 99, True, False, ["registered with the device's driver"]),  # refused half-way
        (0, 0, True, False, ["registered with the device's driver", "pinned"]),
        (0, 1, True, False, ["registered with the device's driver", "pinned"]),
        (0, 99, True, True, []),  # no memory is registered
        (0, 99, "allocate", False, []),
        (0, 0, "allocate", False, ["pinned"]),
        (0, 99, "register", False, ["pinned"]),
    ],
)
@pytest.mark.parametrize(
    "fields", [{}, {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0}], ids=str
)
def test_memory_that_is_refused_is_pinned_otherwise_or_pageable_and_gives_the_same_bits(
    fields, registered, allocated, setting, in_windows, told, monkeypatch
):
    ways = Refusing(monkeypatch, registered, allocated)
    monkeypatch.setattr("offload_core.memory.pinning.in_wsl2", lambda: in_windows)
    fields = {"lr": 1e-2, "reduce_bucket_size": 500, "gradient_clipping": 0.05, **fields}
    with warnings.catch_warnings(record=True, action="always", category=HostMemoryWarning) as warned:
        found = three_steps(make().to(D), {**fields, "pin_memory": setting})
    said = [str(each.message) for each in warned if each.category is HostMemoryWarning]
    assert len(said) == len(told)
    assert all(f"could not be {what} (no more locked memory)" in each for what, each in zip(told, said, strict=True))
    gc.collect()
    assert (ways.pinned["registered"], ways.left["registered"]) == (0, 0)
    assert (ways.pinned["allocated"] > 0) is (setting != "register" and allocated > 0)
    assert all(map(same_bits, found, three_steps(make(), fields)))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0},
        {"param_dtype": "bfloat16", "update_in_backward": True},
    ],
    ids=str,
)
def test_a_report_names_the_way_that_memory_is_pinned_and_the_bytes_that_torch_rounds_up(fields, monkeypatch):
    Refusing(monkeypatch, allocated=99)
    layers = [torch.nn.Linear(30, 50), torch.nn.Linear(50, 3)]
    model = torch.nn.Sequential(*layers).to(D)
    engine = wrap(model, lr=1e-2, pin_memory="allocate", reduce_bucket_size=700, **fields)
    engine.backward(engine(torch.ones(2, 30, device=D)).float().pow(2).mean())
    engine.step()
    report = engine.memory_report()
    [(how, n_bytes)] = report.pinned.items()
    assert how == "allocated by torch"
    assert f"of that, {how}" in str(report)
    [rounding] = [row for row in report.rows if row.what == "rounding of pinned memory"]
    assert 0 < rounding.held == rounding.planned < n_bytes
    assert (report.host_bytes, report.planned_host_bytes) == 2 * (sum(report.host.values()),)
    engine.close()


def three_steps(model, fields):
    """The parameters and the states after them."""
    engine = wrap(model, **fields)
    for seed in range(3):
        engine.backward(engine(batch(seed).to(next(engine.module.parameters()).device)).pow(2).mean())
        assert engine.step().updated
    states = [state[key].clone() for state in engine.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    engine.close()
    return [*(p.detach().cpu() for p in engine.module.parameters()), *states]


def test_the_pinned_memory_of_torchs_own_allocator_serves_devices_whose_driver_registers_none(monkeypatch):
    from frontends.torch.ranks import pinning

    monkeypatch.delitem(pinning.REGISTERED, D)
    assert all(map(same_bits, as_late_as_can_be(), expected()))


def test_an_engine_that_is_collected_after_its_device_was_hidden_makes_its_parameters_whole():
    """As garbage of a test may be: the device is found by name."""
    engine = wrap(make().to(D), lr=1e-2, stage=3, offload_param="cpu", param_persistence_threshold=0)
    engine.backward(engine(batch(0).to(D)).pow(2).mean())
    engine.step()
    model = engine.module
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated, "_available", False)
        assert torch.accelerator.current_accelerator() is None
        del engine
        gc.collect()
        whole = [p.detach().cpu() for p in model.parameters()]
    assert all(map(same_bits, whole, expected()[1:]))


def test_threads_work_near_the_device_of_the_parameters(monkeypatch):
    from frontends.torch.ranks import device_ranks
    from offload_core.support import processors

    asked = []
    driver = SimpleNamespace(pci_address=asked.append)
    monkeypatch.setattr(device_ranks, "drivers_of", lambda device: [driver] if device.type == D else [])
    monkeypatch.setattr(processors, "_trained_on", set())
    monkeypatch.setattr(processors, "_node_of_device", processors._node_of_device)
    wrap(make(), lr=1e-2)
    wrap(make().to(f"{D}:1"), lr=1e-2, bind_threads=False)
    assert asked == []
    wrap(make().to(f"{D}:1"), lr=1e-2)
    assert set(asked) == {1}


def test_two_threads_that_copy_at_a_time_each_go_on_in_their_own_stream():
    """An object of a stream remembers the stream to go back to; threads share the lanes of a device."""
    device = memory_of(torch.device(simulated.NAME, 0))
    inside, left, streams = threading.Event(), threading.Event(), []

    def other():
        mine = torch.Stream(simulated.NAME)
        torch.accelerator.set_stream(mine)
        with device.to_device_lane(Done()):
            inside.set()
            left.wait()
        streams.append(torch.accelerator.current_stream() == mine)

    before = torch.accelerator.current_stream()
    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    with device.to_device_lane(Done()):
        left.set()
        thread.join()
    assert streams == [True]
    assert torch.accelerator.current_stream() == before


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.states_in_memory  # and where a share of them is, it says
def test_bytes_over_the_link_are_those_of_the_states_on_the_host(share):
    """Two each way for a bf16 parameter whose states are there; of the others the norm's bins and kernels' tables."""
    layers = [torch.nn.Linear(256, 256, bias=False) for _ in range(16)]
    model = torch.nn.Sequential(*layers).to(torch.bfloat16).to(D)
    engine = wrap(model, gradient_clipping=1.0, reduce_bucket_size=256 * 256, device_states_bytes=share)
    x, before = torch.randn(8, 256, dtype=torch.bfloat16).to(D), (0, 0)
    for _ in range(2):
        before = simulated.bytes_copied()
        engine.backward(engine(x).float().pow(2).mean())
        engine.step()
        engine.flush()
    moved = [(now - then) / (16 * 256 * 256) for now, then in zip(simulated.bytes_copied(), before, strict=True)]
    assert moved == pytest.approx([2 * (1 - share)] * 2, abs=0.01)
