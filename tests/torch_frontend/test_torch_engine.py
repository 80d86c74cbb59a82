"""wrap(model): exactness, accumulation, mixed precision, loss scaling, and wrong input."""

import contextlib
import gc
import itertools
import math
import os
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from frontends.torch import OffloadConfig, OffloadedAdamW, wrap
from offload_core import (
    ConfigError,
    DiskSpaceError,
    GradientError,
    HostMemoryError,
    OffloadError,
    ParameterError,
    StateError,
)
from offload_core.native.grad_norm import clip_coefficient
from offload_core.testing.late_store import LateStore
from tests.support import late_stores
from tests.support.torch_models import assert_same, batch, loss_of, make, same_bits, step, train
from tests.support.ways import WAYS


def states(engine):
    optimizer = engine.optimizer
    return {name: {k: v.clone() for k, v in optimizer.state[p].items()} for name, p in engine.module.named_parameters()}


def everything(engine):
    """All bits that training goes on from."""
    values = [p.detach().clone() for p in engine.module.parameters()]
    for state in states(engine).values():
        values += state.values()
    return [v.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for v in values]


everywhere = pytest.mark.usefixtures("device")
rarely = pytest.mark.parametrize(
    "device", ["host", pytest.param("simulated, delays 0", marks=pytest.mark.slow)], indirect=True
)
"""Laws to which others hold on the simulated device at every change: tests/gpu watches memory there."""


@pytest.mark.draws(2)
@pytest.mark.quick
@everywhere
def test_fifty_steps_equal_torch_fused_bit_for_bit():
    ours, theirs = make(), make()
    engine, reference = wrap(ours, lr=1e-2), torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    assert all(step(engine, seed).updated for seed in range(50))
    train(theirs, reference, range(50))
    assert_same(ours, theirs, engine.optimizer, reference)


@pytest.mark.draws(1)
@everywhere
@pytest.mark.parametrize("loss_scale", [None, 1024.0])
def test_a_loop_that_counts_itself_says_where_the_boundary_is(loss_scale):
    """After fewer micro-steps than are configured or more; losses that were divided by their number are summed."""
    ours, theirs = make(), make()
    engine = wrap(ours, lr=1e-2, gradient_accumulation_steps=2, loss_scale=loss_scale)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    seeds = itertools.count()
    for n in (2, 1, 4, 2, 3):
        for i in range(n):
            seed = next(seeds)
            engine.backward(loss_of(ours, seed) / 4, average=False)
            report = engine.step(boundary=i == n - 1)
            assert report.updated == (i == n - 1)
            assert report.skipped in (None, "accumulating")
            (loss_of(theirs, seed) / 4).backward()
        reference.step()
        reference.zero_grad()
    engine.backward(loss_of(ours, 0))
    assert not engine.step().updated  # it counts from the last boundary
    engine.backward(loss_of(ours, 1))
    assert engine.step().updated
    for seed in range(2):
        (loss_of(theirs, seed) / 2).backward()
    reference.step()
    assert_same(ours, theirs, engine.optimizer, reference)


@everywhere
def test_a_boundary_without_a_gradient_of_its_own_updates_by_those_before():
    engine, other = (wrap(make(), lr=1e-2, gradient_accumulation_steps=3) for _ in range(2))
    for each in (engine, other):
        each.backward(loss_of(each, 0), average=False)
    assert not engine.step(boundary=False).updated
    assert engine.step(boundary=True).updated
    assert other.step(boundary=True).updated
    assert everything(engine) == everything(other)
    with pytest.raises(StateError, match=r"step\(\) without backward\(\)"):
        engine.step(boundary=True)


@everywhere
def test_wrapping_an_fp32_model_in_bf16_loses_nothing():
    original, model = make(), make()
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    model.register_parameter("frozen", frozen)
    engine = wrap(model, param_dtype="bfloat16")
    assert frozen.dtype is torch.bfloat16
    for name, p in original.named_parameters():
        rounded = model.get_parameter(name)
        assert same_bits(engine.optimizer.state[rounded]["master"], p)
        assert same_bits(rounded, p.to(torch.bfloat16))


@pytest.mark.draws(1)
@everywhere
def test_mixed_precision_equals_fp32_adamw_on_the_same_gradients():
    model = make()
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    shadow = {name: nn.Parameter(value) for name, value in masters.items()}
    reference = torch.optim.AdamW(shadow.values(), lr=1e-2, fused=True)
    engine = wrap(model, lr=1e-2, param_dtype="bfloat16")
    grads = {}
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name: grads.__setitem__(name, g.clone()))
    for seed in range(20):
        step(engine, seed)
        for name, p in shadow.items():
            p.grad = grads[name].float()
        reference.step()
    for name, p in model.named_parameters():
        assert same_bits(engine.optimizer.state[p]["master"], shadow[name])
        assert same_bits(p, shadow[name].detach().to(torch.bfloat16))


