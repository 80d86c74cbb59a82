"""Every wait of the torch front end is needed, and whatever else keeps streams in order: an event, a reference that
keeps memory until a copy has ended, pinned memory. Where one is taken out, a scenario on the simulated device fails.

The mutants are found in the sources. The device's streams act in turn and threads of tasks are played by one, so a
scenario sees the same in every run. Each is played twice: all streams as late as can be, and the computing one ahead.
"""

import copy
import faulthandler
import functools
import gc
import os
import tempfile
import threading
import warnings
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import frontends.torch.training.components as parts_module
from frontends.torch import OffloadedAdamW, gathered_parameters, init, wrap
from frontends.torch.params.pending import PendingParameter
from frontends.torch.ranks import pinning
from frontends.torch.ranks.device import AcceleratorDevice
from frontends.torch.training import device_memory
from offload_core.checkpoint import saving
from offload_core.device.host_ranks import HostRanks
from offload_core.native import kernels
from offload_core.testing.thread_ranks import run_ranks
from tests import sampling
from tests.support import one_process_group, simulated
from tests.support.device_memory import allocated_before
from tests.support.one_thread import Threads
from tests.support.simulated import collectives
from tests.support.torch_models import batch, make, same_bits
from tests.support.wait_mutants import DROPPED, Search, by_name, modules_of, mutants_of

pytestmark = [
    pytest.mark.skipif((missing := simulated.why_not()) is not None, reason=missing or ""),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]
D = simulated.NAME
OPTIONS = {"lr": 1e-2, "param_dtype": "bfloat16", "reduce_bucket_size": 64}


STAGE_3 = {"stage": 3, "param_persistence_threshold": 0}
STREAMED = {**STAGE_3, "offload_param": "cpu"}


def loss_on(model, seed):
    """Of a batch that is on the model's device at once."""
    param = next(model.parameters())
    with torch._C.DisableTorchFunctionSubclass():  # no read
        device, dtype = param.device, param.dtype
    return model(batch(seed, dtype).to(device)).float().pow(2).mean()


def two_steps(engine):
    for seed in range(2):
        engine.backward(loss_on(engine, seed))
        engine.step()
    return engine


RANK = threading.local()
"""Of a rank that is a thread: its collectives, and its device: autograd has a thread for each device."""


def here():
    return torch.device(D, getattr(RANK, "number", 0))


def on_device(**fields):
    return wrap(make().to(here()), **{**OPTIONS, **fields})


@functools.cache
def expected():
    """The parameters and the states after two steps in place, on the host."""
    engine = two_steps(wrap(make(), **{**OPTIONS, "schedule": "serial"}))
    return [p.detach().clone() for p in engine.parameters()], [
        engine.optimizer.state[p]["exp_avg"].clone() for p in engine.parameters()
    ]


def assert_parameters(params):
    for got, want in zip(params, expected()[0], strict=True):
        assert same_bits(got.detach().cpu(), want)


def assert_states(states):
    for got, want in zip(states, expected()[1], strict=True):
        assert same_bits(got["exp_avg"], want)


def a_forward():
    engine = two_steps(on_device())
    assert all(isinstance(p, PendingParameter) for p in engine.parameters())
    x = batch(0, torch.bfloat16).to(D)
    got = engine(x)
    assert not any(isinstance(p, PendingParameter) for p in engine.parameters())
    assert same_bits(got.cpu(), engine(x).cpu())
    assert_parameters(engine.parameters())


def a_forward_that_torch_does_not_see():
    """Its layers are TorchScript: only that the module is called says that its parameters are read."""
    scripted = nn.Sequential(*(torch.jit.script(nn.Linear(32, 32)) for _ in range(2))).to(D, torch.bfloat16)
    engine = wrap(scripted, **OPTIONS)
    x = batch(0, torch.bfloat16).to(D)
    engine.backward(engine(x).float().pow(2).mean())
    engine.step()
    got = engine(x)
    engine.flush()
    assert same_bits(got.cpu(), engine(x).cpu())


def a_copy():
    engine = two_steps(on_device())
    assert_parameters([copy.deepcopy(p) for p in engine.module.parameters()])


def states():
    for read in (
        lambda state: [state[p] for p in state],
        lambda state: [state.get(p) for p in state],
        lambda state: list(dict(state.items()).values()),
        lambda state: list(state.values()),
    ):
        engine = two_steps(on_device())
        assert_states(read(engine.optimizer.state))


