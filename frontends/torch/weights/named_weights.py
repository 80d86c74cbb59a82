"""``Engine.named_weights``: whole weights one after the other, in bounded memory, for an inference engine or a file.

Weights are read in buckets. Between two buckets the ranks tell each other that they go on, so that a receiver that
fails on one rank ends the call on all of them, at the same weight: no exchange is left half done, and the next call
begins anew.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from offload_core.engine import Engine, StepReport
from offload_core.errors import ConfigError, ParameterError, StateError
from offload_core.ranks.collectives import Collectives
from offload_core.ranks.consistency import combine, fingerprint, processes, together
from offload_core.support.checks import kind_of, some_of

from ..internals.private import grad_mode_kept, no_read, storage_of
from ..optim.optimizer import OffloadedOptimizer
from ..params.dtensor import local_of
from .merged_weights import AdaptedLayer, merged_weights
from .reading import CPU, NamedWeight, Weights, check_layout, dtype_of, laid, weights_of

Named = tuple[str, torch.Tensor]
Receiver = Callable[[list[Named]], object]
_WHAT = "named_weights()"


@dataclass(frozen=True)
class WeightRequest:
    """The arguments of one call, as ``Engine.named_weights`` describes them."""

    dtype: str | torch.dtype | None = None
    layout: str = "contiguous"
    device: str | torch.device | None = None
    into: Receiver | Mapping[str, torch.Tensor] | None = None
    since: StepReport | None = None
    merge_lora: bool = False
    rank0_only: bool = False


@dataclass(frozen=True)
class Unit:
    """Weights that are read together."""

    weights: Sequence[NamedWeight]
    layer: AdaptedLayer | None
    """Its adapters are merged into the weights; None: there are none."""

    @property
    def sources(self) -> Sequence[torch.Tensor]:
        """The tensors that the weights depend on."""
        return [weight.tensor for weight in self.weights] if self.layer is None else self.layer.tensors

    @property
    def recipe(self) -> tuple[Any, ...]:
        """Everything that decides the weights besides the values of :attr:`sources`."""
        return (id(self.weights[0].tensor),) if self.layer is None else self.layer.recipe

    @property
    def numel(self) -> int:
        return sum(weight.tensor.numel() for weight in self.weights)

    def read(
        self, reader: Weights, dtype: torch.dtype | None, layout: str, device: torch.device, *, wanted: bool
    ) -> list[Named]:
        """Return copies of the weights; none if they are not ``wanted``. All ranks call this."""
        if self.layer is None:
            [weight] = self.weights
            value = reader.whole(weight.tensor, dtype, layout=layout, device=device, wanted=wanted)
            return [] if value is None else [(weight.name, value)]
        exact = None if dtype is None else torch.float32  # rounded once, after the sum
        values = self.layer.merged(partial(reader.whole, dtype=exact, layout="own", wanted=wanted))
        if values is None:
            return []
        return [
            (weight.name, laid(value, weight.dtype, layout, device, fresh=True))
            for weight, value in zip(self.weights, values, strict=True)
        ]


class NamedWeights:
    """Hands out the weights of one engine's model, and knows which of them have changed since a report."""

    def __init__(self, model: nn.Module | None = None, optimizer: OffloadedOptimizer | None = None) -> None:
        self._known: dict[int, _Frozen] = {}
        """The frozen parameters as they were last looked at, by ``id``."""
        self._recipes: dict[tuple[str, bool], tuple[Any, int]] = {}
        """The recipe of each unit when it was last looked at, by its first weight's name and the merging, with the
        optimizer's count of changes when it was first seen so."""
        self._open: weakref.ref[WeightBuckets] | None = None
        """What the last call reads from; all ranks end it before the next call."""
        if model is not None and optimizer is not None:
            self._look(model, optimizer, -1)
            with suppress(ParameterError):  # what cannot be merged is refused where it is asked for
                self._look_at_recipes(_units(model, None, merge_lora=True), -1, merged=True)

    def __reduce__(self) -> Any:
        return NamedWeights, ()  # a copy has other parameters

    def give(self, model: nn.Module, optimizer: OffloadedOptimizer, asked: WeightRequest) -> "int | WeightIterator":
        """As ``Engine.named_weights``."""
        lock = optimizer.state_lock
        buckets, receive = lock.consistent(_WHAT, self._begin, model, optimizer, asked)
        return WeightIterator(buckets) if asked.into is None else _give(buckets, receive)

    def _begin(
        self, model: nn.Module, optimizer: OffloadedOptimizer, asked: WeightRequest
    ) -> "tuple[WeightBuckets, Receiver | None]":
        if (before := None if self._open is None else self._open()) is not None:
            before.leave()
        core = optimizer.core
        collectives = core.collectives
        with together(collectives, _WHAT, _failed):
            dtype = dtype_of(asked.dtype)
            check_layout(asked.layout)
            units = _units(model, dtype, merge_lora=asked.merge_lora)
            receive = _receiver(asked.into, units) if collectives.rank == 0 or not asked.rank0_only else None
            device = _device(asked)
            number = None if asked.since is None else _number_of(core, asked.since)
        _check_alike(collectives, asked, dtype, units)
        optimizer.flush()
        optimizer.state_lock.change(_WHAT, optimizer.components.registration.current_tensors)
        changes = core.changes
        self._look(model, optimizer, changes.number)
        mixed = self._look_at_recipes(units, changes.number, merged=asked.merge_lora)
        if number is not None:
            flags = self._changed(optimizer, units, number) | np.array([since >= number for since in mixed], np.int64)
            collectives.sum_integers(flags, _WHAT)  # a change on one rank is one on all
            units = [unit for unit, changed in zip(units, flags, strict=True) if changed]
        wanted = collectives.rank == 0 or not asked.rank0_only
        read = partial(_read, Weights(optimizer), dtype, asked.layout, device, wanted)
        buckets = WeightBuckets(core, units, read)
        self._open = weakref.ref(buckets)
        return buckets, receive

    # --- changes ---------------------------------------------------------------------------------------

    def _changed(self, optimizer: OffloadedOptimizer, units: Sequence[Unit], number: int) -> np.ndarray:
        """Return int64[units]: 1 for each that may have changed after this count of the optimizer's changes."""
        changes, slots = optimizer.core.changes, optimizer.components.registration.slots
        trained = changes.since(number)

        def changed(tensor: torch.Tensor) -> bool:
            if tensor in slots:
                return bool(trained[slots[tensor].index])
            known = self._known.get(id(tensor))
            return known is None or known.changed >= number  # a buffer may change in each forward

        return np.array([any(map(changed, unit.sources)) for unit in units], np.int64)

    def _look_at_recipes(self, units: Sequence[Unit], number: int, *, merged: bool) -> list[int]:
        """Note how the units are made now.

        Args:
            number: the optimizer's count of changes so far; -1: they count as unchanged.

        Returns:
            For each unit, the count when a change of its recipe was last seen; -1: none was.
        """
        seen = []
        for unit in units:
            key, recipe = (unit.weights[0].name, merged), unit.recipe
            before, since = self._recipes.get(key, (None, number if merged else -1))  # new tensors are known as new
            self._recipes[key] = (recipe, since if before in (None, recipe) else number)
            seen.append(self._recipes[key][1])
        return seen

    def _look(self, model: nn.Module, optimizer: OffloadedOptimizer, number: int) -> None:
        """Note which frozen parameters have changed since the last look.

        Args:
            number: the count of changes so far; -1: they count as unchanged.
        """
        known = self._known
        self._known = {}
        for param in model.parameters():
            if optimizer.has_states(param):
                continue
            now = _Frozen.of(param, param in optimizer.sharding, number)
            before = known.get(id(param))
            self._known[id(param)] = before if before is not None and before.is_as(now) else now


