"""The error of a run under torchrun: which rank says it, and where."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.support.processes import ROOT, environment_of

RANK = """
import os, signal, sys, time
from offload_core.errors import CollectiveError, StateError
from offload_core.support.last_words import say_error_last, say_lost
say_error_last()
say_error_last()
exec(sys.argv[1])
"""


def run(folder, codes, *, launched=True):
    """What processes print that run this code as the ranks of torchrun, all to one file."""
    with (folder / "printed").open("wb+") as printed:
        ranks = []
        for rank, code in enumerate(codes):
            mine = folder / "attempt_0" / str(rank)
            mine.mkdir(parents=True, exist_ok=True)
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(len(codes))}
            place |= {"TORCHELASTIC_ERROR_FILE": str(mine / "error.json")} if launched else {}
            command = [sys.executable, "-c", RANK, code]
            ranks.append(subprocess.Popen(command, env=environment_of(ROOT) | place, stderr=printed))
        ended = [rank.wait(60) for rank in ranks]
        printed.seek(0)
        return ended, printed.read().decode()


def test_the_first_rank_repeats_its_error_after_the_tracebacks_of_all(tmp_path):
    ended, printed = run(tmp_path, [f"raise StateError('of rank {rank}')" for rank in range(3)])
    assert ended == [1, 1, 1]
    assert printed.count("Traceback") == 3
    [line] = re.findall("^offload-core: rank .*", printed, re.MULTILINE)
    rank = line.split()[2].rstrip(":")
    assert line == f"offload-core: rank {rank}: StateError: of rank {rank}"
    assert printed.endswith(f"\n{line}\n")
    [file] = tmp_path.glob("attempt_0/*/error.json")  # torchrun ends its summary with it
    assert file.parent.name == rank
    assert json.loads(file.read_text())["message"] == f"StateError: of rank {rank}"


def test_a_rank_that_goes_on_keeps_no_other_from_saying_its_error(tmp_path):
    _, printed = run(tmp_path, ["raise StateError('x')", "time.sleep(3)"])
    assert printed.rstrip().endswith("offload-core: rank 0: StateError: x")


def test_a_rank_that_lost_another_says_so_at_once_and_is_not_taken_for_the_cause(tmp_path):
    lost = "say_lost('rank 1 was lost'); raise CollectiveError('rank 0: rank 1 was lost')"
    ended, printed = run(tmp_path, [lost, "os.kill(os.getpid(), signal.SIGKILL)"])
    assert ended[1] == -9
    assert re.findall("^offload-core: .*", printed, re.MULTILINE) == ["offload-core: rank 0: rank 1 was lost"]
    assert not [*tmp_path.glob("attempt_0/*/error.json")]


@pytest.mark.draws(1)
@pytest.mark.parametrize("code", ["raise KeyboardInterrupt", "raise SystemExit(1)", "os.fork() or raise_()"])
def test_an_end_that_is_no_error_of_a_rank_is_not_repeated(tmp_path, code):
    _, printed = run(tmp_path, [f"raise_ = lambda: 1 / 0\n{code}", ""])
    assert "offload-core:" not in printed


def test_without_torchrun_nothing_is_repeated(tmp_path):
    _, printed = run(tmp_path, ["raise StateError('x')"] * 2, launched=False)
    assert "offload-core:" not in printed
    assert os.listdir(tmp_path / "attempt_0" / "0") == []


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_torchruns_ranks_say_once_why_they_end(tmp_path, killed):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, torch\n"
        "from frontends.torch import init_process_group, wrap\n"
        "init_process_group('cpu')\n"
        "rank = int(os.environ['RANK'])\n"
        f"engine = wrap(torch.nn.Linear(16, 16), gradient_clipping=1.0 + rank * {not killed})\n"
        "if rank:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "engine.backward(engine(torch.ones(2, 16)).sum())\n"
        "engine.step()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, env=environment_of(ROOT), capture_output=True, text=True, timeout=240)
    said = re.findall(r"^offload-core: rank .*", done.stderr, re.MULTILINE)
    if killed:
        assert [line.partition(" failed")[0] for line in said] == [
            "offload-core: rank 0: rank 1 was lost, or has ended: bucket 0: exchange of gradients"
        ]
    else:
        assert re.fullmatch("offload-core: rank .: ParameterError: gradient_clipping is .*", "".join(said))
        assert done.stderr.rindex("[rank") < done.stderr.index(said[0])
