"""DTensor parameters, which other code has placed on a mesh: the elements of each that this process has, and the
processes that decide updates together.

FSDP2 (``fully_shard``), tensor parallelism (``parallelize_module``) and expert parallelism make such parameters. Each
process has master weights and states for the elements of its *local* tensor. Several processes may have the same
elements (``Replicate``, HSDP). Then each of them updates these elements, to the same bits, and one process counts the
elements in the norm and saves them.
"""

import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from offload_core.config.options import OffloadConfig
from offload_core.errors import ConfigError, ParameterError
from offload_core.layout.regions import Box
from offload_core.ranks.collectives import Collectives
from offload_core.ranks.consistency import combine, fingerprint

from ..internals.private import around, local_tensor, no_read, root_mesh

_OTHERWISE = "expected Shard and Replicate alone: redistribute the parameter before the optimizer is made"
_STRIDED = "_StridedShard"
_DIGEST_BYTES = 5


def dtensor_class() -> Any:
    """Return torch's class ``DTensor``; None: ``torch.distributed.tensor`` was not imported, so no tensor is a
    DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else getattr(module, "DTensor", None)


def is_dtensor(tensor: Any) -> bool:
    """True for a DTensor."""
    kind = dtensor_class()
    return kind is not None and isinstance(tensor, kind)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds this process's values: a DTensor's local tensor, or the tensor itself."""
    return local_tensor(tensor) if is_dtensor(tensor) else tensor


def is_here(param: Any) -> bool:
    """True if this process is on a DTensor's mesh."""
    return param.device_mesh.get_coordinate() is not None


def shards_to_come() -> bool:
    """True if Accelerate shards models by FSDP2 in this process. Then ``prepare(model, optimizer)`` replaces the
    optimizer's whole parameters by their shards."""
    accelerate = sys.modules.get("accelerate.state")
    return (
        accelerate is not None
        and accelerate.is_initialized()
        and getattr(accelerate.AcceleratorState(), "is_fsdp2", False)
    )


@dataclass(frozen=True)
class Part(Box):
    """The elements of a DTensor parameter that this process has, as the core's ``Elements``."""

    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    order: tuple[int, ...] | None = None


class Placement:
    """The elements of a parameter that its tensor has on this process. This class is for plain tensors, which have all
    elements; :class:`Placed` is for DTensors."""

    is_cut = False
    """True if different processes may have different elements of the parameter. The value is the same on all
    processes."""
    can_grow = True
    """True if the parameter may get more elements, which then get states."""
    read_on_other_streams = False
    """True if code may read the parameter on streams that wait for the caller's stream only when a forward begins, as
    FSDP2 does."""

    def __init__(self) -> None:
        self.part: Part | None = None
        """The elements that the tensor has on this process; None: all elements, in the order of the tensor's memory."""

    def holds(self, param: Any) -> bool:
        """True if the parameter still has this placement."""
        return True

    def own(self, value: Any) -> Any:
        """Return this process's elements of a gradient or a state of the parameter."""
        return value

    def around(self, local: torch.Tensor, kind: Callable[[], Any] | None = None) -> torch.Tensor:
        """Return a tensor that has the parameter's placement, and ``local`` as this process's elements. For a plain
        parameter this is ``local`` itself.

        Args:
            kind: returns the class that a new DTensor gets; None: the class ``DTensor``.
        """
        return local

    def check_cast(self, name: str, dtype: torch.dtype, target: Any) -> None:
        """Raise :class:`ParameterError` if the parameter cannot be cast to another element type."""

    def fingerprints(self, rank: int) -> tuple[int, int]:
        """Return two fingerprints: of this process's elements, and of the ranks on the parameter's mesh. For a plain
        parameter return 0 and ``rank``."""
        return 0, rank

    def words(self, param: Any) -> str:
        """Return a description of the parameter's placement, for errors."""
        return f"DTensor on {param.device_mesh}, which this process is not on" if is_dtensor(param) else "plain"

    among_others = "a plain tensor beside DTensors"
    """A description of the parameter for the error that processes have different values of it."""


UNDIVIDED = Placement()


