"""One rank of a real process group, run by test_torch_ranks.py: SCENARIO RANK WORLD_SIZE FOLDER."""

import os
import signal
import time
from contextlib import nullcontext

import torch
from torch import nn

import frontends.torch.optimizer as optimizer_module
from frontends.torch import init, wrap
from frontends.torch.ranks import own_group
from frontends.torch.ranks.collectives import TorchRanks
from frontends.torch.ranks.device import memory_of
from frontends.torch.ranks.device_ranks import DeviceRanks, device_for
from offload_core import CollectiveError, ConfigError, ParameterError, StateError
from offload_core.ranks import consistency
from tests.support.torch_rank import batch, bits, loss_of, main, make


def against_ddp(rank, world_size):
    """The same run by DistributedDataParallel and fused AdamW."""
    engine = wrap(make(seed=rank), lr=1e-2, reduce_bucket_size=3000)  # rank 0's values are taken
    ddp = nn.parallel.DistributedDataParallel(make())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2, fused=True)
    for seed in range(20):
        engine.backward(loss_of(engine, seed, rank))
        engine.step()
        loss_of(ddp, seed, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"ours": bits(engine.module), "theirs": bits(ddp.module)}


def stages(rank, world_size):
    result = {}
    for stage in (1, 2):
        engine = wrap(make(), lr=1e-2, stage=stage, param_dtype="bfloat16", gradient_clipping=0.05,
                      gradient_accumulation_steps=2, reduce_bucket_size=1000)  # fmt: skip
        norms = []
        for seed in range(6):
            engine.backward(loss_of(engine, seed, rank))
            report = engine.step()
            norms.append(report.grad_norm)
        result[stage] = [bits(engine.module), norms]
    return result


def on_devices(rank, world_size):
    """Buckets exchanged between devices (here the CPU's own tensors) or through host memory: the same bits."""
    result = {}
    for name, device in (("host", device_for), ("device", lambda device, group, config: DeviceRanks(
        memory_of(device), TorchRanks(group), group, native=config.reduction == "native"))):  # fmt: skip
        optimizer_module.device_for = device
        for reduction in ("ordered", "native"):
            engine = wrap(make(), lr=1e-2, param_dtype="bfloat16", gradient_clipping=0.05, reduction=reduction,
                          gradient_accumulation_steps=2, reduce_bucket_size=1000)  # fmt: skip
            norms = []
            for seed in range(6):
                engine.backward(loss_of(engine, seed, rank))
                norms.append(engine.step().grad_norm)
            assert (
                type(engine.optimizer.pipeline.device).__name__ == {"host": "HostRanks", "device": "DeviceRanks"}[name]
            )
            result[f"{name} {reduction}"] = [bits(engine.module), norms, engine.sent_bytes]
    return result


def scripted(rank, world_size):
    """Layers whose code torch does not show, on every schedule; and plain ones."""

    def losses(layer, **options):
        torch.manual_seed(0)
        engine = wrap(nn.Sequential(*(layer(nn.Linear(256, 256)) for _ in range(4))), lr=1e-2, **options)
        found = []
        for seed in range(4):
            generator = torch.Generator().manual_seed(10 * seed + rank)
            loss = engine(torch.randn(4, 256, generator=generator)).pow(2).mean()
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        return found

    schedules = {schedule: losses(torch.jit.script, schedule=schedule) for schedule in ("overlap", "serial")}
    return {**schedules, "plain": losses(lambda layer: layer, schedule="serial")}


def beside_the_compiler(rank, world_size):
    """A frame that could not be compiled leaves the compiler's own evaluation of frames in place."""
    own_group._PATIENCE = float("inf")  # a rank that keeps what an exchange was given would wait for ever

    def uncompilable(weight):
        torch._dynamo.graph_break()
        return weight.sum()

    engine, refused = wrap(make(), lr=1e-2, reduce_bucket_size=1000), 0
    for seed in range(3):
        engine.backward(loss_of(engine, seed, rank))
        engine.step()
        try:
            torch.compile(uncompilable, fullgraph=True, backend="eager")(engine.module[0].weight)
        except torch._dynamo.exc.Unsupported:
            refused += 1
    engine.flush()
    return {"refused": refused, "bits": bits(engine.module)}


def narrow(rank, world_size):
    """Gradients that travel in another element type: sent bytes, and equal to rounding them by hand."""
    result = {}
    for name, options in {"rounded": {}, "travelling": {"communication_dtype": "bfloat16"}}.items():
        engine = wrap(make(), lr=1e-2, **options)
        for seed in range(3):
            if name == "rounded":
                for p in engine.parameters():
                    if seed == 0:
                        p.register_hook(lambda g: g.bfloat16().float())
            engine.backward(loss_of(engine, seed, rank))
            engine.step()
        result[name] = [bits(engine.module), engine.sent_bytes]
    return result


