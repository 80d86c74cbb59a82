"""``python -m offload_core plan``: the memory to train a model in each stage, and the time of a step."""

import argparse
import json
import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from textwrap import fill
from typing import Any

from ..config.state_formats import SHORT_NAMES
from ..device.exchange_sizes import REFUSED_DEVICES
from ..disk.folders import check_folders
from ..dtypes import BFLOAT16, BY_NAME, ElementType
from ..errors import ConfigError
from ..memory.host_memory import format_bytes
from ..memory.plan import DEVICE, DISK, GRADIENTS, HOST, format_table
from ..plans.phases import Member, Phase, phases
from ..plans.planner import NARROWER
from ..plans.prediction import Blocks, StepTime
from ..plans.terms import GRADIENTS_ON_HOST
from ..rules import RULES
from ..support.units import bytes_or_share, count, mesh, rate, size, size_or_0
from .compare import FIELDS, TIERS, Asked, Tier, asks_device, disk_options
from .model_shapes import GPTS, LEAST, MOST, GPTConfig, Shapes, gpt_of, shapes_of

HELP = "what training a model takes on host and device in each stage, whether it fits, and the time of a step"
EXAMPLE = """example: does a 7 B model train on a GPU of 24 GB?
  python -m offload_core plan --parameters 7B --device-memory 24GB --host-memory 128GB
the same question for a model's files, or for its Hugging Face configuration:
  python -m offload_core plan --model Qwen3-8B/config.json --device-memory 24GB --host-memory 128GB
in JAX, parameters sharded over a mesh of 4 x 2 devices of one process:
  python -m offload_core plan --frontend jax --mesh 4x2 --parameters 7B --device-memory 24GB
an actor, a critic and a frozen reference that have one GPU in turn, each released while another one has it:
  python -m offload_core plan --parameters 7B --parameters 1.5B --frozen 7B --device-memory 80GB --host-memory 256GB
eight micro-batches of an update, through a loop and through engine.accumulate():
  python -m offload_core plan --parameters 7B --device-memory 24GB --micro-batches 8
with states on a disk, where they do not fit in host memory; its free space and bandwidth are measured:
  python -m offload_core plan --parameters 13B --host-memory 64GB --nvme-path /mnt/disk

Sizes may be given in GB (10^9 bytes) or GiB (2^30); they are printed in GiB, so that 64GB is 59.6 GiB.
The exit status is 0 if a stage fits, 1 if none does."""
_LETTERS = string.ascii_uppercase
"""The names of several models."""
_COLUMNS = 100
"""The most columns of the output."""
_FORMATS: dict[str, dict[str, Any]] = {"state_format='fp32'": {"state_format": "fp32", "master_dtype": None}} | NARROWER


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--preset", choices=tuple(GPTS), help="a GPT of this size")
    model.add_argument(
        "--parameters",
        action="append",
        type=partial(count, least=LEAST, most=MOST),
        metavar="N",
        help="a GPT with about this number of parameters, such as 10B; repeat it for further models",
    )
    model.add_argument(
        "--model",
        "--safetensors",
        action="append",
        type=Path,
        metavar="PATH",
        help="a .safetensors file, an index of several, a Hugging Face config.json, or the folder of one of these; "
        "repeat it for models whose engines take turns on the device",
    )
    add(
        "--frozen",
        action="append",
        type=_path_or_count,
        default=[],
        metavar="PATH|N",
        help="a further model, as for --model or --parameters, that is not trained: a reference or reward model",
    )
    add("--param-dtype", choices=tuple(BY_NAME), help="of the device parameters (default: the file's, else bfloat16)")
    add("--frontend", choices=("torch", "jax"), default="torch", help="what trains the model (default: torch)")
    add(
        "--mesh",
        type=mesh,
        metavar="AxB",
        help="in JAX: shard parameters over a mesh of devices; each of its axes cuts the largest dimension of a "
        "parameter that it divides and no other axis cuts (default: one device a process)",
    )
    add("--stage", type=int, choices=(1, 2, 3), help="ask for this stage alone")
    add("--offload-param", choices=("cpu", "nvme", "none"), help="ask for this tier of stage 3 alone")
    add(
        "--offload-optimizer",
        choices=tuple(TIERS),
        help="ask for states in host memory, on a disk, or (none) on the device, alone (default: in host memory; then, "
        "if an option of disks is given, on a disk)",
    )
    add(
        "--device-states-bytes",
        type=bytes_or_share,
        metavar="SIZE|SHARE|auto",
        help="as OffloadConfig.device_states_bytes: of each device's memory for states, such as 8GB, 0.25 or auto",
    )
    add(
        "--nvme-path",
        action="append",
        metavar="FOLDER",
        help="a folder on a disk for states; repeat it for further disks",
    )
    add(
        "--nvme-host-bytes",
        type=size_or_0,
        metavar="SIZE",
        help="as OffloadConfig.nvme_host_bytes (default: what is free of --host-memory, less a reserve)",
    )
    add("--disk-memory", type=size, metavar="SIZE", help="free on the disks of a machine (default: in --nvme-path)")
    add(
        "--disk-bandwidth",
        type=rate,
        metavar="RATE",
        help="of a machine's disks, bytes a second read and written (default: measured in --nvme-path)",
    )
    add("--world-size", type=count, default=1, metavar="W", help="ranks, in JAX processes (default: 1)")
    add(
        "--local-world-size",
        type=count,
        metavar="W",
        help="ranks on one machine, which share its memory (default: all)",
    )
    add(
        "--device",
        metavar="NAME",
        default="cuda",
        help="what the ranks compute on: cpu, or an accelerator's name, such as xpu (default: cuda)",
    )
    add("--host-memory", type=size, metavar="SIZE", help="of a machine (default: what is available here)")
    add("--device-memory", type=size, metavar="SIZE", help="of each device")
    add("--activation-memory", type=size, default=0, metavar="SIZE", help="of each device; else it is not counted")
    add(
        "--host-activation-memory",
        type=size,
        default=0,
        metavar="SIZE",
        help="of each rank: activations that wait on the host (save_on_cpu); else it is not counted",
    )
    for name in FIELDS[:3]:
        add(f"--{name.replace('_', '-')}", type=count, metavar="N", help=f"as OffloadConfig.{name}")
    add(
        "--micro-batches",
        type=count,
        metavar="N",
        help="of an update: compare a loop over them (--gradient-accumulation-steps N) with engine.accumulate()",
    )
    parser.set_defaults(layerwise=False)
    add("--schedule", choices=("overlap", "serial", "delayed"), help="as OffloadConfig.schedule")
    add(
        "--update-in-backward",
        action="store_const",
        const=True,
        help="as OffloadConfig.update_in_backward, without clipping: few gradients are on the host at a time",
    )
    add("--state-format", choices=tuple(SHORT_NAMES), help="as OffloadConfig.state_format (default: fp32)")
    add("--master-dtype", choices=("float32", "bfloat16"), help="as OffloadConfig.master_dtype")
    add("--optimizer", choices=tuple(RULES), help="as OffloadConfig.optimizer (default: adamw)")
    add("--momentum", type=float, metavar="X", help="of sgd; its state needs memory unless it is 0 (default: 0)")
    add("--dram-bandwidth", type=rate, metavar="RATE", help="of a machine, bytes a second (default: measured here)")
    add("--link-bandwidth", type=rate, metavar="RATE", help="between host and each device, each way")
    add("--device-bandwidth", type=rate, metavar="RATE", help="of each device's memory, which updates the states there")
    add("--flops", type=count, metavar="N", help="operations a second that each device reaches, such as 50T")
    add(
        "--tokens",
        type=count,
        metavar="N",
        help="of each rank a step; with --flops the compute time is predicted, and with --micro-batches the inputs of "
        "blocks are counted",
    )
    add("--activation-checkpointing", action="store_true", help="activations are computed again in backward")
    add("--json", action="store_true", help="print one JSON object; sizes in bytes, times in seconds")


