"""``as_optax()`` in the loops that users of optax, flax, equinox, orbax and grain have: the bits are those of adamw."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as orbax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from frontends.jax import wrap
from offload_core.errors import ParameterError, StateError
from tests.support.jax_models import (
    Eager,
    assert_same_tree,
    on_the_cpu,  # noqa: F401 (a fixture)
    random_tree,
)
from tests.support.jax_modules import Net, Perceptron, regression, regression_data

pytestmark = pytest.mark.usefixtures("compiled_once")

STEPS, HALF, CLIP, DECAY = 6, 3, 0.05, 0.1
LR = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, 12)
TOKENS = ((np.arange(STEPS * 4).reshape(STEPS, 4, 1) + 3 * np.arange(13)) % 32).astype(np.int32)
"""[step, sequence, position]: each token is three more than the one before."""


def gpt(seed=0):
    """Of few shapes: eager optax is compiled for each."""
    rng = np.random.default_rng(seed)

    def matrix(rows):
        return jnp.asarray(0.2 * rng.standard_normal((rows, 16)), jnp.float32)

    layers = [{name: matrix(16) for name in ("q", "k", "v", "out", "up", "down")} for _ in range(2)]
    return {"embed": matrix(32), "layers": [{**layer, "gain": jnp.ones(16)} for layer in layers]}


@jax.jit
@jax.value_and_grad
def gpt_loss(params, tokens):
    x = params["embed"][tokens[:, :-1]]
    for layer in params["layers"]:
        y = layer["gain"] * x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        q, k, v = (y @ layer[name] for name in "qkv")
        scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), jnp.einsum("bqd,bkd->bqk", q, k) / 4, -jnp.inf)
        x = x + jax.nn.softmax(scores) @ v @ layer["out"]
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["embed"].T, tokens[:, 1:]).mean()


def train(tx, params, state, batches=TOKENS):
    """A loop as in optax's documentation."""
    losses = []
    for batch in batches:
        loss, grads = gpt_loss(params, batch)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return params, state, losses


def adamw(lr=LR):
    return optax.adamw(lr, weight_decay=DECAY)


def offloaded_of(params, **fields):
    return wrap(params, **{"lr": LR, "weight_decay": DECAY, **fields})


# --- optax: what stands before and after ---------------------------------------------------------------

NEIGHBOURS = {
    "clip_by_global_norm": lambda tx: optax.chain(optax.clip_by_global_norm(CLIP), tx),
    "add_decayed_weights": lambda tx: optax.chain(optax.add_decayed_weights(0.01), tx),
    "scale": lambda tx: optax.chain(optax.scale(0.5), tx),
    "what changes no update": lambda tx: optax.chain(tx, optax.identity(), optax.scale(1.0)),
    "named": lambda tx: optax.named_chain(("clip", optax.clip(0.3)), ("adam", tx)),
}
clipped = NEIGHBOURS["clip_by_global_norm"]


def test_a_gpt_in_an_optax_loop_has_the_losses_and_bits_of_adamw():
    params = gpt()
    offloaded = offloaded_of(params)
    tx, eager = clipped(offloaded.as_optax()), clipped(adamw())
    ours, _, losses = train(tx, params, tx.init(params))
    theirs, eager_state, expected = train(eager, params, eager.init(params))
    assert losses == expected
    assert losses[-1] < losses[0]
    assert_same_tree(ours, theirs)
    assert_same_tree(offloaded.params, theirs)
    assert_same_tree(offloaded.to_pytree()["exp_avg"], eager_state[1][0].mu)


def assert_follows(tx, eager, params):
    """In an ordinary loop, bit for bit."""
    state = tx.init(params)
    for i in range(4):
        updates, state = tx.update(random_tree(i), state, params)
        params = optax.apply_updates(params, updates)
        eager.update(random_tree(i))
        assert_same_tree(params, eager.params)
    return params


@pytest.mark.draws(1)
@pytest.mark.parametrize("neighbours", NEIGHBOURS.values(), ids=NEIGHBOURS.keys())
def test_what_stands_before_as_optax_has_the_effect_that_it_has_on_adamw(neighbours):
    params = random_tree(0)
    offloaded = offloaded_of(params)
    tx, eager = neighbours(offloaded.as_optax()), Eager(neighbours(adamw()), params)
    assert_follows(tx, eager, params)
    assert_same_tree(offloaded.params, eager.params)


