"""``deepspeed.utils``: states and gradients of a parameter, leaf modules, and helpers of scripts."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn

from frontends.torch import deepspeed, gathered_parameters, wrap
from frontends.torch.deepspeed import utils
from frontends.torch.deepspeed.utils import (
    OnDevice,
    RepeatingLoader,
    get_z3_leaf_modules,
    log_dist,
    logger,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)
from offload_core import StateError
from tests.support import experts
from tests.support.processes import on_ranks
from tests.support.torch_models import loss_of, make, same_bits
from tests.support.torch_rank import whole_bits

STAGE_3 = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0}
PARTED = {
    **STAGE_3,
    "max_reuse_distance": 0,
    "max_live_parameters": 1,
    "prefetch_bucket_size": 0,
    "reduce_bucket_size": 1000,
}
WHOLE = {"stage": 3, "param_persistence_threshold": 10**6, "reduce_bucket_size": 1000}

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
}


@pytest.fixture(autouse=True)
def no_group_is_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.draws(1)
@pytest.mark.parametrize("fields", [{"stage": 1}, {}, STAGE_3], ids=["stage 1", "stage 2", "stage 3"])
def test_a_script_that_reads_and_sets_all_has_what_it_set_and_the_bits_of_plain_torch(fields):
    @on_ranks(2)
    def _(rank):
        engine, plain = wrap(make(), lr=1e-2, **fields), make()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
        for seed in range(2):
            engine.backward(loss_of(engine, seed))  # the same on both ranks: so is the mean
            loss_of(plain, seed).backward()
            for p, q in zip(engine.module.parameters(), plain.parameters(), strict=True):
                assert same_bits(safe_get_full_fp32_param(p), q)
                assert same_bits(safe_get_full_grad(p), q.grad)
                safe_set_full_grad(p, q.grad * 2)
                safe_set_local_grad(p, safe_get_local_grad(p) + 1)
                q.grad.mul_(2).add_(1)
            safe_update_full_grad_vectorized(engine.module.parameters(), lambda gradient, p: gradient * 0.5)
            for q in plain.parameters():
                q.grad.mul_(0.5)
            engine.step()
            optimizer.step()
            optimizer.zero_grad()
            for p, q in zip(engine.module.parameters(), plain.parameters(), strict=True):
                assert safe_get_full_grad(p) is None
                for key in ("exp_avg", "exp_avg_sq"):
                    assert same_bits(safe_get_full_optimizer_state(p, key), optimizer.state[q][key])
        for p in engine.module.parameters():
            values = torch.rand(p.shape, generator=torch.Generator().manual_seed(0))
            safe_set_full_fp32_param(p, values)
            safe_set_local_fp32_param(p, safe_get_local_fp32_param(p) * 2)
            assert same_bits(safe_get_full_fp32_param(p), values * 2)
            with gathered_parameters([p]):
                assert same_bits(p, values * 2)
            safe_set_full_optimizer_state(p, values.flatten(), "exp_avg")
            safe_set_local_optimizer_state(p, safe_get_local_optimizer_state(p, "exp_avg") * 4, "exp_avg")
            assert same_bits(safe_get_full_optimizer_state(p, "exp_avg"), values * 4)


def test_a_gradient_carries_the_loss_scale_under_fp16():
    engine, plain = wrap(make(), lr=1e-2, param_dtype="float16", loss_scale=256.0), make(torch.float16)
    engine.backward(loss_of(engine, 0))
    (loss_of(plain, 0) * 256.0).backward()
    for p, q in zip(engine.module.parameters(), plain.parameters(), strict=True):
        assert same_bits(safe_get_full_grad(p), q.grad.float())
        safe_set_full_grad(p, q.grad * 2)
        assert same_bits(safe_get_full_grad(p), q.grad.float() * 2)
        assert same_bits(engine.optimizer.whole_gradient(p), q.grad.float() * 2 / 256)


def test_a_parameter_that_no_engine_trains_has_none():
    model = make()
    model[0].weight.requires_grad_(False)
    stranger = nn.Parameter(torch.ones(3))
    wrap(model, lr=1e-2)
    for param in (model[0].weight, stranger):
        assert safe_get_full_fp32_param(param) is None
        assert safe_get_full_optimizer_state(param, "exp_avg") is None
        assert safe_get_full_grad(param) is None
        assert safe_get_local_grad(param) is None
        safe_set_full_fp32_param(param, torch.zeros(3))
    assert stranger.tolist() == [1, 1, 1]
    stranger.grad = torch.ones(3)  # no engine has taken it
    safe_update_full_grad_vectorized([stranger], lambda gradient, p: gradient + 1)
    assert safe_get_full_grad(stranger) is stranger.grad
    assert stranger.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize("get", [safe_get_full_optimizer_state, safe_get_local_optimizer_state])
def test_a_state_of_another_rule_is_an_error_that_names_those_that_there_are(get):
    engine = deepspeed.initialize(model=make(), config=CONFIG)[0]
    with pytest.raises(StateError, match="state 'momentum_buffer' .* expected one of .*'exp_avg', 'exp_avg_sq'"):
        get(engine.module[0].weight, "momentum_buffer")


def test_leaf_modules_are_chosen_by_class_by_name_and_by_suffix_and_given_up():
    model = experts.mixture()
    blocks, routers = [model[1], model[2]], [model[1].router, model[2].router]
    assert set_z3_leaf_modules(model, [nn.Conv2d, experts.Experts]) == blocks == get_z3_leaf_modules(model)
    assert unset_z3_leaf_modules(model, ["Experts"]) == blocks
    assert set_z3_leaf_modules(model, [f"{experts.__name__}.Experts"]) == blocks
    unset_z3_leaf_modules(model, [experts.Experts])
    assert get_z3_leaf_modules(model) == []
    assert set_z3_leaf_modules_by_name(model, ["1.router", "nothing"], raise_if_not_found=False) == (
        routers[:1],
        ["nothing"],
    )
    assert set_z3_leaf_modules_by_suffix(model, ["router", "nothing"], raise_if_not_found=False) == (
        routers,
        ["nothing"],
    )
    set_z3_leaf_module(model[1].router, False)
    assert [z3_leaf_module(router) for router in routers] == [False, True]
    for choose, wanted in (
        (set_z3_leaf_modules, [nn.Conv2d]),
        (set_z3_leaf_modules_by_name, ["nothing"]),
        (set_z3_leaf_modules_by_suffix, ["nothing"]),
    ):
        with pytest.raises(ValueError, match="Sequential has no modules"):
            choose(model, wanted)


@pytest.mark.long("several trainings of mixtures of experts")
def test_ranks_run_other_experts_of_modules_that_became_leaves_before_or_after_the_engine_was_made(drawn):
    cases = drawn([("before", PARTED), ("after", PARTED), ("after", WHOLE)], 1)

    @on_ranks(2)
    def found(rank):
        bits = []
        for when, fields in (("never", {"stage": 2}), *cases):
            model = experts.mixture()
            if when == "before":
                set_z3_leaf_modules(model, [experts.Experts])
            engine = wrap(model, lr=1e-2, **fields)
            if when == "after":
                set_z3_leaf_modules(engine, [experts.Experts])
            if when != "never":
                assert get_z3_leaf_modules(engine) == [model[1], model[2]]
                assert [z3_leaf_parameter(p) for p in (model[0].weight, model[1].router.weight)] == [False, True]
            for seed in range(3):
                engine.backward(engine(experts.rows(2 * seed + rank)).square().mean())
                assert not engine.optimizer.core._pipeline.arrivals.since.deferred, "backward has finalized all"
                if when == "after" and seed == 1:
                    with pytest.raises(StateError, match="leaf modules are to change while gradients wait"):
                        unset_z3_leaf_modules(engine, [experts.Experts])
                engine.step()
            bits.append(whole_bits(engine))
            engine.close()
        return bits

    assert len({each for of_one in found for each in of_one}) == 1


def test_modules_that_the_configuration_names_are_leaf_modules_from_then_on():
    model = experts.mixture()
    section = {"stage": 3, "leaf_module": {"classes": ["Experts"], "name_suffixes": ["1.router"]}}
    engine, *_ = deepspeed.initialize(model=model, config={**CONFIG, "zero_optimization": section})
    leaves = [model[1], model[1].router, model[2]]
    assert get_z3_leaf_modules(model) == leaves
    engine.destroy()
    assert get_z3_leaf_modules(model) == leaves


def test_between_micro_steps_a_gradient_is_what_has_come_so_far():
    config = {**CONFIG, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}
    engine, *_ = deepspeed.initialize(model=make(), config=config)
    plain = make()
    for seed in (0, 1):
        engine.backward(loss_of(engine, seed))
        (loss_of(plain, seed) / 2).backward()
        for p, q in zip(engine.module.parameters(), plain.parameters(), strict=True):
            assert same_bits(safe_get_full_grad(p), q.grad)
        engine.step()
        assert [safe_get_full_grad(p) is None for p in engine.module.parameters()] == [seed == 1] * 4
    engine.destroy()


def test_a_loader_that_repeats_begins_again():
    loader = RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert iter(loader) is loader


def test_messages_are_logged_on_the_ranks_that_are_asked_for():
    @on_ranks(2)
    def found(rank):
        said = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        for ranks in (None, [1], [-1]):
            log_dist(f"to {ranks}", ranks=ranks)
        log_dist("hidden", ranks=[-1], level=logging.DEBUG)
        return said

    assert found == [["[Rank 0] to [-1]"], ["[Rank 1] to [1]", "[Rank 1] to [-1]"]]


def test_modules_are_made_on_a_device_in_a_type():
    with OnDevice(dtype=torch.bfloat16):
        made = nn.Linear(4, 4)
    assert (made.weight.device.type, made.weight.dtype) == ("meta", torch.bfloat16)
    with OnDevice(torch.bfloat16, enabled=False):
        made = nn.Linear(4, 4)
    assert (made.weight.device.type, made.weight.dtype) == ("cpu", torch.float32)
    assert torch.get_default_dtype() is torch.float32


def test_a_name_that_is_not_taken_says_what_to_use():
    with pytest.raises(AttributeError, match=r"deepspeed\.utils\.groups: .*`torch.distributed` has ranks and groups"):
        utils.groups  # noqa: B018
