"""Hugging Face's Trainer with DeepSpeed's integration, beside OffloadTrainer with the same configuration file.

Losses and norms of gradients are compared step by step, on the CPU and on the simulated accelerator of the tests: if
they differ by more than the roundings of the two, the exit status is 1. The most bytes on that accelerator are told.
There is one rank: on CPUs Accelerate has no more with DeepSpeed. The configuration has the sections that Hugging Face's
documentation shows: an optimizer, a schedule, and sizes, nearly all of them ``"auto"``.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.harness.processes import ContenderError
from bench.harness.recording import Recording
from bench.markdown import table
from bench.parts.trainer_run import ALONE, CPU, DS_2, DS_3, OURS, OURS_3, RESULT, SIMULATED, TORCH, Run, save_model
from bench.record import parser, ratio, row

LOSS, NORM = 1e-6, 1e-5
"""The largest relative differences. Both train in fp32, whose neighbouring numbers differ by 1.2e-7. DeepSpeed sums a
norm in fp32, too, and its Adam rounds in other places; each update passes its differences on to the next."""
PAIRS = ((DS_2, OURS), (DS_3, OURS_3))
CONTENDERS = {CPU: [name for pair in PAIRS for name in pair], SIMULATED: [TORCH, ALONE, DS_2, OURS, DS_3, OURS_3]}
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "learning_rate": 1e-3,
    "max_grad_norm": 0.5,
    "warmup_steps": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
"""The TrainingArguments."""
PEAKS = ("whole run", "after the first update")
_SECONDS = 120
_LOG_LINES = 40
_ROOT = Path(__file__).resolve().parents[2]


def ds_config(stage: int) -> dict[str, Any]:
    section: dict[str, Any] = {
        "stage": stage,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
    }
    if stage == 3:
        sizes = dict.fromkeys(("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto")
        # Of 2.1 million parameters: the documented 1e9 would keep all of them.
        live = dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), 600_000)
        section |= {"offload_param": {"device": "cpu", "pin_memory": True}, **sizes, **live}
    warmup = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    batch = ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu")
    return {
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(warmup, "auto")},
        "zero_optimization": section,
        **dict.fromkeys(batch, "auto"),
    }


def run(contender: str, device: str, folder: Path, settings: dict[str, Any]) -> Run:
    """Run a contender. Raises :class:`ContenderError` with its output if it fails."""
    (folder / RESULT).unlink(missing_ok=True)
    words = json.dumps({"device": device, "arguments": settings})
    command = [sys.executable, "-m", "bench.parts.trainer_run", contender, words]
    paths = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise ContenderError(f"no end in {_SECONDS} s") from None
    if done.returncode:
        raise ContenderError("\n".join((done.stdout + done.stderr).splitlines()[-_LOG_LINES:]))
    return Run(**json.loads((folder / RESULT).read_text()))


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference, NaN if there is one. Raises :class:`ValueError` if the lengths differ."""
    found = [abs(a - b) / abs(b) for a, b in zip(one, other, strict=True)]
    return math.nan if any(map(math.isnan, found)) else max(found)


def compare(device: str, runs: dict[str, Run], recording: Recording) -> Iterable[list[str]]:
    """A line of the table for each pair that ran; its last cell says whether they agree."""
    for theirs, ours in PAIRS:
        if not {theirs, ours} <= runs.keys():
            continue
        loss = apart(runs[ours].losses, runs[theirs].losses)
        norm = apart(runs[ours].norms, runs[theirs].norms)
        for metric, value in (("losses apart", loss), ("norms apart", norm)):
            recording.rows.append(row(ours, metric, "relative", [value], device=device))
        agree = loss <= LOSS and norm <= NORM  # NaN does not
        yield [f"{ours} / {theirs}", device, f"{loss:.1e}", f"{norm:.1e}", "yes" if agree else "NO"]


def main(arguments: list[str] | None = None) -> int:
    options = parser("trainer", (__doc__ or "").partition("\n\n")[0])
    options.add_argument("--steps", type=int, help="updates (default: 8; --quick: 4)")
    args = options.parse_args(arguments)
    settings = {**ARGUMENTS, "max_steps": args.steps or (4 if args.quick else 8)}
    config: dict[str, Any] = {"arguments": settings, "deepspeed": [ds_config(2), ds_config(3)]}
    recording = Recording("trainer", "Hugging Face's Trainer", args.json, config)
    lines: list[list[str]] = []
    held: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        numel = config["params"] = save_model(folder)
        for stage in (2, 3):
            (folder / f"ds_config-{stage}.json").write_text(json.dumps(ds_config(stage)))
        for device, contenders in CONTENDERS.items():
            runs: dict[str, Run] = {}
            for contender in contenders:
                print(f"{contender}, {device}", file=sys.stderr)
                try:
                    runs[contender] = run(contender, device, folder, settings)
                except ContenderError as error:
                    recording.add_missing(f"{contender}, {device}", error)
                    continue
                recording.versions |= runs[contender].versions
                if len(runs[contender].losses) != settings["max_steps"]:
                    raise ValueError(f"{contender}: {len(runs[contender].losses)} losses, of {settings['max_steps']}")
            lines += compare(device, runs, recording)
            recording.keep()
            held |= {contender: of.bytes for contender, of in runs.items() if of.bytes is not None}
    for contender, of_run in held.items():
        for metric, n_bytes in zip(PEAKS, of_run, strict=True):
            recording.rows.append(row(contender, f"most on the device, {metric}", "bytes/parameter", [n_bytes]))
    recording.ratios += [
        ratio(f"device bytes, {metric}: {ours} / {theirs}", [held[ours][i]], [held[theirs][i]])
        for i, metric in enumerate(PEAKS)
        for theirs, ours in PAIRS
        if {theirs, ours} <= held.keys()
    ]
    head = ["relative differences", "device", f"losses, at most {LOSS:g}", f"norms, at most {NORM:g}", "agree"]
    print(*table(head, lines), "", sep="\n")
    print(f"{numel:,} parameters in fp32, the most bytes on the simulated accelerator, a parameter", "", sep="\n")
    rows = [[contender, *(f"{n_bytes:.1f}" for n_bytes in of_run)] for contender, of_run in held.items()]
    print(*table(["", *PEAKS], rows), "", sep="\n")
    status = recording.finish()
    if all(line[-1] == "yes" for line in lines):
        return status
    print("bench.parts.trainer: losses or norms differ by more than roundings", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
