"""TRL's trainers of preferences, rewards and generated texts, with torch's fused AdamW or on an engine."""

import tempfile
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from datasets import Dataset, load_from_disk
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.experimental.tpo import TPOConfig, TPOTrainer

from frontends.torch.integrations.trainer import OffloadTrainer
from tests.support.hugging_face import LR, ExactNorm, MeanOfRanks

STEPS, CLIP = 3, 0.01


def _words(seed, n):
    drawn = torch.randint(3, 64, (n,), generator=torch.Generator().manual_seed(seed))
    return "".join(f" w{int(word)}" for word in drawn)


def _rows(n=16):
    """Prompts, and completions of unlike lengths."""
    return [(_words(3 * i, 3 + i % 3), _words(3 * i + 1, 2 + i % 4), _words(3 * i + 2, 5 - i % 4)) for i in range(n)]


def reward(completion_ids, **kwargs):
    """The mean of a text's tokens."""
    return [sum(ids) / (64 * len(ids)) for ids in completion_ids]


_PREFERENCES = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in _rows()]
_LABELLED = [
    {"prompt": p, "completion": c if i % 2 else r, "label": bool(i % 2)} for i, (p, c, r) in enumerate(_rows())
]
_PROMPTS = [{"prompt": prompt} for prompt, _, _ in _rows()]
_TEXTS = [{"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": c}]} for p, c, _ in _rows()]
_CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_GENERATES = {"num_generations": 2, "max_completion_length": 6, "temperature": 1.0}


@dataclass(frozen=True)
class Kind:
    """One of TRL's trainers, and a run of it."""

    trainer: type
    config: type
    data: list[dict[str, Any]]
    settings: dict[str, Any]
    fields: dict[str, Any]
    scores: bool = False
    """True if its model gives a score in place of logits."""
    teacher: bool = False
    """True if it gets a teacher."""


KINDS = {
    "dpo": Kind(DPOTrainer, DPOConfig, _PREFERENCES, {}, {}),
    "kto": Kind(KTOTrainer, KTOConfig, _LABELLED, {}, {}),
    "reward": Kind(RewardTrainer, RewardConfig, _PREFERENCES, {}, {}, scores=True),
    "grpo": Kind(GRPOTrainer, GRPOConfig, _PROMPTS, {**_GENERATES, "beta": 0.1}, {"reward_funcs": reward}),
    "rloo": Kind(RLOOTrainer, RLOOConfig, _PROMPTS, {**_GENERATES, "beta": 0.1}, {"reward_funcs": reward}),
    "GMPO": Kind(GMPOTrainer, GMPOConfig, _PROMPTS, {**_GENERATES, "beta": 0.1}, {"reward_funcs": reward}),
    "online DPO": Kind(
        OnlineDPOTrainer, OnlineDPOConfig, _PROMPTS, {"max_new_tokens": 6, "max_length": 64}, {"reward_funcs": reward}
    ),
    "distillation": Kind(
        DistillationTrainer,
        DistillationConfig,
        _PROMPTS,
        {"max_completion_length": 6, "eval_strategy": "steps", "eval_steps": 2},
        {"eval_dataset": Dataset.from_list(_PROMPTS[:4])},
        teacher=True,
    ),
    "GKD": Kind(GKDTrainer, GKDConfig, _TEXTS, {"max_new_tokens": 6, "max_length": 64}, {}, teacher=True),
    "CPO": Kind(CPOTrainer, CPOConfig, _PREFERENCES, {"max_length": 64, "remove_unused_columns": False}, {}),
    "ORPO": Kind(ORPOTrainer, ORPOConfig, _PREFERENCES, {"max_length": 64, "remove_unused_columns": False}, {}),
    "TPO": Kind(TPOTrainer, TPOConfig, [{**row, "reference": row["chosen"]} for row in _PREFERENCES], {}, {}),
}


MODEL, SCORES, TEACHER = "model", "scores", "teacher"


@cache
def starts():
    """The folders of a model that is trained (and loaded again as its reference), one that gives scores, a teacher."""
    return {MODEL: _saved(0), SCORES: _saved(0, scores=True), TEACHER: _saved(1)}


def _saved(seed, scores=False):
    """A folder with a model and its tokenizer."""
    folder = tempfile.mkdtemp(prefix="trl-")
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = LlamaConfig(vocab_size=64, num_key_value_heads=2, num_labels=1, **sizes, **ids)
    (LlamaForSequenceClassification if scores else LlamaForCausalLM)(config).save_pretrained(folder)
    words = WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 64)}}, unk_token="<pad>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        padding_side="left",
        chat_template=_CHAT,
    ).save_pretrained(folder)
    return folder


@cache
def plain(kind):
    """The trainer, with torch's optimizer, and clipping by the exact norm."""
    return type(f"ExactNorm{kind}", (ExactNorm, KINDS[kind].trainer), {})


@cache
def plain_mean(kind):
    """The same, with each micro-step's mean over the ranks."""
    return type(f"MeanOfRanks{kind}", (MeanOfRanks, KINDS[kind].trainer), {})


@cache
def on_engine(kind):
    return type(f"Offload{kind}", (OffloadTrainer, KINDS[kind].trainer), {})


def rows_on_disk(kind, folder):
    """The rows in a folder, beside which TRL keeps precomputed values, one for all ranks."""
    Dataset.from_list(KINDS[kind].data).save_to_disk(folder)
    return folder


def load(which=MODEL, bases=None):
    """A model of :func:`starts`."""
    kind = LlamaForSequenceClassification if which == SCORES else LlamaForCausalLM
    return kind.from_pretrained((bases or starts())[which])


def run(
    folder, kind, of=plain, *, bases=None, rows=None, settings=None, peft_config=None, reward_model=False, **fields
):
    """Train for three updates that accumulate and clip.

    Args:
        of: :func:`plain`, :func:`plain_mean` or :func:`on_engine`.
        bases: the folders of :func:`starts`; on several ranks the same for all.
        reward_model: True: a model rewards texts, in place of :func:`reward`.
        peft_config: arguments of ``LoraConfig``; None: the whole model is trained.
        rows: the folder of :func:`rows_on_disk`; None: the rows are in memory.
    """
    this = KINDS[kind]
    given = {
        "max_steps": STEPS, "learning_rate": LR, "max_grad_norm": CLIP, "weight_decay": 0.1, "warmup_steps": 1,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "bf16": False, "logging_steps": 1,
        "save_strategy": "no", "lr_scheduler_type": "cosine", "use_cpu": True, "report_to": "none",
        "disable_tqdm": True, "dataloader_pin_memory": False, "optim": "adamw_torch_fused",
    } | this.settings | (settings or {})  # fmt: skip
    arguments = this.config(str(folder), **given)
    bases = bases or starts()
    which = SCORES if this.scores else MODEL
    model = load(which, bases)
    data = Dataset.from_list(this.data) if rows is None else load_from_disk(rows)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(bases[which])
    if peft_config is not None:
        fields["peft_config"] = LoraConfig(**peft_config)
    if this.teacher:
        fields["teacher_model"] = load(TEACHER, bases)
    if reward_model:
        fields["reward_funcs"] = load(SCORES, bases)
    trainer = of(kind)(
        model=model, args=arguments, train_dataset=data, processing_class=tokenizer,
        **{**this.fields, **fields},
    )  # fmt: skip
    trainer.train()
    return trainer
