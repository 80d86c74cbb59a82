"""``torch.compile`` of blocks, models and functions: bits and graphs are plain torch's, and each block waits alone."""

import copy
import gc
from contextlib import contextmanager, nullcontext
from functools import cache

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from frontends.torch import gathered_parameters, register_external_parameter, wrap
from frontends.torch.params import pending
from frontends.torch.params.managed import managed
from frontends.torch.params.pending import PendingParameter
from frontends.torch.ranks import device_ranks
from offload_core import StateError
from tests.support import simulated
from tests.support.slow_torch_device import SlowTorchDevice
from tests.support.torch_models import assert_all_same, everything, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


ONE_BLOCK = sum(p.numel() for p in Block().parameters())


def blocks(n, device):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(n))).to(device)


def in_place(model, backend):
    for block in model:
        block.compile(backend=backend)


def as_objects(model, backend):
    for i, block in enumerate(model):
        model[i] = torch.compile(block, backend=backend)


def batch(seed, device):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)).to(device)


def step(engine, seed, device):
    engine.backward(engine(batch(seed, device)).float().pow(2).mean())
    assert engine.step().updated


@pytest.fixture(autouse=True)
def compiled_anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


STREAMED = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 20}


@pytest.mark.long("torch.compile")
@pytest.mark.draws(1)
@pytest.mark.parametrize(
    ("compiled", "fields"),
    [(in_place, {"param_dtype": "bfloat16"}), (as_objects, {"gradient_clipping": 0.1}), (in_place, STREAMED)],
    ids=["in place", "as objects", "stage 3"],
)
def test_compiled_blocks_are_compiled_once_and_give_the_bits_of_the_model_as_it_is(compiled, fields, device):
    found = []
    for compile_blocks in (compiled, lambda model, backend: None):
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        model = blocks(3, device)
        compile_blocks(model, counter)
        engine, frames = wrap(model, lr=1e-2, reduce_bucket_size=ONE_BLOCK, **fields), []
        for seed in range(5):
            step(engine, seed, device)
            frames.append(counter.frame_count)
            if device != "cpu":
                assert all(isinstance(p, PendingParameter) for p in model.parameters())
        assert frames[1] == frames[-1]
        found.append(everything(engine))
    assert_all_same(*found)


@pytest.mark.states_on_host
@pytest.mark.draws(2)
@pytest.mark.parametrize("compiled", [in_place, as_objects])
@pytest.mark.parametrize("when", ["before wrap()", "after wrap()"])
def test_a_compiled_block_waits_for_its_own_parameters_at_its_own_boundary(compiled, when, device, monkeypatch):
    """The copies of the second block are held back, and the first block computes."""
    slow = SlowTorchDevice()
    if device == "cpu":
        monkeypatch.setattr(device_ranks, "memory_of", lambda device: slow)
    model = blocks(2, device)
    if when == "before wrap()":
        compiled(model, "eager")
    engine = wrap(model, lr=1e-2, param_dtype="bfloat16", reduce_bucket_size=ONE_BLOCK)
    if when == "after wrap()":
        compiled(model, "eager")
    for seed in range(2):  # the order is learnt
        step(engine, seed, device)
    x = batch(3, device).bfloat16()
    engine.backward(engine(x).float().pow(2).mean())
    release = hold_after_the_first(engine.optimizer.core.device.memory, slow, device)
    assert engine.step().updated
    first = model[0](x)
    if device != "cpu":
        torch.accelerator.current_stream().record_event().synchronize()
    pending = [isinstance(p, PendingParameter) for p in model.parameters()]
    assert pending == [False] * 6 + [True] * 6
    if device == "cpu":
        release()
    second = model[1](first)
    if device != "cpu":
        ended = torch.accelerator.current_stream().record_event()
        assert not ended.query()
        release()
    assert not any(isinstance(p, PendingParameter) for p in model.parameters())
    engine.flush()
    assert same_bits(second, model[1](model[0](x)))


def hold_after_the_first(memory, slow, device, first=1):
    """The first buckets that are sent to the device from now on arrive; the next wait for the returned function."""
    send, releases, events = memory.to_device, [], []

    def to_device(*arguments):
        event = send(*arguments)
        events.append(event)
        if len(events) < first:
            return event
        if not releases and device == "cpu":
            event.wait()
            slow.gate.clear()
            releases.append(slow.gate.set)
        elif not releases:
            releases.append(simulated.hold(memory._to_device))
        return event

    memory.to_device = to_device
    return lambda: releases[0]()


