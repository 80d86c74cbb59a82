"""Train a GPT on bytes, those of Python's own source files, with the optimizer's states in host memory.

examples:
  python -m bench.train --frontend jax --param-dtype bfloat16 --compare
  python -m bench.train --out runs/a --save-every 100
  python -m bench.train --out runs/b --resume runs/a/checkpoints
  python -m bench.train --frontend jax --devices 4
  python -m bench.train --device cuda --device-states-bytes 0.5
  torchrun --nproc-per-node 2 -m bench.train --stage 2
  torchrun --nproc-per-node 2 -m bench.train --stage 3 --offload-param cpu --init --preset gpt2-124m

The preset says what is not given. Ctrl-C ends a run early, evaluation included; a second one ends it at once.

Ranks are the processes that torchrun, srun or mpirun start, or that have RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT set; in JAX each process has --devices of them. Each rank
draws its own micro-batches: an update sees ranks x accumulate x micro-batch windows.
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
from contextlib import ExitStack, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np

from bench.train.data import Corpus, held_out_batches, load_corpus, training_batch
from bench.train.picture import curve
from bench.train.presets import OPTIMIZERS, PRESETS
from bench.train.ranks import Ranks
from bench.train.trainer import OffloadTrainer, Settings, Step, Trainer
from offload_core.config.state_formats import SHORT_NAMES
from offload_core.dtypes import BY_NAME
from offload_core.errors import CollectiveError, ConfigError, OffloadError
from offload_core.memory.host_memory import format_bytes
from offload_core.memory.plan import format_table
from offload_core.step_log import JsonLines, ProgressBar, StepLog, TensorBoard, Writer
from offload_core.support.processors import default_threads
from offload_core.support.units import bytes_or_share

INTERRUPTED = 130
PROMPT = b"\ndef "
TEMPERATURE = 0.8
BYTES_WITHOUT_OFFLOAD = 16
"""Bytes a parameter: fp32 and its gradient, or 16 bits, its gradient and an fp32 master; and two fp32 moments."""
ALL = sys.maxsize
"""The number of steps that stands for all steps of a run."""
TRACED_STEP = 3
"""The step that a trace records, counted from 0: by then all is compiled, and the order of gradients is known."""
PATIENCE = 5.0
"""Seconds in which the launcher may end a rank before it prints an error that another rank has most likely printed."""


def main(arguments: list[str] | None = None) -> int:
    try:
        launched = Ranks.launched()
    except ConfigError as error:  # it is not known yet which rank prints errors
        print(f"bench.train: {error}", file=sys.stderr)
        return 1
    with ExitStack() as at_end:  # other ranks learn of an error by losing this one: after it has been said
        if launched.rank > 0:
            at_end.enter_context(redirect_stdout(at_end.enter_context(open(os.devnull, "w"))))
        settings, files, saving = parse(arguments)
        try:
            return run(settings, files, saving, at_end)
        except CollectiveError as error:
            return fail(str(error), echo=True)
        except OffloadError as error:
            return fail(str(error))
        except KeyboardInterrupt:
            if launched.rank == 0:
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


def fail(message: str, echo: bool = False) -> int:
    """Print an error; an `echo` follows from an error of another rank."""
    leave_the_word_to_others(echo)
    rank = Ranks.launched().rank
    print(f"bench.train{f' (rank {rank})' if rank else ''}: {message}", file=sys.stderr)
    return 1


def leave_the_word_to_others(echo: bool = False) -> None:
    """Leave the error to rank 0: most errors are the same on all ranks. Rank 0 prints it and ends, and the launcher
    then ends the others."""
    launched = Ranks.launched()
    if launched.world_size > 1 and (echo or launched.rank > 0):
        time.sleep(PATIENCE)


def is_out_of_memory(error: Exception) -> bool:
    """True if an error means too little memory. Each framework has its own class for this, or only a message."""
    signs = ("RESOURCE_EXHAUSTED", "out of memory", "can't allocate memory")
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in signs)


# --- command line --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Files:
    """The files that a run reads, and the paths that it writes."""

    text: Path | None
    out: Path
    log: Path
    tensorboard: Path | None
    trace: Path | None
    checkpoints: Path


@dataclass(frozen=True)
class Saving:
    """The steps at which a run saves, and the checkpoint from which it continues."""

    every: int | None
    """Updates from one checkpoint to the next, the last of which is at the end."""
    keep: int
    resume: Path | None


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        leave_the_word_to_others()
        super().error(message)


def parse(arguments: list[str] | None) -> tuple[Settings, Files, Saving]:
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

    def room_for_states(text: str) -> int | float:
        if isinstance(room := bytes_or_share(text), str):
            raise argparse.ArgumentTypeError("got 'auto', expected a size or a share: activations are not known here")
        return room

    parser = Parser(
        prog="python -m bench.train",
        usage="%(prog)s [options]",
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=32),
        description=(__doc__ or "").partition("\n\n")[0],
        epilog=(__doc__ or "").partition("\n\n")[2],
        allow_abbrev=False,
    )
    add = parser.add_argument_group("what is trained").add_argument
    add("--frontend", choices=("torch", "jax"), default="torch", help="(default: torch)")
    add("--preset", choices=tuple(PRESETS), default="tiny", help="the model, and how it is trained (default: tiny)")
    add(
        "--text",
        type=Path,
        metavar="PATH",
        help="train on this file, or on the *.py, *.txt and *.md files of this folder",
    )
    add("--param-dtype", choices=tuple(BY_NAME), help="of the device parameters")
    add("--steps", type=at_least(1), metavar="N", help="optimizer updates (default: the preset's, tiny: 600)")
    add("--micro-batch", type=at_least(1), metavar="N", help="windows a micro-step and rank")
    add("--context", type=at_least(1), metavar="N", help="bytes a window")
    add("--accumulate", type=at_least(1), metavar="N", default=1, help="micro-steps an update (default: 1)")
    add("--layerwise", action="store_true", help="the micro-batches of an update pass block by block (torch)")
    add("--clip", type=number, metavar="X", default=1.0, help="bound on the gradient norm, 0 for none (default: 1)")
    add("--optimizer", choices=tuple(OPTIMIZERS), default="adamw", help="the update rule (default: adamw)")
    add("--lr", type=number, metavar="X", help="peak learning rate; a cosine takes it to a tenth")
    add("--warmup", type=at_least(0), metavar="N", help="updates until the peak")
    add("--seed", type=at_least(0), metavar="N", default=0, help="of the model and of the windows (default: 0)")
    add(
        "--activation-checkpointing",
        action=argparse.BooleanOptionalAction,
        help="compute activations again in backward, to save memory",
    )
    add(
        "--resume",
        type=Path,
        metavar="PATH",
        help="go on from this checkpoint, or the latest of this folder; the ranks, the stage and the front end may "
        "be others, as long as ranks x accumulate are as many",
    )
    add = parser.add_argument_group("where and how").add_argument
    add(
        "--device",
        metavar="NAME",
        default="auto",
        help="cpu, or an accelerator as the framework names it, such as cuda or xpu (default: the one that it sees, or "
        "cpu)",
    )
    add(
        "--devices",
        type=at_least(1),
        metavar="N",
        default=1,
        help="of each JAX process, a rank each; CPUs are divided (default: 1)",
    )
    add("--stage", type=int, choices=(1, 2, 3), default=2, help="ZeRO stage (default: 2)")
    add(
        "--offload-optimizer",
        choices=("cpu", "none"),
        default="cpu",
        help="where the states are; none: on the device (default: cpu, in host memory)",
    )
    add(
        "--device-states-bytes",
        type=room_for_states,
        metavar="SIZE|SHARE",
        help="of the device's memory for states, such as 8GB, or a share of all states, such as 0.25",
    )
    add("--offload-param", choices=("cpu",), help="stage 3: parameters wait in host memory")
    add("--state-format", choices=tuple(SHORT_NAMES), default="fp32", help="of the optimizer's states (default: fp32)")
    add("--master-dtype", choices=("float32", "bfloat16"), help="of master weights (default: float32)")
    add("--init", action="store_true", help="stage 3: build the model in shards, never whole on a rank (torch)")
    add(
        "--persistence-threshold",
        type=at_least(0),
        metavar="N",
        default=100_000,
        help="stage 3: parameters of fewer elements stay whole (default: 100000)",
    )
    add(
        "--schedule",
        choices=("overlap", "serial", "delayed"),
        default="overlap",
        help="of the update (default: overlap)",
    )
    add(
        "--timeout",
        type=at_least(1),
        metavar="N",
        help="seconds that ranks wait for one that is lost (default: the framework's)",
    )
    add = parser.add_argument_group("what is measured and shown").add_argument
    add(
        "--compare",
        type=at_least(0),
        nargs="?",
        const=ALL,
        metavar="STEPS",
        help="train with the framework's own AdamW beside it, for so many steps, or for all (default: the preset's)",
    )
    add("--eval-batches", type=at_least(1), metavar="N", help="held-out micro-batches")
    add(
        "--sample-bytes", type=at_least(0), metavar="N", default=200, help="bytes to generate at the end (default: 200)"
    )
    add(
        "--trace",
        type=Path,
        metavar="PATH",
        help=f"record step {TRACED_STEP}, or the last, to this file, for https://ui.perfetto.dev",
    )
    add = parser.add_argument_group("what is written").add_argument
    add(
        "--out",
        type=Path,
        metavar="PATH",
        help="folder of metrics.jsonl and summary.json (default: a new one in runs/)",
    )
    add(
        "--log",
        type=Path,
        metavar="PATH",
        help="the file of metrics, a JSON object a step; with --resume one may go on",
    )
    add("--tensorboard", type=Path, metavar="PATH", help="write them to this folder for TensorBoard, too")
    add("--save-every", type=at_least(1), metavar="N", help="save a checkpoint after so many updates, and at the end")
    add("--checkpoints", type=Path, metavar="PATH", help="the folder of checkpoints (default: checkpoints/ in --out)")
    add("--keep", type=at_least(1), metavar="N", default=2, help="checkpoints that are kept (default: 2)")
    given = vars(parser.parse_args(arguments))

    preset = PRESETS[given["preset"]]
    of_preset = {name: value for name, value in vars(preset).items() if name != "gpt"}
    chosen = of_preset | {name: value for name, value in given.items() if value is not None}
    files = {name: chosen.pop(name, None) for name in ("out", "log", "tensorboard", "trace", "checkpoints")}
    saving = Saving(*(chosen.pop(name, None) for name in ("save_every", "keep", "resume")))
    text = chosen.pop("text", None)
    if chosen["offload_optimizer"] == "none":
        chosen["offload_optimizer"] = None
    chosen = {"device_states_bytes": None, "offload_param": None, "master_dtype": None, "timeout": None} | chosen
    has_plain = chosen["param_dtype"] != "float16" and chosen["optimizer"] == "adamw"
    if given["compare"] is None and (not has_plain or saving.resume is not None):
        chosen["compare"] = 0
    chosen["clip"] = chosen["clip"] or None
    gpt = preset.gpt
    if gpt.positions is not None:
        gpt = replace(gpt, positions=max(gpt.positions, chosen["context"]))
    settings = Settings(gpt=gpt, **chosen | {"compare": min(chosen["compare"], chosen["steps"])})
    if settings.devices > 1 and settings.frontend == "torch":
        parser.error("--devices: in torch a process has one; expected --frontend jax, or torchrun --nproc-per-node")
    if settings.layerwise and settings.frontend != "torch":
        parser.error("--layerwise is of the torch front end; in JAX a scan over micro-batches inside a layer does it")
    if settings.init and (settings.frontend != "torch" or settings.stage != 3):
        parser.error("--init builds torch models in the shards of stage 3; expected --frontend torch --stage 3 with it")
    if settings.compare and not has_plain:
        parser.error(
            "--compare has a plain loop for AdamW in float32 and bfloat16 alone; expected --optimizer adamw, and "
            "--param-dtype float32 or bfloat16"
        )
    if settings.compare and saving.resume is not None:
        parser.error("--resume: what --compare trains beside it is not saved; expected one of them")
    files["text"] = text
    out = files["out"] or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{settings.preset}-{settings.frontend}"
    defaults = {"log": out / "metrics.jsonl", "checkpoints": out / "checkpoints"}
    files |= {"out": out} | {name: files[name] or path for name, path in defaults.items()}
    log, trace = files["log"], files["trace"]
    if log.exists() and saving.resume is None:
        parser.error(f"{log} holds the metrics of another run; name another with --out or --log, or --resume that run")
    if trace is not None and not trace.parent.is_dir():
        parser.error(f"--trace {trace}: there is no folder {trace.parent}; expected one that exists")
    return settings, Files(**files), saving


# --- the run -------------------------------------------------------------------------------------------


def run(settings: Settings, files: Files, saving: Saving, at_end: ExitStack) -> int:
    out, corpus = files.out, load_corpus(files.text)
    shortest = min(len(corpus.training), len(corpus.held_out))
    if settings.context >= shortest:
        raise OffloadError(
            f"--context {settings.context}: the text has {len(corpus.training)} bytes, and {len(corpus.held_out)} held "
            "out; expected fewer than either"
        )
    n = Ranks.launched().times(settings.devices).world_size
    several = f"; {n} ranks, {default_threads()} threads a process, ZeRO stage {settings.stage}" if n > 1 else ""
    print(
        f"{settings.preset}, {settings.gpt.numel:,} parameters in {settings.param_dtype}, through frontends."
        f"{settings.frontend}{several}\ntext: {len(corpus.training):,} bytes of {corpus.training_files} files to train "
        f"on, {len(corpus.held_out):,} of {corpus.held_out_files} held out",
        flush=True,
    )
    framework = importlib.import_module(f"bench.train.{settings.frontend}_trainer")
    ranks = at_end.enter_context(framework.join(settings))
    offloaded = framework.make_offloaded(settings, ranks)
    make_plain = partial(framework.make_plain, settings, ranks)
    done = resume(settings, ranks, saving.resume, offloaded) if saving.resume is not None else 0

    writes = ranks.rank == 0
    if writes:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OffloadError(f"--out {out}: {error.strerror}; name a folder that can be written to") from None
    bar = ProgressBar(settings.steps, ("loss", "tokens_per_second", "grad_norm"))
    writers: list[Writer] = [JsonLines(files.log), bar]
    if files.tensorboard is not None:
        writers.append(TensorBoard(files.tensorboard))
    with StepLog(*writers, rank=ranks.rank) as log:
        records, interrupted, plain = train(settings, ranks, corpus, offloaded, make_plain, log, files, saving, done)
    summary = finish(settings, ranks, corpus, offloaded, plain, records, interrupted)
    if writes:
        (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(
        f"\nwritten to {out}. Next: your own model, as docs/first-hour.md shows, or --help for what can be chosen here"
    )
    ranks.part()
    return INTERRUPTED if interrupted else 0


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
    ranks: Ranks,
    corpus: Corpus,
    offloaded: OffloadTrainer,
    make_plain: Callable[[], Trainer],
    log: StepLog,
    files: Files,
    saving: Saving,
    done_before: int,
) -> tuple[list[dict[str, Any]], bool, Trainer | None]:
    """Train to the end or to a rank's Ctrl-C.

    Args:
        make_plain: makes the framework's own loop, which takes the first `settings.compare` steps beside it.
        done_before: steps of the run that is resumed.

    Returns:
        A record a step, as given to `log`; True if Ctrl-C came; the framework's own loop if it took all steps.
    """
    plain = make_plain() if settings.compare else None
    records: list[dict[str, Any]] = []
    micro_batches = settings.accumulate * ranks.world_size
    traced = min(done_before + TRACED_STEP, settings.steps - 1)
    tokens = micro_batches * settings.micro_batch * settings.context
    windows = {"batch": settings.micro_batch, "context": settings.context}
    draw = partial(training_batch, corpus.training, settings.seed, **windows)
    interrupted = False
    with Interrupt() as interrupt:
        for step in range(done_before, settings.steps):
            # Each rank takes its turns in the micro-batches that one rank alone would accumulate.
            first = step * micro_batches
            rounds = range(first, first + micro_batches, ranks.world_size)
            batches = [np.concatenate([draw(i) for i in ranks.turn(start)]) for start in rounds]
            with offloaded.trace(files.trace) if files.trace and step == traced else nullcontext():
                done, seconds = timed(offloaded, batches)
            losses = [done.loss]
            if plain is not None:
                # Step by step, so that a slow phase of the machine slows both.
                other, plain_seconds = timed(plain, batches)
                losses.append(other.loss)
            *losses, asked = ranks.gather([*losses, interrupt.asked]).mean(axis=0).tolist()
            interrupted = asked > 0
            record = {
                "loss": losses[0],
                "grad_norm": done.grad_norm,
                "lr": done.lr,
                "tokens": tokens,
                "seconds": seconds,
                "tokens_per_second": tokens / seconds,
                "skipped": done.skipped,
            }
            if plain is not None:
                record |= {"plain_loss": losses[1], "plain_grad_norm": other.grad_norm}
                record |= {"plain_seconds": plain_seconds}
                if step + 1 == settings.compare < settings.steps:
                    plain = None
            records.append(record)
            log.write(step + 1, record)
            last = interrupted or step == settings.steps - 1
            if saving.every is not None and (last or (step + 1) % saving.every == 0):
                extras = {"steps": step + 1, "batches": batches_of(settings, ranks)}
                offloaded.save(files.checkpoints, extras, saving.keep, wait=last)
            if interrupted:
                interrupt.asked = True  # it may still be on its way to this rank
                break
    return records, interrupted, plain


def batches_of(settings: Settings, ranks: Ranks) -> dict[str, int]:
    """The settings that decide which windows an update sees."""
    micro_batches = settings.accumulate * ranks.world_size
    return {
        "seed": settings.seed,
        "context": settings.context,
        "micro-batch": settings.micro_batch,
        "ranks x accumulate": micro_batches,
    }


def resume(settings: Settings, ranks: Ranks, path: Path, offloaded: OffloadTrainer) -> int:
    """Load a checkpoint, and return the number of steps that its run had done."""
    extras = offloaded.load(path)
    try:
        done, theirs = extras["steps"], extras["batches"]
    except (KeyError, TypeError):
        raise OffloadError(f"--resume {path}: not a checkpoint of this program; expected one of its own") from None
    mine = batches_of(settings, ranks)
    for name, value in mine.items():
        if theirs.get(name) != value:
            raise OffloadError(
                f"--resume {path}: {name} was {theirs.get(name)} there, and is {value}; expected the same"
            )
    if done >= settings.steps:
        raise OffloadError(f"--resume {path}: {done} steps are done, and --steps is {settings.steps}; expected more")
    print(f"resumed after {done} steps from {path}", flush=True)
    return done


def timed(trainer: Trainer, batches: list[np.ndarray]) -> tuple[Step, float]:
    start = time.perf_counter()
    step = trainer.step(batches)
    return step, time.perf_counter() - start


def finite(value: float | None) -> float | None:
    """Return the value, or None for inf and NaN, which JSON lacks."""
    return value if value is not None and math.isfinite(value) else None


# --- the ending ----------------------------------------------------------------------------------------


def finish(
    settings: Settings,
    ranks: Ranks,
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
    held_out = mean_loss(ranks, offloaded, batches)
    seconds = sum(record["seconds"] for record in records)
    beside = [record for record in records if "plain_seconds" in record]
    summary = {
        "settings": asdict(settings),
        "machine": {"platform": platform.platform(), "device": offloaded.device_name},
        "steps": len(records),
        "interrupted": interrupted,
        "seconds": seconds,
        "held_out_loss": finite(held_out),
        "tokens_per_second": records[0]["tokens"] / median(records, "seconds"),
    }

    if sample_bytes and (ranks.rank == 0 or settings.stage == 3):  # in stage 3 no rank runs the model alone
        text = sample(offloaded, settings, sample_bytes)
        print(f"\n--- sample, temperature {TEMPERATURE} ---\n{text}\n---")
        summary["sample"] = text

    summary |= report_memory(settings, offloaded) | report_ranks(settings, ranks, offloaded, len(records))
    show_curve([record["loss"] for record in records])
    of_plain = ""
    if plain is not None:
        plain_held_out = mean_loss(ranks, plain, batches)
        of_plain = f"; {plain_held_out:.4f} with {offloaded.plain_name}"
        summary |= {"plain_held_out_loss": finite(plain_held_out)}
    print(f"\nheld-out loss: {held_out:.4f} nats a byte, after {len(records)} steps in {seconds:.1f} s{of_plain}")
    with_offload = offloaded.accelerator_bytes()
    without = BYTES_WITHOUT_OFFLOAD * settings.gpt.numel
    print(
        f"memory of a GPU: {format_bytes(with_offload)}, and {format_bytes(without)} with AdamW's states there; as "
        "planned, without activations"
    )
    if beside:
        ours, theirs = (median(beside, name) for name in ("seconds", "plain_seconds"))
        apart = max(abs(record["loss"] - record["plain_loss"]) for record in beside)
        print(
            f"time of a step: {ours * 1e3:.1f} ms, and {theirs * 1e3:.1f} ms with {offloaded.plain_name}; in "
            f"{len(beside)} steps of each, their losses are {how_close(apart, settings.clip)}"
        )
        summary |= {"plain_tokens_per_second": records[0]["tokens"] / theirs}
    else:
        print(f"time of a step: {median(records, 'seconds') * 1e3:.1f} ms")
    return summary


def how_close(apart: float, clip: float | None) -> str:
    """Return the difference of two optimizers' losses in words, with the reason if it is clipping."""
    if apart == 0:
        return "equal in every bit"
    why = (
        ""
        if clip is None
        else ": torch rounds the norm by which it clips, and this one is exact (--clip 0 clips nothing)"
    )
    return f"at most {apart:.1g} apart{why}"


