"""Training through `frontends.jax`, and the plain optax loop to compare it with."""

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bench.train.gpt_jax import Params, init_params, logits_of, loss_of
from bench.train.presets import BETAS, OPTIMIZERS, WEIGHT_DECAY, learning_rate
from bench.train.ranks import Ranks
from bench.train.trainer import Settings, Step, check_room
from frontends.jax import initialize, wrap
from offload_core.errors import CollectiveError, ConfigError
from offload_core.memory.report import MemoryReport
from offload_core.support.processors import default_threads

STACKS = tuple(f"['{linear}']['weight']" for linear in ("qkv", "attention_out", "mlp_in", "mlp_out"))
"""The ends of paths of stacks of matrices, which the front end does not choose unless they are named."""


@contextmanager
def losing_a_rank() -> Iterator[None]:
    """Turn gloo's errors for a lost rank, which are of several types, into one."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if "Gloo" not in str(error):
            raise
        raise CollectiveError(f"another rank was lost ({error})") from error


class MeshRanks(Ranks):
    """The devices of a mesh, in one process or in those of `jax.distributed`."""

    @losing_a_rank()
    def gather(self, values: Sequence[float]) -> np.ndarray:
        words = np.array(values, np.float64).view(np.uint32)  # JAX has no float64 here
        return np.asarray(process_allgather(words)).reshape(-1, words.size).view(np.float64)

    def part(self) -> None:
        jax.distributed.shutdown()


@contextmanager
def join(settings: Settings) -> Iterator[Ranks]:
    """Meet the other processes, where a launcher started several."""
    launched = MeshRanks.launched()
    ranks = launched.times(settings.devices)
    if settings.device != "auto":
        # The CPU stays in the list: the front end computes scalars there.
        jax.config.update("jax_platforms", "cpu" if settings.device == "cpu" else f"{settings.device},cpu")
    if ranks.world_size > 1:
        jax.config.update("jax_num_cpu_devices", settings.devices)
    if launched.world_size > 1:
        meet(ranks.local_rank + np.arange(settings.devices), settings.timeout)
    yield ranks


def meet(local_devices: np.ndarray, timeout: int | None) -> None:
    """Join the other processes, whichever launcher started them."""
    os.environ.setdefault("NPROC", str(default_threads()))  # else XLA takes all processors in each process
    jax.config.update("jax_enable_preemption_service", False)  # it ignores the launcher's SIGTERM
    initialize(local_devices.tolist(), timeout_seconds=timeout)
    atexit.register(leave)


def leave() -> None:
    """End a process that failed: at its exit JAX would wait minutes for the others, which wait for it."""
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def make_offloaded(settings: Settings, ranks: Ranks) -> "Offloaded":
    devices = choose_devices(settings)
    with stdout_to_stderr():  # gloo's word, from all ranks, that they are connected
        ranks.gather([0])
    check_room(settings, ranks, on_host=devices[0].platform == "cpu")
    return Offloaded(settings, devices)


def make_plain(settings: Settings, ranks: Ranks) -> "Plain":
    return Plain(settings, choose_devices(settings))


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send to stderr what code that is not Python writes to stdout."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def choose_devices(settings: Settings) -> list[jax.Device]:
    """Return the devices of all processes, in the order of the ranks."""
    name = None if settings.device == "auto" else settings.device
    try:
        here = jax.local_devices(backend=name)
    except (RuntimeError, AssertionError):  # the latter where JAX was installed without that platform
        raise ConfigError(f"--device {name}: JAX has no such device here; use --device cpu or auto") from None
    if len(here) < settings.devices:
        raise ConfigError(
            f"--devices {settings.devices}: this process has {len(here)} of JAX's {here[0].platform} devices; expected "
            "at most as many, or --device cpu"
        )
    processes = range(jax.process_count())
    return [device for p in processes for device in jax.local_devices(p, name)[: settings.devices]]


def make_params(settings: Settings) -> Params:
    return init_params(jax.random.key(settings.seed), settings.gpt, jnp.dtype(settings.param_dtype))


def make_schedule(settings: Settings) -> Callable[[Any], Any]:
    return partial(learning_rate, peak=settings.lr, warmup=settings.warmup, steps=settings.steps, xp=jnp)


class JaxTrainer:
    """The part that both loops share; `params` are the device parameters."""

    params: Params

    def __init__(self, settings: Settings, devices: list[jax.Device]):
        self.mesh = Mesh(np.array(devices), ("rank",)) if len(devices) > 1 or settings.stage == 3 else None
        self.context = settings.context
        self.schedule = make_schedule(settings)
        # Parameters that a layer gathers are gathered for backward again.
        checkpointing = settings.activation_checkpointing or settings.stage == 3
        model: dict[str, Any] = {"config": settings.gpt, "activation_checkpointing": checkpointing}
        self.loss_fn = partial(loss_of, **model)

        def losses(params: Params, batch: jax.Array) -> jax.Array:
            return self.loss_fn(params, batch)[None]

        def losses_of_ranks(params: Params, batch: jax.Array) -> jax.Array:
            """Return each rank's loss. Parameters are sharded, and XLA gathers what it needs of them."""
            return jax.vmap(self.loss_fn, (None, 0))(params, batch.reshape(len(devices), -1, batch.shape[-1]))

        on_ranks = None if self.mesh is None else NamedSharding(self.mesh, P("rank"))
        if settings.stage == 3:
            self._losses = jax.jit(losses_of_ranks, out_shardings=on_ranks)
        elif self.mesh is not None:
            self._losses = jax.jit(
                jax.shard_map(losses, mesh=self.mesh, in_specs=(P(), P("rank")), out_specs=P("rank"))
            )
        else:
            self._losses = jax.jit(losses)
        self._sharded = settings.stage == 3
        on_all = NamedSharding(self.mesh, P()) if self.mesh is not None and self._sharded else None

        @partial(jax.jit, out_shardings=on_all)
        def logits_at(params: Params, text: jax.Array, last: jax.Array) -> jax.Array:
            return logits_of(params, text[None], **model)[0, last, :256]

        self._logits_at = logits_at

    def on_devices(self, batch: np.ndarray) -> Any:
        """Return the windows of all ranks on the mesh; each process has its own part."""
        if self.mesh is None:
            return batch
        return jax.make_array_from_process_local_data(NamedSharding(self.mesh, P("rank")), batch)

    def losses(self, batch: np.ndarray) -> np.ndarray:
        losses = self._losses(self.params, self.on_devices(batch))
        return np.concatenate([shard.data for shard in losses.addressable_shards])

    def next_byte_logits(self, text: np.ndarray) -> np.ndarray:
        # Padded to one length, so that it is compiled once; a causal model never sees the padding.
        padded = np.zeros(self.context, np.int32)
        padded[: len(text)] = text
        params = self.params
        if not self._sharded:
            params = jax.tree.map(lambda p: p.addressable_data(0), params)  # one process asks: none may wait
        return np.asarray(self._logits_at(params, padded, len(text) - 1).addressable_data(0))


