"""The glossary's promise: names in the code have no word that it has replaced by a better one."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("offload_core", "frontends")
EXCEPT = {
    "takes_apart": "a public method of OffloadConfig",
    "LateStore": "a store of tests that is late",
    "LateRun": "likewise",
    "_late": "likewise",
    "_settle": "likewise",
}
"""Names that keep such a word, and why."""


def words_of(name: str) -> list[str]:
    """The words of an identifier, in small letters."""
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().strip("_").split("_")


def named(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield what a file gives a name to, with its line: functions, classes, arguments, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def replaced(page: str) -> dict[str, str]:
    """By replaced words the words to use, of the glossary's second table."""
    table = page.partition("## Words that names in the code do not have")[2]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {word: use for words, use in rows if words not in ("not", "---") for word in words.split(", ")}


def found_in(text: str, words: dict[str, str]) -> list[str]:
    """The names in a file that have a replaced word, each with its line and the words to use."""
    found = []
    for line, name in named(ast.parse(text)):
        mine = f" {' '.join(words_of(name))} "
        uses = [use for word, use in words.items() if f" {word} " in mine]
        if uses and name not in EXCEPT:
            found.append(f"{line}: {name}; expected one of: {uses[0]}")
    return found


@pytest.mark.quick
def test_no_name_has_a_word_that_the_glossary_replaces():
    words = replaced((ROOT / "docs/glossary.md").read_text())
    assert len(words) > 10
    found = [
        f"{path.relative_to(ROOT)}:{each}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for each in found_in(path.read_text(), words)
    ]
    assert not found, "\n".join(found)


def test_a_name_with_such_a_word_is_found_wherever_it_is_given():
    words = {"work": "bucket", "let go": "release"}
    code = "class Work: ...\ndef f(next_work): ...\nself.works, work = 1, 2\nself._let_go = 3\ndef network(): ...\n"
    assert sorted(found_in(code, words)) == [
        "1: Work; expected one of: bucket",
        "2: next_work; expected one of: bucket",
        "3: work; expected one of: bucket",
        "4: _let_go; expected one of: release",
    ]


def test_an_exception_that_nobody_needs_goes():
    names = {
        name
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for _, name in named(ast.parse(path.read_text()))
    }
    assert names >= EXCEPT.keys()