def show_curve(losses: list[float]) -> None:
    """Print the training loss as a picture, where the terminal has the characters for it."""
    mark = "•"
    try:
        mark.encode(sys.stdout.encoding or "ascii")
    except UnicodeError:
        mark = "*"
    if picture := curve(losses, mark=mark):
        print(f"\ntraining loss, nats a byte, in {len(losses)} steps\n{picture}")


def mean_loss(ranks: Ranks, trainer: Trainer, batches: list[np.ndarray]) -> float:
    """Return the mean loss over batches that the ranks share. It is the mean of one rank, summed in its order."""
    rounds = range(0, len(batches), ranks.world_size)
    mine = np.zeros(len(rounds) * ranks.world_size)
    for first in rounds:
        turn = ranks.turn(first)
        # Where batches run out, the last one keeps a rank busy until the others are done.
        mine[turn] = trainer.losses(np.concatenate([batches[min(i, len(batches) - 1)] for i in turn]))
    return float(np.mean(ranks.gather(mine).sum(axis=0)[: len(batches)]))


def median(records: list[dict[str, Any]], key: str) -> float:
    """Return the value of the median step: neither compilation nor a busy neighbour counts."""
    return float(np.median([record[key] for record in records]))


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
    print(f"\nmemory\n{report}")
    print(
        f"host bytes a parameter: {report.host_bytes / report.numel:.2f}, "
        f"planned {report.planned_host_bytes / report.numel:.2f}"
    )
    return {
        "numel": report.numel,
        "device_bytes": report.device_bytes,
        "host_bytes": report.host_bytes,
        "planned_host_bytes": report.planned_host_bytes,
    }