@pytest.mark.parametrize(
    ("around", "others"),
    [
        (lambda tx: tx, 1),
        (clipped, 1),
        (lambda tx: optax.masked(tx, lambda params: jax.tree.map(lambda _: True, params)), 1),
        (lambda tx: optax.multi_transform({"adam": tx}, lambda params: jax.tree.map(lambda _: "adam", params)), 1),
        (lambda tx: optax.inject_hyperparams(lambda learning_rate: tx)(learning_rate=1.0), 3),
    ],
    ids=["alone", "clipped", "masked", "multi_transform", "inject_hyperparams"],
)
def test_states_can_be_mapped_over_parameters(around, others):
    """Partition specs of an optimizer's state are made so. That of as_optax() has a count and no parameters."""
    params = small(0)
    tx = optax.chain(optax.trace(0.9), around(offloaded_of(params).as_optax()))
    mapped = optax.tree_map_params(tx, lambda _: "spec", tx.init(params), transform_non_params=lambda _: "other")
    leaves = jax.tree.leaves(mapped)
    assert (leaves.count("spec"), leaves.count("other")) == (len(params), others)
    for nothing in ({}, None, optax.MaskedNode()):
        with pytest.raises(ParameterError, match=r"as_optax\(\): params: "):
            offloaded_of(params).as_optax().init(nothing)


@pytest.mark.parametrize("around", [lambda tx: tx, clipped, NEIGHBOURS["named"]], ids=["alone", "chain", "named_chain"])
def test_extra_arguments_of_an_update_are_ignored(around):
    """A loop gives ``value=loss`` to whatever transformation it has."""
    params = small(0)
    with_extra, without = (around(offloaded_of(params).as_optax()) for _ in range(2))
    got, _ = with_extra.update(small(1), with_extra.init(params), params, value=1.0, grad=small(1))
    expected, _ = without.update(small(1), without.init(params), params)
    assert_same_tree(got, expected)


@pytest.mark.draws(1)
def test_with_strict_promotion_the_bits_are_the_same():
    params, grads = small(0), [small(i) for i in range(3)]
    expected = offloaded_of(params)
    for each in grads:
        expected.update(each)
    offloaded = offloaded_of(params)
    tx, state = offloaded.as_optax(), offloaded.as_optax().init(params)
    with jax.numpy_dtype_promotion("strict"):
        for each in grads:
            updates, state = tx.update(each, state, params)
            params = optax.apply_updates(params, updates)
    assert_same_tree(params, expected.params)


def test_with_strict_promotion_updates_of_narrower_parameters_are_refused_before_anything_changes():
    """Optax could not add them to the parameters."""
    params = random_tree(0, jnp.bfloat16)
    offloaded = offloaded_of(params)
    tx = offloaded.as_optax()
    with jax.numpy_dtype_promotion("strict"):
        with pytest.raises(StateError, match=r"is bfloat16, and its exact .* float32.*'standard'.*offloaded.update"):
            tx.update(params, tx.init(params), params)
        assert offloaded.count == 0
        offloaded.update(params)


@pytest.mark.parametrize("clipping", ["in the chain", "in wrap"])
def test_gradients_are_clipped_to_the_asked_norm(clipping):
    """The first moment after one update is a tenth of the gradient."""
    params = gpt()
    offloaded = offloaded_of(params, **({"gradient_clipping": CLIP} if clipping == "in wrap" else {}))
    tx = offloaded.as_optax()
    tx = clipped(tx) if clipping == "in the chain" else tx
    _, grads = gpt_loss(params, TOKENS[0])
    assert optax.tree.norm(grads) > 2 * CLIP
    tx.update(grads, tx.init(params), params)
    moments = jax.tree.leaves(offloaded.to_pytree()["exp_avg"])
    norm = np.sqrt(sum(np.sum(np.square(m.astype(np.float64) / 0.1)) for m in moments))
    np.testing.assert_allclose(norm, CLIP, rtol=1e-4)


