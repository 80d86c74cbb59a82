"""verl's workers and trainers on the CPU, over gloo, with a tiny Llama. For processes of their own: it changes modules.

verl 0.9 has platforms of accelerators alone, so the CPU is registered as one more, as its plugins are. It imports names
that newer versions of transformers and of TRL have not, for models that are not used here.
"""

import copy
import json
import math
import os
import sys
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

os.environ["VERL_PLATFORM"] = "processor"
sys.modules.setdefault("verl.models.transformers.qwen2_vl", MagicMock())
warnings.simplefilter("ignore")

import pandas as pd  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from hydra import compose, initialize_config_module  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from tokenizers.pre_tokenizers import WhitespaceSplit  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from verl.plugin.platform import PlatformBase, PlatformRegistry  # noqa: E402
from verl.utils import import_utils  # noqa: E402

import_utils.is_trl_available = lambda: False

import verl.utils.model  # noqa: E402

verl.utils.model.load_valuehead_model = lambda local_path, torch_dtype, model_config, **_: (
    AutoModelForTokenClassification.from_pretrained(local_path, dtype=torch_dtype, config=model_config)
)

NOTHING = lambda *_: None  # noqa: E731
NONE = lambda *_: 0  # noqa: E731
MEMORY = SimpleNamespace(
    is_available=lambda: False, get_device_name=lambda: "CPU", empty_cache=NOTHING, synchronize=NOTHING,
    set_device=NOTHING, memory_allocated=NONE, memory_reserved=NONE, max_memory_allocated=NONE,
    max_memory_reserved=NONE, mem_get_info=lambda *_: (0, 0),
)  # fmt: skip
"""What verl asks of ``torch.cuda``."""


@PlatformRegistry.register(platform="processor")
class Processor(PlatformBase):
    """The CPU as verl's device."""

    device_name, vendor_name, device_module = "cpu", "cpu", MEMORY
    is_available = lambda self: True  # noqa: E731
    current_device = lambda self: "cpu"  # noqa: E731
    device_count = lambda self: 1  # noqa: E731
    set_device = synchronize = manual_seed = manual_seed_all = NOTHING
    set_allocator_settings = empty_cache = profiler_start = profiler_stop = NOTHING
    get_device_capability = lambda self, *_: (None, None)  # noqa: E731
    communication_backend_name = lambda self: "gloo"  # noqa: E731
    visible_devices_envvar = lambda self: "NO_DEVICES"  # noqa: E731
    nvtx_range = lambda self, message: nullcontext()  # noqa: E731
    ray_resource_name = lambda self: "CPU"  # noqa: E731
    ray_noset_envvars = lambda self: []  # noqa: E731
    is_ipc_supported = lambda self: False  # noqa: E731
    cudart = NOTHING


from verl.trainer.sft_trainer import SFTTrainer  # noqa: E402
from verl.workers.config import FSDPEngineConfig  # noqa: E402
from verl.workers.engine.base import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead  # noqa: E402
from verl.workers.engine.fsdp.utils import create_device_mesh  # noqa: E402

from frontends.torch import Engine  # noqa: E402
from tests.support import simulated  # noqa: E402
from tests.support.torch_rank import bits, whole_bits  # noqa: E402


def on_simulated_device():
    """Have verl take the simulated accelerator for its device."""
    simulated.load()
    os.environ["VERL_ENGINE_DEVICE"] = "cpu"  # engines are registered for it
    Processor.device_name, Processor.current_device = simulated.NAME, lambda self: f"{simulated.NAME}:0"


WORDS = 40
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def write_model(folder: Path, **fields) -> str:
    """Write a tiny Llama, and a tokenizer of whole words, as ``from_pretrained`` reads them."""
    torch.manual_seed(0)
    words = ["<pad>", "<end>", "<user>", "<assistant>", *(f"w{i}" for i in range(WORDS))]
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=False, **fields,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return str(folder)


def write_talks(file: Path, n_rows: int) -> str:
    """Write conversations of several lengths, as verl's data sets read them."""
    draw = torch.Generator().manual_seed(1)

    def said(role):
        length = int(torch.randint(3, 9, (), generator=draw))
        words = torch.randint(WORDS, (length,), generator=draw).tolist()
        return {"role": role, "content": " ".join(f"w{i}" for i in words)}

    pd.DataFrame({"messages": [[said("user"), said("assistant")] for _ in range(n_rows)]}).to_parquet(file)
    return str(file)