def states_of_delayed_parameters():
    """They are level with the states that are saved, and with those that were there before others are loaded."""
    saved = two_steps(on_device(schedule="serial")).optimizer.state_dict()
    for act in (
        lambda optimizer: optimizer.state_dict(),
        lambda optimizer: optimizer.load_state_dict(copy.deepcopy(saved)),
        lambda optimizer: optimizer.flush(),
        None,
    ):
        engine = two_steps(on_device(schedule="delayed", delay_warmup_steps=1))
        act(engine.optimizer) if act else engine.flush()
        assert_parameters(engine.parameters())


def states_that_are_given_to_delayed_parameters():
    """Parameters are level with the master weights, which stay, before the next forward."""
    masters = []
    for level in (True, False):
        engine = two_steps(on_device(schedule="delayed", delay_warmup_steps=1))
        if level:
            engine.flush()
        state = engine.optimizer.state
        for p in engine.parameters():
            ones = torch.ones_like(state[p]["exp_avg"])
            state[p] = {"step": torch.tensor(2.0), "exp_avg": ones, "exp_avg_sq": ones}
        engine.backward(loss_on(engine, 2))
        engine.step()
        engine.flush()
        masters.append([state[p]["master"].clone() for p in engine.parameters()])
    for got, want in zip(*masters, strict=True):
        assert same_bits(got, want)


def delayed_parameters_after_a_step_that_was_skipped():
    fields = {"schedule": "delayed", "delay_warmup_steps": 1, "skip_nonfinite": True}
    engine = two_steps(on_device(**fields))
    engine.backward(loss_on(engine, 0) * torch.inf)
    assert engine.step().skipped == "non-finite"
    assert_parameters(engine.parameters())


class LateThread:
    """Begins when somebody waits for its end."""

    def __init__(self, target, name):
        self._left = [target]

    def start(self):
        pass

    def is_alive(self):
        return bool(self._left)

    def join(self, timeout=None):
        while self._left:
            self._left.pop()()


LATE = SimpleNamespace(**{**vars(threading), "Thread": LateThread})


def checkpoints():
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(saving, "threading", LATE):
        engine = two_steps(on_device())
        path, checkpoints = engine.save_checkpoint(folder, wait=False), engine.optimizer.checkpoints
        engine.close()
        complete = path.is_dir()
        checkpoints.wait()
        assert complete
        other = on_device()
        other.load_checkpoint(folder)
        assert_parameters(other.parameters())
        assert_states([other.optimizer.state[p] for p in other.parameters()])
        path = other.save_checkpoint(f"{folder}/other", wait=False)
        other.wait_for_checkpoint()
        assert path.is_dir()
        path = other.save_checkpoint(f"{folder}/released", wait=False)
        other.release()
        assert path.is_dir()
        grown = on_device()
        path, saving_it = grown.save_checkpoint(f"{folder}/grown", wait=False), grown.optimizer.checkpoints
        bias = grown.module[2].bias
        bias.data = torch.cat([bias.data, bias.data])
        grown.optimizer.follow_sizes()
        complete = path.is_dir()
        saving_it.wait()
        assert complete


def an_export():
    with tempfile.TemporaryDirectory() as folder:
        two_steps(on_device(schedule="delayed", delay_warmup_steps=1)).export_safetensors(folder)
        weights = load_file(f"{folder}/model.safetensors")
        assert_parameters([weights[name] for name, _ in make().named_parameters()])
    engine = two_steps(on_device(schedule="delayed", delay_warmup_steps=1))
    assert_parameters([tensor for _, tensor in engine.named_weights()])


def a_model_that_trainer_saves():
    """Its weights are level with the states that are saved beside them."""
    from tests.support.hugging_face import on_engine, states_of  # Trainer takes seconds to import

    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, HF_HUB_OFFLINE="1"):
        trainer = on_engine(folder, {"schedule": "delayed", "delay_warmup_steps": 1}, max_steps=3, save_steps=3)
        weights = load_file(f"{folder}/checkpoint-3/model.safetensors")
    for name, states in states_of(trainer).items():
        assert same_bits(weights[name], states["master"]), name


