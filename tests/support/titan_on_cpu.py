"""torchtitan's trainer on the CPU, over gloo, with the debug model. For processes of their own: it changes modules.

torchtitan 0.3 asks an accelerator for its name and memory, imports kernels of triton that the debug model does not use,
and averages gradients in a way that gloo lacks.
"""

import sys
from dataclasses import dataclass
from unittest.mock import MagicMock

import torch
import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"  # before torchtitan is imported
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.components import metrics  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.distributed import utils  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402, F401

metrics.device_module = MagicMock()
metrics.device_module.memory_stats.return_value = {}
metrics.device_module.get_device_properties.return_value.total_memory = 2**30
utils.set_pg_timeouts = lambda **_: None

VOCABULARY = 2048


class Tokens(BaseDataLoader):
    """Random tokens, other ones for each process."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """torchtitan builds the class around it."""

    def __init__(self, config, *, seq_len, local_batch_size, dp_rank, **_):
        self.shape, self.rank, self.n_batches = (local_batch_size, seq_len + 1), dp_rank, 0

    def __iter__(self):
        while True:
            seed = 100 * self.n_batches + self.rank
            tokens = torch.randint(VOCABULARY, self.shape, generator=torch.Generator().manual_seed(seed))
            self.n_batches += 1
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self):
        return {"n_batches": self.n_batches}

    def load_state_dict(self, state_dict):
        self.n_batches = state_dict["n_batches"]


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """torchtitan builds the class around it."""

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, *_, **__):
        return []

    def decode(self, *_, **__):
        return ""

    def get_vocab_size(self):
        return VOCABULARY


def on_cpu(config, folder, *, n_layers=2, n_steps=6, saved_every=3):
    """Change a configuration of the debug model so that it runs here; it saves in this folder."""
    config.model_spec.model.layers = config.model_spec.model.layers[:n_layers]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.tokenizer, config.dataloader = NoTokenizer.Config(), Tokens.Config()
    config.parallelism.spmd_backend = "partial_dtensor"
    config.training.local_batch_size, config.training.seq_len = 2, 32
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.training.steps = n_steps
    config.lr_scheduler.total_steps = 10  # the same schedule for shorter runs
    config.checkpoint.enable, config.checkpoint.interval = True, saved_every
    config.validator.enable = False
    config.debug.seed = 0
    config.dump_folder = str(folder)
    return config


def trained(config):
    """The trainer, after its run."""
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    trainer.train()
    return trainer
