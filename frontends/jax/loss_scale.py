"""The loss scale as compiled functions read it: jit would keep a number of Python's as it was at the first call."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from offload_core.errors import GradientError
from offload_core.step.loss_scale import LossScaler

from .context import is_traced
from .tree.trees import put


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
        """The present scale: a number, and under jit a traced scalar."""
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


def check_scale(given: Any, scaler: LossScaler | None) -> None:
    """Raise :class:`GradientError` unless gradients were computed with the present loss scale."""
    expected = scaler.scale if scaler else 1.0
    if isinstance(given, jax.core.Tracer):
        return  # so are the gradients, and they are refused
    if isinstance(given, jax.Array):
        if given.is_deleted():
            raise GradientError("the gradients' loss scale was donated or deleted; expected one that is alive")
        given = float(jax.device_get(given.addressable_data(0)))
        expected = float(np.float32(expected))
    if given != expected:
        raise GradientError(
            f"gradients scaled by {given:g}, expected {expected:g}: they are from "
            "before the last update, or of other parameters; compute them anew"
        )
