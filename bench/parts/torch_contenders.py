"""The ranks of the torch contenders of ``step``, ``ranks`` and ``memory`` (``bench.parts``), and of ``bench.gpu``, that
need one LIBRARY.

Each is started with NAME SETTINGS. Where the settings name a ``device``, the model is on it; else on the CPU.
"""

import importlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import metadata
from typing import Any, NamedTuple

from bench.harness.worker import Step, become_rank, serve

LEARNING_RATE = 3e-4
CLIPPING = 1.0
OURS = "offload-core"
OURS_3 = "offload-core, stage 3"
QUARTER_THERE = "offload-core, a quarter of the states on the device"
HALF_THERE = "offload-core, half of the states on the device"
ALL_THERE = "offload-core, all states on the device"
SERIAL = "offload-core, serial"
LATE = "offload-core, one step late"
IN_BACKWARD = "offload-core, update in backward"
ON_HOST = "offload-core, parameters on the host"
LATE_ON_HOST = "offload-core, parameters on the host, one step late"
UNCLIPPED = "offload-core, no clipping"
ACCUMULATE = "offload-core, accumulate()"
ACCUMULATE_3 = "offload-core, stage 3, accumulate()"
ACCUMULATE_ON_HOST = "offload-core, parameters on the host, accumulate()"
MUON = "offload-core, Muon"
DDP = "DDP, no offload"
FUSED = "PyTorch, fused AdamW"
UNFUSED = "PyTorch, AdamW"
TORCH_MUON = "PyTorch, Muon and fused AdamW"
FSDP2 = "FSDP2, CPUOffloadPolicy"
FSDP2_UNCLIPPED = "FSDP2, CPUOffloadPolicy, no clipping"
FSDP2_ON_DEVICE = "FSDP2, no offload"
FSDP2_ON_DEVICE_UNCLIPPED = "FSDP2, no offload, no clipping"
FSDP2_OURS = "FSDP2, offload-core"
FSDP2_OURS_UNCLIPPED = "FSDP2, offload-core, no clipping"
FSDP2_OURS_NARROW = "FSDP2, offload-core, bf16 shards"
FSDP2_OURS_NARROW_UNCLIPPED = "FSDP2, offload-core, bf16 shards, no clipping"
FSDP2_ALONE = "FSDP2, OffloadedAdamW"
FSDP2_ALONE_UNCLIPPED = "FSDP2, OffloadedAdamW, no clipping"
TORCHAO = "torchao, CPUOffloadOptimizer"
GRADIENTS_ONLY = "PyTorch, no optimizer"
DS_2, DS_3 = "DeepSpeed", "DeepSpeed, stage 3"
DS_ON_HOST = "DeepSpeed, stage 3, parameters on the host"
OURS_ON_DISK, DS_ON_DISK = "offload-core, states on disk", "DeepSpeed, states on disk"
DS_PIPELINED = "DeepSpeed, states on disk, pipelined"
OURS_ALL_ON_DISK = "offload-core, states and parameters on disk"
DS_ALL_ON_DISK = "DeepSpeed, states and parameters on disk"
STREAM = "streaming limit of the update"
TOKENS = 256
"""Tokens drawn; fewer than the vocabulary, so that there is something to learn."""
_STREAMED = 20_000_000
"""The most elements to stream. For a larger model the time is in proportion."""

_PINNED = {"device": "cpu", "pin_memory": True}
DEEPSPEED: dict[str, dict[str, Any]] = {
    DS_2: {},
    "DeepSpeed, overlap_comm": {"overlap_comm": True},
    "DeepSpeed, allreduce": {"reduce_scatter": False},
    DS_3: {"stage": 3},
    "DeepSpeed, stage 3, overlap_comm": {"stage": 3, "overlap_comm": True},
    DS_ON_HOST: {"stage": 3, "offload_optimizer": _PINNED, "offload_param": _PINNED},
}
"""Settings that differ from `deepspeed_config`."""
FROM_HOST: dict[str, Any] = {"stage": 3, "offload_param": "cpu"}
ONE_STEP_LATE = {"schedule": "delayed", "delay_warmup_steps": 1}

