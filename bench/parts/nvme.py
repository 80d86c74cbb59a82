"""Updates of states on disk: beside the disk's own speed, with parts of the states in memory, and beside DeepSpeed.

An update is the core's, of bf16 parameters in host memory with given gradients: there is no forward and no backward in
it. The disk's own speed is that of fio in the same rounds, which reads and writes as many bytes past the page cache,
the best of io_uring and threads, both ways at once and one after the other. The update alone is that of the same
states in host memory. DeepSpeed and ours train whole steps of a GPT.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench import record
from bench.harness.contenders import Result, measure_all, show
from bench.harness.disk import WAYS, DiskFile
from bench.harness.processes import ContenderError, ProcessGroup
from bench.harness.recording import Recording
from bench.harness.rounds import turns
from bench.harness.working_dtype import working_dtype
from bench.parts.nvme_run import tensor_bytes
from bench.parts.step import MODELS, start
from bench.parts.torch_contenders import (
    DS_3,
    DS_ALL_ON_DISK,
    DS_ON_DISK,
    DS_PIPELINED,
    OURS_3,
    OURS_ALL_ON_DISK,
    OURS_ON_DISK,
    deepspeed_config,
    deepspeed_params_on_disk,
    deepspeed_zero_on_disk,
)
from offload_core.support.processors import available_cpus
from offload_core.support.units import count

STATE_BYTES = 12
"""Bytes of a parameter's states in fp32: the master weight and two moments."""
ON_DISK, IN_MEMORY, EIGHT_BIT = "states on disk", "states in memory", "8-bit states on disk"
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The shares of the states that are on disk."""
LIMIT, HALF, NARROW, ALIKE = 1.15, 0.6, 0.6, 0.05
"""Targets: the step beside the disk or the update, half of the states in memory and 8-bit states beside all in fp32
on disk, and the difference of host memory between models of different sizes."""
BUCKETS, MOST_BUCKET = 32, 1 << 22
"""The least buckets of a model, so that the few in memory are a small part, and the most elements of one: four take 192
MiB. With larger blocks the first update of a step waits longer for its states, and the last write ends later."""
MOST_HOST_BYTES = 2**30
"""The target for the host memory of all-disk states."""
IN_RAM = 10**8
"""The most parameters whose update in memory is measured. For more the time is in proportion."""
SMALLER = 4
"""The second model for the comparison of memory has this part of the parameters."""
MOST_SHARED = 250 * 10**6
"""The most parameters of the comparison of shares, some of which are in memory at the same time."""
TRAINED = {
    "34m": (OURS_3, OURS_ON_DISK, OURS_ALL_ON_DISK, DS_3, DS_ON_DISK, DS_PIPELINED, DS_ALL_ON_DISK),
    "319m": (OURS_ON_DISK, DS_ON_DISK, DS_PIPELINED),
}
"""The contenders by model: those with states in memory do not fit in 24 GB beside the others."""
PAIRS = ((DS_ON_DISK, OURS_ON_DISK), (DS_PIPELINED, OURS_ON_DISK), (DS_ALL_ON_DISK, OURS_ALL_ON_DISK))
GROUPS = 16
"""The buckets of the GPT, and DeepSpeed's groups of elements that it updates at a time."""
WARM_UP = 2
"""Steps before the first that counts: the first reads zeros that no disk has, and writes new extents."""
# Freed blocks go back at once, so that memory is what is in use (bench/parts/memory.py).
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}

Runs = dict[str, Callable[[], list[dict[str, float]]]]
"""Contenders by name: each returns the measurements of its steps in one round."""


class Contender:
    """A process that updates parameters.

    Args:
        fields: of ``OffloadConfig``.
        counted: the parameters that times are in proportion to; None: those that it has.
    """

    def __init__(self, numel: int, fields: Mapping[str, Any], counted: int | None = None) -> None:
        self.numel, self.scale = numel, (counted or numel) / numel
        settings = {"numel": numel, "fields": dict(fields)}
        threads = fields["num_threads"]
        self._group = ProcessGroup(
            "bench.parts.nvme_run", [json.dumps(settings)], ranks=1, threads=threads, malloc=_MALLOC
        )
        self._group.answers()
        self._before = self._group.resident() + tensor_bytes(numel)
        self._group.ask(steps=WARM_UP)
        self.peak_of_building = self._group.peak() - self._before
        self._group.forget_peak()

    def steps(self, n: int) -> list[dict[str, float]]:
        """Return the ms and bytes of so many steps, without those of the one before them, whose end they wait for."""
        (answer,) = self._group.ask(steps=n + 1)
        return [{**step, "total": step["total"] * self.scale} for step in answer["steps"][1:]]

    @property
    def host_bytes(self) -> int:
        """The peak of the memory for states in all steps so far."""
        return self._group.peak() - self._before

    def close(self) -> None:
        self._group.close()


