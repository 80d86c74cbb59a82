"""Ctrl-C at any line of an update on one device: the update has not been, or it has been whole."""

import os
import signal
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from frontends.jax import wrap
from tests.sampling import least
from tests.support.interrupts import FewerLines, first_passes, interrupt_at, read_at_each_line
from tests.support.late_stores import STATES_ON_DISK

CASES = {
    "clipped": ({"gradient_clipping": 0.05, "reduce_bucket_size": 64}, ""),
    "on disk": ({**STATES_ON_DISK, "reduce_bucket_size": 64}, ""),
    "delayed": ({"schedule": "delayed", "delay_warmup_steps": 1}, "frontends/jax/training/updates.py"),
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
    """Two more updates, and all that there is then."""
    offloaded.discard_gradients()
    for seed in (3, 4):
        update(offloaded, seed)
    states = offloaded.to_pytree()
    bits = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves({**states, "now": offloaded.params})]
    counts = [int(steps) for steps in states["steps"].values()]
    return bits, counts, offloaded.count, offloaded.report.step


@pytest.mark.draws(1)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case == "on disk" else []) for case in CASES]
)
def test_an_interrupt_at_any_line_leaves_the_state_before_the_update_or_after_it(case, drawn):
    options, file = CASES[case]
    offloaded = wrapped(options)
    update(offloaded, 1)
    start = offloaded.to_pytree()
    outcomes = [end(offloaded)]
    offloaded.load_pytree(start)
    passes = {place: number for place, number in first_passes(lambda: update(offloaded, 2)).items() if file in place}
    assert len(passes) > 40
    outcomes.append(end(offloaded))
    assert [counts for _, *counts in outcomes] == [[[3, 3], 3, 3], [[4, 4], 4, 4]]
    seen = set()
    every = [*passes.items()]
    for place, number in dict([every[0], *drawn(every, least(len(every))), every[-1]]).items():
        offloaded.load_pytree(start)
        with suppress(FewerLines):
            interrupt_at(number, lambda: update(offloaded, 2))
        outcome = end(offloaded)
        assert outcome in outcomes, place
        seen.add(outcomes.index(outcome))
    assert seen == {0, 1}


@pytest.mark.parametrize("save", ["to_pytree", "params"])
def test_a_handler_that_saves_at_any_line_of_an_update_gets_a_whole_update_or_an_error(save):
    options, _ = CASES["clipped"]
    twin, allowed = wrapped(options), []

    def saved(offloaded):
        found = offloaded.params if save == "params" else offloaded.to_pytree()
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(found)]

    for seed in (1, 2):
        update(twin, seed)
        allowed.append(saved(twin))
    offloaded = wrapped(options)
    update(offloaded, 1)
    x = np.random.default_rng(2).standard_normal((4, 8), np.float32)
    grads = gradients(offloaded.params, x.astype(jnp.bfloat16))
    seen, refused = read_at_each_line(lambda: saved(offloaded), lambda: offloaded.update(grads), allowed)
    assert seen == {0}
    assert sum("in the middle of update(), in the same thread" in error for error in refused) > 30
    assert saved(offloaded) == allowed[1]


LOADS = {
    "load_pytree": lambda offloaded: offloaded.to_pytree(),
    "load_params": lambda offloaded: jax.tree.map(jnp.copy, offloaded.params),
    "load_optax_state": lambda offloaded: offloaded.to_optax_state(),
}


def everything(offloaded):
    states = {**offloaded.to_pytree(), "now": offloaded.params}
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(states)], offloaded.count


@pytest.mark.draws(1)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(
    "options",
    [{}, STATES_ON_DISK, {"schedule": "delayed", "delay_warmup_steps": 1}],
    ids=["overlap", "disk", "delayed"],
)
def test_a_signal_at_any_line_of_a_load_finds_and_leaves_what_was_before_or_what_is_loaded(load, options):
    other, offloaded = wrapped({}), wrapped(options)
    for seed in (1, 2, 3):
        update(other, seed)
    given = LOADS[load](other)
    update(offloaded, 7)
    offloaded.flush()
    start = offloaded.to_pytree()
    offloaded.load_pytree(start)  # as before each of the loads below
    allowed = [everything(offloaded)]
    passes = first_passes(lambda: getattr(offloaded, load)(given))
    allowed.append(everything(offloaded))
    assert allowed[0] != allowed[1]
    left = set()
    for number in passes.values():
        offloaded.load_pytree(start)
        with suppress(FewerLines):
            interrupt_at(number, lambda: getattr(offloaded, load)(given))
        left.add(allowed.index(everything(offloaded)))
    assert 0 in left
    offloaded.load_pytree(start)
    found, refused = read_at_each_line(lambda: everything(offloaded), lambda: getattr(offloaded, load)(given), allowed)
    assert 0 in found
    assert sum(f"in the middle of {load}(), in the same thread" in error for error in refused) > 5


def test_a_signal_is_noted_and_saved_for_after_the_next_update(tmp_path):
    offloaded = wrapped({})
    with offloaded.save_on_signal(tmp_path, [signal.SIGUSR1], keep=1) as saver:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert saver.save() is None
        update(offloaded, 1)
        path = saver.save({"seed": 2})
        assert path == tmp_path / "step-00000001"
        update(offloaded, 2)
        assert saver.save() is None
    assert wrapped({}).load_checkpoint(path) == {"seed": 2}
