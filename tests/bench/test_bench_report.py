"""The README's figures are the results', and the report says what was missed, what was missing and what differs."""

import copy
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bench.parts
from bench import fits, record, report, run
from tests.support.strategies import law

ROOT = Path(__file__).parents[2]


def records(scale=1.0):
    """Two parts, in which every number is a multiple of the scale and no word has a digit."""
    ours, theirs = [3.1 * scale, 3.3 * scale, 3.7 * scale], [4.7 * scale * scale] * 3
    parts = {
        "update": {
            "config": {"params": round(700 * scale), "nested": {"depth": round(900 * scale)}},
            "versions": {"peer": f"v{round(8000 * scale)}"},
            "rows": [*record.rows("step", "ms", {"this": ours, "peer": theirs}, threads=round(60 * scale))],
            "ratios": [
                record.ratio("this / peer", ours, theirs, target=0.31 / scale**2, note="bound by memory"),
                record.ratio("peer / this", theirs, ours, target=0.41 * scale, better="higher"),
            ],
            "missing": [record.missing("absent peer", "needs a card")],
            "notes": ["a remark"],
        },
        "bits": {
            "config": {},
            "versions": {},
            "rows": [record.row("this", "changed", "elements", [round(500 * scale)], shards=round(4000 * scale))],
            "ratios": [],
            "missing": [],
            "notes": [],
        },
    }
    stamp = {
        "date": f"{round(2000 * scale)}-{round(21 * scale)}T",
        "machine": f"c{round(77 * scale)}",
        "memory": round(2**33 * scale),
        "commit": f"{round(9999 * scale)}",
    }
    return {part: {"bench": part, "title": part, **stamp, **known} for part, known in parts.items()}


def numbers(text):
    return set(re.findall(r"\d[\d,.]*", text))


FIGURES = (report.Figure("update", "this / peer", "an update"), report.Figure("update", "peer / this", "a step", True))


def section(known):
    return report.section(known, FIGURES)


def test_every_figure_comes_from_the_results():
    words = {"20", "80"}  # the percentiles' names
    for text in (section, report.document):
        one, other = (numbers(text(records(scale))) for scale in (1.0, 1.37))
        assert len(one) > (2 if text is section else 15)
        assert {n.rstrip(".,") for n in one & other} <= words


def test_the_readmes_figures_are_what_the_newest_run_gives():
    *_, before, newest = report.whole_runs(report.RESULTS, run.PARTS)
    readme, gpu = report.README.read_text(), report.newest_on_gpu(report.RESULTS)
    assert report.measured(readme, newest, gpu) == readme
    assert report.performance(newest, before, gpu) == report.PERFORMANCE.read_text()


def test_the_readmes_figures_are_all_there_and_lead_to_their_parts():
    *_, newest = report.whole_runs(report.RESULTS, run.PARTS)
    lines = report.section(report.read(newest)).splitlines()[2:]
    assert len(lines) == len(report.FIGURES) <= 8
    page = report.PERFORMANCE.read_text()
    titles = {report.anchor(line.removeprefix("## ")) for line in page.splitlines() if line.startswith("## ")}
    assert {re.search(r"performance.md#([\w-]+)", line)[1] for line in lines} <= titles


@pytest.mark.integration
def test_the_readmes_picture_is_what_the_plan_says(monkeypatch, tmp_path):
    monkeypatch.setattr(fits, "PICTURE", tmp_path / "fits.svg")
    drawn = Path(__file__).parents[2] / "docs" / "pictures" / "fits.svg"
    shown = re.findall(r"[\d.]+ billion", drawn.read_text())
    assert shown == [f"{n / 1e9:.1f} billion" for n in reversed(fits.sizes().values())]
    fits.main()
    assert re.findall(r"[\d.]+ billion", (tmp_path / "fits.svg").read_text()) == shown


def test_the_built_page_is_the_page_of_the_repository_with_each_parts_pictures(monkeypatch):
    drawn = {}

    def draw(known, folder):
        drawn.update({part: [folder / f"{part}-bars.svg", folder / f"{part}-curves.svg"] for part in known})
        return drawn

    monkeypatch.setattr(report.plots, "draw", draw)
    page = report.illustrated()
    picture = re.compile(r"!\[.*\]\((.*)\)\n\n")
    assert picture.sub("", page) == report.PERFORMANCE.read_text()
    found = [(report.PERFORMANCE.parent / path).resolve() for path in picture.findall(page)]
    assert sorted(found) == sorted(path for paths in drawn.values() for path in paths)


