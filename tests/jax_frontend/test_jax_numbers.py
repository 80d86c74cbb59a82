"""Bias corrections and schedules where JAX has no CPU (``JAX_PLATFORMS=cuda``)."""

from decimal import Decimal, localcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from frontends.jax import wrap
from frontends.jax.devices import numbers


@pytest.fixture
def no_cpu(monkeypatch):
    """Our code asks in vain for the CPU backend; JAX itself has no other here."""
    asked = jax.local_devices

    def local_devices(*args, **kwargs):
        if kwargs.get("backend") == "cpu":
            raise RuntimeError("Unknown backend cpu")
        return asked(*args, **kwargs)

    monkeypatch.setattr(jax, "local_devices", local_devices)


@pytest.mark.parametrize("beta", [0.9, 0.95, 0.999])
def test_without_a_cpu_the_power_is_rounded_once(beta, no_cpu):
    with localcontext() as context:
        context.prec = 60
        for t in (1, 2, 3, 10, 99, 1000, 4000):
            power = np.float32(Decimal(float(np.float32(beta))) ** t)
            assert numbers.bias_corrections([beta], t) == [float(np.float32(1) - power)]


def test_updates_without_a_cpu_have_the_same_bits(no_cpu, monkeypatch):
    params = {"w": jnp.linspace(-1.0, 1.0, 40)}
    schedule = optax.cosine_decay_schedule(1e-2, 20)
    without = wrap(params, lr=schedule)
    found = [np.asarray(without.update({"w": jnp.sin(step + params["w"])})["w"]) for step in range(5)]
    monkeypatch.undo()
    with_cpu = wrap(params, lr=schedule)
    for step, got in enumerate(found):
        expected = np.asarray(with_cpu.update({"w": jnp.sin(step + params["w"])})["w"])
        assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("t", [1, 2, 7, 1000])
def test_bias_corrections_are_fp32_with_64_bits_enabled_and_with_strict_promotion(t):
    expected = numbers.bias_corrections([0.9, 0.999], t)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        assert numbers.bias_corrections([0.9, 0.999], t) == expected


def test_schedules_are_computed_with_strict_promotion_too():
    """Optax's own schedules divide an integer count."""
    params = {"w": jnp.ones(3)}
    with jax.numpy_dtype_promotion("strict"):
        strict = wrap(params, lr=optax.cosine_decay_schedule(1e-2, 20))
        strict.update({"w": jnp.ones(3)})
    usual = wrap(params, lr=optax.cosine_decay_schedule(1e-2, 20))
    assert np.asarray(usual.update({"w": jnp.ones(3)})["w"]).tobytes() == np.asarray(strict.params["w"]).tobytes()