def no_sync(rank, world_size):
    """Reduction deferred to the boundary, against DistributedDataParallel's."""
    steps = 4
    engine = wrap(make(), lr=1e-2, stage=1, gradient_accumulation_steps=steps, reduce_bucket_size=3000)
    ddp = nn.parallel.DistributedDataParallel(make())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2, fused=True)
    sent = []
    for seed in range(3 * steps):
        last = seed % steps == steps - 1
        with nullcontext() if last else engine.no_sync():
            engine.backward(loss_of(engine, seed, rank))
        engine.step()
        sent.append(engine.sent_bytes)
        with nullcontext() if last else ddp.no_sync():
            (loss_of(ddp, seed, rank) / steps).backward()  # a power of two: exact wherever it is done
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return {"ours": bits(engine.module), "theirs": bits(ddp.module), "sent": sent}


def no_sync_in_between(rank, world_size):
    """Gradients deferred on top of others that have left, and deferred ones that are discarded."""
    engine = wrap(make(), lr=1e-2, stage=1, gradient_accumulation_steps=4)
    engine.backward(loss_of(engine, 9, rank))
    with engine.no_sync():
        engine.backward(loss_of(engine, 9, rank))
    engine.optimizer.zero_grad()
    for seed in range(4):
        with engine.no_sync() if seed == 1 else nullcontext():
            engine.backward(loss_of(engine, seed, rank))
        engine.step()

    def gradients(seed, rank):
        model = make()
        loss_of(model, seed, rank).backward()
        return [p.grad for p in model.parameters()]

    by_hand = make()
    g = {(seed, r): gradients(seed, r) for seed in range(4) for r in range(2)}
    for i, p in enumerate(by_hand.parameters()):
        first = (g[0, 0][i] + g[0, 1][i]) / 2
        second = ((g[1, 0][i] + g[2, 0][i]) + (g[1, 1][i] + g[2, 1][i])) / 2
        p.grad = ((first + second) + (g[3, 0][i] + g[3, 1][i]) / 2) / 4
    torch.optim.AdamW(by_hand.parameters(), lr=1e-2, fused=True).step()
    return {"ours": bits(engine.module), "by hand": bits(by_hand)}


def _through(model, seed, layers):
    h = batch(seed, 0)[:, :16]
    for layer in layers:
        h = model[layer](h)
    return h.pow(2).mean()