Settings = dict[str, Any]


class Contender(NamedTuple):
    make: Callable[[Any, Settings], Callable[[Any, Any], dict[str, float]]]
    """Takes an fp32 model, or on a device one of ``dtype``; returns a function of a step's inputs and targets. If the
    settings have ``windows``, these are cut into micro-batches of so many windows."""
    library: str
    """Imported before memory is looked at."""
    device: str | None = None
    """The model's device; on "meta" it has only shapes. None: the settings' device."""
    dtype: str = "bfloat16"
    """The model's type on a device, where fp32 and bf16 may not fit side by side."""
    in_ranks: bool = False
    """True if it needs a process group on a device, too."""
    construction: dict[str, Any] | None = None
    """Options of `frontends.torch.init`, in which its model is built; None: it is built whole."""


def main() -> None:
    import torch
    import torch.distributed as dist

    importlib.import_module(sys.argv[1])
    (name, words), *streams = become_rank()
    contender, settings = CONTENDERS[name], {"device": "cpu", **json.loads(words)}
    device = torch.device(settings["device"])
    torch.set_num_threads(settings["threads"])
    if settings.get("wide_sums"):
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if device.type == "cpu":
        dist.init_process_group("gloo")
    elif contender.in_ranks:
        dist.init_process_group(f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}")

    def make_step() -> Step:
        if "device_bytes" in settings:
            cap(settings["device_bytes"])
        step = contender.make(make_model(contender, settings), settings)
        batches = make_batches(settings["context"], device)
        return lambda micro_batch: step(*batches(micro_batch))

    def device_peak() -> int | None:
        if device.type == "cpu":
            return None
        peak = torch.accelerator.max_memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        return peak

    library = contender.library.partition(".")[0]
    versions = {lib: metadata.version(lib) for lib in {"torch", library} & {"torch", "deepspeed", "torchao"}}
    serve(*streams, settings["micro_batch"], make_step, device_peak, versions=versions)
    if dist.is_initialized():
        dist.destroy_process_group()


def cap(n_bytes: int) -> None:
    """Let this process's allocator take no more of its device."""
    import torch

    device = torch.accelerator.current_device_index()
    _, whole = torch.accelerator.get_memory_info(device)
    torch.get_device_module().set_per_process_memory_fraction(min(n_bytes / whole, 1.0), device)


def make_model(contender: Contender, settings: Settings) -> Any:
    import torch

    from bench.train.gpt_torch import GPT
    from offload_core.commands.model_shapes import GPTConfig

    in_shards: Any = nullcontext()
    if contender.construction is not None:
        from frontends.torch import init

        in_shards = init(**contender.construction)
    torch.manual_seed(0)
    if settings["device"] != "cpu":
        torch.set_default_dtype(getattr(torch, contender.dtype))
    try:
        with torch.device(contender.device or settings["device"]), in_shards:
            return GPT(GPTConfig(**settings["gpt"]), settings.get("activation_checkpointing", False))
    finally:
        torch.set_default_dtype(torch.float32)


def make_batches(context: int, device: Any) -> Callable[[int], tuple[Any, Any]]:
    """Return a function that makes batches: the same for every contender, others for each rank."""
    import torch

    draw = torch.Generator().manual_seed(1 + int(os.environ["RANK"]))

    def batch(micro_batch: int) -> tuple[Any, Any]:
        windows = torch.randint(TOKENS, (micro_batch, context + 1), generator=draw).to(device)
        return windows[:, :-1], windows[:, 1:]

    return batch