def test_the_page_says_what_the_run_before_does_not_confirm(tmp_path):
    before, now = write(tmp_path / "before.jsonl", records()), records()
    now["update"]["ratios"][0].update(p20=7.0, p50=7.5, p80=8.0)
    said = report.beside(before, write(tmp_path / "now.jsonl", now))
    assert said.startswith(
        "This run and [the run before](../bench/results/before.jsonl) share 2 ratios. Of these, 1 agree: their 20th to "
        "80th percentiles overlap, or their medians differ by at most 1%. 1 of these agree closely: each median"
    )
    assert "| update: this / peer | 0.702 (" in said
    assert "7.50 (7 to 8) | DIFFER |" in said
    assert "peer / this" not in said


def test_only_what_lies_between_the_marks_is_replaced(tmp_path):
    path = write(tmp_path / "run.jsonl", records())
    readme = f"before 1\n{report.BEGIN}old 2\n{report.END}after 3\n"
    written = report.measured(readme, path)
    assert written == f"before 1\n{report.BEGIN}{report.section(records())}\n{report.NOT_ON_GPU}\n{report.END}after 3\n"
    assert report.measured(written, path) == written
    with pytest.raises(report.ReportError, match="expected the marks"):
        report.measured("no marks\n", path)


def test_a_missed_target_is_said_with_how_far_and_why_and_so_is_a_missing_peer():
    known = records()
    middle = known["update"]["ratios"][0]["p50"]
    beyond = f"missed by {100 * (middle / 0.31 - 1):.0f} %"
    assert beyond in report.document(known)
    assert beyond.replace("missed", "**missed**") in report.document(known)
    assert "bound by memory" in report.document(known)
    assert "absent peer could not run: needs a card" in report.document(known)
    assert known["update"]["ratios"][1]["p50"] > 0.41
    [met] = [line for line in report.document(known).splitlines() if line.startswith("| peer / this")]
    assert met.endswith("| met |")


samples = st.lists(st.floats(0.1, 100), min_size=1, max_size=12)


@law(100)
@given(samples)
def test_percentiles_are_ordered_within_the_samples(values):
    low, middle, high = record.quantiles(values)
    assert min(values) <= low <= middle <= high <= max(values)


def test_ratios_are_of_turns_in_the_same_round():
    drifting, twice = [1.0, 10.0, 100.0], [2.0, 20.0, 200.0]
    ratio = record.ratio("twice / drifting", twice, drifting)
    assert (ratio["p20"], ratio["p50"], ratio["p80"]) == (2.0, 2.0, 2.0)


def test_two_runs_are_close_where_each_median_lies_within_the_others_spread():
    one = records()
    ratio = {"p20": 0.5, "p50": 0.7, "p80": 0.9, "target": None, "better": "lower"}
    one["update"]["ratios"] = [
        {**ratio, "name": name} for name in ("alike", "drifted", "sharp here", "sharp there", "steady", "only here")
    ]
    other = copy.deepcopy(one)
    alike, drifted, here, there, steady, _ = other["update"]["ratios"]
    alike.update(p20=0.6, p50=0.8, p80=1.0)
    drifted.update(p20=1.5, p50=1.7, p80=1.9)
    one["update"]["ratios"][2].update(p20=0.69, p80=0.71)
    here.update(p50=0.72)
    one["update"]["ratios"][3].update(p50=0.72)
    there.update(p20=0.69, p80=0.71)
    one["update"]["ratios"][4].update(p20=0.7, p80=0.7)
    steady.update(p20=0.705, p50=0.705, p80=0.705)
    other["update"]["ratios"].pop()
    assert [(name, agree) for name, *_, agree in report.compare(one, other)] == [
        ("update: alike", report.CLOSE),
        ("update: drifted", report.DIFFER),
        ("update: sharp here", report.OVERLAP),
        ("update: sharp there", report.OVERLAP),
        ("update: steady", report.CLOSE),  # by less than the resolution
        ("update: only here", report.DIFFER),
    ]


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ("Intel(R) Xeon(R) Processor @ 2.10GHz", "xeon-2core"),
        ("Intel(R) Core(TM) i7-10700K CPU @ 3.80GHz", "core-i7-10700k-2core"),
        ("AMD EPYC 7763 64-Core Processor", "epyc-7763-2core"),
        ("aarch64", "aarch64-2core"),
    ],
)
def test_a_results_file_is_named_after_parts_hardware_date_and_commit(tmp_path, monkeypatch, processor, expected):
    monkeypatch.setattr(record, "processor", lambda: processor)
    monkeypatch.setattr(record, "available_cpus", lambda: 2)
    monkeypatch.setattr(run, "commit", lambda: "0123456789ab-dirty")
    first = run.free_path(tmp_path, [], quick=False)
    assert re.fullmatch(rf"all-{expected}-\d{{4}}-\d\d-\d\d-0123456\.jsonl", first.name)
    first.touch()
    assert run.free_path(tmp_path, [], quick=False).stem == f"{first.stem}-2"
    assert run.free_path(tmp_path, ["step", "ranks"], quick=True).stem == f"step+ranks{first.stem[3:]}-quick"


