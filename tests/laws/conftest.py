"""What the laws over all subjects need: a device, and JAX's own settings."""

import pytest

from tests.support.places import device

__all__ = ["device"]

try:
    import jax
except ImportError:  # its subjects are skipped
    pass
else:
    jax.config.update("jax_num_cpu_devices", 8)  # for meshes; of this process alone, and before any computation

    @pytest.fixture(scope="session", autouse=True)
    def everything_is_compiled_once(compiled_once: None) -> None:
        pass