def _path_or_count(text: str) -> Path | int:
    path = Path(text)
    return path if path.exists() else count(text, least=LEAST, most=MOST)


def run(args: argparse.Namespace) -> int:
    _check(args)
    models = _models(args)
    if len(models) > 1:
        return _run_several(args, models)
    [(what, shapes, dtypes, blocks)] = models
    asked = Asked(args, shapes, dtypes, blocks)
    tiers = asked.tiers()
    if args.micro_batches:
        layerwise = asked.tiers(layerwise=True)
        tiers = [replace(tier, accumulate=each) for tier, each in zip(tiers, layerwise, strict=True)]
    formats = {setting: asked.tiers(asked.stores[:1], **fields) for setting, fields in _FORMATS.items()}
    fitting = [tier for tier in tiers if tier.fits or (tier.accumulate is not None and tier.accumulate.fits)]
    numel = sum(map(math.prod, shapes.values()))
    if args.json:
        print(
            json.dumps(
                {
                    "model": what,
                    "frontend": args.frontend,
                    "mesh": args.mesh,
                    "parameters": numel,
                    "world_size": args.world_size,
                    "local_world_size": asked.processes,
                    "host_memory": asked.host,
                    "device_memory": args.device_memory,
                    "disk_memory": asked.disk,
                    "activation_memory": args.activation_memory or None,
                    "host_activation_memory": args.host_activation_memory or None,
                    "micro_batches": args.micro_batches,
                    "speeds": asdict(asked.speeds),
                    "tiers": [_as_json(tier) for tier in tiers],
                    "fits": bool(fitting),
                    "formats": [
                        {**_FORMATS[setting], "tiers": [_in_short(tier) for tier in each]}
                        for setting, each in formats.items()
                    ],
                }
            )
        )
    else:
        _print_heading(args, asked, f"{what}: {numel:,} parameters")
        print(f"{_memory_table(tiers)}\n\n{_time_table(tiers)}\n")
        if asks_device(args):
            print(f"{_places_table(tiers)}\n")
        if disk_table := _disk_table(tiers):
            print(f"{disk_table}\n")
        print(_format_table(formats))
        if flops := _matrix_flops(tiers[0]):
            print(f"\n{flops}")
        for alike in _alike(tiers):
            print(f"\n{' and '.join(tier.name for tier in alike)}\n{alike[0].plan.table()}")
            for line in _micro_batch_lines(alike[0], asked):
                print(line)
        if not fitting:
            print("\nnothing fits:")
            lines = [
                f"  {tier.name}: {'; '.join(_short(tier, where, asked) for where in tier.missing)}" for tier in tiers
            ]
            for line in [*lines, *_on_disk(asked, tiers)]:
                print(fill(line, _COLUMNS, subsequent_indent="    ", break_on_hyphens=False))
    return 0 if fitting else 1