@pytest.mark.draws(2)
@pytest.mark.quick
@everywhere
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("clipping", [None, 1e-3])
def test_accumulation_is_the_exact_fp32_mean_of_the_micro_steps(dtype, clipping):
    n = 3
    model = make()
    engine = wrap(model, lr=1e-2, param_dtype=dtype, gradient_accumulation_steps=n, gradient_clipping=clipping)
    shadow = {
        name: nn.Parameter(engine.optimizer.state[p].get("master", p).detach().cpu().clone())
        for name, p in model.named_parameters()
    }
    reference = torch.optim.AdamW(shadow.values(), lr=1e-2, fused=True)
    arrived = []
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name: arrived.append((name, g.cpu().clone())))
    for update in range(4):
        arrived.clear()
        for micro in range(n):
            report = step(engine, update * n + micro)
            assert report.updated == (micro == n - 1)
            assert report.skipped == (None if report.updated else "accumulating")
        sums = {}
        for name, gradient in arrived:
            sums[name] = sums[name] + gradient.float() if name in sums else gradient.float()
        squares = math.fsum(float(x) ** 2 for s in sums.values() for x in s.flatten().tolist())
        coefficient = 1.0
        if clipping is not None:
            norm = math.sqrt(squares) / n
            assert report.grad_norm == pytest.approx(norm, rel=1e-14)
            coefficient = clip_coefficient(norm, clipping)
        for name, p in shadow.items():
            p.grad = sums[name] * np.float32(coefficient / n)
        reference.step()
    for name, p in model.named_parameters():
        assert same_bits(engine.optimizer.state[p].get("master", p), shadow[name])


@everywhere
def test_a_plain_backward_sums_and_engine_backward_averages():
    engines = [wrap(make(), lr=1e-2, gradient_accumulation_steps=2) for _ in range(3)]
    for seed in range(2):
        loss_of(engines[0], seed).backward()
        engines[1].backward(loss_of(engines[1], seed) * 2)
        engines[2].backward(loss_of(engines[2], seed))
        for engine in engines:
            engine.step()
    assert_same(engines[0].module, engines[1].module, engines[0].optimizer, engines[1].optimizer)
    assert not same_bits(
        engines[0].optimizer.state[engines[0].module[0].weight]["exp_avg"],
        engines[2].optimizer.state[engines[2].module[0].weight]["exp_avg"],
    )


@everywhere
def test_mixing_both_backwards_in_one_update_raises_and_can_be_discarded():
    engine = wrap(make(), gradient_accumulation_steps=2)
    before = everything(engine)
    step(engine, 0)
    loss_of(engine, 1).backward()
    with pytest.raises(GradientError, match="averages over the accumulation steps"):
        engine.step()
    assert everything(engine) == before
    engine.optimizer.zero_grad()
    for seed in range(2):
        report = step(engine, seed)
    assert report.updated


@everywhere
def test_several_backwards_in_one_micro_step_are_all_kept():
    engine, other = wrap(make(), lr=1e-2), wrap(make(), lr=1e-2)
    for seed in range(3):
        engine.backward(loss_of(engine, seed))
    engine.step()
    other.backward(sum(loss_of(other, seed) for seed in range(3)))
    other.step()
    for p, q in zip(engine.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-4)
    reference = OffloadedAdamW(make().parameters(), lr=1e-2, early_copy=True)
    model = next(group["params"] for group in reference.param_groups)
    assert len(model) == 4


def test_a_loop_that_steps_once_an_update_is_warned_that_its_backwards_count_as_one_micro_step():
    engine = wrap(make(), lr=1e-2, gradient_accumulation_steps=4)
    for seed in range(4):
        engine.backward(loss_of(engine, seed))
    with pytest.warns(UserWarning, match=r"4 backwards before one step\(\), .* one of 4 micro-steps .*boundary=True"):
        assert engine.step().skipped == "accumulating"
    engine.optimizer.zero_grad()
    for seed in range(4):
        engine.backward(loss_of(engine, seed))
    assert engine.step(boundary=True).updated  # no warning: the loop counts itself
    for seed in range(4):
        report = step(engine, seed)
    assert report.updated


@pytest.mark.draws(2)
@pytest.mark.parametrize("fields", WAYS.values(), ids=WAYS)
def test_one_loss_of_two_engines_is_averaged_in_both(fields):
    def norms(two):
        first = make()
        options = {"lr": 1e-2, "gradient_accumulation_steps": 4, "gradient_clipping": 1e3, **fields}
        torch.manual_seed(1)
        last = nn.Linear(first[-1].out_features, 4)
        if not two:
            engine = wrap(nn.Sequential(first, last), **options)
            engines = [engine]
        else:
            engines = [wrap(first, **options), wrap(last, **options)]
            engine = nn.Sequential(*engines)
        for seed in range(4):
            engines[-1].backward(engine(batch(seed)).pow(2).mean())
            reports = [each.step() for each in engines]
        return sum(report.grad_norm**2 for report in reports) ** 0.5

    assert norms(two=True) == pytest.approx(norms(two=False), rel=1e-6)


@pytest.mark.draws(1)
@everywhere
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("counts", [(1, 3, 2), (4, 1, 2)])
@rarely
def test_an_accumulation_that_changes_is_that_of_an_engine_that_began_with_it(device, dtype, counts):
    engine, *others = (
        wrap(make().to(device), lr=1e-2, param_dtype=dtype, gradient_accumulation_steps=n) for n in (counts[0], *counts)
    )
    for n, other in zip(counts, others, strict=True):
        engine.set_gradient_accumulation_steps(n)
        other.load_state_dict(engine.state_dict())
        other.optimizer.load_state_dict(engine.optimizer.state_dict())
        for i in range(n):
            assert step(engine, i).updated == step(other, i).updated == (i == n - 1)
        assert everything(engine) == everything(other)
    assert engine.offload_config.gradient_accumulation_steps == counts[-1]


def test_an_accumulation_changes_between_two_updates_only():
    engine = wrap(make(), gradient_accumulation_steps=2)
    step(engine)
    with pytest.raises(StateError, match="while gradients wait for an update"):
        engine.set_gradient_accumulation_steps(3)
    assert step(engine).updated
    for wrong in (0, 1.5, True, None):
        with pytest.raises(ConfigError, match="expected an integer of at least 1"):
            engine.set_gradient_accumulation_steps(wrong)
    assert not step(engine).updated
    assert step(engine).updated


