"""The ranks of the torch contenders of ``step``, ``ranks`` and ``memory`` (``bench.parts``) that need one LIBRARY.

Each is started with NAME SETTINGS.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any, NamedTuple

from bench.harness.worker import Step, become_rank, serve

LEARNING_RATE = 3e-4
CLIPPING = 1.0
OURS = "offload-core"
OURS_3 = "offload-core, stage 3"
SERIAL = "offload-core, serial"
UNCLIPPED = "offload-core, no clipping"
DDP = "DDP, no offload"
FUSED = "PyTorch, fused AdamW"
UNFUSED = "PyTorch, AdamW"
FSDP2 = "FSDP2, CPUOffloadPolicy"
GRADIENTS_ONLY = "PyTorch, no optimizer"
DS_2, DS_3 = "DeepSpeed", "DeepSpeed, stage 3"
STREAM = "streaming limit of the update"
TOKENS = 256
"""Tokens drawn; fewer than the vocabulary, so that there is something to learn."""
_STREAMED = 20_000_000
"""Elements, where the model has more: time goes by their number."""

DEEPSPEED: dict[str, dict[str, Any]] = {
    DS_2: {},
    "DeepSpeed, overlap_comm": {"overlap_comm": True},
    "DeepSpeed, allreduce": {"reduce_scatter": False},
    DS_3: {"stage": 3},
    "DeepSpeed, stage 3, overlap_comm": {"stage": 3, "overlap_comm": True},
}
"""Settings that differ from `deepspeed_config`."""

Settings = dict[str, Any]


class Contender(NamedTuple):
    make: Callable[[Any, Settings], Callable[[Any, Any], dict[str, float]]]
    """Takes an fp32 model; what it returns takes inputs and targets."""
    library: str
    """Imported before memory is looked at."""
    device: str = "cpu"
    """On "meta" the model has shapes only."""


def main() -> None:
    import torch
    import torch.distributed as dist

    importlib.import_module(sys.argv[1])
    (name, words), *streams = become_rank()
    contender, settings = CONTENDERS[name], json.loads(words)
    torch.set_num_threads(settings["threads"])
    dist.init_process_group("gloo")

    def make_step() -> Step:
        from bench.train.gpt_torch import GPT
        from offload_core.commands.model_shapes import GPTConfig

        torch.manual_seed(0)
        with torch.device(contender.device):
            model = GPT(GPTConfig(**settings["gpt"]))
        step = contender.make(model, settings)
        batches = make_batches(settings["context"])
        return lambda micro_batch: step(*batches(micro_batch))

    versions = {lib: metadata.version(lib) for lib in {"torch", contender.library} & {"torch", "deepspeed"}}
    serve(*streams, settings["micro_batch"], make_step, versions=versions)
    dist.destroy_process_group()


def make_batches(context: int) -> Callable[[int], tuple[Any, Any]]:
    """The same for every contender, another for each rank."""
    import torch
    import torch.distributed as dist

    draw = torch.Generator().manual_seed(1 + dist.get_rank())

    def batch(micro_batch: int) -> tuple[Any, Any]:
        windows = torch.randint(TOKENS, (micro_batch, context + 1), generator=draw)
        return windows[:, :-1], windows[:, 1:]

    return batch


def phases(
    forward: Callable[[Any, Any], Any], backward: Callable[[Any], None], step: Callable[[], float | None]
) -> Callable[[Any, Any], dict[str, float]]:
    """Times them; ``step`` returns the norm of the gradients before clipping."""

    def train(inputs: Any, targets: Any) -> dict[str, float]:
        start = time.perf_counter()
        loss = forward(inputs, targets)
        after_forward = time.perf_counter()
        backward(loss)
        after_backward = time.perf_counter()
        norm = step()
        end = time.perf_counter()
        times = {"forward": after_forward - start, "backward": after_backward - after_forward}
        times |= {"step": end - after_backward, "total": end - start}
        known = {"loss": loss.item()} if norm is None else {"loss": loss.item(), "grad_norm": norm}
        return {name: 1e3 * seconds for name, seconds in times.items()} | known

    return train


def adam_arguments() -> dict[str, Any]:
    from bench.train.presets import BETAS, WEIGHT_DECAY

    return {"lr": LEARNING_RATE, "betas": BETAS, "eps": 1e-8, "weight_decay": WEIGHT_DECAY}


def offload_core(model: Any, settings: Settings, **fields: Any) -> Any:
    from frontends.torch import wrap

    fields = {"gradient_clipping": CLIPPING, "num_threads": settings["threads"], **fields}
    engine = wrap(model, param_dtype="bfloat16", **fields, **adam_arguments())
    return phases(engine, engine.backward, lambda: engine.step().grad_norm)


def deepspeed_config(micro_batch: int, zero: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIPPING,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": adam_arguments()},  # with the offload: DeepSpeedCPUAdam
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "overlap_comm": False,
            **zero,
        },
    }


def deepspeed(model: Any, settings: Settings, zero: dict[str, Any]) -> Any:
    from deepspeed import initialize
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    config = deepspeed_config(settings["micro_batch"], zero)
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    if not isinstance(engine.optimizer.optimizer, DeepSpeedCPUAdam):
        raise TypeError(f"DeepSpeed chose {type(engine.optimizer.optimizer).__name__}, expected its DeepSpeedCPUAdam")

    def step() -> float:
        engine.step()
        return float(engine.get_global_grad_norm())

    return phases(engine, engine.backward, step)


def plain(model: Any, settings: Settings, *, fused: bool, ddp: bool = False) -> Any:
    """Every rank holds all states and updates all parameters."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    model = model.bfloat16()
    if ddp:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, fused=fused, **adam_arguments())

    @torch.no_grad()
    def step() -> float:
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad = parameter.grad.float()
        norm = torch.nn.utils.clip_grad_norm_(masters, CLIPPING)
        optimizer.step()
        for parameter, master in zip(parameters, masters, strict=True):
            parameter.copy_(master)
            parameter.grad = master.grad = None
        return norm.item()

    return phases(model, lambda loss: loss.backward(), step)


