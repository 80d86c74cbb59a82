"""``python -m offload_core plan``: the memory to train a model in each stage, and the time of a step."""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

from ..config.options import OffloadConfig
from ..config.state_formats import SHORT_NAMES
from ..device.exchange_sizes import REFUSED_DEVICES, planned_device, planned_jax_device
from ..dtypes import BFLOAT16, BY_NAME, ElementType
from ..errors import ConfigError
from ..memory.host_memory import available_bytes, format_bytes
from ..memory.plan import DEVICE, HOST, MemoryPlan, format_table
from ..plans.at_once import rows_at_once
from ..plans.planner import NARROWER, Planner
from ..plans.prediction import Speeds, StepTime, predict
from ..plans.terms import BucketTerms
from ..rules import RULES
from ..step.loss_scale import scaler_for
from ..support.processors import default_threads
from ..support.units import count, mesh, rate, size
from .jax_shapes import MeshPart
from .machine import measure_bandwidths
from .model_shapes import GPTS, LEAST, MOST, Shapes, gpt_of, shapes_of, specs_of

HELP = "what training a model takes on host and device in each stage, whether it fits, and the time of a step"
EXAMPLE = """example: does a 7 B model train on a GPU of 24 GB?
  python -m offload_core plan --parameters 7B --device-memory 24GB --host-memory 128GB
the same of a model's files, or of its Hugging Face configuration:
  python -m offload_core plan --model Qwen3-8B/config.json --device-memory 24GB --host-memory 128GB
in JAX, parameters sharded over a mesh of 4 x 2 devices of one process:
  python -m offload_core plan --frontend jax --mesh 4x2 --parameters 7B --device-memory 24GB

Sizes may be given in GB (10^9 bytes) or GiB (2^30); they are printed in GiB, so that 64GB is 59.6 GiB.
The exit status is 0 if a stage fits, 1 if none does."""
_COLUMNS = 100
"""The most columns of the output."""
_TIERS: tuple[tuple[int, str | None], ...] = ((1, None), (2, None), (3, None), (3, "cpu"))
_FIELDS = (
    "reduce_bucket_size",
    "gradient_accumulation_steps",
    "max_live_parameters",
    "schedule",
    "update_in_backward",
    "state_format",
    "master_dtype",
    "optimizer",
    "momentum",
    "activation_memory",
    "host_activation_memory",
)
_FORMATS: dict[str, dict[str, Any]] = {"state_format='fp32'": {"state_format": "fp32", "master_dtype": None}} | NARROWER


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--preset", choices=tuple(GPTS), help="a GPT of this size")
    model.add_argument(
        "--parameters", type=partial(count, least=LEAST, most=MOST), metavar="N", help="a GPT of about so many, as 10B"
    )
    model.add_argument(
        "--model",
        "--safetensors",
        type=Path,
        metavar="PATH",
        help="a .safetensors file, an index of several, a Hugging Face config.json, or the folder of one of these",
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
    add("--offload-param", choices=("cpu", "none"), help="ask for this tier of stage 3 alone")
    add("--world-size", type=count, default=1, metavar="W", help="ranks, in JAX processes (default: 1)")
    add("--local-world-size", type=count, metavar="W", help="of them on one machine, whose memory they share (all)")
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
    for name in _FIELDS[:3]:
        add(f"--{name.replace('_', '-')}", type=count, metavar="N", help=f"as OffloadConfig.{name}")
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
    add("--flops", type=count, metavar="N", help="operations a second that each device reaches, such as 50T")
    add("--tokens", type=count, metavar="N", help="of each rank a step; with --flops the compute time is predicted")
    add("--activation-checkpointing", action="store_true", help="activations are computed again in backward")
    add("--json", action="store_true", help="print one JSON object; sizes in bytes, times in seconds")


@dataclass(frozen=True)
class _Tier:
    """The plan for one stage; in JAX for one way to give gradients."""

    about: dict[str, Any]
    """The settings of the plan."""
    plan: MemoryPlan
    missing: dict[str, int]
    step: StepTime
    matrix_work: list[int]
    """The multiplications of each rank with matrices."""

    @property
    def name(self) -> str:
        if "donate" in self.about:
            return "update(grads, donate=True)" if self.about["donate"] else "update(grads)"
        stage, tier = self.about["stage"], self.about["offload_param"]
        return f"stage {stage}" + (f", offload_param={tier!r}" if tier else "")

    @property
    def fits(self) -> bool:
        return not self.missing


def run(args: argparse.Namespace) -> int:
    _check(args)
    what, shapes, dtypes = _model(args)
    processes = args.local_world_size or args.world_size
    host = available_bytes() if args.host_memory is None else args.host_memory
    dram = args.dram_bandwidth or measure_bandwidths(default_threads()).dram
    speeds = Speeds(dram, args.link_bandwidth, args.flops)
    in_jax = args.frontend == "jax"
    part = MeshPart(args.mesh or (args.world_size,), args.world_size)
    devices = part.devices if in_jax else 1

    def tiers_with(**fields: Any) -> list[_Tier]:
        given = argparse.Namespace(**vars(args) | fields)
        if in_jax:
            return [_jax_plan(given, part, donate, shapes, dtypes, host, processes, speeds) for donate in (True, False)]
        return [
            _plan(given, stage, tier, shapes, dtypes, host, processes, speeds)
            for stage, tier in _TIERS
            if args.stage in (None, stage) and args.offload_param in (None, tier or "none")
        ]

    tiers = tiers_with()
    formats = {setting: tiers_with(**fields) for setting, fields in _FORMATS.items()}
    fitting = [tier for tier in tiers if tier.fits]
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
                    "local_world_size": processes,
                    "host_memory": host,
                    "device_memory": args.device_memory,
                    "activation_memory": args.activation_memory or None,
                    "host_activation_memory": args.host_activation_memory or None,
                    "speeds": asdict(speeds),
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
        measured = "measured here" if args.dram_bandwidth is None else "as given"
        link = "not known" if speeds.link is None else f"{speeds.link / 1e9:.1f} GB/s each way"
        ranks = "rank(s)"
        if in_jax:
            ranks = f"process(es) of {devices} device(s)"
        kinds = [dtypes] if isinstance(dtypes, ElementType) else dtypes.values()
        in_types = args.param_dtype or "/".join(sorted({dtype.name for dtype in kinds}))
        print(f"{what}: {numel:,} parameters, {args.world_size} {ranks}, {processes} a machine, on {args.device}")
        device = _or(args.device_memory, format_bytes, "any")
        print(f"memory: host {format_bytes(host)} a machine, device {device}; parameters are {in_types}")
        print(f"bandwidth: host {speeds.dram / 1e9:.1f} GB/s ({measured}), link {link}")
        counted = (
            "as given" if args.activation_memory or args.host_activation_memory else "not counted (--activation-memory)"
        )
        whose = "a rank's" if not in_jax else "a process's" + ", its devices together" * (devices > 1)
        print(f"sizes are {whose}; activations: {counted}\n")
        print(f"{_memory_table(tiers)}\n\n{_time_table(tiers)}\n\n{_format_table(formats)}")
        if work := _matrix_work(tiers[0]):
            print(f"\n{work}")
        for alike in _alike(tiers):
            print(f"\n{' and '.join(tier.name for tier in alike)}\n{alike[0].plan.table()}")
        if not fitting:
            print("\nnothing fits:")
            for tier in tiers:
                needs = "; ".join(_short(tier, where, host, args, devices) for where in tier.missing)
                print(fill(f"  {tier.name}: {needs}", _COLUMNS, subsequent_indent="    ", break_on_hyphens=False))
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
    if (args.flops is None) != (args.tokens is None):
        raise ConfigError("--flops and --tokens predict the compute time together; expected both or neither")
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
    if args.offload_param == "cpu" and args.stage not in (None, 3):
        raise ConfigError(f"--offload-param cpu is of stage 3; expected no --stage {args.stage}")


def _model(args: argparse.Namespace) -> tuple[str, Shapes, ElementType | dict[str, ElementType]]:
    if args.model is not None:
        return str(args.model), *shapes_of(args.model)
    if args.preset is not None:
        return args.preset, GPTS[args.preset].shapes, BFLOAT16
    gpt = gpt_of(args.parameters)
    return f"a GPT of {gpt.layers} layers of width {gpt.width}", gpt.shapes, BFLOAT16


def _plan(
    args: argparse.Namespace,
    stage: int,
    tier: str | None,
    shapes: Shapes,
    dtypes: ElementType | dict[str, ElementType],
    host: int,
    processes: int,
    speeds: Speeds,
) -> _Tier:
    given = {name: getattr(args, name) for name in _FIELDS if getattr(args, name) is not None}
    config = OffloadConfig(stage=stage, offload_param=tier, param_dtype=args.param_dtype, **given)
    on_host = args.device == "cpu"
    specs = specs_of(shapes, dtypes, config, args.world_size)
    scaled = scaler_for(config, [spec.dtype for spec in specs]) is not None
    terms = BucketTerms(config, planned_device(args.world_size, addressable=on_host), scaled=scaled)
    plan = Planner(terms).plan(specs)
    step = predict(
        terms,
        specs,
        speeds,
        processes=processes,
        tokens=args.tokens,
        checkpointing=args.activation_checkpointing,
    )
    about = {"stage": stage, "offload_param": tier}
    missing = plan.missing(host, args.device_memory, processes=processes)
    return _Tier(about, plan, missing, step, Planner(terms).matrix_work(specs))


def _jax_plan(
    args: argparse.Namespace,
    part: MeshPart,
    donate: bool,
    shapes: Shapes,
    dtypes: ElementType | dict[str, ElementType],
    host: int,
    processes: int,
    speeds: Speeds,
) -> _Tier:
    given = {name: getattr(args, name) for name in _FIELDS if getattr(args, name) is not None}
    config = OffloadConfig(param_dtype=args.param_dtype, **given)
    on_host = args.device == "cpu"
    terms = BucketTerms(config, planned_jax_device(on_host=on_host))
    specs, arrays = part.specs_of(shapes, dtypes, config, on_host=on_host)
    rows = [*Planner(terms).host_rows(specs), *rows_at_once(terms, specs, arrays, on_host=on_host, donate=donate)]
    rows += Planner(terms).activations(part.devices)
    numel = sum(spec.numel for spec in specs)
    plan = MemoryPlan(
        tuple(rows), numel, shared=on_host, savings=Planner(terms).savings(specs), free_elsewhere=terms.free_elsewhere
    )
    step = predict(
        terms,
        specs,
        speeds,
        processes=processes,
        devices=part.devices,
        numel=sum(map(math.prod, shapes.values())),
        tokens=args.tokens,
        checkpointing=args.activation_checkpointing,
    )
    device = None if args.device_memory is None else part.devices * args.device_memory
    missing = plan.missing(host, device, processes=processes)
    return _Tier({"donate": donate}, plan, missing, step, Planner(terms).matrix_work(specs))


def _memory_table(tiers: Sequence[_Tier]) -> str:
    places = [HOST, DEVICE, *dict.fromkeys(where for tier in tiers for where in tier.plan.elsewhere)]
    lines = [
        [
            tier.name,
            *(format_bytes(tier.plan.bytes_in(where)) for where in places),
            "yes" if tier.fits else f"no: too little {' and '.join(tier.missing)} memory",
        ]
        for tier in tiers
    ]
    return format_table(lines, ["memory", *places, "fits"])


def _format_table(formats: Mapping[str, Sequence[_Tier]]) -> str:
    """Return a table of the bytes that other formats of states need, in the tier that needs the least host memory."""
    lines = []
    for setting, tiers in formats.items():
        least = min(tiers, key=lambda tier: tier.plan.host_bytes)
        fitting = [tier.name for tier in tiers if tier.fits]
        fits = "nowhere" if not fitting else "everywhere" if len(fitting) == len(tiers) else "; ".join(fitting)
        lines.append([setting, format_bytes(least.plan.host_bytes), _seconds(least.step.update), fits])
    return format_table(lines, ["states (docs/formats.md)", "host, at least", "update, by bytes", "fits"])


def _time_table(tiers: Sequence[_Tier]) -> str:
    lines = [
        [
            tier.name,
            "at least " * (None in (tier.step.to_host, tier.step.compute)) + _seconds(tier.step.seconds),
            *map(_seconds, (tier.step.update, tier.step.to_host, tier.step.to_device, tier.step.compute)),
        ]
        for tier in tiers
    ]
    return format_table(lines, ["time", "step", "of it: update", "to host", "to device", "compute"])


def _matrix_work(tier: _Tier) -> str:
    """Say how the work with matrices is spread over the ranks; empty if there is none."""
    most, mean = max(tier.matrix_work), sum(tier.matrix_work) / len(tier.matrix_work)
    if not most:
        return ""
    n = len(tier.matrix_work)
    share = f", the busiest of {n} ranks {most / mean:.2f} of the mean" if n > 1 else ""
    return f"matrices: {2 * most:.3g} operations a step on a rank, in bfloat16{share}"


def _alike(tiers: Sequence[_Tier]) -> list[list[_Tier]]:
    """Join tiers with equal needs: on one rank stages differ only by name."""
    found: dict[tuple, list[_Tier]] = {}
    for tier in tiers:
        found.setdefault(tuple((row.what, row.n_bytes) for row in tier.plan.rows), []).append(tier)
    return list(found.values())


def _short(tier: _Tier, where: str, host: int, args: argparse.Namespace, devices: int) -> str:
    has = host if where == HOST else devices * args.device_memory
    return f"{format_bytes(tier.missing[where])} of {where} memory, of {format_bytes(has)}: {tier.plan.largest(where)}"


def _seconds(value: float | None) -> str:
    return "not known" if value is None else f"{value * 1e3:.0f} ms" if value < 10 else f"{value:.1f} s"


def _or(value: Any, to_text: Any, otherwise: str) -> str:
    return otherwise if value is None else to_text(value)


def _in_short(tier: _Tier) -> dict[str, Any]:
    return {**tier.about, "fits": tier.fits, "host_bytes": tier.plan.host_bytes, "update": tier.step.update}


def _as_json(tier: _Tier) -> dict[str, Any]:
    return {
        **tier.about,
        "fits": tier.fits,
        "missing": tier.missing,
        "host_bytes": tier.plan.host_bytes,
        "device_bytes": tier.plan.device_bytes,
        "rows": [
            {k: v for k, v in asdict(row).items() if k not in ("passing", "brief")}
            for row in tier.plan.rows
            if row.n_bytes
        ],
        "step": {**asdict(tier.step), "seconds": tier.step.seconds},
        "matrix_work": tier.matrix_work,
    }
