"""What ``engine.accumulate()`` refuses, and what an error or an interrupt in the middle of it leaves."""

import gc
import re
import threading

import greenlet
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from frontends.torch import wrap
from frontends.torch.layerwise.sweeps import Sweeps
from offload_core.errors import ConfigError, GradientError, ParameterError, StateError
from tests.support.blocks import Block, Gpt, batches, by_blocks, loop, loss_of, made
from tests.support.torch_models import assert_all_same, everything, place

STAGE_3 = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0}


def engine_of(model=None, n=3, **fields):
    return wrap(made() if model is None else model, lr=1e-2, gradient_accumulation_steps=n, **fields)


class Twice(Gpt):
    def forward(self, x):
        hidden = self.embedding(x)
        for layer in (*self.layers, self.layers[1]):
            hidden, _ = layer(hidden, torch.zeros_like(hidden))
        return self.head(hidden)


class Turned(Gpt):
    """A micro-batch of 8 tokens has its blocks in another order."""

    def forward(self, x):
        hidden = self.embedding(x)
        for layer in reversed(self.layers) if x.shape[1] == 8 else self.layers:
            hidden, _ = layer(hidden, torch.zeros_like(hidden))
        return self.head(hidden)


class Inside(nn.Module):
    """A block that does something with its input first."""

    def __init__(self, act):
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8), act

    def forward(self, x):
        return self.linear(self.act(x))


class Cache:
    """Stands for a cache of keys and values."""


def blocks_of(act, n=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(*(Inside(act) for _ in range(n))), nn.Linear(8, 8))


def squared(output, _):
    return output.pow(2).mean()


def rows(n):
    return [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(n)]


BEFORE = {
    "no blocks": (lambda: engine_of(nn.Linear(8, 8)), {}, rows(3), ParameterError, "no blocks that could be found"),
    "another name": (engine_of, {"blocks": "layer"}, batches(3), ParameterError, "'layer' is no module"),
    "a name of no list": (engine_of, {"blocks": "head"}, batches(3), ParameterError, "is of type Linear"),
    "another's module": (engine_of, {"blocks": [nn.Linear(1, 1)]}, batches(3), ParameterError, "no module of Gpt"),
    "blocks inside others": (
        engine_of,
        {"blocks": ["layers.0", "layers.0.up"]},
        batches(3),
        ParameterError,
        "'layers.0.up' is inside another one",
    ),
    "an empty list": (engine_of, {}, [], ParameterError, "no micro-batches"),
    "a tensor": (engine_of, {}, batches(1)[0], ParameterError, "batches is a Tensor"),
    "a number": (engine_of, {}, [1, 2], ParameterError, "a micro-batch is an int"),
    "different structures": (
        engine_of,
        {},
        [batches(1)[0], {"x": batches(1)[0]}],
        ParameterError,
        "micro-batch 1 is a dict of x, and micro-batch 0 is a tensor",
    ),
    "more than are averaged": (engine_of, {}, batches(4), GradientError, "4 micro-batches since the last update"),
}


@pytest.mark.parametrize("name", BEFORE)
def test_bad_input_is_refused_before_anything_runs(name):
    make, options, data, kind, words = BEFORE[name]
    engine = make()
    ran = []
    for module in engine.module.modules():
        module.register_forward_hook(lambda *_: ran.append(1))
    with pytest.raises(kind, match=re.escape(words)) as caught:
        engine.accumulate(data, loss_of, **options)
    assert "expected" in str(caught.value)
    assert not ran
    with pytest.raises(StateError, match=r"step\(\) without backward\(\)"):
        engine.step()


def test_sums_that_would_be_rounded_need_the_setting(device):
    engine = engine_of(param_dtype="bfloat16")
    if place().type == "cpu":
        by_blocks(engine, batches(3))  # kernels read the sums where they are
        return
    with pytest.raises(ConfigError, match=r"expected wrap\(\.\.\., layerwise=True\)"):
        engine.accumulate(batches(3), loss_of)
    engine.set_gradient_accumulation_steps(1)
    engine.accumulate(batches(1), loss_of)
    assert engine.step().updated


def test_inside_no_sync():
    engine = engine_of(stage=1)
    with (
        engine.optimizer.components.grad_hooks.deferring(),  # one rank has no such block of its own
        pytest.raises(StateError, match=r"accumulate\(\) inside no_sync\(\)"),
    ):
        engine.accumulate(batches(3), loss_of)


def test_around_compiled_code():
    engine = engine_of()
    engine.module._compiled_call_impl = lambda *args: None
    with pytest.raises(ParameterError, match="inside the model, which is compiled"):
        engine.accumulate(batches(3), loss_of)


def fails_at(number, error):
    calls = []

    def loss(output, batch):
        calls.append(1)
        if len(calls) == number:
            raise error
        return loss_of(output, batch)

    return loss


def carried(x):
    CARRIED.append(x.exp())
    return CARRIED[-1]


CARRIED = []
MIDDLE = {
    "a block twice": (lambda: made_of(Twice), batches(3), loss_of, StateError, "calls block 'layers.1' after block"),
    "another order": (lambda: made_of(Turned), batches(3), loss_of, StateError, "micro-batch 1 calls block 'layers.1'"),
    "an error in the third loss": (made, batches(3), None, ValueError, "mine"),
    "two elements": (made, batches(3), lambda output, _: output.flatten()[:2], GradientError, "is of shape (2,)"),
    "no loss": (made, batches(3), None, GradientError, "without a loss"),
    "in place": (
        lambda: blocks_of(lambda x: x.mul_(2)),
        rows(3),
        squared,
        StateError,
        "in place, and would get another",
    ),
    "carried out": (
        lambda: blocks_of(carried),
        rows(3),
        lambda output, _: squared(output, _) + CARRIED.pop().sum(),
        StateError,
        "is used outside of it",
    ),
    "reentrant checkpoints": (
        lambda: Checkpointed(),
        rows(3),
        squared,
        StateError,
        "runs without grad mode",
    ),
    "a cache": (lambda: Caching(), rows(3), squared, ParameterError, "gets a Cache, which it writes to"),
    "blocks that never run": (lambda: Unused(), rows(3), squared, ParameterError, "ran none of the blocks"),
}


