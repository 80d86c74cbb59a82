"""The torch front end on a device whose copies take their time: whoever reads, reads finished values."""

import copy
import gc
import importlib.util
import shutil
import subprocess
import sysconfig
import weakref

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from frontends.torch import OffloadedAdamW, gathered_parameters, wrap
from frontends.torch.params.pending import PendingParameter
from frontends.torch.ranks import device_ranks
from offload_core import HostMemoryWarning, StateError
from offload_core.plans.planner import Planner
from offload_core.plans.terms import GRADIENT_SLOTS
from tests.support.slow_torch_device import SlowTorchDevice
from tests.support.torch_models import batch, loss_of, make, on, place, same_bits, step
from tests.support.ways import STAGE_3

OPTIONS = {"lr": 1e-2, "param_dtype": "bfloat16", "reduce_bucket_size": 64}
SIMULATED = "simulated, delays 0"
everywhere = pytest.mark.parametrize("device", ["late", SIMULATED], indirect=True)


@pytest.fixture
def slow(monkeypatch):
    """The device of the process, which a test may hold back or let fail."""
    slow = SlowTorchDevice()
    monkeypatch.setattr(device_ranks, "memory_of", lambda device: slow)
    return slow


def pending(engine):
    return [isinstance(p, PendingParameter) for p in engine.module.parameters()]


def reference(steps, **options):
    """The same run on the host, with everything in place."""
    engine = wrap(make(device="cpu"), **{**OPTIONS, "schedule": "serial", **options})
    reports = [step(engine, seed) for seed in range(steps)]
    return engine, reports


def assert_equal(engine, other):
    with gathered_parameters(engine.parameters()), gathered_parameters(other.parameters()):
        for a, b in zip(engine.parameters(), other.parameters(), strict=True):
            assert same_bits(a, b)
    for a, b in zip(engine.optimizer.state.values(), other.optimizer.state.values(), strict=True):
        assert "exp_avg" in a
        assert float(a["step"]) == float(b["step"])  # Lion's is read there, and not listed
        for name in set(a) & set(b):
            assert same_bits(a[name], b[name]), name


@pytest.mark.draws(1)
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_clipping": 0.05}, {"gradient_accumulation_steps": 2}, {"param_dtype": "float16"}],
    ids=str,
)
@pytest.mark.parametrize(
    "device", ["late", pytest.param(SIMULATED, marks=pytest.mark.slow)], indirect=True
)  # test_devices.py has settings like these
@pytest.mark.parametrize("schedule", ["overlap", "serial"])
def test_twelve_steps_equal_those_in_place(device, monkeypatch, options, schedule):
    engine = wrap(make(), **{**OPTIONS, "schedule": schedule, **options})
    reports = [step(engine, seed) for seed in range(12)]
    assert any(pending(engine)) == (schedule == "overlap" and reports[-1].updated)
    monkeypatch.undo()
    expected, expected_reports = reference(12, **options)
    assert repr(reports) == repr(expected_reports)  # a norm may be NaN
    assert_equal(engine, expected)


def test_what_sees_no_values_does_not_wait(slow):
    engine = wrap(make(), **OPTIONS)
    slow.gate.clear()
    step(engine)
    for p in engine.module.parameters():
        assert p.grad is None
        assert (p.shape, p.dtype, p.device, p.numel(), p.requires_grad) is not None
        assert isinstance(p, nn.Parameter)
        assert p in {p}
    engine.zero_grad()
    engine.module.zero_grad()
    assert all(pending(engine))
    slow.gate.set()
    engine.module.state_dict()


def test_a_layer_waits_for_its_own_parameters_only(slow):
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    engine = wrap(model, lr=1e-2, param_dtype="bfloat16", reduce_bucket_size=64)
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    for _ in range(2):  # the order is learnt
        engine.backward(engine(x).sum())
        slow.gate.clear()
        engine.step()
        assert all(pending(engine))
        written = [engine.optimizer.core._pipeline.buckets.of[i][0] for i in range(3)]
        slow.gate.set()
        model[0].weight.sum()
        assert pending(engine) == [False, True, True]
        model[1].weight.sum()
        assert pending(engine) == [False, False, True]
        assert written[0] is not written[1]
    # what the forward needs first is updated first
    order = [bucket.layout.pieces[0].param for bucket in reversed(engine.optimizer.core._pipeline.arrivals.order)]
    assert order == [0, 1, 2]