def test_what_changes_updates_after_as_optax_is_found_and_said():
    params = gpt()
    offloaded = offloaded_of(params)
    tx = optax.chain(offloaded.as_optax(), optax.scale(0.5))
    _, grads = gpt_loss(params, TOKENS[0])
    updates, state = tx.update(grads, tx.init(params), params)
    before = offloaded.to_pytree()
    for given in (optax.apply_updates(params, updates), params):  # and updates that nobody applied
        with pytest.raises(
            StateError, match=r"params\['\w+'\].* is not what the last update made.*comes before it.*lr="
        ):
            tx.update(grads, state, given)
        assert_same_tree(offloaded.to_pytree(), before)
    tx.update(grads, state, offloaded.params)
    assert offloaded.count == 2


def test_updates_are_of_parameters_that_are_given():
    """Others, that the loop has changed, would take the same steps away from the master weights."""
    params = small(0)
    offloaded = offloaded_of(params)
    tx = offloaded.as_optax()
    with pytest.raises(ParameterError, match=r"without params; expected update\(grads, state, params\)"):
        tx.update(small(1), tx.init(params))
    assert offloaded.count == 0


def test_parameters_of_another_dtype_are_refused():
    """A loop that starts from the fp32 model, and not from what wrap() made of it."""
    params = gpt()
    offloaded = offloaded_of(params, param_dtype="bfloat16")
    with pytest.raises(ParameterError, match=r"float32\[32, 16\], expected bfloat16\[32, 16\], as in offloaded.params"):
        offloaded.as_optax().init(params)
    offloaded.as_optax().init(offloaded.params)
    offloaded.as_optax().init(jax.eval_shape(lambda params: params, offloaded.params))


def close_to(expected, got):
    """Under ``lax.cond`` optax is compiled, and rounds elsewhere."""
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=1e-8), got, expected)


def small(seed):
    """Two arrays: what is under ``lax.cond`` is compiled whole."""
    return random_tree(seed)["layers"][1]


def test_accumulation_is_asked_of_wrap_and_counts_as_multi_steps_does():
    params = small(0)
    tx = optax.MultiSteps(offloaded_of(params).as_optax(), 2)
    with pytest.raises(StateError, match=r"optax.MultiSteps.*gradient_accumulation_steps=N"):
        tx.update(small(0), tx.init(params), params)
    offloaded, eager = offloaded_of(params, gradient_accumulation_steps=2), Eager(optax.MultiSteps(adamw(), 2), params)
    tx, ours = offloaded.as_optax(), params
    state = tx.init(params)
    for i in range(6):
        eager.update(small(i))
        updates, state = tx.update(small(i), state, ours)
        ours = optax.apply_updates(ours, updates)
        close_to(eager.params, ours)
        assert int(state.step) == int(eager.state.gradient_step) == (i + 1) // 2


def test_skipping_is_asked_of_wrap_and_counts_as_apply_if_finite_does():
    params = small(0)
    tx = optax.apply_if_finite(offloaded_of(params).as_optax(), 5)
    with pytest.raises(StateError, match=r"optax.apply_if_finite.*trace.*skip_nonfinite=True"):
        tx.update(small(0), tx.init(params), params)
    offloaded, eager = offloaded_of(params, skip_nonfinite=True), Eager(optax.apply_if_finite(adamw(), 5), params)
    tx, ours = offloaded.as_optax(), params
    state = tx.init(params)
    for i in range(5):
        grads = small(i)
        if i in (1, 2):
            grads["b"] = jnp.asarray(np.nan)
        eager.update(grads)
        before = ours
        updates, state = tx.update(grads, state, ours)
        ours = optax.apply_updates(ours, updates)
        if i in (1, 2):
            assert_same_tree(ours, before)
        close_to(eager.params, ours)
    assert int(state.step) == offloaded.count == int(eager.state.inner_state[0].count) == 3


def test_a_schedule_may_be_given_where_adamw_has_it():
    params = random_tree(0)
    offloaded, eager = offloaded_of(params, lr=1.0), Eager(adamw(), params)
    tx = offloaded.as_optax(LR)
    assert_follows(tx, eager, params)