def an_engine_that_is_closed_or_dropped():
    for fields in ({}, {"schedule": "delayed", "delay_warmup_steps": 1}):
        engine = two_steps(on_device(**fields))
        params = list(engine.module.parameters())
        engine.close()
        assert_parameters(params)
    params = list(two_steps(on_device()).module.parameters())
    assert not any(isinstance(p, PendingParameter) for p in params)
    assert_parameters(params)


def dies(act):
    """True if a forked child that runs ``act`` dies or raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, which it does not need
        warnings.simplefilter("ignore", RuntimeWarning)  # JAX's, where an earlier test has imported it
        child = os.fork()
    if child == 0:
        faulthandler.disable()
        torch.set_num_threads(1)  # others are the parent's
        try:
            act()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1] != 0


def memory_of_an_engine_that_ends():
    """Its copies have ended before it is given back to the system."""
    for close in (False, True):
        held = [on_device(**STREAMED)]
        held[0].backward(loss_on(held[0], 0))
        held[0].step()
        held[0](batch(0, torch.bfloat16).to(D))

        def end(held=held, close=close):
            if close:
                held[0].close()
            held.clear()
            gc.collect()
            torch.accelerator.synchronize(0)

        assert not dies(end)
        held.clear()


def memory_of_a_shard_that_joins_its_master():
    """Copies from the place that it had have ended before that is given back to the system."""
    model = make().to(D)
    model[0].requires_grad_(False)
    engine = wrap(model, **OPTIONS, **STREAMED)
    model[0].requires_grad_(True)
    engine.backward(loss_on(engine, 0))

    def join():
        engine.optimizer.components.register_unfrozen(engine.optimizer.param_groups)
        torch.accelerator.synchronize(0)

    assert not dies(join)


def copies_that_the_host_does_not_wait_for():
    frozen = {**STREAMED, "frozen": True}
    for fields in ({}, {"reduce_bucket_size": 10_000}, {"torchs_own_pinned_memory": True}, STREAMED, frozen):
        fields = dict(fields)
        model = make().to(here())
        model[0].requires_grad_(not fields.pop("frozen", False))
        with mock.patch.dict(pinning.REGISTERED, clear=fields.pop("torchs_own_pinned_memory", False)):
            engine = wrap(model, **{**OPTIONS, **fields})
        x = batch(0, torch.bfloat16).to(D)
        before = simulated.copies_waited_for()
        engine.backward(engine(x).float().pow(2).mean())
        engine.step()
        engine(x)
        assert simulated.copies_waited_for() == before


def gradients_that_leave_late():
    """At most two buckets stay on the device while they leave it."""
    layers = [nn.Linear(64, 64, bias=False) for _ in range(12)]
    engine = wrap(nn.Sequential(*layers).to(D), lr=1e-2, reduce_bucket_size=64 * 64)
    x = torch.ones(1, 64, device=D)
    before = allocated_before()
    engine.backward(engine(x).mean())
    assert torch.accelerator.memory_allocated() - before <= 6 * 64 * 64 * 4


def parameters_in_shards():
    for fields in (STAGE_3, STREAMED):
        engine = two_steps(on_device(**fields))
        with gathered_parameters(engine.module.parameters()):
            assert_parameters(engine.module.parameters())


def parameters_in_shards_on_the_host():
    engine = two_steps(wrap(make(), **OPTIONS, **STREAMED))
    with gathered_parameters(engine.module.parameters()):
        assert_parameters(engine.module.parameters())


def parameters_that_were_built_in_shards():
    model = make().to(D)
    init(model, **STREAMED, reduce_bucket_size=64)
    filled = [torch.full((64, 64), torch.nan, device=D) for _ in range(4)]  # reused by what is gathered
    del filled
    with gathered_parameters(model.parameters()):
        for got, want in zip(model.parameters(), make().parameters(), strict=True):
            assert same_bits(got.detach().cpu(), want)


def an_update_that_fails_in_shards():
    """Its error is raised once, and training goes on."""
    engine = on_device(**STREAMED)
    engine.backward(loss_on(engine, 0))
    update, failures = kernels.update, iter([OSError("as asked")])

    def fail_once(*args, **kwargs):
        for failure in failures:
            raise failure
        update(*args, **kwargs)

    with mock.patch.object(kernels, "update", fail_once):
        engine.step()
        with pytest.raises(OSError, match="as asked"):
            loss_on(engine, 1)
    engine.optimizer.zero_grad()
    two_steps(engine)
    engine.flush()


def matrices_that_the_device_computes_with():
    """The host waits for results alone. All matrices have one size, so that memory that is free too early is taken."""

    def after_a_step(device):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))).to(device)
        engine = wrap(model, optimizer="muon", muon_params=["weight"], **OPTIONS)
        x = batch(0, torch.bfloat16).to(device)
        before = simulated.copies_waited_for()
        engine.backward(engine(x).float().pow(2).mean())
        engine.step()
        engine.flush()
        assert simulated.copies_waited_for() == before
        return [p.detach().cpu() for p in engine.parameters()]

    for got, want in zip(after_a_step(here()), after_a_step("cpu"), strict=True):
        assert same_bits(got, want)


def a_forward_that_fails_in_shards():
    engine = two_steps(on_device(**STREAMED))
    with pytest.raises(RuntimeError):
        engine(batch(0, torch.bfloat16)[:, 1:].to(D))
    assert engine.optimizer.sharding.live.numel == 0


def parameters_of_a_class_of_their_own():
    class Mine(nn.Parameter):
        pass

    model = make().to(D)
    for p in model.parameters():
        p.__class__ = Mine
    two_steps(wrap(model, **OPTIONS))
    with torch._C.DisableTorchFunctionSubclass():
        assert_parameters(model.parameters())


def partly_frozen(device, **fields):
    """An engine after two steps, of a model with frozen parameters and a buffer."""
    model = make().to(device)
    model[2].requires_grad_(False)
    model.register_buffer("shift", torch.arange(16.0, device=device))
    return two_steps(wrap(model, **{**OPTIONS, **fields}))


@functools.cache
def partly_frozen_on_the_host():
    return [*map(torch.clone, partly_frozen("cpu", schedule="serial").module.state_dict().values())]


def assert_as_on_the_host(tensors):
    for got, want in zip(tensors, partly_frozen_on_the_host(), strict=True):
        assert same_bits(got.detach().cpu(), want)


@mock.patch.object(device_memory, "_CHUNK", 200)
def a_model_that_was_released():
    for fields in ({}, STREAMED):
        engine, other = partly_frozen(D, **fields), torch.Stream(D)
        engine.flush()
        for _ in range(2):  # at once again: copies are on their way
            with other:
                read = engine.module.shift + 0
            before = simulated.copies_waited_for()
            engine.release()
            assert simulated.copies_waited_for() == before
            other.synchronize()
            assert same_bits(read.cpu(), partly_frozen_on_the_host()[0])
            assert_as_on_the_host([tensor for _, tensor in engine.named_weights()])
            before = simulated.copies_waited_for()
            engine.restore()
            assert simulated.copies_waited_for() == before
        assert same_bits(
            (engine.module.shift + 0).cpu(), partly_frozen_on_the_host()[0]
        )  # a buffer has no hook to wait in
        if not fields:
            assert same_bits(engine.module[2].weight.clone().cpu(), partly_frozen_on_the_host()[3])
        x = batch(0, torch.bfloat16).to(D)
        got = engine(x)
        engine.flush()
        assert same_bits(got.cpu(), engine(x).cpu())
        with gathered_parameters(engine.module.parameters()):
            assert_as_on_the_host(engine.module.state_dict().values())


def memory_of_released_models_that_end():
    """Copies of what comes back have ended before its memory on the host is given back to the system."""
    for close, trains in ((False, True), (True, True), (False, False), (True, False)):
        held = [partly_frozen(D) if trains else wrap(make().to(D, torch.bfloat16).requires_grad_(False))]
        tensors = [*held[0].module.state_dict(keep_vars=True).values()]
        expected = [tensor.detach().cpu().clone() for tensor in tensors]
        held[0].release()
        held[0].restore()

        def end(held=held, close=close, tensors=tensors, expected=expected):
            if close:
                held[0].close()
            held.clear()
            gc.collect()
            assert all(same_bits(tensor.detach().cpu(), want) for tensor, want in zip(tensors, expected, strict=True))

        assert not dies(end)
        held.clear()


@contextmanager
def placed_on_a_mesh():
    """An engine after two steps, whose parameters FSDP2 has placed on a mesh of this process."""
    collectives.register()
    with one_process_group.alone(collectives.BACKEND):
        model = fully_shard(make().to(D, torch.bfloat16), mesh=DeviceMesh(D, [0]))
        yield two_steps(wrap(model, **OPTIONS))


def placed_parameters_that_their_own_methods_read():
    with placed_on_a_mesh() as engine, torch.no_grad():
        got = [p.to_local().cpu() for p in engine.parameters()]
        engine.flush()
        assert all(same_bits(a, p.to_local().cpu()) for a, p in zip(got, engine.parameters(), strict=True))


def a_local_tensor_that_is_replaced():
    with placed_on_a_mesh() as engine:
        for p in engine.parameters():
            p._local_tensor = torch.zeros(p.shape, dtype=p.dtype, device=D)
        engine.flush()
        assert all((p.to_local().cpu() == 0).all() for p in engine.parameters())


def the_optimizer_alone():
    model = make().to(D, torch.bfloat16)
    optimizer = OffloadedAdamW(model.parameters(), lr=1e-2, reduce_bucket_size=64)
    loss_on(model, 0).backward()
    optimizer.step()
    assert optimizer.core._pipeline.updates.finished
    assert not any(isinstance(p, PendingParameter) for p in model.parameters())


def on_ranks(body):
    def of_rank(rank):
        RANK.collectives, RANK.number = rank, rank.rank
        body()

    def device_for(device, group, config):
        return HostRanks(AcceleratorDevice(device), RANK.collectives)

    original, parts_module.device_for = parts_module.device_for, device_for
    try:
        run_ranks(2, of_rank)
    finally:
        parts_module.device_for = original


def bytes_sent():
    def body():
        engine = two_steps(on_device())
        sent = engine.sent_bytes
        engine.flush()
        assert sent == engine.sent_bytes > 0

    on_ranks(body)


def whole_states_of_delayed_parameters():
    """Parameters are level with the states that are given away; one rank's ``state_dict`` would see to that."""

    def body():
        engine = two_steps(on_device(schedule="delayed", delay_warmup_steps=1))
        engine.optimizer.torch_state_dict()
        assert_parameters(engine.parameters())

    on_ranks(body)


