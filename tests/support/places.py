"""Devices of torch on which tests make their models."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def placed(name: str) -> Iterator[str]:
    """``torch_models`` makes models and batches on a device; its type is yielded.

    ``late``: the host's tensors, whose copies take their time. Kernels and copies of the simulated device are late,
    differently for each seed (``simulated, delays SEED``); a test that uses nothing of it shows nothing, and fails.
    """
    if name == "host":
        yield "cpu"
        return
    pytest.importorskip("torch")
    from tests.support import simulated, slow_torch_device, torch_models

    if name == "late":
        from frontends.torch.ranks import device_ranks

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_ranks, "memory_of", lambda device: slow_torch_device.SlowTorchDevice())
            yield "cpu"
        return
    if (missing := simulated.why_not()) is not None:
        pytest.skip(missing)
    with (
        simulated.available(),
        simulated.delays(seed=int(name.split()[-1]), kernel=50, copy=500),
        torch_models.on(simulated.NAME),
    ):
        before = simulated.allocations()
        yield simulated.NAME
        assert simulated.allocations() > before, "it ran on the host: all that it made is there"


@pytest.fixture(params=["host", "simulated, delays 0"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """A type of device, on which ``torch_models`` makes models and batches."""
    with placed(request.param) as found:
        yield found