@dataclass(frozen=True, eq=False)
class Placed(Placement):
    """The placement of a DTensor when its states were made.

    Attributes:
        like: the DTensor itself, from which :meth:`around` takes the placement of new DTensors.
        part: this process's elements.
        ranks: the ranks of torch's default group on the parameter's mesh.
    """

    mesh: Any
    placements: tuple[Any, ...]
    like: Any
    part: Part
    ranks: frozenset[int]
    can_grow = False
    read_on_other_streams = True
    among_others = "a DTensor on submeshes beside each other"

    @classmethod
    def of(cls, name: str, param: Any, order: Sequence[int] | None) -> "Placed":
        """Read the placement of a parameter.

        Args:
            order: the memory order of the parameter's local tensor (``tensors.memory_order``).

        Raises:
            ParameterError: this process's elements are no box of the parameter; or the parameter is a sum over
                processes (``Partial``); or this process is not on the parameter's mesh.
        """
        mesh, placements = param.device_mesh, tuple(param.placements)
        if not is_here(param):
            raise ParameterError(
                f"parameter {name!r} lies on {mesh}, which this process is not on; expected each process to have a "
                "part of every parameter that it gives to its optimizer"
            )
        with no_read():
            shape, local = tuple(param.shape), tuple(local_of(param).shape)
        box = _box(name, shape, mesh, placements)
        part = Part(shape, box, None if order is None else tuple(order))
        if part.local_shape != local:
            raise ParameterError(
                f"parameter {name!r} has a local tensor of shape {local} on this process, expected "
                f"{part.local_shape}, as {list(placements)} cut {shape} over a mesh of {tuple(mesh.shape)}: its "
                "elements would be taken for others"
            )
        return cls(mesh, placements, param, part, _ranks_on(mesh))

    @property
    def is_cut(self) -> bool:  # type: ignore[override]
        """True if a mesh dimension of several processes shards the parameter. The value is the same on all processes.
        ``part.is_whole`` may differ: a value head of one row is whole on the process that has the row, and the other
        processes have no elements."""
        sizes = zip(self.placements, self.mesh.shape, strict=True)
        return any(size > 1 and not placement.is_replicate() for placement, size in sizes)

    def holds(self, param: Any) -> bool:
        return (
            is_dtensor(param)
            and tuple(param.placements) == self.placements
            and (param.device_mesh is self.mesh or param.device_mesh == self.mesh)
        )

    def own(self, value: Any) -> Any:
        """Return this process's elements of a gradient or a state of the parameter.

        A DTensor with another placement is first redistributed (a ``Partial`` gradient is summed). A tensor of the
        whole parameter's shape is sliced. Any other value is returned unchanged.
        """
        if is_dtensor(value):
            if not self.holds(value):
                value = value.redistribute(device_mesh=self.mesh, placements=self.placements)
            return local_of(value)
        if isinstance(value, torch.Tensor) and not self.part.is_whole and tuple(value.shape) == self.part.shape:
            return value[self.part.index]
        return value

    def around(self, local: torch.Tensor, kind: Callable[[], Any] | None = None) -> torch.Tensor:
        """Return a DTensor with the parameter's placement and the local tensor ``local``, which may be on another
        device than the parameter."""
        placed = around(local, self.like)
        if kind is not None:
            placed.__class__ = kind()
        return placed

    def check_cast(self, name: str, dtype: torch.dtype, target: Any) -> None:
        raise ParameterError(
            f"parameter {name!r} is a DTensor of {dtype}, and param_dtype asks for {target}; expected no param_dtype: "
            "MixedPrecisionPolicy(param_dtype=...) of fully_shard says what it computes in, or cast the model before "
            "it is placed"
        )

    def fingerprints(self, rank: int) -> tuple[int, int]:
        return fingerprint(str(self.part.box)), fingerprint(str(sorted(self.ranks)))

    def words(self, param: Any) -> str:
        return f"DTensor {list(self.placements)} on a mesh of {tuple(self.mesh.shape)}"

    def __str__(self) -> str:
        return f"{list(self.placements)} on {self.mesh}"


def placement_of(name: str, param: Any, order: Sequence[int] | None) -> Placement:
    """Return the placement of a parameter on this process. The arguments and errors are :meth:`Placed.of`'s.

    If this process is not on the parameter's mesh, the placement has all elements. :func:`count_once` then raises on
    all processes.
    """
    return Placed.of(name, param, order) if is_dtensor(param) and is_here(param) else UNDIVIDED


def placements_of(param: Any) -> str:
    """Return a parameter's placements on its mesh, for errors."""
    return f"{list(param.placements)}" if is_dtensor(param) else "plain"