@dataclass(frozen=True)
class _Frozen:
    """A frozen parameter, as it was looked at."""

    param: "weakref.ref[torch.Tensor]"
    version: int | None
    """None: it is not counted."""
    storage: int | None
    """None: it is released and filled again (stage 3)."""
    changed: int
    """The optimizer's count of changes when a change was last seen; -1: none was."""

    @classmethod
    def of(cls, param: torch.Tensor, in_shards: bool, number: int) -> Self:
        with no_read():
            local = local_of(param)
            version = None if local.is_inference() else local._version + (0 if local is param else param._version)
            return cls(weakref.ref(param), version, None if in_shards else storage_of(local), number)

    def is_as(self, other: "_Frozen") -> bool:
        """True if the parameter is the same, and nothing was seen to have changed it."""
        known = self.version is not None and (self.version, self.storage) == (other.version, other.storage)
        return known and self.param() is not None and self.param() is other.param()


# --- arguments ------------------------------------------------------------------------------------------------


def _units(model: nn.Module, dtype: torch.dtype | None, *, merge_lora: bool) -> list[Unit]:
    if merge_lora:
        return [Unit(weights, layer) for weights, layer in merged_weights(model, dtype)]
    return [Unit([weight], None) for weight in weights_of(model, dtype, _WHAT)]


