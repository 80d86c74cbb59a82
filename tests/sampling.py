"""Which cases ``make test`` checks of the laws that have many: each commit draws others, and ten in a row see all.

The mark ``draws`` of a law with cases by ``parametrize`` says how many of them a run draws. A law that goes through
cases itself asks the fixture ``drawn`` for them, and one of Hypothesis is decorated by
:func:`tests.support.strategies.law`, which takes a part of its examples. ``pytest --whole`` (``make test-all``) checks
all cases of all of them; they are marked slow then.
"""

import subprocess
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[1]
DRAWS = 10
"""The commits in a row that see all cases."""
THINNED = 10
"""``make test`` tries one in so many examples of a law of Hypothesis."""

whole = False
"""True under ``--whole``, before the modules of tests are imported."""
draw = 0
"""The number of this run's draw."""

Case = TypeVar("Case")


def commit_number(root: Path = ROOT) -> int:
    """Return how many commits lead to the one that is checked out: one more with each.

    Where git does not know them all it is the commit's hash, and 0 without git.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if git("rev-parse", "--is-shallow-repository") == "true":
            return int(git("rev-parse", "HEAD"), 16)
        return int(git("rev-list", "--count", "HEAD"))
    except (OSError, subprocess.CalledProcessError):
        return 0


def chosen(cases: Sequence[Case], count: int, number: int) -> list[Case]:
    """Return so many of the cases, from equal stretches of them, each another in each of the draws that follow."""
    count = min(count, len(cases))
    bounds = [len(cases) * i // count for i in range(count + 1)] if count else []
    stretches = [cases[begin:end] for begin, end in pairwise(bounds)]
    return [stretch[(number + i) % len(stretch)] for i, stretch in enumerate(stretches)]


def number_of(law: str) -> int:
    """Return the number of this run's draw of a law. Laws begin at different numbers, else one draw would have all of
    their dear cases: of laws for one process or two, each second commit had all in two."""
    return draw + zlib.crc32(law.encode())


def least(cases: int) -> int:
    """Return the fewest cases that a run may draw of so many, for all to be seen."""
    return -(-cases // DRAWS)


def examples(number: int, least: int = 6) -> int:
    """Return how many examples of a law of Hypothesis this run tries, of so many in all."""
    return number if whole else max(number // THINNED, min(number, least))