class Extension(nn.Module):
    """Its forward gives the weight to code that torch shows to nobody, as to an extension in C++."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(16, 16).weight

    def forward(self, x):
        return _Product.apply(x, self.weight)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        with torch._C.DisableTorchFunctionSubclass():
            return x @ weight.detach().T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


UNSEEN = {
    "a script": lambda: torch.jit.script(nn.Linear(16, 16)),
    "a script inside": lambda: nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))),
    "a trace": lambda: torch.jit.trace(nn.Linear(16, 16), torch.ones(1, 16)),
    "an extension": Extension,
}


@pytest.mark.draws(1)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("device", "layer"), [*(("late", layer) for layer in UNSEEN), (SIMULATED, "an extension")], indirect=["device"]
)
def test_a_module_waits_for_parameters_that_its_code_reads_unseen(device, monkeypatch, layer):
    def train():
        torch.manual_seed(0)
        model = nn.Sequential(*(UNSEEN[layer]() for _ in range(3))).to(place())
        engine = wrap(model, **{**OPTIONS, "param_dtype": None})
        for seed in range(4):
            loss = engine(batch(seed)[:, :16]).pow(2).mean()
            engine.backward(loss)
            engine.step()
            yield loss.item()
        engine.flush()

    late = [*train()]
    monkeypatch.undo()
    with on("cpu"):
        assert late == [*train()]


def layer_of_attention():
    return nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)


ATTENTION = {
    "attention": (
        lambda: nn.MultiheadAttention(16, 2, batch_first=True),
        lambda m, x: m(x, x, x, need_weights=False)[0],
    ),
    "a layer": (layer_of_attention, lambda m, x: m(x)),
    "layers": (lambda: nn.TransformerEncoder(layer_of_attention(), 2), lambda m, x: m(x)),
}


@pytest.mark.draws(2)
@everywhere
@pytest.mark.parametrize(("make_model", "call"), ATTENTION.values(), ids=ATTENTION)
def test_attention_in_evaluation_is_the_same_function_while_an_update_runs(device, make_model, call):
    """torch computes it in one function, with bits of its own, if the weights are plain parameters."""
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)).to(place())

    def evaluated(schedule):
        torch.manual_seed(0)
        engine = wrap(make_model().to(place()), **{**OPTIONS, "param_dtype": None, "schedule": schedule})
        found = []
        for _ in range(2):
            engine.train()
            engine.backward(call(engine, x).pow(2).mean())
            engine.step()
            assert any(pending(engine)) == (schedule == "overlap")
            engine.eval()
            with torch.no_grad():
                found.append(call(engine, x))
        return found

    assert all(map(same_bits, evaluated("overlap"), evaluated("serial")))


READER = """
#include <torch/extension.h>

at::Tensor doubled(const at::Tensor &weight) { return weight.detach() * 2; }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("doubled", &doubled); }
"""


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A function in C++ that reads a tensor."""
    from torch.utils import cpp_extension

    folder = tmp_path_factory.mktemp("reader")
    (folder / "reader.cpp").write_text(READER)
    include = [f"-I{path}" for path in [*cpp_extension.include_paths(), sysconfig.get_path("include")]]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    linked = ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
    flags = ["-O0", "-std=c++20", "-shared", "-fPIC", "-DTORCH_EXTENSION_NAME=reader"]
    command = [
        "g++",
        *flags,
        *include,
        str(folder / "reader.cpp"),
        "-o",
        str(folder / "reader.so"),
        *libraries,
        *linked,
    ]
    subprocess.run(command, check=True)
    spec = importlib.util.spec_from_file_location("reader", folder / "reader.so")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.doubled


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_an_extension_in_cpp_reads_finished_values_inside_a_module_and_after_a_flush(slow, reader):
    class Layer(nn.Linear):
        def forward(self, x):
            self.seen = reader(self.weight)
            return super().forward(x)

    engine = wrap(nn.Sequential(Layer(16, 16), Layer(16, 16)), **{**OPTIONS, "param_dtype": None})
    for seed in range(4):
        engine.backward(engine(batch(seed)[:, :16]).pow(2).mean())
        engine.step()
        assert all(pending(engine))
        engine(batch(seed)[:, :16])
        for layer in engine.module:
            assert same_bits(layer.seen, layer.weight * 2)
    engine.backward(engine(batch(9)[:, :16]).pow(2).mean())
    engine.step()
    engine.flush()
    for layer in engine.module:
        outside = reader(layer.weight)
        assert same_bits(outside, layer.weight * 2)


