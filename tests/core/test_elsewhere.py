"""The core without what Linux alone has, and with what macOS has instead."""

import ctypes
import errno
import fcntl
import mmap
import os
import platform
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from frontends.torch import wrap
from offload_core.commands.machine import describe
from offload_core.memory.host_memory import HostMemory, available_bytes, control_group_limit, give_back_freed
from offload_core.support import disks
from offload_core.support.processors import available_cpus
from tests.support import pinned_bits
from tests.support.kernel_calls import INSTRUCTION_SETS


@pytest.fixture
def elsewhere(monkeypatch):
    """As on macOS: neither Linux's own calls nor /proc and /sys, and a call that Linux lacks; returns its uses."""
    for module, names in {
        os: ("sched_getaffinity", "posix_fallocate", "posix_fadvise"),
        mmap: ("MADV_HUGEPAGE",),
    }.items():
        for name in names:
            monkeypatch.delattr(module, name)
    read_text = Path.read_text

    def read(path, *args, **kwargs):
        if path.parts[:2] in (("/", "proc"), ("/", "sys")):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", read)
    asked = []
    monkeypatch.setattr(disks, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", "full", raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda descriptor, command: asked.append(command))
    return asked


def make():
    torch.manual_seed(0)
    return wrap(torch.nn.Linear(300, 5), lr=1e-2, gradient_clipping=1.0)


def step(engine):
    engine.backward(engine(torch.ones(3, 300)).square().sum())
    assert engine.step().updated


def test_training_and_checkpoints_need_nothing_that_linux_alone_has(elsewhere, tmp_path):
    engine, resumed = make(), make()
    step(engine)
    engine.save_checkpoint(tmp_path / "checkpoints")
    resumed.load_checkpoint(tmp_path / "checkpoints")
    assert elsewhere
    engine.export_safetensors(tmp_path / "weights")
    step(engine)
    step(resumed)
    for a, b in zip(engine.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_processors_and_memory_are_those_that_the_system_tells_of(elsewhere):
    assert available_cpus() == os.cpu_count()
    assert control_group_limit() is None
    assert 0.5 < available_bytes() / psutil.virtual_memory().available < 2
    array = HostMemory(2).allocate("states", 2**20, np.dtype(np.float32))
    assert not array.any()


def test_an_allocator_without_trim_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    give_back_freed()


def test_macos_names_its_processor(elsewhere, monkeypatch, tmp_path):
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    sysctl = tmp_path / "sysctl"
    sysctl.write_text('#!/bin/sh\n[ "$*" = "-n machdep.cpu.brand_string" ] && echo "A processor of 2020"\n')
    sysctl.chmod(0o755)
    assert describe()["cpu"] == "A processor of 2020"
    sysctl.write_text("#!/bin/sh\nexit 1\n")
    assert describe()["cpu"] == (platform.processor() or platform.machine())


def test_what_is_on_the_disk_is_past_the_disks_cache(elsewhere, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "fsync", lambda descriptor: elsewhere.append("fsync"))
    disks.names_to_disk(tmp_path)
    assert elsewhere == ["full"]

    def refuse(descriptor, command):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    disks.names_to_disk(tmp_path)
    assert elsewhere == ["full", "fsync"]


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_the_pinned_bits_are_those_of_this_machine(instruction_set):
    assert pinned_bits.digest(instruction_set) == pinned_bits.BITS
