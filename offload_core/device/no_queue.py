"""The answer of a device that cannot run the kernels of updates."""

from ..errors import ConfigError
from .protocols import DeviceQueue


class NoQueue:
    """The answer of a device that cannot run the kernels.

    Args:
        why: the reason, as a clause that follows "because".
    """

    def __init__(self, why: str) -> None:
        self.why = why

    def __call__(self) -> DeviceQueue:
        """Raise :attr:`refusal`."""
        raise self.refusal

    @property
    def refusal(self) -> ConfigError:
        """The error that says so, and what to set."""
        return ConfigError(
            f"states cannot be kept on this device, because {self.why}; expected offload_optimizer='cpu' or 'nvme', "
            "and no device_states_bytes"
        )
