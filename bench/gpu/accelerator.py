"""Prints the accelerator that torch sees, as JSON; an error where it sees none."""

import json
import sys

import torch

from bench.train.torch_trainer import name_of


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        sys.exit("torch sees no accelerator here; expected one (torch.accelerator.is_available())")
    _, whole = torch.accelerator.get_memory_info(device)
    print(json.dumps({"type": device.type, "name": name_of(device), "bytes": whole, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
