"""Parameters as JAX's front end gives them to the core, on one device or sharded over a mesh; needs no JAX."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..config.options import OffloadConfig
from ..dtypes import ElementType
from ..errors import ConfigError
from ..layout.partition import ParamSpec
from ..memory.plan import ArrayBytes
from .model_shapes import Shapes, with_rules

Cuts = tuple[tuple[int, ...], ...]
"""For each dimension of a parameter, the axes of the mesh that cut it."""


def cuts_of(shape: Sequence[int], mesh: Sequence[int]) -> Cuts:
    """Each axis of the mesh, first to last, cuts the largest dimension that it divides and no other one cuts.

    Over an axis that divides none the parameter is replicated.
    """
    cuts: list[tuple[int, ...]] = [()] * len(shape)
    for axis, size in enumerate(mesh):
        free = [dim for dim, n in enumerate(shape) if n and n % size == 0 and not cuts[dim]]
        if size > 1 and free:
            cuts[max(free, key=lambda dim: (shape[dim], -dim))] = (axis,)
    return tuple(cuts)


@functools.lru_cache
def _holders(mesh: tuple[int, ...], cuts: Cuts) -> list[list[int]]:
    """The devices that hold each shard, in the order of the shards in the parameter."""
    holders: dict[tuple[int, ...], list[int]] = {}
    for device in range(math.prod(mesh)):
        at = [device // math.prod(mesh[axis + 1 :]) % size for axis, size in enumerate(mesh)]
        holders.setdefault(tuple(at[axis] for axes in cuts for axis in axes), []).append(device)
    return [devices for _, devices in sorted(holders.items())]


@dataclass(frozen=True)
class MeshPart:
    """The devices of one process: the first of so many processes on a mesh."""

    mesh: tuple[int, ...]
    processes: int

    @property
    def devices(self) -> int:
        return math.prod(self.mesh) // self.processes

    def shards_of(self, cuts: Cuts, number: int) -> Iterator[tuple[int, int]]:
        """Yield, for each shard on these devices, the number of them that hold it and the one whose gradient is read.

        Args:
            number: the parameter's, of the model's. Shards take turns at being read from the first device.
        """
        for turn, devices in enumerate(_holders(self.mesh, cuts), number):
            if here := [device for device in devices if device < self.devices]:
                yield len(here), here[turn % len(here)]

    def specs_of(
        self, shapes: Shapes, dtypes: ElementType | Mapping[str, ElementType], config: OffloadConfig, *, on_host: bool
    ) -> tuple[list[ParamSpec], list[ArrayBytes]]:
        """The core's parameters, of ``param_dtype`` if that is set, and what their arrays take on the devices.

        Args:
            on_host: True if the devices are CPUs.
        """
        specs: list[ParamSpec] = []
        arrays = []
        for number, (name, shape) in enumerate(shapes.items()):
            dtype = config.target_dtype or (dtypes if isinstance(dtypes, ElementType) else dtypes[name])
            cuts = cuts_of(shape, self.mesh)
            numel = math.prod(shape) // math.prod(self.mesh[axis] for axes in cuts for axis in axes)
            shards = list(self.shards_of(cuts, number))
            new = [ParamSpec(name, numel, dtype, place=0 if on_host else place) for _, place in shards]
            params = range(len(specs), len(specs) + len(new))
            specs += new
            copies = [n for n, _ in shards]
            arrays.append(ArrayBytes.of_shards(params, new, copies, on_host=on_host, leaves=not on_host))
        cut = {name: self.mesh for name, shape in shapes.items() if any(cuts_of(shape, self.mesh))}
        if cut and len(config.groups()) > 1:
            raise ConfigError(
                f"--optimizer {config.optimizer} with --mesh: {next(iter(cut))!r} would be sharded, and the plan does "
                "not know the memory in which devices exchange its parts; expected one device, or another optimizer"
            )
        return with_rules(specs, shapes, config, stacks=False), arrays