def unused_on_a_rank(rank, world_size):
    """A layer that only rank 0 uses, in the first micro-step of an update only."""
    result = {}
    for steps, bucket in ((1, 10_000), (2, 10_000), (1, 1), (2, 1)):
        torch.manual_seed(0)
        models = [nn.ModuleList(nn.Linear(16, 16) for _ in range(3)) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        ours, by_hand = models
        engine = wrap(ours, lr=1e-2, gradient_accumulation_steps=steps, reduce_bucket_size=bucket)
        optimizer = torch.optim.AdamW(by_hand.parameters(), lr=1e-2, fused=True)
        for update in range(2):
            total = [torch.zeros_like(p) for p in by_hand.parameters()]
            for micro_step in range(steps):
                seed = 10 * update + micro_step
                used = [(0, 1, 2) if r == 0 and micro_step == 0 else (0, 2) for r in range(world_size)]
                engine.backward(_through(ours, seed, used[rank]))
                engine.step()
                by_hand.zero_grad()
                for layers in used:  # p.grad is summed in rank order; divisions by powers of two are exact
                    (_through(by_hand, seed, layers) / world_size / steps).backward()
                for t, p in zip(total, by_hand.parameters(), strict=True):
                    t += 0 if p.grad is None else p.grad
            for t, p in zip(total, by_hand.parameters(), strict=True):
                p.grad = t
            optimizer.step()
        result[f"{steps} micro-steps, buckets of {bucket}"] = bits(ours) == bits(by_hand)
    return result


def state_dicts(rank, world_size):
    """Each rank saves its part; a new engine goes on with it."""
    engine = wrap(make(), lr=1e-2, param_dtype="bfloat16")
    for seed in range(4):
        engine.backward(loss_of(engine, seed, rank))
        engine.step()
        if seed == 1:
            saved = {"model": {k: v.clone() for k, v in engine.module.state_dict().items()}}
            saved["optimizer"] = {**engine.optimizer.state_dict()}
            saved["optimizer"]["state"] = {
                k: {n: t.clone() for n, t in v.items()} for k, v in saved["optimizer"]["state"].items()
            }
    model = make(seed=9)
    model.to(torch.bfloat16).load_state_dict(saved["model"])
    resumed = wrap(model, lr=1e-2, param_dtype="bfloat16")
    resumed.optimizer.load_state_dict(saved["optimizer"])
    for seed in range(2, 4):
        resumed.backward(loss_of(resumed, seed, rank))
        resumed.step()
    return {"straight": bits(engine.module), "resumed": bits(resumed.module)}


def state_dict_of_one_rank(rank, world_size):
    """Rank 0 alone asks for it, while parameters are still to be gathered; then all go on."""
    engines = [wrap(make(), lr=1e-2, schedule="delayed", delay_warmup_steps=1) for _ in range(2)]
    for seed in range(4):
        for engine in engines:
            engine.backward(loss_of(engine, seed, rank))
            engine.step()
        if rank == 0:
            engines[0].optimizer.state_dict()
    for engine in engines:
        engine.flush()
    return {"asked": bits(engines[0].module), "not asked": bits(engines[1].module)}


class WithUnused(nn.Module):
    """Autograd saves the norm's weight; the last module takes no part."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.unused = nn.Linear(16, 8)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def sent_early_beside_unused(rank, world_size):
    """Buckets that are full wait for one that never is, and are launched when backward has ended."""
    result = {}
    for clipping in (None, 0.05, 1e3):
        for early in (False, True):
            torch.manual_seed(0)
            engine = wrap(WithUnused(), lr=1e-2, update_in_backward=early, gradient_clipping=clipping,
                          param_dtype="bfloat16", reduce_bucket_size=64)  # fmt: skip
            for seed in range(4):
                engine.backward(loss_of(engine, seed, rank))
                engine.step()
            engine.flush()
            result.setdefault(str(clipping), []).append(bits(engine.module))
    return result


def nan(rank, world_size):
    engine = wrap(make(), gradient_clipping=1.0)
    before = bits(engine.module)
    engine.backward(loss_of(engine, 0, rank) * (float("nan") if rank == 1 else 1.0))
    report = engine.step()
    return {"skipped": report.skipped, "unchanged": bits(engine.module) == before}


def failure(engine, act):
    """What a rank sees when another is lost, and whether its parameters are what they were before the step."""
    before = bits(engine.module)
    start = time.monotonic()
    try:
        act()
    except CollectiveError as error:
        return {"error": str(error), "seconds": time.monotonic() - start, "unchanged": bits(engine.module) == before}
    return {"error": None}


def growth(rank, world_size):
    """Of memory, threads and descriptors."""
    from tests.support.held import growth_of

    engine = wrap(nn.Linear(8, 8), param_dtype="bfloat16", reduce_bucket_size=50)
    x = torch.ones(2, 8)

    def step():
        engine.backward(engine(x).sum())
        engine.step()

    return growth_of(step, 600)


def killed(rank, world_size):
    engine = wrap(make(), reduce_bucket_size=1000)
    engine.backward(loss_of(engine, 0, rank))
    engine.step()

    def act():
        loss = loss_of(engine, 1, rank)
        if rank == 1:
            engine.module[0].weight.register_hook(lambda g: os.kill(os.getpid(), signal.SIGKILL))
        engine.backward(loss)
        engine.step()

    return failure(engine, act)


def out_of_batches(rank, world_size):
    engine = wrap(make())

    def act():
        if rank == 1:
            time.sleep(8)
            return
        engine.backward(loss_of(engine, 0, rank))
        engine.step()

    return failure(engine, act)


def differing(rank, world_size):
    model = make() if rank == 0 else nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 63))
    try:
        wrap(model)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None}


def killed_in_gather(rank, world_size):
    """A rank that goes while parameters are gathered: what is half done is not to be had any more."""
    engine = wrap(make(), reduce_bucket_size=1000, param_dtype="bfloat16")
    engine.backward(loss_of(engine, 0, rank))
    engine.step()
    engine.optimizer.state_dict()
    collectives = engine.optimizer.pipeline.device.collectives
    gather = collectives.gather

    def gathering(send, received, what):
        if rank == 1 and "bucket 2" in what:
            os.kill(os.getpid(), signal.SIGKILL)
        gather(send, received, what)

    collectives.gather = gathering
    engine.backward(loss_of(engine, 1, rank))
    said = []
    for act in (lambda: (engine.step(), engine.optimizer.pipeline.finish()), engine.optimizer.state_dict,
                lambda: engine.backward(loss_of(engine, 2, rank)), engine.step):  # fmt: skip
        try:
            act()
        except (CollectiveError, StateError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return {"said": said}


def differing_settings(rank, world_size):
    """What must be the same on every rank, at wrap and at every step."""
    said = {}

    def attempt(name, act):
        try:
            act()
            said[name] = None
        except (ConfigError, ParameterError, StateError) as error:
            said[name] = f"{type(error).__name__}: {error}"

    sizes = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4}
    assert wrap(make(), sizes).offload_config.gradient_accumulation_steps == 3
    attempt("batch", lambda: wrap(make(), {**sizes, "gradient_accumulation_steps": 6}))
    attempt("lr", lambda: wrap(make(), lr=1e-2 if rank == 0 else 1e-4))
    attempt("loss_scale", lambda: wrap(make(), loss_scale=128.0 if rank == 0 else 1))
    attempt("shape", lambda: wrap(nn.Linear(32, 64, bias=False) if rank == 0 else nn.Linear(64, 32, bias=False)))
    channels_last = torch.channels_last if rank else torch.contiguous_format
    attempt("order", lambda: wrap(nn.Conv2d(4, 4, 3, bias=False).to(memory_format=channels_last)))
    attempt("schedule", lambda: wrap(make(), schedule="overlap" if rank == 0 else "delayed"))
    attempt("delay_warmup_steps", lambda: wrap(make(), schedule="delayed", delay_warmup_steps=rank))
    attempt("update_in_backward", lambda: wrap(make(), update_in_backward=rank == 1))
    attempt("stage", lambda: wrap(make(), stage=2 + rank, param_persistence_threshold=100))
    threshold = 100 if rank == 0 else 10**6
    attempt("threshold", lambda: wrap(make(), stage=3, param_persistence_threshold=threshold))

    def build():
        with init(stage=3, param_persistence_threshold=threshold):
            model = make()
        wrap(model, stage=3, param_persistence_threshold=threshold)

    attempt("threshold of init", build)
    for name, of_rank_1 in {"VERSION": "9.9.9", "FORMAT": consistency.FORMAT + 1}.items():
        ours = getattr(consistency, name)
        setattr(consistency, name, of_rank_1 if rank else ours)
        attempt(name, lambda: wrap(make(), lr=1e-2 if rank == 0 else 1e-4))
        setattr(consistency, name, ours)
    may_differ = wrap(make(), pin_memory=rank == 0, num_threads=1 + rank)
    may_differ.backward(loss_of(may_differ, 0, rank))
    assert may_differ.step().updated
    engine = wrap(make(), lr=1e-2)
    before = bits(engine.module)
    engine.backward(loss_of(engine, 0, rank))
    engine.optimizer.param_groups[0]["lr"] = 1e-2 if rank == 0 else 1e-4
    attempt("lr at a step", engine.step)
    engine.optimizer.param_groups[0]["lr"] = 1e-2
    engine.optimizer.zero_grad()
    assert bits(engine.module) == before
    engine.backward(loss_of(engine, 0, rank))
    assert engine.step().updated
    return {"said": said, "bits": bits(engine.module)}


def frozen_and_unfrozen(rank, world_size):
    """Frozen parameters and buffers start alike; one that is unfrozen may have its first gradient on one rank only."""
    model = make(seed=rank)
    model[2].weight.requires_grad_(False)
    model.register_buffer("mine", torch.full((3,), rank))
    model.register_buffer("empty", torch.zeros(0))
    engine = wrap(model, lr=1e-2)
    at_first = bits(engine.module)
    assert model.mine.tolist() == [0, 0, 0]
    engine.backward(loss_of(engine, 0, rank))
    engine.step()
    model[2].weight.requires_grad_(True)
    loss = loss_of(engine, 1, rank)
    inputs = [p for p in model.parameters() if rank == 0 or p is not model[2].weight]
    engine.backward(loss, inputs=inputs)
    engine.step()
    return {"first": at_first, "last": bits(engine.module)}


def others_states(rank, world_size):
    """States of another rank are refused; whole ones, as torch's own AdamW has them, are cut."""
    engine, plain = wrap(make(), lr=1e-2), make()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for seed in range(2):
        g = [torch.autograd.grad(loss_of(plain, seed, r), list(plain.parameters())) for r in range(world_size)]
        for p, a, b in zip(plain.parameters(), *g, strict=True):
            p.grad = (a + b) / 2
        optimizer.step()
        if seed == 0:
            engine.module.load_state_dict(plain.state_dict())
            engine.optimizer.load_state_dict(optimizer.state_dict())
            engine.backward(loss_of(engine, 1, rank))
            engine.step()
    saved = engine.optimizer.state_dict()
    saved["partition"] = {"rank": 1 - rank, "world_size": 2}
    try:
        engine.optimizer.load_state_dict(saved)
        said = None
    except StateError as error:
        said = str(error)
    return {"said": said, "ours": bits(engine.module), "theirs": bits(plain)}


if __name__ == "__main__":
    main(globals())