@pytest.mark.parametrize("rate", [1e-2, LR], ids=["number", "schedule"])
def test_an_injected_learning_rate_is_the_one_used(rate):
    params = random_tree(0)
    offloaded = offloaded_of(params, lr=1.0)
    tx = optax.inject_hyperparams(offloaded.as_optax)(learning_rate=rate)
    static = ("b1", "b2", "eps", "eps_root", "weight_decay")  # as arrays they are rounded elsewhere
    eager = Eager(optax.inject_hyperparams(optax.adamw, static)(learning_rate=rate, weight_decay=DECAY), params)
    state, ours = tx.init(params), params
    for i in range(6):
        if i == 4 and not callable(rate):
            for injected in (state, eager.state):
                injected.hyperparams["learning_rate"] = jnp.asarray(3e-3)
        updates, state = tx.update(random_tree(i), state, ours)
        ours = optax.apply_updates(ours, updates)
        eager.update(random_tree(i))
        assert_same_tree(ours, eager.params)
        assert state.hyperparams["learning_rate"] == eager.state.hyperparams["learning_rate"]


LABELS = {"embed": "sgd", "layers": "adam"}


def hidden(params):
    """Return the tree that ``optax.multi_transform`` shows to the transformation that is called adam."""
    return {**params, "embed": optax.MaskedNode()}


@pytest.mark.parametrize("of", ["multi_transform", "masked"])
def test_one_of_several_transformations_has_the_bits_of_adamw(of):
    def make(adam):
        if of == "multi_transform":
            return optax.multi_transform({"adam": adam, "sgd": optax.sgd(1e-2)}, LABELS)
        mask = {"embed": False, "layers": True}
        return optax.chain(optax.masked(adam, mask), optax.masked(optax.sgd(1e-2), {"embed": True, "layers": False}))

    params = random_tree(0)
    with pytest.raises(ParameterError, match=r"MaskedNode at \['embed'\].*in the wrapped tree, too: wrap\("):
        make(offloaded_of(params).as_optax()).init(params)
    offloaded = offloaded_of(hidden(params))
    tx, eager = make(offloaded.as_optax()), Eager(make(adamw()), params)
    ours = assert_follows(tx, eager, params)
    assert_same_tree(offloaded.params, hidden(ours))


# --- parameters that the user changes ------------------------------------------------------------------


def test_parameters_changed_on_purpose_are_gone_on_from():
    """The moments stay, as they do in optax, which has the parameters from the loop each time."""
    params = {**random_tree(0), "table": jnp.arange(3)}
    offloaded = offloaded_of(params)
    eager, tx, ours = Eager(adamw(), random_tree(0)), offloaded.as_optax(), params
    state = tx.init(params)
    for i in range(4):
        grads = random_tree(i)
        eager.update(grads)
        updates, state = tx.update({**grads, "table": None}, state, ours)
        clamped = jax.tree.map(lambda p: jnp.clip(p, -0.5, 0.5), optax.apply_updates(ours, updates))
        ours = offloaded.load_params({**clamped, "table": jnp.arange(3) + i})
        eager.params = jax.tree.map(lambda p: jnp.clip(p, -0.5, 0.5), eager.params)
        assert_same_tree({**ours, "table": None}, {**eager.params, "table": None})
    saved = offloaded.to_pytree()
    assert_same_tree({**saved["master"], "table": None}, {**eager.params, "table": None})
    assert_same_tree(saved["exp_avg_sq"], {**eager.state[0].nu, "table": None})
    assert_same_tree(saved["params"]["table"], jnp.arange(3) + 3)


def test_elements_that_did_not_change_keep_the_low_bits_of_their_masters():
    offloaded = offloaded_of(random_tree(0, jnp.bfloat16))
    for i in range(3):
        offloaded.update(random_tree(i, jnp.bfloat16))
    masters = offloaded.to_pytree()["master"]
    changed = {**offloaded.params, "embed": offloaded.params["embed"].at[0].set(2.0)}
    assert_same_tree(offloaded.load_params(changed), changed)
    masters["embed"][0] = 2.0
    assert_same_tree(offloaded.to_pytree()["master"], masters)
    before = offloaded.to_pytree()
    for spoilt in ({"embed": jnp.ones((33, 17))}, {**changed, "embed": changed["embed"].T}, to_float32(changed)):
        with pytest.raises(ParameterError, match=r"load_params.*(nothing where|expected bfloat16\[33, 17\])"):
            offloaded.load_params(spoilt)
        assert_same_tree(offloaded.to_pytree(), before)