def test_zero_grad_before_every_backward_accumulates_as_configured():
    engine, other = (wrap(make(), lr=1e-2, gradient_accumulation_steps=2) for _ in range(2))
    for seed in range(4):
        engine.zero_grad()
        step(engine, seed)
        step(other, seed)
    assert_same(engine.module, other.module, engine.optimizer, other.optimizer)


@everywhere
def test_dynamic_loss_scaling_skips_overflows_whole():
    engine = wrap(make(), lr=1e-2, param_dtype="float16", initial_loss_scale=2.0**24, loss_scale_window=2)
    scales, skipped = [], []
    for seed in range(12):
        before = everything(engine)
        report = step(engine, seed)
        scales.append(report.loss_scale)
        skipped.append(report.skipped)
        assert (everything(engine) == before) == (not report.updated)
    assert skipped[0] == "overflow"
    assert None in skipped
    for i in range(1, 12):
        if skipped[i - 1] == "overflow":
            assert scales[i] == scales[i - 1] / 2
        else:
            assert scales[i] in (scales[i - 1], scales[i - 1] * 2)
    assert any(b == 2 * a for a, b in itertools.pairwise(scales))


@pytest.mark.draws(1)
@everywhere
def test_the_loss_scale_changes_no_bits_where_nothing_overflows():
    runs = []
    for scale in (1.0, 64.0, 1024.0):
        model = make()
        engine = wrap(model, lr=1e-2, param_dtype="float16", loss_scale=scale, gradient_clipping=0.05)
        for p in model.parameters():
            p.register_hook(lambda g, scale=scale: torch.full_like(g, 2.0**-8 * scale))
        runs.append([step(engine, seed) for seed in range(3)] and everything(engine))
    assert runs[0] == runs[1] == runs[2]


@everywhere
def test_a_plain_backward_under_loss_scaling_raises():
    engine = wrap(make(), param_dtype="float16")
    before = everything(engine)
    with pytest.raises(GradientError, match=r"expected engine.backward\(loss\)"):
        loss_of(engine, 0).backward()
    assert everything(engine) == before
    engine.zero_grad()
    step(engine, 0)


@pytest.mark.draws(2)
@everywhere
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_nan_gradient_skips_the_update_whole(dtype):
    engine = wrap(make(), param_dtype=dtype, gradient_clipping=1.0)
    step(engine, 0)
    before = everything(engine)
    handle = engine.module[2].bias.register_hook(lambda g: g * torch.nan)
    report = step(engine, 1)
    assert (report.updated, report.skipped) == (False, "overflow" if dtype == "float16" else "non-finite")
    assert everything(engine) == before
    handle.remove()
    while not step(engine, 2).updated:
        pass
    assert everything(engine) != before


@pytest.mark.draws(1)
@everywhere
def test_bucket_size_and_threads_change_no_bits():
    runs = []
    for fields in ({}, {"reduce_bucket_size": 17}, {"reduce_bucket_size": 1000, "num_threads": 3}, {"num_threads": 1}):
        engine = wrap(make(), lr=1e-2, param_dtype="bfloat16", gradient_clipping=0.01, **fields)
        runs.append([step(engine, seed).grad_norm for seed in range(5)] + everything(engine))
    assert all(run == runs[0] for run in runs)


@pytest.mark.draws(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_infinite_bound_has_the_norm_computed_and_clips_nothing(tmp_path, device, dtype):
    free, normed = (wrap(make(), param_dtype=dtype, gradient_clipping=bound) for bound in (None, math.inf))
    for seed in range(3):
        squares = []
        for p in normed.module.parameters():
            p.register_hook(lambda g, squares=squares: squares.append(float(g.double().square().sum())))
        reports = [step(engine, seed) for engine in (free, normed)]
        assert reports[0].grad_norm is None
        assert reports[1].grad_norm == pytest.approx(math.sqrt(sum(squares[: len([*normed.parameters()])])), rel=1e-12)
        assert reports[1].clip_coefficient == 1.0
    assert everything(free) == everything(normed)
    normed.save_checkpoint(tmp_path)
    free.load_checkpoint(tmp_path)
    assert everything(free) == everything(normed)


class Named(nn.Linear):
    config = "of the module"

    def generate(self, n):
        return [self(torch.ones(1, 4, device=self.weight.device)) for _ in range(n)]


def test_attributes_that_the_engine_lacks_are_its_modules(device):
    engine = wrap(Named(4, 4).to(device), lr=0.5)
    assert engine.config is Named.config
    assert engine.offload_config.lr == 0.5
    assert len(engine.generate(2)) == 2
    assert engine.weight is engine.module.weight
    assert not hasattr(engine, "nowhere")
    with pytest.raises(AttributeError, match="'Named' object has no attribute 'nowhere'"):
        engine.nowhere  # noqa: B018
    engine.module.__dict__["_private"] = 1
    assert not hasattr(engine, "_private")


def test_inputs_are_cast_to_the_parameters_dtype(device):
    engine = wrap(make(), param_dtype="bfloat16")
    assert engine(batch(0)).dtype is torch.bfloat16
    ids = nn.Embedding(4, 8).to(device)
    assert wrap(ids, param_dtype="bfloat16")(torch.tensor([1, 2], device=device)).dtype is torch.bfloat16


def test_activation_checkpointing_and_reused_modules_work(device):
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.reentrant = nn.Linear(32, 32), reentrant

        def forward(self, x):
            x = x.requires_grad_() if self.reentrant else x
            for _ in range(3):
                x = (
                    checkpoint(self.inner, x, use_reentrant=self.reentrant)
                    if self.reentrant is not None
                    else self.inner(x)
                )
            return x

    results = []
    for reentrant in (None, False, True):
        engine = wrap(Model(reentrant).to(device), lr=1e-2)
        for seed in range(3):
            step(engine, seed)
        results.append([p.detach().clone() for p in engine.module.parameters()])
    assert all(same_bits(p, q) for p, q in zip(results[0], results[1], strict=True))
    for p, q in zip(
        results[0], results[2], strict=True
    ):  # reentrant backwards arrive one by one: another order of sums
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)