def fsdp2(model: Any, settings: Settings) -> Any:
    """fp32 parameters sharded on the host, gathered in bf16 block by block."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {
        "mesh": dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),  # there is no accelerator to pin for
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **adam_arguments())

    def step() -> float:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
        return norm.full_tensor().item()

    return phases(model, lambda loss: loss.backward(), step)


def gradients_only(model: Any, settings: Settings) -> Any:
    """Forward and backward of a bf16 model."""
    model = model.bfloat16()
    return phases(model, lambda loss: loss.backward(), model.zero_grad)


def stream(model: Any, settings: Settings) -> Any:
    """Reading a bf16 gradient and three fp32 states, writing the states and a bf16 parameter; no arithmetic."""
    from bench.parts.cpu_adam import Buffers, build_stream
    from offload_core.dtypes import BFLOAT16

    numel = sum(p.numel() for p in model.parameters())
    streamed = min(numel, _STREAMED)
    run = Buffers(streamed, settings["threads"]).stream(*build_stream(), BFLOAT16)

    def step(inputs: Any, targets: Any) -> dict[str, float]:
        start = time.perf_counter()
        run()
        return {"total": 1e3 * (time.perf_counter() - start) * numel / streamed}

    return step


CONTENDERS = {
    OURS: Contender(offload_core, "frontends.torch"),
    OURS_3: Contender(partial(offload_core, stage=3), "frontends.torch"),
    SERIAL: Contender(partial(offload_core, schedule="serial"), "frontends.torch"),
    UNCLIPPED: Contender(partial(offload_core, gradient_clipping=None), "frontends.torch"),
    **{name: Contender(partial(deepspeed, zero=zero), "deepspeed") for name, zero in DEEPSPEED.items()},
    DDP: Contender(partial(plain, fused=True, ddp=True), "torch"),
    FUSED: Contender(partial(plain, fused=True), "torch"),
    UNFUSED: Contender(partial(plain, fused=False), "torch"),
    FSDP2: Contender(fsdp2, "torch.distributed.fsdp"),
    GRADIENTS_ONLY: Contender(gradients_only, "torch"),
    STREAM: Contender(stream, "torch", device="meta"),
}


if __name__ == "__main__":
    main()