def test_what_a_delayed_update_holds_back_is_not_lost():
    offloaded = offloaded_of(small(0), schedule="delayed", delay_warmup_steps=1)
    for i in range(3):
        offloaded.update(small(i))
    with pytest.raises(StateError, match=r"delayed.*expected params = offloaded.flush\(\)"):
        offloaded.load_params(offloaded.params)
    flushed = offloaded.flush()
    assert_same_tree(offloaded.load_params({**flushed, "b": jnp.asarray(5.0)})["w"], flushed["w"])
    assert_same_tree(offloaded.to_pytree()["master"], {**flushed, "b": jnp.asarray(5.0)})


def to_float32(tree):
    return jax.tree.map(lambda p: p.astype(jnp.float32), tree)


def test_what_is_not_trained_is_saved_as_the_loop_has_it():
    params = {**random_tree(0), "mean": jnp.zeros(3)}
    offloaded = offloaded_of(params, trainable={"embed": True, "layers": True, "mean": False})
    tx = offloaded.as_optax()
    tx.update({**random_tree(1), "mean": None}, tx.init(params), {**params, "mean": jnp.full(3, 7.0)})
    assert_same_tree(offloaded.to_pytree()["params"]["mean"], np.full(3, 7, np.float32))


def test_what_the_loop_has_donated_is_asked_for_where_it_is_saved(tmp_path):
    """Arrays that are not trained are the loop's own; of the others there are copies."""
    params = {**small(0), "mean": jnp.zeros(3)}
    offloaded = offloaded_of(params, trainable={"w": True, "b": True, "mean": False})
    tx, apply_updates = offloaded.as_optax(), jax.jit(optax.apply_updates, donate_argnums=0)
    state = tx.init(params)
    for i in range(3):
        updates, state = tx.update({**small(i), "mean": None}, state, params)
        params = apply_updates(params, updates)
    before = offloaded.count
    for save in (offloaded.to_pytree, lambda: offloaded.save_checkpoint(tmp_path),
                 lambda: offloaded.export_safetensors(tmp_path)):  # fmt: skip
        with pytest.raises(StateError, match=r"params\['mean'\] was donated.*expected offloaded.load_params\(params\)"):
            save()
    assert_same_tree(offloaded.load_params(params), params)
    assert_same_tree(offloaded.to_pytree()["params"], params)
    assert_same_tree({**offloaded.to_pytree()["master"], "mean": params["mean"]}, params)
    offloaded.save_checkpoint(tmp_path)
    assert offloaded.count == before


# --- flax ----------------------------------------------------------------------------------------------


@pytest.mark.draws(1)
@pytest.mark.parametrize("wrapped", ["state", "pure"])
def test_nnx_optimizer_trains_with_the_bits_of_adamw_and_resumes(wrapped, tmp_path):
    x, y = regression_data()

    def make(last=None, seed=0):
        model = Net(nnx.Rngs(seed))
        state = nnx.state(model, nnx.Param)
        offloaded = offloaded_of(nnx.as_pure(state) if wrapped == "pure" else state)
        tx = clipped(offloaded.as_optax() if last is None else last)
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param), offloaded

    @nnx.jit
    def loss_and_grads(model):
        return nnx.value_and_grad(regression)(model, x, y)

    def run(model, optimizer, steps):
        losses = []
        for _ in range(steps):
            loss, grads = loss_and_grads(model)
            updates = optimizer.update(model, grads)
            assert jax.tree.structure(updates) == jax.tree.structure(nnx.as_pure(grads))
            losses.append(float(loss))
        return losses

    model, optimizer, offloaded = make()
    eager = make(adamw())
    losses = run(model, optimizer, HALF)
    offloaded.save_checkpoint(tmp_path, extras=nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param))))
    losses += run(model, optimizer, STEPS - HALF)
    assert losses == run(*eager[:2], STEPS)
    assert losses[-1] < losses[0]
    assert_same_tree(nnx.as_pure(nnx.state(model, nnx.Param)), nnx.as_pure(nnx.state(eager[0], nnx.Param)))
    assert int(optimizer.step[...]) == offloaded.count == STEPS

    model, _, resumed = make(seed=1)
    rest = resumed.load_checkpoint(tmp_path)
    nnx.update(model, resumed.params)
    others = nnx.state(model, nnx.Not(nnx.Param))
    nnx.replace_by_pure_dict(others, rest)
    nnx.update(model, others)
    tx = clipped(resumed.as_optax())
    assert run(model, nnx.Optimizer(model, tx, wrt=nnx.Param), STEPS - HALF) == losses[HALF:]
    assert_same_tree(resumed.to_pytree(), offloaded.to_pytree())

    with pytest.raises(StateError, match="under jit; expected a call outside.*the loss and its gradients only"):
        nnx.jit(lambda model, optimizer: optimizer.update(model, loss_and_grads(model)[1]))(model, optimizer)


