"""Moves a library's model to its device."""

import torch
from torch import nn

from offload_core.config.options import OffloadConfig

from ..stage3.construction import become, in_shards, init


def to_device(module: nn.Module, device: torch.device, cut: OffloadConfig | None = None) -> None:
    """As ``module.to(device)``, but leave parameters in shards where they are.

    Args:
        cut: a configuration of stage 3: whole parameters are cut into shards, as by ``init()``, and only those of one
            module at a time are whole on the device.
    """
    if cut is None and not any(map(in_shards, module.parameters())):
        module.to(device)
        return
    for child in module.children():
        to_device(child, device, cut)
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if not in_shards(tensor) and tensor.device != device:
            become(tensor, tensor.detach().to(device))
    if cut is not None:
        with init(module, cut):
            pass
