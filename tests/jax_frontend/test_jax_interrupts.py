"""Ctrl-C at any line of an update on one device: the update has not been, or it has been whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from frontends.jax import wrap
from tests.support.interrupts import first_passes, interrupt_at

CASES = {
    "clipped": ({"gradient_clipping": 0.05, "reduce_bucket_size": 64}, ""),
    "delayed": ({"schedule": "delayed", "delay_warmup_steps": 1}, "frontends/jax/offloaded.py"),
}
"""Settings, and the file to whose lines the interrupts are confined: the delayed schedule's others are as above."""


@jax.jit
@jax.grad
def gradients(params, x):
    hidden = jnp.tanh(x @ params["w"]) @ params["v"]
    return jnp.mean(hidden.astype(jnp.float32) ** 2)


def update(offloaded, seed):
    x = np.random.default_rng(seed).standard_normal((4, 8), np.float32)
    offloaded.update(gradients(offloaded.params, x.astype(jnp.bfloat16)))


def wrapped(options):
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal(shape, np.float32) for name, shape in (("w", (8, 8)), ("v", (8, 16)))}
    params = jax.tree.map(lambda array: jnp.asarray(array, jnp.bfloat16), params)
    return wrap(params, lr=lambda count: 0.1 / (1 + count), num_threads=1, **options)


def end(offloaded):
    """Three more updates, and all that there is then."""
    offloaded.discard_gradients()
    for seed in (3, 4, 5):
        update(offloaded, seed)
    states = offloaded.to_pytree()
    bits = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves({**states, "now": offloaded.params})]
    counts = [int(steps) for steps in states["steps"].values()]
    return bits, counts, offloaded.count, offloaded.report.step


@pytest.mark.parametrize("case", CASES)
def test_an_interrupt_at_any_line_leaves_the_state_before_the_update_or_after_it(case):
    options, file = CASES[case]
    offloaded = wrapped(options)
    update(offloaded, 1)
    start = offloaded.to_pytree()
    outcomes = [end(offloaded)]
    offloaded.load_pytree(start)
    passes = {place: number for place, number in first_passes(lambda: update(offloaded, 2)).items() if file in place}
    assert len(passes) > 40
    outcomes.append(end(offloaded))
    assert [counts for _, *counts in outcomes] == [[[4, 4], 4, 4], [[5, 5], 5, 5]]
    seen = set()
    for place, number in passes.items():
        offloaded.load_pytree(start)
        interrupt_at(number, lambda: update(offloaded, 2))
        outcome = end(offloaded)
        assert outcome in outcomes, place
        seen.add(outcomes.index(outcome))
    assert seen == {0, 1}
