"""One run of ``bench.parts.phases``: CONTENDER SETTINGS. Rounds in which a model leaves the device and comes back."""

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.parts.torch_contenders import adam_arguments
from bench.peers import find_compilers, free_port
from bench.train.gpt_torch import GPT
from offload_core.commands.model_shapes import GPTConfig

OURS, OURS_3, LORA = "offload-core", "offload-core, parameters on the host", "offload-core, LoRA"
DS, DS_LORA = "DeepSpeed, states on the device", "DeepSpeed, states on the device, LoRA"
DS_OFFLOADED = "DeepSpeed, states on the host"
CPU, SIMULATED = "cpu", "simulated"
_RANK = 16
_TOKENS = 256
_PIECE = 2**26


class Run(NamedTuple):
    """The results of a run."""

    params: int
    away: list[float]
    """Seconds of each round until the model has left the device."""
    back: list[float]
    """Seconds until all of it is there again."""
    to_host: int | None
    """Bytes of a round that crossed to the host; None: unknown."""
    to_device: int | None
    plain_to_host: list[float]
    """Seconds of a plain copy of as many bytes, from and to pinned memory; none: no bytes crossed."""
    plain_to_device: list[float]
    collecting: list[float]
    """Seconds of a ``gc.collect()`` in this process, right after each round."""
    held: tuple[int, int] | None
    """Bytes allocated on the device before and after the model has left it; None: it is the CPU."""
    versions: dict[str, str]


class Moves(NamedTuple):
    """A contender in training."""

    forward: Callable[[Any, Any], Any]
    backward: Callable[[Any], object]
    step: Callable[[], object]
    away: Callable[[], object]
    back: Callable[[], object]
    """Returns when all is on the device."""


def ours(model: Any, settings: dict[str, Any], **fields: Any) -> Moves:
    from frontends.torch import wrap

    engine = wrap(model, num_threads=settings["threads"], **adam_arguments(), **fields)

    def back() -> None:
        engine.restore()
        engine.flush()

    return Moves(engine, engine.backward, engine.step, engine.release, back)


def deepspeed(model: Any, settings: dict[str, Any], **zero: Any) -> Moves:
    """DeepSpeed's stage 2. On the simulated device its fused Adam cannot run, whose kernels are CUDA's or the CPU's."""
    from deepspeed import initialize

    optimizer = {**adam_arguments(), "torch_adam": settings["device"] == SIMULATED and "offload_optimizer" not in zero}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": optimizer},
        "zero_optimization": {
            "stage": 2, "contiguous_gradients": True, "overlap_comm": False, "reduce_bucket_size": 5_000_000, **zero
        },
    }  # fmt: skip
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = initialize(model=model, model_parameters=trained, config=config)
    return Moves(engine, engine.backward, engine.step, engine.offload_states, engine.reload_states)


CONTENDERS: dict[str, Callable[[Any, dict[str, Any]], Moves]] = {
    OURS: ours,
    OURS_3: lambda model, settings: ours(model, settings, stage=3, offload_param="cpu"),
    LORA: ours,
    DS: deepspeed,
    DS_OFFLOADED: lambda model, settings: deepspeed(
        model, settings, offload_optimizer={"device": "cpu", "pin_memory": True}
    ),
    DS_LORA: deepspeed,
}


def with_adapters(model: Any) -> Any:
    """Freeze a model, and put LoRA adapters beside the linear layers of its blocks."""
    from peft import LoraConfig, inject_adapter_in_model

    targets = ["qkv", "attention_out", "mlp_in", "mlp_out"]
    model.requires_grad_(False)
    adapted = inject_adapter_in_model(LoraConfig(r=_RANK, target_modules=targets), model)
    return adapted.bfloat16()


def synchronize(device: torch.device) -> None:
    if device.type != CPU:
        torch.accelerator.synchronize(device)


def copied(device: torch.device, act: Callable[[], object]) -> tuple[int, int] | None:
    """Act, and return the bytes that crossed to the host and to the device meanwhile; None: unknown."""
    if device.type == SIMULATED:
        from tests.support import simulated

        before = simulated.bytes_copied()
        act()
        synchronize(device)
        to_host, to_device = (after - b for after, b in zip(simulated.bytes_copied(), before, strict=True))
        return to_host, to_device
    if device.type != "cuda":
        act()
        return (0, 0) if device.type == CPU else None  # the device's memory is the host's
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        act()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        profiled.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    copies = [(event["name"], event["args"]["bytes"]) for event in events if event.get("cat") == "gpu_memcpy"]
    to_host, to_device = (sum(n for name, n in copies if way in name) for way in ("DtoH", "HtoD"))
    return to_host, to_device