class Offloaded(JaxTrainer):
    plain_name = "optax.adamw"

    def __init__(self, settings: Settings, devices: list[jax.Device]):
        super().__init__(settings, devices)
        self.devices = [device for device in devices if device.process_index == jax.process_index()]
        self.device_name = devices[0].device_kind
        self.offloaded = wrap(
            make_params(settings),
            lr=self.schedule,
            optimizer=settings.optimizer,
            **OPTIMIZERS[settings.optimizer],
            muon_params=STACKS if settings.optimizer == "muon" else None,
            gradient_clipping=settings.clip,
            gradient_accumulation_steps=settings.accumulate,
            param_dtype=settings.param_dtype,
            stage=settings.stage,
            offload_optimizer=settings.offload_optimizer,
            device_states_bytes=settings.device_states_bytes,
            offload_param=settings.offload_param,
            state_format=settings.state_format,
            master_dtype=settings.master_dtype,
            param_persistence_threshold=settings.persistence_threshold,
            schedule=settings.schedule,
            mesh=self.mesh,
        )
        self.value_and_grad = self.offloaded.value_and_grad(self.loss_fn)

    @property
    def params(self) -> Params:  # type: ignore[override]
        return self.offloaded.params

    @losing_a_rank()
    def step(self, batches: list[np.ndarray]) -> Step:
        lr = float(self.schedule(self.offloaded.count))
        losses = []
        for batch in batches:
            loss, grads = self.value_and_grad(self.offloaded.params, self.on_devices(batch))
            self.offloaded.update(grads, donate=True)
            losses.append(loss)
        report = self.offloaded.report
        assert report is not None
        return Step(float(np.mean(losses)), report.grad_norm, lr, report.skipped)

    @property
    def sent_bytes(self) -> int:
        return self.offloaded.sent_bytes // len(self.devices)

    def save(self, folder: Path, extras: Any, keep: int, *, wait: bool) -> None:
        self.offloaded.save_checkpoint(folder, extras=extras, keep=keep, wait=wait)

    def load(self, path: Path) -> Any:
        return self.offloaded.load_checkpoint(path)

    def memory_report(self) -> MemoryReport:
        return self.offloaded.memory_report()

    def trace(self, path: Path) -> AbstractContextManager[None]:
        return self.offloaded.trace(path)

    def accelerator_bytes(self) -> int:
        planned = sum(row.planned for row in self.memory_report().rows if row.where == "device")
        return planned // len(self.devices)

    def peak_device_bytes(self) -> int | None:
        peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in self.devices]
        return None if None in peaks else max(peaks)


class Plain(JaxTrainer):
    """`optax.adamw`, compiled, on fp32 master weights on the device.

    On several, XLA sums the gradients, and each updates the whole model.
    """

    def __init__(self, settings: Settings, devices: list[jax.Device]):
        super().__init__(settings, devices)
        dtype, clip = jnp.dtype(settings.param_dtype), settings.clip
        optimizer = optax.adamw(self.schedule, *BETAS, weight_decay=WEIGHT_DECAY)
        self.masters = jax.tree.map(lambda p: p.astype(jnp.float32), make_params(settings))
        self.state = optimizer.init(self.masters)
        if self.mesh is not None:
            self.masters, self.state = jax.device_put((self.masters, self.state), NamedSharding(self.mesh, P()))
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

    @losing_a_rank()
    def step(self, batches: list[np.ndarray]) -> Step:
        lr = float(self.schedule(self.updates))
        placed = map(self.on_devices, batches)
        losses, grads = zip(*(self.value_and_grad(self.params, batch) for batch in placed), strict=True)
        self.masters, self.state, norm = self._update(self.masters, self.state, list(grads))
        self._renew_params()
        self.updates += 1
        return Step(float(np.mean(losses)), None if norm is None else float(norm), lr)