class Clock:
    """The ends of a step's phases: by the host's clock on the CPU, by events of the current stream on a device."""

    def __init__(self, device: str) -> None:
        self._on_host = device == "cpu"
        self._device = device
        self._start = time.perf_counter()
        self._ends = [self._mark()]

    def _mark(self) -> Any:
        if self._on_host:
            return time.perf_counter()
        import torch

        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def end(self) -> None:
        """Note the end of one phase and the start of the next."""
        self._ends.append(self._mark())

    def ms(self, *names: str) -> dict[str, float]:
        """Return the ms of each phase, and the total on the host's clock until the stream has reached the last end.

        Args:
            names: of the phases, in their order. The times of phases of one name are added.
        """
        if not self._on_host:
            self._ends[-1].synchronize()
        total = 1e3 * ((self._ends[-1] if self._on_host else time.perf_counter()) - self._start)
        each = dict.fromkeys(names, 0.0)
        for name, (a, b) in zip(names, itertools.pairwise(self._ends), strict=True):
            each[name] += 1e3 * (b - a) if self._on_host else a.elapsed_time(b)
        return each | {"total": total}


def micro_batches(settings: Settings, inputs: Any, targets: Any) -> list[tuple[Any, Any]]:
    """Return the micro-batches of a step, of ``windows`` windows each; by default the step is one micro-batch."""
    windows = settings.get("windows", len(inputs))
    return [*zip(inputs.split(windows), targets.split(windows), strict=True)]


def mean_of(losses: Sequence[Any]) -> float:
    """Return the mean of tensors of one element."""
    return sum(loss.item() for loss in losses) / len(losses)


def phases(
    settings: Settings,
    forward: Callable[[Any, Any], Any],
    backward: Callable[[Any], None],
    step: Callable[[], float | None],
    held: Callable[[], dict[str, float]] | None = None,
    accumulate_over: Callable[[int], None] | None = None,
) -> Callable[[Any, Any], dict[str, float]]:
    """Return a step that times its phases; ``step`` returns the norm of the gradients before clipping.

    Args:
        held: returns bytes by the place where they lie. It is called once, after the backward of the second step, when
            all states exist and no step is counted yet; each later step repeats what it returned.
        accumulate_over: sets the number of micro-batches of a step in an engine, which averages over them, and whose
            ``step`` is called after each. None: losses are divided by the number, and ``step`` is called after the last
            micro-batch.
    """
    steps = itertools.count()
    known_bytes: dict[str, float] = {}
    n_before = 1

    def train(inputs: Any, targets: Any) -> dict[str, float]:
        nonlocal n_before
        batches = micro_batches(settings, inputs, targets)
        n = len(batches)
        if accumulate_over is not None and n != n_before:
            accumulate_over(n)
            n_before = n
        clock = Clock(settings["device"])
        losses, norm = [], None
        for i, batch in enumerate(batches, 1):
            loss = forward(*batch)
            clock.end()
            losses.append(loss.detach())
            backward(loss if n == 1 or accumulate_over is not None else loss / n)
            del loss  # and its graph, before the next one is made
            clock.end()
            if i == n and held is not None and next(steps) == 1:
                known_bytes.update(held())
            if i == n or accumulate_over is not None:
                norm = step()
            clock.end()
        known = clock.ms(*["forward", "backward", "step"] * n) | {"loss": mean_of(losses)} | known_bytes
        return known if norm is None else known | {"grad_norm": norm}

    return train


def adam_arguments() -> dict[str, Any]:
    from bench.train.presets import BETAS, WEIGHT_DECAY

    return {"lr": LEARNING_RATE, "betas": BETAS, "eps": 1e-8, "weight_decay": WEIGHT_DECAY}


def muon_arguments() -> dict[str, Any]:
    """Of Muon, whose rate and weight decay are AdamW's."""
    known = adam_arguments()
    return {"lr": known["lr"], "weight_decay": known["weight_decay"], "adjust_lr_fn": "match_rms_adamw"}


