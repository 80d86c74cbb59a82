"""``wrap(params) -> OffloadedParams``: a pytree of parameters whose optimizer states live in host memory."""

import os
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Never, TypeVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from offload_core.config.options import ConfigLike
from offload_core.dtypes import BY_NUMPY
from offload_core.engine import MAX_SHARD_BYTES, Engine, LossScaler, Names, SaveOnSignal, StateLock, StepReport
from offload_core.errors import ConfigError, GradientError, StateError
from offload_core.layout.partition import ParamSpec as CoreParam
from offload_core.memory.report import DeviceUse, MemoryReport
from offload_core.ranks.consistency import check_start
from offload_core.support.launchers import warn_if_launched
from offload_core.support.where import answer_signals

from .devices.context import LaterUpdate, is_traced, public, refuse_jit, without_context_mesh
from .devices.device import device_use
from .files.checkpoint import TreeCheckpoints
from .files.export import export_safetensors
from .files.named_weights import NamedWeights, WeightRequest
from .files.states import TreeStates
from .optax_bridge.leaf_rules import LeafRules
from .optax_bridge.updates import transformation
from .optax_bridge.words import JaxSettings, resolved
from .placement.functions import Asked
from .placement.memory import checked_plan, held_bytes, local_devices
from .placement.placement import placement_for
from .training.differentiate import value_and_grad
from .training.loss_scale import DeviceScale
from .training.updates import TreeUpdates
from .tree.trees import Mask, check_nnx, mask_leaves, of_params, parameter_positions
from .tree.wrapped_tree import WrappedTree

T = TypeVar("T")


def wrap(
    params: Any,
    config: ConfigLike = None,
    *,
    mask: Mask | None = None,
    trainable: Mask | None = None,
    mesh: Mesh | None = None,
    axis: str | None = None,
    **overrides: Unpack[JaxSettings],
) -> "OffloadedParams":
    """Put the optimizer states of a pytree of parameters in host memory.

    Args:
        params: any pytree (dicts, ``nnx.state(model, nnx.Param)``, equinox modules). Leaves that are not floating-point
            arrays pass through untouched.
        config: an ``OffloadConfig``, a dict of its fields, or a DeepSpeed configuration: a dict, or a file's path.
        mask: the parameters that weight decay applies to, as in ``optax.adamw``: booleans in the parameters' structure
            or a prefix of it, or a function from the parameters to them; None: all.
        trainable: the parameters that are trained, given likewise; None: all. The others pass through.
        mesh: partition the optimizer states over the devices of one of its axes; they may belong to several processes.
            Parameters and other ``jax.Array`` leaves are replicated on it, with the values of rank 0. With ``stage=3``
            trained parameters of at least ``param_persistence_threshold`` elements are sharded over the axis: along
            the dimension that they are sharded along already (such global arrays are taken as they lie), else along
            the first that the number of devices divides, leaving out the very first; if there is none they are
            replicated. The model gathers them (:func:`gathered`, :func:`gather_params`). ``offload_param="cpu"`` keeps
            the shards in ``pinned_host`` memory.
        axis: the name of this axis; None: the mesh's only axis.
        overrides: fields of ``OffloadConfig``; ``lr`` may be an optax schedule, any function of the number of updates.
            Optax's words ``learning_rate``, ``b1`` and ``b2``, and element types such as ``jnp.bfloat16``, are
            understood beside them, also in ``config``.

    Raises:
        ConfigError, ParameterError, HostMemoryError, StateError (under jit): before anything is allocated.
    """
    return OffloadedParams(params, config, mask=mask, trainable=trainable, mesh=mesh, axis=axis, **overrides)