@everywhere
def test_the_optimizer_alone_has_finished_when_step_returns(device):
    model = make().to(torch.bfloat16)
    optimizer = OffloadedAdamW(model.parameters(), lr=1e-2, reduce_bucket_size=64)
    loss_of(model, 0).backward()
    optimizer.step()
    assert optimizer.core._pipeline.updates.finished
    assert not any(isinstance(p, PendingParameter) for p in model.parameters())
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_failed_copy_is_an_error_of_the_next_forward_once(slow):
    engine = wrap(make(), **OPTIONS)
    step(engine)
    engine.flush()
    slow.fails = True
    step(engine, 1)
    with pytest.raises(OSError, match="the copy failed"):
        engine(batch(2, torch.bfloat16))
    slow.fails = False
    assert not any(pending(engine)) or engine.module.state_dict()
    engine.optimizer.zero_grad()
    for p in engine.module.parameters():
        p.grad = torch.ones_like(p)
    assert engine.step().updated  # publishes the master weights again
    states = engine.optimizer.state
    for p in engine.module.parameters():
        assert same_bits(p, states[p]["master"].to(torch.bfloat16))


@pytest.mark.draws(1)
@everywhere
def test_activation_checkpointing_reads_finished_values(device):
    class Checkpointed(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            for layer in self.model:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    plain, checkpointed = wrap(make(), **OPTIONS), wrap(Checkpointed(make()), **OPTIONS)
    for seed in range(4):
        for engine in (plain, checkpointed):
            engine.backward(engine(batch(seed, torch.bfloat16)).float().pow(2).mean())
            assert engine.step().updated
    for a, b in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert same_bits(a, b)


@pytest.mark.draws(1)
@pytest.mark.parametrize(
    ("device", "how"),
    [
        ("late", "the engine"),
        ("late", "the model"),
        ("late", "a layer"),
        ("late", "a function"),
        (SIMULATED, "a layer"),
    ],
    indirect=["device"],
)
def test_compiled_models_do_not_compile_again_and_see_finished_values(device, monkeypatch, how):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    model = make()
    if how == "the model":
        engine = forward = wrap(torch.compile(model, backend=counter), **OPTIONS)
    elif how == "a layer":
        model[0] = torch.compile(model[0], backend=counter)
        engine = forward = wrap(model, **OPTIONS)
    else:
        engine = wrap(model, **OPTIONS)
        forward = torch.compile(engine if how == "the engine" else lambda x: engine(x), backend=counter)
    frames = []
    for seed in range(5):
        engine.backward(forward(batch(seed, torch.bfloat16)).float().pow(2).mean())
        assert engine.step().updated
        frames.append(counter.frame_count)
    assert frames[1] == frames[-1] > 0
    monkeypatch.undo()
    expected, _ = reference(5)
    for a, b in zip(engine.parameters(), expected.parameters(), strict=True):
        assert same_bits(a, b)


@pytest.mark.draws(1)
@everywhere
def test_compiled_code_outside_of_modules_reads_finished_values(device, monkeypatch):
    """It is compiled once while a parameter is pending, and once for good: from then on steps wait."""
    monkeypatch.setattr("frontends.torch.params.pending.compiled_code_reads", False)
    counter = torch._dynamo.testing.CompileCounter()
    read = torch.compile(lambda weight: weight * 1, fullgraph=True, backend=counter)
    engine = wrap(make(), **{**OPTIONS, "param_dtype": None})
    for seed in range(6):
        step(engine, seed)
        got = read(engine.module[0].weight)
        assert same_bits(got, engine.module[0].weight)
    assert counter.frame_count == 2


def test_an_engine_can_be_dropped_or_closed_while_an_update_runs(slow):
    engine = wrap(make(), **OPTIONS)
    model = engine.module
    slow.delay = 0.02
    step(engine)
    engine.close()
    assert not any(isinstance(p, PendingParameter) for p in model.parameters())
    assert all(p.isfinite().all() for p in model.parameters())
    engine = wrap(model, **OPTIONS)
    step(engine)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    assert all(p.isfinite().all() for p in model.parameters())
    assert not any(isinstance(p, PendingParameter) for p in model.parameters())


EARLY = {**OPTIONS, "update_in_backward": True}
TENTATIVE = {**EARLY, "gradient_clipping": 1e3}
at_once_everywhere = pytest.mark.parametrize(
    ("device", "more"),
    [(device, more) for device in ("host", "late", SIMULATED) for more in ({}, STAGE_3)],
    indirect=["device"],
    ids=lambda value: value if isinstance(value, str) else f"stage {value.get('stage', 2)}",
)
"""Also where parameters are written in place, which can be done at once only."""
KEPT, USED, NOT_SENT = "sent early, gradient landed", "sent early, gradient used", "current, gradient landed"


def emit(engine, seed=0):
    """A backward, and the time that the host needs to emit its buckets; their states."""
    engine.backward(loss_of(engine, seed))
    engine.optimizer.core._pipeline.buckets.run(lambda: None)
    buckets = engine.optimizer.core._pipeline.buckets.all
    return {f"{bucket.publication.state.value}, gradient {bucket.gradient.state.value}" for bucket in buckets}


@pytest.mark.draws(6)
@pytest.mark.parametrize(
    ("options", "state"),
    [
        ({}, USED),
        ({"gradient_accumulation_steps": 2}, USED),
        ({"gradient_clipping": 1e3}, KEPT),
        ({"gradient_clipping": 1e3, "gradient_accumulation_steps": 2}, KEPT),
        ({"gradient_clipping": 0.1}, None),  # some steps are
        ({"param_dtype": "float16"}, None),  # some overflow
        ({"param_dtype": "float32"}, USED),
        ({"state_format": "8bit"}, USED),
        ({"optimizer": "lion", "master_dtype": "bfloat16"}, USED),
    ],
    ids=str,
)
@at_once_everywhere
def test_updating_in_backward_gives_the_same_bits(device, monkeypatch, options, state, more):
    options = {**more, **options}
    engine = wrap(make(), **{**EARLY, **options})
    terms = engine.optimizer.core._pipeline.buckets.terms
    if terms.examines and (terms.direct or more):
        state = NOT_SENT
    reports, seen = [], set()
    for seed in range(12):
        states = emit(engine, seed)
        if state:
            boundary = (seed + 1) % engine.offload_config.gradient_accumulation_steps == 0
            assert states == ({state} if boundary else {NOT_SENT})
        seen |= states
        reports.append(engine.step())
    assert state == NOT_SENT or {KEPT, USED} & seen
    monkeypatch.undo()
    expected, expected_reports = reference(12, **options)
    masters = [[bucket.master for bucket in each.optimizer.core._pipeline.buckets.all] for each in (engine, expected)]
    assert masters[0] == masters[1] or not (terms.direct or more), "a master weight of its own takes memory"
    assert repr(reports) == repr(expected_reports)  # a norm may be NaN
    if options.get("gradient_clipping") == 0.1:
        assert 1.0 in (coefficients := {report.clip_coefficient for report in reports})
        assert len(coefficients) > 1
    assert_equal(engine, expected)


@pytest.mark.states_on_host
@pytest.mark.draws(1)
@everywhere
@pytest.mark.parametrize("more", [{}, STAGE_3], ids=["stage 2", "stage 3"])
def test_gradients_take_the_memory_of_few_buckets_on_the_host(device, more):
    engine = wrap(make(), **EARLY, **more)
    buckets = engine.optimizer.core._pipeline.buckets.all
    assert len(buckets) > GRADIENT_SLOTS
    for seed in range(3):
        step(engine, seed)
        report = engine.memory_report()
        assert report.host["gradients on the host"] == GRADIENT_SLOTS * max(w.layout.shard_numel for w in buckets) * 2
        assert report.host_bytes == report.planned_host_bytes


@pytest.mark.draws(1)
@pytest.mark.parametrize("more", [{}, STAGE_3], ids=["stage 2", "stage 3"])
def test_gradients_on_the_cpu_are_those_of_one_bucket_at_a_time_as_planned(more):
    """On one rank they are autograd's own memory, which is free as soon as the update has read it. A bucket has two
    layers; in stage 3 each layer has one of its own."""

    def gradients(layers, **fields):
        """The most layers' gradients that are there at a time, and the planned number."""
        engine = wrap(
            nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(layers))),
            **{**OPTIONS, "reduce_bucket_size": 2 * 32 * 32, **more, **fields},
        )
        alive, seen = [], []

        def arrived(gradient):
            alive.append(StorageWeakRef(gradient.untyped_storage()))
            seen.append(sum(gradient.nbytes for ref in alive if not ref.expired()))

        for param in engine.module.parameters():
            param.register_hook(arrived)
        for seed in range(3):
            step(engine, seed)
        planned = Planner(engine.optimizer.core._pipeline.buckets.terms).plan(engine.optimizer.core.params)
        [row] = [row for row in planned.rows if row.what == "gradients"]
        return max(seen) // (2 * 32 * 32), row.n_bytes // (2 * 32 * 32)

    for layers in (4, 16):
        assert gradients(layers)[0] == layers
        assert gradients(layers, update_in_backward=True) == ((1, 1) if more else (2, 2))


