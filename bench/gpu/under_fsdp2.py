"""Training steps of GPT-2 1.5B under FSDP2 on one device: a line of JSON for each contender, with ms of each step."""

import gc
import json
import sys
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from bench.parts.torch_contenders import CLIPPING, adam_arguments
from bench.train.gpt_torch import GPT
from frontends.torch import OffloadedAdamW, wrap
from offload_core.commands.model_shapes import GPTS
from offload_core.support.processors import available_cpus

WINDOWS, CONTEXT, STEPS = 16, 1024, 5
CONTENDERS: dict[str, dict[str, Any]] = {
    "FSDP2, fused AdamW on the device": {},
    "FSDP2, offload-core": {"ours": "engine"},
    "FSDP2, offload-core, bf16 shards": {"ours": "engine", "dtype": torch.bfloat16},
    "FSDP2, OffloadedAdamW alone, bf16 shards": {"ours": "optimizer", "dtype": torch.bfloat16},
    "FSDP2, CPUOffloadPolicy, fused AdamW": {"offload": True},
}


def steps(device: torch.device, *, dtype: torch.dtype = torch.float32, offload: bool = False, ours: str = "") -> Any:
    """The times of a contender's steps, its losses, and its peak of device memory.

    Args:
        dtype: of the shards; fp32 ones are gathered as bf16.
        offload: True keeps parameters and gradients on the host (``CPUOffloadPolicy``).
        ours: "engine" or "optimizer"; empty: torch's own.
    """
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with device:
        model: Any = GPT(GPTS["gpt2-1.5b"], True)
    torch.set_default_dtype(torch.float32)
    options: dict[str, Any] = {"mesh": init_device_mesh(device.type, (1,))}
    if dtype is torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    clipped: dict[str, Any] = {"gradient_clipping": CLIPPING, "num_threads": available_cpus(), **adam_arguments()}
    engine = wrap(model, **clipped) if ours == "engine" else None
    if engine is None and ours:
        optimizer: Any = OffloadedAdamW(model.parameters(), early_copy=True, **clipped)
    elif engine is None:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **adam_arguments())
    tokens = torch.randint(256, (WINDOWS, CONTEXT + 1), generator=torch.Generator().manual_seed(1)).to(device)
    torch.accelerator.reset_peak_memory_stats(device)
    times, losses = [], []
    for _ in range(STEPS):
        torch.accelerator.synchronize(device)
        start = time.perf_counter()
        loss = (engine or model)(tokens[:, :-1], tokens[:, 1:])
        if engine is not None:
            engine.backward(loss)
            engine.step()
        else:
            loss.backward()
            if not ours:
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        torch.accelerator.synchronize(device)
        times.append(round(1e3 * (time.perf_counter() - start), 1))
    if engine is not None:
        engine.close()
    elif ours:
        optimizer.close()
    return {"ms": times, "losses": losses, "device_peak_gb": torch.accelerator.max_memory_allocated(device) / 1e9}


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        sys.exit("torch sees no accelerator here; expected one (torch.accelerator.is_available())")
    backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    for name, how in CONTENDERS.items():
        try:
            print(json.dumps({"name": name, **steps(device, **how)}), flush=True)
        except Exception:  # the others go on
            traceback.print_exc()
        gc.collect()
        torch.accelerator.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
