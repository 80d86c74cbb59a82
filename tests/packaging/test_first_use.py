"""tests/packaging/first_use.py, which a release runs: the parts of it that need no wheel."""

import ast
import shutil
import sys

import pytest

from tests.packaging import first_use


@pytest.mark.parametrize("front_end", ["torch", "jax"])
def test_the_readme_has_a_block_for_each_front_end_that_stands_alone(front_end):
    imported = [node.module for node in ast.walk(ast.parse(first_use.readme_block(front_end)))
                if isinstance(node, ast.ImportFrom)]  # fmt: skip
    assert imported == [f"frontends.{front_end}"]


def test_a_readme_without_the_block_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("```python\nimport torch\n```\n")
    with pytest.raises(SystemExit, match=r"no block of Python imports frontends\.torch; expected one"):
        first_use.readme_block("torch", tmp_path / "README.md")


def test_the_users_path_has_no_compiler_and_none_is_named(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("CC", "gcc")
    monkeypatch.setenv("PYTHONPATH", str(first_use.ROOT))
    variables = first_use.without_compiler(tmp_path)
    assert not {"CC", "CXX", "PYTHONPATH", "VIRTUAL_ENV"} & variables.keys()
    assert [shutil.which(name, path=variables["PATH"]) for name in first_use.COMPILERS] == 5 * [None]
    compiler = tmp_path / "bin" / "cc"
    compiler.touch(mode=0o755)
    with pytest.raises(AssertionError, match="expected no compiler"):
        first_use.without_compiler(tmp_path)


def test_a_step_that_does_not_end_as_expected_ends_the_script_with_its_output(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(first_use.venv, "create", lambda folder, with_pip: (folder / "bin").mkdir(parents=True))
    environment = first_use.Environment(tmp_path)
    (tmp_path / "env" / "bin" / "python").symlink_to(sys.executable)
    environment.run("as it should be", "-c", "print('fine')")
    environment.run("refused, as it should be", "-c", "raise SystemExit('no compiler')", fails_with="no compiler")
    environment.run("made up for", "-c", "raise SystemExit('no index')", may_fail=True)
    assert capsys.readouterr().out.count("as expected") == 3
    for program, words in (
        ("print('before'); raise SystemExit('broken')", {}),
        ("print('compiled')", {"fails_with": "no compiler"}),
        ("raise SystemExit('another error')", {"fails_with": "no compiler"}),
    ):
        with pytest.raises(SystemExit, match="expected"):
            environment.run("not as it should be", "-c", program, **words)


def test_the_words_that_pip_is_expected_to_say_are_those_of_setup_py():
    assert first_use.NO_COMPILER in (first_use.ROOT / "setup.py").read_text()