def _device(asked: WeightRequest) -> torch.device:
    """The device of the tensors that are handed out."""
    if asked.device is None:
        targets = {target.device for target in asked.into.values()} if isinstance(asked.into, Mapping) else set()
        return targets.pop() if len(targets) == 1 else CPU
    try:
        return torch.device(asked.device)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device: got {asked.device!r}, expected a torch device, as 'cpu' or 'cuda'") from None


def _number_of(core: Engine, since: StepReport) -> int:
    if not isinstance(since, StepReport):
        raise ConfigError(f"since: got {kind_of(since)}, expected a report that engine.step() has returned")
    changes = core.changes
    number = changes.number_of(since.changes)
    if number is None:
        raise ConfigError(
            "since: got the report of another engine, or of another process; expected one that this engine's step() "
            "has returned: call named_weights() without since= first, which gives all weights"
        )
    return number


def _check_alike(
    collectives: Collectives, asked: WeightRequest, dtype: torch.dtype | None, units: Sequence[Unit]
) -> None:
    """Raise :class:`ParameterError` on all ranks unless they have the same arguments and the same weights."""
    of_each = [(w.name, w.shape, str(w.dtype)) for unit in units for w in unit.weights]
    terms = f"{dtype} {asked.merge_lora} {asked.rank0_only} {asked.since is None} {of_each}"
    if not combine(collectives, _WHAT, same=[fingerprint(terms)]).alike.all():
        raise ParameterError(
            f"{_WHAT}: dtype={asked.dtype!r}, merge_lora={asked.merge_lora}, rank0_only={asked.rank0_only}, "
            f"since={'None' if asked.since is None else 'a report'} and {len(of_each)} weights here, and not the same "
            "on another rank; expected the same arguments and the same model on all ranks"
        )


def _failed(others: str) -> StateError:
    return StateError(
        f"{_WHAT} failed or was left before its end on rank {others}, and so ends on all; expected all ranks to take "
        "all weights: that rank's own error says why. Nothing was lost: call it again on all ranks"
    )


def _receiver(into: Any, units: Sequence[Unit]) -> Receiver | None:
    """Return the function that takes a bucket.

    Raises:
        ParameterError: a tensor is missing, unknown or does not fit; nothing was written.
    """
    if into is None or (callable(into) and not isinstance(into, Mapping)):
        return into
    if not isinstance(into, Mapping):
        raise ConfigError(
            f"into: got {kind_of(into)}, expected a function that takes a list of (name, tensor), or a mapping "
            "from all names to tensors"
        )
    weights = {weight.name: weight for unit in units for weight in unit.weights}
    names = {name: (name, *weight.others) for name, weight in weights.items()}
    known = {name for all_of_it in names.values() for name in all_of_it}
    missing = [name for name, all_of_it in names.items() if not any(each in into for each in all_of_it)]
    unknown = [name for name in into if name not in known]
    wrong = [
        f"{each!r} is {_described(into[each])}, expected {_expected(weights[name])}"
        for name, all_of_it in names.items()
        for each in all_of_it
        if each in into and not _fits(into[each], weights[name])
    ]
    if missing or unknown or wrong:
        said = [f"{len(missing)} missing: {some_of(missing)}"] * bool(missing)
        said += [f"{len(unknown)} unknown: {some_of(unknown)}"] * bool(unknown)
        raise ParameterError(
            f"into: {'; '.join(said + wrong[:3])}; expected a tensor for each of the model's {len(weights)} weights, "
            "and no other, of its shape: nothing was written"
        )

    def write(bucket: list[Named]) -> None:
        for name, value in bucket:
            for each in names[name]:
                if each in into:
                    target = into[each]
                    mode = torch.inference_mode() if target.is_inference() else torch.no_grad()
                    with grad_mode_kept(), mode:
                        target.copy_(value)

    return write


def _fits(target: Any, weight: NamedWeight) -> bool:
    if not isinstance(target, torch.Tensor) or target.layout is not torch.strided or target.is_meta:
        return False
    alike = target.is_floating_point() if weight.dtype.is_floating_point else target.dtype == weight.dtype
    return alike and tuple(target.shape) == weight.shape


