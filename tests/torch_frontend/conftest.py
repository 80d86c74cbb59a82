"""The devices on which the laws of the torch front end hold."""

from collections.abc import Iterator

import pytest


@pytest.fixture(params=["host", "simulated, delays 0"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A type of device, on which ``torch_models`` makes models and batches.

    ``late``: the host's tensors, whose copies take their time. Kernels and copies of the simulated device are late,
    differently for each seed (``simulated, delays SEED``); a test that uses nothing of it shows nothing, and fails.
    """
    if request.param == "host":
        yield "cpu"
        return
    pytest.importorskip("torch")
    from tests.support import simulated, slow_torch_device, torch_models

    if request.param == "late":
        from frontends.torch.ranks import device_ranks

        monkeypatch.setattr(device_ranks, "memory_of", lambda device: slow_torch_device.SlowTorchDevice())
        yield "cpu"
        return
    if (missing := simulated.why_not()) is not None:
        pytest.skip(missing)
    with (
        simulated.available(),
        simulated.delays(seed=int(request.param.split()[-1]), kernel=50, copy=500),
        torch_models.on(simulated.NAME),
    ):
        before = simulated.allocations()
        yield simulated.NAME
        assert simulated.allocations() > before, "it ran on the host: all that it made is there"
