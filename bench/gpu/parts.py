"""The measurements of each part, the most important first."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, NamedTuple

import numpy as np

from bench import record
from bench.gpu.results import ON_DEVICE, ON_HOST, TRAINED
from bench.gpu.session import Read, Session
from bench.gpu.sizes import Sizes
from bench.harness.processes import KEEP_FREED_MEMORY, ProcessGroup
from bench.parts import jax_step
from bench.parts import torch_contenders as contenders
from bench.parts.torch_contenders import CONTENDERS
from offload_core.commands.model_shapes import GPTConfig
from offload_core.support.processors import available_cpus

BESIDE = (
    contenders.FUSED,
    contenders.OURS,
    contenders.LATE,
    contenders.ON_HOST,
    contenders.DS_2,
    contenders.FSDP2,
    contenders.TORCHAO,
    contenders.SERIAL,
    contenders.IN_BACKWARD,
    contenders.LATE_ON_HOST,
)
LARGEST = (contenders.OURS, contenders.ON_HOST, contenders.FUSED)
OF_JAX = (jax_step.OURS, *jax_step.OTHERS, contenders.LATE)
ACCUMULATED = (contenders.ACCUMULATE_ON_HOST, contenders.ON_HOST, contenders.DS_ON_HOST, contenders.FUSED)
SHARES = {contenders.OURS: 0.0, contenders.QUARTER_THERE: 0.25, contenders.HALF_THERE: 0.5, contenders.ALL_THERE: 1.0}
"""The shares of the states that are on the device."""
TIERS = (contenders.FUSED, *SHARES)
_ON_HOST, _THERE = "host", "device"
CURVE = {
    contenders.FUSED: (_THERE, contenders.CLIPPING),
    contenders.OURS: (_ON_HOST, contenders.CLIPPING),
    contenders.LATE: (_ON_HOST, contenders.CLIPPING),
    contenders.ACCUMULATE: (_ON_HOST, contenders.CLIPPING),
    contenders.SERIAL: (_ON_HOST, contenders.CLIPPING),
    contenders.FSDP2: (_ON_HOST, contenders.CLIPPING),
    contenders.DS_2: (_ON_HOST, contenders.CLIPPING),
    contenders.TORCHAO: (_ON_HOST, None),
}
"""The contenders of the curve, the memory that their states are in, and the bound to which they clip the norm. torchao
cannot clip."""
THREE_STEPS = (1, 1)
SHARDED = "JAX on one device and on a mesh of all"
PHASES = "a model leaves the device and comes back"
_OUTCOME = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.MULTILINE)
_OF_A_WORKER = re.compile(r"^\[gw\d+\] \[ *\d+%\] ([A-Z]+) (\S+::.+?) *$", re.MULTILINE)
"""A line of pytest-xdist, which names the outcome first."""


# --- (a) ---------------------------------------------------------------------------------------------------------


def tests(session: Session) -> None:
    session.command("machine", ["offload_core", "info"], 30, partial(_words, "machine"))
    for name, arguments in session.sizes.tests.items():
        # A warning of this machine's libraries is no failure of these tests.
        options = ["-v", "--color=no", "-p", "no:cacheprovider", "-W", "default", "-o", "timeout=100"]
        session.command(name, ["pytest", *options, *arguments], 200, partial(outcomes_of, name))
    device = session.accelerator["type"]
    for frontend in ("torch", "jax"):
        name = f"training with {frontend}"
        where = [] if frontend == "jax" else ["--device", device]  # in JAX: its default
        with TemporaryDirectory() as out:
            arguments = ["bench.train", "--frontend", frontend, *where, *session.sizes.train, "--out", f"{out}/run"]
            session.command(name, arguments, 90, partial(_words, name))


def outcomes_of(name: str, words: str, why: str, seconds: float) -> Read:
    """Return the outcomes of pytest, in one process or in several, also of a run that was cut off."""
    found = dict(_OUTCOME.findall(_OF_A_WORKER.sub(r"\2 \1", words)))
    of = {kind: [test for test, outcome in found.items() if outcome in kind] for kind in ("PASSED", "FAILED ERROR")}
    skipped = len(found) - sum(map(len, of.values()))
    counts = {"passed": len(of["PASSED"]), "failed": len(of["FAILED ERROR"]), "skipped": skipped}
    rows = [record.row(name, metric, "tests", [n]) for metric, n in counts.items()]
    rows.append(record.row(name, "time", "s", [seconds]))
    if not why and not counts["passed"]:
        why = "no test passed: all were skipped"
    return rows, [record.missing(name, why)] if why else [], [f"{name}: {test} failed" for test in of["FAILED ERROR"]]


def _words(name: str, words: str, why: str, seconds: float) -> Read:
    last = next(reversed(words.strip().splitlines()), "")
    missing = [record.missing(name, f"{why}: {last}")] if why else []
    return [record.row(name, "time", "s", [seconds])], missing, []


# --- (b) ---------------------------------------------------------------------------------------------------------


def beside(session: Session) -> None:
    _all_host_memory(session)
    copied = str(session.sizes.copied_bytes)
    session.command("copies", ["bench.gpu.copies", copied], 60, partial(_samples, "bandwidth", "GB/s"))
    _steps_of(session, BESIDE)


def _steps_of(session: Session, names: Sequence[str]) -> None:
    """Measure round after round, every other one backwards, one process at a time: two may not fit the host."""
    sizes, counts = session.sizes, (session.sizes.warm_up, session.sizes.steps)
    for number in range(1, sizes.rounds + 1):
        for name in names if number % 2 else reversed(names):
            workloads = {
                f"{name}, {windows} windows, round {number}": {"micro_batch": windows} for windows in sizes.windows
            }
            settings = _settings(session, sizes.gpt, sizes.windows[0])
            # DeepSpeed compiles its Adam first.
            fits = partial(does_not_fit, name)
            session.steps(name, _torch(name, settings), workloads, 150, settings, counts, fits, round=number)


def _all_host_memory(session: Session) -> None:
    """Write to all of the host's memory, once after each start of the machine."""
    if not session.rehearsal:
        start = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        read = partial(_samples, "host memory", "GB")
        session.command(f"host memory, start {start}", ["bench.gpu.host_memory"], 90, read)