def is_narrow(settings: Settings) -> bool:
    """True if parameters and gradients are bf16, beside fp32 master weights."""
    return settings.get("param_dtype", "bfloat16") == "bfloat16"


def offload_core(model: Any, settings: Settings, **fields: Any) -> Any:
    from frontends.torch import wrap

    fields = {"gradient_clipping": CLIPPING, "num_threads": settings["threads"], **adam_arguments(), **fields}
    engine = wrap(model, param_dtype="bfloat16" if is_narrow(settings) else None, **fields)
    accumulate_over = engine.set_gradient_accumulation_steps
    return phases(settings, engine, engine.backward, lambda: engine.step().grad_norm, None, accumulate_over)


def block_by_block(model: Any, settings: Settings, **fields: Any) -> Any:
    """``engine.accumulate()``: all micro-batches pass one block after the other, forward and backward."""
    from frontends.torch import wrap

    own = {name: settings[name] for name in ("host_activation_memory", "layerwise") if name in settings}
    fields = {"gradient_clipping": CLIPPING, "num_threads": settings["threads"], **adam_arguments(), **own, **fields}
    engine = wrap(model, param_dtype="bfloat16" if is_narrow(settings) else None, **fields)
    n_before = 1

    def train(inputs: Any, targets: Any) -> dict[str, float]:
        nonlocal n_before
        batches = micro_batches(settings, inputs, targets)
        if len(batches) != n_before:
            n_before = len(batches)
            engine.set_gradient_accumulation_steps(n_before)
        clock = Clock(settings["device"])
        losses = engine.accumulate(batches, lambda loss, batch: loss)
        clock.end()
        norm = engine.step().grad_norm
        clock.end()
        known = clock.ms("forward and backward", "step") | {"loss": mean_of(losses)}
        return known if norm is None else known | {"grad_norm": norm}

    return train


def muon(model: Any, settings: Settings) -> Any:
    own = {"betas": None, "eps": None, **muon_arguments()}
    return offload_core(model, settings, optimizer="muon", adamw=adam_arguments(), **own)


def deepspeed_config(micro_batch: int, zero: dict[str, Any], narrow: bool = True) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIPPING,
        "bf16": {"enabled": narrow},
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


def deepspeed_zero_on_disk(folder: str, numel: int, *, pipelined: bool) -> dict[str, Any]:
    """DeepSpeed's settings for states on disk.

    Args:
        numel: the most elements that it updates at a time.
        pipelined: read and write during updates. With 5 buffers, its default, that raises an AssertionError where there
            are several groups of elements; 16 are enough.
    """
    words = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 16} if pipelined else {}
    place = {"device": "nvme", "nvme_path": folder, "pin_memory": False, **words}
    return {"stage": 3, "sub_group_size": numel, "offload_optimizer": place}


def deepspeed_params_on_disk(folder: str, largest: int) -> dict[str, Any]:
    """DeepSpeed's settings for parameters on disk.

    Args:
        largest: the elements of the largest parameter, for which its buffers must have room.
    """
    return {"device": "nvme", "nvme_path": folder, "pin_memory": False, "buffer_count": 8, "buffer_size": largest}


def deepspeed_on_disk(model: Any, settings: Settings, *, pipelined: bool = False, params: bool = False) -> Any:
    # Its files have names that another process's may have, too: each would read the other's states.
    folder = tempfile.mkdtemp(dir=settings["nvme_path"])
    zero = deepspeed_zero_on_disk(folder, settings["bucket"], pipelined=pipelined)
    if params:
        zero["offload_param"] = deepspeed_params_on_disk(folder, max(p.numel() for p in model.parameters()))
    return deepspeed(model, settings, zero)


def offload_core_on_disk(model: Any, settings: Settings, **fields: Any) -> Any:
    place: dict[str, Any] = {"offload_optimizer": "nvme", "nvme_path": settings["nvme_path"], "nvme_host_bytes": 0}
    return offload_core(model, settings, stage=3, reduce_bucket_size=settings["bucket"], **place, **fields)