# --- stage 3 ------------------------------------------------------------------------------------------

STAGES = {2: {}, 3: STREAMED}


def blocks_in_place(model, **how):
    for block in model:
        block.compile(**how)
    return model


def blocks_as_objects(model, **how):
    for i, block in enumerate(model):
        model[i] = torch.compile(block, **how)
    return model


def model_in_place(model, **how):
    model.compile(**how)
    return model


def graphs_of(compile_model, device, fields=None, steps=4, backend="aot_eager"):
    """Compile three blocks, train them, evaluate them: the graphs so far after each step and at the end, and what came
    out. ``fields`` of None is plain torch."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    model = compile_model(blocks(3, device), backend=counter, fullgraph=True)
    if fields is None:
        run, optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    else:
        run = wrap(model, lr=1e-2, reduce_bucket_size=ONE_BLOCK, **fields)
    frames = []
    for seed in range(steps):
        if fields is None:
            run(batch(seed, device)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            step(run, seed, device)
        frames.append(counter.frame_count)
    with torch.no_grad():
        seen = [run(batch(9, device)) for _ in range(2)]
    frames.append(counter.frame_count)
    if fields is not None:
        run.close()
    return frames, [*seen, *model.parameters()]


@cache
def plain_graphs(compile_model, backend="aot_eager"):
    """Return the graphs and the tensors of torch's own training on the CPU."""
    return graphs_of(compile_model, "cpu", backend=backend)


