"""``make test`` draws cases of laws that have many: ten commits in a row see all, and a run can be repeated."""

import re
import subprocess
import sys
import zlib
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import sampling
from tests.conftest import mark_others_slow, slice_of
from tests.sampling import DRAWS, ROOT, chosen, commit_number, least
from tests.support.strategies import law


@given(st.integers(1, 400), st.data())
@law(100)
def test_ten_draws_see_all_cases_and_one_sees_as_many_as_it_should(n, data):
    count, begin = data.draw(st.integers(least(n), n)), data.draw(st.integers(0, 30))
    draws = [chosen(range(n), count, number) for number in range(begin, begin + DRAWS)]
    assert all(len(set(draw)) == count for draw in draws)
    assert set().union(*draws) == set(range(n))


def git(folder, *arguments):
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", *who, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_commits_in_a_row_have_numbers_in_a_row(tmp_path):
    assert commit_number(tmp_path) == 0  # without git
    whole, shallow = tmp_path / "whole", tmp_path / "shallow"
    whole.mkdir()
    git(whole, "init", "-q")
    seen = []
    for _ in range(3):
        git(whole, "commit", "-q", "--allow-empty", "-m", "one more")
        seen.append(commit_number(whole))
    assert seen == [1, 2, 3]
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{whole}", str(shallow))
    assert commit_number(shallow) == int(git(whole, "rev-parse", "HEAD"), 16)


LAWS = """
import pytest
from tests.support.strategies import law
from hypothesis import given, strategies as st

@pytest.mark.draws(2)
@pytest.mark.parametrize("case", range(20))
def test_sampled(case):
    print("case", case)

def test_inside(drawn):
    print("inside", drawn(range(20), 2))

@pytest.mark.soak
def test_of_soak(drawn):
    print("soak", len(drawn(range(20), 2)))

@given(st.integers())
@law(60)
def test_of_hypothesis(x):
    print("example")
"""


def run(folder, *options):
    """What laws print under these options of pytest, in a folder beside this suite's own settings."""
    (folder / "test_laws.py").write_text(LAWS)
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    draws(n)\n    slow\n    soak\n    integration\n    gpu\n    states_in_memory\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-n", "0", "-p", "no:cacheprovider", "-c", "pytest.ini"]
    environment = {**__import__("os").environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *options], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    said = done.stdout
    inside = re.search(r"inside \[(.*)\]", said)
    return (
        [int(case) for case in re.findall(r"case (\d+)", said)],
        [int(case) for case in inside[1].split(",")] if inside else None,
        said.count("example\n"),
        said + done.stderr,
    )


@pytest.mark.long("starts pytest")
def test_a_run_draws_and_test_all_and_soak_check_everything(tmp_path):
    cases, inside, examples, said = run(tmp_path, "-m", "not slow and not soak", "--draw", "3")
    of_law = chosen(range(20), 2, 3 + zlib.crc32(b"test_sampled"))
    assert (cases, inside, examples) == (of_law, chosen(range(20), 2, 3), 6), said
    assert "random draws: --seed 0; cases of this commit: --draw 3" in said
    cases, inside, examples, said = run(tmp_path, "-m", "slow", "--whole")
    assert (cases, inside, examples) == ([*range(20)], [*range(20)], 60), said
    assert "soak" not in said
    *_, said = run(tmp_path, "-m", "soak")
    assert "soak 20" in said


def test_ten_draws_see_all_cases_though_the_mark_has_fewer(monkeypatch):
    monkeypatch.setattr(sampling, "whole", False)
    law, seen = "test_of_many_cases", set()
    marks = {"draws": pytest.mark.draws(2).mark}
    for draw in range(DRAWS):
        monkeypatch.setattr(sampling, "draw", draw)
        slow = {number: [] for number in range(21)}
        fields = {
            "path": ROOT,
            "name": law,
            "originalname": law,
            "iter_markers": list,
            "get_closest_marker": marks.get,
        }
        mark_others_slow([SimpleNamespace(**fields, add_marker=slow[number].append) for number in slow])
        kept = {number for number, marks in slow.items() if not marks}
        assert len(kept) == 3
        seen |= kept
    assert seen == {*range(21)}


def test_a_slice_is_a_stretch_of_the_chosen_cases(tmp_path):
    cases, inside, *_ = run(tmp_path, "-m", "slow", "--whole", "-k", "not hypothesis", "--slice=1/3")
    assert (cases, inside) == ([*range(7, 14)], None)


def test_a_number_that_is_none_is_one_line(tmp_path):
    *_, said = run(tmp_path, "--seed", "x")
    assert said.strip() == "ERROR: --seed x: expected a number, 0 or more"


@pytest.mark.parametrize("text", ["3/3", "a", "1", "-1/2", "1/2/3"])
def test_a_slice_that_is_none_is_named(text):
    config = SimpleNamespace(option=SimpleNamespace(slice=text))
    with pytest.raises(pytest.UsageError, match=rf"^--slice {text}: expected I/N with I below N, such as 0/3$"):
        slice_of(config)
