"""Muon: wrap(model, optimizer="muon"), OffloadedMuon, and the bits of torch.optim.Muon on any ranks."""

import copy
import itertools
import json
import os
import re
import signal

import pytest
import torch
from torch import nn

from frontends.torch import OffloadedAdamW, OffloadedMuon, gathered_parameters, init, wrap
from frontends.torch.optim.matrix_groups import hidden_matrices
from frontends.torch.ranks import device_kernels as device
from offload_core import ConfigError, ParameterError, StateError
from tests import sampling
from tests.support.processes import on_ranks
from tests.support.torch_models import place, same_bits
from tests.support.torch_rank import said_by
from tests.support.ways import STAGE_3, WAYS

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon to compare with")
everywhere = pytest.mark.usefixtures("device")


class Stacked(nn.Module):
    """Linear layers, and a stack of matrices, as a mixture of experts has them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(24, 48)
        self.experts = nn.Parameter(torch.randn(3, 48, 16) * 0.1)
        self.second = nn.Linear(16, 32)
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        y = torch.einsum("bi,eij->bj", torch.tanh(self.first(x)), self.experts)
        return self.head(torch.tanh(self.second(torch.tanh(y))))


MATRICES = ("first.weight", "experts", "second.weight")


def loss_of(model, seed, rank=0):
    param = next(model.parameters())
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(1000 * seed + rank))
    return model(x.to(param.device, param.dtype)).float().pow(2).mean()


class Reference:
    """Plain training of all ranks' batches by torch's optimizers, over fp32 master weights."""

    def __init__(self, model, *, ranks=1, micro_steps=1, clip=None, muon=None, adamw=None):
        self.model, self.ranks, self.micro_steps, self.clip = model, ranks, micro_steps, clip
        self.params = [*model.parameters()]
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.params]
        matrices, others = [], []
        for (name, _), master in zip(model.named_parameters(), self.masters, strict=True):
            (matrices if name in MATRICES else others).append(master)
        self.matrices = {id(m): [x.detach().clone().requires_grad_() for x in _slices(m)] for m in matrices}
        flat = [x for each in self.matrices.values() for x in each]
        self.muon = torch.optim.Muon(flat, **{"lr": 0.02, **(muon or {})})
        self.adamw = torch.optim.AdamW(others, lr=1e-3, fused=True, **(adamw or {}))

    def masters_from(self, model):
        """Begin with another model's values, which this one's are rounded from."""
        with torch.no_grad():
            for master, param in zip(self.masters, model.parameters(), strict=True):
                master.copy_(param)
                for one, value in zip(self.matrices.get(id(master), ()), _slices(param), strict=False):
                    one.copy_(value)

    def step(self, seed):
        totals = [torch.zeros_like(m) for m in self.masters]
        for micro in range(self.micro_steps):
            of_ranks = []
            for rank in range(self.ranks):
                loss_of(self.model, seed * self.micro_steps + micro, rank).backward()
                of_ranks.append([p.grad.float() for p in self.params])
                self.model.zero_grad()
            for total, *gradients in zip(totals, *of_ranks, strict=True):
                mean = gradients[0].clone()
                for gradient in gradients[1:]:
                    mean += gradient
                total += mean / self.ranks
        for master, total in zip(self.masters, totals, strict=True):
            gradient = total / self.micro_steps
            for one, own in zip(self.matrices.get(id(master), ()), _slices(gradient), strict=False):
                one.grad = own.contiguous()
            master.grad = gradient
        self.muon.step()
        self.adamw.step()
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                if id(master) in self.matrices:
                    master.copy_(torch.stack(self.matrices[id(master)]).view_as(master))
                param.copy_(master)


def _slices(tensor):
    return [tensor] if tensor.dim() == 2 else [*tensor]


def train(engine, seeds, rank=0, micro_steps=1):
    for seed in seeds:
        for micro in range(micro_steps):
            engine.backward(loss_of(engine, seed * micro_steps + micro, rank))
            engine.step()
    engine.flush()


def values(model):
    with gathered_parameters([*model.parameters()]):
        return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def assert_same(found, expected):
    for name, value in expected.items():
        assert same_bits(found[name], value), name


@pytest.mark.draws(1)
@everywhere
@pytest.mark.quick
def test_twenty_steps_equal_torch_bit_for_bit():
    reference = Reference(Stacked())
    engine = wrap(Stacked().to(place()), optimizer="muon", lr=0.02)
    for seed in range(20):
        reference.step(seed)
    train(engine, range(20))
    assert_same(values(engine.module), values(reference.model))


ON_RANKS = {
    "stage 1": {"stage": 1},
    "stage 2": {"reduce_bucket_size": 1000, "gradient_accumulation_steps": 2},
    "clipped": {"gradient_clipping": 1e6, "reduce_bucket_size": 1},
    "narrow": {"param_dtype": "bfloat16", "communication_dtype": "float32", "reduce_bucket_size": 2500},
    "stage 3": STAGE_3,
    "delayed": {"schedule": "delayed", "delay_warmup_steps": 100},
}


def of_plain_training(world_size, fields, steps):
    dtype = torch.bfloat16 if "param_dtype" in fields else torch.float32
    reference = Reference(
        Stacked().to(dtype), ranks=world_size, micro_steps=fields.get("gradient_accumulation_steps", 1)
    )
    reference.masters_from(Stacked())
    for seed in range(steps):
        reference.step(seed)
    return {name: p.detach() for name, p in reference.model.named_parameters()}


@pytest.mark.draws(1)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_and_stages_give_the_bits_of_torch_in_one_process(world_size, drawn):
    settings = dict(drawn(ON_RANKS.items(), sampling.least(len(ON_RANKS))))

    @on_ranks(world_size)
    def found(rank):
        result = {}
        for name, fields in settings.items():
            engine = wrap(Stacked(), optimizer="muon", lr=0.02, **fields)
            train(engine, range(4), rank, fields.get("gradient_accumulation_steps", 1))
            result[name] = values(engine.module)
            engine.close()
        return result

    for name, fields in settings.items():
        expected = of_plain_training(world_size, fields, 4)
        for rank in range(world_size):
            assert_same(found[rank][name], expected)


@pytest.mark.draws(7)
@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_running_gives_the_same_bits(way):
    engine = wrap(Stacked(), optimizer="muon", lr=0.02, reduce_bucket_size=100, **WAYS[way])
    train(engine, range(4))
    assert_same(values(engine.module), of_plain_training(1, {}, 4))


def test_a_run_goes_on_on_other_ranks(tmp_path):
    whole = wrap(Stacked(), optimizer="muon", lr=0.02)
    train(whole, range(2))
    folder = whole.save_checkpoint(tmp_path)

    @on_ranks(2)
    def found(rank):
        result = []
        for fields in ({}, {**STAGE_3, "reduce_bucket_size": 1000}):
            engine = wrap(Stacked(), optimizer="muon", lr=0.02, **fields)
            engine.load_checkpoint(folder)
            train(engine, [3])  # all ranks have the same batch
            result.append(values(engine.module))
            engine.close()
        return result

    train(whole, [3])
    for each in (*found[0], *found[1]):
        assert_same(each, values(whole.module))


class Products(nn.Module):
    """Parameters whose gradients are their own values times constants."""

    def __init__(self, *shapes):
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(shape) * 0.1 for shape in shapes)

    def forward(self):
        return sum((w * torch.cos(torch.arange(w.numel())).view_as(w) * w).sum() for w in self.weights)


def products_trained(model, steps, late=False, **fields):
    """Train by Muon; ``late``: the first parameter is frozen in the first step."""
    model.weights[0].requires_grad_(not late)
    engine = wrap(model, optimizer="muon", lr=0.02, muon_params=[f"weights.{i}" for i in range(2)], **fields)
    for i in range(steps):
        model.weights[0].requires_grad_(not late or i > 0)
        engine.backward(engine())
        engine.step()
    engine.flush()
    return engine


SMALL_BUCKETS = {"reduce_bucket_size": 100}
IN_SHARDS = {"stage": 3, "param_persistence_threshold": 0, **SMALL_BUCKETS}


@pytest.mark.draws(1)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_stack_that_no_bucket_holds_keeps_its_states_in_one_run(world_size, tmp_path):
    shapes = (5, 5, 8), (3, 5, 7)  # whose matrices are no whole shards
    expected = products_trained(Products(*shapes), 3)

    @on_ranks(world_size)
    def found(rank):
        engine = products_trained(Products(*shapes), 3, **SMALL_BUCKETS)
        return values(engine.module), engine.save_checkpoint(tmp_path)

    for each, folder in found:
        assert_same(each, values(expected.module))
        engine = products_trained(Products(*shapes), 0)
        engine.load_checkpoint(folder)
        for i in range(2):
            state, whole = (e.optimizer.state[e.module.weights[i]] for e in (engine, expected))
            assert same_bits(state["momentum_buffer"], whole["momentum_buffer"])


@pytest.mark.draws(1)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("built", [False, True])
def test_matrices_of_more_elements_than_a_bucket_are_whole_in_stage_3(late, built):
    """Also those that are frozen at first, and those whose shards were cut as the model was built."""
    shapes = (24, 48), (5, 5, 8)
    expected = values(products_trained(Products(*shapes), 3, late).module)

    @on_ranks(2)
    def found(rank):
        with init(**IN_SHARDS, enabled=built):
            model = Products(*shapes)
        engine = products_trained(model, 3, late, **IN_SHARDS)
        return values(engine.module)

    for each in found:
        assert_same(each, expected)


def test_a_matrix_whose_shards_cut_it_is_refused_by_name_and_training_goes_on():
    @on_ranks(2)
    def found(rank):
        model = Products((24, 48), (5, 8))
        first, second = model.weights
        engine = wrap(model, params=[second], lr=0.02, **IN_SHARDS)
        with pytest.raises(ParameterError, match="'weights.0' was cut into shards for another .* at least 1,152"):
            engine.optimizer.add_param_group({"params": [first], "optimizer": "muon"})
        engine.optimizer.add_param_group({"params": [first]})
        engine.backward(engine())
        engine.step()
        return values(model)

    model = Products((24, 48), (5, 8))
    engine = wrap(model, lr=0.02)
    engine.backward(engine())
    engine.step()
    for each in found:
        assert_same(each, values(model))


def test_ranks_that_would_cut_a_frozen_matrix_differently_are_told():
    @on_ranks(2)
    def said(rank):
        model = Products((24, 48), (5, 8))
        first, second = model.weights
        first.requires_grad_(False)
        groups = [{"params": [second]}, {"params": [first], "optimizer": "muon" if rank else "adamw"}]
        with pytest.raises(ParameterError) as raised:
            wrap(model, params=groups, lr=0.02, **IN_SHARDS)
        return str(raised.value)

    assert all("differ from rank 0's" in each or "differs from rank 0's" in each for each in said)
    assert "'weights.0'" in said[1]


@pytest.mark.draws(2)
@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Lion", "Adagrad", "Muon"])
def test_a_deepspeed_configuration_is_of_the_optimizer_that_it_names(kind, as_file, tmp_path):
    params = {"momentum": 0.9} if kind in ("SGD", "Muon") else {}
    given = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {
            "type": kind,
            "params": {"lr": 0.01, **params, **({"ns_method": "standard"} if kind == "Muon" else {})},
        },
    }
    if as_file:
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps(given))
    engine = wrap(Stacked(), path if as_file else given)
    assert type(engine.optimizer).__name__ == f"Offloaded{kind}"
    assert engine.offload_config.optimizer == kind.lower()
    if kind != "AdamW":
        with pytest.raises(ConfigError, match=f"in OffloadedAdamW; expected Offloaded{kind}"):
            OffloadedAdamW(Stacked().parameters(), config=given)


def test_the_optimizer_alone_is_that_of_torch_and_states_go_both_ways():
    def matrices():
        torch.manual_seed(0)
        return [nn.Parameter(torch.randn(shape) * 0.1) for shape in ((24, 48), (48, 8), (7, 5))]

    def step(optimizer, params, seed):
        x = torch.randn(4, 24, generator=torch.Generator().manual_seed(seed))
        (torch.tanh(x @ params[0]) @ params[1]).pow(2).mean().add(params[2].pow(3).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    ours, theirs, again = matrices(), matrices(), matrices()
    settings = {"lr": 0.05, "weight_decay": 0.2, "momentum": 0.4, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}
    optimizer, reference = OffloadedMuon(ours, **settings), torch.optim.Muon(theirs, **settings)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2) for each in (optimizer, reference)]
    for seed in range(4):
        for each, params, schedule in zip((optimizer, reference), (ours, theirs), schedules, strict=True):
            step(each, params, seed)
            schedule.step()
    third = OffloadedMuon(again, lr=1.0)
    for mine, other in zip(again, theirs, strict=True):
        mine.data.copy_(other.data)
    third.load_state_dict(reference.state_dict())
    exported = torch.optim.Muon(ours, lr=1.0)
    exported.load_state_dict(optimizer.torch_state_dict())
    optimizer.close()
    for each, params in ((third, again), (exported, ours), (reference, theirs)):
        step(each, params, 9)
    for mine, other, last in zip(ours, theirs, again, strict=True):
        assert same_bits(mine, other)
        assert same_bits(last, other)


@pytest.mark.draws(4)
def test_a_skipped_step_changes_nothing():
    engine = wrap(Stacked(), optimizer="muon", lr=0.02, skip_nonfinite=True)
    for seed in range(3):
        engine.backward(loss_of(engine, seed) * float("inf"))
        assert not engine.step().updated
        train(engine, [seed])
    assert_same(values(engine.module), of_plain_training(1, {}, 3))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(20, 8)
        self.pos_embed = nn.Parameter(torch.zeros(1, 6, 8))
        self.blocks = nn.ModuleList([nn.ModuleDict({"qkv": nn.Linear(8, 24), "norm": nn.LayerNorm(8)})])
        self.patches = nn.Conv2d(3, 8, 2)
        self.lm_head = nn.Linear(8, 20, bias=False)


def test_matrices_are_chosen_by_shape_and_place_and_the_choice_is_told_once(capsys):
    engine = wrap(Transformer(), optimizer="muon", adamw={"lr": 3e-4})
    muon, adamw = engine.optimizer.param_groups
    names = {id(p): name for name, p in engine.module.named_parameters()}
    assert [names[id(p)] for p in muon["params"]] == ["blocks.0.qkv.weight"]
    assert len(adamw["params"]) == 8
    assert (muon["lr"], adamw["lr"], adamw["optimizer"]) == (1e-3, 3e-4, "adamw")
    assert capsys.readouterr().err.count("Muon updates 'blocks.0.qkv.weight'; AdamW updates") == 1
    tied = Transformer()
    tied.lm_head.weight = tied.wte.weight
    assert len(wrap(tied, optimizer="muon").optimizer.param_groups[0]["params"]) == 1
    chosen = wrap(Transformer(), optimizer="muon", muon_params=["lm_head.weight"], adjust_lr_fn="match_rms_adamw")
    assert [p.shape for p in chosen.optimizer.param_groups[0]["params"]] == [(20, 8)]
    assert chosen.optimizer.param_groups[1]["lr"] == 1e-3


def chain(*sizes):
    """Linear layers, as the attributes of a module that are called fc_0, fc_1 and so on."""
    return nn.ModuleDict({f"fc_{i}": nn.Linear(*pair) for i, pair in enumerate(itertools.pairwise(sizes))})


MODELS = {
    "the last linear layer is the head": (lambda: chain(8, 16, 4), ["fc_0.weight"]),
    "a norm changes nothing": (
        lambda: nn.ModuleDict({**chain(8, 16, 4), "norm": nn.LayerNorm(16), "position_wise": nn.Tanh()}),
        ["fc_0.weight"],
    ),
    "a named head is the only one": (
        lambda: nn.ModuleDict({"head": chain(8, 4), **chain(4, 8, 4)}),
        ["fc_0.weight", "fc_1.weight"],
    ),
    "with an embedding it has the vocabulary's size": (
        lambda: nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50)),
        ["1.weight"],
    ),
    "or is none": (lambda: nn.Sequential(nn.Embedding(50, 8), nn.Embedding(8, 8), nn.Linear(8, 8)), ["2.weight"]),
    "raw tables": (
        lambda: nn.ParameterDict(
            {n: torch.zeros(9, 8) for n in ("tok_emb", "pos_emb", "shared")} | {"w": torch.ones(8, 8)}
        ),
        ["w"],
    ),
}


@pytest.mark.parametrize(("model", "expected"), MODELS.values(), ids=MODELS)
def test_the_last_linear_layer_is_the_head_where_none_is_named(model, expected):
    made = model()
    assert sorted(hidden_matrices(made, [*made.named_parameters()])) == expected


UNCLEAR = {
    "an untied head that is not the last": (
        lambda: nn.ModuleDict({"wte": nn.Embedding(50, 8), "decode": nn.Linear(8, 50), "fc": nn.Linear(8, 8)}),
        "decode.weight",
    ),
    "a padded one": (
        lambda: nn.ModuleDict({"wte": nn.Embedding(50, 8), "fc": nn.Linear(8, 8), "decode": nn.Linear(8, 56)}),
        "decode.weight",
    ),
    "raw tensors of a vocabulary": (
        lambda: nn.ParameterDict({"lookup": torch.ones(2000, 8), "w": torch.ones(8, 8)}),
        "lookup",
    ),
    "a stack by the name of a head": (
        lambda: nn.ParameterDict({"outputs": torch.ones(3, 8, 8), "w": torch.ones(8, 8)}),
        "outputs",
    ),
}


@pytest.mark.parametrize(("model", "doubtful"), UNCLEAR.values(), ids=UNCLEAR)
def test_a_choice_that_is_not_clear_is_an_error_that_names_what_is_unclear(model, doubtful):
    made = model()
    with pytest.raises(ConfigError, match=rf"'{re.escape(doubtful)}' \([0-9, ]+\); expected muon_params="):
        wrap(made, optimizer="muon")
    wrap(made, optimizer="muon", muon_params=[doubtful])


WRONG = [
    ({"muon_params": []}, ConfigError, "muon_params: got .*, expected a list of .* that is not empty"),
    ({"muon_params": ["other.weight"]}, ConfigError, "muon_params: no parameter is named 'other.weight'"),
    ({"muon_params": ["first.bias"]}, ParameterError, r"'first.bias' of shape \(48,\) is no matrix"),
    ({"muon_params": "experts"}, ConfigError, "muon_params: got 'experts', expected a list"),
    ({"adamw": {"learning_rate": 0.1}}, ConfigError, "adamw: unknown hyperparameter 'learning_rate'"),
    ({"adamw": {"lr": -1.0}}, ConfigError, "adamw: lr: got -1.0"),
    ({"betas": (0.9, 0.95)}, ConfigError, "betas=.* has no place in optimizer='muon'; .* within adamw="),
    ({"ns_steps": 0}, ConfigError, "ns_steps: got 0, expected an integer of at least 1"),
    ({"ns_coefficients": (1.0, 2.0)}, ConfigError, "ns_coefficients: got .*, expected three numbers"),
    ({"adjust_lr_fn": "rms"}, ConfigError, "adjust_lr_fn: got 'rms', expected one of"),
    ({"momentum": -0.1}, ConfigError, "momentum: got -0.1"),
    ({"dampening": 0.1}, ConfigError, "dampening=0.1 has no place in optimizer='muon'"),
]


@pytest.mark.draws(4)
@pytest.mark.parametrize(("fields", "error", "message"), WRONG)
def test_wrong_settings_are_refused_before_anything_is_made(fields, error, message):
    model = Stacked()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        wrap(model, optimizer="muon", **fields)
    assert all(same_bits(value, before[name]) for name, value in model.state_dict().items())
    wrap(model, optimizer="muon")


def test_what_is_no_matrix_is_refused_by_name():
    with pytest.raises(ParameterError, match="'group 0, parameter 1' of shape .* is no matrix"):
        OffloadedMuon(nn.Linear(4, 4).parameters())
    with pytest.raises(ParameterError, match="is not one contiguous array in row order"):
        OffloadedMuon([nn.Parameter(torch.randn(4, 6).t())])
    with pytest.raises(ConfigError, match="the model has no matrix besides embeddings and heads"):
        wrap(nn.Linear(4, 4), optimizer="muon")


@pytest.mark.parametrize("fields", [{"muon_params": ["first.weight"]}, {"adamw": {"lr": 0.1}}], ids=str)
def test_settings_that_choose_in_a_whole_model_are_refused_beside_parameters(fields):
    model = Stacked()
    with pytest.raises(ConfigError, match="here they are given; expected groups"):
        OffloadedMuon([model.first.weight], **fields)
    with pytest.raises(ConfigError, match="here they are given; expected groups"):
        wrap(model, optimizer="muon", params=[model.first.weight], **fields)
    wrap(model, optimizer="muon", params=[model.first.weight])


def test_an_iteration_does_not_change_in_the_middle():
    engine = wrap(Stacked(), optimizer="muon")
    train(engine, [0])
    engine.optimizer.param_groups[0]["ns_steps"] = 6
    engine.backward(loss_of(engine, 1))
    with pytest.raises(ConfigError, match="parameter group 0: ns_coefficients, eps and ns_steps: got"):
        engine.step()
    engine.optimizer.param_groups[0]["ns_steps"] = 5
    engine.step()


@pytest.mark.draws(2)
@pytest.mark.states_in_memory
@pytest.mark.parametrize("way", WAYS)
def test_memory_is_planned(way):
    engine = wrap(Stacked(), optimizer="muon", param_dtype="bfloat16", **WAYS[way])
    train(engine, [0])
    rows = {row.what: row for row in engine.memory_report().rows if row.where == "host"}
    assert all(row.planned == row.held for row in rows.values())
    matrices = sum(p.numel() for p in engine.optimizer.param_groups[0]["params"])
    if "stage 3" not in way:
        assert rows["momentum_buffer"].held == 4 * matrices
    assert rows["directions"].held > 0


@pytest.mark.draws(1)
@pytest.mark.parametrize("fields", [{}, {"stage": 3, "param_persistence_threshold": 0}], ids=str)
@pytest.mark.parametrize("failing", [0, 1])
def test_an_iteration_that_fails_on_one_rank_is_its_error_at_once(failing, fields):
    """And not of an exchange for which nobody comes."""

    @on_ranks(2, killed=[failing])
    def _(rank):
        engine = wrap(Stacked(), optimizer="muon", lr=0.02, reduce_bucket_size=1, **fields)
        train(engine, [0])
        made, ranks = device.computed, engine.optimizer.components.core.device
        through, events = ranks.transform, []

        def fail(part, matrix):
            if rank == failing:
                events.append("fails")
                raise torch.OutOfMemoryError("no room")
            return made(part, matrix)

        def transform(*args, **kwargs):
            events.append("exchanges")
            return through(*args, **kwargs)

        device.computed, ranks.transform = fail, transform
        if rank == failing:
            with pytest.raises(torch.OutOfMemoryError, match="no room"):
                train(engine, [1])
            assert events[-1] == "fails"
            assert "exchanges" in events
            with pytest.raises(StateError, match=r"broke off \(OutOfMemoryError.*not be completed.* a checkpoint"):
                engine.optimizer.state_dict()
            os.kill(os.getpid(), signal.SIGKILL)
        said = said_by(lambda: train(engine, [1]))
        assert re.match(r"CollectiveError: .*bucket \d+: .* failed", said)
        assert "different ways" not in said


@pytest.mark.draws(1)
@everywhere
def test_an_iteration_that_fails_once_is_made_again_and_the_next_step_is_right(monkeypatch):
    """Its error is raised; the states are those of the whole update, as after any failure on the way."""
    reference = Reference(Stacked())
    engine = wrap(Stacked().to(place()), optimizer="muon", lr=0.02, reduce_bucket_size=100)
    made, failures = device.computed, iter([RuntimeError("out of memory")])

    def fail_once(part, matrix):
        for failure in failures:
            raise failure
        return made(part, matrix)

    train(engine, [0])
    monkeypatch.setattr(device, "computed", fail_once)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(engine, [1])
    engine.flush()  # the parameters that it did not send
    train(engine, [2])
    for seed in range(3):
        reference.step(seed)
    assert_same(values(engine.module), values(reference.model))
