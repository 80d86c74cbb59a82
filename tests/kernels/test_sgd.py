"""SGD has the bits of ``torch.optim.SGD(fused=True)`` and of eager optax."""

import numpy as np
import pytest

from tests.support import kernel_calls as call
from tests.support import oracles

# Of a multiple of torch's vectors: it treats the rest of a tensor otherwise.
NUMEL = 4096
STEPS = 5
UPDATES = [
    {"weight_decay": 0.0, "momentum": 0.0},
    {"weight_decay": 0.013, "momentum": 0.0},
    {"weight_decay": 0.0, "momentum": 0.9},
    {"weight_decay": 0.013, "momentum": 0.9, "nesterov": True},
]


def values() -> tuple[np.ndarray, list[np.ndarray]]:
    """A parameter, and the gradients of its steps."""
    rng = np.random.default_rng(0)
    param, *grads = (
        (rng.standard_normal(NUMEL) * np.exp(rng.uniform(-6, 2, NUMEL))).astype(np.float32) for _ in range(STEPS + 1)
    )
    return param, grads


def after_steps(rule: str, param: np.ndarray, grads: list[np.ndarray], **given) -> call.State:
    state = call.State(grads[0], param, (np.zeros_like(param),))
    for t, grad in enumerate(grads, 1):
        scalars = oracles.Sgd(lr=0.0371, step=t, **given).scalars(rule)
        [state] = call.update([call.State(grad, state.master, state.moments)], [scalars], rule=rule, param_dtype=None)
    return state


@pytest.mark.parametrize("given", [*UPDATES, {"weight_decay": 0.013, "momentum": 0.9, "dampening": 0.3}], ids=str)
def test_it_has_the_bits_of_torchs_fused_sgd(given):
    torch = pytest.importorskip("torch")
    before, grads = values()
    param = torch.nn.Parameter(torch.from_numpy(before.copy()))
    optimizer = torch.optim.SGD([param], lr=0.0371, **given, fused=True)
    for grad in grads:
        param.grad = torch.from_numpy(grad.copy())
        optimizer.step()
    got = after_steps("sgd_torch", before, grads, **given)
    oracles.assert_same_bits("parameter", got.master, param.detach().numpy())
    if given["momentum"]:
        oracles.assert_same_bits("moment", got.moments[0], optimizer.state[param]["momentum_buffer"].numpy())


@pytest.mark.parametrize("given", UPDATES, ids=str)
def test_it_has_the_bits_of_eager_optax(given):
    optax, jnp = pytest.importorskip("optax"), pytest.importorskip("jax.numpy")
    before, grads = values()
    decay, momentum = given["weight_decay"], given["momentum"] or None
    sgd = optax.sgd(0.0371, momentum, given.get("nesterov", False))
    rule = optax.chain(optax.add_decayed_weights(decay), sgd) if decay else sgd
    param = jnp.asarray(before)
    state = rule.init(param)
    for grad in grads:
        updates, state = rule.update(jnp.asarray(grad), state, param)
        param = optax.apply_updates(param, updates)
    got = after_steps("sgd_optax", before, grads, **given)
    oracles.assert_same_bits("parameter", got.master, np.asarray(param))