def deepspeed(model: Any, settings: Settings, zero: dict[str, Any]) -> Any:
    from deepspeed import initialize
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    windows = settings.get("windows", settings["micro_batch"])
    config = deepspeed_config(windows, zero, is_narrow(settings))
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    if not isinstance(engine.optimizer.optimizer, DeepSpeedCPUAdam):
        raise TypeError(f"DeepSpeed chose {type(engine.optimizer.optimizer).__name__}, expected its DeepSpeedCPUAdam")

    def step() -> float | None:
        engine.step()
        norm = engine.get_global_grad_norm()  # None before the first update
        return None if norm is None else float(norm)

    def accumulate_over(n: int) -> None:
        engine.set_train_batch_size(n * windows * int(os.environ["WORLD_SIZE"]))

    return phases(settings, engine, engine.backward, step, None, accumulate_over)


def plain(model: Any, settings: Settings, *, fused: bool = True, ddp: bool = False, muon: bool = False) -> Any:
    """Every rank holds all states and updates all parameters. With ``muon``, Muon updates the hidden matrices."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from frontends.torch.optim.matrix_groups import hidden_matrices

    names, masters, pairs = [name for name, _ in model.named_parameters()], list(model.parameters()), []
    matrices = hidden_matrices(model, [*model.named_parameters()]) if muon else ()
    if is_narrow(settings):
        masters = [p.detach().float().requires_grad_() for p in model.parameters()]
        model = model.bfloat16()
        pairs = list(zip(model.parameters(), masters, strict=True))
    if ddp:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    of_adamw = [master for name, master in zip(names, masters, strict=True) if name not in matrices]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(of_adamw, fused=fused, **adam_arguments())]
    if muon:
        of_muon = [master for name, master in zip(names, masters, strict=True) if name in matrices]
        optimizers.append(torch.optim.Muon(of_muon, **muon_arguments()))

    @torch.no_grad()
    def step() -> float:
        for parameter, master in pairs:
            master.grad = parameter.grad.float()
        norm = torch.nn.utils.clip_grad_norm_(masters, CLIPPING)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for parameter, master in pairs:
            parameter.copy_(master)
            parameter.grad = None
        return norm.item()

    return phases(settings, model, lambda loss: loss.backward(), step)


def fully_sharded(model: Any, settings: Settings, *, offload: bool) -> Any:
    """Shard fp32 parameters block by block. They are gathered in bf16 where the others compute in it.

    Args:
        offload: True for FSDP2's own offload: the shards and their gradients lie on the host.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {
        "mesh": dist.device_mesh.init_device_mesh(settings["device"], (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if is_narrow(settings) else None, cast_forward_inputs=False
        ),
    }
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=settings["device"] != "cpu")
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def local_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of this rank's parts of tensors; those of none are 0."""
    parts = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors if tensor is not None]
    return sum(part.numel() * part.element_size() for part in parts)


HOST_BYTES, DEVICE_BYTES = "host bytes", "device bytes"
"""The keys of a step for bytes that lie somewhere after backward. On the CPU the device is the CPU."""


def shard_bytes(model: Any) -> int:
    """Return the bytes of this rank's shards of parameters and gradients."""
    return local_bytes([tensor for p in model.parameters() for tensor in (p, p.grad)])


def fsdp2(model: Any, settings: Settings, *, offload: bool = True, clipping: float | None = CLIPPING) -> Any:
    """Torch's fused AdamW."""
    import torch

    model = fully_sharded(model, settings, offload=offload)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **adam_arguments())

    def step() -> float | None:
        norm = None
        if clipping is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clipping).full_tensor().item()
        optimizer.step()
        optimizer.zero_grad()
        return norm

    def held() -> dict[str, float]:
        states = local_bytes([value for state in optimizer.state.values() for value in state.values()])
        n_bytes = shard_bytes(model) + states
        return {HOST_BYTES: n_bytes * offload, DEVICE_BYTES: n_bytes * (not offload)}

    return phases(settings, model, lambda loss: loss.backward(), step, held)


