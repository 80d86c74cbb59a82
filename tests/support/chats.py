"""A tiny chat model with its tokenizer, and chats to train it on: what the scripts of examples/ get in tests."""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LONGEST = 32
"""The most tokens that the model takes."""
_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }} {% endgeneration %}"
    "{% else %}{{ message['content'] }} {% endif %}{% endfor %}"
)


def save_model(folder: Path, *, vocabulary: int = 64, hidden: int = 32, template: str | None = _TEMPLATE) -> Path:
    """Save a Llama of two layers with a tokenizer of words ``w2``, ``w3`` and so on, and return its folder."""
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, vocabulary)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    heads = max(hidden // 64, 2)
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, max_position_embeddings=LONGEST, **sizes)).save_pretrained(
        folder
    )
    return folder


def chat(words: list[str]) -> str:
    """A line of a file of chats, in which the answer counts the words of the question."""
    counted = " ".join(f"w{i}" for i in range(2, 2 + len(words)))
    said = [{"role": "user", "content": " ".join(words)}, {"role": "assistant", "content": counted}]
    return json.dumps({"messages": said}) + "\n"


def save_chats(path: Path, n: int, vocabulary: int = 64) -> Path:
    """Save chats of 4 to 22 tokens, and return their file."""
    drawn = random.Random(0)
    chats = [[f"w{drawn.randrange(2, vocabulary)}" for _ in range(drawn.randrange(2, 12))] for _ in range(n)]
    path.write_text("".join(map(chat, chats)))
    return path
