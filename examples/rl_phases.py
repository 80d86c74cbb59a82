"""Reinforcement in phases: an actor trains, and gives the device to the generator that samples the next texts.

python rl_phases.py MODEL OUT. The reward is a stand-in: the share of tokens with even numbers.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from frontends.torch import wrap
from offload_core.step_log import ProgressBar, StepLog

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", help="a folder, or a name on the Hugging Face Hub")
parser.add_argument("out", type=Path, help="a folder for the log and the trained model")
parser.add_argument("--prompts", nargs="+", default=["Once upon a time", "The answer is"])
parser.add_argument("--lr", type=float, default=1e-5, help="(default: %(default)s)")
parser.add_argument("--kl", type=float, default=0.02, help="weight of the distance to the reference (default: 0.02)")
for name, default in {"rounds": 10, "texts": 8, "tokens": 32}.items():
    parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
args = parser.parse_args()

device = torch.accelerator.current_accelerator() or torch.device("cpu")
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
prompts = tokenizer(args.prompts, return_tensors="pt", padding=True).to(device)


def load():
    return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(device)


generator = load()  # stands for an inference engine, such as vLLM: it takes weights from named_weights(into=...)
settings = {"stage": 3, "offload_param": "cpu"}
reference = wrap(load().requires_grad_(False), **settings)  # frozen: no states, and its weights wait on the host
actor = wrap(load(), lr=args.lr, gradient_clipping=1.0, **settings)


def log_probs(model, batch):
    """Return the log-probability of each generated token."""
    logits = model(**batch).logits[:, -args.tokens - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, batch["input_ids"][:, -args.tokens :, None]).squeeze(-1)


def rewards(texts):
    return (texts[:, -args.tokens :] % 2 == 0).float().mean(1)


with StepLog(args.out / "steps.jsonl", ProgressBar(args.rounds, show=("reward", "kl")), engine=actor) as log:
    for _ in range(args.rounds):
        with actor.released(), reference.released():  # the device is the generator's
            actor.named_weights(dtype="bfloat16", into=dict(generator.named_parameters()))
            sampling = {"do_sample": True, "num_return_sequences": args.texts, "max_new_tokens": args.tokens}
            texts = generator.generate(**prompts, **sampling, min_new_tokens=args.tokens)
        mask = torch.ones_like(texts)
        mask[:, : -args.tokens] = prompts["attention_mask"].repeat_interleave(args.texts, 0)
        batch = {"input_ids": texts, "attention_mask": mask}
        got = rewards(texts).view(len(args.prompts), args.texts)  # each text beside those of the same prompt
        advantages = ((got - got.mean(1, keepdim=True)) / (got.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        with torch.no_grad():
            expected = log_probs(reference, batch)
        mine = log_probs(actor, batch)
        kl = ((expected - mine).exp() - (expected - mine) - 1).mean()
        actor.backward(args.kl * kl - (advantages * (mine - mine.detach()).exp()).mean())
        log(actor.step(), reward=got.mean(), kl=kl, tokens=texts.numel())
actor.export_safetensors(args.out / "model")
generator.config.save_pretrained(args.out / "model")