def _check(args: argparse.Namespace) -> None:
    if args.device in REFUSED_DEVICES:
        why = REFUSED_DEVICES[args.device]
        raise ConfigError(f"--device {args.device}: {why}; expected cpu or another accelerator, such as cuda")
    if not args.device.isidentifier():
        raise ConfigError(f"--device: got {args.device!r}, expected cpu or an accelerator's name, such as cuda")
    if args.device == "cpu" and (args.device_memory or args.link_bandwidth):
        raise ConfigError("--device cpu: its memory is the host's; expected neither --device-memory nor a link")
    local, ranks = args.local_world_size, args.world_size
    if local and local > ranks:
        raise ConfigError(f"--local-world-size {local} with --world-size {ranks}; expected at most that many")
    n_models = len([*(args.model or args.parameters or (args.preset,)), *args.frozen])
    if (n := args.micro_batches) is not None:
        if args.frontend == "jax":
            raise ConfigError(
                "--micro-batches is torch's engine.accumulate(); in JAX a scan over micro-batches in a jitted function "
                "sums their gradients before update() takes them; expected --frontend torch"
            )
        if args.gradient_accumulation_steps not in (None, n):
            raise ConfigError(
                f"--gradient-accumulation-steps {args.gradient_accumulation_steps} with --micro-batches {n}, which "
                "gives the same number; expected one of them"
            )
        if n_models > 1:
            raise ConfigError("--micro-batches compares two ways to train one model; expected no further models")
        args.gradient_accumulation_steps = n
    if (args.flops is None) != (args.tokens is None) and (args.flops is not None or args.micro_batches is None):
        raise ConfigError("--flops and --tokens predict the compute time together; expected both or neither")
    if n_models > len(_LETTERS):
        raise ConfigError(f"more models than {len(_LETTERS)} were given; expected fewer")
    if args.frontend == "jax" and n_models > 1:
        raise ConfigError(
            "several models take turns in torch (engine.release()); expected one model with --frontend jax"
        )
    if args.frontend == "jax":
        of_torch = [
            name
            for name in ("stage", "offload_param", "max_live_parameters", "update_in_backward")
            if getattr(args, name) is not None
        ]
        if of_torch:
            name = of_torch[0].replace("_", "-")
            if name == "update-in-backward":
                raise ConfigError(f"--{name} has no effect in JAX, whose gradients come at once; expected it left out")
            raise ConfigError(f"--{name} is torch's; expected --mesh, which says how JAX's parameters are sharded")
        if args.mesh and math.prod(args.mesh) % ranks:
            sizes = "x".join(map(str, args.mesh))
            raise ConfigError(
                f"--mesh {sizes} has {math.prod(args.mesh)} devices; expected as many in each of {ranks} processes"
            )
    elif args.mesh:
        raise ConfigError("--mesh is JAX's; expected --frontend jax beside it, or --world-size")
    if args.offload_optimizer in ("cpu", "none") and (given := disk_options(args)):
        raise ConfigError(
            f"{given[0]} is of --offload-optimizer nvme; expected no --offload-optimizer {args.offload_optimizer} "
            "beside it"
        )
    _check_device_tier(args)
    check_folders(args.nvme_path or ())
    if args.offload_param in ("cpu", "nvme") and args.stage not in (None, 3):
        raise ConfigError(f"--offload-param {args.offload_param} is of stage 3; expected no --stage {args.stage}")
    if args.offload_param == "nvme" and args.offload_optimizer != "nvme":
        raise ConfigError(
            "--offload-param nvme keeps states on a disk, too; expected --offload-optimizer nvme beside it"
        )
    if args.offload_param == "nvme" and args.schedule == "delayed":
        raise ConfigError("--offload-param nvme cannot have --schedule delayed; expected overlap or serial")