@pytest.mark.states_on_host
@pytest.mark.draws(1)
@everywhere
def test_gradients_that_nobody_announced_wait_for_the_step_in_memory_that_was_not_planned(device):
    engine, reference = wrap(make(), **EARLY), wrap(make(), **{**OPTIONS, "schedule": "serial"})
    with pytest.warns(HostMemoryWarning, match="not announced"):
        loss_of(engine, 0).backward()
    loss_of(reference, 0).backward()
    for each in (engine, reference):
        each.step()
        step(each, 1)
    assert_equal(engine, reference)
    assert engine.memory_report().host_bytes > engine.memory_report().planned_host_bytes


@pytest.mark.draws(1)
@everywhere
def test_what_was_emitted_tentatively_is_read_and_discarded_as_if_it_were_not(device):
    engine = wrap(make(), **TENTATIVE)
    for act in (lambda: engine.module.state_dict(), engine.zero_grad, engine.optimizer.state_dict):
        before = [p.detach().clone() for p in engine.parameters()]
        assert emit(engine) == {KEPT}
        assert all(pending(engine))
        act()
        assert all(same_bits(p, old) for p, old in zip(engine.parameters(), before, strict=True))
        if act != engine.zero_grad:
            engine.step()
            assert not any(same_bits(p, old) for p, old in zip(engine.parameters(), before, strict=True))


