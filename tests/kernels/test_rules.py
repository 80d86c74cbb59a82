"""Each rule has the bits of torch's fused optimizer (Lion: of torch's operations) and of eager optax."""

import numpy as np
import pytest

from offload_core.config.options import OffloadConfig
from offload_core.rules import Rule
from tests.support import kernel_calls as call
from tests.support import oracles
from tests.support.rules import KINDS, OPTAXS_KINDS, REFERENCES, hyper_of, settings_of

# Of a multiple of torch's vectors: it treats the rest of a tensor otherwise.
NUMEL = 4096
STEPS = 5


def values() -> tuple[np.ndarray, list[np.ndarray]]:
    """A parameter, and the gradients of its steps."""
    rng = np.random.default_rng(0)
    param, *grads = (
        (rng.standard_normal(NUMEL) * np.exp(rng.uniform(-6, 2, NUMEL))).astype(np.float32) for _ in range(STEPS + 1)
    )
    return param, grads


def rule_of(name: str, kind: str, order: str) -> Rule:
    return OffloadConfig(**settings_of(name, kind), op_order=order).rule()


def after_steps(name: str, kind: str, rule: Rule, param: np.ndarray, grads: list[np.ndarray]) -> call.State:
    moments = tuple(np.full_like(param, state.first) for state in rule.states)
    state = call.State(grads[0], param, moments)
    for t, grad in enumerate(grads, 1):
        scalars = np.array([rule.scalars(hyper_of(name, kind), t, grad_scale=1.0)], call.kernels.SCALARS)
        given = call.State(grad, state.master, state.moments)
        [state] = call.update([given], [scalars], rule=rule.kernel, param_dtype=None)
    return state


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_it_has_the_bits_of_torch(name, kind):
    torch = pytest.importorskip("torch")
    before, grads = values()
    param = torch.nn.Parameter(torch.from_numpy(before.copy()))
    settings = {key: value for key, value in settings_of(name, kind).items() if key != "optimizer"}
    optimizer = REFERENCES[name].of_torch([param], settings)
    for grad in grads:
        param.grad = torch.from_numpy(grad.copy())
        optimizer.step()
    got = after_steps(name, kind, rule_of(name, kind, "torch"), before, grads)
    oracles.assert_same_bits("parameter", got.master, param.detach().numpy())
    theirs = [value.numpy() for key, value in optimizer.state[param].items() if key != "step" and value is not None]
    for mine, other in zip(got.moments, theirs, strict=True):
        oracles.assert_same_bits("moment", mine, other)


@pytest.mark.draws(3)
@pytest.mark.parametrize(("name", "kind"), OPTAXS_KINDS)
def test_it_has_the_bits_of_eager_optax(name, kind, exact_rsqrt):
    optax, jnp = pytest.importorskip("optax"), pytest.importorskip("jax.numpy")
    from frontends.jax.optax_bridge.rule_words import WORDS

    before, grads = values()
    optimizer = REFERENCES[name].of_optax(settings_of(name, kind)["lr"], REFERENCES[name].kinds[kind])
    params = [jnp.asarray(before), jnp.asarray(before)]  # of one array alone, optax.adamw has other bits
    state = optimizer.init(params)
    for grad in grads:
        updates, state = optimizer.update([jnp.asarray(grad)] * 2, state, params)
        params = optax.apply_updates(params, updates)
    rule = WORDS[name].in_xlas_numbers(rule_of(name, kind, "optax"))
    got = after_steps(name, kind, rule, before, grads)
    oracles.assert_same_bits("parameter", got.master, np.asarray(params[0]))