def _check_device_tier(args: argparse.Namespace) -> None:
    """Check what is asked for states in the device's memory."""
    if args.device_bandwidth and not asks_device(args):
        raise ConfigError(
            "--device-bandwidth is of states on the device; expected --device-states-bytes or --offload-optimizer none "
            "beside it"
        )
    if not asks_device(args):
        return
    option = "--device-states-bytes" if args.offload_optimizer != "none" else "--offload-optimizer none"
    if args.offload_optimizer == "none" and args.device_states_bytes is not None:
        raise ConfigError(
            "--device-states-bytes beside --offload-optimizer none, with which all states are on the device; expected "
            "one of them"
        )
    if args.device != "cuda":
        raise ConfigError(
            f"{option} is of CUDA and ROCm devices, for which the kernels of updates are compiled; expected --device "
            f"cuda, and got {args.device}"
        )
    if args.frontend == "jax":
        raise ConfigError(f"{option} is torch's: arrays of JAX cannot be written in place; expected --frontend torch")
    if args.offload_param in ("cpu", "nvme"):
        raise ConfigError(
            f"{option} beside --offload-param {args.offload_param}: parameters would leave a device that has memory "
            "for their states; expected one of them"
        )
    if args.device_states_bytes == "auto" and not (args.device_memory and args.activation_memory):
        raise ConfigError(
            "--device-states-bytes auto is what is free beside activations; expected --device-memory and "
            "--activation-memory beside it"
        )


_Model = tuple[str, Shapes, ElementType | dict[str, ElementType], Blocks | None]
"""A model in words, its shapes, its element types, and its blocks (None: unknown)."""


def _models(args: argparse.Namespace) -> list[_Model]:
    """The models that were asked for: those that are trained, then the frozen ones."""
    trained = [*(args.model or ()), *(args.parameters or ())]
    preset = [] if args.preset is None else [_gpt(args.preset, GPTS[args.preset])]
    return [*preset, *map(_model, trained), *map(_model, args.frozen)]


def _model(given: Path | int) -> _Model:
    if isinstance(given, Path):
        return str(given), *shapes_of(given)
    gpt = gpt_of(given)
    return _gpt(f"a GPT of {gpt.layers} layers of width {gpt.width}", gpt)


def _gpt(name: str, gpt: GPTConfig) -> _Model:
    return name, gpt.shapes, BFLOAT16, gpt.blocks


@dataclass(frozen=True)
class _Planned:
    """One of several models, and the plans of its tiers."""

    name: str
    what: str
    asked: Asked
    tiers: Sequence[Tier]

    @property
    def numel(self) -> int:
        return sum(map(math.prod, self.asked.shapes.values()))

    def in_tier(self, tier: Tier) -> Member:
        return Member(self.name, tier.plan, tier.working, self.asked.frozen)