def parameters_that_were_emitted_and_discarded():
    def body():
        engine = on_device(update_in_backward=True, gradient_clipping=1e3)
        before = [p.detach().clone() for p in engine.parameters()]
        engine.backward(loss_on(engine, 0))
        engine.optimizer.core._pipeline.buckets.run(lambda: None)
        engine.optimizer.zero_grad()
        for p, old in zip(engine.parameters(), before, strict=True):
            assert same_bits(p, old)

    on_ranks(body)


def by_blocks(engine, n=3):
    torch.manual_seed(3)
    data = [torch.randn(16, 64).to(D) for _ in range(n)]
    return engine.accumulate(data, lambda output, _: output.float().pow(2).mean())


def of_blocks(**fields):
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), *(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)), nn.Linear(64, 8)]
    model = nn.Sequential(*layers).to(D)
    return wrap(model, **OPTIONS, gradient_accumulation_steps=3, layerwise=True, **fields)


def micro_batches_whose_inputs_wait_on_the_host():
    """Their gradients are those of micro-batches that wait on the device, also behind a call that broke off."""
    expected_, engine = of_blocks(), of_blocks(host_activation_memory=1 << 17)
    by_blocks(expected_)
    for _ in range(2):
        by_blocks(engine)
        for param, theirs in zip(engine.module.parameters(), expected_.module.parameters(), strict=True):
            assert same_bits(engine.optimizer.whole_gradient(param), expected_.optimizer.whole_gradient(theirs))
        engine.optimizer.zero_grad()
        failing = engine.module[2].register_forward_pre_hook(mock.Mock(side_effect=[None, None, OSError("as asked")]))
        with pytest.raises(OSError, match="as asked"):
            by_blocks(engine)
        failing.remove()


