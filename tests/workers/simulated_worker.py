"""One rank on a simulated device, run by test_simulated_ranks.py: SCENARIO RANK WORLD_SIZE FOLDER."""

import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import offload_core.step.worker
from frontends.torch import init, wrap
from frontends.torch.ranks import device_ranks
from frontends.torch.ranks.own_group import timeout_of
from tests.support import experts, simulated
from tests.support.one_thread import Threads
from tests.support.simulated import collectives
from tests.support.torch_rank import batch, bits, main, make, whole_bits
from tests.support.wait_mutants import Change, NoticedBy, by_name, made, mutants_of

STREAMED = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0}
SAVED = ("stage 2", "streamed")
SETTINGS = {
    "stage 1": {"stage": 1},
    "stage 2": {"gradient_clipping": 0.05},
    "native": {"reduction": "native", "param_dtype": "bfloat16"},
    "delayed": {"schedule": "delayed", "delay_warmup_steps": 1},
    "serial": {"schedule": "serial", "gradient_clipping": 0.05},
    "early": {"update_in_backward": True, "param_dtype": "bfloat16"},
    "fp16": {"param_dtype": "float16", "loss_scale": "dynamic", "initial_loss_scale": 2.0**20},
    "stage 3": {"stage": 3, "param_persistence_threshold": 0},
    "streamed": {**STREAMED, "param_dtype": "bfloat16"},
    "streamed, clipped": {**STREAMED, "gradient_clipping": 0.05, "schedule": "delayed", "delay_warmup_steps": 1},
}


def train(device, rank, **fields):
    engine = wrap(make().to(device), lr=1e-2, reduce_bucket_size=1000, gradient_accumulation_steps=2, **fields)
    norms = []
    for seed in range(6):
        engine.backward(engine(batch(seed, rank).to(device)).float().pow(2).mean())
        norms.append(engine.step().grad_norm)
    engine.flush()
    found = [whole_bits(engine), norms, type(engine.optimizer.pipeline.device).__name__]
    engine.close()
    return found


def everywhere(rank, world_size):
    device, result = torch.device(simulated.NAME, rank), {}
    torch.accelerator.set_device_index(device)
    for name, fields in SETTINGS.items():
        result[name] = [train("cpu", rank, **fields)]
        for seed in range(2):
            with simulated.delays(seed=seed + 10 * rank, kernel=200, copy=2000):
                result[name].append(train(device, rank, **fields))
    return result


def mixtures(rank, world_size):
    """Experts as modules of their own: in stage 2 on the host, and in leaf modules on devices of which one is late."""
    device, runs, result = torch.device(simulated.NAME, rank), [("cpu", {"stage": 2}, 0)], []
    torch.accelerator.set_device_index(device)
    runs += [(device, {**STREAMED, "max_reuse_distance": 0, "leaf_modules": ["Experts"]}, seed) for seed in (1, 2)]
    for where, fields, seed in runs:
        with simulated.delays(seed=seed + 10 * rank, kernel=200 * rank, copy=2000 * (1 - rank)):
            engine = wrap(experts.deep("layer").to(where), lr=1e-2, reduce_bucket_size=1000, **fields)
            for step in range(3):
                engine.backward(engine(experts.rows(2 * step + rank).to(where)).square().mean())
                engine.step()
            result.append(whole_bits(engine))
            engine.close()
    return result


def saved(rank, world_size):
    """Saved by both in mid-run, in stages 2 and 3, and gone on with. Their batches are those of one rank."""
    folder = Path(sys.argv[4]) / "checkpoints"
    device, result = torch.device(simulated.NAME, rank), {}
    torch.accelerator.set_device_index(device)
    for name in SAVED:
        engine = wrap(make().to(device), lr=1e-2, reduce_bucket_size=1000, **SETTINGS[name])
        for seed in range(6):
            if seed == 3:
                engine.save_checkpoint(folder / name, wait=False)
            engine.backward(engine(batch(seed, 0).to(device)).float().pow(2).mean())
            engine.step()
        engine.wait_for_checkpoint()
        result[name] = whole_bits(engine)
        engine.close()
    return result


def built(rank, world_size):
    """Models that are built on devices, whole and in shards; the second step of each is traced."""
    device, result = torch.device(simulated.NAME, rank), {}
    torch.accelerator.set_device_index(device)
    for name in ("stage 3", "streamed"):
        fields = {"lr": 1e-2, "reduce_bucket_size": 1000, **SETTINGS[name]}
        result[name] = []
        for in_shards in (False, True):
            with device, init(**fields, enabled=in_shards):
                model = make()
            with torch._C.DisableTorchFunctionSubclass():  # no read
                held = sum(p.untyped_storage().nbytes() for p in model.parameters())
            engine = wrap(model, **fields)
            for seed in range(3):
                with engine.trace(Path(sys.argv[4]) / f"{name}, {seed}.json"):
                    engine.backward(engine(batch(seed, rank).to(device)).float().pow(2).mean())
                    engine.step()
            result[name].append([whole_bits(engine), held])
            engine.close()
    return result