@dataclass(frozen=True)
class _Turns:
    """The phases of several models in one tier, and the places in which each has too little."""

    tier: Tier
    phases: Sequence[Phase]
    missing: Sequence[Sequence[str]]

    @property
    def fits(self) -> bool:
        """True if the models fit in turn, or all at once."""
        *in_turn, at_once = self.missing
        return not at_once or (bool(in_turn) and not any(in_turn))


def _run_several(args: argparse.Namespace, models: Sequence[_Model]) -> int:
    """Plan models whose engines have the device in turn. Return 0 if they fit in a tier, else 1."""
    n_trained = len(models) - len(args.frozen)
    if args.nvme_host_bytes is None and (args.offload_optimizer == "nvme" or disk_options(args)):
        args.nvme_host_bytes = 0  # else the first one would take what is free
    planned: list[_Planned] = []
    for number, (what, shapes, dtypes, _) in enumerate(models):
        asked = Asked(args, shapes, dtypes, frozen=number >= n_trained)
        planned.append(_Planned(_LETTERS[number], what, asked, asked.tiers()))
        args = argparse.Namespace(**{**vars(args), "dram_bandwidth": planned[0].asked.speeds.dram})  # measured once
    first = planned[0].asked
    free = {HOST: first.host, DEVICE: first.device_memory, DISK: first.disk}
    turns = []
    for tiers in zip(*(each.tiers for each in planned), strict=True):
        found = phases([each.in_tier(tier) for each, tier in zip(planned, tiers, strict=True)])
        turns.append(_Turns(tiers[0], found, [phase.missing(free, processes=first.processes) for phase in found]))
    fits = any(each.fits for each in turns)
    if args.json:
        print(json.dumps(_several_as_json(planned, turns)))
        return 0 if fits else 1
    for each in planned:
        words = f"{each.name}: {each.what}: {each.numel:,} parameters{', frozen' * each.asked.frozen}"
        if each is planned[0]:
            _print_heading(first.args, first, words)
        else:
            print(f"{words}\n")
        print(f"{_memory_table(each.tiers)}\n" + ("" if each.asked.frozen else f"\n{_time_table(each.tiers)}\n"))
    print("\n\n".join(map(_phase_table, turns)))
    print("\nin each phase but the last the other models are released")
    return 0 if fits else 1


def _several_as_json(planned: Sequence[_Planned], turns: Sequence[_Turns]) -> dict[str, Any]:
    first = planned[0].asked
    return {
        "models": [
            {
                "name": each.name,
                "model": each.what,
                "parameters": each.numel,
                "frozen": each.asked.frozen,
                "tiers": [_as_json(tier) for tier in each.tiers],
            }
            for each in planned
        ],
        "host_memory": first.host,
        "device_memory": first.device_memory,
        "disk_memory": first.disk,
        "phases": [
            {
                **each.tier.about,
                "fits": each.fits,
                "phases": [
                    {"phase": phase.name, "bytes": dict(phase.needs), "missing": lacks}
                    for phase, lacks in zip(each.phases, each.missing, strict=True)
                ],
            }
            for each in turns
        ],
        "fits": any(each.fits for each in turns),
    }


def _phase_table(turns: _Turns) -> str:
    places = [*dict.fromkeys(where for phase in turns.phases for where in phase.needs)]
    lines = [
        [phase.name, *(format_bytes(phase.needs[where]) for where in places), _lacking(lacks)]
        for phase, lacks in zip(turns.phases, turns.missing, strict=True)
    ]
    return format_table(lines, [turns.tier.name, *places, "fits"])


def _lacking(places: Sequence[str]) -> str:
    return f"no: too little {' and '.join(places)}" if places else "yes"