def _described(target: Any) -> str:
    if not isinstance(target, torch.Tensor):
        return kind_of(target)
    return f"{tuple(target.shape)} {target.dtype}, {target.layout} on {target.device}"


def _expected(weight: NamedWeight) -> str:
    kind = "any floating-point type" if weight.dtype.is_floating_point else str(weight.dtype)
    return f"a dense tensor of shape {weight.shape}, of {kind}"


# --- reading --------------------------------------------------------------------------------------------------


def _read(
    reader: Weights, dtype: torch.dtype | None, layout: str, device: torch.device, wanted: bool, unit: Unit
) -> list[Named]:
    return unit.read(reader, dtype, layout, device, wanted=wanted)


class WeightBuckets:
    """The weights of one call, read in buckets of at most ``reduce_bucket_size`` elements, a larger one alone.

    All ranks call :meth:`next` until one of them gets None or an error, or calls :meth:`leave`.
    """

    def __init__(self, core: Engine, units: Sequence[Unit], read: Callable[[Unit], list[Named]]) -> None:
        self._core = core
        self._state_lock, self._changes = core.state_lock, core.changes
        self._units = deque(units)
        self._read = read
        self._began = self._changes.of_all_ranks
        self._ended = False

    def next(self) -> list[Named] | None:
        """Return the next bucket; empty where this rank wants none. None: there are no more.

        Raises:
            StateError: another rank has left, or the model has had an update or a load since the call.
        """
        if self._ended:
            raise StateError(
                f"{_WHAT}: this iterator was ended before all weights were taken, by an error or by a later call; "
                "expected that one to be used"
            )
        try:
            self._check_unchanged()
            self._agree(goes_on=True)
            taken = self._take()
            self._ended = not taken  # all ranks alike
            consistent = self._state_lock.consistent
            return [named for unit in taken for named in consistent(_WHAT, self._read, unit)] if taken else None
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """End before all weights were read. The other ranks get an error in place of their next bucket."""
        if not self._ended and self._began == self._changes.of_all_ranks:
            self._ended = True
            with suppress(Exception):  # what goes wrong here is said by the ranks that go on
                self._agree(goes_on=False)
        self._ended = True

    def _check_unchanged(self) -> None:
        if self._began != self._changes.of_all_ranks:
            self._ended = True  # on all ranks alike
            raise StateError(
                f"{_WHAT}: the model has had an update or a load since the call, so that further weights would be of "
                "another step than those before; expected all weights to be taken before the next step: call it again"
            )

    def _agree(self, *, goes_on: bool) -> None:
        """Tell the other ranks; raise :class:`StateError` if one of them does not go on."""
        collectives = self._core.collectives
        if collectives.world_size == 1:
            return
        consistent = self._state_lock.consistent
        left = consistent(_WHAT, combine, collectives, _WHAT, of_each=[not goes_on]).of_each
        if left.any():
            self._ended = True
            if goes_on:
                raise _failed(processes(np.flatnonzero(left)))

    def _take(self) -> list[Unit]:
        taken: list[Unit] = []
        numel, config = 0, self._core.config
        most = config.reduce_bucket_size
        while self._units and (not taken or numel + self._units[0].numel <= most):
            numel += self._units[0].numel
            taken.append(self._units.popleft())
        return taken


def _give(buckets: WeightBuckets, receive: Receiver | None) -> int:
    """Have a receiver take all buckets. Return the number of weights that it got."""
    count = 0
    try:
        while (bucket := buckets.next()) is not None:
            count += len(bucket)
            if receive is not None and bucket:
                receive(bucket)
            del bucket  # before the next one is read
    except BaseException:
        buckets.leave()
        raise
    return count


class WeightIterator(Iterator[Named]):
    """Yields ``(name, tensor)``. An iterator that is closed or dropped before its end ends on all ranks."""

    _buckets: WeightBuckets | None = None
    """None: all were read, or the iterator was closed, or an interrupt has cut the constructor short."""

    def __init__(self, buckets: WeightBuckets) -> None:
        self._read: deque[Named] = deque()
        self._buckets = buckets

    def __next__(self) -> Named:
        while not self._read:
            bucket = None if self._buckets is None else self._buckets.next()
            if bucket is None:
                self._buckets = None
                raise StopIteration
            self._read.extend(bucket)
        return self._read.popleft()

    def close(self) -> None:
        """End the iteration, on all ranks."""
        self._read = deque()
        buckets, self._buckets = self._buckets, None
        if buckets is not None:
            buckets.leave()

    __del__ = close
