"""``wrap(params) -> OffloadedParams``: a pytree of parameters whose optimizer states live in host memory."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from offload_core.config import ConfigLike, OffloadConfig, check_hyperparameters
from offload_core.cpu_adam import STATE_NAMES, AdamHyper
from offload_core.dtypes import BY_NUMPY
from offload_core.errors import ConfigError, GradientError, ParameterError, StateError
from offload_core.host_memory import available_bytes
from offload_core.loss_scale import scaler_for
from offload_core.memory_plan import MemoryReport
from offload_core.partition import ParamSpec
from offload_core.pipeline import Pipeline, StepReport
from offload_core.regions import InMemory
from offload_core.trace import COMPUTE

from .device import in_host_memory
from .gradients import RankGradients, ScaledGradients, check_alike
from .optax_updates import OffloadState, exact_update, exact_update_of_shards, no_update
from .placement import placement_for
from .shard_layout import ShardLayout
from .trees import (
    Mask,
    Static,
    check_paths,
    flatten,
    from_numpy,
    is_array,
    is_parameter,
    mask_leaves,
    numpy_shape,
    to_numpy,
)


def wrap(
    params: Any,
    config: ConfigLike = None,
    *,
    mask: Mask | None = None,
    trainable: Mask | None = None,
    mesh: Mesh | None = None,
    axis: str | None = None,
    **overrides: Any,
) -> "OffloadedParams":
    """Put the optimizer states of a pytree of parameters in host memory.

    Args:
        params: any pytree (dicts, flax.nnx state, equinox modules). Leaves that are not floating-point arrays
            pass through untouched.
        config: an ``OffloadConfig``, a dict of its fields, or a DeepSpeed configuration: a dict, or a file's path.
        mask: which parameters weight decay applies to, as in ``optax.adamw``: booleans in the parameters' structure
            or a prefix of it, or a function from the parameters to them; None: all.
        trainable: which parameters are trained, likewise; None: all. The others pass through.
        mesh: partition the optimizer states over the devices of one of its axes, which may belong to several
            processes. Parameters and other ``jax.Array`` leaves are replicated on it; the values of rank 0 are taken.
            With ``stage=3`` trained parameters of at least ``param_persistence_threshold`` elements are sharded over
            the axis: along the dimension that they are sharded along already (such global arrays are taken as they
            lie), else the first after the very first that its devices divide; where none does they are replicated.
            The model gathers them (:func:`gathered`, :func:`gather_params`). ``offload_param="cpu"`` has the shards
            in ``pinned_host`` memory.
        axis: its name; None: the mesh's only axis.
        overrides: fields of ``OffloadConfig``; ``lr`` may be an optax schedule, any function of the number of updates.

    Raises:
        ConfigError, ParameterError, HostMemoryError, StateError (under jit): before anything is allocated.
    """
    return OffloadedParams(params, config, mask=mask, trainable=trainable, mesh=mesh, axis=axis, **overrides)


@dataclass(frozen=True)
class _Leaf:
    """A parameter: where it is among the tree's leaves, and what its array must be."""

    position: int
    shape: tuple[int, ...]
    dtype: Any
    layout: ShardLayout | None
    """How it is cut over ranks (stage 3)."""