def _print_heading(args: argparse.Namespace, asked: Asked, model: str) -> None:
    """Print what was asked for: the model, its ranks, memory and speeds."""
    ranks = f"process(es) of {asked.devices} device(s)" if asked.in_jax else "rank(s)"
    kinds = [asked.dtypes] if isinstance(asked.dtypes, ElementType) else asked.dtypes.values()
    in_types = args.param_dtype or "/".join(sorted({dtype.name for dtype in kinds}))
    print(f"{model}, {args.world_size} {ranks}, {asked.processes} a machine, on {args.device}")
    device = _or(args.device_memory, format_bytes, "any")
    print(f"memory: host {format_bytes(asked.host)} a machine, device {device}; parameters are {in_types}")
    speeds = asked.speeds
    link = _or(speeds.link, lambda link: f"{link / 1e9:.1f} GB/s each way", "not known")
    memory = ""
    if asks_device(args):
        memory = _or(speeds.device, lambda device: f", device {device / 1e9:.1f} GB/s", ", device not known")
    print(f"bandwidth: host {speeds.dram / 1e9:.1f} GB/s ({_source(args.dram_bandwidth)}), link {link}{memory}")
    if "nvme" in asked.stores:
        disk = _or(speeds.disk, lambda disk: f"{disk / 1e9:.1f} GB/s ({_source(args.disk_bandwidth)})", "not known")
        free = _or(asked.disk, lambda free: f"{format_bytes(free)} free on a machine", "free space not known")
        print(f"disk: {free}; bandwidth, read and written, {disk}")
    given = args.activation_memory or args.host_activation_memory
    counted = "as given" if given else "not counted (--activation-memory)"
    whose = "a rank's" if not asked.in_jax else "a process's" + ", its devices together" * (asked.devices > 1)
    print(f"sizes are {whose}; activations: {counted}\n")


def _source(given: float | None) -> str:
    return "measured here" if given is None else "as given"


def _memory_table(tiers: Sequence[Tier]) -> str:
    places = [HOST, DEVICE, *dict.fromkeys(where for tier in tiers for where in tier.plan.elsewhere)]
    lines = [
        [
            tier.name,
            *(format_bytes(tier.plan.bytes_in(where)) for where in places),
            _fits(tier, beside_disk=len(places) > 2),
        ]
        for tier in tiers
    ]
    return format_table(lines, ["memory", *places, "fits"])


def _fits(tier: Tier, *, beside_disk: bool) -> str:
    if tier.fits:
        return "yes"
    if beside_disk:  # whose column takes the place
        return f"no: {', '.join(tier.missing)} too small"
    return f"no: too little {' and '.join(tier.missing)} memory"


def _format_table(formats: Mapping[str, Sequence[Tier]]) -> str:
    """Return a table of the bytes that other formats of states need, in the tier that needs the least host memory.

    Where all tiers have states on a disk, it is the tier that needs the least of the disk, and where all have all of
    them on the device, the tier that needs the least of the device.
    """
    every = [tier for tiers in formats.values() for tier in tiers]
    n_bytes: Callable[[Tier], int] = attrgetter("plan.host_bytes")
    seconds, names = attrgetter("step.update"), ("host, at least", "update, by bytes")
    if all(tier.disk for tier in every):
        n_bytes, seconds, names = _on_a_disk, attrgetter("step.disk"), ("disk, at least", "disk, by bytes")
    elif all(tier.about["offload_optimizer"] is None for tier in every):
        n_bytes, seconds = attrgetter("plan.device_bytes"), attrgetter("step.on_device")
        names = ("device, at least", "update, by bytes")
    lines = []
    for setting, tiers in formats.items():
        least = min(tiers, key=n_bytes)
        fitting = [tier.name for tier in tiers if tier.fits]
        fits = "nowhere" if not fitting else "everywhere" if len(fitting) == len(tiers) else "; ".join(fitting)
        lines.append([setting, format_bytes(n_bytes(least)), _seconds(seconds(least)), fits])
    return format_table(lines, ["states (docs/formats.md)", *names, "fits"])


def _places_table(tiers: Sequence[Tier]) -> str:
    """Return a table of the states in each place, and of the bytes that the device's link carries."""
    places = dict.fromkeys(where for tier in tiers for where in tier.states)
    lines = [
        [tier.name, *(format_bytes(tier.states.get(where, 0)) for where in places), f"{_link_bytes(tier):.2f} B"]
        for tier in tiers
    ]
    return format_table(lines, ["states", *places, "link, a parameter"])


def _link_bytes(tier: Tier) -> float:
    """Return the bytes that cross the device's link both ways in a step, for each parameter."""
    return (tier.traffic.to_host + tier.traffic.to_device) / max(tier.plan.numel, 1)


def _on_a_disk(tier: Tier) -> int:
    """The bytes of the tier that are neither the host's nor the device's."""
    return sum(map(tier.plan.bytes_in, tier.plan.elsewhere))


