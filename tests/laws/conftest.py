"""What the laws over all subjects need: a device, and JAX's own settings."""

import os
import sys
from unittest.mock import patch

import pytest

from tests.support.places import device

__all__ = ["device"]


@pytest.fixture(autouse=True)
def no_group_is_left():
    """DeepSpeed's face and Lightning's strategy make a process group, and may say so in the environment."""
    with patch.dict(os.environ):
        yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


try:
    import jax
except ImportError:  # its subjects are skipped
    pass
else:
    jax.config.update("jax_num_cpu_devices", 8)  # for meshes; of this process alone, and before any computation

    @pytest.fixture(scope="session", autouse=True)
    def everything_is_compiled_once(compiled_once: None) -> None:
        pass

    @pytest.fixture(autouse=True)
    def on_the_cpu():
        with jax.default_device(jax.devices("cpu")[0]):
            yield