def made_of(kind):
    torch.manual_seed(0)
    return kind()


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class Caching(Checkpointed):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x, _ = block(x, 0, mask=Cache())
        return x


class Unused(Checkpointed):
    def forward(self, x):
        return self.first(x)


@pytest.mark.draws(10)
@pytest.mark.parametrize("fields", [{}, STAGE_3, {"update_in_backward": True}], ids=["whole", "stage 3", "in backward"])
@pytest.mark.parametrize("name", MIDDLE)
def test_an_error_in_the_middle_keeps_no_gradient_and_no_thread(name, fields):
    make, data, loss, kind, words = MIDDLE[name]
    engine, threads = engine_of(make(), **fields), threading.active_count()
    before = everything(engine)
    loss = fails_at(3, ValueError("mine")) if kind is ValueError else loss
    with pytest.raises(kind, match=re.escape(words)) as caught:
        engine.accumulate(data, loss)
    assert "expected" in str(caught.value) or kind is ValueError
    del caught
    assert_same_as_before(engine, before, threads)


def assert_same_as_before(engine, before, threads):
    with pytest.raises(StateError, match=r"step\(\) without backward\(\)"):
        engine.step()
    assert_all_same(everything(engine), before)
    assert threading.active_count() == threads
    assert all("forward" not in module.__dict__ for module in engine.module.modules())
    gc.collect()
    lines = [each for each in gc.get_objects() if isinstance(each, greenlet.greenlet) and not each.dead and each.parent]
    assert not lines


class Interrupts:
    """Raises ``KeyboardInterrupt`` at the n-th border that a sweep comes to."""

    def __init__(self, patch):
        self.at, self.came = 0, 0
        for name in ("_go_on", "_backward_of", "_hold", "_leave"):
            patch.setattr(Sweeps, name, self.interrupting(getattr(Sweeps, name)))

    def interrupting(self, method):
        def call(sweeps, *args):
            self.came += 1
            if self.came == self.at:
                raise KeyboardInterrupt
            result = method(sweeps, *args)
            self.came += 1
            if self.came == self.at:
                raise KeyboardInterrupt
            return result

        return call


@pytest.mark.parametrize("fields", [{}, {**STAGE_3, "gradient_clipping": 1.0}], ids=["whole", "stage 3"])
def test_an_interrupt_at_each_border(fields, monkeypatch, drawn):
    interrupts = Interrupts(monkeypatch)
    engine, threads = engine_of(n=2, **fields), threading.active_count()
    other = engine_of(n=2, **fields)
    interrupts.came = 0
    before = everything(engine)
    by_blocks(other, batches(2))
    borders, after = interrupts.came, everything(other)
    assert borders > 60
    for at in drawn(range(1, borders + 1), borders // 10 + 1):
        interrupts.at, interrupts.came = at, 0
        with pytest.raises(KeyboardInterrupt):
            engine.accumulate(batches(2), loss_of)
        assert_same_as_before(engine, before, threads)
    interrupts.at = 0
    by_blocks(engine, batches(2))
    assert_all_same(everything(engine), after)


SENT_EARLY = {"update_in_backward": True, "gradient_clipping": 1e3}


@pytest.mark.draws(2)
@pytest.mark.parametrize("fields", [{}, SENT_EARLY], ids=["after", "sent early"])
def test_an_error_on_a_device_with_tensors_on_the_host(fields, device):
    """Everything waits on the host when it breaks off, and parameters may have been sent for the step that does not
    come; the next step has its bits."""
    fields = {"layerwise": True, "host_activation_memory": 1 << 20, "param_dtype": "bfloat16", **fields}
    one, other = engine_of(**fields), engine_of(**fields)
    for number in range(1, 4):
        with pytest.raises(ValueError, match="mine"):
            other.accumulate(batches(3), fails_at(number, ValueError("mine")))
    before = everything(other)
    broken = breaking(other.module.layers[0].up, after=4)
    with pytest.raises(ValueError, match="mine"):
        other.accumulate(batches(3), loss_of)
    broken.remove()
    assert_all_same(everything(other), before)
    assert loop(one, batches(3))[0] == by_blocks(other, batches(3))[0]
    assert_all_same(everything(other), everything(one))


def breaking(module, after):
    """Have the module raise an error after so many forwards, until the handle's ``remove()``."""
    calls = []

    def hook(*_):
        calls.append(1)
        if len(calls) > after:
            raise ValueError("mine")

    return module.register_forward_pre_hook(hook)


def test_a_step_that_was_begun_in_backward_counts_after_an_error():
    """States were updated already: the step ends there, as after an interrupt."""
    engine = engine_of(n=2, update_in_backward=True, reduce_bucket_size=500)
    broken = breaking(engine.module.layers[0].up, after=2)
    with pytest.raises(ValueError, match="mine"):
        engine.accumulate(batches(2), loss_of)
    assert engine.optimizer.updates == 1
    broken.remove()
    assert by_blocks(engine, batches(2))[1].updated
