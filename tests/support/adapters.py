"""A small Llama with an adapter of PEFT, trained with torch's fused AdamW or on an engine."""

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer

from frontends.torch import gathered_parameters
from tests.support.hugging_face import LR, llama

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


def adapted(**fields):
    """Without dropout; the adapter's random numbers follow those of the base."""
    base = llama().eval()
    return get_peft_model(base, LoraConfig(**LORA, **fields)).eval()


def batch(seed):
    x = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": x, "labels": x}


def with_torch(model, steps, optimizer=None, ranks=1):
    """Train the model as it is, with the mean of so many ranks' gradients; the optimizer."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(trained, lr=LR, fused=True)
    for step in steps:
        of_ranks = []
        for rank in range(ranks):
            model(**batch(ranks * step + rank)).loss.backward()
            of_ranks.append([p.grad for p in trained])
            optimizer.zero_grad()
        for p, *gradients in zip(trained, *of_ranks, strict=True):
            p.grad = sum(gradients) / ranks
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def on_engine(engine, steps, rank=0, ranks=1):
    for step in steps:
        engine.backward(engine(**batch(ranks * step + rank)).loss)
        engine.step()


def each_layer(model, act):
    """Call ``act`` on every layer that has an adapter, with the weights of that layer alone gathered."""
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            with gathered_parameters(layer.parameters(), modifier_rank=0):
                act(layer)