def _samples(metric: str, unit: str, words: str, why: str, seconds: float) -> Read:
    """Return rows from the output of a module that prints one or several numbers for each name."""
    if why:
        return _words(metric, words, why, seconds)
    known = json.loads(words.strip().splitlines()[-1])
    return record.rows(metric, unit, {name: np.atleast_1d(value).tolist() for name, value in known.items()}), [], []


def _settings(session: Session, gpt: GPTConfig, windows: int) -> dict[str, Any]:
    return {
        "device": session.accelerator["type"],
        "gpt": asdict(gpt),
        "micro_batch": windows,
        "context": session.sizes.context,
        "threads": available_cpus(),
        "activation_checkpointing": True,
        "steps": session.sizes.steps,
        "malloc": KEEP_FREED_MEMORY,
    }


def _torch(name: str, settings: Mapping[str, Any]) -> Callable[[], ProcessGroup]:
    library, threads = CONTENDERS[name].library, settings["threads"]
    module, words = "bench.parts.torch_contenders", [name, json.dumps(settings)]
    # What looks for a GPU must not start CUDA in the process that the contenders are forks of.
    environment = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    return partial(ProcessGroup, module, words, ranks=1, threads=threads, library=library, environment=environment)


# --- (c) ---------------------------------------------------------------------------------------------------------


def largest(session: Session) -> None:
    """Find the largest model of the ladder that trains under the cap."""
    _all_host_memory(session)
    names = list(session.sizes.ladder)
    for name in LARGEST:
        trained, too_large = -1, len(names)
        at = names.index(session.sizes.first)
        while too_large - trained > 1:
            if _trains(session, name, names[at]):
                trained = at
            else:
                too_large = at
            at = (trained + too_large) // 2


