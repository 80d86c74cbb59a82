"""Matrices of which several devices hold parts: their owners gather them, compute, and send the parts back.

Bits travel as integers, so that no collective changes a number that it only moves.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from offload_core.device.protocols import Matrices
from offload_core.dtypes import BFLOAT16

from ...tree.memory_kinds import start_to_host
from ...tree.shards import on_devices
from ..device_kernels import compute
from ..launch import meetings
from ..runs import cut_run, split_places, write_run


class MatrixExchange:
    """Exchanges matrices over the devices of a mesh, of this process and of others.

    Owners of matrices are numbers of these devices, in the mesh's order.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = Mesh(mesh.devices, mesh.axis_names)  # its axes are Auto, also if the given ones are Explicit
        self.devices: list[jax.Device] = list(mesh.devices.flat)
        mine = [device.process_index == jax.process_index() for device in self.devices]
        self.meeting = meetings(mine.index(True), alone=all(mine))

    def start(
        self,
        matrices: Matrices,
        shape: Sequence[int],
        spec: PartitionSpec,
        parts: Mapping[jax.Device, np.ndarray],
        what: str,
    ) -> dict[jax.Device, jax.Array]:
        """Start to compute with the matrices of an array in bfloat16. Return the part of the result that each device of
        this process holds, as 16-bit integers on their way to the host.

        All processes call this in the same order.

        Args:
            matrices: their offsets are places in the flattened array.
            shape: of the array.
            spec: the array's cut.
            parts: the part of the array that each device of this process holds.
            what: names the exchange in errors.
        """
        mine = jax.process_index()
        with jax.transfer_guard("allow"), self.meeting(what):
            bits = [jax.device_put(part.view(np.uint16), device) for device, part in parts.items()]
            sharding = NamedSharding(self.mesh, spec)
            given = jax.make_array_from_single_device_arrays(tuple(shape), sharding, bits)
            whole = on_devices(_whole(self.mesh)(given))
            made = [
                self._compute(matrices.of_ranks({owner}), whole[device])[None]
                for owner, device in enumerate(self.devices)
                if device.process_index == mine
            ]
            rows = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
            stacked = jax.make_array_from_single_device_arrays((len(self.devices), made[0].size), rows, made)
            result = on_devices(_merged(sharding, tuple(shape))(stacked))
            return {device: start_to_host(part) for device, part in result.items()}

    def _compute(self, matrices: Matrices, whole: jax.Array) -> jax.Array:
        """Return the results of an owner at their places in the flattened array, and zeros elsewhere."""
        made = jnp.zeros(whole.shape, whole.dtype, device=next(iter(whole.devices())))
        for row in matrices.rows:
            [place] = split_places([row.offset])
            made = _put(made, place, compute(_cut(whole, place, matrices.shape), matrices.kernel))
        return made


@functools.cache
def _whole(mesh: Mesh) -> "jax.stages.Wrapped":
    """Return the program that gathers an array on every device, flattened."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def gather(array: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(array, everywhere).reshape(-1)

    return jax.jit(gather, out_shardings=everywhere)


@functools.cache
def _merged(sharding: NamedSharding, shape: tuple[int, ...]) -> "jax.stages.Wrapped":
    """Return the program that makes an array of all owners' results: one row for each owner, of which at most one is
    not zero in an element."""

    def merge(rows: jax.Array) -> jax.Array:
        return jnp.sum(rows.astype(jnp.uint32), axis=0).astype(rows.dtype).reshape(shape)

    return jax.jit(merge, out_shardings=sharding)


@functools.partial(jax.jit, static_argnums=2)
def _cut(bits: jax.Array, place: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return lax.bitcast_convert_type(cut_run(bits, place, shape[0] * shape[1]), BFLOAT16.numpy).reshape(shape)


@functools.partial(jax.jit, donate_argnums=0)
def _put(bits: jax.Array, place: jax.Array, result: jax.Array) -> jax.Array:
    return write_run(bits, place, lax.bitcast_convert_type(result.reshape(-1), bits.dtype))