def _box(name: str, shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    cuts: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    later: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    place_on = mesh.get_coordinate()
    for i, placement in enumerate(placements):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind not in ("Shard", _STRIDED):
            raise ParameterError(f"parameter {name!r} is placed as {placement} on its mesh; {_OTHERWISE}")
        cut = mesh.size(i), place_on[i]
        if kind == _STRIDED:  # cut after those to its right, as FSDP2 cuts what tensor parallelism has cut
            later[placement.dim].append(cut)
            inner = [mesh.size(j) for j in range(i + 1, len(placements)) if placements[j].is_shard(placement.dim)]
            if placement.split_factor != int(np.prod(inner, dtype=np.int64)):
                raise ParameterError(f"parameter {name!r} is placed as {list(placements)}; {_OTHERWISE}")
        else:
            cuts[placement.dim].append(cut)
    box = [(0, n) for n in shape]
    for dim in {*cuts, *later}:
        for n, place in (*cuts[dim], *later[dim]):
            low, high = box[dim]
            each = -(-(high - low) // n)
            box[dim] = min(low + place * each, high), min(low + (place + 1) * each, high)
    return tuple(box)


# --- the processes ---------------------------------------------------------------------------------------------


def ranks_of(params: Iterable[torch.Tensor]) -> tuple[int, ...] | None:
    """Return the ranks of torch's default group on which these parameters are placed, including this process. None: no
    parameter is a DTensor.

    Raises:
        ParameterError: the parameters' meshes are not submeshes of one mesh, or do not include this process.
    """
    meshes = {id(param.device_mesh): param.device_mesh for param in params if is_dtensor(param)}  # type: ignore[attr-defined]
    if not meshes:
        return None
    everyone = {id(mesh): _ranks_on(mesh) for mesh in meshes.values()}
    largest = max(everyone.values(), key=len)
    if any(not ranks <= largest for ranks in everyone.values()):
        # By their ranks: torch takes equal submeshes for one, and so may return one of another root.
        roots = [_ranks_on(root_mesh(mesh)) for mesh in meshes.values()]
        largest = max(roots, key=len)
        if any(not ranks <= largest for ranks in roots):
            raise ParameterError(
                f"parameters lie on meshes that are not parts of one: {' and '.join(map(str, meshes.values()))}; "
                'expected submeshes of one, as init_device_mesh(...)["dp"] and ["tp"] are, whose ranks decide each '
                "update together"
            )
    if dist.get_rank() not in largest:
        raise ParameterError(
            f"parameters lie on {' and '.join(map(str, meshes.values()))}, which process {dist.get_rank()} is not on; "
            "expected an optimizer on the processes of the mesh alone"
        )
    return tuple(sorted(largest))


def _ranks_on(mesh: Any) -> frozenset[int]:
    return frozenset(mesh.mesh.flatten().tolist())


def this_process() -> tuple[int, ...]:
    """Return this process's rank in torch's default group, as a tuple; empty: ``torch.distributed`` is not
    initialised."""
    return (dist.get_rank(),) if dist.is_available() and dist.is_initialized() else ()


_GROUPS: dict[tuple[int, ...], Any] = {}
"""Maps the ranks of a mesh to the process group that was made for them. Torch's registry owns the groups until
``destroy_process_group()``."""


def group_of(ranks: Sequence[int]) -> Any:
    """Return the process group of these ranks; None for a single rank. All these ranks must call this."""
    if len(ranks) == 1:
        return None
    if tuple(ranks) == tuple(range(dist.get_world_size())):
        return dist.group.WORLD
    known = _GROUPS.get(tuple(ranks))
    if known is None or not _is_alive(known):
        known = dist.new_group([*ranks], backend="gloo", use_local_synchronization=True)
        _GROUPS[tuple(ranks)] = known
    return known


def _is_alive(group: Any) -> bool:
    try:
        return bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return False


def check_alone(params: Iterable[torch.Tensor], config: OffloadConfig, *, process_group: Any) -> None:
    """Raise :class:`ConfigError` if one of the parameters is a DTensor and an argument would partition it, or reduce
    its gradients, a second time."""
    if not any(map(is_dtensor, params)):
        return
    if not config.average_over_ranks:
        raise ConfigError(
            "average_over_ranks=False with DTensor parameters (fully_shard, parallelize_module), whose gradients come "
            "reduced; expected True, and model.set_gradient_divide_factor(1.0), with which FSDP2 sums them"
        )
    if process_group is not None:
        raise ConfigError(
            "process_group with DTensor parameters (fully_shard, parallelize_module); expected none: their meshes say "
            "which process has which elements"
        )
    if config.stage == 3:
        raise ConfigError(
            "stage=3 of a model whose parameters are DTensors (fully_shard, parallelize_module); expected no stage: "
            "fully_shard shards the parameters; or wrap the model without it, and stage=3 shards them"
        )


def check_within(name: str, param: torch.Tensor, members: Collection[int]) -> None:
    """Raise :class:`ParameterError` if a parameter is a DTensor on processes that do not decide the updates.

    Args:
        members: the ranks of torch's default group that decide the updates together.
    """
    if is_dtensor(param) and not (ranks := _ranks_on(param.device_mesh)) <= frozenset(members):  # type: ignore[attr-defined]
        raise ParameterError(
            f"parameter {name!r} is a DTensor on the processes {sorted(ranks)}, and the parameters that this optimizer "
            f"was made of are parts on {sorted(members) or 'none'}: its norm would lack the others' elements; expected "
            "it among those that require a gradient when the optimizer is made"
        )


def count_once(collectives: Collectives, held: Sequence[tuple[str, torch.Tensor, Placement]]) -> list[bool]:
    """Agree which process counts elements in the norm, and saves them, if several processes have the same elements.

    Args:
        held: the name, the tensor and the placement of each new parameter, in the same order on all processes. No
            parameter is pending. A parameter with the placement ``UNDIVIDED`` is a plain tensor, which is equal on all
            processes, or a DTensor whose mesh lacks this process, which is an error on all processes.

    Returns:
        True for each parameter whose elements this process counts.

    Raises (on all processes):
        ParameterError: processes have different parameters; or a parameter is a DTensor on one process and plain on
            another; or processes without a common mesh have different values of the same elements.
    """
    kinds, boxes, meshes = [], [], []
    for name, param, known in held:
        with no_read():
            kinds.append(f"{name} {tuple(param.shape)} {param.dtype} {known.words(param)}")
        box, mesh = known.fingerprints(collectives.rank)
        boxes.append(box)
        meshes.append(mesh)
    what = "the placement of parameters"
    mine = fingerprint("\n".join(kinds))
    known_to_all = combine(collectives, what, of_each=[mine, len(held)]).of_each
    if (known_to_all != known_to_all[0]).any():
        each = [fingerprint(kind) for kind in kinds]
        n = int(known_to_all[:, 1].min())
        rows = combine(collectives, what, of_each=each[:n]).of_each
        differs = np.flatnonzero((rows != rows[0]).any(axis=0))
        if differs.size:
            i = int(differs[0])
            got = "a DTensor" if is_dtensor(held[i][1]) else "a plain tensor"
            raise ParameterError(
                f"parameter {held[i][0]!r} is {got} here ({kinds[i]}), and differs on another process; expected every "
                "process to have the same parameters, placed alike"
            )
        numbers = sorted({*known_to_all[:, 1].tolist()})
        raise ParameterError(
            f"{len(held)} parameters here, and {' or '.join(map(str, numbers))} on each process; expected the same on "
            "all"
        )
    box_of, mesh_of = np.split(combine(collectives, what, of_each=[*boxes, *meshes]).of_each, 2, axis=1)
    _check_copies(collectives, held, box_of, mesh_of, what)
    counted = []
    for i in range(len(held)):
        holders = np.flatnonzero(box_of[:, i] == box_of[collectives.rank, i])
        counted.append(int(holders[i % len(holders)]) == collectives.rank)
    return counted


def _check_copies(
    collectives: Collectives,
    held: Sequence[tuple[str, torch.Tensor, Placement]],
    box_of: np.ndarray,
    mesh_of: np.ndarray,
    what: str,
) -> None:
    """Raise :class:`ParameterError` on all processes if two processes have different values of the same elements. Only
    parameters that no common mesh replicates are checked: plain parameters, and parameters of parallel submeshes.

    Args:
        box_of: int64[processes, parameters]: fingerprints of the elements that each process has.
        mesh_of: int64[processes, parameters]: fingerprints of each parameter's mesh.
    """
    elsewhere = np.flatnonzero((mesh_of != mesh_of[0]).any(axis=0)).tolist()
    values_of = combine(collectives, what, of_each=[_digest(held[i][1]) for i in elsewhere]).of_each
    for i, values in zip(elsewhere, values_of.T, strict=True):
        for box in np.unique(box_of[:, i]):
            copies = values[box_of[:, i] == box]
            if (copies != copies[0]).any():
                name, _, known = held[i]
                raise ParameterError(
                    f"parameter {name!r} is {known.among_others}, and processes have different values of it; expected "
                    "it to be the same on all of them, or a DTensor on one mesh that says which process has which "
                    "elements (DTensor.from_local)"
                )


def _digest(param: torch.Tensor) -> int:
    """Return a fingerprint of this process's values of a parameter."""
    values = local_of(param).detach().to("cpu").contiguous().view(-1)
    run = (
        values.view(torch.uint8).numpy() if values.numel() else b""
    )  # NumPy has no bfloat16, not even without elements
    digest = hashlib.blake2b(run, digest_size=_DIGEST_BYTES)  # type: ignore[arg-type]
    return int.from_bytes(digest.digest())
