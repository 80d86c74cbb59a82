"""Training through `frontends.jax`, and the plain optax loop to compare it with."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bench.gpt_jax import Params, init_params, logits_of, loss_of
from bench.launch import Ranks
from bench.presets import BETAS, WEIGHT_DECAY, learning_rate
from bench.trainer import Settings, Step, check_room
from frontends.jax import wrap
from offload_core.errors import ConfigError
from offload_core.memory_plan import MemoryReport


@contextmanager
def join(settings: Settings) -> Iterator[Ranks]:
    """The only rank: several are not built yet."""
    launched = Ranks.launched()
    if launched.world_size > 1:
        raise ConfigError(
            f"{launched.world_size} ranks through JAX are not built yet in this version; use --frontend torch, or "
            "start one process"
        )
    yield launched


def make_trainers(settings: Settings, ranks: Ranks) -> tuple["Offloaded", "Plain | None"]:
    device = choose_device(settings.device)
    check_room(settings, ranks, on_host=device.platform == "cpu")
    offloaded = Offloaded(settings, device)
    return offloaded, Plain(settings, device) if settings.compare else None


def choose_device(name: str) -> jax.Device:
    if name != "auto":
        # The CPU stays in the list: the front end computes scalars there.
        jax.config.update("jax_platforms", "cpu" if name == "cpu" else f"{name},cpu")
    try:
        return jax.devices(None if name == "auto" else name)[0]
    except (RuntimeError, AssertionError):  # the latter where JAX was installed without that platform
        raise ConfigError(f"--device {name}: JAX has no such device here; use --device cpu or auto") from None


def make_params(settings: Settings) -> Params:
    return init_params(jax.random.key(settings.seed), settings.gpt, jnp.dtype(settings.param_dtype))


def make_schedule(settings: Settings) -> Callable[[Any], Any]:
    return partial(learning_rate, peak=settings.lr, warmup=settings.warmup, steps=settings.steps, xp=jnp)


class JaxTrainer:
    """What both loops share; `params` are the device parameters."""

    params: Params

    def __init__(self, settings: Settings):
        self.context = settings.context
        self.schedule = make_schedule(settings)
        model: dict[str, Any] = {"config": settings.gpt, "activation_checkpointing": settings.activation_checkpointing}
        self.loss_fn = partial(loss_of, **model)
        self._loss = jax.jit(self.loss_fn)

        @jax.jit
        def logits_at(params: Params, text: jax.Array, last: jax.Array) -> jax.Array:
            return logits_of(params, text[None], **model)[0, last, :256]

        self._logits_at = logits_at

    def loss(self, batch: np.ndarray) -> float:
        return float(self._loss(self.params, batch))

    def next_byte_logits(self, text: np.ndarray) -> np.ndarray:
        # Padded to one length, so that it is compiled once; a causal model never sees the padding.
        padded = np.zeros(self.context, np.int32)
        padded[: len(text)] = text
        return np.asarray(self._logits_at(self.params, padded, len(text) - 1))


class Offloaded(JaxTrainer):
    sent_bytes = 0  # one device

    def __init__(self, settings: Settings, device: jax.Device):
        super().__init__(settings)
        self.device = device
        self.device_name = device.device_kind
        self.offloaded = wrap(
            make_params(settings),
            lr=self.schedule,
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            gradient_clipping=settings.clip,
            gradient_accumulation_steps=settings.accumulate,
            param_dtype=settings.param_dtype,
            stage=settings.stage,
        )
        self.value_and_grad = self.offloaded.value_and_grad(self.loss_fn)
        self.updates = 0

    @property
    def params(self) -> Params:  # type: ignore[override]
        return self.offloaded.params

    def step(self, batches: list[np.ndarray]) -> Step:
        lr = float(self.schedule(self.updates))
        losses = []
        for batch in batches:
            loss, grads = self.value_and_grad(self.offloaded.params, batch)
            self.offloaded.update(grads)
            losses.append(loss)
        report = self.offloaded.report
        assert report is not None
        self.updates += report.updated
        return Step(float(np.mean(losses)), report.grad_norm, lr, report.skipped)

    def memory_report(self) -> MemoryReport:
        return self.offloaded.memory_report()

    def trace(self, path: Path) -> AbstractContextManager[None]:
        return self.offloaded.trace(path)

    def peak_device_bytes(self) -> int | None:
        return (self.device.memory_stats() or {}).get("peak_bytes_in_use")


class Plain(JaxTrainer):
    """`optax.adamw`, compiled, on fp32 master weights on the device."""

    def __init__(self, settings: Settings, device: jax.Device):
        super().__init__(settings)
        dtype, clip = jnp.dtype(settings.param_dtype), settings.clip
        optimizer = optax.adamw(self.schedule, *BETAS, weight_decay=WEIGHT_DECAY)
        self.masters = jax.tree.map(lambda p: p.astype(jnp.float32), make_params(settings))
        self.state = optimizer.init(self.masters)
        # fp32 parameters are their own masters.
        self._cast = jax.jit(partial(jax.tree.map, lambda p: p.astype(dtype))) if dtype != jnp.float32 else None
        self.value_and_grad = jax.jit(jax.value_and_grad(self.loss_fn))
        self.updates = 0

        @partial(jax.jit, donate_argnums=(0, 1))
        def update(masters: Params, state: Any, grads: list[Params]) -> tuple[Params, Any, Any]:
            mean = jax.tree.map(lambda *g: sum(x.astype(jnp.float32) for x in g) / len(g), *grads)
            norm = None
            if clip is not None:
                norm = optax.tree.norm(mean)
                mean = jax.tree.map(lambda g: g * jnp.minimum(1.0, clip / (norm + 1e-6)), mean)
            updates, state = optimizer.update(mean, state, masters)
            return optax.apply_updates(masters, updates), state, norm

        self._update = update
        self._renew_params()

    def _renew_params(self) -> None:
        self.params = self.masters if self._cast is None else self._cast(self.masters)

    def step(self, batches: list[np.ndarray]) -> Step:
        lr = float(self.schedule(self.updates))
        losses, grads = zip(*(self.value_and_grad(self.params, batch) for batch in batches), strict=True)
        self.masters, self.state, norm = self._update(self.masters, self.state, list(grads))
        self._renew_params()
        self.updates += 1
        return Step(float(np.mean(losses)), None if norm is None else float(norm), lr)
