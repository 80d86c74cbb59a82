"""What tests with Hugging Face's libraries share."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from frontends.torch import OffloadedAdamW
from frontends.torch.integrations.transformers import offloaded_adamw

STEPS, EPOCH, CLIP, LR = 8, 4, 0.5, 1e-2
OFFLOADED = {"optimizer_cls_and_kwargs": (OffloadedAdamW, {"lr": LR})}
ARGUMENTS = lambda args: {"optimizer_cls_and_kwargs": offloaded_adamw(args)}  # noqa: E731
TORCHS = {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": LR, "fused": True})}
TOKENS = torch.randint(64, (4 * EPOCH, 12), generator=torch.Generator().manual_seed(1))
DATA = [{"input_ids": row, "labels": row} for row in TOKENS]


@pytest.fixture(scope="module", autouse=True)
def alone():
    """No network, and one thread of torch: for models this small more only wait for each other."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield
    torch.set_num_threads(n_threads)


def llama(dtype=torch.float32):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=2, attention_dropout=0.1)  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def trainer_of(folder, optimizer=OFFLOADED, *, model=None, callbacks=(), **settings):
    """A Trainer that accumulates, clips, decays, warms up, and saves in the middle and at the end of an epoch.

    ``optimizer``: Trainer's arguments for it, or a function of the TrainingArguments that returns these.
    """
    settings = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": STEPS, "max_grad_norm": CLIP,
        "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2, "logging_steps": 1, "save_steps": 2,
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False,
    } | settings  # fmt: skip
    arguments = TrainingArguments(output_dir=str(folder), **settings)
    model = llama() if model is None else model
    optimizer = optimizer(arguments) if callable(optimizer) else optimizer
    return Trainer(model, arguments, train_dataset=DATA, callbacks=list(callbacks), **optimizer)


def trained(*args, resume=None, **kwargs):
    trainer = trainer_of(*args, **kwargs)
    trainer.train(resume_from_checkpoint=resume)
    return trainer
