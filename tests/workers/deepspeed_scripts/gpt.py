"""A GPT, as Megatron's fork for DeepSpeed trains it: the configuration comes with the arguments, groups with and
without weight decay, an iteration of several micro-batches, evaluation, checkpoints with tags of its own.
"""

import argparse
import json
import os

import torch
from torch import nn
from torch.nn import functional as F

from frontends.torch import deepspeed
from frontends.torch.deepspeed.accelerator import get_accelerator


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=None)
    parser.add_argument("--hidden-size", type=int, default=32)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--seq-length", type=int, default=16)
    parser.add_argument("--vocab-size", type=int, default=32)
    parser.add_argument("--train-iters", type=int, default=12)
    parser.add_argument("--eval-interval", type=int, default=4)
    parser.add_argument("--save-interval", type=int, default=6)
    parser.add_argument("--save", required=True)
    args = deepspeed.add_config_arguments(parser).parse_args()
    args.rank = int(os.getenv("RANK", "0"))
    return args


class Block(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(args.hidden_size)
        self.attention = nn.MultiheadAttention(args.hidden_size, 4, bias=False, batch_first=True)
        self.post_attention_layernorm = nn.LayerNorm(args.hidden_size)
        self.mlp = nn.Sequential(
            nn.Linear(args.hidden_size, 4 * args.hidden_size),
            nn.GELU(),
            nn.Linear(4 * args.hidden_size, args.hidden_size),
        )

    def forward(self, x, mask):
        h = self.input_layernorm(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class GPTModel(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.word_embeddings = nn.Embedding(args.vocab_size, args.hidden_size)
        self.position_embeddings = nn.Embedding(args.seq_length, args.hidden_size)
        self.layers = nn.ModuleList([Block(args) for _ in range(args.num_layers)])
        self.final_layernorm = nn.LayerNorm(args.hidden_size)

    def forward(self, tokens, position_ids, attention_mask, labels):
        x = self.word_embeddings(tokens) + self.position_embeddings(position_ids)
        for layer in self.layers:
            x = layer(x, attention_mask)
        logits = F.linear(self.final_layernorm(x), self.word_embeddings.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none").view_as(labels)


def get_params_for_weight_decay_optimization(module):
    decay, no_decay = {"params": []}, {"params": [], "weight_decay": 0.0}
    for submodule in module.modules():
        for name, param in submodule.named_parameters(recurse=False):
            without = isinstance(submodule, nn.LayerNorm) or name.endswith("bias")
            (no_decay if without else decay)["params"].append(param)
    return [decay, no_decay]


def data_iterator(args, seed):
    """Counting, from anywhere in the vocabulary: a model can learn it."""
    generator = torch.Generator().manual_seed(seed + args.rank)
    while True:
        start = torch.randint(args.vocab_size, (4, 1), generator=generator)
        yield {"text": (start + torch.arange(args.seq_length + 1)) % args.vocab_size}


def get_batch(iterator, args):
    device = get_accelerator().current_device_name()
    text = next(iterator)["text"].long().to(device)
    size = args.seq_length
    mask = torch.triu(torch.ones(size, size, dtype=torch.bool, device=device), diagonal=1)
    position_ids = torch.arange(size, device=device).unsqueeze(0).expand(len(text), -1)
    return text[:, :-1].contiguous(), position_ids, mask, text[:, 1:].contiguous()


def forward_step(iterator, model, args):
    losses = model(*get_batch(iterator, args))
    loss = losses.float().mean()
    averaged = loss.detach().clone()
    deepspeed.comm.all_reduce(averaged)
    return loss, averaged.item() / deepspeed.comm.get_world_size()


def train_step(iterator, model, optimizer, args):
    total = 0.0
    for _ in range(model.gradient_accumulation_steps()):
        loss, averaged = forward_step(iterator, model, args)
        model.backward(loss)
        total += averaged / model.gradient_accumulation_steps()
        model.step()
    return total


def evaluate(iterator, model, args):
    model.eval()
    with torch.no_grad():
        losses = [forward_step(iterator, model, args)[1] for _ in range(2)]
    model.train()
    return sum(losses) / len(losses)


def main():
    args = get_args()
    torch.manual_seed(1234)
    get_accelerator().manual_seed_all(1234)
    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name())
    model = GPTModel(args)
    model, optimizer, _, _ = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=get_params_for_weight_decay_optimization(model),
        dist_init_required=False,
    )
    log = []
    train, valid = data_iterator(args, 0), data_iterator(args, 1000)
    for iteration in range(1, args.train_iters + 1):
        loss = train_step(train, model, optimizer, args)
        entry = {
            "iteration": iteration,
            "loss": loss,
            "lr": [group["lr"] for group in optimizer.param_groups],
            "weight decay": [group["weight_decay"] for group in optimizer.param_groups],
            "grad norm": float(model.get_global_grad_norm()),
            "skipped": model.skipped_steps,
            "samples": model.global_steps * model.train_batch_size(),
        }
        if iteration % args.eval_interval == 0:
            entry["valid"] = evaluate(valid, model, args)
        log.append(entry)
        if iteration % args.save_interval == 0:
            state = {"iteration": iteration, "args": {"hidden_size": args.hidden_size}}
            model.save_checkpoint(args.save, tag=f"iter_{iteration:07d}", client_state=state)
        deepspeed.comm.barrier()
    model.save_16bit_model(args.save)
    if deepspeed.comm.get_rank() == 0:
        with open(os.path.join(args.save, "log.json"), "w") as file:
            json.dump(log, file)


if __name__ == "__main__":
    main()