class Samples(dict[str, list[dict[str, float]]]):
    """The counted steps by contender, one mean a round."""

    def of(self, name: str, what: str = "total") -> list[float]:
        return [step[what] for step in self[name]]

    def median(self, name: str) -> float:
        return statistics.median(self.of(name))

    def add(self, of_round: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
        """Take a round: for each contender its steps, of which the mean is kept."""
        for name, steps in of_round.items():
            mean = {what: statistics.mean(step[what] for step in steps) for what in steps[0]}
            self.setdefault(name, []).append(mean)


def limit(samples: Samples, ways: Iterable[str]) -> tuple[str, list[float]]:
    """Return the best way of fio, by its median, and the slower of it and the update in memory in each round."""
    best = min(ways, key=samples.median)
    return best, [max(pair) for pair in zip(samples.of(best), samples.of(IN_MEMORY), strict=True)]


def bucket_numel(numel: int) -> int:
    """Return the elements of a bucket."""
    return max(min(numel // BUCKETS, MOST_BUCKET), 1)


class Bench:
    """The measurements of one run, in the order in which they are made.

    Args:
        folder: on the disk that is measured.
    """

    def __init__(self, args: argparse.Namespace, folder: Path, recording: Recording) -> None:
        self.args, self.folder, self.recording = args, folder, recording

    def fields(self, numel: int, share: float, **others: Any) -> dict[str, Any]:
        """Return the fields of a configuration with this share of fp32 states on disk."""
        fields = {"num_threads": self.args.threads, "reduce_bucket_size": bucket_numel(numel), **others}
        if share:
            in_memory = round((1 - share) * STATE_BYTES * numel)
            fields |= {"offload_optimizer": "nvme", "nvme_path": str(self.folder), "nvme_host_bytes": in_memory}
        return fields

    def rounds(self, runs: Runs) -> Samples:
        samples = Samples()
        for i, of_round in enumerate(turns(runs, self.args.rounds), 1):
            samples.add(of_round)
            times = (f"{name} {steps[-1]['total']:.0f} ms" for name, steps in samples.items())
            print(f"round {i}: {', '.join(times)}", file=sys.stderr)
        return samples

    def add_rows(self, samples: Samples, numel: int, **extra: Any) -> None:
        for name in samples:
            about = {"params": numel, "threads": self.args.threads, **extra}
            self.recording.rows.append(record.row(name, "update", "ms", samples.of(name), **about))
            for what in ("read", "written"):
                if any(step.get(what) for step in samples[name]):
                    self.recording.rows.append(record.row(name, what, "bytes/param", samples.of(name, what), **about))

    # --- beside the disk ---------------------------------------------------------------------------------

    def beside_disk(self) -> None:
        """A step of all-disk states, beside fio with as many bytes and beside the update in memory; host memory."""
        numel = self.args.numel
        few = min(numel, IN_RAM)
        known: list[Any] = []
        try:
            known.append(disk := Contender(numel, self.fields(numel, 1.0)))
            known.append(memory := Contender(few, self.fields(few, 0.0), numel))
            runs: Runs = {
                ON_DISK: partial(disk.steps, self.args.steps),
                IN_MEMORY: partial(memory.steps, self.args.steps),
            }
            try:
                known.append(file := DiskFile(self.folder, STATE_BYTES * numel))
                runs |= {way.name: partial(file.steps, way, self.args.steps) for way in WAYS}
            except ContenderError as error:
                self.recording.add_missing("fio", error)
            samples = self.rounds(runs)
            host_bytes, of_building = disk.host_bytes, disk.peak_of_building
        finally:
            for each in known:
                each.close()
        self.add_rows(samples, numel)
        ways = [way.name for way in WAYS if way.name in samples]
        size = f"{numel / 1e6:,.0f} M"
        if ways:
            best, slower = limit(samples, ways)
            why = f"ms: {ON_DISK} {samples.median(ON_DISK):.0f}, {best} {samples.median(best):.0f}, "
            why += f"{IN_MEMORY} {samples.median(IN_MEMORY):.0f}"
            name = f"{size}, {ON_DISK} / the slower of fio's best and the update in memory"
            self.recording.add_ratios([record.ratio(name, samples.of(ON_DISK), slower, target=LIMIT)], why)
            self.recording.notes.append(f"the best of fio: {best}, {samples.median(best):.0f} ms for {size}")
        name = f"{size}, host memory of states on disk / 1 GiB"
        self.recording.add_ratios([record.ratio(name, [host_bytes], [MOST_HOST_BYTES], target=1.0)], "")
        self.add_memory(numel, host_bytes, of_building)
        self.beside_smaller(numel, host_bytes)
        self.recording.keep()

    def beside_smaller(self, numel: int, host_bytes: int) -> None:
        """Host memory of a model with a part of the parameters, in buckets of the same size."""
        few = max(numel // SMALLER, 1)
        smaller = Contender(few, {**self.fields(few, 1.0), "reduce_bucket_size": bucket_numel(numel)})
        try:
            smaller.steps(self.args.steps)
            known = smaller.host_bytes
            self.add_memory(few, known, smaller.peak_of_building)
        finally:
            smaller.close()
        name = f"host memory of states on disk: {numel / 1e6:,.0f} M / {few / 1e6:,.0f} M parameters"
        why = f"MiB: {host_bytes / 2**20:.0f} and {known / 2**20:.0f}"
        self.recording.add_ratios([record.ratio(name, [host_bytes], [known], target=1 + ALIKE)], why)

    def add_memory(self, numel: int, host_bytes: int, of_building: int) -> None:
        for what, value in (("host memory of states", host_bytes), ("the same while they are made", of_building)):
            self.recording.rows.append(record.row(ON_DISK, what, "MiB", [value / 2**20], params=numel))

    # --- shares ------------------------------------------------------------------------------------------

    def shares(self) -> None:
        """Steps with each share of the states on disk, and with 8-bit states."""
        numel = min(self.args.numel, MOST_SHARED)
        known: dict[str, Contender] = {}
        shares = {f"{share:.0%} on disk": share for share in SHARES}
        try:
            for name, share in shares.items():
                known[name] = Contender(numel, self.fields(numel, share))
            known[EIGHT_BIT] = Contender(numel, self.fields(numel, 1.0, state_format="8bit"))
            samples = self.rounds({name: partial(each.steps, self.args.steps) for name, each in known.items()})
        finally:
            for each in known.values():
                each.close()
        for name in samples:
            extra = {"share": shares[name]} if name in shares else {}
            self.add_rows(Samples({name: samples[name]}), numel, **extra)
        whole = samples.of("100% on disk")
        why = f"ms: {', '.join(f'{name} {samples.median(name):.0f}' for name in samples)}"
        size = f"{numel / 1e6:,.0f} M"
        self.recording.add_ratios(
            [
                record.ratio(
                    f"{size}, half of the states in memory / none", samples.of("50% on disk"), whole, target=HALF
                ),
                record.ratio(f"{size}, 8-bit states / fp32, on disk", samples.of(EIGHT_BIT), whole, target=NARROW),
            ],
            why,
        )
        self.recording.keep()

    # --- beside DeepSpeed --------------------------------------------------------------------------------

    def beside_deepspeed(self, param_dtype: str) -> None:
        """Whole steps of a GPT, stage 3 with states on disk and in memory, beside DeepSpeed's."""
        gpt = MODELS[self.args.model]
        settings = {"threads": self.args.threads, "micro_batch": 1, "context": 64, "gpt": asdict(gpt)}
        settings |= {"param_dtype": param_dtype, "nvme_path": str(self.folder), "bucket": gpt.numel // GROUPS}
        groups = {name: start(settings, 1, name, _MALLOC) for name in TRAINED[self.args.model]}
        found, failures, versions = measure_all(groups, rounds=self.args.rounds, steps=self.args.steps, warm_up=WARM_UP)
        self.recording.versions |= versions
        for name, error in failures.items():
            self.recording.add_missing(name, error)
        results = {name: result for name, [result] in found.items()}
        for name, result in results.items():
            self.recording.rows += result.rows(name, params=gpt.numel, threads=self.args.threads)
        show(results)
        self.recording.add_ratios(of_peers(results, f"{gpt.numel / 1e6:.0f} M"), "")


def of_peers(results: Mapping[str, Result], size: str) -> list[dict[str, Any]]:
    """Return DeepSpeed's time divided by ours, of the whole step and without forward, and the same of memory."""
    known = []
    for theirs, ours in PAIRS:
        if not {theirs, ours} <= results.keys():
            continue
        sides = results[theirs], results[ours]
        peaks = [[max(each.peak for each in side.measurements)] for side in sides]
        samples = {"whole step": [side.samples("total") for side in sides]}
        samples |= {"backward + step": [side.samples("backward", "step") for side in sides], "peak memory": peaks}
        known += [
            record.ratio(f"{size}, {what}: {theirs} / {ours}", *of_both, better="higher")
            for what, of_both in samples.items()
        ]
    return known


def needed(numel: int) -> int:
    """Return the bytes of the disk that a run needs at a time: the states and fio's file, or the shares'."""
    shares = (sum(SHARES) + 0.5) * min(numel, MOST_SHARED)
    return round(STATE_BYTES * max(2 * numel, shares)) + 2**30


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = record.parser("nvme", (__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--numel", type=count, help="parameters (default: 200 M; --quick: 20 M)")
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: a temporary folder)")
    parser.add_argument("--threads", type=count, default=available_cpus())
    parser.add_argument("--rounds", type=count, help="(default: 5; --quick: 2)")
    parser.add_argument("--steps", type=count, default=2, help="counted in each round (default: 2)")
    parser.add_argument(
        "--model", choices=MODELS, help="of the comparison with DeepSpeed (default: 34m)", default="34m"
    )
    parser.add_argument(
        "--only", nargs="+", choices=("disk", "shares", "deepspeed"), default=("disk", "shares", "deepspeed")
    )
    args = parser.parse_args(arguments)
    args.numel = args.numel or (2 * 10**7 if args.quick else 2 * 10**8)
    args.rounds = args.rounds or (2 if args.quick else 5)
    free = shutil.disk_usage(args.folder or tempfile.gettempdir()).free
    if free < needed(args.numel):
        parser.error(
            f"{args.folder or tempfile.gettempdir()} has {free:,} free bytes, expected {needed(args.numel):,} for "
            f"{args.numel:,} parameters: --folder on another disk, or a lower --numel"
        )
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    config: dict[str, Any] = {"params": args.numel, "threads": args.threads, "rounds": args.rounds, "steps": args.steps}
    config |= {"bucket": bucket_numel(args.numel), "model": args.model, "parts": list(args.only), "malloc": _MALLOC}
    gpt = MODELS[args.model]
    for name, pipelined in ((DS_ON_DISK, False), (DS_PIPELINED, True)):
        zero = deepspeed_zero_on_disk("FOLDER", gpt.numel // GROUPS, pipelined=pipelined)
        config[name] = deepspeed_config(1, zero)
    config["parameters of DeepSpeed on disk"] = deepspeed_params_on_disk("FOLDER", gpt.vocabulary * gpt.width)
    recording = Recording("nvme", "States on disk", args.json, config)
    recording.versions |= record.versions("numpy", "torch", "deepspeed")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        bench = Bench(args, Path(name), recording)
        if "disk" in args.only:
            bench.beside_disk()
        if "shares" in args.only:
            bench.shares()
        if "deepspeed" in args.only:
            dtype = working_dtype(args.threads)
            recording.notes += dtype.notes
            bench.beside_deepspeed(dtype.name)
    for row in recording.rows:
        about = f"{row['params']:>14,}" if "params" in row else ""
        print(f"{row['name']:44} {row['metric']:32}{about} {row['p50']:10.2f} {row['unit']}")
    return recording.finish()


if __name__ == "__main__":
    sys.exit(main())