def _trains(session: Session, name: str, size: str) -> bool:
    gpt, measurement = session.sizes.ladder[size], f"{name}, {size}"
    settings = {**_settings(session, gpt, 1), "device_bytes": session.sizes.device_bytes}
    trial = {"name": name, "size": size, "parameters": gpt.numel}
    session.steps(
        name, _torch(name, settings), {measurement: {"micro_batch": 1}}, 200, settings, THREE_STEPS,
        partial(does_not_fit, measurement), about={"trial": trial}, size=size,
    )  # fmt: skip
    known = session.results.done(session.part, measurement)
    return known is not None and known["outcome"] == TRAINED


def does_not_fit(measurement: str, why: str) -> dict[str, Any] | None:
    """Return the result if the error says that the model does not fit; None: it is a failure."""
    of = next((outcome for outcome, words in _FULL.items() if re.search(words, why)), None)
    return of and {"outcome": of, "notes": [f"{measurement}: does not fit the {of}: {why}"]}


_FULL = {
    ON_HOST: r"HostMemoryError|DefaultCPUAllocator|Cannot allocate memory",
    ON_DEVICE: r"(?i)DeviceMemoryError|out ?of ?memory",
}


# --- (d) ---------------------------------------------------------------------------------------------------------


def in_jax(session: Session) -> None:
    with TemporaryDirectory() as out:
        path = Path(out) / "jax_mesh.jsonl"
        where = "--quick" if session.rehearsal else "--accelerator"
        arguments = ["bench.parts.jax_mesh", where, "--json", str(path)]
        session.command(SHARDED, arguments, 150, partial(_recorded, SHARDED, path))
    sizes, counts = session.sizes, (session.sizes.warm_up, session.sizes.steps)
    compiled = os.environ.get("JAX_COMPILATION_CACHE_DIR", f"{gettempdir()}/offload-core-xla-{os.getuid()}")
    environment = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "NPROC": str(available_cpus()),
        "JAX_COMPILATION_CACHE_DIR": compiled,  # for the second round
    }
    windows = sizes.windows[0]
    for number in range(1, sizes.rounds + 1):
        for size, gpt in sizes.jax_gpts.items():
            for name in OF_JAX if number % 2 else reversed(OF_JAX):
                settings = {
                    **_settings(session, gpt, windows), "init_dtype": "bfloat16", "accelerator": not session.rehearsal
                }  # fmt: skip
                start = partial(
                    ProcessGroup, "bench.parts.jax_contenders", [name, json.dumps(settings)],
                    ranks=1, threads=available_cpus(), environment=environment,
                )  # fmt: skip
                workloads = {f"{name}, {size}, round {number}": {"micro_batch": windows}}
                fits = partial(does_not_fit, f"{name}, {size}")
                session.steps(name, start, workloads, 150, settings, counts, fits, round=number, size=size)


def _recorded(name: str, path: Path, words: str, why: str, seconds: float) -> Read:
    """Return the record of a part of ``bench.parts``, with its ratios as rows."""
    if not path.exists():
        return _words(name, words, why or "it wrote no record", seconds)
    known = json.loads(path.read_text().splitlines()[-1])
    ratios = [record.row(of["name"], "ratio", "", [of["p20"], of["p50"], of["p80"]]) for of in known["ratios"]]
    return [*ratios, *known["rows"]], known["missing"], known["notes"]


# --- (e) ---------------------------------------------------------------------------------------------------------


def in_phases(session: Session) -> None:
    with TemporaryDirectory() as out:
        path = Path(out) / "phases.jsonl"
        arguments = ["bench.parts.phases", "--json", str(path)]
        arguments += ["--quick"] if session.rehearsal else ["--model", "1.5b"]
        session.command(PHASES, arguments, 480, partial(_recorded, PHASES, path))


