"""Checkpoints that an earlier commit wrote (tests/fixtures/checkpoints/make.py) load, and go on with its bits."""

import json
import os
import subprocess
import sys
import tarfile
from functools import partial

import jax
import pytest

from tests.support import written_before
from tests.support.archives import unpack
from tests.support.processes import ROOT, on_ranks

FIXTURES = ROOT / "tests" / "fixtures" / "checkpoints"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    for framework in EXPECTED:
        with tarfile.open(FIXTURES / f"{framework}.tar.xz") as archive:
            unpack(archive, folder / framework)
    return folder


def test_the_fixtures_show_something():
    """Each run has updated what it trains, and no two runs have the same bits."""
    assert EXPECTED.keys() == {"torch", "jax"}
    for framework, cases in (("torch", written_before.TORCH), ("jax", written_before.JAX)):
        assert EXPECTED[framework].keys() == cases.keys()
        found = [json.dumps(bits) for steps in EXPECTED[framework].values() for _, bits in steps]
        assert len({*found}) == len(found) == len(cases) * written_before.STEPS
        assert all(report[0] for steps in EXPECTED[framework].values() for report, _ in steps)
    for framework in EXPECTED:
        first, _ = EXPECTED[framework]["fp16"][0]
        assert first[4] == 32  # an overflow had halved it


@pytest.mark.draws(1)
@pytest.mark.parametrize("name", written_before.TORCH)
def test_one_rank_of_torch_goes_on_from_two(name, written, tmp_path):
    resumed = written_before.resumed(written_before.TorchRun(name, "other"), written / "torch" / name, tmp_path)
    assert resumed == EXPECTED["torch"][name]


@pytest.mark.long("several trainings on two ranks or more")
def test_two_ranks_of_torch_go_on(written, tmp_path, drawn):
    names = drawn(written_before.TORCH, 1)
    resumed = partial(written_before.on_rank_of_torch, written_before.resumed, "other", written, tmp_path, names=names)
    assert on_ranks(2)(resumed) == [{name: EXPECTED["torch"][name] for name in names}] * 2


@pytest.mark.draws(1)
@pytest.mark.parametrize("name", written_before.JAX)
def test_one_device_of_jax_goes_on(name, written, tmp_path):
    with jax.default_device(jax.devices("cpu")[0]):
        run = written_before.JaxRun(name, "other")
        assert written_before.resumed(run, written / "jax" / name, tmp_path) == EXPECTED["jax"][name]


@pytest.mark.long("XLA compiles on two devices")
def test_two_devices_of_jax_go_on(written, tmp_path):
    (tmp_path / "jax").symlink_to(written / "jax")
    worker = [sys.executable, str(ROOT / "tests/workers/written_before_jax_worker.py"), "resumed", str(tmp_path)]
    subprocess.run(worker, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert json.loads((tmp_path / "jax.json").read_text())["stage 3"] == EXPECTED["jax"]["stage 3"]