def offload_core_fsdp2(
    model: Any, settings: Settings, *, clipping: float | None = CLIPPING, narrow: bool = False
) -> Any:
    """An engine over FSDP2, whose own offload is off.

    Args:
        narrow: True for shards of the type in which the model computes, so that master weights lie on the host alone.
    """
    from frontends.torch import wrap

    if narrow and is_narrow(settings):
        model = model.bfloat16()
    fields = {"gradient_clipping": clipping, "num_threads": settings["threads"], **adam_arguments()}
    engine = wrap(fully_sharded(model, settings, offload=False), **fields)
    return phases(
        settings,
        engine,
        engine.backward,
        lambda: engine.step().grad_norm,
        lambda: {HOST_BYTES: engine.memory_report().host_bytes, DEVICE_BYTES: shard_bytes(model)},
    )


def offloaded_adamw_fsdp2(model: Any, settings: Settings, *, clipping: float | None = CLIPPING) -> Any:
    """Our optimizer in place of torch's, with gradients on the device until the step."""
    from frontends.torch import OffloadedAdamW

    fields = {"gradient_clipping": clipping, "num_threads": settings["threads"], **adam_arguments()}
    model = fully_sharded(model, settings, offload=False)
    optimizer = OffloadedAdamW(model.parameters(), **fields)

    def step() -> float | None:
        optimizer.step()
        optimizer.zero_grad()
        return None if clipping is None else optimizer.report.grad_norm

    def held() -> dict[str, float]:
        return {HOST_BYTES: optimizer.memory_report().host_bytes, DEVICE_BYTES: shard_bytes(model)}

    return phases(settings, model, lambda loss: loss.backward(), step, held)


def torchao(model: Any, settings: Settings) -> Any:
    """fp32 parameters on the device, cast to bf16 by autocast: it has no other master weights. It cannot clip."""
    import torch
    from torchao.optim import CPUOffloadOptimizer

    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **adam_arguments())

    def forward(inputs: Any, targets: Any) -> Any:
        with torch.autocast(settings["device"], torch.bfloat16):
            return model(inputs, targets)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return phases(settings, forward, lambda loss: loss.backward(), step)


def gradients_only(model: Any, settings: Settings) -> Any:
    """Forward and backward."""
    model = model.bfloat16() if is_narrow(settings) else model
    return phases(settings, model, lambda loss: loss.backward(), model.zero_grad)


def stream(model: Any, settings: Settings) -> Any:
    """Reading a gradient and three fp32 states, writing the states and a bf16 parameter; no arithmetic.

    An fp32 parameter is one of the states."""
    from bench.parts.update import Buffers
    from offload_core.dtypes import BFLOAT16, FLOAT32

    numel = sum(p.numel() for p in model.parameters())
    streamed = min(numel, _STREAMED)
    dtype = BFLOAT16 if is_narrow(settings) else FLOAT32
    run = Buffers(streamed, settings["threads"]).stream(dtype)

    def step(inputs: Any, targets: Any) -> dict[str, float]:
        start = time.perf_counter()
        run()
        return {"total": 1e3 * (time.perf_counter() - start) * numel / streamed}

    return step


