"""Train a byte-level GPT on the standard library's source, with AdamW's states in host memory.

python -m bench.train --frontend torch
python -m bench.train --frontend jax --param-dtype bfloat16 --compare
"""

import argparse
import importlib
import json
import math
import os
import platform
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import numpy as np

from bench.data import Corpus, held_out_batches, load_corpus, training_batch
from bench.presets import PRESETS
from bench.trainer import ITEM_SIZES, OffloadTrainer, Settings, Step, Trainer
from offload_core.errors import OffloadError
from offload_core.host_memory import format_bytes

INTERRUPTED = 130
PROMPT = b"\ndef "
TEMPERATURE = 0.8


def main(arguments: list[str] | None = None) -> int:
    settings, out = parse(arguments)
    try:
        return run(settings, out)
    except OffloadError as error:
        return fail(str(error))
    except KeyboardInterrupt:
        print("\nbench.train: interrupted", file=sys.stderr)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "jax", "optax", "tqdm"):
            raise
        return fail(f"{error.name} is not installed; `make setup` installs what training needs")
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        first_line = str(error).strip().partition("\n")[0]
        return fail(f"out of memory: {first_line}; take a smaller --micro-batch, or --activation-checkpointing")


def fail(message: str) -> int:
    print(f"bench.train: {message}", file=sys.stderr)
    return 1


def is_out_of_memory(error: Exception) -> bool:
    """Each framework has a class of its own for this, or only a message."""
    signs = ("RESOURCE_EXHAUSTED", "out of memory", "can't allocate memory")
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in signs)


# --- command line --------------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> tuple[Settings, Path]:
    def at_least(least: int) -> Callable[[str], int]:
        def integer(text: str) -> int:
            if int(text) < least:
                raise argparse.ArgumentTypeError(f"got {text}, expected at least {least}")
            return int(text)

        return integer

    def number(text: str) -> float:
        if not (math.isfinite(float(text)) and float(text) >= 0):
            raise argparse.ArgumentTypeError(f"got {text}, expected a finite number of at least 0")
        return float(text)

    parser = argparse.ArgumentParser(
        prog="python -m bench.train",
        description="Train a byte-level GPT on the Python standard library's source, AdamW's states in host memory.",
        epilog="What is left out comes from the preset. Ctrl-C ends a run early, evaluation included; "
        "a second one ends it at once.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--frontend", choices=("torch", "jax"), default="torch")
    add("--preset", choices=tuple(PRESETS), default="tiny")
    add("--param-dtype", choices=tuple(ITEM_SIZES), help="of the device parameters")
    add("--stage", type=int, choices=(1, 2, 3), default=2, help="ZeRO stage (default: 2)")
    add("--steps", type=at_least(1), help="optimizer updates")
    add("--micro-batch", type=at_least(1), help="windows a micro-step")
    add("--context", type=at_least(1), help="bytes a window")
    add("--accumulate", type=at_least(1), default=1, help="micro-steps an update (default: 1)")
    add("--clip", type=number, default=1.0, help="bound on the gradient norm, 0 for none (default: 1)")
    add("--lr", type=number, help="peak learning rate; a cosine takes it to a tenth")
    add("--warmup", type=at_least(0), help="updates until the peak")
    add("--seed", type=at_least(0), default=0)
    add("--activation-checkpointing", action=argparse.BooleanOptionalAction)
    add("--device", choices=("cpu", "cuda", "auto"), default="auto")
    add("--compare", action="store_true", help="train with the framework's own AdamW beside it, step by step")
    add("--out", type=Path, help="folder of metrics.jsonl and summary.json (default: a new one in runs/)")
    add("--eval-batches", type=at_least(1), help="held-out micro-batches")
    add("--sample-bytes", type=at_least(0), default=200, help="bytes to generate at the end (default: 200)")
    given = vars(parser.parse_args(arguments))

    preset = PRESETS[given["preset"]]
    of_preset = {name: value for name, value in vars(preset).items() if name != "gpt"}
    chosen = of_preset | {name: value for name, value in given.items() if value is not None}
    out = chosen.pop("out", None)
    chosen["clip"] = chosen["clip"] or None
    gpt = preset.gpt
    if gpt.positions is not None:
        gpt = replace(gpt, positions=max(gpt.positions, chosen["context"]))
    settings = Settings(gpt=gpt, **chosen)
    if settings.compare and settings.param_dtype == "float16":
        parser.error("--compare has no plain loop for float16; expected --param-dtype float32 or bfloat16")
    if out is None:
        out = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{settings.preset}-{settings.frontend}"
    if (out / "metrics.jsonl").exists():
        parser.error(f"--out {out} holds the metrics of another run; name another folder")
    return settings, out


