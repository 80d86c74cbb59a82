"""Saves and loads of states and parameters on disk take the host memory of a few buckets, whatever the model's size."""

import threading
import weakref

import pytest
import torch
from torch import nn

from frontends.torch import gathered_parameters, wrap
from offload_core.checkpoint import loading, shard_writer
from offload_core.checkpoint.reader import Checkpoint
from offload_core.checkpoint.shard_writer import BUFFERS
from offload_core.disk import space
from offload_core.memory import host_memory
from offload_core.states import ring
from tests.support.late_stores import PARAMETERS_ON_DISK
from tests.support.torch_models import same_bits

SIDE = 256
BUCKET = SIDE * SIDE
"""Elements."""
BLOCK_BYTES = 2**14
"""Of a checkpoint's file, in which the states of a bucket are 48 blocks."""
GROUP_BYTES = 2**16
"""Of what a load reads at a time, but for the last tensor."""
PAGE = 4096


class Account:
    """The bytes that are mapped for arrays, less those at the beginning, and the most of them."""

    def __init__(self, patch):
        self.live = self.most = 0
        self._turn = threading.RLock()  # an array may die in the middle of it
        mapped = host_memory.mapped

        def counted(n_bytes, threads):
            array = mapped(n_bytes, threads)
            self._add(n_bytes)
            weakref.finalize(array, self._add, -n_bytes)
            return array

        for module in (host_memory, space):
            patch.setattr(module, "mapped", counted)

    def _add(self, n_bytes):
        with self._turn:
            self.live += n_bytes
            self.most = max(self.most, self.live)


def model(layers, seed=0):
    """Its first layer is frozen, and of four buckets; each other is one."""
    torch.manual_seed(seed)
    wide = nn.Linear(SIDE, 4 * SIDE, bias=False).requires_grad_(False)
    narrow = nn.Linear(4 * SIDE, SIDE // 4, bias=False)
    rest = [nn.Linear(SIDE, SIDE, bias=False) for _ in range(layers)]
    return nn.Sequential(wide, narrow, nn.Linear(SIDE // 4, SIDE, bias=False), *rest)


def wrapped(layers, seed=0):
    return wrap(model(layers, seed), lr=1e-2, reduce_bucket_size=BUCKET, **PARAMETERS_ON_DISK)


def step(engine, seed):
    x = torch.randn(2, SIDE, generator=torch.Generator().manual_seed(seed))
    engine.backward(engine(x).pow(2).mean())
    engine.step()


def values(engine):
    with gathered_parameters(engine.module.parameters()):
        return [p.detach().clone() for p in engine.module.parameters()]


@pytest.mark.draws(1)
@pytest.mark.parametrize("layers", [2, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("wait", [True, False])
def test_a_save_takes_its_buffers_and_what_it_reads_at_a_time(layers, wait, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_writer, "BLOCK_BYTES", BLOCK_BYTES)
    engine, twin = wrapped(layers), wrapped(layers)
    for each in (engine, twin):
        step(each, 0)
    account = Account(monkeypatch)
    engine.save_checkpoint(tmp_path, wait=wait)
    if not wait:
        step(engine, 1)
        engine.wait_for_checkpoint()
    # The caller's thread and the one that writes read a block at a time each, from whole pages.
    assert account.most <= BUFFERS * BLOCK_BYTES + 2 * (BLOCK_BYTES + 2 * PAGE) < 4 * BUCKET
    assert account.live == 0
    loaded = wrapped(layers, seed=1)
    loaded.load_checkpoint(tmp_path)
    for each in (loaded, twin):
        step(each, 2)
    assert all(map(same_bits, values(loaded), values(twin)))


@pytest.mark.parametrize("layers", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_a_load_takes_a_bucket_at_a_time(layers, tmp_path, monkeypatch):
    engine, loaded = wrapped(layers), wrapped(layers, seed=1)
    step(engine, 0)
    engine.save_checkpoint(tmp_path)
    monkeypatch.setattr(loading, "_TARGET_BYTES", GROUP_BYTES)
    account, groups, read = Account(monkeypatch), [], Checkpoint.read

    def counted(checkpoint, wants):
        wants = list(wants)
        groups.append(sum(want.out.nbytes for want in wants))
        read(checkpoint, wants)

    monkeypatch.setattr(Checkpoint, "read", counted)
    loaded.load_checkpoint(tmp_path)
    assert max(groups) <= GROUP_BYTES + 4 * BUCKET
    assert sum(groups) >= (layers * 3 + 4) * 4 * BUCKET
    assert account.most <= 4 * BUCKET  # on its way to a space of its own
    assert all(map(same_bits, values(loaded), values(engine)))
    for each in (engine, loaded):
        step(each, 1)
    assert all(map(same_bits, values(loaded), values(engine)))


def test_readers_of_a_state_on_disk_take_a_part_of_it_at_a_time(monkeypatch):
    monkeypatch.setattr(ring, "_READ_AT_A_TIME", 4096)
    engine, account = wrapped(8), Account(monkeypatch)
    param = engine.module[2].weight
    step(engine, 0)
    before, account.most = account.live, account.live
    state = engine.optimizer.state[param]["exp_avg"]
    assert state.numel() == SIDE * SIDE // 4
    assert account.most - before <= 2 * (4 * 4096 + PAGE)  # the next part is read while the last one is there
