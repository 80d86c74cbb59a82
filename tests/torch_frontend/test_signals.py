"""Real signals, and another thread, that save or interrupt in the middle of training: whole steps, errors, no hang.

``signals_worker.py`` compares every save, and the run itself, with a run without signals.
"""

import json

import pytest

from tests.support.processes import ROOT, torch_server

CASES = ("host", "overlap", "serial", "delayed", "in backward")
SCENARIOS = ("saves", "raised", "interrupts", "threads")


def run(scenario, case, n_signals, seed, folder, seconds=60.0):
    command = [str(ROOT / "tests" / "workers" / "signals_worker.py"), scenario, case, str(n_signals), str(seed)]
    [done] = torch_server().run([*command, str(folder)], seconds=seconds)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    print(scenario, case, counts)
    assert counts["signals"] >= n_signals
    return counts


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("case", ["host", "overlap"])
def test_a_save_in_the_middle_of_a_step_is_whole_or_an_error(scenario, case, tmp_path):
    counts = run(scenario, case, 50, 0, tmp_path)
    if scenario in ("saves", "raised"):
        assert counts["refused"]
    if scenario != "interrupts":
        assert sum(counts["compared"].values()) > 5


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("case", CASES)
def test_two_thousand_signals(scenario, case, tmp_path):
    counts = run(scenario, case, 2000, 1, tmp_path, seconds=800)
    assert sum(counts["compared"].values()) > 100


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_minutes_of_interrupts(tmp_path):
    for seed, case in enumerate(("overlap", "in backward", "delayed")):
        run("interrupts", case, 9000, seed, tmp_path, seconds=1000)