def test_nnx_variables_agree_by_their_paths_whatever_else_they_say():
    wrapped, others = ({"w": nnx.Param(jnp.ones(3), **said), "b": jnp.zeros(2)} for said in ({}, {"note": "another"}))
    assert jax.tree.structure(wrapped) != jax.tree.structure(others)
    offloaded = offloaded_of(wrapped)
    offloaded.update(others)
    assert offloaded.count == 1
    norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    tx = wrap(nnx.state(norm), trainable=True).as_optax()
    with pytest.raises(ParameterError, match=r"has \['scale'\].value where \['mean'\].value was expected"):
        nnx.Optimizer(norm, tx, wrt=nnx.Param)


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(jnp.tanh(nn.LayerNorm()(nn.Dense(8)(x))))


def test_linen_train_state_trains_with_the_bits_of_adamw_and_resumes(tmp_path):
    x, y = regression_data()
    model = Dense()

    def make(last=None, seed=0):
        params = model.init(jax.random.key(seed), x)["params"]
        offloaded = offloaded_of(params)
        tx = clipped(offloaded.as_optax() if last is None else last)
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx), offloaded

    loss_and_grads = jax.jit(jax.value_and_grad(lambda params: ((model.apply({"params": params}, x) - y) ** 2).mean()))

    def run(state, steps):
        losses = []
        for _ in range(steps):
            loss, grads = loss_and_grads(state.params)
            state = state.apply_gradients(grads=grads)
            losses.append(float(loss))
        return state, losses

    state, offloaded = make()
    state, losses = run(state, HALF)
    with orbax.StandardCheckpointer() as checkpointer:  # the count in it and the states belong together
        checkpointer.save(tmp_path / "saved", {"train": state, "states": offloaded.to_pytree()})
        state, more = run(state, STEPS - HALF)  # while it is being written
    losses += more
    eager, expected = run(make(adamw())[0], STEPS)
    assert losses == expected
    assert losses[-1] < losses[0]
    assert_same_tree(state.params, eager.params)

    resumed, other = make(seed=1)
    with orbax.StandardCheckpointer() as checkpointer:
        saved = checkpointer.restore(tmp_path / "saved", {"train": resumed, "states": other.to_pytree()})
    with pytest.raises(StateError, match="state of update 3, expected that of update 0"):
        run(saved["train"], 1)
    other.load_pytree(saved["states"])
    resumed, more = run(saved["train"], STEPS - HALF)
    assert more == losses[HALF:]
    assert int(resumed.step) == STEPS
    assert_same_tree(resumed.params, state.params)
    assert_same_tree(other.to_pytree(), offloaded.to_pytree())


# --- equinox -------------------------------------------------------------------------------------------


def perceptron(seed=0):
    keys = jax.random.split(jax.random.key(seed))
    return Perceptron(eqx.nn.Linear(3, 8, key=keys[0]), eqx.nn.Linear(8, 1, key=keys[1]), jnp.tanh, "mlp")


