"""``deepspeed.utils.zero_to_fp32``: whole fp32 weights of a checkpoint, of this engine's or of DeepSpeed's."""

from typing import Any

import torch
from torch import nn

from ...integrations.zero_files.whole import main, whole_state_dict, write_whole


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Any, tag: Any = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, torch.Tensor]:
    """Return the weights and buffers of a checkpoint, which ``latest`` names where ``tag`` is None."""
    return whole_state_dict(checkpoint_dir, tag, frozen=not exclude_frozen_parameters)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Any,
    output_dir: Any,
    max_shard_size: int | str = "5GB",
    safe_serialization: bool = False,
    tag: Any = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write them to one ``pytorch_model.bin``, or to safetensors files of at most ``max_shard_size``."""
    most = max_shard_size if safe_serialization else None
    write_whole(checkpoint_dir, output_dir, tag, max_shard=most, frozen=not exclude_frozen_parameters)


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: Any, tag: Any = None) -> nn.Module:
    """Load them into a model, which stays on its device, as far as it has these names; return it."""
    model.load_state_dict(whole_state_dict(checkpoint_dir, tag), strict=False)
    return model


if __name__ == "__main__":
    main()
