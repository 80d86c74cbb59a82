"""Settings of the whole suite.

All random draws come from one seed: ``pytest --seed 7``, or ``make test ARGS="--seed 7"``. Which cases a run draws of
the laws that have many comes from the commit (``sampling.py``), or ``--draw 3``. A run prints both at its end.
"""

import gc
import os
import random
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from tests import ledger, sampling

# Two files of tests at a time share the processors, where threads that spin while they wait cost the other half its
# time: interrupts of torch steps took 40 s and take 22. OpenMP reads it when torch is imported, here and in children.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# One thread each, here and in children: the tensors of tests are too small to be shared, and ranks fill the processors.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

# A shell starts what runs in the background with interrupts ignored; tests send them, to their own children, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A machine may be as slow as it likes: time decides no test. Without a database, one run cannot change the next.
settings.register_profile("suite", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

OPTIONAL = {
    "torch",
    "jax",
    "optax",
    "safetensors",
    "flax",
    "equinox",
    "orbax",
    "transformers",
    "accelerate",
    "trl",
    "peft",
    "datasets",
    "ray",
    "torchtitan",
}
"""Without one of these, the tests that need it are skipped: so the rest runs on a Python for which it has no wheel."""
INTEGRATIONS = Path(__file__).parent / "integrations"


def seconds_of_files() -> dict[Path, float]:
    """Read from the ledger what files take; of one that it lacks nothing is known."""
    found = {}
    if (path := ledger.ROOT / ledger.FILE).exists():
        for row in path.read_text().splitlines()[1:]:
            seconds, _, name = row.split("\t")
            found[ledger.ROOT / name] = float(seconds)
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", default="0", help="of every random draw in the tests; default: 0")
    words = "which cases are checked of laws that have many; default: by the commit, so that ten in a row see all"
    parser.addoption("--draw", help=words)
    words = "the cases of one of N equal stretches of those that are chosen, counted from 0: 0/3, 1/3, 2/3"
    parser.addoption("--slice", default="0/1", metavar="I/N", help=words)
    parser.addoption("--whole", action="store_true", help="check all cases of those laws, which are marked slow then")
    stores = ["memory", "late", "disk", "nvme", "half nvme", "device", "half device"]
    words = (
        "that keeps the states; nvme: on disk, and parameters that stage 3 has on the host, too; device: on it, where"
    )
    words += " it is not the host"
    parser.addoption("--store", choices=stores, default="memory", help=words)


def number_of(config: pytest.Config, option: str) -> int:
    text = str(config.getoption(option))
    if not text.isdecimal():
        raise pytest.UsageError(f"--{option} {text}: expected a number, 0 or more")
    return int(text)


def slice_of(config: pytest.Config) -> tuple[int, int]:
    text = config.option.slice
    if not (found := re.fullmatch(r"(\d+)/(\d+)", text)) or int(found[1]) >= int(found[2]):
        raise pytest.UsageError(f"--slice {text}: expected I/N with I below N, such as 0/3")
    return int(found[1]), int(found[2])


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Hand the seed to Hypothesis, whose own option wins, and to the order of sets in all processes that start now."""
    seed = config.option.seed = number_of(config, "seed")
    if config.option.draw is None:
        config.option.draw = sampling.commit_number() % sampling.DRAWS  # pytest-xdist hands it to its workers
    slice_of(config)
    sampling.draw, sampling.whole = number_of(config, "draw") % sampling.DRAWS, config.option.whole
    if (store := config.getoption("store")) != "memory":
        from tests.support import late_stores

        late_stores.take_the_place_of_memory(store)
    if config.getoption("hypothesis_seed", 0) is None:  # a pair of processes has no plugins
        config.option.hypothesis_seed = sampling.DRAWS * seed + sampling.draw
    os.environ.setdefault("PYTHONHASHSEED", str(seed % 2**32))


NEEDED_BYTES = 2 << 30
"""Of free space for temporary files: several runs of ranks and their checkpoints at a time."""


def pytest_sessionstart() -> None:
    folder = tempfile.gettempdir()
    if (free := shutil.disk_usage(folder).free) < NEEDED_BYTES:
        raise pytest.UsageError(
            f"{folder} has {free >> 20} MiB free and the tests need {NEEDED_BYTES >> 20}: make room, or name another "
            "folder: TMPDIR=/path make test",
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    said = "all cases: --whole" if config.option.whole else f"cases of this commit: --draw {config.option.draw}"
    terminalreporter.write_line(f"random draws: --seed {config.option.seed}; {said}")


_file: Path | None = None
"""The file of the last test."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Each test, and what its fixtures make, draws the same whether it runs alone or after others."""
    global _file
    if item.config.getoption("store") != "memory" and any(item.iter_markers("states_in_memory")):
        pytest.skip("of states in memory")
    if "device" in item.config.getoption("store") and any(item.iter_markers("states_on_host")):
        pytest.skip("of states on the host")
    if item.path != _file:
        _file = item.path
        collect_garbage_of_others()
    seed = item.config.getoption("seed")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


@pytest.fixture
def exact_rsqrt(monkeypatch: pytest.MonkeyPatch) -> None:
    """``optax.adagrad``'s rsqrt rounds as its definition. XLA's own approximates it, by the processor's instructions,
    unless XLA_FLAGS has ``--xla_cpu_enable_platform_dependent_math=false``."""
    jax = pytest.importorskip("jax")
    monkeypatch.setattr(jax.lax, "rsqrt", lambda x: 1 / jax.numpy.sqrt(x))


@pytest.fixture(scope="session")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """XLA compiles equal programs of different tests once: compiling is most of these tests' time."""
    jax = pytest.importorskip("jax")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(autouse=True)
def code_of_other_tests_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps wait for the rest of a process once compiled code was given a parameter in mid-update."""
    if (pending := sys.modules.get("frontends.torch.params.pending")) is not None:
        monkeypatch.setattr(pending, "compiled_code_reads", False)


@pytest.fixture(autouse=True)
def store(request: pytest.FixtureRequest) -> Iterator[None]:
    """As a parameter "late", "disk" or "nvme", it keeps the states of this test's pipelines in such a store."""
    if (name := getattr(request, "param", "memory")) == "memory":
        yield
        return
    from tests.support import late_stores

    with late_stores.late(name):
        yield


def needs_accelerator(item: pytest.Item) -> bool:
    device = getattr(item, "callspec", None) and item.callspec.params.get("device")
    return "accelerator" in getattr(item, "fixturenames", ()) or str(device).startswith("simulated")


def law_of(item: pytest.Item) -> tuple[Path, str]:
    return item.path, getattr(item, "originalname", item.name)


def runs_whole(item: pytest.Item) -> bool:
    return any(mark.name in ("slow", "soak") for mark in item.iter_markers())


def mark_others_slow(items: list[pytest.Item]) -> None:
    """Mark the cases that this run does not draw; under ``--whole`` all cases of laws of which runs draw some.

    Those with the libraries of ``make test-integrations`` are drawn apart, as ``make test`` has none of them.
    """
    cases: dict[tuple[Path, str, bool, int], list[pytest.Item]] = {}
    for item in items:
        if runs_whole(item):
            continue
        if (mark := item.get_closest_marker("draws")) is not None:
            apart = item.get_closest_marker("integration") is not None
            cases.setdefault((*law_of(item), apart, *mark.args), []).append(item)
        elif sampling.whole and {"drawn", "drawn_of_file"} & {*getattr(item, "fixturenames", ())}:
            item.add_marker("slow")
    for (_, law, _, count), each in cases.items():
        count = max(count, sampling.least(len(each)))  # another machine may have more cases
        kept = [] if sampling.whole else sampling.chosen(each, count, sampling.number_of(law))
        for item in each:
            if item not in kept:
                item.add_marker("slow")


def drawing(whole: bool) -> Callable[..., list[Any]]:
    def draw(cases: Iterable[Any], count: int) -> list[Any]:
        every = [*cases]
        assert sampling.least(len(every)) <= count, f"ten draws of {count} do not see all {len(every)} cases"
        return every if whole else sampling.chosen(every, count, sampling.draw)

    return draw


@pytest.fixture
def drawn(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """``drawn(cases, 2)``: two of a law's own cases, others with each commit; all of them under ``--whole``, and where
    the test is slow or a soak anyway."""
    return drawing(sampling.whole or runs_whole(request.node))


@pytest.fixture(scope="session")
def drawn_of_file() -> Callable[..., list[Any]]:
    """``drawn`` for the fixtures of a module, which serve all of its tests."""
    return drawing(sampling.whole)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    mark_others_slow(items)
    for item in items:
        if INTEGRATIONS in item.path.parents:
            item.add_marker("integration")
    for item in filter(needs_accelerator, items):
        item.add_marker("gpu")
    yield
    i, n = slice_of(config)
    items[:] = items[len(items) * i // n : len(items) * (i + 1) // n]
    seconds = seconds_of_files()  # the longest begin first, so that no process is left alone with one at the end
    items.sort(key=lambda item: -seconds.get(item.path, 0))
    if any(needs_accelerator(item) for item in items):
        from tests.support import simulated

        if simulated.why_not() is None:
            simulated.prepare()  # before any test's backward


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``make test`` gives a folder whose files share what they start to one worker. ``make test-all``, where such a
    folder takes many minutes, does not."""
    if config.getoption("dist") != "loadfile" or config.option.whole:
        return None
    from tests.support.side_by_side import ByFileOrFolder

    return ByFileOrFolder(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Modules and cases stay, so each walk through them in search of garbage is lost: a quarter of a collection's 13
    seconds, in each worker."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def collect_garbage_of_others() -> None:
    """Collections in tests need not walk torch, jax and what earlier files left: 0.02 s in place of 0.2 to 0.4."""
    gc.collect()
    gc.freeze()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()  # of a program that an earlier file ran here, such as DeepSpeed's face


class ModuleOfTests(pytest.Module):
    """A file of tests; one that needs a framework that is not installed is skipped by name."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except pytest.Collector.CollectError as error:
            missing = re.search(r"No module named '(\w+)", str(error))
            if missing is None or missing[1] not in OPTIONAL:
                raise
            pytest.skip(f"{missing[1]} is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return ModuleOfTests.from_parent(parent, path=module_path)


@pytest.fixture
def accelerator() -> Iterator[str]:
    """The type of an accelerator of torch: CUDA where there is one, else the simulated device."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        yield "cuda"
        return
    from tests.support import simulated

    if (missing := simulated.why_not()) is not None:
        pytest.skip(missing)
    with simulated.available():
        yield simulated.NAME
