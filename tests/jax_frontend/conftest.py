"""Settings of the tests of the JAX front end."""

import pytest

try:
    import jax
except ImportError:  # its tests are skipped
    pass
else:
    jax.config.update("jax_num_cpu_devices", 8)  # for meshes; of this process alone, and before any computation


@pytest.fixture(scope="session", autouse=True)
def everything_is_compiled_once(compiled_once: None) -> None:
    pass
