"""The loss scale for compiled functions. They read a variable, because jit would keep the Python number of the first
call."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from offload_core.engine import LossScaler
from offload_core.errors import GradientError, StateError

from ..devices.context import is_manual, is_traced
from ..tree.trees import put

_ROUNDING = 1e-5
"""The relative error that sums and means in fp32 may have."""


class DeviceScale:
    """A loss scale, and a variable of its value on the devices of the parameters.

    A function that a user compiles reads the variable each time it runs.
    """

    def __init__(self, scaler: LossScaler, parameter: jax.Array) -> None:
        self._scaler = scaler
        self._like = parameter.sharding if parameter.committed else None
        self._written = scaler.scale
        self._variable = jax.new_ref(self._on_devices(scaler.scale))

    def read(self) -> Any:
        """The present scale: a number, and under jit a traced scalar.

        Raises:
            StateError: inside ``shard_map``, where programs read no variables.
        """
        if is_manual():
            raise StateError(
                "value_and_grad of float16 parameters inside shard_map: a program of one device's part cannot read the "
                "loss scale; expected value_and_grad around it, jax.jit of value_and_grad with sharded arguments, or "
                "wrap(params, mesh=mesh), whose value_and_grad is a shard_map itself"
            )
        return self._variable[...] if is_traced() else self._scaler.scale

    def follow(self) -> None:
        """Write the scale to the variable if it has changed. With several processes it has in all of them."""
        scale = self._scaler.scale
        if scale != self._written and not is_traced():
            self._variable[...] = self._on_devices(scale)
            self._written = scale

    def _on_devices(self, scale: float) -> jax.Array:
        value, like = np.float32(scale), self._like
        if like is None:
            return jax.device_put(value)
        devices: list[jax.Device] = sorted(like.device_set, key=lambda device: device.id)
        mesh = like.mesh if isinstance(like, NamedSharding) else Mesh(np.array(devices), ("all",))
        return put(value, NamedSharding(mesh, PartitionSpec()))


def check_scale(given: Any, unit: Any, scaler: LossScaler | None) -> None:
    """Raise :class:`GradientError` unless gradients were computed with the present loss scale, ``given / unit``."""
    expected = scaler.scale if scaler else 1.0
    if isinstance(given, jax.core.Tracer):
        return  # so are the gradients, and they are refused
    if isinstance(given, jax.Array):
        given = float(np.float64(_number(given)) / np.float64(_number(unit)))
    if not abs(given - expected) <= _ROUNDING * expected:  # it changes by factors of two
        raise GradientError(
            f"gradients scaled by {given:g}, expected {expected:g}: they are from "
            "before the last update, or of other parameters; compute them anew"
        )


def _number(array: Any) -> Any:
    if not isinstance(array, jax.Array):
        return array
    if array.is_deleted():
        raise GradientError("the gradients' loss scale was donated or deleted; expected one that is alive")
    return jax.device_get(array.addressable_data(0))