def _disk_table(tiers: Sequence[Tier]) -> str:
    """Return a table of the disk's part in a step; empty if no states are on one."""
    lines = [
        [
            tier.name,
            format_bytes(tier.disk.read),
            format_bytes(tier.disk.written),
            _seconds(tier.step.disk),
            _or(
                tier.disk.a_day,
                lambda n, tier=tier: "at most " * (not tier.step.is_known) + f"{n / 1e12:.1f} TB",
                "not known",
            ),
        ]
        for tier in tiers
        if tier.disk is not None
    ]
    header = ["disk", "read a step", "written", "time", "written a day, by a machine"]
    return format_table(lines, header) if lines else ""


def _on_disk(asked: Asked, tiers: Sequence[Tier]) -> list[str]:
    """Say in which tier the model fits if its states are on a disk, which was not asked for; no line if in none."""
    if any(tier.disk for tier in tiers) or asked.args.offload_optimizer:
        return []
    for tier in asked.tiers(["nvme"], nvme_host_bytes=0):
        if tier.fits:
            n_bytes = (
                f"{format_bytes(tier.plan.needs[HOST])} of host memory and {format_bytes(_on_a_disk(tier))} of disk"
            )
            return [f"with states on a disk it does: {tier.name}: {n_bytes} (--offload-optimizer nvme)"]
    return []


def _time_table(tiers: Sequence[Tier]) -> str:
    columns: dict[str, Callable[[StepTime], float | None]] = {
        "of it: update": attrgetter("update"),
        "to host": attrgetter("to_host"),
        "to device": attrgetter("to_device"),
        "compute": attrgetter("compute"),
    }
    if any(tier.step.on_device != 0.0 for tier in tiers):
        columns |= {"update on it": attrgetter("on_device")}
    lines = [[tier.name, _step(tier), *(_seconds(of(tier.step)) for of in columns.values())] for tier in tiers]
    return format_table(lines, ["time", "step", *columns])


def _micro_batch_lines(loop: Tier, asked: Asked) -> list[str]:
    """Return lines that compare a loop over micro-batches with ``engine.accumulate()``; none if neither fits, or if
    the comparison was not asked for."""
    whole = loop.accumulate
    if whole is None or not (loop.fits or whole.fits):
        return []
    ways = {"loop": loop, "accumulate": whole}
    header = [f"{asked.args.micro_batches} micro-batches", "to device", "to host", "from disk", "to ranks"]
    differ = _host_gradients(loop) != _host_gradients(whole)
    rows = []
    for name, tier in ways.items():
        traffic = tier.traffic
        sizes = [traffic.to_device, traffic.to_host, traffic.disk_read, traffic.sent]
        sizes += [_host_gradients(tier)] * differ
        rows.append([name, *map(format_bytes, map(round, sizes)), _step(tier)])
    lines = [_faster(loop, asked)]
    for name, tier in ways.items():
        lines += [f"{name} does not fit: {_short(tier, where, asked)}" for where in tier.missing]
    if whole.inputs is not None:
        places = {"on the host": whole.inputs.on_host, "on the device": whole.inputs.on_device}
        where = " and ".join(f"{format_bytes(n)} {place}" for place, n in places.items() if n)
        lines.append(f"inputs of blocks that wait in accumulate: {where}{_to_host(whole, asked)}")
    table = format_table(rows, [*header, *["host gradients"] * differ, "step"])
    return ["", table, *(fill(line, _COLUMNS, subsequent_indent="  ", break_on_hyphens=False) for line in lines)]


def _host_gradients(tier: Tier) -> int:
    """Return the bytes of gradients in host memory, with those of a device whose memory is the host's."""
    rows = [
        row for row in tier.plan.rows if row.what == GRADIENTS_ON_HOST or (tier.plan.shared and row.what == GRADIENTS)
    ]
    return sum(row.n_bytes for row in rows)


def _to_host(tier: Tier, asked: Asked) -> str:
    """Name the setting that moves the inputs of blocks to the host, if the device has too little memory for them but
    enough for all else; else empty."""
    device, inputs = asked.device_memory, tier.inputs
    if inputs is None or DEVICE not in tier.missing or device is None:
        return ""
    if tier.plan.device_bytes - inputs.on_device > device:
        return ""
    return f"; with host_activation_memory={inputs.n_bytes} they wait on the host"


def _factor(loop: Tier) -> float | None:
    """Return how many times as fast ``engine.accumulate()`` is as the loop; None: unknown."""
    whole = loop.accumulate
    if whole is None or not (loop.step.is_known and whole.step.is_known):
        return None
    return loop.step.seconds / whole.step.seconds


