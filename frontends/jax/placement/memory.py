"""Bytes of a wrapped tree: planned before anything is allocated, and held now."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from offload_core.engine import Engine
from offload_core.layout.partition import ParamSpec
from offload_core.memory.plan import PARAMETERS, SHARDS, MemoryPlan, PlanRow

from ..tree.memory_kinds import in_host_memory
from ..tree.wrapped_tree import Leaf, WrappedTree
from .placement import Placement

NOT_TRAINED = "arrays that are not trained"


def checked_plan(
    core: Engine,
    placement: Placement,
    leaves: Sequence[Any],
    trained: Sequence[Leaf],
    specs: Sequence[ParamSpec],
) -> list[PlanRow]:
    """Plan the memory that training takes besides the core's host memory, and check that all of it is there.

    Args:
        leaves: of the tree, before they are placed.
        specs: those of the trained leaves.

    Raises:
        HostMemoryError, DeviceMemoryError, DiskSpaceError: it does not fit into the memory that is available.
    """
    device = placement.device
    planned = core.rows_at_once(specs, placement.held(trained, specs), on_host=placement.on_host)
    positions = {leaf.position for leaf in trained}
    others = [leaf for i, leaf in enumerate(leaves) if i not in positions and isinstance(leaf, jax.Array)]
    n_bytes = len(device.ranks) * sum(array.nbytes for array in others)
    planned.append(PlanRow(NOT_TRAINED, "device", n_bytes, "fewer of them in the tree"))
    there = [] if placement.on_host else [leaves[i] for i in positions if isinstance(leaves[i], jax.Array)]
    held = sum(local_bytes(array) for array in (*there, *others) if not in_host_memory(array))

    def plan() -> MemoryPlan:
        made = core.plan_at_once(planned, specs, devices=len(device.ranks), shared=placement.on_host)
        return replace(made, held=held)

    core.check_memory(plan(), specs, plan)
    return planned


def held_bytes(tree: WrappedTree) -> Counter[tuple[str, str]]:
    """Return the bytes of the tree's arrays in this process, by ``(where, what)``."""
    layouts = {leaf.position: leaf.layout for leaf in tree.trained}
    held = Counter[tuple[str, str]]()
    for i, leaf in enumerate(tree.leaves):
        if isinstance(leaf, jax.Array):
            what = NOT_TRAINED if i not in layouts else PARAMETERS if layouts[i] is None else SHARDS
            held["host" if in_host_memory(leaf) else "device", what] += local_bytes(leaf)
    return held


def local_devices(tree: WrappedTree) -> list[jax.Device]:
    """Return this process's devices on which the tree's arrays lie."""
    leaves = [leaf for leaf in tree.leaves if isinstance(leaf, jax.Array)]
    return [*dict.fromkeys(device for leaf in leaves for device in leaf.sharding.addressable_devices)]


def local_bytes(array: jax.Array) -> int:
    """Return the bytes of an array on this process's devices; 0 if it was deleted."""
    return 0 if array.is_deleted() else sum(shard.data.nbytes for shard in array.addressable_shards)
