"""The devices on which the laws of the torch front end hold."""

from collections.abc import Iterator

import pytest


@pytest.fixture(params=["host", "simulated, delays 0"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """A type of device, on which ``torch_models`` makes models and batches.

    Kernels and copies of the simulated one are late, differently for each seed (``simulated, delays SEED``).
    """
    if request.param == "host":
        yield "cpu"
        return
    pytest.importorskip("torch")
    from tests.support import simulated, torch_models

    if (missing := simulated.why_not()) is not None:
        pytest.skip(missing)
    with (
        simulated.available(),
        simulated.delays(seed=int(request.param.split()[-1]), kernel=50, copy=500),
        torch_models.on(simulated.NAME),
    ):
        yield simulated.NAME
