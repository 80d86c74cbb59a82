"""Each slow test is in a part of ``make test-all``."""

import re

from tests import parts
from tests.parts import FOLDERS, PARTS, ROOT, SLICES, STORE_OF, WITH_DEEPSPEED, command_of, share

TESTS = ROOT / "tests"


def test_each_file_with_slow_tests_is_in_one_part():
    places = [TESTS / path for paths in FOLDERS.values() for path in paths]
    apart = [TESTS / path for path in WITH_DEEPSPEED]
    again = [TESTS / path for _, paths in STORE_OF.values() for path in paths]
    assert all(place.exists() for place in (*places, *apart, *again))
    for file in TESTS.rglob("test_*.py"):
        if re.search(r"\bmark\.slow\b", file.read_text()):
            own = apart if any(place in (file, *file.parents) for place in apart) else places
            assert len([place for place in own if place in (file, *file.parents)]) == 1, file


def test_tests_that_import_deepspeed_are_in_its_part_and_in_no_other():
    apart = {file for path in WITH_DEEPSPEED for file in [TESTS / path, *(TESTS / path).rglob("test_*.py")]}
    for file in (TESTS / "torch_frontend").rglob("test_*.py"):
        assert 'importorskip("deepspeed")' not in file.read_text() or file in apart, file
    for part in FOLDERS:
        assert {f"--ignore=tests/{path}" for path in WITH_DEEPSPEED} <= set(command_of(part, []))
    *make, arguments, files = command_of("deepspeed", ["-k", "a or b"])
    assert make[-1] == "with-deepspeed"
    assert arguments == "ARGS=-k 'a or b'"
    assert files == "FILES=" + " ".join(f"tests/{path}" for path in WITH_DEEPSPEED)


def test_a_series_of_commits_runs_each_slice_of_each_part(monkeypatch):
    chosen = []
    for number in range(1000, 1000 + len(SLICES)):
        monkeypatch.setattr(parts, "commit_number", lambda number=number: number)
        part, options = share()
        chosen.append((part, *options))
    assert len(set(chosen)) == len(SLICES)
    assert {part for part, *_ in chosen} == set(PARTS)
    assert {("torch", f"--slice={i}/{parts.LONG['torch']}") for i in range(parts.LONG["torch"])} <= set(chosen)
    assert "--slice=1/2" in command_of("kernels", ["--slice=1/2"])