def without_waits(rank, world_size):
    """An exchange that the stream of copies does not wait for."""
    change = Change(collectives.__name__, "_Exchange.wait", "torch.accelerator.current_stream(self._device).wait_event(self._ended)", "None")  # fmt: skip # noqa: E501
    device = torch.device(simulated.NAME, rank)
    with made(change):
        return {"lost": train(device, rank)[:1], "expected": train("cpu", rank)[:1]}


RANKS = "frontends.torch.ranks.device_ranks"


def in_turn(device, rank, ahead, **fields):
    """As :func:`train`, alike in every run; and the number of copies that the host waited for."""
    offload_core.step.worker.TaskThread = Threads()
    with simulated.in_turn(ahead=ahead):
        engine = wrap(make().to(device), lr=1e-2, reduce_bucket_size=1000, **fields)
        inputs, norms = [batch(seed, rank).to(device) for seed in range(3)], []
        before = simulated.copies_waited_for()
        for x in inputs:
            engine.backward(engine(x).float().pow(2).mean())
            norms.append(engine.step().grad_norm)
        waited = simulated.copies_waited_for() - before
        engine.flush()
        found = [whole_bits(engine), norms, waited]
        engine.close()
    return found


def mutants(rank, world_size):
    """The scenario that notices each mutant of the exchange between devices; None: none does."""
    device, table = torch.device(simulated.NAME, rank), NoticedBy("ranks")
    torch.accelerator.set_device_index(device)
    played = {
        f"{name}{', computing ahead' * ahead}": partial(in_turn, device, rank, ahead, **SETTINGS[name])
        for name in ("stage 1", "delayed", "streamed")
        for ahead in (False, True)
    }
    sound = {name: play() for name, play in played.items()}
    result = {"sound": [sound[name] == play() for name, play in played.items()]}
    for name, mutant in by_name(mutants_of(RANKS)).items():
        with made(mutant):
            result[name] = next((by for by in table.first(name, played) if played[by]() != sound[by]), None)
    return result


def failing_on_the_way_back(rank, world_size):
    """A copy of parameters to the device fails on rank 1; both ranks catch what they are told, and go on."""
    device = torch.device(simulated.NAME, rank)
    torch.accelerator.set_device_index(device)
    reference = wrap(make(), lr=1e-2, reduce_bucket_size=1000)
    for seed in range(2):
        reference.backward(reference(batch(seed, rank)).pow(2).mean())
        reference.step()
    result = {"expected": bits(reference.module), "seconds": seconds_of_its_own(device)}
    store = dist.group.WORLD.get_group_store()
    for name, last in (("stage 1", True), ("stage 2", False)):
        store.set(f"{name} {rank}", "here")
        store.wait([f"{name} {other}" for other in range(world_size)])  # one is done sooner with the case before
        group = dist.new_group(backend=dist.get_backend(), timeout=timedelta(seconds=1))
        engine = wrap(make().to(device), lr=1e-2, reduce_bucket_size=1000, process_group=group, **SETTINGS[name])
        said = []

        def tried(act, said=said):
            try:
                act()
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}".partition("\n")[0])
                while_it_fails(torch.accelerator.synchronize)
            else:
                said.append(None)

        def step(seed, engine=engine):
            engine.backward(engine(batch(seed, rank).to(device)).float().pow(2).mean())
            engine.step()

        step(0)
        engine.flush()
        engine.backward(engine(batch(1, rank).to(device)).float().pow(2).mean())
        engine.optimizer.pipeline.buckets.run(lambda: None)  # the gradients have left
        torch.accelerator.synchronize()
        simulated.fail_copy(rank * (len(engine.optimizer.pipeline.buckets.all) if last else 1))  # none on rank 0

        def update(engine=engine):
            engine.step()
            engine.flush()

        tried(update)
        simulated.fail_copy(0)
        tried(engine.zero_grad)
        for seed in (2, 3):
            tried(lambda seed=seed: step(seed))
        tried(engine.flush)
        tried(engine.optimizer.state.values)
        tried(engine.close)
        result[name] = [said, bits(engine.module)]
    return result


def seconds_of_its_own(device):
    """The timeout of the group that an engine makes for its gathers, beside one of seven seconds."""
    group = dist.new_group(backend=collectives.BACKEND, timeout=timedelta(seconds=7))
    engine = wrap(make().to(device), process_group=group, **SETTINGS["stage 3"])
    found = timeout_of(engine.optimizer.partitioned._world._group()).total_seconds()
    engine.close()
    return found


def while_it_fails(act):
    for _ in range(16):
        try:
            return act()
        except RuntimeError:
            pass
    raise AssertionError("the device does not go on")


if __name__ == "__main__":
    torch.set_num_threads(1)
    collectives.register()
    assert device_ranks.dist.get_default_backend_for_device(simulated.NAME) == collectives.BACKEND
    scenarios = {f.__name__: f for f in (everywhere, mixtures, saved, built, without_waits, mutants)}
    if sys.argv[1].startswith("failing"):
        scenarios = {f"failing, {group}": failing_on_the_way_back for group in (collectives.BACKEND, "gloo")}
    main(scenarios, timeout=60, backend=sys.argv[1].split(", ")[1] if "," in sys.argv[1] else collectives.BACKEND)