class OffloadedParams:
    """A pytree of device parameters, with master weights and moments in host memory.

    ``params`` is the current pytree; :meth:`update` replaces it. The bits on fp32 masters are those of eager
    ``optax.adamw``.
    """

    @without_context_mesh
    def __init__(
        self,
        params: Any,
        config: ConfigLike = None,
        *,
        mask: Mask | None = None,
        trainable: Mask | None = None,
        mesh: Mesh | None = None,
        axis: str | None = None,
        **overrides: Unpack[JaxSettings],
    ) -> None:
        refuse_jit("wrap()")
        answer_signals(self)
        check_nnx(params, chosen=trainable is not None)
        ranks = mesh.size if isinstance(mesh, Mesh) else 1
        self.config = resolved(config, overrides, world_size=ranks)
        self.config = replace(self.config, op_order=self.config.op_order or "optax")
        self._later = LaterUpdate()
        self._masked = mask is not None
        self._tree = tree = WrappedTree(params)
        leaves, paths = tree.leaves, tree.paths
        trained = mask_leaves(trainable, params, "trainable")
        decayed = mask_leaves(mask, params, "mask")
        positions = parameter_positions(paths, leaves, trained)
        target = self.config.target_dtype
        self._placement = placement_for(self.config, mesh, axis, [leaves[i] for i in positions])
        check_start(self._placement.device.collectives, self.config)
        if self._placement.device.collectives.world_size == 1:
            warn_if_launched("frontends.jax.initialize() first of all, and wrap(params, mesh=mesh) on all devices")
        rules = LeafRules(self.config, {paths[i]: np.shape(leaves[i]) for i in positions})
        specs: list[CoreParam] = []
        for i in positions:
            dtype = target or BY_NUMPY[np.dtype(leaves[i].dtype)]
            matrix = rules.matrix(paths[i])
            tree.trained.append(self._placement.leaf(i, paths[i], leaves[i], dtype, len(specs), matrix))
            parts = self._placement.specs(tree.trained[-1], dtype)
            specs += rules.of(tree.trained[-1], parts, decayed=bool(decayed[i]))
        if self.config.schedule == "delayed" and self._placement.exchanges_matrices:
            raise ConfigError(
                f"schedule='delayed' with optimizer={self.config.optimizer!r}, and matrices of which several devices "
                "hold parts: their exchange would cross the program's own; expected schedule='overlap'"
            )
        scaler = LossScaler.of(self.config, [s.dtype for s in specs])
        # Gradients come to the core all at once. Parameters in JAX's host memory are device parameters to it.
        config = replace(self.config, update_in_backward=False, offload_param=None)
        self._core = Engine(config, self._placement.device, scaler, rules.rules[0])
        self._state_lock, self._parameters = self._core.state_lock, self._core.parameters
        self._planned = checked_plan(self._core, self._placement, leaves, tree.trained, specs)
        _copy_shared(leaves, positions)
        arrays = [self._placement.place(leaf.path, leaves[leaf.position]) for leaf in tree.trained]
        tensors = self._placement.start(tree.trained, arrays)
        self._state_lock.change("wrap()", self._core.add_parameters, specs, tensors)
        arrays = self._placement.started(arrays, tensors)
        for i in set(range(len(leaves))) - set(positions):
            leaves[i] = self._placement.pass_through(leaves[i])
        for leaf, array in zip(tree.trained, arrays, strict=True):
            leaves[leaf.position] = self._placement.cast(leaf, array)
        first = leaves[tree.trained[0].position]
        self._loss_scale = None if scaler is None else DeviceScale(scaler, first)
        self._updates = TreeUpdates(self._core, self._placement, tree, self._loss_scale)
        self._states = TreeStates(self._core, self._placement, tree)
        self._checkpoints = TreeCheckpoints(self._core, self._placement, tree)
        self._weights = NamedWeights(self._core, tree, self._states.whole_leaf)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._core.__reduce_ex__(protocol)  # it says what to do instead

    @property
    @public("params")
    def params(self) -> Any:
        """The parameters, with the structure that was wrapped.

        Raises:
            StateError: under jit, where they would be constants of the program.
        """
        if is_traced():
            raise StateError(
                "offloaded.params under jit: the program would keep these values, and know of no update; expected the "
                "parameters as an argument: jax.jit(lambda params, x: ...)(offloaded.params, x)"
            )
        self._state_lock.change("a read of params", self._updates.follow)
        self._updates.check_present()
        return self._tree.now()

    @property
    def report(self) -> StepReport | None:
        """The report of the last :meth:`update`; None: there was none."""
        self._later.wait()
        return self._updates.report

    @property
    def count(self) -> int:
        """Updates made so far."""
        self._later.wait()
        return self._core.update_count

    @count.setter
    def count(self, updates: int) -> None:
        self._core.update_count = updates

    # --- gradients ---------------------------------------------------------------------------------

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        *,
        has_aux: bool = False,
        in_specs: Any = None,
        check_vma: bool = True,
        gathers: bool = False,
        keep_gradients: bool = False,
    ) -> Callable[..., tuple[Any, Any]]:
        """Return a compiled function of ``(params, *args, **kwargs)`` that gives ``fun``'s value and its gradients.

        It does what ``jax.jit(jax.value_and_grad(fun))`` does, and takes trees that also hold leaves that are not
        trained. The gradients have None in their place. Under loss scaling the gradients come as
        :class:`ScaledGradients`; the value is unscaled.

        On a GPU the program copies each gradient to ``pinned_host`` memory while backward runs, and frees the device's
        memory of it. Replicated parameters are the exception: their gradients stay on the devices.

        On a mesh each rank computes ``fun`` of its own part of the arguments inside ``shard_map``, and the gradients
        come as :class:`RankGradients`, not yet averaged. The value and floating-point leaves of aux are the mean over
        the ranks; other leaves of aux are rank 0's.

        Args:
            in_specs: on a mesh, the cut of the arguments after the parameters: a ``PartitionSpec`` for all of them, or
                a tuple of one for each (or for each of its subtrees). None: each is cut as it lies on the mesh, and
                whole if it does not lie there. Keyword arguments are always taken as they lie. With several processes
                an array of one process alone is taken as the whole; all processes must have the same.
            check_vma: on a mesh, that of ``jax.shard_map``. With False ``fun`` need not declare which values vary over
                the axis (a ``lax.scan`` may start from zeros), but may contain no collectives: their gradients would
                be wrong.
            gathers: True: ``fun`` gathers parameters itself, with :func:`gathered` or :func:`gather_params`, as in
                stage 3. In a ``lax.scan`` over stacked layers each layer's gradient then leaves the device alone;
                otherwise the gradient of the whole stack does, in the end.
            keep_gradients: True: gradients stay on the devices, for a program that computes with them before it gives
                them to :meth:`update`. In host memory JAX does not let them meet arrays of the device. Not with
                ``offload_param="cpu"``.

        Raises (when called):
            ParameterError: the parameters have another structure; no argument is split over the mesh axis.
        """
        asked = Asked(in_specs, check_vma, gathers, keep_gradients)
        compiled = value_and_grad(fun, self._tree, self._placement, self._loss_scale, asked, has_aux=has_aux)

        @wraps(compiled)
        def call(params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            self._later.wait()  # it may change the loss scale
            return compiled(params, *args, **kwargs)

        return call

    # --- update ------------------------------------------------------------------------------------

    def update(
        self, grads: Any, *others: Never, wait: bool = True, donate: bool = False, donate_params: bool = False
    ) -> Any:
        """Take the gradients of a micro-step, update at the accumulation boundary, and return the parameters.

        Args:
            grads: a pytree with the parameters' structure, from :meth:`value_and_grad` or ``jax.grad``. A leaf may be
                None, in all processes alike: that parameter and its states stay as they are. Each leaf has its
                parameter's dtype, or float32. On a mesh :class:`RankGradients` are averaged over the ranks. A plain
                pytree, as ``jax.grad`` under ``jax.jit`` gives, is the average already. :class:`RankGradients` in
                float32 for narrower parameters need ``communication_dtype="float32"``. With
                ``gradient_accumulation_steps=N`` the update averages over N calls.
            others: there are none. ``update(grads, state, params)`` is that of :meth:`as_optax`.
            wait: False: check the gradients and return None. A thread then waits for them and updates. The next call
                (``params`` above all) waits for that thread, and raises its error. Where several processes or ranks
                exchange anything, the update is made at once, so that its collectives do not cross those of the
                program.
            donate: delete each gradient as soon as it is read. It may not be used again.
            donate_params: write new values over the present ones in the device's memory. Arrays of ``params`` that the
                program still has are deleted then, as with ``jax.jit(step, donate_argnums=0)``. Without it the present
                and the next values are on the device together.

        With ``schedule="delayed"`` it returns, after the warm-up, the parameters of the update before; the states are
        updated while the next gradients are computed.

        An interrupt (``KeyboardInterrupt``) leaves the parameters and states before the update or those after it;
        ``count`` says which.

        Raises (nothing has changed then):
            GradientError: the gradients do not fit the parameters, or (in all processes) those of other processes.
            GradientError: arguments come after the gradients.
            ConfigError: the schedule's learning rate is out of range.
            StateError: under jit.
            HostMemoryError: old parameters are still held, and there is no memory for more.

        Raises (some parameters and states may have changed):
            CollectiveError: a process was lost.
        """
        refuse_jit("update()")
        if others:
            raise GradientError(
                f"update(): got {len(others)} arguments after the gradients; expected update(grads), which returns the "
                "new parameters. optax's update(grads, state, params) is offloaded.as_optax().update"
            )
        return self._update(grads, wait=wait, donate=donate, donate_params=donate_params)

    @public("update()", StateLock.begin)
    def _update(
        self,
        grads: Any,
        learning_rate: Any = None,
        *,
        wait: bool = True,
        donate: bool = False,
        donate_params: bool = False,
    ) -> Any:
        """Make an update, or have a thread make it. A ``learning_rate`` stands in place of the configuration's."""
        updates, core = self._updates, self._core
        with core.span("update"):
            given = updates.check(grads, learning_rate, donate=donate, donate_params=donate_params)
            if wait or not self._placement.alone:
                updates.take(given)
                return self._tree.now() if wait else None

        def take() -> None:
            with core.span("update"):
                updates.take(given)

        self._later.ask(partial(self._state_lock.change, "update()", take))
        return None

    @public("flush()")
    def flush(self) -> Any:
        """Bring ``params`` to the last update, also under ``schedule="delayed"``, and return them.

        That schedule holds back the parameters of the last update. After this the next gradients are computed with
        them, an update earlier than without it. With several processes all must call this.
        """
        refuse_jit("flush()")
        self._parameters.check_present()
        self._state_lock.change("flush()", self._updates.flush)
        return self._tree.now()

    # --- phases ------------------------------------------------------------------------------------

    @public("release()")
    def release(self, *, donate: bool = False) -> int:
        """Give the parameters' device memory up, until :meth:`restore`, and return the bytes.

        Master weights and states are on the host, and stay there. This object drops its references to the trained
        arrays. Arrays that the program holds stay its own: the memory is free when it drops them, too, or at once with
        ``donate``. Arrays that are not trained stay. Until :meth:`restore`, ``params``, ``update``, ``flush`` and loads
        raise :class:`StateError`. Saves, exports, :meth:`to_pytree` and :meth:`named_weights` work. It begins with
        :meth:`flush`. On CPU devices, whose memory is the host's, the arrays stay, and the rules are the same. With
        several processes all must call this.

        Args:
            donate: True: delete the arrays, also those that the program holds.

        Raises:
            StateError: gradients wait for an update; under jit.
        """
        refuse_jit("release()")
        return self._state_lock.change("release()", partial(self._updates.release, donate=donate))

    @public("restore()")
    def restore(self) -> Any:
        """Bring the parameters back from their master weights, where they lay, and return them. They have the bits of
        before. Does nothing if they are not released. With several processes all must call this.

        Raises:
            DeviceMemoryError: there is no room. All is still released, and nothing is lost.
        """
        refuse_jit("restore()")
        self._state_lock.change("restore()", self._updates.restore)
        return self._tree.now()

    def named_weights(
        self,
        *,
        dtype: Any = None,
        into: Callable[[str, Any], object] | Mapping[str, np.ndarray] | None = None,
        since: StepReport | None = None,
        device: jax.Device | jax.sharding.Sharding | None = None,
    ) -> Iterator[tuple[str, jax.Array]] | int:
        """Give whole weights one after the other, for an inference engine: ``(dotted path, array)``.

        No more than one weight is in memory at a time, beside the tree's. It works while the parameters are released,
        too. Keys of random generators are left out. With several processes all must call this, and take all weights.

        Args:
            dtype: None: the values that the model runs with. An element type: master weights, rounded to it.
            into: a function of a name and an array, which is called for each weight; or a mapping from all names to
                NumPy arrays, which are filled.
            since: :attr:`report`, as it was after an earlier update: leave out what has not changed since then.
            device: the device, or the sharding, of the arrays; None: the CPU, where ``torch.from_dlpack`` takes them
                without a copy.

        Returns:
            An iterator. With ``into``, the number of weights given.

        Raises:
            ConfigError, ParameterError: an argument is wrong; nothing was given.
            StateError: under jit; the parameters were changed before the iterator ended.
        """
        refuse_jit("named_weights()")
        self._later.wait()
        self._flush_present()
        given = self._weights.give(WeightRequest(dtype, into, since, device), self._between_updates)
        if into is None:
            return given
        weights = 0
        for name, value in given:
            if callable(into) and not isinstance(into, Mapping):
                into(name, value)
            weights += 1
        return weights

    @public("named_weights()")
    def _between_updates(self, act: Callable[[], T]) -> T:
        return act()

    @property
    def is_released(self) -> bool:
        """True between :meth:`release` and :meth:`restore`."""
        return self._parameters.released

    @contextmanager
    def released(self, *, donate: bool = False) -> Iterator[int]:
        """``with offloaded.released(): ...``: :meth:`release` before, :meth:`restore` after, also after an error.

        Inside another one it changes nothing.
        """
        was_released = self.is_released
        try:
            yield self.release(donate=donate)
        finally:
            if not was_released:
                self.restore()

    def trace(self, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Record the steps inside to a file for https://ui.perfetto.dev: ``with offloaded.trace("step.json"): ...``

        There are lanes for compute (``value_and_grad`` while JAX launches it, and ``update``), copies to the host,
        reduction, update, gather and copies to the device. On a mesh the lanes of the copies contain the collectives.
        With several processes each writes a file of its own, ``step.rank0.json`` and so on.

        Raises:
            StateError: a trace is being recorded already.
            OSError: the file cannot be written.
        """
        self._later.wait()
        return self._core.trace(path)

    def discard_gradients(self) -> None:
        """Forget the gradients accumulated since the last update."""
        self._later.wait()
        gradients = self._core.gradients
        self._state_lock.change("discard_gradients()", gradients.drop)

    # --- states ------------------------------------------------------------------------------------

    def _flush_present(self) -> None:
        """As :meth:`flush`, unless the parameters are released: they were flushed then."""
        if not self.is_released:
            self.flush()

    @public("to_pytree()")
    def to_pytree(self, *, sharded: bool = False) -> dict[str, Any]:
        """A copy of everything that training needs to go on, as a pytree of NumPy arrays.

        Keys: ``count``; ``params``; ``master``, ``exp_avg``, ``exp_avg_sq`` (fp32) and ``steps``, each with the
        parameters' structure and None for a leaf that is not trained. On a mesh the arrays are whole: with several
        processes each gets all of them from the others, so all must call this. With ``schedule="delayed"`` it begins
        with :meth:`flush`.

        Args:
            sharded: True: ``params`` are the arrays themselves, and ``master``, ``exp_avg`` and ``exp_avg_sq`` are
                ``jax.Array`` s that lie as their parameters, in ``pinned_host`` memory if the devices have it. No
                process then has a whole array of what is sharded; orbax saves such a tree from several processes. It
                takes 12 bytes for each element of a parameter and each device that holds the element.

        Raises:
            StateError: an array of ``params`` was donated.
        """
        self._flush_present()
        self._tree.check_alive("to_pytree")
        return self._state_lock.change("to_pytree()", self._states.to_pytree, self.count, sharded=sharded)

    @public("load_pytree()")
    def load_pytree(self, tree: Mapping[str, Any]) -> Any:
        """Load a pytree of :meth:`to_pytree`, and return the parameters. Any number of ranks may have written it.

        Arrays of several processes must be cut as their parameters; of these each process reads its own part.

        Raises:
            StateError: a key or a leaf is missing, or has another shape; nothing has changed. Under jit.
        """
        refuse_jit("load_pytree()")
        self._parameters.check_present()
        self._state_lock.change("load_pytree()", self._states.load_pytree, tree, self._updates.flush)
        return self.params

    @public("load_params()")
    def load_params(self, params: Any) -> Any:
        """Go on from other values of the parameters, clamped ones for example, and return them.

        An element that has changed becomes its own master weight; the others keep all bits of their master weights.
        Elements that get the values of the last update back before the next one have its master weights again.
        Moments and counts stay. Arrays that are not trained are taken over, too. Gradients that wait for an update are
        forgotten. With several processes all must call this, with the same values.

        Args:
            params: a tree with the structure, shapes and dtypes of ``offloaded.params``.

        Raises:
            ParameterError: it has another structure, shape or dtype; nothing has changed.
            StateError: under jit; with ``schedule="delayed"`` before :meth:`flush`.
        """
        refuse_jit("load_params()")
        self._parameters.check_present()
        self._state_lock.change("a read of params", self._updates.follow)
        self._state_lock.change("load_params()", self._states.load_params, params)
        return self.params

    @public("to_optax_state()")
    def to_optax_state(self) -> Any:
        """The states as those of ``optax.adamw`` with these settings (``optax.adam`` after ``add_decayed_weights`` with
        ``adam_mode="adam"``), in NumPy arrays: on fp32 parameters eager optax goes on with the same bits.

        With ``optimizer="muon"`` they are those of ``optax.contrib.muon``. Its momentum is the same average, so that
        these values are exact, but its update is another one (docs/numerics.md#muon).

        The parameters that belong to it are ``to_pytree()["master"]``. A leaf that is not trained is None in ``mu`` and
        ``nu``, as in the gradients of :meth:`value_and_grad`. With several processes all must call this. It begins with
        :meth:`flush`.

        Raises:
            StateError: parameters have had different numbers of updates; optax has one number for all.
        """
        self._flush_present()
        return self._states.to_optax(self.config, masked=self._masked, count=self.count)

    @public("load_optax_state()")
    def load_optax_state(self, state: Any) -> None:
        """Load the moments, in fp32, and the count of the state of ``optax.adamw``, or of any chain with one Adam. With
        ``optimizer="muon"`` it is the state of ``optax.contrib.muon``.

        The parameters stay: to go on from optax, wrap the parameters that belong to the state. Gradients that wait for
        an update are forgotten.

        Raises:
            StateError: it has no Adam, or several, or its moments do not fit, or Muon updates other leaves in optax or
                iterates with other coefficients; nothing has changed.
        """
        self._parameters.check_present()
        self._state_lock.change("load_optax_state()", self._states.load_optax, state, self._updates.flush)

    @public("export_safetensors()")
    def export_safetensors(
        self, folder: str | os.PathLike[str], *, max_shard_bytes: int = MAX_SHARD_BYTES, dtype: str | None = None
    ) -> None:
        """Write the tree's arrays under their dotted paths, in the format of Hugging Face's libraries.

        Files are ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and so on with
        ``model.safetensors.index.json``; names are ``jax.tree_util.keystr(path, simple=True, separator=".")``. Keys of
        random generators are left out. With several processes all must call this; the first writes, with one array in
        memory at a time. Files appear whole, in place of those of an earlier export. It begins with :meth:`flush`.

        Args:
            max_shard_bytes: the most bytes of arrays in a file.
            dtype: None: the parameters as the model runs with them. ``"float32"``: the master weights, exactly;
                ``"bfloat16"``, ``"float16"``: the master weights, rounded. Floating-point arrays that are not trained
                are cast.

        Raises:
            ConfigError, ParameterError: an argument is wrong, an array cannot be written, or two arrays have one name;
                nothing was written.
            CheckpointError: in all processes: a file could not be written; nothing is left of the export.
            StateError: an array of ``params`` was donated.
        """
        self._flush_present()
        self._tree.check_alive("export_safetensors")
        export_safetensors(
            self._tree.now(), self._core, self._states.whole_leaf, folder, max_shard_bytes=max_shard_bytes, dtype=dtype
        )

    # --- checkpoints -------------------------------------------------------------------------------

    @public("save_checkpoint()")
    def save_checkpoint(
        self,
        folder: str | os.PathLike[str],
        *,
        stateful: Mapping[str, Any] | None = None,
        extras: Any = None,
        keep: int | None = None,
        wait: bool = True,
    ) -> Path:
        """Save everything that training needs to go on, and return the checkpoint's folder, ``folder/step-…``.

        All processes call it; they must share the folder. The checkpoint holds master weights, moments, arrays that are
        not trained (those of the first process), step counts, the loss scale, the state of the random generators
        (Python's, NumPy's) of each process, ``stateful`` and ``extras``. Any number of devices and processes, any stage
        and the torch front end can load it; it knows arrays by their dotted paths: ``h.0.w``. It appears whole or not
        at all, and then ``folder/latest`` names it. With ``schedule="delayed"`` the run goes on as if it had not been
        saved.

        Args:
            stateful: objects with ``state_dict()`` and ``load_state_dict()``, by name: data loaders, for example. The
                states of the first process's objects are saved.
            extras: plain values and arrays (no objects: nothing is pickled); :meth:`load_checkpoint` returns them.
            keep: delete all but so many of the checkpoints in the folder; None: keep all.
            wait: False: return while optimizer states are still being written, with their present values; training may
                go on. The next save or :meth:`wait_for_checkpoint` waits for the end.

        Raises:
            CheckpointError: in all processes; earlier checkpoints are untouched.
            StateError: gradients wait for an update; an array of ``params`` was donated; under jit; a signal handler
                calls this in the middle of an update.
        """
        refuse_jit("save_checkpoint()")
        self._state_lock.change("a read of params", self._updates.follow)
        return self._checkpoints.save(folder, stateful=stateful, extras=extras, keep=keep, wait=wait)

    def save_on_signal(
        self,
        folder: str | os.PathLike[str],
        signals: Iterable[int] = (signal.SIGTERM,),
        *,
        stateful: Mapping[str, Any] | None = None,
        keep: int | None = None,
    ) -> SaveOnSignal:
        """Note these signals from now on, and save between two updates: ``if saver.save(): break`` ends the loop's
        turn.

        The signal itself only leaves a note. The next :meth:`update` tells all processes of it, and
        ``saver.save(extras)`` then saves in all of them, and returns the checkpoint's folder; until then it returns
        None. It is enough if one process gets the signal.

        ``with offloaded.save_on_signal(...) as saver:`` or ``saver.close()`` gives the signals back to what received
        them before.

        Args:
            folder, stateful, keep: as in :meth:`save_checkpoint`.

        Raises:
            StateError: not in the main thread.
        """
        save = partial(self.save_checkpoint, folder, stateful=stateful, keep=keep)
        return self._core.save_on_signal(lambda extras: save(extras=extras), signals)

    def wait_for_checkpoint(self) -> None:
        """Return when the last checkpoint is on the disk; raise the error of its writing. All processes call it."""
        self._later.wait()
        self._checkpoints.wait()

    @public("load_checkpoint()")
    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        stateful: Mapping[str, Any] | None = None,
        names: Names = None,
        random_state: bool = True,
        missing_ok: bool = False,
    ) -> Any:
        """Load a checkpoint, or the latest of a folder, and return its extras; ``params`` are then the checkpoint's.

        All processes call it. Gradients that wait for an update are forgotten.

        Args:
            stateful: objects that take over the states saved under these names. A warning names states for which there
                is none, unless it is given as None.
            names: from the dotted paths of this tree to the names in the checkpoint: a function, or a mapping of the
                paths whose names differ.
            random_state: True: the random generators go on as they were saved. A process that the saving run did not
                have keeps the state of its own.
            missing_ok: True returns None if there is no checkpoint yet, for loops that resume if there is one.

        Raises:
            CheckpointError: in all processes. Nothing has changed, unless the message says that loading broke off.
            StateError: under jit.
        """
        refuse_jit("load_checkpoint()")
        self._parameters.check_present()
        if missing_ok and self._checkpoints.has_none(path):
            return None
        return self._checkpoints.load(
            path, self._updates.publish, stateful=stateful, names=names, random_state=random_state
        )

    def where(self) -> str:
        """Return where this process is, as lines to print while an update does not return: what may still be done,
        counts, exchanges between processes, and threads.

        Waits for no lock and raises nothing, so that signal handlers and other threads may call it at any time.
        ``OFFLOAD_CORE_WHERE=1`` in the environment has ``kill -USR1`` print it, from ``wrap`` on.
        """
        return self._core.where()

    def memory_report(self) -> MemoryReport:
        """Planned and measured bytes of this process; print the report, or draw it (``.plot(path)``).

        On the CPU the parameters' buffers count as device memory. Arrays of the tree that are not trained are counted;
        gradients are not, because they are the caller's.
        """
        self._later.wait()
        return self._core.memory_report(self._planned, held_bytes(self._tree))

    def device_use(self) -> DeviceUse | None:
        """Return the memory in use on this process's devices, now and at its peak, as JAX counts it.

        None: their memory is the host's, or JAX keeps no statistics of it.
        """
        return device_use(local_devices(self._tree))

    @property
    def sent_bytes(self) -> int:
        """Bytes of gradients and parameters that this process's ranks have sent to other ranks in updates."""
        self._later.wait()
        return self._placement.device.sent_bytes

    # --- optax -------------------------------------------------------------------------------------

    def as_optax(self, learning_rate: Any = None) -> Any:
        """An ``optax.GradientTransformationExtraArgs`` for an ordinary optax loop around these parameters.

        ``optax.apply_updates(params, updates)`` gives exactly ``self.params`` (in float16, but for the sign of a
        zero); the update of an array that is not trained is a zero. In an ``optax.chain`` it comes last. The states are
        here; the optax state only counts. ``update`` takes extra arguments (``value=loss``) and ignores them. It raises
        :class:`StateError` for a state that is not the last one, for parameters that are not the last update's, under
        ``jax.jit``, and for parameters narrower than fp32 with ``jax_numpy_dtype_promotion="strict"``.

        Args:
            learning_rate: a rate or a schedule for the updates of this transformation, in place of ``lr``. With
                ``optax.inject_hyperparams(offloaded.as_optax)(learning_rate=...)`` it is in the optax state. With
                ``optimizer="muon"`` it is Muon's. AdamW keeps its own rate, if it has one.

        Raises:
            ConfigError: with ``offload_param``: optax cannot compute with parameters in host memory. With
                ``op_order="torch"`` and float32 parameters, whose new values are not always sums of float32.
        """
        wide = next((leaf.path for leaf in self._tree.trained if leaf.dtype == np.float32), None)
        if self.config.op_order == "torch" and wide is not None:
            raise ConfigError(
                f"as_optax() with op_order='torch': {of_params(wide)} is float32, and its new values are not always "
                "the old ones plus numbers of float32; expected op_order='optax', the default, or "
                "offloaded.update(grads) in the loop"
            )
        if self.config.offload_param is not None:
            raise ConfigError(
                f"as_optax() with offload_param={self.config.offload_param!r}: apply_updates would compute in host "
                "memory; expected offloaded.update(grads) in the loop instead"
            )

        def count() -> int:
            self._later.wait()
            self._state_lock.change("a read of params", self._updates.follow)
            self._parameters.check_present()
            return self.count

        return transformation(self._tree, self._placement, count, lambda grads: self._update(grads, learning_rate))


def _copy_shared(leaves: list[Any], positions: Collection[int]) -> None:
    """Copy trained arrays that are other leaves, too: an update that writes over one would delete the others."""
    seen = {id(leaf) for i, leaf in enumerate(leaves) if i not in positions}
    for i in positions:
        if id(leaves[i]) in seen and isinstance(leaves[i], jax.Array):
            leaves[i] = jnp.copy(leaves[i])
        seen.add(id(leaves[i]))
