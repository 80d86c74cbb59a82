"""The programs of torch's ways in ``python -m offload_core prove``. Each trains a part of a way, and yields arrays by
name."""

from .others import (
    deepspeeds_cut,
    deepspeeds_whole,
    definition,
    fsdp2_alone,
    torchs_adamw,
    torchs_cut,
    torchs_whole,
)
from .training import deepspeed, engine, fsdp2, layerwise, optimizer, released, states_on_device, trainer, usable

__all__ = [
    "deepspeed",
    "deepspeeds_cut",
    "deepspeeds_whole",
    "definition",
    "engine",
    "fsdp2",
    "fsdp2_alone",
    "layerwise",
    "optimizer",
    "released",
    "states_on_device",
    "torchs_adamw",
    "torchs_cut",
    "torchs_whole",
    "trainer",
    "usable",
]
