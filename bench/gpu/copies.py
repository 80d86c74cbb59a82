"""Copies between host and accelerator, from and to this project's memory, pinned in each way, and torch's own:
JSON, GB/s."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from frontends.torch.ranks.pinning import pinning_for
from offload_core.memory.host_memory import HostMemory

ROUNDS = 6


def rates(device: torch.device, n_bytes: int) -> dict[str, list[float]]:
    """Return the rates of each round but the first, by memory and direction."""
    hosts = {
        f"offload-core's memory, {way.done}": torch.from_numpy(
            HostMemory(4, [way]).allocate("probe", n_bytes, np.dtype(np.uint8), pinned=True)
        )
        for way in pinning_for(device)
    }
    hosts["torch's pinned"] = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    ways: dict[str, Callable[[], Any]] = {}
    for name, host in hosts.items():
        ways[f"{name}, to the device"] = lambda host=host: there.copy_(host, non_blocking=True)
        ways[f"{name}, to the host"] = lambda host=host: host.copy_(there, non_blocking=True)
    known: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, copy in ways.items():
            torch.accelerator.synchronize(device)
            start = time.perf_counter()
            copy()
            torch.accelerator.synchronize(device)
            known[name].append(n_bytes / (time.perf_counter() - start) / 1e9)
    return {name: rounds[1:] for name, rounds in known.items()}


if __name__ == "__main__":
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, "torch sees no accelerator here"
    print(json.dumps(rates(accelerator, int(sys.argv[1]))))
