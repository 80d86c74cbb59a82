"""``torch.compile`` of a model's blocks: the bits of the model as it is, compiled once, and each block waits alone."""

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn

from frontends.torch import gathered_parameters, wrap
from frontends.torch.pending import PendingParameter
from frontends.torch.ranks import device_ranks
from tests.support import simulated
from tests.support.slow_torch_device import SlowTorchDevice
from tests.support.torch_models import same_bits

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


def everything(engine):
    engine.flush()
    with gathered_parameters(engine.module.parameters()):
        found = [p.detach().cpu().clone() for p in engine.module.parameters()]
    return found + [state[key] for state in engine.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]


@pytest.fixture(autouse=True)
def compiled_anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


STREAMED = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 20}


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
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


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
    release = hold_after_the_first(engine, slow, device)
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


def hold_after_the_first(engine, slow, device):
    """The first bucket that is sent to the device from now on arrives; the next wait for the returned function."""
    memory = engine.optimizer.pipeline.device.memory
    send, releases = memory.to_device, []

    def to_device(*arguments):
        event = send(*arguments)
        if not releases and device == "cpu":
            event.wait()
            slow.gate.clear()
            releases.append(slow.gate.set)
        elif not releases:
            releases.append(simulated.hold(memory._to_device))
        return event

    memory.to_device = to_device
    return lambda: releases[0]()