def plain(device: torch.device, n_bytes: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Copies of so many bytes between pinned memory and the device: to the host, and to the device.

    On the device all pieces have one place: it may have no room for as many bytes beside the contender's.
    """
    pieces = torch.ones(n_bytes, dtype=torch.uint8, pin_memory=True).split(_PIECE)
    there = torch.empty(len(pieces[0]), dtype=torch.uint8, device=device)

    def to_host() -> None:
        for piece in pieces:
            piece.copy_(there[: len(piece)], non_blocking=True)

    def to_device() -> None:
        for piece in pieces:
            there[: len(piece)].copy_(piece, non_blocking=True)

    return to_host, to_device


def seconds(device: torch.device, act: Callable[[], object]) -> float:
    synchronize(device)
    start = time.perf_counter()
    act()
    synchronize(device)
    return time.perf_counter() - start


def run(contender: str, settings: dict[str, Any], device: torch.device) -> Run:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model: Any = GPT(GPTConfig(**settings["gpt"]))
    torch.set_default_dtype(torch.float32)
    if contender in (LORA, DS_LORA):
        model = with_adapters(model)
        model.to(device)
    params = sum(p.numel() for p in model.parameters())
    moves = CONTENDERS[contender](model, settings)
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(_TOKENS, (1, settings["context"] + 1), generator=draw).to(device)

    def train() -> None:
        for _ in range(2):  # DeepSpeed makes some of its states in the second step
            moves.backward(moves.forward(tokens[:, :-1], tokens[:, 1:]))
            moves.step()

    def loss() -> float:
        with torch.no_grad():
            return float(moves.forward(tokens[:, :-1], tokens[:, 1:]))

    crossed, held = {}, None
    before = 0 if device.type == CPU else torch.accelerator.memory_allocated(device)
    known = Run(params, [], [], None, None, [], [], [], None, {})
    for number in range(settings["rounds"] + 2):
        train()
        was = loss()
        synchronize(device)
        if number == 1:  # counting costs time; the first one may pin memory
            before = 0 if device.type == CPU else torch.accelerator.memory_allocated(device)
            crossed["away"] = copied(device, moves.away)
            held = None if device.type == CPU else (before, torch.accelerator.memory_allocated(device))
            crossed["back"] = copied(device, moves.back)
        else:
            times = seconds(device, moves.away), seconds(device, moves.back)
            if number > 1:
                known.away.append(times[0])
                known.back.append(times[1])
                known.collecting.append(seconds(device, gc.collect))
        if (now := loss()) != was:
            raise ValueError(f"{contender}: a loss of {now} after a round, and {was} before it")
    ways = [None, None]
    if all(crossed.values()):
        ways = [sum(pair) for pair in zip(*crossed.values(), strict=True)]
        for way, (n_bytes, taken) in enumerate(zip(ways, (known.plain_to_host, known.plain_to_device), strict=True)):
            if n_bytes and device.type != CPU:
                act = plain(device, n_bytes)[way]
                taken += [seconds(device, act) for _ in range(settings["rounds"] + 1)][1:]
    libraries = ("torch", *(("deepspeed",) if contender in (DS, DS_LORA, DS_OFFLOADED) else ()))
    versions = {name: metadata.version(name) for name in libraries}
    return known._replace(to_host=ways[0], to_device=ways[1], held=held, versions=versions)


def main() -> None:
    contender, path, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(settings["threads"])
    if contender in (DS, DS_LORA, DS_OFFLOADED):
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.setdefault("MASTER_PORT", str(free_port()))
        find_compilers()
    if settings["device"] == SIMULATED:
        from tests.support import simulated

        simulated.load()
        if contender in (DS, DS_LORA, DS_OFFLOADED):
            from bench.parts import deepspeed_device

            deepspeed_device.install()
    device = torch.device(CPU) if settings["device"] == CPU else torch.device(settings["device"], 0)
    path.write_text(json.dumps(run(contender, settings, device)._asdict()))
    os._exit(0)  # neither the group nor the device is taken down


if __name__ == "__main__":
    main()
