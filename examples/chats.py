"""Chats as training data: read from a file, made into tokens, and grouped by length. For the scripts beside it."""

import json
import sys

import torch
from torch.nn.utils.rnn import pad_sequence

IGNORED = -100
"""The label of a token that is not learned."""
EXPECTED = 'expected {"messages": [{"role": "user", "content": "..."}, ...]} in each line'


def read_chats(path, tokenizer, longest, truncate=False):
    """Return the chats of a file as (tokens, labels), in its order.

    Each line is {"messages": [{"role": "user", "content": "..."}, ...]}. If the chat template marks the answers
    ({% generation %}), they alone are learned; else all tokens are.

    If some chats have more than `longest` tokens, this ends the program, or cuts them (truncate).
    """
    with open(path, encoding="utf-8-sig") as file:
        lines = {number: line for number, line in enumerate(file, 1) if line.strip()}
    if not lines:
        sys.exit(f"{path}: the file is empty; {EXPECTED}")
    chats = []
    for number, line in lines.items():
        try:
            messages = json.loads(line)["messages"]
            chats.append([{"role": m["role"], "content": m["content"] + ""} for m in [messages[0], *messages[1:]]])
        except (ValueError, LookupError, TypeError) as error:
            sys.exit(f"{path}, line {number}: {error!r}; {EXPECTED}")
    if tokenizer.chat_template is None:
        sys.exit(f"{tokenizer.name_or_path}: its tokenizer has no chat template; expected a model for chats")
    marks = any(f"{{%{dash} generation" in tokenizer.chat_template for dash in ("", "-"))
    found = tokenizer.apply_chat_template(chats, return_dict=True, return_assistant_tokens_mask=marks)
    too_long = [line for line, tokens in zip(lines, found["input_ids"], strict=True) if len(tokens) > longest]
    if too_long:
        what = f"{path}: {len(too_long)} of {len(chats)} chats are longer than {longest} tokens, the model's most"
        if not truncate:
            sys.exit(f"{what}; the first is in line {too_long[0]}. Take them out, or cut them with --truncate")
        print(f"{what}: they are cut")
    learned = found["assistant_masks"] if marks else found["attention_mask"]
    rows = [torch.tensor(row)[:, :longest] for row in zip(found["input_ids"], learned, strict=True)]
    rows = [(tokens, tokens.where(mask == 1, IGNORED)) for tokens, mask in rows if mask[1:].any()]
    print(f"learning from {len(rows)} of {len(chats)} chats: {'answers alone' if marks else 'all tokens'}")
    return rows or sys.exit(f"{path}: there is no answer to learn, or the chat template marks none")


def by_length(chats, size, epochs, seed=0):
    """Return the chats of each update: `size` of about equal length, so that little is padded, in random order.

    The same seed gives the same updates. At the end of the last epoch, chats that do not fill an update are left out.
    """
    if len(chats) * epochs < size:
        sys.exit(
            f"{len(chats)} chats are left to train on, and one update takes {size}: add some, or lower --accumulate"
        )
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([len(tokens) for tokens, _ in chats])
    order = torch.cat([torch.randperm(len(chats), generator=generator) for _ in range(epochs)])
    updates = []
    for window in order[: len(order) // size * size].split(16 * size):
        groups = window[lengths[window].argsort(stable=True)].split(size)
        updates += [groups[i].tolist() for i in torch.randperm(len(groups), generator=generator)]
    return [[chats[i] for i in update] for update in updates]


def micro_batches(chats, size, device):
    """Yield an update's chats in padded batches of `size`, each as arguments of a Hugging Face model.

    The model's loss is then the batch's share of the mean over all tokens of the update that are learned.
    """
    n_learned = sum(int((labels[1:] != IGNORED).sum()) for _, labels in chats)  # the first token is not predicted
    for i in range(0, len(chats), size):
        tokens, labels = zip(*chats[i : i + size], strict=True)
        rows = {"input_ids": (tokens, 0), "labels": (labels, IGNORED)}
        rows["attention_mask"] = [torch.ones_like(each) for each in tokens], 0
        batch = {name: pad_sequence(each, True, padding).to(device) for name, (each, padding) in rows.items()}
        yield {**batch, "num_items_in_batch": n_learned}
