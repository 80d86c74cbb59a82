"""Has Accelerate shard models on the CPU, over gloo, as it does on accelerators.

It takes FSDP for a kind of process group with an accelerator alone, and changes nothing else for the kind.
"""

import accelerate.state as state
from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.utils import DistributedType

_make = state.AcceleratorState.__init__


def _make_with_fsdp(self, *args, fsdp_plugin=None, **kwargs):
    _make(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None:
        self.distributed_type = state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin


def allow():
    """From now on, in this process."""
    state.AcceleratorState.__init__ = _make_with_fsdp
    ParallelismConfig._validate_accelerator = lambda self, accelerator: None


def plugin(kind):
    """FSDP2 of each layer of a Llama.

    Args:
        kind: of its state dicts, "FULL_STATE_DICT" or "SHARDED_STATE_DICT".
    """
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type=kind,
    )
