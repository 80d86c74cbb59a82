"""Bytes of the accelerator that tensors take."""

import gc

import torch


def allocated():
    """The bytes now."""
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated()


def allocated_before():
    """The bytes now, to compare with later ones: what other tests have left in cycles is freed here, not in between."""
    while gc.collect():  # an engine may take several rounds
        pass
    return allocated()