def gradient_again(engine):
    engine.backward(loss := loss_of(engine, 0), retain_graph=True)
    loss.backward()


def read_by_hand(engine):
    engine.backward(loss_of(engine, 0))
    with gathered_parameters(engine.module.parameters()):
        engine.module[0].weight.sum()


def forward_again(engine):
    engine.backward(loss_of(engine, 0))
    engine(batch(0, torch.bfloat16))


@pytest.mark.draws(3)
@at_once_everywhere
@pytest.mark.parametrize("act", [gradient_again, read_by_hand, forward_again], ids=lambda act: act.__name__)
def test_nothing_reads_a_parameter_between_its_update_and_its_step(device, more, act):
    engine, reference = wrap(make(), **EARLY, **more), wrap(make(), **OPTIONS, **more)
    refused = "modified by an inplace operation|was changed in place|its gradient has been used"
    with pytest.raises((RuntimeError, StateError), match=refused):
        act(engine)
    engine.step()
    step(reference)
    for each in (engine, reference):
        step(each, 1)
    assert_equal(engine, reference)


@pytest.mark.draws(2)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.filterwarnings("ignore:.*wait on the host for step:offload_core.HostMemoryWarning")
@at_once_everywhere
def test_a_backward_that_records_a_graph_and_runs_in_a_block_that_gathers_has_the_same_bits(device, more):
    """The graph would read what was updated, and the block looks for changes."""
    engines = [wrap(make(), **options, **more) for options in (EARLY, OPTIONS)]
    for engine in engines:
        engine.backward(loss_of(engine, 0), create_graph=True)
        engine.step()
        with gathered_parameters(engine.module.parameters()):
            engine.backward(loss_of(engine, 1))
        engine.step()
    assert_equal(*engines)


@everywhere
def test_autograd_does_not_read_what_was_written_under_it_tentatively(device):
    engine = wrap(make(), **TENTATIVE)
    loss = loss_of(engine, 0)
    engine.backward(loss, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Twice(nn.Module):
    """A layer that is used twice, each time in a checkpoint; ``detached``: first without a gradient of its own."""

    def __init__(self, *, use_reentrant, detached=False):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8, bias=False)
        self.use_reentrant, self.detached = use_reentrant, detached

    def forward(self, x):
        x = x.requires_grad_()
        return self.use(self.use(x, detached=self.detached).relu(), detached=False)

    def use(self, x, *, detached):
        act = (lambda x: nn.functional.linear(x, self.layer.weight.detach())) if detached else self.layer
        return checkpoint(act, x, use_reentrant=self.use_reentrant)


