"""One rank that trains a mixture of experts: SCENARIO RANK WORLD_SIZE FOLDER, as rank_worker.py."""

import sys

import torch

from frontends.torch import wrap
from offload_core import CollectiveError
from tests.support import experts as modules
from tests.support.hugging_face import LR
from tests.support.mixtures import KINDS, N_EXPERTS, batch, mixture, routed
from tests.support.torch_rank import bits, main, whole_bits

STEPS = 5
NARROW = {"max_live_parameters": 4000, "prefetch_bucket_size": 2500, "max_reuse_distance": 0}
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


WAYS = {
    "plain": {},
    "serial": {"schedule": "serial"},
    "accumulation": {"gradient_accumulation_steps": 2},
    "clipping": {"gradient_clipping": 0.05},
    "blocks again": {"again": "block"},
    "experts again": {"again": "expert"},
    "experts again, reentrant": {"again": "expert, reentrant"},
    "layers again": {"again": "layer"},
    "layers again, reentrant": {"again": "layer, reentrant"},
    "layers compiled": {"compiled": True},
    "two backwards": {},
    "a graph that is kept": {},
    "a forward without backward": {},
    "blocks that run twice": {"kind": modules.Repeated},
    "weights used outside": {"kind": modules.Borrowing},
    "weights used outside, small": {"kind": modules.Borrowing, "param_persistence_threshold": 1000},
}
"""Settings of a run, and how its model is made."""


def backward(engine, way, seed):
    loss = engine(modules.rows(seed)).square().mean()
    if way == "a forward without backward":
        engine(modules.rows(seed + 1))
    engine.backward(loss, retain_graph=way == "a graph that is kept")
    if way == "a graph that is kept":
        engine.backward(loss)
    if way == "two backwards":
        engine.backward(engine(modules.rows(seed + 100)).square().mean())


def watched(engine):
    """The events of the next backwards: exchanges of gradients, and that of the first layer; and the most bytes of
    gradients that the pipeline holds on the device."""
    pipeline, events, most = engine.optimizer.pipeline, [], [0]
    reduce, add = pipeline.device.reduce, pipeline.add_gradients

    def reduced(*args):
        events.append("exchange")
        return reduce(*args)

    def added(gradients):
        add(gradients)
        waiting = [*(work.waiting for work in pipeline.buckets.all), pipeline._reduction.arrivals.aside]
        most[0] = max(most[0], sum({id(g): g.nbytes for held in waiting for g in held.values()}.values()))

    pipeline.device.reduce, pipeline.add_gradients = reduced, added
    engine.module[0].weight.register_hook(lambda gradient: events.append("first layer"))
    return events, most


def of_leaves(rank, ranks):
    """Blocks of experts as leaf modules in stage 3, in each way, and in stage 2 those that compute something else."""
    result = {}
    for way, given in WAYS.items():
        fields = {"gradient_accumulation_steps": 1, "param_persistence_threshold": 300, **given}
        how = {name: fields.pop(name) for name in ("again", "kind") if name in fields}
        compiled = fields.pop("compiled", False)
        as_plain = compiled or "again" in how or way in ("serial", "a forward without backward")
        leaves = {**OFFLOADED, **NARROW, "leaf_modules": ["Experts"]}
        found = result[way] = {"2": result["plain"]["2"]} if as_plain else {}
        for stage, stages in (({} if as_plain else {"2": {"stage": 2}}) | {"3": leaves}).items():
            engine, routed = wrap(modules.deep(**how), lr=LR, **{**stages, **fields}), []
            for layer in engine.module if compiled else ():
                layer.compile(backend="eager")
            n_micro_steps = 3 * fields["gradient_accumulation_steps"]
            for step in range(n_micro_steps):
                if step == n_micro_steps - 1:
                    events, most = watched(engine)
                backward(engine, way, ranks * step + rank)
                routed.append([layer.block.routed for layer in engine.module[1:-1]])
                if step == n_micro_steps - 1:
                    events.append("end of backward")
                engine.step()
            found[stage], found["routed"] = whole_bits(engine), routed
            found["buckets"] = len(engine.optimizer.pipeline.buckets.all)
            engine.close()
        numel = sum(p.numel() for p in engine.module.parameters())
        found |= {"events": events, "share": most[0] / (4 * numel)}
    return result


class Lending(torch.nn.Module):
    """Its block of experts multiplies by a weight of its own, or not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
        self.weight = torch.nn.Parameter(torch.eye(16))
        self.experts = Borrower()

    def forward(self, x, lends):
        return self.experts(self.trunk(x), self.weight if lends else torch.eye(16)).square().mean()


class Borrower(modules.Experts):
    def __init__(self):
        super().__init__(None)

    def forward(self, x, weight):
        return super().forward(x) @ weight


def violating(rank, ranks):
    """What ranks are told where a leaf module reads a parameter from outside on one rank alone."""
    fields = {**OFFLOADED, **NARROW, "leaf_modules": ["Borrower"], "schedule": "serial"}
    engine, said = wrap(Lending(), lr=LR, **fields), None
    try:
        for step in range(3):
            engine.backward(engine(torch.ones(2, 16), rank == 0 or step == 0))
            engine.step()
    except CollectiveError as error:
        said = str(error)
    return {"said": said}


if __name__ == "__main__":
    scenarios = {"mixtral": mixtral, "qwen3": qwen3, "modules": of_modules, "leaves": of_leaves, "violating": violating}
    main(scenarios, timeout=5 if sys.argv[1] == "violating" else 60)