@everywhere
def test_gradients_leave_as_they_appear():
    engine = wrap(make(), param_dtype="bfloat16", gradient_accumulation_steps=2)
    gone = []
    for p in engine.module.parameters():
        p.register_hook(lambda g: gone.append(weakref.ref(g.untyped_storage())))
    engine.backward(loss_of(engine, 0))
    assert len(gone) == 4
    engine.optimizer.core._pipeline.buckets.run(lambda: None)  # the copies have ended
    assert all(storage() is None for storage in gone)
    for p in engine.module.parameters():
        assert p.grad.shape == p.shape
    engine.step()
    step(engine, 1)
    assert all(p.grad is None for p in engine.module.parameters())


@everywhere
def test_params_takes_groups_as_torch_does():
    model = make()
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    engine = wrap(
        model, params=[{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2
    )
    assert [g["weight_decay"] for g in engine.optimizer.param_groups] == [0.1, 0.0]
    assert step(engine, 0).updated


@rarely
@everywhere
def test_nothing_grows_with_the_number_of_steps():
    engine = wrap(make(), gradient_clipping=1.0, param_dtype="bfloat16", gradient_accumulation_steps=2)

    def held():
        engine.flush()
        while gc.collect():  # what tests before have left takes several rounds
            pass
        return engine.memory_report().host_bytes, sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    for seed in range(60):
        step(engine, seed)
        if seed == 11:  # at a boundary, as the last
            before = held()
    assert held() == before


@everywhere
def test_a_layer_unfrozen_after_wrap_is_trained():
    ours, theirs = make(), make()
    for model in (ours, theirs):
        model[0].requires_grad_(False)
    engine, reference = wrap(ours, lr=1e-2), torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    for seed in range(6):
        if seed == 3:
            ours[0].requires_grad_(True)
            theirs[0].requires_grad_(True)
        step(engine, seed)
        train(theirs, reference, [seed])
    assert_same(ours, theirs, engine.optimizer, reference)


@everywhere
def test_gradients_set_by_hand_count():
    engine = wrap(make())
    engine.module[0].weight.grad = torch.ones_like(engine.module[0].weight)
    assert engine.step().updated
    assert float(engine.optimizer.state[engine.module[0].weight]["exp_avg"][0, 0]) == pytest.approx(0.1)


@everywhere
def test_the_loss_scale_is_part_of_the_state():
    engine = wrap(make(), param_dtype="float16", initial_loss_scale=2.0**24)
    while not step(engine, 0).updated:
        pass
    scale = engine.optimizer.core.loss_scale
    assert scale < 2.0**24
    other = wrap(make(), param_dtype="float16", initial_loss_scale=2.0**24)
    other.load_state_dict(engine.state_dict())
    other.optimizer.load_state_dict(engine.optimizer.state_dict())
    for seed in range(3):
        assert step(engine, seed) == step(other, seed)
    assert everything(engine) == everything(other)
    assert other.optimizer.core.loss_scale == engine.optimizer.core.loss_scale


@everywhere
def test_a_refused_step_can_be_repeated_once_the_cause_is_mended():
    engine, other = (wrap(make(), gradient_accumulation_steps=2) for _ in range(2))
    for e in (engine, other):
        step(e, 0)
        e.backward(loss_of(e, 1))
    before = everything(engine)
    engine.optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ConfigError, match="parameter group 0: lr: got -1.0"):
        engine.step()
    assert everything(engine) == before
    engine.optimizer.param_groups[0]["lr"] = 1e-3
    assert engine.step() == other.step()
    assert everything(engine) == everything(other)


@everywhere
def test_the_optimizers_own_step_averages_like_the_engines():
    engine, other = (wrap(make(), gradient_accumulation_steps=2, gradient_clipping=1.0) for _ in range(2))
    for e in (engine, other):
        step(e, 0)
        e.backward(loss_of(e, 1))
    engine.step()
    other.optimizer.step()
    assert everything(engine) == everything(other)
    loss_of(engine, 2).backward()  # and a plain backward after it sums
    engine.optimizer.step()
    plain = wrap(make(), gradient_clipping=1.0)
    plain.module.load_state_dict(other.module.state_dict())
    loss_of(plain, 2).backward()
    plain.optimizer.step()
    assert engine.optimizer.report.grad_norm == plain.optimizer.report.grad_norm


@everywhere
def test_gradients_discarded_through_the_model_are_not_counted():
    engine, other = (wrap(make(), gradient_accumulation_steps=2, gradient_clipping=1.0) for _ in range(2))
    loss_of(engine, 5).backward()  # summed
    engine.module.zero_grad()
    for seed in range(2):
        assert step(engine, seed) == step(other, seed)
    assert everything(engine) == everything(other)
    engine.backward(loss_of(engine, 5))  # averaged
    engine.module.zero_grad()
    for p in engine.module.parameters():
        p.grad = torch.full_like(p, 0.5)
    engine.optimizer.step()
    assert engine.optimizer.report.grad_norm == math.sqrt(3152 * 0.25)


@everywhere
def test_both_backwards_are_the_same_where_nothing_is_averaged_or_scaled():
    engine, other = wrap(make()), wrap(make())
    loss_of(engine, 0).backward()
    engine.backward(loss_of(engine, 1))
    for seed in range(2):
        other.backward(loss_of(other, seed))
    assert engine.step() == other.step()
    assert everything(engine) == everything(other)


@everywhere
@pytest.mark.filterwarnings("ignore:parameters of the model that require a gradient:UserWarning")
def test_a_group_can_be_added_to_an_engines_optimizer():
    model = make()
    engine = wrap(model, params=[("weight", model[0].weight)], param_dtype="bfloat16")
    engine.optimizer.add_param_group({"params": model[2].parameters(), "lr": 1e-2})
    before = model[2].weight.detach().clone()
    step(engine, 0)
    assert not torch.equal(model[2].weight, before)
    assert engine.optimizer.param_groups[1]["param_names"][0] == "2.weight"


@pytest.mark.draws(1)
@everywhere
@pytest.mark.filterwarnings("ignore")  # dynamo's own
def test_a_compiled_training_step_works():
    engine, other = (wrap(make(), lr=1e-2) for _ in range(2))

    @torch.compile(backend="eager")
    def compiled(x):
        loss = engine(x).pow(2).mean()
        engine.backward(loss)
        engine.step()
        return loss

    for seed in range(3):
        compiled(batch(seed))
        other.backward(other(batch(seed)).pow(2).mean())
        other.step()
    assert everything(engine) == everything(other)


@everywhere
def test_backward_passes_its_options_on():
    engine = wrap(make(), param_dtype="float16", loss_scale=8.0)
    loss = loss_of(engine, 0)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    assert engine.step().updated


# --- wrong input ------------------------------------------------------------------------------------


def expect_refusal(error, match, model, *, unchanged=True, **fields):
    """wrap raises one clear error and leaves the model as it was: it can still be wrapped rightly."""
    before = [(id(p), p.dtype, p.detach().clone()) for p in model.parameters()] if unchanged else []
    with pytest.raises(error, match=match) as caught:
        wrap(model, **fields)
    assert isinstance(caught.value, OffloadError)
    for p, (identity, dtype, value) in zip(model.parameters(), before, strict=False):
        assert (id(p), p.dtype) == (identity, dtype)
        assert p.is_meta or torch.equal(p, value)


def with_odd(value):
    """A maker of models, one parameter of which is ``value``."""

    def make_model():
        model = make()
        model.register_parameter("odd", nn.Parameter(value))
        return model

    return make_model


@pytest.mark.parametrize(
    ("error", "match", "make_model"),
    [
        (ParameterError, "'odd' is complex.*view_as_real", with_odd(torch.ones(4, dtype=torch.complex64))),
        (ParameterError, "'odd' has dtype torch.float64", with_odd(torch.ones(4, dtype=torch.float64))),
        (ParameterError, "'odd' is on the meta device.*to_empty", with_odd(torch.ones(4, device="meta"))),
        (ParameterError, "'odd'.*gaps or overlaps.*contiguous", with_odd(torch.ones(4, 8)[:, ::2])),
        (ParameterError, "'odd' has layout torch.sparse_coo", with_odd(torch.eye(4).to_sparse())),
        (ParameterError, "ReLU has no floating-point parameter", nn.ReLU),
        (ParameterError, "has no shape yet", lambda: nn.Sequential(nn.LazyLinear(3))),
    ],
    ids=["complex", "float64", "meta", "gaps", "sparse", "none", "lazy"],
)  # fmt: skip
def test_unsuitable_parameters_are_refused(error, match, make_model):
    expect_refusal(
        error, match, make_model(), param_dtype="bfloat16", unchanged="sparse" not in match and "shape yet" not in match
    )


@pytest.mark.parametrize(
    "cast",
    [lambda engine: engine.half(), lambda engine: engine.module[0].to(torch.bfloat16)],
    ids=["the engine", "a layer"],
)
def test_a_model_that_is_cast_after_wrap_is_named_in_backward(cast):
    model = nn.Sequential(nn.Linear(4, 4))
    engine = wrap(model)
    cast(engine)
    loss = engine(torch.ones(2, 4, dtype=model[0].weight.dtype)).sum()
    with pytest.raises(ParameterError, match=r"'0\.\w+' is .* and was .* torch.float32 .* cast, .* before wrap"):
        engine.backward(loss)


def test_a_launched_process_that_has_not_joined_the_others_trains_only_if_it_says_so(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for act in (lambda: wrap(make()), lambda: OffloadedAdamW(make().parameters())):
        with pytest.raises(
            ConfigError, match=r"torchrun started 2 (?s:.*)\n    device = init_process_group\(\)\n.*alone"
        ):
            act()
    wrap(make(), process_group="alone").close()
    OffloadedAdamW(make().parameters(), process_group="alone").close()
    with pytest.raises(ConfigError, match="process_group: got 'alnoe', expected .* or 'alone'"):
        wrap(make(), process_group="alnoe")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrap(make()).close()  # a warning would be an error here
    finally:
        dist.destroy_process_group()


@everywhere
def test_frozen_integers_take_no_part_as_in_torch():
    """Quantized weights, in the optimizer's groups or not."""
    runs = []
    for new in (OffloadedAdamW, partial(torch.optim.AdamW, fused=True)):
        model = make()
        model[0].register_parameter("quantized", nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False))
        optimizer = new(model.parameters(), lr=1e-2)
        train(model, optimizer, range(2))
        optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer, range(2, 4))
        runs.append(model)
    for p, q in zip(runs[0].parameters(), runs[1].parameters(), strict=True):
        assert same_bits(p, q)
    model[0].register_parameter("quantized", nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False))
    assert step(wrap(model, params=model.parameters()), 0).updated
    with pytest.raises(ParameterError, match="no parameter requires a gradient"):
        OffloadedAdamW([model[0].quantized])


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("where", ["inside", "deep inside", "around the engine", "around the model", "in buckets"])
def test_gradients_are_averaged_by_the_engine_alone(where):
    """DistributedDataParallel reads p.grad in backward, where the engine has taken it."""
    model = make()
    if "inside" in where:
        averaging = DistributedDataParallel(model)
        model = nn.Sequential(nn.Linear(32, 32), averaging) if where == "deep inside" else averaging
        named = "module '1'" if where == "deep inside" else "the model"
        match = f"{named} is of type DistributedDataParallel, which averages .*expected wrap.model. of the module"
        expect_refusal(ParameterError, match, model)
        model.requires_grad_(False)  # as a teacher it averages nothing
        wrap(nn.Sequential(model, nn.Linear(16, 1)))
        return
    engine = wrap(model)
    averaging = DistributedDataParallel(engine if "engine" in where else model, gradient_as_bucket_view="in" in where)
    loss = averaging(batch(0)).pow(2).mean()
    with pytest.raises(GradientError, match=r"in backward, .*Is there a DistributedDataParallel .*around the engine"):
        engine.backward(loss)


