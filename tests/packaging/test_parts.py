"""Each slow test is in a part of ``make test-all``."""

import re

from tests.parts import FOLDERS, PARTS, ROOT, STORE_OF, share

TESTS = ROOT / "tests"


def test_each_file_with_slow_tests_is_in_one_part():
    places = [TESTS / path for paths in FOLDERS.values() for path in paths]
    again = [TESTS / path for _, paths in STORE_OF.values() for path in paths]
    assert all(place.exists() for place in (*places, *again))
    for file in TESTS.rglob("test_*.py"):
        if re.search(r"\bmark\.slow\b", file.read_text()):
            assert len([place for place in places if place in (file, *file.parents)]) == 1, file


def test_the_share_of_a_commit_is_a_part():
    assert share() in PARTS