def copies_of_inputs_that_the_host_does_not_wait_for():
    """Inputs of blocks leave and come back without a wait of the host, from and to pinned memory."""
    engine = of_blocks(host_activation_memory=1 << 17)
    by_blocks(engine)
    engine.optimizer.zero_grad()
    before = simulated.copies_waited_for()
    data = [torch.randn(16, 64).to(D) for _ in range(3)]
    waited = simulated.copies_waited_for() - before
    engine.accumulate(data, lambda output, _: output.float().pow(2).mean())
    assert simulated.copies_waited_for() - before == waited


def states_on_the_device():
    """They are updated, read, written and released there."""
    engine = two_steps(on_device(offload_optimizer=None))
    assert_parameters([copy.deepcopy(p) for p in engine.module.parameters()])
    assert_states([engine.optimizer.state[p] for p in engine.parameters()])
    engine.release()
    assert_states([engine.optimizer.state[p] for p in engine.parameters()])
    engine.restore()
    saved = engine.optimizer.state_dict()
    engine.optimizer.load_state_dict(saved)
    assert_states([engine.optimizer.state[p] for p in engine.parameters()])
    clipped = [two_steps(on_device(gradient_clipping=1e-3, **more)) for more in ({}, {"offload_optimizer": None})]
    for here, there in zip(*(engine.parameters() for engine in clipped), strict=True):
        assert same_bits(here.detach().cpu(), there.detach().cpu())