class OffloadedParams:
    """A pytree of device parameters, with master weights and moments in host memory.

    ``params`` is the current pytree; :meth:`update` replaces it. The bits on fp32 masters are those of eager
    ``optax.adamw``.
    """

    def __init__(
        self,
        params: Any,
        config: ConfigLike = None,
        *,
        mask: Mask | None = None,
        trainable: Mask | None = None,
        mesh: Mesh | None = None,
        axis: str | None = None,
        **overrides: Any,
    ) -> None:
        _refuse_jit("wrap()")
        ranks = mesh.size if isinstance(mesh, Mesh) else 1
        self.config = OffloadConfig.resolve(config, world_size=ranks, **overrides)
        self.config = replace(self.config, op_order=self.config.op_order or "optax")
        self.report: StepReport | None = None
        """What the last :meth:`update` did."""
        self.count = 0
        """Updates made so far."""
        flat, self._treedef = flatten(params)
        self._paths = [path for path, _ in flat]
        leaves = [leaf for _, leaf in flat]
        trained = mask_leaves(trainable, params, "trainable")
        decayed = mask_leaves(mask, params, "mask")
        positions = [i for i, leaf in enumerate(leaves) if trained[i] and is_parameter(self._paths[i], leaf)]
        if not positions:
            raise ParameterError("params: no leaf is a trainable floating-point array; expected at least one")
        target = self.config.target_dtype
        self._placement = placement_for(self.config, mesh, axis, [leaves[i] for i in positions])
        arrays = [self._placement.place(self._paths[i], leaves[i]) for i in positions]
        layouts = [self._placement.layout(array) for array in arrays]
        specs = []
        for i, array, layout in zip(positions, arrays, layouts, strict=True):
            dtype, group = target or BY_NUMPY[array.dtype], int(not decayed[i])
            numel = array.size if layout is None else layout.numel
            elements = InMemory(array.shape) if layout is None else layout
            specs.append(ParamSpec(self._paths[i], numel, dtype, group, elements, partitioned=layout is not None))
        scaler = scaler_for(self.config, [s.dtype for s in specs])
        # To the core gradients come all at once, and parameters in JAX's host memory are the device's as any.
        config = replace(self.config, update_in_backward=False, offload_param=None)
        self._pipeline = Pipeline(config, self._placement.device, scaler)
        plan = self._pipeline.plan(specs)
        self._planned_host_bytes = plan.host_bytes
        rows = self._placement.plan(specs, arrays, self._pipeline.memory)
        replace(plan, rows=(*plan.rows, *rows)).check(available_bytes())
        self._planned_host_bytes += self._placement.planned_host_bytes
        tensors = self._placement.start(arrays)
        self._pipeline.add_parameters(specs, tensors)
        arrays = self._placement.started(tensors)
        self._leaves = []
        for i in set(range(len(leaves))) - set(positions):
            leaves[i] = self._placement.pass_through(leaves[i])
        for i, array, spec, layout in zip(positions, arrays, specs, layouts, strict=True):
            leaves[i] = self._placement.cast(array, spec.dtype, layout)
            self._leaves.append(_Leaf(i, array.shape, leaves[i].dtype, layout))
        self._all_leaves = leaves

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._pipeline.__reduce_ex__(protocol)  # which says what to do instead

    @property
    def params(self) -> Any:
        """The parameters, with the structure that was wrapped."""
        return jax.tree_util.tree_unflatten(self._treedef, self._all_leaves)

    # --- gradients ---------------------------------------------------------------------------------

    def value_and_grad(
        self, fun: Callable[..., Any], *, has_aux: bool = False, in_specs: Any = None, check_vma: bool = True
    ) -> Callable[..., Any]:
        """A compiled function of ``(params, *args, **kwargs)`` that returns ``fun``'s value and its gradients.

        As ``jax.jit(jax.value_and_grad(fun))`` for trees that also hold leaves that are not trained: their place in
        the gradients is None. Under loss scaling the gradients come as :class:`ScaledGradients`; the value is
        unscaled.

        On a mesh each rank computes ``fun`` of its own part of the arguments inside ``shard_map``, and the gradients
        come as :class:`RankGradients`, not yet averaged. The value and floating-point leaves of aux are the mean over
        the ranks; other leaves of aux are rank 0's.

        Args:
            in_specs: on a mesh, how arguments after the parameters are cut: a ``PartitionSpec`` for all of them, or a
                tuple of one for each (or for each of its subtrees). None: as they lie on the mesh, and whole where
                they do not. Keyword arguments are always as they lie. With several processes an array of one
                process alone is taken as the whole, which all are to have.
            check_vma: on a mesh, that of ``jax.shard_map``. With False ``fun`` need not tell what varies over the axis
                (a ``lax.scan`` may start from zeros), but may contain no collectives: their gradients would be wrong.

        Raises (when called):
            ParameterError: the parameters have another structure; no argument is split over the mesh axis.
        """
        positions = [leaf.position for leaf in self._leaves]
        trained_set = frozenset(positions)

        def compute(
            trained: list[Any],
            traced: list[Any],
            static: Static,
            scale: Any,
            args: Any,
            kwargs: Any,
            *,
            seen: Any = list,
        ) -> Any:
            def scaled(trained: list[Any]) -> Any:
                leaves = static.merge(traced)
                for i, leaf in zip(positions, seen(trained), strict=True):
                    leaves[i] = leaf
                out = fun(jax.tree_util.tree_unflatten(static.treedef, leaves), *args, **kwargs)
                value = out[0] if has_aux else out
                return value.astype(jnp.float32) * scale if scale is not None else value, out

            (_, out), gradients = jax.value_and_grad(scaled, has_aux=True)(trained)
            return out, gradients

        compiled = self._placement.compile(compute, in_specs=in_specs, check_vma=check_vma)

        def call(params: Any, *args: Any, **kwargs: Any) -> Any:
            flat, treedef = flatten(params)
            leaves = [leaf for _, leaf in flat]
            if treedef != self._treedef:
                check_paths(self._paths, flat, ParameterError, "value_and_grad: params")
            trained = [leaves[i] for i in positions]
            static, traced = Static.split(treedef, [None if i in trained_set else x for i, x in enumerate(leaves)])
            scale = self._pipeline.scaler.scale if self._pipeline.scaler else None
            with self._span("value_and_grad"):
                out, gradients = compiled(trained, traced, static, scale, args, kwargs)
            tree = [None] * len(leaves)
            for i, gradient in zip(positions, gradients, strict=True):
                tree[i] = gradient
            grads = self._placement.as_gradients(jax.tree_util.tree_unflatten(treedef, tree))
            return out, (grads if scale is None else ScaledGradients(grads, scale))

        return call

    # --- update ------------------------------------------------------------------------------------

    def update(self, grads: Any) -> Any:
        """Take the gradients of a micro-step, update at the accumulation boundary, and return the parameters.

        Args:
            grads: a pytree with the parameters' structure, from :meth:`value_and_grad` or ``jax.grad``; a leaf may
                be None (no gradient: that parameter and its states stay), in all processes alike. Each leaf has its
                parameter's dtype, or float32. On a mesh :class:`RankGradients` are averaged over the ranks, and a
                plain pytree, as ``jax.grad`` under ``jax.jit`` gives, is the average already;
                :class:`RankGradients` in float32 of narrower parameters need
                ``communication_dtype="float32"``. With ``gradient_accumulation_steps=N`` the update averages over
                N calls.

        With ``schedule="delayed"`` it returns, from the warm-up on, the parameters that the update before made; this
        one's states are updated while the next gradients are computed.

        Raises (nothing has changed then):
            GradientError: the gradients do not fit, or (in all processes) those of several processes not each other.
            ConfigError: the schedule's learning rate is out of range.
            StateError: under jit.
            HostMemoryError: old parameters are still held, and there is no memory for more.

        Raises (some parameters and states may have changed):
            CollectiveError: a process was lost.
        """
        _refuse_jit("update()")
        with self._span("update"):
            return self._update(grads)

    def _update(self, grads: Any) -> Any:
        gradients, hypers = self._check(grads)
        steps = self.config.gradient_accumulation_steps
        parameters = [self._all_leaves[leaf.position] for leaf in self._leaves]
        targets = self._placement.targets(parameters) if self._pipeline.micro_steps + 1 == steps else []
        try:
            for i, gradient in enumerate(gradients):
                if gradient is not None:
                    self._pipeline.add_gradient(i, gradient)
            loss_scale = self._pipeline.loss_scale
            if not self._pipeline.end_micro_step():
                self.report = StepReport(updated=False, skipped="accumulating", loss_scale=loss_scale)
                return self.params
            self.report = self._pipeline.step(hypers, targets, divisor=float(steps))
            self._pipeline.finish_publications()
        except BaseException:
            with suppress(StateError):  # a pipeline that lost a rank may refuse even that
                self.discard_gradients()
            raise
        self.count += self.report.updated
        self._take_published(targets)
        return self.params

    def _take_published(self, targets: Sequence[Any]) -> None:
        for i in self._pipeline.published:
            position = self._leaves[i].position
            self._all_leaves[position] = self._placement.written(targets[i], self._all_leaves[position])

    def flush(self) -> Any:
        """Bring ``params`` to the last update, also under ``schedule="delayed"``, and return them.

        That holds back the parameters of the last update; afterwards the next gradients see them an update early.
        With several processes all must call this.
        """
        _refuse_jit("flush()")
        if self.config.schedule == "delayed":
            targets = self._placement.targets([self._all_leaves[leaf.position] for leaf in self._leaves])
            self._pipeline.flush(targets)
            self._take_published(targets)
        return self.params

    def trace(self, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Record the steps inside to a file for https://ui.perfetto.dev: ``with offloaded.trace("step.json"): ...``

        There are lanes for compute (``value_and_grad`` while JAX launches it, and ``update``), copies to the host,
        reduction, update, gather and copies to the device; on a mesh the collectives are in those of the copies. With
        several processes each writes a file of its own, ``step.rank0.json`` and so on.

        Raises:
            StateError: a trace is being recorded already.
            OSError: the file cannot be written.
        """
        return self._pipeline.trace(path)

    def _span(self, what: str) -> AbstractContextManager[None]:
        return self._pipeline.device.trace.span(COMPUTE, what)

    def discard_gradients(self) -> None:
        """Forget the gradients accumulated since the last update."""
        self._pipeline.drop_gradients()

    def _check(self, grads: Any) -> tuple[list[Any], list[AdamHyper]]:
        """The gradient of each parameter, or None, where the pipeline takes it; everything checked.

        What is wrong in one process is an error in all: alone, it would leave the others waiting.
        """
        self._pipeline.finish_publications()  # if it can go on at all: ranks meet next
        collectives = self._pipeline.device.collectives
        parameters = [(self._paths[leaf.position], leaf.dtype) for leaf in self._leaves]
        try:
            arrays, unreduced = self._arrays_of(grads)
            hypers = self._hypers()
        except Exception:
            check_alike(collectives, parameters, None, unreduced=False)
            raise
        check_alike(collectives, parameters, arrays, unreduced=unreduced)
        if all(array is None for array in arrays):
            raise GradientError("update: every gradient is None, expected at least one array")
        gradients = []
        for i, (leaf, gradient) in enumerate(zip(self._leaves, arrays, strict=True)):
            if gradient is not None:
                path, like = self._paths[leaf.position], self._all_leaves[leaf.position]
                gradient = self._placement.as_gradient(path, gradient, like, leaf.layout, unreduced=unreduced)
                self._pipeline.check_gradient(i, gradient)
            gradients.append(gradient)
        return gradients, hypers

    def _arrays_of(self, grads: Any) -> tuple[list[jax.Array | None], bool]:
        """The gradient of each parameter as it was given, or None, and whether they are each rank's own."""
        scaler = self._pipeline.scaler
        if isinstance(grads, ScaledGradients):
            if grads.scale != self._pipeline.loss_scale:
                raise GradientError(
                    f"gradients scaled by {grads.scale:g}, expected {self._pipeline.loss_scale:g}: they are from "
                    "before the last update, or of other parameters; compute them anew"
                )
            grads = grads.tree
        elif scaler is not None:
            raise GradientError(
                "plain gradients under loss scaling, expected those of offloaded.value_and_grad(loss_fn): float16 "
                "gradients of an unscaled loss underflow (or set loss_scale=1)"
            )
        unreduced = isinstance(grads, RankGradients)
        stack = [self._pipeline.device.world_size] if unreduced else []
        flat, treedef = flatten(grads.tree if unreduced else grads)
        if treedef != self._treedef:
            check_paths(self._paths, flat, GradientError, "update: gradients")
        gradients = []
        for leaf in self._leaves:
            path, gradient = self._paths[leaf.position], flat[leaf.position][1]
            if isinstance(gradient, jax.core.Tracer):
                raise GradientError(
                    f"{path}: update() inside jit, grad or vmap; expected concrete arrays: call it outside"
                )
            if gradient is not None:
                if not is_array(gradient):
                    raise GradientError(f"{path}: gradient is a {type(gradient).__name__}, expected an array or None")
                expected = list(leaf.shape) if leaf.layout is not None else [*stack, *leaf.shape]
                if list(gradient.shape) != expected or gradient.dtype not in (leaf.dtype, jnp.float32):
                    ranks = ", one a rank" if unreduced else ""
                    raise GradientError(
                        f"{path}: gradient is {gradient.dtype}{list(gradient.shape)}, expected "
                        f"{leaf.dtype}{expected} (or float32){ranks}"
                    )
                gradient = jnp.asarray(gradient)
                if gradient.is_deleted():
                    raise GradientError(f"{path}: gradient was donated or deleted; expected one that is alive")
            gradients.append(gradient)
        return gradients, unreduced

    def _hypers(self) -> list[AdamHyper]:
        """One for decayed parameters, one for those that ``mask`` excludes."""
        config = self.config
        lr, betas = config.hyperparameters(jnp.asarray(self.count, jnp.int32))
        check_hyperparameters(f"update {self.count}", lr, betas, config.eps, config.weight_decay)
        decayed = AdamHyper(lr, betas, config.eps, config.weight_decay, config.eps_root, _bias_correction)
        return [decayed, replace(decayed, weight_decay=0.0)]

    # --- states ------------------------------------------------------------------------------------

    def to_pytree(self) -> dict[str, Any]:
        """A copy of everything that training goes on from, as a pytree of NumPy arrays.

        Keys: ``count``; ``params``; ``master``, ``exp_avg``, ``exp_avg_sq`` (fp32) and ``steps``, each with the
        parameters' structure and None where a leaf is not trained. On a mesh they are whole: with several processes
        each gets all of them from the others, so all must call this. With ``schedule="delayed"`` it begins with
        :meth:`flush`.
        """
        self.flush()
        states: dict[str, list[Any]] = {name: [None] * len(self._all_leaves) for name in (*STATE_NAMES, "steps")}
        for i, leaf in enumerate(self._leaves):
            for name, state in self._whole_states(i).items():
                states[name][leaf.position] = state.reshape(leaf.shape)
            states["steps"][leaf.position] = self._pipeline.steps[i].copy()
        trees = {name: jax.tree_util.tree_unflatten(self._treedef, leaves) for name, leaves in states.items()}
        scaler = self._pipeline.scaler
        loss_scale = {} if scaler is None else {"loss_scale": scaler.state_dict()}
        layouts = {leaf.position: leaf.layout for leaf in self._leaves}
        params = [
            self._placement.to_numpy(leaf, layouts[i]) if i in layouts else to_numpy(leaf)
            for i, leaf in enumerate(self._all_leaves)
        ]
        return {
            "count": self.count,
            "params": jax.tree_util.tree_unflatten(self._treedef, params),
            **trees,
            **loss_scale,
        }

    def load_pytree(self, tree: Mapping[str, Any]) -> Any:
        """Load what :meth:`to_pytree` gave, and return the parameters. Any number of ranks may have written it.

        Raises:
            StateError: a key or a leaf is missing, or has another shape; nothing has changed.
        """
        if "count" not in tree:
            raise _missing("count", tree)
        trained = {leaf.position: leaf.shape for leaf in self._leaves}
        arrays = {i: numpy_shape(leaf) for i, leaf in enumerate(self._all_leaves) if is_array(leaf)}
        params = self._leaves_of(tree, "params", arrays)
        states = {name: self._leaves_of(tree, name, trained) for name in STATE_NAMES}
        steps = self._leaves_of(tree, "steps", dict.fromkeys(trained, ()))
        self._pipeline.drop_gradients()
        self.flush()  # what is held back would follow
        self._pipeline.will_change(range(len(self._leaves)))
        for i, leaf in enumerate(self._leaves):
            for name in STATE_NAMES:
                flat = np.reshape(states[name][leaf.position], -1)
                if leaf.layout is not None:
                    flat = leaf.layout.to_core(flat)
                for start, views in self._pipeline.states(i):
                    views[name][...] = flat[start : start + views[name].size]
            self._pipeline.steps[i][...] = steps[leaf.position]
        layouts = {leaf.position: leaf.layout for leaf in self._leaves}
        for position, value in params.items():
            like = self._all_leaves[position]
            if position in trained:
                self._all_leaves[position] = self._placement.restored(np.asarray(value), like, layouts[position])
            else:
                self._all_leaves[position] = self._placement.pass_through(from_numpy(value, like))
        if self._pipeline.scaler is not None and "loss_scale" in tree:
            self._pipeline.scaler.load_state_dict(tree["loss_scale"])
        self.count = int(tree["count"])
        return self.params

    def _whole_states(self, i: int) -> dict[str, np.ndarray]:
        """A parameter's states; what other processes hold comes from there."""
        numel = self._pipeline.params[i].numel
        words = {name: np.zeros(-(-numel // 2), np.int64) for name in STATE_NAMES}
        whole = {name: array.view(np.float32)[:numel] for name, array in words.items()}
        for start, views in self._pipeline.states(i):
            for name, view in views.items():
                whole[name][start : start + view.size] = view
        for name, array in words.items():  # the bits of one process, and zeros of the others
            self._pipeline.device.collectives.sum_integers(array, f"{name} of {self._pipeline.params[i].name}")
        layout = self._leaves[i].layout
        return whole if layout is None else {name: layout.from_core(state) for name, state in whole.items()}

    def _leaves_of(self, tree: Mapping[str, Any], name: str, shapes: Mapping[int, tuple[int, ...]]) -> dict[int, Any]:
        """The leaves of ``tree[name]`` at the positions of ``shapes``; checked to be of these shapes."""
        if name not in tree:
            raise _missing(name, tree)
        flat, treedef = flatten(tree[name])
        if treedef != self._treedef:
            check_paths(self._paths, flat, StateError, f"load_pytree: {name}")
        for position, shape in shapes.items():
            path, value = flat[position]
            if value is None or np.shape(value) != shape:
                got = "None" if value is None else list(np.shape(value))
                raise StateError(f"load_pytree: {name}{path} is {got}, expected shape {list(shape)}")
        return {position: flat[position][1] for position in shapes}

    def memory_report(self) -> MemoryReport:
        """Planned and measured bytes of this process. On the CPU the parameters' buffers count as device memory.

        With ``offload_param`` the plan has room for two generations of the parameters: old ones live until all new
        ones are there.
        """
        n_bytes = {True: 0, False: 0}
        for leaf in self._leaves:
            array = self._all_leaves[leaf.position]
            n_bytes[in_host_memory(array)] += sum(shard.data.nbytes for shard in array.addressable_shards)
        report = self._pipeline.memory_report(n_bytes[False])
        in_host = {"parameters": n_bytes[True]} if n_bytes[True] else {}
        return replace(report, planned_host_bytes=self._planned_host_bytes, host={**report.host, **in_host})

    @property
    def sent_bytes(self) -> int:
        """Bytes of gradients and parameters that this process's ranks have sent to other ranks in updates."""
        return self._pipeline.device.sent_bytes

    # --- optax -------------------------------------------------------------------------------------

    def as_optax(self) -> Any:
        """An ``optax.GradientTransformation`` for an ordinary optax loop around these parameters.

        ``optax.apply_updates(params, updates)`` gives exactly ``self.params`` (in float16, but for the sign of a
        zero); the update of an array that is not trained is a zero. The states are here, not in the optax state,
        which only counts: a state that is not the last one raises :class:`StateError`, and so does ``update`` under
        ``jax.jit``.

        Raises:
            ConfigError: with ``offload_param``, whose parameters optax cannot compute with where they are.
        """
        import optax

        if self.config.offload_param is not None:
            raise ConfigError(
                f"as_optax() with offload_param={self.config.offload_param!r}: apply_updates would compute in host "
                "memory; expected offloaded.update(grads) in the loop instead"
            )

        def leaves_of(params: Any) -> list[Any]:
            flat, treedef = flatten(params)
            if treedef != self._treedef:
                check_paths(self._paths, flat, ParameterError, "as_optax(): params")
            return [leaf for _, leaf in flat]

        def init(params: Any) -> OffloadState:
            leaves_of(params)
            return OffloadState(jnp.asarray(self.count, jnp.int32))

        def update(grads: Any, state: OffloadState, params: Any = None) -> tuple[Any, OffloadState]:
            _refuse_jit("as_optax().update")
            if int(state.step) != self.count:
                raise StateError(
                    f"as_optax().update with the state of update {int(state.step)}, expected that of update "
                    f"{self.count}: the host states have moved on; use load_pytree() to go back"
                )
            before = leaves_of(self.params if params is None else params)
            self.update(grads)
            updates = [self._placement.pass_through(no_update(leaf)) for leaf in before]
            for leaf in self._leaves:
                old, new = before[leaf.position], self._all_leaves[leaf.position]
                updates[leaf.position] = (
                    self._placement.pass_through(exact_update(old, new))
                    if leaf.layout is None
                    else exact_update_of_shards(old, new)
                )
            return jax.tree_util.tree_unflatten(self._treedef, updates), OffloadState(
                jnp.asarray(self.count, jnp.int32)
            )

        return optax.GradientTransformation(init, update)


def _missing(name: str, tree: Mapping[str, Any]) -> StateError:
    return StateError(f"load_pytree: no {name!r}, expected what to_pytree() gave; got {', '.join(map(str, tree))}")


def _refuse_jit(what: str) -> None:
    if isinstance(jnp.zeros(()), jax.core.Tracer):  # jit would run it once only, while it traces
        raise StateError(f"{what} under jit; expected a call outside: the states are in host memory")


@jax.jit
def _bias_correction_jit(beta: Any, t: Any) -> Any:
    return 1 - beta**t


def _bias_correction(beta: float, t: int) -> float:
    """1 - beta^t in XLA's float32 arithmetic on the CPU, where optax computes it too."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return float(_bias_correction_jit(beta, jnp.asarray(t, jnp.int32)))
