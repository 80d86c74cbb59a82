"""Each slow test is in a part of ``make test-all``."""

import re

import pytest

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


def test_one_worker_has_all_files_of_jax_and_every_other_file_is_a_unit():
    pytest.importorskip("xdist")
    from tests.support.side_by_side import FOLDERS, unit_of

    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    of_jax = [file for file in files if file.startswith("tests/jax_frontend/")]
    assert len(of_jax) > 10
    assert {unit_of(f"{file}::test_a[b::c]") for file in of_jax} == {*FOLDERS}
    assert [unit_of(f"{file}::test_a") for file in files if file not in of_jax] == [f for f in files if f not in of_jax]