@pytest.mark.usefixtures("group")
def test_parameters_that_are_replaced_after_wrap_are_an_error_that_says_so():
    engine = wrap(make())
    fully_shard(engine, mesh=dist.init_device_mesh("cpu", (1,)))
    engine.backward(engine(batch(0)).sum())
    said = r"'0\.weight' and 3 others has been replaced in the module since wrap.*fully_shard around the engine"
    with pytest.raises(StateError, match=said):
        engine.step()


DISK = {"offload_optimizer": "nvme", "nvme_path": "/a"}
ALL_ON_DEVICE = {"offload_optimizer": None}
PARAMETERS_ON_HOST = {"stage": 3, "offload_param": "cpu"}


@pytest.mark.draws(8)
@pytest.mark.parametrize(
    ("match", "fields"),
    [
        ("lr: got -1, expected a finite number >= 0", {"lr": -1}),
        ("parameter group 0: lr: got nan", {"lr": lambda updates: math.nan}),
        (r"betas\[1\]: got 1.0, expected a finite number >= 0 and < 1", {"betas": (0.9, 1.0)}),
        ("eps: got nan", {"eps": float("nan")}),
        ("weight_decay: got -0.1", {"weight_decay": -0.1}),
        ("gradient_clipping: got 0, expected a finite number > 0", {"gradient_clipping": 0}),
        (
            "gradient_accumulation_steps: got .*0.*, expected an integer of at least 1",
            {"gradient_accumulation_steps": np.int64(0)},
        ),
        ("unknown configuration field 'gradient_cliping'; did you mean 'gradient_clipping'", {"gradient_cliping": 1.0}),
        ("param_dtype: got 'int8', expected one of", {"param_dtype": "int8"}),
        ("buffer_dtype: got 'int8', expected one of", {"buffer_dtype": "int8"}),
        ("cast_inputs: got 'no', expected True or False", {"cast_inputs": "no"}),
        ("offload_param='cpu' with stage=2.*expected stage=3", {"offload_param": "cpu"}),
        ("max_live_parameters: got -1, expected an integer of at least 0", {"max_live_parameters": -1}),
        ("stage: got 4, expected one of 1, 2, 3", {"stage": 4}),
        ("loss_scale: got 'static'", {"loss_scale": "static"}),
        ("num_threads: got 0", {"num_threads": 0}),
        ("gradient_clipping: got '1.0', expected a number", {"gradient_clipping": "1.0"}),
        ("lr: got '1e-3', expected a number", {"lr": "1e-3"}),
        ("weight_decay: got True, expected a number", {"weight_decay": True}),
        ("config: 'ds_config.json' cannot be read", {"config": "ds_config.json"}),
        ("config: got a list", {"config": [1]}),
        ("offload_optimizer='nvme' without nvme_path; expected nvme_path='/folder", {"offload_optimizer": "nvme"}),
        ("device_states_bytes: got 1.5, expected an integer, .* a float from 0.0", {"device_states_bytes": 1.5}),
        ("device_states_bytes='auto' without activation_memory; expected", {"device_states_bytes": "auto"}),
        ("device_states_bytes=0.5 beside offload_optimizer=None", {"device_states_bytes": 0.5, **ALL_ON_DEVICE}),
        ("offload_optimizer=None beside offload_param='cpu': .*expected", {**ALL_ON_DEVICE, **PARAMETERS_ON_HOST}),
        ("device_states_bytes=9 beside offload_param='cpu'", {"device_states_bytes": 9, **PARAMETERS_ON_HOST}),
        (r"nvme_path=\('/a',\) has no place beside offload_optimizer='cpu'; .*or nvme_path=None", {"nvme_path": "/a"}),
        ("nvme_host_bytes=0 has no place beside offload_optimizer='cpu'", {"nvme_host_bytes": 0}),
        (r"nvme_path: got \(\), expected a folder, a list of folders or None", {**DISK, "nvme_path": []}),
        ("nvme_path: got 3, expected a folder, a list", {**DISK, "nvme_path": 3}),
        ("nvme_path: got '', expected the name of a folder", {**DISK, "nvme_path": ""}),
        ("nvme_path: got b'/a', expected the name of a folder", {**DISK, "nvme_path": [b"/a"]}),
        ("nvme_path: got <DirEntry b.*>, expected the name", {**DISK, "nvme_path": max(os.scandir(b"/"), key=str)}),
        (r"nvme_path: got '/a\\x00', expected the name of a folder", {**DISK, "nvme_path": "/a\0"}),
        ("nvme_path: got '/a/b/..' twice, expected each folder once", {**DISK, "nvme_path": ["/a", "/a/b/.."]}),
        ("nvme_host_bytes: got -1, expected an integer of at least 0", {**DISK, "nvme_host_bytes": -1}),
        ("nvme_host_bytes: got 1.5, expected an integer of at least 0", {**DISK, "nvme_host_bytes": 1.5}),
        ("nvme_host_bytes: got True, expected an integer", {**DISK, "nvme_host_bytes": True}),
        ("offload_param='nvme' with stage=2: .*expected stage=3", {**DISK, "offload_param": "nvme"}),
        (
            "offload_param='nvme' with offload_optimizer='cpu': .*expected offload_optimizer='nvme' and nvme_path",
            {"stage": 3, "offload_param": "nvme"},
        ),
        (
            "offload_param='nvme' with schedule='delayed', .*expected schedule='overlap' or 'serial'",
            {**DISK, "stage": 3, "offload_param": "nvme", "schedule": "delayed"},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_configuration_is_refused(match, fields):
    expect_refusal(ConfigError, match, make(), **fields)


@pytest.mark.parametrize(
    "given", ["/a", Path("/a"), ["/a"], ("/a",), ["/a", Path("/b")], (Path("/a"), "/b")], ids=lambda given: str(given)
)
def test_folders_of_states_on_disk_are_a_tuple_of_their_names(given):
    """The defaults of ``schedule`` and the tiers that go together are taken, too."""
    names = ("/a", "/b") if isinstance(given, list | tuple) and len(given) == 2 else ("/a",)
    fields = {"stage": 3, "offload_param": "nvme", "nvme_host_bytes": np.int64(0)}
    for config in (
        OffloadConfig.resolve(None, **{**DISK, "nvme_path": given}, **fields),
        OffloadConfig(**{**DISK, "nvme_path": given}, **fields, schedule="serial"),
    ):
        assert config.nvme_path == names
        assert [type(name) for name in config.nvme_path] == [str] * len(names)
        assert replace(config, lr=1.0).nvme_path == names


@pytest.mark.parametrize("given", [torch.bfloat16, "bf16", "bfloat16", ml_dtypes.bfloat16], ids=str)
def test_element_types_may_be_given_as_frameworks_have_them(given):
    engine = wrap(nn.Linear(2, 2), param_dtype=given)
    assert engine.module.weight.dtype == torch.bfloat16
    assert engine.offload_config.param_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("name", "field"),
    [("learning_rate", "lr"), ("wd", "weight_decay"), ("clip", "gradient_clipping"), ("dtype", "param_dtype")],
)
def test_a_setting_by_the_name_of_another_library_is_named_as_it_is_here(name, field):
    with pytest.raises(ConfigError, match=f"unknown configuration field '{name}'; expected '{field}'"):
        wrap(nn.Linear(2, 2), **{name: 1})


def test_an_optimizer_is_no_configuration():
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"got an AdamW, .*; wrap\(\) makes the optimizer: give its name"):
        wrap(model, torch.optim.AdamW(model.parameters()))


def test_a_configuration_can_be_an_object_a_dict_or_overrides():
    config = OffloadConfig(lr=2e-3, betas=(0.8, 0.9))
    for engine in (
        wrap(make(), config),
        wrap(make(), {"lr": 2e-3, "betas": [0.8, 0.9]}),
        wrap(make(), OffloadConfig(lr=1.0, betas=(0.8, 0.9)), lr=2e-3),
    ):
        assert engine.optimizer.param_groups[0]["lr"] == 2e-3
        assert engine.optimizer.param_groups[0]["betas"] == (0.8, 0.9)


@everywhere
def test_a_closed_engine_says_so_and_its_model_can_be_wrapped_anew():
    model = make()
    engine = wrap(model)
    with pytest.raises(StateError, match=r"wrap\(\) of an Engine"):
        wrap(engine)
    assert step(engine, 0).updated
    again = wrap(model)
    for use in (engine.step, engine.optimizer.step, engine.optimizer.zero_grad, engine.memory_report):
        with pytest.raises(StateError, match=r"a later one was made of its parameters; .*was the model wrapped twice"):
            use()
    engine = again
    engine.close()
    for use in (engine.step, engine.optimizer.step, engine.optimizer.zero_grad, engine.memory_report):
        with pytest.raises(StateError, match="this optimizer was closed"):
            use()
    assert step(wrap(model), 0).updated


def test_something_that_is_no_module_is_refused():
    with pytest.raises(ParameterError, match=r"model: got a list, expected a torch.nn.Module; .*OffloadedAdamW"):
        wrap([1, 2])


def test_a_plan_larger_than_the_memory_is_refused_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr("offload_core.engine.available_bytes", lambda: 10_000)
    allocated = []
    monkeypatch.setattr("offload_core.memory.host_memory.HostMemory.allocate", lambda *a, **k: allocated.append(a))
    expect_refusal(
        HostMemoryError,
        r"needs 36.9 KiB of host memory for 3,152 parameters besides the 12.3 KiB that the model takes, and 9.8 KiB",
        make(),
        param_dtype="bfloat16",
    )
    expect_refusal(HostMemoryError, r"(?s)exp_avg 12.3 KiB \(state_format='bf16'\)", make())
    monkeypatch.setattr("offload_core.engine.available_bytes", lambda: 10**9)
    monkeypatch.setattr(LateStore, "free", 10_000)
    with late_stores.late():
        expect_refusal(DiskSpaceError, r"needs 36.9 KiB of late store space", make(), param_dtype="bfloat16")
    assert not allocated


DISCARDS = {
    "the model's": lambda engine: engine.module.zero_grad(),
    "the engine's": lambda engine: engine.zero_grad(),
    "the optimizer's": lambda engine: engine.optimizer.zero_grad(),
}


@pytest.mark.draws(1)
@pytest.mark.parametrize(
    "fields",
    [{}, {"schedule": "delayed", "delay_warmup_steps": 9}, {"update_in_backward": True, "gradient_clipping": 1e3}],
    ids=str,
)
def test_a_step_whose_gradients_were_discarded_updates_nothing_whichever_zero_grad_did_it(fields):
    """As torch's optimizers: a step without gradients is no error, and changes nothing."""
    left_out = wrap(make(), lr=1e-2, **fields)
    for seed in (0, 2):
        step(left_out, seed)
    for name, discard in DISCARDS.items():
        engine = wrap(make(), lr=1e-2, **fields)
        step(engine, 0)
        engine.backward(loss_of(engine, 1))
        discard(engine)
        report = engine.step()
        assert (report.updated, report.skipped) == (False, "no gradients"), name
        step(engine, 2)
        assert everything(engine) == everything(left_out), name


@pytest.mark.parametrize("early_copy", [False, True])
def test_a_sparse_gradient_is_refused_and_loses_nothing(early_copy):
    model = nn.Embedding(16, 16, sparse=True)
    optimizer = OffloadedAdamW(model.parameters(), early_copy=early_copy)
    before = model.weight.detach().clone()

    def backward_and_step():
        model(torch.tensor([1])).sum().backward()
        optimizer.step()

    with pytest.raises(GradientError, match=r"the gradient is sparse .*sparse=False"):
        backward_and_step()
    assert torch.equal(model.weight, before)
    model.zero_grad()
    model.sparse = False
    backward_and_step()
    assert optimizer.report.updated


def test_no_params_are_refused():
    for params in ([], iter([])):
        with pytest.raises(ParameterError, match="params: got none, expected at least one"):
            OffloadedAdamW(params)
    with pytest.raises(ParameterError, match="params: got a tensor"):
        OffloadedAdamW(nn.Parameter(torch.ones(3)))


def test_no_sync_needs_stage_1():
    engine = wrap(nn.Linear(4, 4))
    with (
        pytest.raises(StateError, match="no_sync context manager is incompatible with ZeRO stage 2.*expected stage=1"),
        engine.no_sync(),
    ):
        pass


@everywhere
def test_no_sync_on_one_rank_changes_nothing():
    engines = [wrap(make(), stage=1, param_dtype="bfloat16", gradient_accumulation_steps=2) for _ in range(2)]
    for _ in range(2):
        for deferred, engine in zip((False, True), engines, strict=True):
            with engine.no_sync() if deferred else contextlib.nullcontext():
                engine.backward(loss_of(engine, 3))
            engine.step()
    for a, b in zip(*(engine.parameters() for engine in engines), strict=True):
        assert torch.equal(a, b)


@pytest.mark.states_on_host
def test_the_memory_report_counts_all_of_the_model_and_is_as_planned_between_steps(device):
    base = nn.Linear(40, 40, bias=False).requires_grad_(False)
    model = nn.Sequential(base, nn.BatchNorm1d(40), nn.Linear(40, 4)).to(device)
    engine = wrap(model, param_dtype="bfloat16")
    tensors = [*model.parameters(), *model.buffers()]
    for unfreeze in (False, True):
        base.requires_grad_(unfreeze)
        engine.backward(engine(torch.ones(3, 40, device=device)).sum())
        engine.step()
        engine.flush()  # what is on its way still holds memory
        report = engine.memory_report()
        assert report.numel == sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert report.device_bytes == report.planned_device_bytes == sum(t.nbytes for t in tensors)
        assert report.host_bytes == report.planned_host_bytes
    assert {row.held for row in report.rows if row.brief} == {0}  # gradients, on the device or on their way


def test_gradients_that_wait_on_the_device_are_reported():
    model = make()
    optimizer = OffloadedAdamW(model.parameters())
    loss_of(model, 0).backward()
    before = optimizer.memory_report()
    [gradients] = [row for row in before.rows if row.brief]
    assert gradients.held == gradients.planned == sum(p.grad.nbytes for p in model.parameters())
    assert before.device_bytes == before.planned_device_bytes + gradients.held
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.memory_report().device_bytes == before.planned_device_bytes


def test_a_boundary_after_gradients_were_removed_is_a_step_without_an_update(device):
    model = nn.Linear(8, 8).to(device)
    engine = wrap(model, num_threads=1, gradient_accumulation_steps=4)
    engine.backward(engine(torch.ones(2, 8, device=device)).pow(2).mean())
    assert engine.step().skipped == "accumulating"
    for param in model.parameters():
        param.grad = None
    assert engine.step(boundary=True).skipped == "no gradients"
    assert engine.optimizer.core.gradients.micro_steps == 0