@pytest.mark.draws(5)
@at_once_everywhere
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("detached", [True, False])
def test_a_layer_that_is_used_again_after_its_update_is_refused_or_reads_its_parameters_before_it(
    device, more, use_reentrant, detached
):
    """Reentrant checkpoints bring a gradient each. One without a gradient of the layer runs it after its update; in
    stage 3 the module around it has kept the parameter whole, as it was."""
    exact = bool(more) if detached else not use_reentrant
    engines = [
        wrap(Twice(use_reentrant=use_reentrant, detached=detached).to(place()), **options, **more)
        for options in (EARLY, OPTIONS)
    ]
    for seed in range(3):
        for engine in engines:
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(place())
            loss = engine(x).float().pow(2).mean()
            if not exact and engine is engines[0]:
                with pytest.raises(StateError, match="its gradient has been used, for update_in_backward=True"):
                    engine.backward(loss)
                return
            engine.backward(loss)
            assert engine.step().updated
    assert_equal(*engines)


@everywhere
def test_a_layer_that_is_checkpointed_twice_reads_its_parameters_before_the_step(device):
    """Reentrant checkpoints bring a gradient each, and run the layer again in between."""

    engines = [
        wrap(Twice(use_reentrant=True).to(place()), **options)
        for options in (TENTATIVE, {**OPTIONS, "schedule": "serial"})
    ]
    for seed in range(3):
        for engine in engines:
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(place())
            engine.backward(engine(x).float().pow(2).mean())
            assert engine.step().updated
    assert_equal(*engines)


@pytest.mark.draws(1)
@everywhere
def test_parameters_whose_readers_cannot_be_made_to_wait_are_not_emitted(device):
    class Mine(nn.Parameter):
        pass

    model = make()
    next(model.parameters()).__class__ = Mine
    assert emit(wrap(model, **TENTATIVE)) == {NOT_SENT}
    assert emit(wrap(torch.compile(make(), backend="eager"), **TENTATIVE)) == {NOT_SENT}


@everywhere
def test_a_change_from_outside_before_the_backward_is_part_of_what_is_emitted(device):
    model = nn.Sequential(nn.Conv2d(3, 8, 3)).to(place(), memory_format=torch.channels_last)
    engines = [
        wrap(copy.deepcopy(model), **options) for options in (TENTATIVE, EARLY, {**OPTIONS, "schedule": "serial"})
    ]
    for engine in engines:
        for seed in range(3):
            with torch.no_grad():
                engine.module[0].weight.copy_(torch.full((8, 3, 3, 3), 0.1 * seed))
            x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(seed)).to(place())
            engine.backward(engine(x).float().pow(2).mean())
            engine.optimizer.core._pipeline.buckets.run(lambda: None)
            assert engine.step().updated
    assert_equal(engines[0], engines[2])
    assert_equal(engines[1], engines[2])


@pytest.mark.draws(2)
@at_once_everywhere
def test_what_was_used_in_backward_cannot_be_discarded_or_joined(device, more):
    engine = wrap(make(), **EARLY, **more)
    engine.backward(loss_of(engine, 0))
    with pytest.raises(StateError, match="its gradient has been used, for update_in_backward=True"):
        engine.zero_grad()
    with pytest.raises(StateError, match="its gradient has been used"):
        engine.backward(loss_of(engine, 1))
    engine.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(StateError, match="hyperparameters"):
        engine.step()
    engine.optimizer.param_groups[0]["lr"] = OPTIONS["lr"]
    assert engine.step().updated


@pytest.mark.draws(2)
@at_once_everywhere
def test_close_between_a_backward_and_its_step_leaves_each_parameter_before_the_update_or_after_it(device, more):
    stepped, closed = (wrap(make(), **EARLY, **more) for _ in range(2))
    with gathered_parameters(closed.module.parameters()):
        before = [p.detach().clone() for p in closed.module.parameters()]
    for engine in (stepped, closed):
        engine.backward(loss_of(engine, 0))
    stepped.step()
    stepped.close()
    closed.close()
    assert not closed.optimizer.is_open
    params = [*zip(closed.module.parameters(), before, stepped.module.parameters(), strict=True)]
    assert all(torch.equal(p, old) or torch.equal(p, new) for p, old, new in params)
    assert any(torch.equal(p, new) for p, _, new in params)
    assert all(p.grad is None for p in closed.module.parameters())
    again = wrap(closed.module, **OPTIONS)
    again.backward(loss_of(again, 1))
    assert again.step().updated