# --- the run -------------------------------------------------------------------------------------------


def run(settings: Settings, out: Path) -> int:
    corpus = load_corpus()
    shortest = min(len(corpus.training), len(corpus.held_out))
    if settings.context >= shortest:
        raise OffloadError(f"--context {settings.context}: the text has {shortest} bytes, expected fewer than that")
    print(
        f"{settings.preset}, {settings.gpt.numel:,} parameters in {settings.param_dtype}, through frontends."
        f"{settings.frontend}\ntext: {len(corpus.training):,} bytes of {corpus.training_files} files to train on, "
        f"{len(corpus.held_out):,} of {corpus.held_out_files} held out",
        flush=True,
    )
    framework = importlib.import_module(f"bench.train_{settings.frontend}")
    offloaded, plain = framework.make_trainers(settings)

    out.mkdir(parents=True, exist_ok=True)
    interrupt = Interrupt()
    with (out / "metrics.jsonl").open("w", buffering=1) as metrics:
        records = train(settings, corpus, offloaded, plain, metrics, interrupt)
    summary = finish(settings, corpus, offloaded, plain, records, interrupt.asked)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(f"\nwritten to {out}")
    return INTERRUPTED if interrupt.asked else 0


class Interrupt:
    """Ctrl-C: the first asks the loop to end after the present step, the second ends the process at once.

    A Python signal handler runs only between bytecodes, and a backward pass is one of them: a thread watches for
    the second.
    """

    asked = False

    def __enter__(self) -> "Interrupt":
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        signal.signal(signal.SIGINT, self._note)
        signal.set_wakeup_fd(self._write_end)
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        if not self.asked:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.set_wakeup_fd(-1)
            os.close(self._write_end)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def _watch(self) -> None:
        """Each signal's number arrives as a byte when the signal does; none is left when the pipe closes."""
        seen = 0
        while byte := os.read(self._read_end, 1):
            seen += byte[0] == signal.SIGINT
            if seen == 2:
                os._exit(INTERRUPTED)
        os.close(self._read_end)


def train(
    settings: Settings,
    corpus: Corpus,
    offloaded: Trainer,
    plain: Trainer | None,
    metrics: TextIO,
    interrupt: Interrupt,
) -> list[dict[str, Any]]:
    """Train to the end or to Ctrl-C; one record a step, as written to `metrics`."""
    from tqdm import tqdm

    records = []
    tokens = settings.accumulate * settings.micro_batch * settings.context
    # A log file gets a line now and then, a terminal a moving bar.
    often = {"mininterval": 0.2} if sys.stderr.isatty() else {"mininterval": 10.0, "ascii": True}
    with interrupt, tqdm(total=settings.steps, unit="step", dynamic_ncols=True, **often) as bar:
        for step in range(settings.steps):
            first = step * settings.accumulate
            batches = [
                training_batch(corpus.training, settings.seed, i, settings.micro_batch, settings.context)
                for i in range(first, first + settings.accumulate)
            ]
            done, seconds = timed(offloaded, batches)
            record = {
                "step": step,
                "loss": finite(done.loss),
                "grad_norm": finite(done.grad_norm),
                "lr": done.lr,
                "tokens": tokens,
                "seconds": seconds,
                "skipped": done.skipped,
            }
            if plain is not None:
                # Step by step, so that what slows the machine for a while slows both.
                other, plain_seconds = timed(plain, batches)
                record |= {"plain_loss": finite(other.loss), "plain_grad_norm": finite(other.grad_norm)}
                record |= {"plain_seconds": plain_seconds}
            records.append(record)
            metrics.write(json.dumps(record) + "\n")
            bar.set_postfix_str(describe(done, tokens / seconds), refresh=False)
            bar.update()
            if interrupt.asked:
                break
    return records


def timed(trainer: Trainer, batches: list[np.ndarray]) -> tuple[Step, float]:
    start = time.perf_counter()
    step = trainer.step(batches)
    return step, time.perf_counter() - start


def describe(step: Step, rate: float) -> str:
    norm = "" if step.grad_norm is None else f", norm {step.grad_norm:.2f}"
    return f"loss {step.loss:.3f}, {rate:,.0f} tokens/s{norm}" + (f", {step.skipped}" if step.skipped else "")


def finite(value: float | None) -> float | None:
    """JSON has no inf and no NaN; why they came is in the record's `skipped`."""
    return value if value is not None and math.isfinite(value) else None


