"""TRL's SFTTrainer, with torch's fused AdamW or on an engine."""

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from frontends.torch.integrations.trainer import OffloadTrainer
from tests.support.hugging_face import CLIP, LR, TOKENS, ExactNorm, Generated, llama

ROWS = Dataset.from_dict({"input_ids": TOKENS.tolist()})


class ExactNormSFTTrainer(ExactNorm, SFTTrainer):
    pass


class OffloadSFTTrainer(OffloadTrainer, SFTTrainer):
    pass


def tuned(folder, kind, *, resume=None, generated=None, settings=None, **fields):
    """A run of four updates that accumulates, clips, checkpoints activations, evaluates, generates and saves."""
    tokenizer = Tokenizer(WordLevel({"<pad>": 0, **{f"w{i}": i for i in range(1, 64)}}, unk_token="<pad>"))
    config = SFTConfig(
        str(folder), max_steps=4, learning_rate=LR, max_grad_norm=CLIP, weight_decay=0.1, warmup_steps=1,
        per_device_train_batch_size=1, gradient_accumulation_steps=4, gradient_checkpointing=True, bf16=False,
        eval_strategy="steps", eval_steps=2, save_steps=2, logging_steps=1, lr_scheduler_type="cosine", max_length=None,
        use_cpu=True, report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
        **settings or {},
    )  # fmt: skip
    trainer = kind(
        llama(), config, train_dataset=ROWS, eval_dataset=ROWS.select(range(4)), callbacks=[generated or Generated()],
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="w1"),
        **fields,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer
