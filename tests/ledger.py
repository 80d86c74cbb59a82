"""The processor time of each file of tests in ``make test``, its child processes' included, and what they may take.

``python -m tests.ledger measure`` (``make test-times``) runs the tests and writes ``ledger.tsv``: a row for each file,
and one for each case above two seconds. With files as arguments it measures these again. ``python -m tests.ledger``
(``make lint``) checks the rows, so the budget is a figure in a commit, and no clock decides a test. The mark
``long("why")`` of a law says why a case takes more than two seconds.
"""

import ast
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[1]
FILE = Path("tests/ledger.tsv")
BUDGET = 790
"""Standard seconds (``tests/support/times.py``) of all files of ``make test``."""
LONG = 2.0
"""Seconds of a case, above which it has a row of its own, and its law the mark ``long``."""
LONGEST = 64
"""How many such cases there may be. More laws have the mark: each commit draws other cases of them."""
KINDS = ["-m", "not slow and not soak and not integration", "--ignore=tests/integrations"]


class Ledger(NamedTuple):
    machine: str
    files: dict[str, tuple[float, int]]
    """Seconds, and the number of cases."""
    long_cases: dict[str, float]


def machine() -> str:
    """Return the name of the processor and the number of those that this process may use."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        widest = next(kind for kind in ("avx512f", "avx2", "fma", "") if kind in "".join(lines))
        name += f" ({widest})" if widest else ""
    except (OSError, StopIteration):
        pass
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {count} cores"


def stop(said: str) -> NoReturn:
    sys.exit(f"tests.ledger: {said}")


def read(root: Path) -> Ledger:
    """Read the ledger of a checkout. Exit with one line if it is no ledger."""
    path, files, cases = root / FILE, {}, {}
    try:
        first, *rows = path.read_text().splitlines()
        for row in rows:
            seconds, count, name = row.split("\t")
            if "::" in name:
                cases[name] = float(seconds)
            else:
                files[name] = (float(seconds), int(count))
        return Ledger(first.removeprefix("# measured on: "), files, cases)
    except (OSError, ValueError) as error:
        stop(f"{FILE} cannot be read ({error}): `make test-times` writes it anew")


def write(root: Path, ledger: Ledger) -> None:
    rows = [f"# measured on: {ledger.machine}"]
    rows += [f"{seconds:.1f}\t{count}\t{name}" for name, (seconds, count) in sorted(ledger.files.items())]
    rows += [f"{seconds:.1f}\t1\t{name}" for name, seconds in sorted(ledger.long_cases.items())]
    partial = root / FILE.with_suffix(".part")
    partial.write_text("\n".join(rows) + "\n")
    partial.replace(root / FILE)


def files_of_tests(root: Path) -> set[str]:
    """Return the files that must have a row: all but those of ``make test-integrations``."""
    found = (path.relative_to(root) for path in (root / "tests").rglob("test_*.py"))
    return {path.as_posix() for path in found if path.parts[1] != "integrations"}


def reasons(root: Path) -> dict[tuple[str, str], str]:
    """Return the words of the mark ``long`` of each law that has it, by file and name."""
    found = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        if "mark.long" not in (text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                match mark:
                    case ast.Call(ast.Attribute(attr="long"), [ast.Constant(str(why))]):
                        found[path.relative_to(root).as_posix(), node.name] = why
    return found


def faults(root: Path) -> list[str]:
    """Return what is wrong with the ledger of a checkout, a line each, with what to do."""
    ledger, said = read(root), []
    there, why = files_of_tests(root), reasons(root)
    for name in sorted(there - ledger.files.keys()):
        said.append(f"{name} has no row in {FILE}: run `make test-times FILES={name}`")
    for name in sorted(ledger.files.keys() - there):
        said.append(f"{FILE} has a row of {name}, which is not there: take it out")
    total = sum(seconds for seconds, _ in ledger.files.values())
    if total > BUDGET:
        most = ", ".join(sorted(ledger.files, key=lambda name: -ledger.files[name][0])[:3])
        said.append(
            f"the files of {FILE} take {total:.0f} s of processor time, and `make test` may take {BUDGET}: draw fewer "
            f"cases (tests/sampling.py), mark some slow, or share what they start (most of it: {most})"
        )
    for name in ledger.long_cases:
        file, *_, law = name.partition("[")[0].split("::")
        if not why.get((file, law)):
            mark = '`@pytest.mark.long("why")`'
            said.append(f"{name} takes more than {LONG:.0f} s and does not say why: make it shorter, or mark it {mark}")
    if len(ledger.long_cases) > LONGEST:
        said.append(f"{len(ledger.long_cases)} cases take more than {LONG:.0f} s, and {LONGEST} may: make some shorter")
    return said


def measured(root: Path, files: list[str], options: list[str]) -> Ledger:
    """Run the tests in files, or all of ``make test``, and return what they took. Exit if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        times = ["-p", "tests.support.times", "--times", folder]
        command = [sys.executable, "-m", "pytest", "-q", *times, *KINDS, *options, *(files or ["tests"])]
        if (status := subprocess.run(command, cwd=root, check=False).returncode) not in (0, 5):  # 5: no case
            stop(f"the tests did not pass (pytest's exit status is {status}), so {FILE} stays as it was")
        rows = [row.split("\t") for path in Path(folder).glob("*.tsv") for row in path.read_text().splitlines()]
    seconds: Counter[str] = Counter()
    count: Counter[str] = Counter()
    cases = {name: float(spent) for spent, _, name in rows}
    for name, spent in cases.items():
        file = name.partition("::")[0]
        seconds[file] += spent
        count[file] += 1
    every = {name: (seconds[name], count[name]) for name in files or files_of_tests(root)}
    return Ledger(machine(), every, {name: spent for name, spent in cases.items() if spent > LONG})


def measure(root: Path, arguments: list[str]) -> None:
    files = [argument for argument in arguments if argument.endswith(".py")]
    options = [argument for argument in arguments if argument not in files]
    if unknown := [name for name in files if name not in files_of_tests(root)]:
        stop(f"{unknown[0]} is no file of `make test`, such as tests/core/test_ranks.py")
    if files and (of := read(root).machine) != machine():
        stop(
            f"{FILE} is of another machine ({of}; this one: {machine()}): `make test-times` without FILES measures all"
        )
    new = measured(root, files, options)
    if files:
        old = read(root)
        kept = {name: spent for name, spent in old.long_cases.items() if name.partition("::")[0] not in files}
        new = Ledger(old.machine, old.files | new.files, kept | new.long_cases)
    write(root, new)
    total = sum(seconds for seconds, _ in new.files.values())
    print(f"{FILE}: {total:.0f} s of {BUDGET}, {len(new.long_cases)} cases above {LONG:.0f} s, on {new.machine}")


def main() -> None:
    if sys.argv[1:2] == ["measure"]:
        try:
            measure(ROOT, sys.argv[2:])
        except KeyboardInterrupt:
            stop(f"interrupted: {FILE} stays as it was")
    elif said := faults(ROOT):
        sys.exit("\n".join(said))


if __name__ == "__main__":
    main()