def updates_on_the_device_that_the_host_does_not_wait_for():
    waited = []
    for fields in ({}, {"offload_optimizer": None, "gradient_clipping": 1e-3}):
        engine = two_steps(on_device(**fields))
        engine.flush()
        before = simulated.copies_waited_for()
        two_steps(engine)
        engine.flush()
        waited.append(simulated.copies_waited_for() - before)
    assert waited[0] == waited[1], "inputs alone are waited for"


SCENARIOS = [
    a_forward,
    copies_that_the_host_does_not_wait_for,
    gradients_that_leave_late,
    an_engine_that_is_closed_or_dropped,
    a_forward_that_torch_does_not_see,
    a_copy,
    states,
    states_of_delayed_parameters,
    states_that_are_given_to_delayed_parameters,
    delayed_parameters_after_a_step_that_was_skipped,
    checkpoints,
    memory_of_an_engine_that_ends,
    memory_of_a_shard_that_joins_its_master,
    parameters_in_shards,
    parameters_in_shards_on_the_host,
    parameters_that_were_built_in_shards,
    an_update_that_fails_in_shards,
    matrices_that_the_device_computes_with,
    a_forward_that_fails_in_shards,
    an_export,
    parameters_of_a_class_of_their_own,
    a_model_that_was_released,
    memory_of_released_models_that_end,
    placed_parameters_that_their_own_methods_read,
    a_local_tensor_that_is_replaced,
    the_optimizer_alone,
    bytes_sent,
    whole_states_of_delayed_parameters,
    parameters_that_were_emitted_and_discarded,
    micro_batches_whose_inputs_wait_on_the_host,
    copies_of_inputs_that_the_host_does_not_wait_for,
    states_on_the_device,
    updates_on_the_device_that_the_host_does_not_wait_for,
    a_model_that_trainer_saves,
]
"""A mutant is shown to them in this order: scenarios that notice much, or take little time, come first."""
ELSEWHERE = {
    "integrations.zero_files.export",  # writes files, test_deepspeed_runs.py
    "integrations.verl",  # needs verl, test_verl.py
    "ranks.device_ranks",  # of processes, test_simulated_ranks.py
    "ranks.header_line",  # sockets between processes, test_own_groups.py
    "ranks.private_group",  # likewise
}
"""Modules whose waits are not of this test."""
FOUND = by_name(
    mutant
    for module in modules_of("frontends/torch")
    if module.removeprefix("frontends.torch.") not in ELSEWHERE
    for mutant in mutants_of(module)
)
ALL_MUTANTS = {name.removeprefix("frontends.torch."): mutant for name, mutant in FOUND.items()}
UNNOTICED = {
    "engine.Engine._recover: self.optimizer.sharding.recover()": "each hook lets go of its own parameters; this "
    "releases those gathered ahead, which the next forward would",
    "training.grad_hooks.GradHooks.discard: self._registration.flush()": "test_device_failures.py needs it",
    "training.device_memory.DeviceMemory._await_others: await_values(tensor)": "test_several_engines.py needs it",
    "training.device_memory.DeviceMemory.before_backward: await_values(tensor)": "test_release.py needs it",
    "engine.Engine.restore: self.flush()": "test_compiled_blocks.py needs it",
    "integrations.trainer.OffloadTrainer._heads_kept: engine.optimizer.sharding.recover()": "test_trl.py needs it",
    "training.device_memory.DeviceMemory.release: event.wait()": "the device is waited for next; this raises a copy's "
    "error, test_release.py",
    "training.device_memory.DeviceMemory.await_values: self._registration.await_values(tensor)": "a read between two "
    "lines of restore() needs it",
    "training.registration.Registration.await_values: self._wait(param)": "likewise",
    "training.steps.Steps._end_broken_step: self._core.finish()": "tests/laws/test_interrupts.py needs it",
    "params.pending.await_for_compiled_code: wait(tensor)": "test_compiled_blocks.py needs it",
    "ranks.device.HostTorchDevice.to_device_lane: after.order()": "no exchange between devices is the host's own",
    "ranks.device.HostTorchDevice.to_device: after.order()": "on the host a mark is reached at once, and the caller's "
    "thread gathers",
    "stage3.construction.InitShards._gathered: self.device.gather(bucket, shard, whole, after, what).wait()": "on one "
    "rank it copies from memory that is not pinned, which blocks",
    "ranks.device.AcceleratorDevice.to_device: copies of lane.event(copies)": "the model has the parameters, and their "
    "memory is freed in the order of a stream that waited",
    "ranks.device.AcceleratorDevice.to_device: copies of lane.event(copies), number 2": "likewise",
    "ranks.device.AcceleratorDevice.through: moved of lane.event(moved)": "the next copy to the device, which would "
    "take the memory, comes as late as can be",
    "layerwise.waiting.WaitingTensors._free_left: waiting.copied.wait()": "the lane to the host has waited for all "
    "copies but the last two",
    "layerwise.waiting.WaitingTensors._bring: self._device.mark()": "copies to the device come as late as can be",
    "layerwise.waiting.WaitingTensors._leave: None of lane.event(None)": "nothing is kept: what waits has the tensor",
    "layerwise.waiting.WaitingTensors._bring: None of lane.event(None)": "likewise",
    "layerwise.waiting.HostSlots.borrow: self._device.synchronize()": "test_layerwise_shapes.py needs it",
    "ranks.queue.TorchQueue.to_device: self.mark((memory, host))": "its callers keep both until they have waited",
    "ranks.queue.TorchQueue.to_host: _bytes(host).copy_(memory.view(torch.uint8), non_blocking=True)": "it is awaited",
    "ranks.queue.TorchQueue.to_device: memory.view(torch.uint8).copy_(_bytes(host), non_blocking=True)": "likewise",
}
"""Mutants that no scenario notices, and why."""