def _faster(loop: Tier, asked: Asked) -> str:
    factor = _factor(loop)
    if factor is None:
        step, args = loop.step, asked.args
        options = {
            "--link-bandwidth": step.to_host is None or step.to_device is None,
            "--disk-bandwidth": step.disk is None,
            "--device-bandwidth": step.on_device is None,
            "--flops": args.flops is None,
            "--tokens": args.tokens is None,
        }
        needed = [option for option, wanted in options.items() if wanted]
        return f"which of them is faster is not known: give {', '.join(needed)}"
    exchange = " (the exchange between ranks is not counted)" if asked.args.world_size > 1 else ""
    if f"{factor:.2f}" == "1.00":
        return f"loop and accumulate take the same time{exchange}"
    slow, fast = ("loop", "accumulate") if factor > 1 else ("accumulate", "loop")
    return f"{fast} is {max(factor, 1 / factor):.2f} times as fast as {slow}{exchange}"


def _matrix_flops(tier: Tier) -> str:
    """Say how the work with matrices is spread over the ranks; empty if there is none."""
    most, mean = max(tier.matrix_flops), sum(tier.matrix_flops) / len(tier.matrix_flops)
    if not most:
        return ""
    n = len(tier.matrix_flops)
    share = f", the busiest of {n} ranks {most / mean:.2f} of the mean" if n > 1 else ""
    return f"matrices: {2 * most:.3g} operations a step on a rank, in bfloat16{share}"


def _alike(tiers: Sequence[Tier]) -> list[list[Tier]]:
    """Join tiers with equal needs: on one rank stages differ only by name."""
    found: dict[tuple, list[Tier]] = {}
    for tier in tiers:
        found.setdefault(tuple((row.what, row.n_bytes) for row in tier.plan.rows), []).append(tier)
    return list(found.values())


def _short(tier: Tier, where: str, asked: Asked) -> str:
    has = tier.plan.free(where, asked.host, asked.device_memory)
    what = f"{where} {'memory' if where in (HOST, DEVICE) else 'space'}"
    return f"{format_bytes(tier.missing[where])} of {what}, of {format_bytes(has or 0)}: {tier.plan.largest(where)}"


def _step(tier: Tier) -> str:
    return "at least " * (not tier.step.is_known) + _seconds(tier.step.seconds)


def _seconds(value: float | None) -> str:
    return "not known" if value is None else f"{value * 1e3:.0f} ms" if value < 10 else f"{value:.1f} s"


def _or(value: Any, to_text: Any, otherwise: str) -> str:
    return otherwise if value is None else to_text(value)


def _in_short(tier: Tier) -> dict[str, Any]:
    return {
        **tier.about,
        "fits": tier.fits,
        "host_bytes": tier.plan.host_bytes,
        "disk_bytes": _on_a_disk(tier),
        "update": tier.step.update,
    }


def _as_json(tier: Tier) -> dict[str, Any]:
    return {
        **tier.about,
        "fits": tier.fits,
        "missing": tier.missing,
        "host_bytes": tier.plan.host_bytes,
        "device_bytes": tier.plan.device_bytes,
        "disk_bytes": _on_a_disk(tier),
        "states": tier.states,
        "link_bytes": tier.traffic.to_host + tier.traffic.to_device,
        "rows": [
            {k: v for k, v in asdict(row).items() if k not in ("passing", "brief", "leaves")}
            for row in tier.plan.rows
            if row.n_bytes
        ],
        "step": {**asdict(tier.step), "seconds": tier.step.seconds},
        "matrix_work": tier.matrix_flops,
        "disk": tier.disk and asdict(tier.disk),
        **({} if tier.accumulate is None else {"comparison": _comparison_as_json(tier, tier.accumulate)}),
    }


def _comparison_as_json(loop: Tier, whole: Tier) -> dict[str, Any]:
    return {
        "faster_by": _factor(loop),
        "inputs": whole.inputs and {**asdict(whole.inputs), "bytes": whole.inputs.n_bytes},
        **{
            name: {
                "traffic": asdict(tier.traffic),
                "host_gradients": _host_gradients(tier),
                "fits": tier.fits,
                "missing": tier.missing,
                "step": {**asdict(tier.step), "seconds": tier.step.seconds},
            }
            for name, tier in (("loop", loop), ("accumulate", whole))
        },
    }