def composed(name: str, *overrides: str):
    """One of verl's own configurations, with these settings."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(name, list(overrides))


def sft_config(model: str, data: str, folder: Path, *overrides: str):
    """verl's own configuration of supervised fine-tuning, with these settings and few others."""
    return composed(
        "sft_trainer_engine", f"model.path={model}", "+model.override_config.attn_implementation=sdpa",
        "model.use_remove_padding=false", f"data.train_files={data}", f"data.val_files={data}",
        "data.train_batch_size=8",
        "data.num_workers=0", "data.micro_batch_size_per_gpu=2", "data.use_dynamic_bsz=false", "data.max_length=32",
        f"trainer.default_local_dir={folder}", "trainer.logger=[file]", "trainer.device=cpu", "trainer.total_epochs=2",
        "trainer.test_freq=2", "trainer.save_freq=3", "engine.use_torch_compile=false", "optim.lr=1e-2",
        "optim.weight_decay=0.1", "optim.clip_grad=0.1", "optim.lr_warmup_steps=2", "optim.lr_scheduler_type=cosine",
        *overrides,
    )  # fmt: skip


OURS = (
    "engine._target_=frontends.torch.integrations.verl.OffloadEngineConfig",
    "engine.strategy=offload",
    "+engine.mixed_precision.param_dtype=fp32",
)


class PlainEngine:
    """verl's FSDP engine with a whole model on each rank and torch's fused AdamW: what an engine of ours must equal.

    The ranks' gradients are averaged in each micro-step, and clipped by their exact norm.
    """

    def _init_device_mesh(self):
        super()._init_device_mesh()
        self.device_mesh = create_device_mesh(dist.get_world_size(), 1)

    def _build_fsdp_module(self, module):
        self._autocast_dtype = torch.float32
        return module

    def _build_optimizer(self, module):
        optim = self.optimizer_config
        trained = [p for p in module.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True)

    @contextmanager
    def _gradient_sync_context(self, *, is_last_micro_batch):
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        before = [p.grad for p in trained]
        self.optimizer.zero_grad()
        yield
        for p, earlier in zip(trained, before, strict=True):
            of_each = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(of_each, p.grad)
            mean = sum(of_each) / len(of_each)
            p.grad = mean if earlier is None else earlier + mean

    def optimizer_step(self):
        grads = [p.grad for group in self.optimizer.param_groups for p in group["params"]]
        norm = math.sqrt(math.fsum(square for grad in grads for square in grad.double().square().flatten().tolist()))
        for grad in grads:
            grad.mul_(torch.tensor(min(1.0, self.optimizer_config.clip_grad / (norm + 1e-6))).float())
        self.optimizer.step()
        return norm

    def to(self, *args, **kwargs):
        """Do nothing."""

    def _merged_lora_per_tensor_param(self):
        """As PEFT merges a copy: verl's own way is for FSDP alone."""
        return iter(copy.deepcopy(self.module).merge_and_unload().state_dict().items())


@EngineRegistry.register(model_type="language_model", backend="plain", device="cpu")
class PlainEngineWithLMHead(PlainEngine, FSDPEngineWithLMHead):
    """For actors, references and fine-tuning."""


@EngineRegistry.register(model_type="value_model", backend="plain", device="cpu")
class PlainEngineWithValueHead(PlainEngine, FSDPEngineWithValueHead):
    """For critics."""


@dataclass
class PlainConfig(FSDPEngineConfig):
    strategy: str = "plain"

    def __post_init__(self):
        """Take this strategy, too."""


PLAIN = ("engine._target_=tests.support.verl_on_cpu.PlainConfig", "engine.strategy=plain")


def weights_at_end(engine):
    """The bits of the weights of one of verl's engines, which ends."""
    if not isinstance(engine.module, Engine):
        return bits(engine.module)
    engine.module.restore()
    found = whole_bits(engine.module)
    engine.module.close()
    return found


def sent(engine, *, base):
    """The bits of the weights that an engine gives to an inference engine, by name, and the adapter's configuration.

    Args:
        base: True asks for the base's weights under LoRA, False for the adapter's.
    """
    weights, adapter = engine.get_per_tensor_param(base_sync_done=not base)
    return {name: weight.detach().contiguous().numpy().tobytes() for name, weight in weights}, adapter


def tuned(config, log: Path):
    """Run verl's trainer of supervised fine-tuning; return its engine, and losses, norms and rates that it logged."""
    os.environ["VERL_FILE_LOGGER_PATH"] = str(log)
    trainer = SFTTrainer(config)
    trainer.fit()
    return trainer.engine, logged(log, ("train/loss", "train/grad_norm", "train/lr", "val/loss"))


def logged(log: Path, names):
    """What verl has logged under these names, step by step; None on ranks that log nothing."""
    if not log.exists():
        return None
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [(line["step"], [line["data"].get(name) for name in names]) for line in lines]
