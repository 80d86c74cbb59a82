"""Every wait of the torch front end is needed, as in ``test_waits.py``."""

import copy
import functools
import tempfile
import threading

import pytest
import torch
from torch import nn

import frontends.torch.optimizer as optimizer_module
from frontends.torch import OffloadedAdamW, wrap
from frontends.torch.pending import PendingParameter
from frontends.torch.ranks import device_ranks
from offload_core.device.host_ranks import HostRanks
from offload_core.testing.thread_ranks import run_ranks
from tests.support import slow_torch_device
from tests.support.one_thread import Threads
from tests.support.slow_torch_device import SlowTorchDevice, _Copied
from tests.support.torch_models import batch, loss_of, make, same_bits
from tests.support.wait_mutants import Change, assert_noticed, waits_of

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

OPTIONS = {"lr": 1e-2, "param_dtype": "bfloat16", "reduce_bucket_size": 64}


def two_steps(engine):
    for seed in range(2):
        engine.backward(loss_of(engine, seed))
        engine.step()
    return engine


@functools.cache
def expected():
    """The parameters and the states after two steps in place."""
    engine = two_steps(wrap(make(), **{**OPTIONS, "schedule": "serial"}))
    return [p.detach().clone() for p in engine.parameters()], [
        engine.optimizer.state[p]["exp_avg"].clone() for p in engine.parameters()
    ]


def assert_parameters(params):
    for got, want in zip(params, expected()[0], strict=True):
        assert same_bits(got, want)


def assert_states(states):
    for got, want in zip(states, expected()[1], strict=True):
        assert same_bits(got["exp_avg"], want)


def a_forward():
    engine = two_steps(wrap(make(), **OPTIONS))
    assert all(isinstance(p, PendingParameter) for p in engine.parameters())
    x = batch(0, torch.bfloat16)
    got = engine(x)
    assert not any(isinstance(p, PendingParameter) for p in engine.parameters())
    assert same_bits(got, engine(x))
    assert_parameters(engine.parameters())


def a_forward_that_torch_does_not_see():
    """Its layers are TorchScript: only that the module is called says that its parameters are read."""
    scripted = nn.Sequential(*(torch.jit.script(nn.Linear(32, 32)) for _ in range(2))).to(torch.bfloat16)
    engine = wrap(scripted, **OPTIONS)
    x = batch(0, torch.bfloat16)
    engine.backward(engine(x).float().pow(2).mean())
    engine.step()
    got = engine(x)
    engine.flush()
    assert same_bits(got, engine(x))


def a_copy():
    engine = two_steps(wrap(make(), **OPTIONS))
    assert_parameters([copy.deepcopy(p) for p in engine.module.parameters()])


def states():
    for read in (
        lambda state: [state[p] for p in state],
        lambda state: [state.get(p) for p in state],
        lambda state: list(dict(state.items()).values()),
        lambda state: list(state.values()),
    ):
        engine = two_steps(wrap(make(), **OPTIONS))
        assert_states(read(engine.optimizer.state))


def states_of_delayed_parameters():
    """They are level with the states that are saved, and with those that were there before others are loaded."""
    saved = two_steps(wrap(make(), **{**OPTIONS, "schedule": "serial"})).optimizer.state_dict()
    for act in (
        lambda optimizer: optimizer.state_dict(),
        lambda optimizer: optimizer.load_state_dict(copy.deepcopy(saved)),
        lambda optimizer: optimizer.flush(),
    ):
        engine = two_steps(wrap(make(), **OPTIONS, schedule="delayed", delay_warmup_steps=1))
        act(engine.optimizer)
        assert_parameters(engine.parameters())


def states_that_are_given_to_delayed_parameters():
    """Parameters are level with the master weights, which stay, before the next forward."""
    masters = []
    for level in (True, False):
        engine = two_steps(wrap(make(), **OPTIONS, schedule="delayed", delay_warmup_steps=1))
        if level:
            engine.flush()
        state = engine.optimizer.state
        for p in engine.parameters():
            ones = torch.ones_like(state[p]["exp_avg"])
            state[p] = {"step": torch.tensor(2.0), "exp_avg": ones, "exp_avg_sq": ones}
        engine.backward(loss_of(engine, 2))
        engine.step()
        engine.flush()
        masters.append([state[p]["master"].clone() for p in engine.parameters()])
    for got, want in zip(*masters, strict=True):
        assert same_bits(got, want)


def delayed_parameters_after_a_step_that_was_skipped():
    fields = {"schedule": "delayed", "delay_warmup_steps": 1, "skip_nonfinite": True}
    engine = two_steps(wrap(make(), **OPTIONS, **fields))
    engine.backward(loss_of(engine, 0) * torch.inf)
    assert engine.step().skipped == "overflow"
    assert_parameters(engine.parameters())


def checkpoints():
    with tempfile.TemporaryDirectory() as folder:
        engine = two_steps(wrap(make(), **OPTIONS))
        path, checkpoints = engine.save_checkpoint(folder, wait=False), engine.optimizer.checkpoints
        engine.close()
        complete = path.is_dir()
        checkpoints.wait()
        assert complete
        other = wrap(make(), **OPTIONS)
        other.load_checkpoint(folder)
        assert_parameters(other.parameters())
        assert_states([other.optimizer.state[p] for p in other.parameters()])