def test_an_equinox_loop_has_the_bits_of_adamw_and_resumes_through_orbax(tmp_path):
    """Filtered, as equinox has it, whether it is the module or its arrays that were wrapped."""
    x, y = regression_data()
    loss_and_grads = eqx.filter_jit(eqx.filter_value_and_grad(regression))

    def run(model, tx, state, steps):
        losses = []
        for _ in range(steps):
            loss, grads = loss_and_grads(model, x, y)
            updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
            model = eqx.apply_updates(model, updates)
            losses.append(float(loss))
        return model, state, losses

    def arrays_of(model):
        return eqx.filter(model, eqx.is_inexact_array)

    model = perceptron()
    offloaded, alike = offloaded_of(model), offloaded_of(arrays_of(model))
    runs = []
    for last in (adamw(), offloaded.as_optax(), alike.as_optax()):
        tx = clipped(last)
        runs.append(run(model, tx, tx.init(arrays_of(model)), HALF))
    with orbax.CheckpointManager(tmp_path) as manager:
        manager.save(HALF, args=orbax.args.StandardSave(eqx.filter(offloaded.to_pytree(), eqx.is_array_like)))
        manager.wait_until_finished()
        other = offloaded_of(perceptron(1))
        target = eqx.filter(other.to_pytree(), eqx.is_array_like)
        other.load_pytree(manager.restore(manager.latest_step(), args=orbax.args.StandardRestore(target)))
    resumed = clipped(other.as_optax())
    ends = [run(other.params, resumed, resumed.init(arrays_of(other.params)), STEPS - HALF)]
    for (halfway, state, _), last in zip(runs, (adamw(), offloaded.as_optax(), alike.as_optax()), strict=True):
        ends.append(run(halfway, clipped(last), state, STEPS - HALF))
    for _, _, losses in runs:
        assert losses == runs[0][2]
    for end, _, losses in ends:
        assert losses == ends[0][2]
        assert_same_tree(arrays_of(end), arrays_of(ends[0][0]))
        assert end.activation is jnp.tanh
    assert ends[0][2][-1] < runs[0][2][0]


def test_an_equinox_module_in_bfloat16_goes_on_from_the_offloaded_parameters():
    def arrays_of(model):
        return eqx.filter(model, eqx.is_inexact_array)

    model = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, perceptron())
    grads = jax.tree.map(jnp.ones_like, arrays_of(model))
    offloaded = offloaded_of(model)
    tx = offloaded.as_optax()
    updates, state = tx.update(grads, tx.init(arrays_of(model)), arrays_of(model))
    widened = eqx.apply_updates(model, updates)
    with pytest.raises(ParameterError, match=r"expected bfloat16.*equinox.apply_updates widens.*offloaded.params"):
        tx.update(grads, state, arrays_of(widened))
    tx.update(grads, state, arrays_of(offloaded.params))
    assert offloaded.count == 2


# --- checkpoints, and the data with them ---------------------------------------------------------------


class Windows:
    """Batches of tokens in an order of its own, from where it was left."""

    def __init__(self):
        self.rng = np.random.default_rng(1)

    def __iter__(self):
        return self

    def __next__(self):
        return TOKENS[self.rng.integers(STEPS)]

    def state_dict(self):
        return {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state):
        self.rng.bit_generator.state = state["rng"]


def test_a_loop_over_an_iterator_resumes_with_its_data(tmp_path):
    def take(windows, n):
        return [next(windows) for _ in range(n)]

    offloaded, windows = offloaded_of(gpt()), Windows()
    tx = offloaded.as_optax()
    params, state, _ = train(tx, offloaded.params, tx.init(offloaded.params), take(windows, HALF))
    offloaded.save_checkpoint(tmp_path, stateful={"data": windows}, wait=False)
    params, _, losses = train(tx, params, state, take(windows, HALF))
    offloaded.wait_for_checkpoint()

    resumed, windows = offloaded_of(gpt(1)), Windows()
    resumed.load_checkpoint(tmp_path, stateful={"data": windows})
    tx = resumed.as_optax()
    again, _, repeated = train(tx, resumed.params, tx.init(resumed.params), take(windows, HALF))
    assert repeated == losses
    assert_same_tree(again, params)


def grain_batches(grain):
    return iter(grain.MapDataset.source(np.asarray(TOKENS[:, 0])).seed(3).shuffle().repeat().batch(2).to_iter_dataset())


def test_a_grain_loop_resumes_with_its_data(tmp_path):
    grain = pytest.importorskip("grain")
    offloaded, batches = offloaded_of(gpt()), grain_batches(grain)

    def take(batches):
        return [jnp.asarray(next(batches)) for _ in range(HALF)]

    tx = offloaded.as_optax()
    params, state, _ = train(tx, offloaded.params, tx.init(offloaded.params), take(batches))
    offloaded.save_checkpoint(tmp_path, extras={"data": batches.get_state()})
    params, _, losses = train(tx, params, state, take(batches))

    resumed, batches = offloaded_of(gpt(1)), grain_batches(grain)
    batches.set_state(resumed.load_checkpoint(tmp_path)["data"])
    tx = resumed.as_optax()
    again, _, repeated = train(tx, resumed.params, tx.init(resumed.params), take(batches))
    assert repeated == losses
    assert_same_tree(again, params)
