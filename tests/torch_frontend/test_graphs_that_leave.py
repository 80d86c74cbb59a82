"""Graphs that leave a module by another way than its output, and functions that torch transforms."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from frontends.torch import gathered_parameters, wrap
from offload_core import StateError
from tests.support.torch_models import place, same_bits
from tests.support.ways import STAGE_3, WAYS

LEFT = []


class Leaves(nn.Module):
    """A head whose loss leaves in a list, a dict, or as an attribute of another module, beside the output."""

    def __init__(self, way):
        super().__init__()
        self.body, self.head, self.gain = nn.Linear(16, 16), nn.Linear(16, 16), nn.Parameter(torch.ones(16))
        self.way, self.aux, self.hidden = way, [], {}

    def forward(self, x):
        h = torch.tanh(self.body(x)) * self.gain
        loss = self.head(h).pow(2).mean()
        if self.way == "a list":
            self.aux.append(loss)
        elif self.way == "a global list":
            LEFT.append(loss)
        elif self.way == "a dict":
            self.hidden["loss"] = {"head": loss}
        elif self.way == "a closure":
            self.later = lambda: loss * 2
        return h.detach() if self.way == "a list" else h

    def left(self):
        return {
            "a list": lambda: self.aux.pop(),
            "a global list": lambda: LEFT.pop(),
            "a dict": lambda: self.hidden.pop("loss")["head"],
            "a closure": lambda: self.later(),
        }[self.way]()


class Model(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.blocks = nn.ModuleList([Leaves(way) for _ in range(2)])
        self.last = nn.Linear(16, 16)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def made(build, *args):
    torch.manual_seed(0)
    return build(*args).to(place())


def inputs(seed):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)).to(place())


def with_torch(model, loss_of, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=model.last.weight.is_cpu)
    for seed in range(steps):
        loss_of(model, inputs(seed)).backward()
        optimizer.step()
        optimizer.zero_grad()


def on_engine(engine, loss_of, steps=3):
    for seed in range(steps):
        engine.backward(loss_of(engine, inputs(seed)))
        engine.step()
    engine.flush()
    return engine


def assert_trained_as_in_torch(ours, theirs):
    with gathered_parameters(ours.parameters()):
        for (name, p), q in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            assert same_bits(p, q[1]), name


@pytest.mark.draws(7)
@pytest.mark.parametrize("way", ["a list", "a global list", "a dict", "a closure"])
@pytest.mark.parametrize("fields", WAYS.values(), ids=WAYS)
def test_a_graph_that_left_its_module_another_way_reads_whole_parameters(fields, way):
    def loss_of(model, x):
        out = model(x).pow(2).mean()
        return out + sum(block.left() for block in model.blocks)

    ours, theirs = made(Model, way), made(Model, way)
    with_torch(theirs, loss_of)
    engine = on_engine(wrap(ours, lr=1e-2, **fields), loss_of)
    assert_trained_as_in_torch(engine.module, theirs)


def test_what_a_hook_of_the_user_catches_is_whole_too():
    def loss_of(model, x):
        caught = []
        with model.blocks[0].head.register_forward_hook(lambda module, args, output: caught.append(output * 1)):
            model(x)
        return caught[0].pow(2).mean()

    ours, theirs = made(Model, "a list"), made(Model, "a list")
    with_torch(theirs, loss_of)
    engine = wrap(ours, lr=1e-2, **WAYS["stage 3, nothing live"])
    on_engine(engine, lambda engine, x: loss_of(engine.module, x))
    assert_trained_as_in_torch(engine.module, theirs)


def test_parameters_of_a_graph_that_left_are_released_after_its_backward():
    engine = wrap(made(Model, "a list"), lr=1e-2, **WAYS["stage 3, nothing live"])
    engine(inputs(0))
    assert engine.optimizer.sharding.live.numel == 0
    engine.backward(sum(block.left() for block in engine.module.blocks))
    assert engine.optimizer.sharding.live.numel == 0


@pytest.mark.parametrize("what", ["parameter", "tensor"])
def test_a_saved_tensor_that_is_changed_in_place_is_an_error_as_in_torch(what):
    engine = wrap(made(Model, "a dict"), lr=1e-2, **STAGE_3)
    x = inputs(0).requires_grad_()
    loss = engine(x).pow(2).mean()
    if what == "tensor":
        with torch.no_grad():
            x.add_(1)
    else:
        [weight] = [p for name, p in engine.module.named_parameters() if name == "last.weight"]
        with gathered_parameters(weight, modifier_rank=0), torch.no_grad():
            weight.add_(1)
    with pytest.raises(RuntimeError, match=f"a {what} of shape .* changed in place after its forward"):
        engine.backward(loss)


def plain():
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))


def functional(model, x):
    with torch.no_grad(), gathered_parameters(model.parameters()):
        params = {name: p.detach() for name, p in model.named_parameters()}
        return grad(lambda params: functional_call(model, params, (x,)).pow(2).sum())(params)["0.weight"]


TRANSFORMS = {
    "vmap": lambda m, x: vmap(m)(x),
    "grad": lambda m, x: grad(lambda v: m(v).pow(2).sum())(x),
    "vjp": lambda m, x: vjp(m, x)[1](x)[0],
    "jacrev": lambda m, x: jacrev(m)(x[0]),
    "jacfwd": lambda m, x: jacfwd(m)(x[0]),
    "jvp": lambda m, x: jvp(m, (x,), (x,))[1],
    "hessian": lambda m, x: hessian(lambda v: m(v).sum())(x[0]),
    "functional_call": lambda m, x: functional_call(m, dict(m.named_parameters()), (x,)),
    "functional_call on gathered ones": functional,
}


@pytest.mark.draws(15)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own, of its rules
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("fields", WAYS.values(), ids=WAYS)
def test_functions_of_torch_func_take_an_engines_model(fields, transform):
    def loss_of(model, x):
        return model(x).pow(2).mean() + transform(model, x).pow(2).mean()

    ours, theirs = made(plain), made(plain)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=theirs[0].weight.is_cpu)
    engine = wrap(ours, lr=1e-2, **fields)
    for seed in range(3):
        engine.backward(loss_of(engine.module, inputs(seed)))
        engine.step()
        loss_of(theirs, inputs(seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.flush()
    assert_trained_as_in_torch(engine.module, theirs)


def test_torch_func_where_gathering_saves_by_hooks_says_what_to_do():
    engine = wrap(made(plain), lr=1e-2, **STAGE_3)
    said = r"torch\.func inside gathered_parameters.*expected torch\.no_grad\(\) around"
    with pytest.raises(StateError, match=said), gathered_parameters(engine.module.parameters()):
        grad(lambda x: functional_call(engine.module, {}, (x,)).sum())(inputs(0))


def test_a_graph_of_gathered_parameters_made_under_no_grad_runs_later():
    engine, theirs = wrap(made(plain), lr=1e-2, **STAGE_3), made(plain)
    params = [*engine.module.parameters()]
    with torch.no_grad(), gathered_parameters(params), torch.enable_grad():
        loss = F.linear(torch.tanh(F.linear(inputs(0), params[0])), params[2]).pow(2).mean()
    engine.backward(loss)
    engine.step()
    twin = nn.ModuleDict({"last": theirs[0], "rest": theirs[2]})
    with_torch(twin, lambda m, x: F.linear(torch.tanh(F.linear(x, m.last.weight)), m.rest.weight).pow(2).mean(), 1)
    assert_trained_as_in_torch(engine.module, theirs)


class Squashes(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16))

    def forward(self, x):
        return torch.tanh(x @ self.weight)  # saves its own output


def test_a_graph_without_a_backward_is_freed_with_its_output():
    engine = wrap(Squashes().to(place()), lr=1e-2, **STAGE_3)
    for keep in (False, True):
        output = engine(inputs(0))
        if keep:
            engine.backward(output.sum(), retain_graph=True)
        gone = weakref.ref(output)
        del output
        assert gone() is None


class ReadsAnothers(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.aux = nn.Linear(16, 16), []

    def forward(self, x):
        h = self.inner(x)
        self.aux.append((h.detach() @ self.inner.weight @ self.inner.weight).pow(2).mean())
        return h

    def left(self):
        return self.aux.pop()


@pytest.mark.draws(2)
@pytest.mark.parametrize("fields", WAYS.values(), ids=WAYS)
def test_a_weight_that_a_forward_reads_of_a_module_inside_it_is_whole_too(fields):
    engine, twin = wrap(made(ReadsAnothers), lr=1e-2, **fields), made(ReadsAnothers)
    for each in (engine, twin):
        each(inputs(0))
    engine.backward(engine.module.left())
    twin.left().backward()
    engine.step()
    torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=twin.inner.weight.is_cpu).step()
    engine.flush()
    assert_trained_as_in_torch(engine.module, twin)


class Around(Squashes):
    def __init__(self, inner):
        super().__init__()
        self.inner = [inner]  # no module of this one's

    def forward(self, x):
        return super().forward(self.inner[0](x))


def test_an_engine_inside_another_notes_what_it_saves_itself():
    inner = wrap(made(ReadsAnothers), lr=1e-2, **STAGE_3)
    outer = wrap(Around(inner).to(place()), lr=1e-2, **STAGE_3)
    outer(inputs(0))
    inner.backward(inner.module.left())
    assert inner.step().updated


def test_hooks_of_the_user_that_end_after_the_module_leave_none_of_ours_behind():
    engine = wrap(made(plain), lr=1e-2, **STAGE_3)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)
    module = engine.module[0]
    module.register_forward_pre_hook(lambda *_: hooks.__enter__())
    module.register_forward_hook(lambda *_: hooks.__exit__())
    engine.backward(engine(inputs(0)).pow(2).mean())
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert engine.step().updated
