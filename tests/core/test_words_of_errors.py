"""The words of errors: articles, spaces between parts of a message, and values that are shown in one line."""

import itertools
import re
import struct
import tokenize
from pathlib import Path

import pytest

from offload_core import CheckpointError, ConfigError
from offload_core.__main__ import main
from offload_core.checkpoint.checkpoints import _opened
from offload_core.config.options import OffloadConfig
from offload_core.support.checks import kind_of, shown, some_of

ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("offload_core", "frontends") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_a_type_has_its_article_and_none_is_none():
    assert [kind_of(value) for value in (1, [], {}, None, OSError())] == [
        "an int",
        "a list",
        "a dict",
        "None",
        "an OSError",
    ]


def test_a_value_is_shown_in_one_line_and_without_an_address():
    class Printed:
        def __repr__(self):
            return "Printed (\n    a: 1\n)"

    assert [shown(value) for value in (Printed(), object(), 3, "a\nb")] == ["a Printed", "an object", "3", r"'a\nb'"]


def test_others_are_at_least_two():
    assert [some_of("abcde"[:n], 3) for n in (1, 3, 4, 5)] == [
        "'a'",
        "'a', 'b', 'c'",
        "'a', 'b', 'c', 'd'",
        "'a', 'b', 'c' and 2 others",
    ]


def test_no_message_has_a_fixed_article_before_a_type_or_a_count_of_others():
    texts = {path.name: path.read_text() for path in SOURCES}
    assert {name: found for name, text in texts.items() if (found := _FIXED.findall(text))} == {}


_FIXED = re.compile(r"\ba \{type\([\w.]+\)\.__name__.*|len\([a-z]+\) - 1\} others.*")


def glued(path):
    """Parts of a message that have no space between them: two strings of Python on two lines."""
    with open(path, "rb") as file:
        tokens = [t for t in tokenize.tokenize(file.readline) if t.type not in (tokenize.NL, tokenize.COMMENT)]
    lines = path.read_text().split("\n")
    for one, two in itertools.pairwise(tokens):
        if one.type in _ENDS and two.type in _BEGINS and one.end[0] < two.start[0]:
            end = lines[one.end[0] - 1][: one.end[1] - 1]
            begin = re.sub(r"^[fr]*[\"']", "", lines[two.start[0] - 1][two.start[1] :])
            if re.search(r"(?<!\\)[\w,;:)}]$", end) and re.match(r"[A-Za-z]", begin):
                yield f"{end[-20:]}|{begin[:20]}"


def test_parts_of_a_message_have_a_space_between_them():
    assert {path.name: found for path in SOURCES if (found := [*glued(path)])} == {}


_ENDS = {tokenize.STRING, getattr(tokenize, "FSTRING_END", -1)}
_BEGINS = {tokenize.STRING, getattr(tokenize, "FSTRING_START", -1)}


def said(capsys, *arguments):
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code
    assert status
    out, err = capsys.readouterr()
    return out + err


@pytest.mark.parametrize("option", ["--ranks", "--gpus", "--world_size", "--ranks=2", "--num-gpus"])
def test_an_option_of_other_programs_is_answered_by_ours(option, capsys):
    arguments = ["plan", "--parameters", "1B", option] + ["2"] * ("=" not in option)
    assert f"plan: unknown option {option}; did you mean --world-size?" in said(capsys, *arguments)


def test_a_command_speaks_of_no_argument_of_python(capsys, tmp_path):
    assert "missing_ok" not in said(capsys, "inspect", str(tmp_path / "nothing"))
    assert "missing_ok" not in said(capsys, "export", str(tmp_path / "nothing"), str(tmp_path / "out"))
    with pytest.raises(CheckpointError, match="missing_ok=True"):
        _opened(tmp_path / "nothing")


def test_a_file_of_another_kind_is_named_so_without_its_bytes_as_a_size(capsys, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("root:x:0:0:root:/root:/bin/bash\n")
    words = said(capsys, "plan", "--model", str(path))
    assert "no safetensors file: its first 8 bytes are no header's length; expected a .safetensors file" in words
    path.write_bytes(struct.pack("<Q", 1000) + b"{}")
    assert "or cut off: 10 bytes, and a header of 1000" in said(capsys, "plan", "--model", str(path))


def test_broken_json_is_not_a_missing_file(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": ')
    with pytest.raises(ConfigError, match=r"cannot be read as JSON \(.*\); expected a DeepSpeed conf.*: \{...\}"):
        OffloadConfig.resolve(path)
    with pytest.raises(ConfigError, match=r"\(No such file or directory\); expected the path of a DeepSpeed"):
        OffloadConfig.resolve(tmp_path / "nowhere.json")
