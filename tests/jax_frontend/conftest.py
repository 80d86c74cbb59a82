"""Settings of the tests of the JAX front end."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def everything_is_compiled_once(compiled_once: None) -> None:
    pass
