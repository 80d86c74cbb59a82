"""Mixtures of experts: Mixtral and Qwen3-MoE of transformers have the bits of torch's fused AdamW, on ranks, too."""

import pytest
import torch

from frontends.torch import gathered_parameters, wrap
from tests.support import experts as modules
from tests.support.hugging_face import LR, alone
from tests.support.mixtures import KINDS, N_EXPERTS, batch, mixture, routed
from tests.support.processes import on_ranks
from tests.support.torch_models import same_bits
from tests.support.torch_rank import bits, give_up, said_by, whole_bits

__all__ = ["alone"]  # a fixture
STAGE_3 = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0}


@pytest.fixture(scope="module", params=KINDS)
def reference(request):
    model, experts = mixture(request.param), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    for step in range(4):
        output = model(**batch(step))
        experts.append(routed(output))
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert any(len(block) < N_EXPERTS for step in experts for block in step), "every expert had tokens"
    return request.param, model, experts


@pytest.mark.draws(6)
@pytest.mark.parametrize(
    "fields",
    [
        {"stage": 1},
        {"stage": 2},
        {"stage": 2, "update_in_backward": True},
        STAGE_3,
        {**STAGE_3, "leaf_modules": None},
        {**STAGE_3, "update_in_backward": True},
    ],
    ids=["1", "2", "2, early", "3", "3, leaves", "3, early"],
)
def test_experts_without_tokens_train_as_with_torch(reference, fields):
    kind, expected, experts = reference
    if "leaf_modules" in fields:
        fields = {**fields, "leaf_modules": [KINDS[kind]]}
    engine, found = wrap(mixture(kind), lr=LR, **fields), []
    for step in range(4):
        output = engine(**batch(step))
        found.append(routed(output))
        engine.backward(output.loss)
        engine.step()
    assert found == experts
    with gathered_parameters(engine.module.parameters()):
        for (name, p), theirs in zip(engine.module.named_parameters(), expected.parameters(), strict=True):
            assert same_bits(p, theirs), name


# --- ranks -------------------------------------------------------------------------------------------

NARROW = {"max_live_parameters": 4000, "prefetch_bucket_size": 2500, "max_reuse_distance": 0}
BUCKETS = {**STAGE_3, "reduce_bucket_size": 3000}


def of_transformers(kind):
    def loss_of(model, seed):
        output = model(**batch(seed))
        return output.loss, routed(output)

    return lambda: mixture(kind), loss_of, KINDS[kind], N_EXPERTS


def of_modules():
    """Each expert is a module of its own, as in older models, and has no gradient without tokens."""

    def make():  # torch rounds the last elements of others in another way
        model = modules.mixture()
        for p in model.parameters():
            p.requires_grad_(p.numel() % 16 == 0)
        return model

    def loss_of(model, seed):
        loss = model(modules.rows(seed)).square().mean()
        return loss, [block.routed for block in model.modules() if isinstance(block, modules.Experts)]

    return make, loss_of, "Experts", modules.N_EXPERTS