# --- (f) ---------------------------------------------------------------------------------------------------------


def accumulated(session: Session) -> None:
    """Measure steps of several micro-batches: ours block by block and in a loop, DeepSpeed's, and on the device.

    The model is the first one that accumulate() trains. The others that it does not fit say so.
    """
    sizes = session.sizes
    _all_host_memory(session)
    ours = ACCUMULATED[0]
    for size, gpt in sizes.accumulated.items():
        _accumulate(session, ours, size, gpt)
        known = session.results.done(session.part, _step_of(ours, size, sizes.accumulated_windows[0], sizes))
        if known is not None and known["outcome"] == TRAINED:
            for name in ACCUMULATED[1:]:
                _accumulate(session, name, size, gpt)
            return


def _accumulate(session: Session, name: str, size: str, gpt: GPTConfig) -> None:
    sizes = session.sizes
    settings = {
        **_settings(session, gpt, sizes.windows_of_micro_batch),
        "windows": sizes.windows_of_micro_batch,
        "activation_checkpointing": name != contenders.ACCUMULATE_ON_HOST,  # it runs blocks again by itself
        "host_activation_memory": sizes.host_activation_memory,
        "wide_sums": True,
    }
    workloads = {_step_of(name, size, n, sizes): {"micro_batch": n} for n in sizes.accumulated_windows}
    fits = partial(does_not_fit, f"{name}, {size}")
    session.steps(name, _torch(name, settings), workloads, 480, settings, THREE_STEPS, fits, size=size)


def _step_of(name: str, size: str, windows: int, sizes: Sizes) -> str:
    """Return the measurement's name."""
    return f"{name}, {size}, {windows * sizes.context:,} tokens"


# --- (g) ---------------------------------------------------------------------------------------------------------


def tiers(session: Session) -> None:
    """Measure steps with shares of the states on the device, beside AdamW there."""
    _all_host_memory(session)
    _steps_of(session, TIERS)


# --- (h) ---------------------------------------------------------------------------------------------------------


def curve(session: Session) -> None:
    """Measure steps of few and of many tokens in micro-batches of one size, beside the other libraries."""
    sizes = session.sizes
    _all_host_memory(session)
    for name, (states, clipping) in CURVE.items():
        settings = {
            **_settings(session, sizes.gpt, sizes.windows_of_micro_batch),
            "windows": sizes.windows_of_micro_batch,
            "activation_checkpointing": name != contenders.ACCUMULATE,  # it runs blocks again by itself
            "host_activation_memory": sizes.host_activation_memory,
            "layerwise": True,
            "wide_sums": True,
        }
        kept = f"states on the {states}, {'not clipped' if clipping is None else f'clipped to {clipping:g}'}"
        workloads = {
            f"{name}, {kept}, {n * sizes.context:,} tokens": {"micro_batch": n} for n in sizes.accumulated_windows
        }
        fits = partial(does_not_fit, f"{name}, {kept}")
        session.steps(
            name, _torch(name, settings), workloads, 480, settings, THREE_STEPS, fits, states=states, clipping=clipping
        )


class Part(NamedTuple):
    bench: str
    title: str
    run: Callable[[Session], None]


PARTS = {
    "a": Part("gpu_tests", "On an accelerator: tests and training", tests),
    "b": Part("gpu_step", "On an accelerator: training steps", beside),
    "c": Part("gpu_largest", "On an accelerator: the largest model under a cap", largest),
    "d": Part("gpu_jax", "On an accelerator: training steps in JAX", in_jax),
    "e": Part("gpu_phases", "On an accelerator: a model leaves the device and comes back", in_phases),
    "f": Part("gpu_accumulate", "On an accelerator: micro-batches block by block", accumulated),
    "g": Part("gpu_tiers", "On an accelerator: a share of the states there", tiers),
    "h": Part("gpu_curve", "On an accelerator: steps of few and of many tokens", curve),
}