def an_engine_that_is_closed_or_dropped():
    engine = two_steps(wrap(make(), **OPTIONS))
    params = list(engine.module.parameters())
    engine.close()
    assert_parameters(params)
    params = list(two_steps(wrap(make(), **OPTIONS)).module.parameters())
    assert not any(isinstance(p, PendingParameter) for p in params)
    assert_parameters(params)


def an_engine_that_is_closed_while_its_device_still_writes():
    """Streams are put in order without blocking anyone, as on CUDA: what is freed must be out of use all the same."""
    engine = wrap(make(), **OPTIONS)
    engine.backward(loss_of(engine, 0))
    engine.step()
    engine.backward(loss_of(engine, 1))
    engine.optimizer.pipeline.finish()
    order, _Copied.order = _Copied.order, lambda event: None
    try:
        engine.step()
        engine.close()
    finally:
        _Copied.order = order
    assert_parameters(engine.module.parameters())


def parameters_of_a_class_of_their_own():
    class Mine(nn.Parameter):
        pass

    model = make()
    for p in model.parameters():
        p.__class__ = Mine
    two_steps(wrap(model, **OPTIONS))
    with torch._C.DisableTorchFunctionSubclass():
        assert_parameters(model.parameters())


def the_optimizer_alone():
    model = make().to(torch.bfloat16)
    optimizer = OffloadedAdamW(model.parameters(), lr=1e-2, reduce_bucket_size=64)
    loss_of(model, 0).backward()
    optimizer.step()
    assert optimizer.pipeline.finished
    assert not any(isinstance(p, PendingParameter) for p in model.parameters())


RANK = threading.local()


def on_ranks(body):
    def of_rank(rank):
        RANK.collectives = rank
        body()

    def device_for(device, group, config):
        return HostRanks(SlowTorchDevice(0.0), RANK.collectives)

    original, optimizer_module.device_for = optimizer_module.device_for, device_for
    try:
        run_ranks(2, of_rank, timeout=10)
    finally:
        optimizer_module.device_for = original


def bytes_sent():
    def body():
        engine = two_steps(wrap(make(), **OPTIONS))
        sent = engine.sent_bytes
        engine.optimizer.pipeline.finish()
        assert sent == engine.sent_bytes > 0

    on_ranks(body)


def whole_states_of_delayed_parameters():
    """Parameters are level with the states that are given away; one rank's ``state_dict`` would see to that."""

    def body():
        engine = two_steps(wrap(make(), **OPTIONS, schedule="delayed", delay_warmup_steps=1))
        engine.optimizer.torch_state_dict()
        assert_parameters(engine.parameters())

    on_ranks(body)


def parameters_that_were_emitted_and_discarded():
    def body():
        engine = wrap(make(), **OPTIONS, update_in_backward=True, gradient_clipping=1e3)
        before = [p.detach().clone() for p in engine.parameters()]
        engine.backward(loss_of(engine, 0))
        engine.optimizer.pipeline.buckets.run(lambda: None)
        engine.optimizer.zero_grad()
        for p, old in zip(engine.parameters(), before, strict=True):
            assert same_bits(p, old)

    on_ranks(body)


SCENARIOS = [
    a_forward,
    a_forward_that_torch_does_not_see,
    a_copy,
    states,
    states_of_delayed_parameters,
    states_that_are_given_to_delayed_parameters,
    delayed_parameters_after_a_step_that_was_skipped,
    checkpoints,
    an_engine_that_is_closed_or_dropped,
    an_engine_that_is_closed_while_its_device_still_writes,
    parameters_of_a_class_of_their_own,
    the_optimizer_alone,
    bytes_sent,
    whole_states_of_delayed_parameters,
    parameters_that_were_emitted_and_discarded,
]
MUTANTS = [
    *waits_of("frontends.torch.pending"),
    *waits_of("frontends.torch.state_io"),
    *waits_of("frontends.torch.registration"),
    *waits_of("frontends.torch.intake"),
    # A step that broke off is waited for; test_torch_interrupts.py needs that.
    *(wait for wait in waits_of("frontends.torch.optimizer") if not wait.function.endswith("_end_broken_step")),
    Change("frontends.torch.registration", "_make_readers_wait", "make_pending(", "(lambda *_: None)("),
]


def test_no_mutant_was_dropped():
    """A wait that is renamed, or a module that is moved, would take its mutants along without a word."""
    assert len(MUTANTS) == 24
    assert len(SCENARIOS) == 15


@pytest.fixture(autouse=True)
def late(monkeypatch):
    expected()
    Threads().play(monkeypatch, slow_torch_device)
    monkeypatch.setattr(device_ranks, "memory_of", lambda device: SlowTorchDevice(0.0))


def test_the_sound_front_end_passes():
    for scenario in SCENARIOS:
        scenario()


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_wait_of_the_torch_front_end_that_is_taken_out_is_noticed(mutant):
    assert_noticed(mutant, SCENARIOS)