def with_torch(model, loss_of, steps):
    """Fused AdamW with the mean of both ranks' gradients; a rank without one counts as zeros."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=LR, fused=True)
    for step in range(steps):
        of_ranks = []
        for rank in range(2):
            loss_of(model, 2 * step + rank)[0].backward()
            of_ranks.append([p.grad for p in params])
            optimizer.zero_grad()
        for p, *gradients in zip(params, *of_ranks, strict=True):
            there = [gradient for gradient in gradients if gradient is not None]
            p.grad = sum(there) / 2 if there else None
        optimizer.step()
        optimizer.zero_grad()
    return bits(model)


@pytest.mark.draws(1)
@pytest.mark.parametrize("kind", ["mixtral", pytest.param("qwen3", marks=pytest.mark.slow), "modules"])
def test_ranks_that_route_to_other_experts_train_as_torch_does_with_the_mean_of_their_gradients(kind):
    @on_ranks(2)
    def found(rank):
        make, loss_of, leaves, n_experts = of_modules() if kind == "modules" else of_transformers(kind)
        expected, result = with_torch(make(), loss_of, 5), []
        stages = [{"stage": 1}, {"stage": 2}, *([] if kind == "modules" else [BUCKETS])]
        stages += [{**BUCKETS, "leaf_modules": [leaves], "schedule": schedule} for schedule in ("overlap", "serial")]
        for fields in stages:
            engine, result = wrap(make(), lr=LR, **fields), []
            for step in range(5):
                loss, chosen = loss_of(engine, 2 * step + rank)
                result += chosen
                engine.backward(loss)
                engine.step()
            assert whole_bits(engine) == expected, fields
            engine.close()
        return result, n_experts

    (first, n_experts), (second, _) = found
    assert any(set(mine) ^ set(theirs) for mine, theirs in zip(first, second, strict=True)), (
        "no expert had tokens on one"
    )
    unused = [set(range(n_experts)) - {*mine, *theirs} for mine, theirs in zip(first, second, strict=True)]
    assert any(unused), "each expert had tokens somewhere"


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
QUICK = ("plain", "experts again", "a graph that is kept", "weights used outside, small")
AT_THE_END = {
    "a graph that is kept": "another backward may bring gradients",
    "a forward without backward": "that forward's backward may come",
    "weights used outside, small": "they share a bucket with the first layer",
}
"""Why gradients of these wait for the end of backward."""


def watched(engine):
    """The events of the next backwards: exchanges of gradients, and that of the first layer; and the most bytes of
    gradients that the pipeline holds on the device."""
    pipeline, events, most = engine.optimizer.core._pipeline, [], [0]
    reduce, add = pipeline.device.reduce, pipeline.gradients.add

    def reduced(*args):
        events.append("exchange")
        return reduce(*args)

    def added(*gradients):
        add(*gradients)
        waiting = [*(bucket.gradient.waiting for bucket in pipeline.buckets.all), pipeline.arrivals.since.deferred]
        most[0] = max(most[0], sum({id(g): g.nbytes for held in waiting for g in held.values()}.values()))

    pipeline.device.reduce, pipeline.gradients.add = reduced, added
    engine.module[0].weight.register_hook(lambda gradient: events.append("first layer"))
    return events, most


def backward(engine, way, seed):
    loss = engine(modules.rows(seed)).square().mean()
    if way == "a forward without backward":
        engine(modules.rows(seed + 1))
    engine.backward(loss, retain_graph=way == "a graph that is kept")
    if way == "a graph that is kept":
        engine.backward(loss)
    if way == "two backwards":
        engine.backward(engine(modules.rows(seed + 100)).square().mean())


def trained(rank, way, **stage):
    """Bits, the experts that had tokens, the events of the last micro-step, and the share of gradients held in it."""
    fields = {**stage, "gradient_accumulation_steps": 1, "param_persistence_threshold": 300, **WAYS[way]}
    how = {name: fields.pop(name) for name in ("again", "kind") if name in fields}
    compiled, chosen = fields.pop("compiled", False), []
    engine = wrap(modules.deep(**how), lr=LR, **fields)
    for layer in engine.module if compiled else ():
        layer.compile(backend="eager")
    n_micro_steps = 3 * fields["gradient_accumulation_steps"]
    for step in range(n_micro_steps):
        if step == n_micro_steps - 1:
            events, most = watched(engine)
        backward(engine, way, 2 * step + rank)
        chosen += [layer.block.routed for layer in engine.module[1:-1]]
        engine.step()
    found, share = whole_bits(engine), most[0] / sum(4 * p.numel() for p in engine.module.parameters())
    rounds = 2 if way in ("two backwards", "a graph that is kept") else 1
    assert events.count("exchange") == rounds * len(engine.optimizer.core._pipeline.buckets.all)
    engine.close()
    return found, chosen, events[: events.index("first layer")].count("exchange"), share


LEAVES = {**BUCKETS, **NARROW, "leaf_modules": ["Experts"]}


@pytest.mark.draws(1)
@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way in QUICK else pytest.mark.slow) for way in WAYS])
def test_in_every_way_experts_of_leaf_modules_have_the_bits_of_stage_2_and_their_gradients_leave_during_backward(way):
    """A bucket for each matrix of 3 blocks of 6 experts, and one for all that is small."""

    @on_ranks(2)
    def found(rank):
        ours, chosen, before, _ = trained(rank, way, **LEAVES)
        changes_nothing = {"again", "compiled", "schedule"} & WAYS[way].keys() or way == "a forward without backward"
        expected, *_ = trained(rank, "plain" if changes_nothing else way, stage=2)
        assert before < 8 if way in AT_THE_END else before >= 22
        return [ours, expected], chosen

    assert len({*found[0][0], *found[1][0]}) == 1
    pairs = [*zip(found[0][1], found[1][1], strict=True)]
    assert any(set(mine) != set(theirs) for mine, theirs in pairs), "each expert had tokens on both ranks or on none"
    assert any(len({*mine, *theirs}) < 6 for mine, theirs in pairs), "each expert had tokens somewhere"


def test_gradients_that_leave_during_backward_are_not_all_on_the_device_at_a_time():
    @on_ranks(2)
    def _(rank):
        assert trained(rank, "plain", **LEAVES)[3] < 0.7 * trained(rank, "a forward without backward", **LEAVES)[3]


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


def test_a_parameter_from_outside_that_a_leaf_module_reads_on_one_rank_alone_is_an_error_when_time_is_over():
    @on_ranks(2)
    def _(rank):
        fields = {**BUCKETS, **NARROW, "leaf_modules": ["Borrower"], "schedule": "serial"}
        engine = wrap(Lending(), lr=LR, **fields)

        def step(lends):
            engine.backward(engine(torch.ones(2, 16), lends))
            engine.step()

        step(True)
        if rank:
            give_up("'trunk.3.weight': gathering", after=1, all_do=True)
        else:
            give_up("exchange of gradients", all_do=True)
        said = said_by(lambda: step(rank == 0))
        assert "exchange of gradients" in said
        assert "'trunk.3.weight': gathering of its shards" in said
        assert "(in stage 3: ran other modules or lacked a gradient; leaf_modules names modules" in said