def report_ranks(settings: Settings, ranks: Ranks, offloaded: OffloadTrainer, steps: int) -> dict[str, Any]:
    """The bytes that each rank sent and needed; at the top of the summary stands rank 0."""
    sent, resident, device = "sent_bytes_a_step", "peak_resident_bytes", "peak_device_bytes"
    on_device = offloaded.peak_device_bytes()
    mine = [offloaded.sent_bytes / steps, peak_resident_bytes(), math.nan if on_device is None else on_device]
    rows = [
        {
            name: None if math.isnan(value) else round(value)
            for name, value in zip((sent, resident, device), row, strict=True)
        }
        for row in ranks.gather(mine).repeat(ranks.here, axis=0).tolist()
    ]
    both = " (both loops)" if settings.compare else ""
    if ranks.world_size == 1:
        if on_device is not None:
            print(f"peak device memory{both}: {format_bytes(on_device)}")
        print(f"peak resident memory of the process{both}: {format_bytes(rows[0][resident])}")
    else:
        columns = [resident] if on_device is None else [resident, device]
        whose = " of its process" if ranks.here > 1 else ""
        header = ["rank", "bytes sent a step", f"peak resident memory{whose}{both}", f"peak device memory{both}"]
        lines = [[str(i), f"{row[sent]:,}", *(format_bytes(row[c]) for c in columns)] for i, row in enumerate(rows)]
        print(f"\n{format_table(lines, header[: len(lines[0])])}")
    return {resident: rows[0][resident], device: rows[0][device], "ranks": rows}


def peak_resident_bytes() -> int:
    """Return the peak of this program alone: `getrusage` begins with the peak of the launcher."""
    try:
        status = Path("/proc/self/status").read_text()
        return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
