"""``release()`` and ``restore()`` on two ranks with simulated devices."""

import re
from functools import partial

import pytest
import torch

from frontends.torch import wrap
from offload_core import CollectiveError, DeviceMemoryError, OffloadError, StateError
from tests.support import simulated
from tests.support.device_memory import allocated, allocated_before
from tests.support.phases import STREAMED
from tests.support.processes import on_ranks
from tests.support.simulated import collectives
from tests.support.torch_rank import batch, make, whole_bits

pytestmark = pytest.mark.skipif((missing := simulated.why_not()) is not None, reason=missing or "")

SETTINGS = {
    "stage 1": {"stage": 1},
    "stage 2, bfloat16": {"param_dtype": "bfloat16", "gradient_clipping": 0.05},
    "serial": {"schedule": "serial"},
    "early": {"update_in_backward": True, "param_dtype": "bfloat16"},
    "stage 3": {"stage": 3, "param_persistence_threshold": 0},
    "stage 3, small ones whole": {"stage": 3, "param_persistence_threshold": 100, "param_dtype": "bfloat16"},
    "streamed": {**STREAMED, "param_dtype": "bfloat16"},
    "muon": {"optimizer": "muon"},
}


@pytest.fixture(autouse=True)
def prepared():
    """The devices are built before ranks need them."""
    simulated.prepare()


on_devices = on_ranks(2, backend=collectives.BACKEND)


def device_of(rank):
    device = torch.device(simulated.NAME, rank)
    torch.accelerator.set_device_index(device)
    return device


def model_on(device):
    model = make()
    model[2].requires_grad_(False)  # in shards on the device, in stage 3
    model.register_buffer("count", torch.arange(5.0))
    return model.to(device)


def step(engine, seed, rank, device):
    engine.backward(engine(batch(seed, rank).to(device)).float().pow(2).mean())
    engine.step()


def rounds(names, tmp, rank, n=3):
    """For each setting the bits with releases and without, and the bytes that a released engine holds."""
    device, result = device_of(rank), {}
    for name in names:
        fields = SETTINGS[name]
        found, held, files = [], set(), []
        for releases in (False, True):
            before = allocated_before()
            engine = wrap(model_on(device), lr=1e-2, reduce_bucket_size=1000, **fields)
            with simulated.delays(seed=rank, kernel=200 * rank, copy=2000 * (1 - rank)):
                for seed in range(n):
                    step(engine, seed, rank, device)
                    if releases:
                        engine.release()
                        held.add(allocated() - before)
                    folder = tmp / f"{name}, {releases}, {seed}"
                    engine.save_checkpoint(folder / "saved")
                    engine.export_safetensors(folder / "exported")
                    files.append((folder / "exported" / "model.safetensors").read_bytes())
                    engine.restore()
            found.append(whole_bits(engine))
            engine.close()
            resumed = wrap(model_on(device), lr=1e-2, reduce_bucket_size=1000, **fields)
            resumed.load_checkpoint(folder / "saved")
            found.append(whole_bits(resumed))
            resumed.close()
            del engine, resumed
        result[name] = found, held, files[:n] == files[n:]
    return result


@pytest.mark.long("several trainings on two ranks or more")
def test_two_ranks_hold_nothing_and_have_the_bits_of_no_release(tmp_path, drawn):
    names = drawn(SETTINGS, 1)
    first, second = on_devices(partial(rounds, names, tmp_path))
    for name in names:
        for found, held, same_files in (first[name], second[name]):
            assert held == {0}, name
            assert len({*found}) == 1, name
            assert same_files, name
        assert first[name][0] == second[name][0], name


def alone(rank, fields):
    """Rank 0 releases, and the other one goes on; each has its error."""
    device = torch.device("cpu")  # devices of which one does not come wait for the group's timeout
    engine = wrap(model_on(device), lr=1e-2, reduce_bucket_size=1000, **fields)
    step(engine, 0, rank, device)
    with pytest.raises(CollectiveError) as error:
        engine.release() if rank == 0 else step(engine, 1, rank, device)
    return str(error.value)


@pytest.mark.draws(1)
@pytest.mark.parametrize("name", ["stage 1", "stage 2, bfloat16"])
def test_a_release_on_one_rank_alone_is_an_error_on_both(name):
    for error in on_ranks(2)(lambda rank: alone(rank, SETTINGS[name])):
        assert re.search(r"release\(\)", error), error


def differing(rank):
    """Released on both; then one has no room, and later one has gradients."""
    device, result = device_of(rank), []
    engine = wrap(model_on(device), lr=1e-2, reduce_bucket_size=1000)
    step(engine, 0, rank, device)
    before = whole_bits(engine)
    engine.release()
    torch.accelerator.empty_cache()
    if rank == 1:
        with simulated.capacity(torch.accelerator.memory_reserved(), 1), pytest.raises(DeviceMemoryError) as error:
            engine.restore()
    else:
        with pytest.raises(StateError) as error:
            engine.restore()
    result += [str(error.value), engine.is_released]
    engine.restore()
    result.append(whole_bits(engine) == before)
    loss = engine(batch(1, rank).to(device)).pow(2).mean()
    engine.backward(loss)
    with pytest.raises(StateError) as error:
        engine.release(keep=["0"] if rank else ["nothing"])
    result.append(engine.is_released)
    engine.step()
    with pytest.raises(OffloadError) as error:
        engine.release(keep=["0"] if rank else ["nothing"])
    result += [str(error.value), engine.is_released]
    engine.release()
    engine.restore()
    result.append(whole_bits(engine))
    engine.close()
    return result


def test_what_one_rank_refuses_happens_on_none():
    first, second = on_devices(differing)
    assert "restore() failed on rank 1, whose own error says why; nothing has changed" in first[0]
    assert "no room" in second[0]
    assert "nothing is named 'nothing'" in first[4]
    assert "release() failed on rank 0, whose own error says why; nothing has changed" in second[4]
    for found in (first, second):
        assert [found[i] for i in (1, 2, 3, 5)] == [True, True, False, False]
    assert first[-1] == second[-1]


def failing(rank):
    """A copy to the host fails on rank 1 alone, after all have agreed to release."""
    device, result = device_of(rank), []
    engine = wrap(model_on(device), lr=1e-2, reduce_bucket_size=1000)
    step(engine, 0, rank, device)
    before = whole_bits(engine)
    copies = engine.optimizer.core.device

    def fail(*args):
        raise RuntimeError("a copy failed")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(copies, "to_host", fail)
        with pytest.raises((RuntimeError, StateError)) as error:
            engine.release()
    result += [str(error.value), engine.is_released, whole_bits(engine) == before]
    engine.release()
    engine.restore()
    step(engine, 1, rank, device)
    result.append(whole_bits(engine))
    engine.close()
    return result


def test_a_copy_that_fails_on_one_rank_has_the_model_released_on_none():
    first, second = on_devices(failing)
    assert "release() failed on rank 1, whose own error says why; nothing has changed" in first[0]
    assert "a copy failed" in second[0]
    assert first[1:3] == second[1:3] == [False, True]
    assert first[-1] == second[-1]