# --- the ending ----------------------------------------------------------------------------------------


def finish(
    settings: Settings,
    corpus: Corpus,
    offloaded: OffloadTrainer,
    plain: Trainer | None,
    records: list[dict[str, Any]],
    interrupted: bool,
) -> dict[str, Any]:
    """Evaluate, sample, and report; returns what summary.json holds."""
    if interrupted:
        print(f"\ninterrupted after {len(records)} of {settings.steps} steps; a short evaluation follows", flush=True)
    eval_batches = min(settings.eval_batches, 8) if interrupted else settings.eval_batches
    sample_bytes = min(settings.sample_bytes, 64) if interrupted else settings.sample_bytes
    batches = held_out_batches(corpus.held_out, eval_batches, settings.micro_batch, settings.context)
    held_out = float(np.mean([offloaded.loss(batch) for batch in batches]))
    seconds = sum(record["seconds"] for record in records)
    rate = median_rate(records, "seconds")
    print(f"\nheld-out loss: {held_out:.4f} nats a byte, after {len(records)} steps in {seconds:.1f} s")
    summary = {
        "settings": asdict(settings),
        "machine": {"platform": platform.platform(), "device": offloaded.device_name},
        "steps": len(records),
        "interrupted": interrupted,
        "seconds": seconds,
        "held_out_loss": finite(held_out),
        "tokens_per_second": rate,
    }

    if plain is None:
        print(f"tokens/s (median step): {rate:,.0f}")
    else:
        plain_held_out = float(np.mean([plain.loss(batch) for batch in batches]))
        plain_rate = median_rate(records, "plain_seconds")
        print(f"{'':12}{'held-out loss':>15}{'tokens/s (median step)':>25}")
        print(f"{'offloaded':12}{held_out:15.6f}{rate:25,.0f}")
        print(f"{'plain':12}{plain_held_out:15.6f}{plain_rate:25,.0f}")
        differing = [r for r in records if r["loss"] != r["plain_loss"]]
        print(f"training losses that differ in any bit: {len(differing)} of {len(records)}")
        summary |= {"plain_held_out_loss": finite(plain_held_out), "plain_tokens_per_second": plain_rate}

    if sample_bytes:
        text = sample(offloaded, settings, sample_bytes)
        print(f"\n--- sample, temperature {TEMPERATURE} ---\n{text}\n---")
        summary["sample"] = text

    return summary | report_memory(settings, offloaded)


def median_rate(records: list[dict[str, Any]], key: str) -> float:
    """Tokens a second in the median step: neither compilation nor a busy neighbour counts."""
    return records[0]["tokens"] / float(np.median([record[key] for record in records]))


def sample(trainer: Trainer, settings: Settings, count: int) -> str:
    """`count` bytes after a prompt, as text."""
    generator = np.random.default_rng(settings.seed)
    text = list(PROMPT)
    for _ in range(count):
        recent = np.array(text[-settings.context :])
        logits = trainer.next_byte_logits(recent).astype(np.float64) / TEMPERATURE
        # The largest logit plus Gumbel noise is a draw from the softmax.
        text.append(int(np.argmax(logits + generator.gumbel(size=logits.size))))
    return "".join(printable(byte) for byte in text).strip("\n")


def printable(byte: int) -> str:
    """A byte as a terminal may show it: an untrained model emits control sequences too."""
    if byte == 0:  # between two files
        return "\n"
    return chr(byte) if 32 <= byte < 127 or byte in b"\n\t" else f"\\x{byte:02x}"


def report_memory(settings: Settings, offloaded: OffloadTrainer) -> dict[str, Any]:
    report = offloaded.memory_report()
    peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak_device = offloaded.peak_device_bytes()
    print(f"\nmemory\n{report}")
    print(
        f"host bytes a parameter: {report.host_bytes / report.numel:.2f}, "
        f"planned {report.planned_host_bytes / report.numel:.2f}"
    )
    both = " (both loops)" if settings.compare else ""
    if peak_device is not None:
        print(f"peak device memory{both}: {format_bytes(peak_device)}")
    print(f"peak resident memory of the process{both}: {format_bytes(peak_rss)}")
    return {
        "numel": report.numel,
        "device_bytes": report.device_bytes,
        "host_bytes": report.host_bytes,
        "planned_host_bytes": report.planned_host_bytes,
        "peak_device_bytes": peak_device,
        "peak_resident_bytes": peak_rss,
    }


if __name__ == "__main__":
    sys.exit(main())