def write(path, known):
    path.write_text("".join(json.dumps(each) + "\n" for each in known.values()))
    return path


def test_the_newest_run_is_by_date_whole_and_of_this_form(tmp_path):
    early, late, part = records(), records(), records()
    for known, date in ((early, "2026-01-01T"), (late, "2026-01-02T"), (part, "2026-01-03T")):
        for each in known.values():
            each["date"] = date
    del part["bits"]
    write(tmp_path / "z.jsonl", early)
    write(tmp_path / "part.jsonl", part)
    (tmp_path / "old.jsonl").write_text('{"bench": "update", "seconds": {}}\n')
    expected = write(tmp_path / "a.jsonl", late)
    assert [path.name for path in report.whole_runs(tmp_path, ["update", "bits"])] == ["z.jsonl", expected.name]
    assert report.whole_runs(tmp_path, ["update", "bits", "more"]) == []


def stand_in(folder, bodies):
    """A package ``bench.parts`` of such parts, for processes that find it first."""
    package = folder / "bench" / "parts"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    for part, body in bodies.items():
        (package / f"{part}.py").write_text(body)
    (package / "__init__.py").touch()
    return package


def test_a_part_that_fails_or_hangs_is_reported_and_the_rest_go_on(tmp_path, monkeypatch, capsys):
    def recording(part):
        return (
            "import json, sys; path = sys.argv[sys.argv.index('--json') + 1]\n"
            f"open(path, 'a').write({json.dumps(json.dumps(records()['bits'] | {'bench': part}))} + chr(10))\n"
        )

    bodies = {
        "failing": "raise SystemExit('out of luck')",
        "hanging": "import time; time.sleep(600)",
        "fine": recording("fine"),
        "lacking": recording("lacking") + "raise SystemExit(1)  # a peer could not run",
    }
    package = stand_in(tmp_path, bodies)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench.parts, "__path__", [str(package), *bench.parts.__path__])
    monkeypatch.setattr(run, "PARTS", {"failing": 60, "hanging": 2, "fine": 60, "lacking": 60, "absent": 60})
    monkeypatch.setattr(report, "PICTURES", tmp_path / "pictures")
    path = tmp_path / "results.jsonl"
    assert run.main(["--json", str(path)]) == 1
    known = report.read(path)
    assert list(known) == ["failing", "hanging", "fine", "lacking", "absent"]
    why = {part: [absent["why"] for absent in each["missing"]] for part, each in known.items()}
    assert why["failing"] == ["exit status 1: out of luck"]
    assert why["hanging"] == ["took longer than its 2 s"]
    assert why["fine"] == []
    assert known["lacking"]["rows"] == known["fine"]["rows"] != []
    assert why["absent"] == ["there is no bench.parts.absent"]
    assert "out of luck" in path.with_suffix(".md").read_text()
    assert "FAILED" in capsys.readouterr().out


def test_an_interrupt_ends_the_part_that_runs(tmp_path):
    stand_in(tmp_path, {"hanging": "import os, time; print(os.getpid(), flush=True); time.sleep(600)"})
    start = (
        "import bench.parts; from bench import run; bench.parts.__path__.append('bench/parts');"
        "run.PARTS = {'hanging': 600}; run.main(['--json', 'results.jsonl'])"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {start}"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as running:
        running.stdout.readline()
        part = psutil.Process(int(running.stdout.readline()))
        running.send_signal(signal.SIGINT)
        assert running.wait(30) != 0
    assert not part.is_running()


def test_the_report_says_what_was_asked_of_the_allocator():
    plain, kept = records(), records()
    kept["update"]["config"]["malloc"] = {"MALLOC_MMAP_MAX_": "0"}
    assert "allocator" not in report.document(plain)
    assert "allocator" in report.document(kept)
    assert "users see by default" not in report.document(kept)
    part = {**copy.deepcopy(kept["update"]), "bench": "default_allocator", "title": "as it comes"}
    assert 'under "default allocator"' in report.document({**kept, "default_allocator": part})
