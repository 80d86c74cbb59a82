"""Checkpoints of torch load in JAX, and the other way: names, shapes, states and counts are the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from frontends import jax as in_jax
from frontends import torch as in_torch
from offload_core.errors import CheckpointError
from tests.support.rules import REFERENCES, settings_of
from tests.support.torch_models import same_bits

STATES = ("master", "exp_avg", "exp_avg_sq")


class Layer(nn.Module):
    def __init__(self, out, size):
        super().__init__()
        self.w = nn.Parameter(torch.randn(out, size, 3, 5).to(memory_format=torch.channels_last))
        self.b = nn.Parameter(torch.randn(out))


class Model(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.h = nn.ModuleList([Layer(4, 6), Layer(2, 4)])
        self.frozen = nn.Parameter(torch.randn(3, 4), requires_grad=False)
        self.register_buffer("seen", torch.tensor([seed, 2, 3]))


def tree_of(seed):
    """A tree of the same names."""
    rng = np.random.default_rng(seed)

    def layer(out, size):
        return {"w": rng.standard_normal((out, size, 3, 5), np.float32), "b": rng.standard_normal(out, np.float32)}

    return {
        "h": [layer(4, 6), layer(2, 4)],
        "frozen": rng.standard_normal((3, 4), np.float32),
        "seen": jnp.asarray([seed, 0, 1]),
    }


def new_jax(seed, stage, **fields):
    mesh = jax.make_mesh((1,), ("dp",), devices=jax.devices("cpu")[:1]) if stage == 3 else None
    trainable = {"h": True, "frozen": False, "seen": False}
    with jax.default_device(jax.devices("cpu")[0]):
        return in_jax.wrap(
            tree_of(seed), trainable=trainable, mesh=mesh, stage=stage, param_persistence_threshold=20, **fields
        )


def update_jax(offloaded, seed):
    dtype = np.dtype(offloaded.params["h"][0]["w"].dtype)
    scale = offloaded._core.loss_scale
    grads = jax.tree.map(lambda g: (scale * g).astype(dtype), tree_of(seed)["h"])
    grads = {"h": grads, "frozen": None, "seen": None}
    offloaded.update(grads if scale == 1 else in_jax.ScaledGradients(grads, scale))


def update_torch(engine, seed):
    gen = torch.Generator().manual_seed(seed)
    params = [p for p in engine.module.parameters() if p.requires_grad]
    engine.backward(sum((p * torch.randn(p.shape, generator=gen).to(p.dtype)).float().sum() for p in params))
    engine.step()


def of_jax(offloaded):
    """Everything in NumPy, by name."""
    saved = offloaded.to_pytree()
    found = {"updates": saved["count"], "loss scale": saved.get("loss_scale")}
    trees = {name: {"h": saved[name]["h"]} for name in (*STATES, "steps")} | {"params": saved["params"]}
    for kind, tree in trees.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            found[f"{kind} {jax.tree_util.keystr(path, simple=True, separator='.')}"] = leaf
    return found


def of_torch(engine):
    optimizer, found = engine.optimizer, {}
    for name, param in engine.module.named_parameters():
        found[f"params {name}"] = param.detach().float().contiguous().numpy()
        if param.requires_grad:
            state = optimizer.state[param]
            for kind in ("exp_avg", "exp_avg_sq"):
                found[f"{kind} {name}"] = state[kind].contiguous().numpy()
            found[f"master {name}"] = state.get("master", param.detach()).contiguous().numpy()
            found[f"steps {name}"] = state["step"].numpy()
    found["params seen"] = engine.module.seen.numpy()
    scaler = optimizer.core.scaler
    return found | {"updates": optimizer.updates, "loss scale": scaler and scaler.state_dict()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, x in one.items():
        y = other[name]
        if isinstance(x, np.ndarray):
            assert np.array_equal(np.asarray(x, np.float64), np.asarray(y, np.float64)), name
            assert x.shape == y.shape, name
        else:
            assert x == y, name


@pytest.mark.draws(1)
@pytest.mark.parametrize("name", REFERENCES)
def test_a_run_of_each_rule_goes_on_after_it_was_in_the_other_front_end(tmp_path, name):
    fields = {**settings_of(name), "op_order": "torch"}
    engine, back = (in_torch.wrap(Model(seed), **fields) for seed in range(2))
    offloaded = new_jax(2, 2, **fields)
    update_torch(engine, 0)
    offloaded.load_checkpoint(engine.save_checkpoint(tmp_path / "torch"))
    back.load_checkpoint(offloaded.save_checkpoint(tmp_path / "jax"))
    for each in (engine, back):
        update_torch(each, 1)
    for mine, other in zip(engine.module.parameters(), back.module.parameters(), strict=True):
        assert same_bits(mine, other)


@pytest.mark.draws(2)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_states_of_one_front_end_are_taken_up_by_the_other(tmp_path, dtype, stage):
    fields = {"lr": 1e-2, "param_dtype": dtype, "initial_loss_scale": 64.0}
    engine, offloaded = in_torch.wrap(Model(0), **fields), new_jax(1, stage, **fields)
    for seed in range(2):
        update_torch(engine, seed)
    engine.save_checkpoint(tmp_path / "torch", extras={"at": [1, torch.ones(2)]})
    extras = offloaded.load_checkpoint(tmp_path / "torch")
    assert extras["at"][1].tolist() == [1, 1]
    assert_same(of_jax(offloaded), of_torch(engine))
    assert offloaded.params["h"][0]["w"].dtype == dtype

    update_jax(offloaded, 2)
    offloaded.save_checkpoint(tmp_path / "jax", extras={"key": jax.random.key(1)})
    other = in_torch.wrap(Model(3), **fields)
    other.load_checkpoint(tmp_path / "jax")
    assert_same(of_torch(other), of_jax(offloaded))
    assert other.optimizer.updates == 3
    update_torch(other, 3)


def test_a_run_that_went_through_the_other_front_end_goes_on_with_the_same_bits(tmp_path):
    """Other settings, too: the order of operations, the size of buckets, accumulation."""
    straight, resumed = (in_torch.wrap(Model(seed), lr=1e-2, param_dtype="bfloat16") for seed in (0, 1))
    between = new_jax(2, 3, lr=3e-2, param_dtype="bfloat16", reduce_bucket_size=64, gradient_accumulation_steps=2)
    update_torch(straight, 0)
    straight.save_checkpoint(tmp_path)
    between.load_checkpoint(tmp_path)
    between.save_checkpoint(tmp_path)
    resumed.load_checkpoint(tmp_path)
    for engine in (straight, resumed):
        update_torch(engine, 1)
    assert_same(of_torch(straight), of_torch(resumed))


def test_numbers_of_another_kind_are_refused(tmp_path):
    in_torch.wrap(Model(0), lr=1e-2).save_checkpoint(tmp_path)
    tree = {**tree_of(1), "seen": jnp.ones(3)}
    offloaded = in_jax.wrap(tree, trainable={"h": True, "frozen": False, "seen": False}, lr=1e-2)
    with pytest.raises(CheckpointError, match="'seen' is of int64 in it, expected float32"):
        offloaded.load_checkpoint(tmp_path)


@pytest.mark.parametrize("make", [lambda: in_torch.wrap(Model(0)), lambda: new_jax(0, 2)], ids=["torch", "jax"])
def test_a_loop_that_resumes_if_there_is_something_begins_where_there_is_nothing(make, tmp_path):
    """As DeepSpeed's ``load_checkpoint`` does; a checkpoint that is there but cannot be read is an error."""
    mine, leftover = make(), tmp_path / "leftover"
    (leftover / ".step-00000001.saving").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    for nothing in (tmp_path / "none", leftover):
        assert mine.load_checkpoint(nothing, missing_ok=True) is None
        with pytest.raises(
            CheckpointError, match=r"no checkpoint: .*; load_checkpoint\(..., missing_ok=True\) goes on"
        ):
            mine.load_checkpoint(nothing)
    mine.save_checkpoint(leftover, extras={"step": 1}, wait=False)
    assert mine.load_checkpoint(leftover, missing_ok=True) == {"step": 1}
    (leftover / "latest").unlink()
    for wrong in (leftover, tmp_path / "file", "null\0byte"):
        with pytest.raises(CheckpointError, match=r"no checkpoint((?!missing_ok).)*$"):
            mine.load_checkpoint(wrong, missing_ok=True)
