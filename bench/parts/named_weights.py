"""Host memory and speed of ``engine.named_weights``: the weights of a whole model, handed to a receiver.

The peak is the growth of the process's resident memory while weights are given, beyond the parameters and states that
it holds. Receivers take turns: one that drops each bucket, one that is slow, and tensors that are written in place. The
model has an embedding larger than a bucket. On the CPU the device's memory is the host's, and counts.

``--check`` also exports the model and compares every bit.
"""

import argparse
import ctypes
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from bench import record
from frontends.torch import Engine, wrap

WIDTH, VOCABULARY = 2048, 32 * 1024
_M_MMAP_THRESHOLD = -3
SLOW_SECONDS = 0.05
"""The time that the slow receiver takes for each bucket."""


def model(params: int) -> nn.Module:
    """Return a model of so many parameters, all of the value 1 / 3: pages that are written, and no time to draw."""
    layers = (params - VOCABULARY * WIDTH) // WIDTH**2
    with torch.device("meta"):
        parts = [nn.Embedding(VOCABULARY, WIDTH), *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))]
        made = nn.Sequential(*parts).to(torch.bfloat16)
    made.to_empty(device="cpu")
    for param in made.parameters():
        nn.init.constant_(param, 1 / 3)
    return made


def status(field: str) -> int:
    """Bytes that the kernel reports of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def measured(act: Callable[[], object]) -> tuple[int, float]:
    """Return the growth of resident memory at the peak, in bytes, and the seconds."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that the allocator keeps would hide what is taken
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before, began = status("VmRSS"), time.perf_counter()
    act()
    seconds = time.perf_counter() - began
    return status("VmHWM") - before, seconds


def receivers(engine: Engine, dtype: str | None) -> dict[str, Callable[[], object]]:
    def drops() -> None:
        for _, tensor in engine.named_weights(dtype=dtype):
            del tensor

    def in_place() -> None:
        engine.named_weights(dtype=dtype, into=targets)

    targets = {name: torch.zeros_like(tensor) for name, tensor in engine.named_weights(dtype=dtype)}
    return {
        "an iterator, dropped": drops,
        "a slow function": lambda: engine.named_weights(dtype=dtype, into=lambda bucket: time.sleep(SLOW_SECONDS)),
        "tensors in place": in_place,
    }


def check(engine: Engine, dtype: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine.export_safetensors(folder, dtype=dtype, max_shard_bytes=2**62)
        with safe_open(f"{folder}/model.safetensors", "pt") as file:
            names = [*file.keys()]
            for name, tensor in engine.named_weights(dtype=dtype):
                names.remove(name)
                same = torch.equal(file.get_tensor(name).view(torch.uint8), tensor.view(torch.uint8))
                assert same, f"{name} differs from the export"
            assert not names, names
    print(f"{dtype or 'as it runs'}: every bit is the export's")


def return_freed_memory() -> None:
    """Have blocks of 1 MiB and more go back when they are freed.

    glibc's threshold rises to 32 MiB, depending on earlier blocks, and memory that it keeps would count as taken.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=1e9)
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--state-format", default=None, help="of the states, as OffloadConfig.state_format")
    parser.add_argument("--dtypes", nargs="*", default=["None", "float32", "bfloat16"])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    fields: dict[str, Any] = {} if options.stage != 3 else {"offload_param": "cpu"}
    fields |= {} if options.state_format is None else {"state_format": options.state_format}
    return_freed_memory()
    made = model(int(options.params))
    numel, largest = sum(p.numel() for p in made.parameters()), max(p.numel() for p in made.parameters())
    engine = wrap(made, lr=1e-3, stage=options.stage, **fields)
    bucket = engine.offload_config.reduce_bucket_size
    print(f"{record.machine()}, commit {record.commit()}: {numel:,} parameters, stage {options.stage}, {fields}")
    print(f"a bucket has {bucket:,} elements, the largest weight {largest:,}; process {status('VmRSS') / 1e9:.1f} GB")
    for name in options.dtypes:
        dtype = None if name == "None" else name
        itemsize = 4 if dtype == "float32" else 2
        bound = max(2 * bucket, largest) * itemsize
        for receiver, act in receivers(engine, dtype).items():
            act()  # the first call brings along what stays
            peak, seconds = measured(act)
            print(
                f"{dtype or 'as it runs':12}{receiver:24}{peak / 1e6:8.1f} MB beyond states (two buckets, or the "
                f"largest weight: {bound / 1e6:.1f} MB), {itemsize * numel / seconds / 1e9:.2f} GB/s"
            )
        if options.check:
            check(engine, dtype)


if __name__ == "__main__":
    main()