_TORCH, _WITHOUT = "torch.distributed.fsdp", {"clipping": None}
OVER_FSDP2: tuple[tuple[str, Callable[..., Any], str, dict[str, Any]], ...] = (
    (FSDP2, fsdp2, _TORCH, {}),
    (FSDP2_UNCLIPPED, fsdp2, _TORCH, _WITHOUT),
    (FSDP2_ON_DEVICE, fsdp2, _TORCH, {"offload": False}),
    (FSDP2_ON_DEVICE_UNCLIPPED, fsdp2, _TORCH, {"offload": False, **_WITHOUT}),
    (FSDP2_OURS, offload_core_fsdp2, "frontends.torch", {}),
    (FSDP2_OURS_UNCLIPPED, offload_core_fsdp2, "frontends.torch", _WITHOUT),
    (FSDP2_OURS_NARROW, offload_core_fsdp2, "frontends.torch", {"narrow": True}),
    (FSDP2_OURS_NARROW_UNCLIPPED, offload_core_fsdp2, "frontends.torch", {"narrow": True, **_WITHOUT}),
    (FSDP2_ALONE, offloaded_adamw_fsdp2, "frontends.torch", {}),
    (FSDP2_ALONE_UNCLIPPED, offloaded_adamw_fsdp2, "frontends.torch", _WITHOUT),
)
"""Name, maker, library and options of each contender over FSDP2."""
CONTENDERS = {
    OURS: Contender(offload_core, "frontends.torch"),
    OURS_3: Contender(partial(offload_core, stage=3), "frontends.torch"),
    QUARTER_THERE: Contender(partial(offload_core, device_states_bytes=0.25), "frontends.torch"),
    HALF_THERE: Contender(partial(offload_core, device_states_bytes=0.5), "frontends.torch"),
    ALL_THERE: Contender(partial(offload_core, offload_optimizer=None), "frontends.torch"),
    SERIAL: Contender(partial(offload_core, schedule="serial"), "frontends.torch"),
    LATE: Contender(partial(offload_core, **ONE_STEP_LATE), "frontends.torch"),
    IN_BACKWARD: Contender(partial(offload_core, update_in_backward=True), "frontends.torch"),
    ON_HOST: Contender(partial(offload_core, **FROM_HOST), "frontends.torch", construction=FROM_HOST),
    LATE_ON_HOST: Contender(
        partial(offload_core, **FROM_HOST, **ONE_STEP_LATE), "frontends.torch", construction=FROM_HOST
    ),
    ACCUMULATE: Contender(block_by_block, "frontends.torch"),
    ACCUMULATE_3: Contender(partial(block_by_block, stage=3, layerwise=True), "frontends.torch"),
    ACCUMULATE_ON_HOST: Contender(
        partial(block_by_block, layerwise=True, **FROM_HOST), "frontends.torch", construction=FROM_HOST
    ),
    MUON: Contender(muon, "frontends.torch"),
    UNCLIPPED: Contender(partial(offload_core, gradient_clipping=None), "frontends.torch"),
    **{name: Contender(partial(deepspeed, zero=zero), "deepspeed", in_ranks=True) for name, zero in DEEPSPEED.items()},
    OURS_ON_DISK: Contender(offload_core_on_disk, "frontends.torch"),
    OURS_ALL_ON_DISK: Contender(partial(offload_core_on_disk, offload_param="nvme"), "frontends.torch"),
    DS_ON_DISK: Contender(deepspeed_on_disk, "deepspeed", in_ranks=True),
    DS_ALL_ON_DISK: Contender(partial(deepspeed_on_disk, params=True), "deepspeed", in_ranks=True),
    DS_PIPELINED: Contender(partial(deepspeed_on_disk, pipelined=True), "deepspeed", in_ranks=True),
    DDP: Contender(partial(plain, fused=True, ddp=True), "torch"),
    FUSED: Contender(partial(plain, fused=True), "torch"),
    UNFUSED: Contender(partial(plain, fused=False), "torch"),
    TORCH_MUON: Contender(partial(plain, muon=True), "torch"),
    **{
        name: Contender(partial(make, **own), library, dtype="float32", in_ranks=True)
        for name, make, library, own in OVER_FSDP2
    },
    TORCHAO: Contender(torchao, "torchao.optim", dtype="float32"),
    GRADIENTS_ONLY: Contender(gradients_only, "torch"),
    STREAM: Contender(stream, "torch", device="meta"),
}


if __name__ == "__main__":
    main()