@pytest.mark.draws(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("compile_model", [blocks_in_place, blocks_as_objects, model_in_place, torch.compile])
def test_training_compiles_the_graphs_of_plain_torch_and_gives_its_bits(compile_model, stage, device):
    """Also for evaluation, and each is whole (``fullgraph=True``); equal blocks share theirs."""
    expected_frames, expected = plain_graphs(compile_model)
    frames, found = graphs_of(compile_model, device, STAGES[stage])
    assert frames[1] == frames[-2]
    assert all(got <= plain for got, plain in zip(frames, expected_frames, strict=True)), (frames, expected_frames)
    assert_all_same(found, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # inductor's own
@pytest.mark.parametrize("stage", STAGES)
def test_inductor_gives_the_bits_and_the_graphs_of_plain_torch(stage):
    expected_frames, expected = plain_graphs(blocks_in_place, "inductor")
    frames, found = graphs_of(blocks_in_place, "cpu", STAGES[stage], backend="inductor")
    assert frames == expected_frames
    assert_all_same(found, expected)


@pytest.mark.draws(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["engine.compile()", "torch.compile(engine)", "a function around the engine"])
def test_code_that_is_compiled_around_the_engine_compiles_no_more_after_its_second_step(how, stage, device):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    found, frames = [], []
    for compiled in (True, False):
        engine = run = wrap(blocks(3, device), lr=1e-2, reduce_bucket_size=ONE_BLOCK, **STAGES[stage])

        def loss_of(x):
            return run(x).pow(2).mean()  # noqa: B023

        if compiled and how == "engine.compile()":
            engine.compile(fullgraph=True, backend=counter)
        elif compiled and how == "torch.compile(engine)":
            run = torch.compile(engine, backend=counter)
        elif compiled:
            loss_of = torch.compile(loss_of, backend=counter)
        for seed in range(5):
            engine.backward(loss_of(batch(seed, device)))
            assert engine.step().updated
            frames.append(counter.frame_count)
        found.append(everything(engine))
        engine.close()
    assert 0 < frames[1] == frames[-1] <= 3
    assert_all_same(*found)


@pytest.mark.long("torch's compiler")
@pytest.mark.draws(1)
@pytest.mark.parametrize("how", ["blocks", "engine.compile()", "torch.compile(engine)", "a function around the engine"])
def test_compiled_code_finds_what_a_restore_brings_back_and_compiles_no_more(how, device):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    found, frames = [], []
    for releases in (True, False):
        model = blocks(2, device)
        model[1].up.requires_grad_(False)
        if how == "blocks" and releases:
            in_place(model, counter)
        engine = run = wrap(model, lr=1e-2, reduce_bucket_size=ONE_BLOCK)

        def loss_of(x):
            return run(x).pow(2).mean()  # noqa: B023

        if releases and how == "engine.compile()":
            engine.compile(backend=counter)
        elif releases and how == "torch.compile(engine)":
            run = torch.compile(engine, backend=counter)
        elif releases and how == "a function around the engine":
            loss_of = torch.compile(loss_of, backend=counter)
        with nullcontext() if device == "cpu" else simulated.delays(copy=20_000, kernel=1):
            for seed in range(5):
                engine.backward(loss_of(batch(seed, device)))
                engine.step()
                frames.append(counter.frame_count)
                if releases:
                    with engine.released(), pytest.raises(Exception, match="released parameters have no memory"):
                        loss_of(batch(seed, device))
        found.append(everything(engine))
        engine.close()
    assert 0 < frames[1] == frames[-1]
    assert_all_same(*found)


@contextmanager
def whole_while_graphs_run(model):
    """The blocks whose large parameters have memory, each time when a graph runs; and a backend that looks."""
    seen = []

    def look():
        with torch._C.DisableTorchFunctionSubclass():
            large = [[p for p in block.parameters() if p.numel() >= 20] for block in model]
            bytes_of = [{p.untyped_storage().nbytes() > 0 for p in some} for some in large]
        seen.append([i for i, some in enumerate(bytes_of) if some == {True}])
        assert all(len(some) == 1 for some in bytes_of)

    def backend(graph, inputs):
        def run(*arguments):
            look()
            return graph(*arguments)

        return run

    yield seen, backend, look


@pytest.mark.draws(1)
@pytest.mark.parametrize(("unit", "expected"), [("blocks", [[0], [1], [2]]), ("model", [[0, 1, 2]])])
def test_a_unit_is_whole_while_its_graph_and_its_backward_run_and_nothing_else_is(unit, expected, device):
    model = blocks(3, device)
    fields = {**STREAMED, "prefetch_bucket_size": 0, "max_reuse_distance": 0}
    with whole_while_graphs_run(model) as (seen, backend, look):
        for module in model if unit == "blocks" else [model]:
            module.compile(backend=backend, fullgraph=True)
        engine = wrap(model, lr=1e-2, reduce_bucket_size=ONE_BLOCK, **fields)
        for seed in range(3):
            loss = engine(batch(seed, device)).pow(2).mean()
            assert seen == expected
            seen.clear()
            handles = [block.up.weight.register_hook(lambda gradient: look()) for block in model]
            engine.backward(loss)
            whole = expected[::-1] if unit == "blocks" else [[0, 1, 2]] * 3
            assert seen == whole
            seen.clear()
            for handle in handles:
                handle.remove()
            assert engine.step().updated
            assert engine.optimizer.sharding.live.numel == 0


class Two(nn.Module):
    """Two compiled blocks, and what is done between them."""

    def __init__(self, device):
        super().__init__()
        self.first, self.second = blocks_in_place(blocks(2, device), backend="eager", fullgraph=True)
        self.between = lambda x: None

    def forward(self, x):
        x = self.first(x)
        self.between(x)
        return self.second(x)


@pytest.mark.draws(1)
def test_a_unit_waits_only_for_its_own_parameters(device, monkeypatch):
    """The second block is gathered ahead: its copies are held back, and the first block computes."""
    slow = SlowTorchDevice()
    if device == "cpu":
        monkeypatch.setattr(device_ranks, "memory_of", lambda device: slow)
    engine = wrap(Two(device), lr=1e-2, **{**STREAMED, "max_reuse_distance": 0})
    for seed in range(2):  # the order is learnt
        step(engine, seed, device)
    engine.flush()
    live = engine.optimizer.sharding.live
    release = hold_after_the_first(live.device.memory, slow, device, first=3)  # up.weight, up.bias, down.weight
    seen = []

    def first_has_run(x):
        seen.append(live.n_bytes)
        if device != "cpu":
            torch.accelerator.current_stream().record_event().synchronize()
        release()

    engine.module.between = first_has_run
    got = engine(batch(3, device))
    second = engine.module.second
    assert seen == [4 * sum(p.numel() for p in second.parameters() if p.numel() >= 20)]  # it was on its way
    engine.module.between = lambda x: None
    assert same_bits(got, engine(batch(3, device)))


class Breaks(nn.Module):
    """A graph that breaks between two layers, one of which may raise."""

    raises = False

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        y = self.first(x)
        torch._dynamo.graph_break()
        if self.raises:
            raise ValueError("as asked")
        return self.last(y).relu()


class Recomputed(nn.Sequential):
    reentrant = False

    def forward(self, x):
        for block in self:
            x = checkpoint(block, x.requires_grad_() if self.reentrant else x, use_reentrant=self.reentrant)
        return x


class RecomputedReentrantly(Recomputed):
    reentrant = True


class Tied(nn.Module):
    """The last block reads the first one's weight."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), Down()
        self.down.__dict__["up"] = self.up
        register_external_parameter(self.down, self.up.weight)

    def forward(self, x):
        return self.down(self.up(x))


class Down(nn.Linear):
    def __init__(self):
        super().__init__(32, 32)

    def forward(self, x):
        return F.linear(super().forward(x), self.up.weight.T)


class Makes(nn.Linear):
    """Its forward makes a module."""

    def forward(self, x):
        return nn.Sequential(nn.ReLU(), nn.Tanh())(super().forward(x))


WAYS = {
    "modules that are made in forward": (lambda: nn.Sequential(Makes(16, 16), Makes(16, 16)), True),
    "graphs that break": (lambda: nn.Sequential(Breaks(), Breaks()), False),
    "one unit whose graph breaks": (lambda: nn.Sequential(nn.Sequential(Breaks(), Breaks())), False),
    "checkpoints": (lambda: Recomputed(Block(), Block()), True),
    "reentrant checkpoints": (lambda: RecomputedReentrantly(Block(), Block()), True),
    "a weight of another block": (lambda: Holds(Tied()), True),
    "activations on the host": (lambda: nn.Sequential(Block(), Block()), True),
}


class Holds(nn.Sequential):
    """Its blocks are those of the model inside."""

    def __iter__(self):
        return iter(self[0].children())


@pytest.mark.draws(2)
@pytest.mark.parametrize("way", WAYS)
def test_units_give_the_bits_of_the_model_as_it_is(way, device):
    make, fullgraph = WAYS[way]
    found = []
    for compiled in (True, False):
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        torch.manual_seed(0)
        with torch.device(device):
            model, frames = make(), []
        if compiled:
            blocks_in_place(model, backend=counter, fullgraph=fullgraph)
        engine = wrap(model, lr=1e-2, **STREAMED)
        for seed in range(4):
            if way == "graphs that break":
                Breaks.raises = True
                with pytest.raises(ValueError, match="as asked"):
                    engine(batch(seed, device))
                Breaks.raises = False
            with save_on_cpu() if way == "activations on the host" else torch.enable_grad():
                loss = engine(batch(seed, device)).pow(2).mean()
            engine.backward(loss)
            assert engine.optimizer.sharding.live.numel == 0
            assert engine.step().updated
            frames.append(counter.frame_count)
        assert frames[1] == frames[-1]
        found.append(everything(engine))
        engine.close()
    assert_all_same(*found)


@pytest.mark.draws(1)
@pytest.mark.parametrize("stage", STAGES)
def test_a_whole_loss_over_weights_is_one_graph_where_they_are_gathered(stage, device):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    found, frames = [], []
    for compiled in (True, False):
        engine = wrap(blocks(2, device), lr=1e-2, **STAGES[stage])
        params = list(engine.module.parameters())

        def loss_of(x):
            return engine.module(x).pow(2).mean() + sum(p.pow(2).sum() for p in params) / 1e3  # noqa: B023

        if compiled:
            loss_of = torch.compile(loss_of, backend=counter, fullgraph=True)
        for seed in range(4):
            with gathered_parameters(params):
                loss = loss_of(batch(seed, device))
            engine.backward(loss)
            assert engine.step().updated
            frames.append(counter.frame_count)
        found.append(everything(engine))
        engine.close()
    assert frames[1] == frames[-1] <= 2  # the second: parameters that are being updated
    assert_all_same(*found)


@pytest.mark.draws(1)
def test_code_that_is_compiled_waits_for_what_it_reads_and_not_for_another_model(device, monkeypatch):
    """The other model's gradients have been used in its backward: before its step, nobody may wait for it."""
    slow = SlowTorchDevice()
    if device == "cpu":
        monkeypatch.setattr(device_ranks, "memory_of", lambda device: slow)
    other, engine = (wrap(nn.Linear(16, 16).to(device), lr=1e-2, update_in_backward=early) for early in (True, False))
    other.backward(other(batch(0, device)).pow(2).mean())
    other.optimizer.core._pipeline.buckets.run(lambda: None)  # all of it has been sent
    if device == "cpu":
        slow.gate.clear()
        release = slow.gate.set
    else:
        release = simulated.hold(engine.optimizer.core.device.memory._to_device)
    step(engine, 0, device)
    weights = [engine.module.weight, other.module.weight]
    assert all(isinstance(weight, PendingParameter) for weight in weights)
    release()
    read = torch.compile(lambda weights: torch.stack(weights) * 1, backend="eager", fullgraph=True)
    got = read(weights[:1])[0]
    engine.flush()
    assert same_bits(got, weights[0])
    refused = "'weight': its gradient has been used, for update_in_backward=True"
    with pytest.raises(Exception, match=refused):
        read(weights)
    monkeypatch.setattr(pending, "AWAITED", {managed(other.module.weight)})  # none of engines before
    with FakeTensorMode() as mode, pytest.raises(StateError, match=refused):
        pending.await_for_compiled_code(mode.from_tensor(torch.zeros(1)))  # it may be any
    monkeypatch.undo()
    assert other.step().updated


@pytest.mark.draws(1)
def test_a_whole_graph_that_cannot_gather_says_what_to_do(device):
    """Whatever it read would not be there: never zeros, never a fault of memory."""
    engine = wrap(blocks(2, device), lr=1e-2, **STREAMED)
    for call in (lambda x: engine(x), lambda x: engine.module[0](x)):
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"stage 3 .*expected block.compile\(\) or engine.comp"):
            torch.compile(call, backend="eager", fullgraph=True)(batch(0, device))
    weight = engine.module[1].up.weight
    for fullgraph in (True, False):
        with pytest.raises(
            Exception, match=r"parameter '1.up.weight' .* was read outside.*gathered_parameters"
        ) as error:
            torch.compile(lambda: weight * 2, backend="eager", fullgraph=fullgraph)()
        assert isinstance(error.value, (StateError, torch._dynamo.exc.InternalTorchDynamoError))
    block = Tied().to(device)
    block.down._offload_external_parameters.clear()
    block.down.compile(backend="eager", fullgraph=True)
    engine = wrap(block, lr=1e-2, **STREAMED)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"register_external_parameter\(\) for what a block reads"):
        engine(batch(0, device))
    assert engine.optimizer.sharding.live.numel == 0


