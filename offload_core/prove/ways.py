"""The ways in which one small training runs. Those of one task have equal bits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STEPS = 6
"""Updates of the training."""


@dataclass(frozen=True)
class Run:
    """A part of a way: some updates by one front end. It begins with the checkpoint of the part before it."""

    program: str = "engine"
    """What trains: a function of the front end's ``prove`` module."""
    ranks: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``OffloadConfig`` that this part adds to the task's. For JAX also ``mesh``, the mesh's shape."""
    frontend: str = "torch"
    instruction_set: str | None = None
    """None: the widest that the processor has."""


@dataclass(frozen=True)
class Way:
    """A line of the table."""

    name: str
    runs: tuple[Run, ...]
    quick: bool = False
    """True: it is one of ``--quick``."""


@dataclass(frozen=True)
class Task:
    """One training, by all of its ways. Each is compared with the first that ran."""

    name: str
    settings: Mapping[str, Any]
    """Fields of ``OffloadConfig``."""
    ways: tuple[Way, ...]
    micro_batches: int = 1
    """Different micro-batches of an update. As many ranks have one each; if there is only one, all ranks have it."""
    contrast: bool = False
    """True: other libraries, whose ways may differ."""
    about: str = ""
    """What its ways have in common, for the heading."""


def _way(name: str, *runs: Run, quick: bool = False) -> Way:
    return Way(name, runs, quick)


def _one(name: str, program: str = "engine", ranks: int = 1, quick: bool = False, **settings: Any) -> Way:
    return Way(name, (Run(program, ranks, settings),), quick)


def _jax(name: str, program: str = "engine", quick: bool = False, **settings: Any) -> Way:
    return Way(name, (Run(program, 1, settings, "jax"),), quick)


ADAMW: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
STAGE_3: dict[str, Any] = {"stage": 3, "param_persistence_threshold": 0}
"""All parameters are partitioned: each has fewer elements than the default threshold."""
ON_HOST: dict[str, Any] = {"offload_param": "cpu", **STAGE_3}
ON_DISK: dict[str, Any] = {"offload_optimizer": "nvme", "nvme_host_bytes": 0, "nvme_path": "."}
HALF_ON_DISK: dict[str, Any] = {"offload_optimizer": "nvme", "nvme_host_bytes": 600_000, "nvme_path": "."}
PARAMS_ON_DISK: dict[str, Any] = {"offload_param": "nvme", **STAGE_3, **ON_DISK}


def tasks(instruction_sets: tuple[str, ...]) -> tuple[Task, ...]:
    """All tasks, on a processor with these instruction sets."""
    by_set = [Way(f"instruction set {name}", (Run(instruction_set=name),), True) for name in instruction_sets]
    return (
        Task(
            "AdamW",
            ADAMW,
            (
                _one("the definition, in NumPy", "definition", quick=True),
                _one("torch's fused AdamW; padded, as it rounds tails otherwise", "torchs_adamw", quick=True),
                _one("one rank", quick=True),
                _one("OffloadedAdamW in a loop of one's own", "optimizer"),
                _one("stage 1, 2 ranks", ranks=2, stage=1),
                _one("stage 2, 2 ranks", ranks=2, quick=True),
                _one("stage 3, 2 ranks", ranks=2, **STAGE_3),
                _one("stage 2, 4 ranks", ranks=4),
                _one("stage 3, 4 ranks", ranks=4, **STAGE_3),
                _one("buckets of 1,000 elements", reduce_bucket_size=1000, quick=True),
                _one("buckets of 7,777 elements, 4 ranks", ranks=4, reduce_bucket_size=7777),
                _one("1 thread", num_threads=1),
                _one("3 threads", num_threads=3),
                *by_set,
                _one("serial: the update after backward", schedule="serial"),
                _one("serial, 2 ranks", ranks=2, schedule="serial"),
                _one("update in backward", update_in_backward=True),
                _one("update in backward, 2 ranks", ranks=2, update_in_backward=True),
                _one("states on disk", **ON_DISK, reduce_bucket_size=20_000, quick=True),
                _one("half of the states on disk", **HALF_ON_DISK, reduce_bucket_size=20_000),
                _one("states on the device", "states_on_device", offload_optimizer=None),
                _one(
                    "half of the states on the device",
                    "states_on_device",
                    device_states_bytes=0.5,
                    reduce_bucket_size=20_000,
                ),
                _one("parameters on the host", **ON_HOST),
                _one("parameters on the host, 2 ranks", ranks=2, **ON_HOST),
                _one("parameters on disk", **PARAMS_ON_DISK, reduce_bucket_size=20_000),
                _one("FSDP2, 2 ranks", "fsdp2", ranks=2),
                _one("FSDP2, 4 ranks", "fsdp2", ranks=4),
                _one("released and restored between steps", "released"),
                _one("released and restored, parameters on the host, 2 ranks", "released", 2, **ON_HOST),
                _one("a DeepSpeed script, through frontends.torch.deepspeed", "deepspeed"),
                _one("Hugging Face's Trainer", "trainer"),
                _way(
                    "resumed: 2 ranks, then stage 3 on disk, then 4 ranks",
                    Run(ranks=2),
                    Run(settings={**PARAMS_ON_DISK, "reduce_bucket_size": 20_000}),
                    Run(ranks=4, settings=STAGE_3),
                ),
                _way(
                    "resumed: torch, then JAX (torch's gradients), then torch",
                    Run(),
                    Run("given_gradients", frontend="jax", settings={"op_order": "torch"}),
                    Run(ranks=2, settings=STAGE_3),
                ),
            ),
            about="the same batch for all ranks",
        ),
        Task(
            "AdamW, two micro-batches",
            ADAMW,
            (
                _one("the definition, in NumPy", "definition", quick=True),
                _one("one after the other", quick=True),
                _one("block by block, parameters on the host", "layerwise", **ON_HOST, quick=True),
                _one("a rank each, stage 2", ranks=2, quick=True),
                _one("a rank each, stage 3", ranks=2, **STAGE_3),
                _one("a rank each, FSDP2", "fsdp2", ranks=2),
            ),
            micro_batches=2,
        ),
        Task(
            "AdamW, four micro-batches",
            ADAMW,
            (
                _one("the definition, in NumPy", "definition"),
                _one("one after the other"),
                _one("block by block, parameters on the host", "layerwise", **ON_HOST),
                _one("a rank each, stage 2", ranks=4),
                _one("a rank each, stage 3, buckets of 7,777 elements", ranks=4, reduce_bucket_size=7777, **STAGE_3),
            ),
            micro_batches=4,
        ),
        Task(
            "AdamW, clipped",
            ADAMW | {"gradient_clipping": 0.5},
            (
                _one("the definition, in NumPy", "definition", quick=True),
                _one("one rank", quick=True),
                _one("stage 3, 4 ranks", ranks=4, **STAGE_3),
                _one("FSDP2, 2 ranks", "fsdp2", ranks=2),
                _one("states on disk", **ON_DISK, reduce_bucket_size=20_000),
                _way("instruction set scalar", Run(instruction_set="scalar"), quick=True),
            ),
        ),
        Task(
            "AdamW, bf16 parameters",
            ADAMW | {"param_dtype": "bfloat16"},
            (
                _one("the definition, in NumPy", "definition", quick=True),
                _one("one rank", quick=True),
                _one("stage 3, 2 ranks", ranks=2, **STAGE_3),
                _one("parameters on the host, with the lower half of masters", **ON_HOST),
                _one("parameters on disk", **PARAMS_ON_DISK, reduce_bucket_size=20_000),
            ),
        ),
        Task(
            "AdamW, states of 8 bits",
            ADAMW | {"param_dtype": "bfloat16", "state_format": "8bit"},
            (
                _one("one rank", quick=True),
                _way("instruction set scalar", Run(instruction_set="scalar"), quick=True),
                _one("stage 3, 2 ranks, buckets of 1,000", ranks=2, reduce_bucket_size=1000, **STAGE_3),
                _one("states on disk", **ON_DISK, reduce_bucket_size=20_000),
            ),
        ),
        Task(
            "Muon",
            {"optimizer": "muon", "lr": 1e-2, "weight_decay": 0.1},
            (_one("one rank"), _one("stage 3, 2 ranks", ranks=2, **STAGE_3), _one("states on disk", **ON_DISK)),
        ),
        Task(
            "SGD",
            {"optimizer": "sgd", "lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
            (
                _one("the definition, in NumPy", "definition"),
                _one("one rank"),
                _one("stage 3, 2 ranks", ranks=2, **STAGE_3),
            ),
        ),
        Task(
            "AdamW in JAX",
            ADAMW,
            (
                _jax("the definition, in NumPy", "definition", quick=True),
                _jax("optax.adamw, eager", "optax_adamw", quick=True),
                _jax("one device", quick=True),
                _jax("gradients of value_and_grad", "value_and_grad", quick=True),
                _jax("an optax loop", "as_optax"),
                _jax("update(donate=True, donate_params=True)", "donated"),
                _jax("serial, buckets of 777 elements", schedule="serial", reduce_bucket_size=777),
                _jax("states on disk", **ON_DISK, reduce_bucket_size=20_000, quick=True),
                _jax("states over 4 devices", mesh=(4,), quick=True),
                _jax("stage 3 over 4 devices", mesh=(4,), **STAGE_3),
                _jax("parameters sharded over 2 x 2 devices", "sharded", mesh=(2, 2)),
                _jax("released and restored between steps", "released"),
                _way(
                    "resumed: 4 devices, then disk, then stage 3",
                    Run(settings={"mesh": (4,)}, frontend="jax"),
                    Run(settings=ON_DISK, frontend="jax"),
                    Run(settings={"mesh": (2,), **STAGE_3}, frontend="jax"),
                ),
            ),
        ),
        Task(
            "torch's fused AdamW: does splitting tensors change bits?",
            ADAMW,
            (_one("whole tensors", "torchs_whole"), _one("each tensor in two halves", "torchs_cut")),
            contrast=True,
        ),
        Task(
            "FSDP2 with torch's fused AdamW: do ranks change bits?",
            ADAMW,
            (_one("1 rank", "fsdp2_alone"), _one("2 ranks", "fsdp2_alone", ranks=2)),
            contrast=True,
        ),
        Task(
            "DeepSpeedCPUAdam: does splitting tensors change bits?",
            ADAMW,
            (_one("whole tensors", "deepspeeds_whole"), _one("each tensor in two halves", "deepspeeds_cut")),
            contrast=True,
        ),
    )
