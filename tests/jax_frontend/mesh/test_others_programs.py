"""Training programs as other people write them, rebuilt small: one line is another with offload-core.

Each program takes the optimizer from its caller. It runs with ``optax.adamw`` as it is written, the update inside the
compiled step, and with ``as_optax()``, for which the compiled step ends after the gradients. A third run has that step
and eager ``optax.adamw``: offload-core must have its losses and bits. The program as it is written rounds otherwise,
because XLA fuses its update.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from frontends.jax import init, wrap
from tests.support.jax_meshes import assert_same_tree

eqx = pytest.importorskip("equinox", reason="equinox is not installed: make integrations")
nnx = pytest.importorskip("flax.nnx", reason="flax is not installed: make integrations")

pytestmark = pytest.mark.integration

STEPS, VOCABULARY, WIDTH = 6, 32, 16
TOKENS = ((np.arange(STEPS * 8).reshape(STEPS, 8, 1) + 3 * np.arange(9)) % VOCABULARY).astype(np.int32)
"""[step, sequence, position]: each token is three more than the one before."""


def cross_entropy(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def mesh_of(shape, names):
    devices = jax.devices()[: np.prod(shape)]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)


# --- flax.nnx on a mesh of two axes --------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, rngs):
        normal = nnx.initializers.normal(0.2)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs, scale_init=nnx.with_partitioning(nnx.initializers.ones, (None,)))
        self.up, self.down = (
            nnx.Linear(*shape, use_bias=False, rngs=rngs, kernel_init=nnx.with_partitioning(normal, axes))
            for shape, axes in (((WIDTH, 64), ("fsdp", "tensor")), ((64, WIDTH), ("tensor", "fsdp")))
        )

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Decoder(nnx.Module):
    def __init__(self, rngs):
        table = nnx.with_partitioning(nnx.initializers.normal(0.2), ("tensor", "fsdp"))
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs, embedding_init=table)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


def nnx_program(optimizer_of, *, update_in_step):
    """As github.com/google/flax, examples/gemma/train.py: parameters that say their axes, made in shards; a schedule of
    two parts; and a train state that is donated."""
    mesh = mesh_of((2, 2), ("fsdp", "tensor"))
    schedule = optax.join_schedules(
        [optax.linear_schedule(0.0, 1e-2, 3), lambda count: 1e-2 * (count + 3) ** -0.5 * 3**0.5], [3]
    )
    with jax.set_mesh(mesh):
        abstract = nnx.eval_shape(lambda: Decoder(nnx.Rngs(0)))
        graphdef, forms = nnx.split(abstract, nnx.Param)
        places = nnx.get_named_sharding(forms, mesh)
        params = init(lambda: nnx.state(Decoder(nnx.Rngs(0)), nnx.Param), shardings=places)
    tx = optimizer_of(params, schedule, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)
    state = tx.init(params)

    def gradients(params, batch):
        return jax.value_and_grad(lambda p: cross_entropy(nnx.merge(graphdef, p)(batch[:, :-1]), batch[:, 1:]))(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def whole_step(params, state, batch):
        loss, grads = gradients(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for tokens in TOKENS:
        batch = jax.device_put(tokens, NamedSharding(mesh, P("fsdp")))
        if update_in_step:
            params, state, loss = whole_step(params, state, batch)
        else:
            loss, grads = jax.jit(gradients)(params, batch)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    assert params["blocks"][0]["up"]["kernel"].sharding.spec == P("fsdp", "tensor")
    return losses, params


# --- equinox -------------------------------------------------------------------------------------------


class Model(eqx.Module):
    table: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    heads: int = eqx.field(static=True)

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.heads = 2
        self.table = eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
        self.attention = eqx.nn.MultiheadAttention(self.heads, WIDTH, key=keys[1])
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, key=keys[2])
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, tokens, key):
        x = jax.vmap(self.table)(tokens)
        y = jax.vmap(self.norm)(x)
        x = x + self.attention(y, y, y, mask=jnp.tri(len(tokens), dtype=bool))
        return jax.vmap(self.head)(self.dropout(x, key=key))


def equinox_program(optimizer_of, *, update_in_step):
    """As github.com/enerrio/jax-transformer, run_train.py and transformer/train.py: a GPT with dropout, whose keys are
    split in each step, filtered transformations, and AdamW with a constant rate."""
    model = init(Model, jax.random.key(21))
    tx = optimizer_of(model, 4e-3, weight_decay=0.1)
    state = tx.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_value_and_grad
    def gradients(model, batch, keys):
        return cross_entropy(jax.vmap(model)(batch[:, :-1], keys), batch[:, 1:])

    @eqx.filter_jit
    def whole_step(model, state, batch, keys):
        loss, grads = gradients(model, batch, keys)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, loss

    step = eqx.filter_jit(gradients)
    key, losses = jax.random.key(5), []
    for batch in TOKENS:
        key, *keys = jax.random.split(key, len(batch) + 1)
        if update_in_step:
            model, state, loss = whole_step(model, state, batch, jnp.stack(keys))
        else:
            loss, grads = step(model, batch, jnp.stack(keys))
            updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_array))
            model = eqx.apply_updates(model, updates)
        losses.append(float(loss))
    return losses, eqx.filter(model, eqx.is_array)


# --- plain pytrees, with a scan over layers ------------------------------------------------------------

AXES = {
    "embed": ("vocabulary", "model"),
    "layers": {"up": (None, "model", "hidden"), "down": (None, "hidden", "model"), "gain": (None, "model")},
}
RULES = {"vocabulary": None, "model": "x", "hidden": None, None: None}


def pytree_program(optimizer_of, *, update_in_step):
    """As github.com/sholtodouglas/minformer, minformer/model.py: named axes and a table of rules that shards them
    (FSDP), parameters that are made in shards, and gradients that are scaled by their own norms. The layers are stacked
    for ``lax.scan``, and the gradients of micro-batches added up by another one."""
    mesh = mesh_of((4,), ("x",))
    places = jax.tree.map(
        lambda axes: NamedSharding(mesh, P(*(RULES[name] for name in axes))),
        AXES,
        is_leaf=lambda x: isinstance(x, tuple),
    )

    def init_fn(key):
        keys, normal = jax.random.split(key, 3), jax.nn.initializers.normal(0.2)
        return {
            "embed": normal(keys[0], (VOCABULARY, WIDTH)),
            "layers": {
                "up": normal(keys[1], (3, WIDTH, 64)),
                "down": normal(keys[2], (3, 64, WIDTH)),
                "gain": jnp.ones((3, WIDTH)),
            },
        }

    params = init(init_fn, jax.random.key(0), shardings=places)
    schedule = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, 12)
    mask = jax.tree.map(lambda p: p.shape[-1] != WIDTH or p.ndim > 2, params)  # no decay for the table and the gains
    unit_norm = optax.stateless(lambda grads, _: jax.tree.map(lambda g: g / (jnp.linalg.norm(g) + 1e-6), grads))
    tx = optax.chain(unit_norm, optimizer_of(params, schedule, b2=0.95, weight_decay=0.1, mask=mask))
    state = tx.init(params)

    def loss_of(params, batch):
        def layer_fn(x, layer):
            y = layer["gain"] * x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
            return x + jnp.square(jax.nn.relu(y @ layer["up"])) @ layer["down"], None

        x, _ = jax.lax.scan(jax.checkpoint(layer_fn), params["embed"][batch[:, :-1]], params["layers"])
        return cross_entropy(x @ params["embed"].T, batch[:, 1:])

    def gradients(params, micro_batches):
        def add(sums, batch):
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss_of)(params, batch)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        sums, _ = jax.lax.scan(add, zeros, micro_batches)
        return jax.tree.map(lambda total: total / len(micro_batches), sums)

    @jax.jit
    def whole_step(params, state, micro_batches):
        loss, grads = gradients(params, micro_batches)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for tokens in TOKENS:
        batches = jax.device_put(tokens.reshape(2, 4, -1), NamedSharding(mesh, P(None, "x")))
        if update_in_step:
            params, state, loss = whole_step(params, state, batches)
        else:
            loss, grads = jax.jit(gradients)(params, batches)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses, params


def theirs(params, lr, **fields):
    return optax.adamw(lr, **fields)


def ours(params, lr, **fields):
    return wrap(params, lr=lr, **fields).as_optax()


@pytest.mark.parametrize("program", [nnx_program, equinox_program, pytree_program])
def test_a_program_with_one_other_line_has_the_bits_of_adamw(program):
    losses, params = program(ours, update_in_step=False)
    expected, eager = program(theirs, update_in_step=False)
    assert losses == expected
    assert_same_tree(params, eager)
    assert losses[-1] < losses[0]
    as_written, _ = program(theirs, update_in_step=True)
    assert np.allclose(losses, as_written, rtol=1e-4)
