"""Ray Train, as docs/integrations/ray.md has it: real workers, of which one is killed."""

import re
import subprocess
import sys
import textwrap

import pytest
import ray  # noqa: F401  # skipped without it
import torch

from frontends.torch import wrap
from tests.support.processes import ROOT, environment_of
from tests.support.torch_models import same_bits

PAGE = ROOT / "docs" / "integrations" / "ray.md"
DRIVER = """
import ray
from ray_train import fit

ray.init(num_cpus=2, logging_level="ERROR")
fit(2, "straight")
try:
    fit(2, "run", kill=3)
except ray.train.WorkerGroupError as error:
    print("killed:", "Rank 1" in str(error))
fit(1, "run")
"""
STARTED = re.compile(r"(\d) worker\(s\), from step (\d)|killed: (\w+)")


def states_in(folder):
    """The whole states in the last checkpoint, which one process loads."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    engine = wrap(model, gradient_clipping=1.0)
    assert engine.load_checkpoint(folder)["step"] == 6
    return [engine.optimizer.whole_states(p) for p in model.parameters()]


@pytest.mark.slow
def test_a_run_whose_worker_was_killed_goes_on_with_one_worker_to_the_same_bits(tmp_path):
    [script] = PAGE.read_text().split("```python\n# ray_train.py\n")[1:]
    (tmp_path / "ray_train.py").write_text(script.split("```")[0])
    (tmp_path / "driver.py").write_text(textwrap.dedent(DRIVER))
    environment = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"}
    done = subprocess.run(
        [sys.executable, "driver.py"],
        cwd=tmp_path,
        env={**environment_of(ROOT), **environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    starts = list(dict.fromkeys(STARTED.findall(done.stdout)))  # Ray repeats a worker's lines
    assert sorted(starts) == [("", "", "True"), ("1", "3", ""), ("2", "0", "")], done.stdout + done.stderr
    straight, resumed = (states_in(tmp_path / name) for name in ("straight", "run"))
    assert straight
    for one, other in zip(straight, resumed, strict=True):
        assert all(same_bits(one[name], other[name]) for name in ("master", "exp_avg", "exp_avg_sq"))