ENDS = {
    "ranks.device.AcceleratorDevice.synchronize: stream.synchronize()",
    "stage3.runs._abandon: live.device.synchronize()",
    "stage3.parameters.PartitionedParameters.join_master: self.live.device.synchronize()",
}
"""Without these the process dies: only a scenario plays them whose end is in a child."""


@pytest.fixture(autouse=True)
def late(monkeypatch, accelerator):
    expected()
    Threads().play(monkeypatch)


def played(scenario, ahead):
    with simulated.in_turn(ahead=ahead):
        scenario()
        gc.collect()


PLAYED = {
    f"{scenario.__name__}{', computing ahead' * ahead}": functools.partial(played, scenario, ahead)
    for scenario in SCENARIOS
    for ahead in (False, True)
}
SEARCH = Search(ALL_MUTANTS, PLAYED)


@pytest.mark.draws(6)
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(name, marks=pytest.mark.integration if name.startswith("a_model_that_trainer") else ())
        for name in PLAYED
    ],
    ids=str,
)
def test_the_sound_front_end_passes(scenario):
    if sampling.whole:
        SEARCH.reached_by(scenario)  # plays it, and mutants need the answer
    else:
        PLAYED[scenario]()


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [name for name in ALL_MUTANTS if name not in UNNOTICED], ids=str)
def test_a_wait_of_the_torch_front_end_that_is_taken_out_is_noticed(mutant):
    assert SEARCH.who_notices(mutant, "memory_of" if mutant in ENDS else ""), "nothing notices it"


@pytest.mark.soak
@pytest.mark.parametrize("mutant", UNNOTICED, ids=str)
def test_what_nothing_notices_is_known(mutant):
    assert SEARCH.who_notices(mutant) is None


def test_no_mutant_was_dropped():
    """A wait that loses its mark would take its mutants along without a word."""
    assert len(ALL_MUTANTS) == 96, DROPPED
    assert {*UNNOTICED} <= {*ALL_MUTANTS}
    assert ENDS.issubset({*ALL_MUTANTS} - {*UNNOTICED})