@pytest.mark.draws(1)
def test_a_compiled_model_outlives_its_engine_and_its_copies_are_plain(device):
    model = blocks_as_objects(blocks(2, device), backend="aot_eager", fullgraph=True)
    engine = wrap(model, lr=1e-2, **STREAMED)
    step(engine, 0, device)
    with gathered_parameters(model.parameters()):
        twin = copy.deepcopy(model)
        seen = [model(batch(1, device))]
    engine.close()
    seen += [model(batch(1, device)), twin(batch(1, device))]
    assert all(same_bits(seen[0], other) for other in seen)
    engine = wrap(model, lr=1e-2, **STREAMED)
    step(engine, 0, device)
    assert engine.optimizer.sharding.live.numel == 0


@pytest.mark.draws(1)
def test_an_engine_that_is_collected_while_other_code_is_compiled_does_not_change_what_that_has_seen(
    device, monkeypatch
):
    """A hook on all modules waits for parameters that are being updated. With the last of them it goes."""
    monkeypatch.setattr(pending, "AWAITED", set())  # none of engines before
    monkeypatch.setattr(device_ranks, "memory_of", lambda device: SlowTorchDevice())
    engines = [wrap(blocks(1, "cpu"), lr=1e-2)]
    step(engines[0], 0, "cpu")
    assert all(isinstance(p, PendingParameter) for p in engines[0].module.parameters())

    def collect():
        engines.clear()
        gc.collect()
        assert not pending.AWAITED

    collect._dynamo_marked_constant = True

    def forward(x):
        x = other(x)
        collect()
        return x

    other = nn.Linear(16, 16).to(device)
    x = batch(1, device)
    assert same_bits(torch.compile(forward, backend="eager", fullgraph=True)(x), other(x))
    pending._watch_modules()
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_an_engine_that_is_collected_while_code_is_compiled_leaves_whole_parameters(device):
    """The thread that compiles makes tensors without values, and garbage is collected anywhere."""
    model = blocks(2, device)
    engine = wrap(model, lr=1e-2, **STREAMED)
    step(engine, 0, device)
    expected = everything(engine)[:12]
    cycle = [engine]
    cycle.append(cycle)
    gc.disable()
    try:
        del engine, cycle
        with FakeTensorMode():
            gc.collect()
    finally:
        gc.enable()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(same_bits(p, e) for p, e in zip(model.parameters(), expected, strict=True))