@pytest.mark.draws(1)
@pytest.mark.parametrize("device", ["late", "host", SIMULATED], indirect=True)
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_delayed_parameters_are_a_step_behind_until_they_are_flushed(device, param_dtype):
    """Against a loop by hand: gradients of the parameters one step old, from the warm-up on."""
    dtype = getattr(torch, param_dtype)
    engine = wrap(make(), **{**OPTIONS, "param_dtype": param_dtype}, schedule="delayed", delay_warmup_steps=3)
    masters, seen = make(), make().to(dtype)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=OPTIONS["lr"], fused=True)
    for seed in range(8):
        step(engine, seed)
        before = [p.detach().clone() for p in masters.parameters()]
        loss_of(seen, seed).backward()
        for master, p in zip(masters.parameters(), seen.parameters(), strict=True):
            master.grad = p.grad.float()
            p.grad = None
        optimizer.step()
        with torch.no_grad():
            now = before if seed >= 3 else list(masters.parameters())
            for p, value in zip(seen.parameters(), now, strict=True):
                p.copy_(value)
        for ours, theirs in zip(engine.module.parameters(), seen.parameters(), strict=True):
            assert same_bits(ours, theirs)
    saved = engine.optimizer.state_dict()  # consistent: flushed
    for i, (ours, master) in enumerate(zip(engine.module.parameters(), masters.parameters(), strict=True)):
        assert same_bits(saved["state"][i]["master"], master)
        assert same_bits(ours, master.to(dtype))
    resumed = wrap(copy.deepcopy(engine.module), **{**OPTIONS, "param_dtype": param_dtype}, schedule="delayed",
                   delay_warmup_steps=3)  # fmt: skip
    resumed.optimizer.load_state_dict(copy.deepcopy(saved))
    for seed in range(8, 11):
        for either in (engine, resumed):
            step(either, seed)
    for a, b in zip(engine.parameters(), resumed.parameters(), strict=True):
        assert same_bits(a, b)


class Two(nn.Module):
    """Two parameters in one bucket, of which a loss uses one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used = nn.Parameter(torch.randn(16))
        self.other = nn.Parameter(torch.randn(16))
        self.to(place())

    def forward(self, x):
        return (self.used * x).sum()


def write(engine):
    with torch.no_grad():
        engine.module.used.mul_(0.5)


def write_to_the_other(engine):
    with torch.no_grad():
        engine.module.other.mul_(0.5)


def replace_memory(engine):
    engine.module.used.data = engine.module.used.data * 0.5


def change_lr(engine):
    engine.optimizer.param_groups[0]["lr"] = 0.5


def load_weights(engine):
    engine.module.load_state_dict({name: 2 * value for name, value in engine.module.state_dict().items()})


def load_states(engine):
    engine.optimizer.load_state_dict(copy.deepcopy(engine.optimizer.state_dict()))


@pytest.mark.draws(5)
@everywhere
@pytest.mark.parametrize(
    "change",
    [write, write_to_the_other, replace_memory, change_lr, load_weights, load_states],
    ids=lambda c: c.__name__,
)
@pytest.mark.parametrize("sent", ["nothing was", "all was, tentatively"])
def test_changes_before_the_step_count_where_no_gradient_was_used_yet(device, change, sent):
    clipping = None if sent == "nothing was" else 1e3
    fields = {"lr": 0.1, "reduce_bucket_size": 64, "gradient_clipping": clipping}
    engines = [wrap(Two(), **fields, update_in_backward=early) for early in (False, True)]
    for engine in engines:
        for number in range(4):
            x = torch.arange(16.0, device=place()) / 16
            engine.backward(engine(x) if clipping is None else engine(x) + engine.module.other.square().sum())
            engine.optimizer.core._pipeline.buckets.run(lambda: None)
            if number == 2:
                change(engine)
            assert engine.step().updated
    assert_equal(*engines)
