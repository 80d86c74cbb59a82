"""The ledger of processor time holds its budget, and says what to do where it does not."""

from types import SimpleNamespace

import pytest

from tests import ledger
from tests.ledger import BUDGET, FILE, LONGEST, ROOT, Ledger, faults, read, write

ROW = "tests/core/test_one.py"


@pytest.fixture
def checkout(tmp_path):
    """A checkout with two files of tests and a ledger that has both."""
    for name in ("core/test_one.py", "core/test_other.py", "integrations/test_of_others.py", "support/helper.py"):
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("def test_it():\n    pass\n")
    write(tmp_path, Ledger("a machine", {ROW: (2.0, 1), "tests/core/test_other.py": (1.0, 3)}, {}))
    return tmp_path


def test_a_ledger_within_its_budget_has_no_fault(checkout):
    assert faults(checkout) == []
    assert read(checkout).files[ROW] == (2.0, 1)


def test_a_file_without_a_row_is_one_line_with_the_command_that_makes_it(checkout):
    (checkout / "tests/core/test_new.py").touch()
    [said] = faults(checkout)
    assert said == f"tests/core/test_new.py has no row in {FILE}: run `make test-times FILES=tests/core/test_new.py`"
    (checkout / "tests/core/test_new.py").rename(checkout / "tests/integrations/test_new.py")
    assert faults(checkout) == []


def test_a_row_without_a_file_is_named(checkout):
    (checkout / ROW).unlink()
    assert faults(checkout) == [f"{FILE} has a row of {ROW}, which is not there: take it out"]


def test_more_than_the_budget_is_one_line_that_names_the_largest_files(checkout):
    write(checkout, read(checkout)._replace(files={ROW: (BUDGET, 1), "tests/core/test_other.py": (1.0, 3)}))
    [said] = faults(checkout)
    assert f"take {BUDGET + 1} s of processor time, and `make test` may take {BUDGET}" in said
    assert f"(most of it: {ROW}, " in said


@pytest.mark.parametrize("mark", ["", "@pytest.mark.long\n", "@pytest.mark.long()\n", '@pytest.mark.long("")\n'])
def test_a_long_case_needs_a_mark_that_says_why(checkout, mark):
    write(checkout, read(checkout)._replace(long_cases={f"{ROW}::test_it[2-True]": 3.0}))
    (checkout / ROW).write_text(f"{mark}def test_it():\n    pass\n")
    [said] = faults(checkout)
    assert said.startswith(f"{ROW}::test_it[2-True] takes more than 2 s and does not say why")
    assert '@pytest.mark.long("why")' in said
    why = '@pytest.mark.long("two ranks, each an interpreter")'
    (checkout / ROW).write_text(f"{why}\n@pytest.mark.draws(2)\ndef test_it():\n    pass\n")
    assert faults(checkout) == []


def test_there_is_an_end_to_long_cases(checkout):
    law = '@pytest.mark.long("why")\ndef test_{}():\n    pass\n'
    (checkout / ROW).write_text("\n".join(law.format(i) for i in range(LONGEST)))
    write(checkout, read(checkout)._replace(long_cases={f"{ROW}::test_1[{i}]": 3.0 for i in range(LONGEST)}))
    assert faults(checkout) == []
    write(checkout, read(checkout)._replace(long_cases={f"{ROW}::test_1[{i}]": 3.0 for i in range(LONGEST + 1)}))
    [said] = faults(checkout)
    assert said.startswith(f"{LONGEST + 1} cases take more than 2 s, and {LONGEST} may")


@pytest.mark.parametrize("text", [None, "", "# measured on: x\n1.0\ttests/core/test_one.py\n", "# x\nmuch\t1\ta.py\n"])
def test_what_is_no_ledger_is_one_line(checkout, text):
    (checkout / FILE).unlink()
    if text is not None:
        (checkout / FILE).write_text(text)
    with pytest.raises(SystemExit, match=r"ledger.tsv cannot be read .*`make test-times` writes it anew") as raised:
        faults(checkout)
    assert "\n" not in raised.value.code


def test_a_ledger_of_another_machine_takes_no_rows_of_this_one(checkout):
    before = (checkout / FILE).read_bytes()
    with pytest.raises(SystemExit, match=r"of another machine \(a machine; this one: .*\): `make test-times` without"):
        ledger.measure(checkout, [ROW])
    with pytest.raises(SystemExit, match=r"tests/core/test_none.py is no file of `make test`"):
        ledger.measure(checkout, ["tests/core/test_none.py"])
    assert (checkout / FILE).read_bytes() == before


@pytest.mark.long("starts pytest")
def test_rows_are_processor_time_with_that_of_children(checkout, monkeypatch):
    """On one processor or many: a child that computes is counted, and time that passes is not."""
    write(checkout, read(checkout)._replace(machine=ledger.machine()))
    (checkout / ROW).write_text(
        "import subprocess, sys, time\n"
        "code = 'import time\\nwhile time.process_time() < 0.6: pass'\n"
        "def test_child():\n    subprocess.run([sys.executable, '-c', code], check=True)\n"
        "def test_sleeps():\n    time.sleep(1)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(ledger, "LONG", 0.15)
    (checkout / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    soak\n    integration\n")
    (checkout / "tests/support/helper.py").unlink()
    (checkout / "tests/support").rmdir()
    for name in ("__init__.py", "support", "sampling.py"):
        (checkout / "tests" / name).symlink_to(ROOT / "tests" / name)
    ledger.measure(checkout, ["-p", "no:cacheprovider", "-n", "0", ROW])
    found = read(checkout)
    assert found.files.keys() == {ROW, "tests/core/test_other.py"}
    assert found.files[ROW][0] >= 0.2  # in standard seconds: 0.6, on a machine three times as slow
    assert found.files[ROW][1] == 2
    assert [*found.long_cases] == [f"{ROW}::test_child"]


@pytest.mark.parametrize("status", [1, 2, 4])
def test_where_a_test_fails_the_ledger_stays(checkout, monkeypatch, status):
    write(checkout, read(checkout)._replace(machine=ledger.machine()))
    before = (checkout / FILE).read_bytes()
    monkeypatch.setattr(ledger.subprocess, "run", lambda *arguments, **options: SimpleNamespace(returncode=status))
    with pytest.raises(SystemExit, match=rf"the tests did not pass \(pytest's exit status is {status}\)"):
        ledger.measure(checkout, [ROW])
    assert (checkout / FILE).read_bytes() == before
