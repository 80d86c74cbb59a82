"""One rank that trains a mixture of experts: SCENARIO RANK WORLD_SIZE FOLDER, as rank_worker.py."""

import torch

from frontends.torch import wrap
from tests.support import experts as modules
from tests.support.hugging_face import LR
from tests.support.mixtures import KINDS, N_EXPERTS, batch, mixture, routed
from tests.support.torch_rank import bits, main, whole_bits

STEPS = 5
OFFLOADED = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0, "reduce_bucket_size": 3000}


def loss_of_transformers(model, seed):
    output = model(**batch(seed))
    return output.loss, routed(output)


def loss_of_modules(model, seed):
    loss = model(modules.rows(seed)).square().mean()
    blocks = [block for block in model.modules() if isinstance(block, modules.Experts)]
    return loss, [block.routed for block in blocks]


def with_torch(model, loss_of, ranks):
    """Fused AdamW with the mean of all ranks' gradients; a rank without one counts as zeros."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=LR, fused=True)
    for step in range(STEPS):
        of_ranks = []
        for rank in range(ranks):
            loss_of(model, ranks * step + rank)[0].backward()
            of_ranks.append([p.grad for p in params])
            optimizer.zero_grad()
        for p, *gradients in zip(params, *of_ranks, strict=True):
            there = [gradient for gradient in gradients if gradient is not None]
            p.grad = sum(there) / ranks if there else None
        optimizer.step()
        optimizer.zero_grad()
    return bits(model)


def trained(make, loss_of, leaves, n_experts, rank, ranks):
    runs = {
        "1": {"stage": 1},
        "2": {"stage": 2},
        "3, leaves": {**OFFLOADED, "leaf_modules": [leaves]},
        "3, leaves, serial": {**OFFLOADED, "leaf_modules": [leaves], "schedule": "serial"},
    }
    if n_experts == N_EXPERTS:  # in one tensor
        runs["3"] = OFFLOADED
    result = {"theirs": with_torch(make(), loss_of, ranks), "experts": n_experts, "bits": {}}
    for name, fields in runs.items():
        engine, found = wrap(make(), lr=LR, **fields), []
        for step in range(STEPS):
            loss, chosen = loss_of(engine, ranks * step + rank)
            found += chosen
            engine.backward(loss)
            engine.step()
        result["bits"][name], result["routed"] = whole_bits(engine), found
        engine.close()
    return result


def mixtral(rank, ranks):
    return trained(lambda: mixture("mixtral"), loss_of_transformers, KINDS["mixtral"], N_EXPERTS, rank, ranks)


def qwen3(rank, ranks):
    return trained(lambda: mixture("qwen3"), loss_of_transformers, KINDS["qwen3"], N_EXPERTS, rank, ranks)


def of_modules(rank, ranks):
    def make():  # torch rounds the last elements of others in another way
        model = modules.mixture()
        for p in model.parameters():
            p.requires_grad_(p.numel() % 16 == 0)
        return model

    return trained(make, loss_of_modules, "Experts", modules.N_EXPERTS, rank, ranks)


if __name__ == "__main__":
    main({"mixtral": mixtral, "qwen3": qwen3, "modules": of_modules}, timeout=60)
