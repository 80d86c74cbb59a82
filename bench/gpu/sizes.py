"""The sizes of the models and the numbers of their steps: on an accelerator, and in the rehearsal without one."""

from dataclasses import dataclass

from offload_core.commands.model_shapes import GPT2_VOCABULARY, GPTS, GPTConfig


def _gpt(layers: int, width: int, heads: int) -> GPTConfig:
    return GPTConfig(layers, width, heads, GPT2_VOCABULARY, positions=1024)


def _tiny(layers: int, width: int) -> GPTConfig:
    return GPTConfig(layers, width, heads=2, vocabulary=256, positions=None)


@dataclass(frozen=True)
class Sizes:
    tests: dict[str, list[str]]
    """Arguments of pytest; each entry runs in a separate process. The laws of the torch front end are not among them:
    they take the simulated device, and a process has one accelerator of torch."""
    train: list[str]
    """Arguments of ``bench.train``."""
    gpt: GPTConfig
    """The model of the steps beside others."""
    jax_gpts: dict[str, GPTConfig]
    windows: tuple[int, ...]
    """The windows of a step; each number is a workload."""
    context: int
    rounds: int
    steps: int
    """The counted steps of each contender, workload and round. They follow one that is not counted."""
    warm_up: int
    copied_bytes: int
    device_bytes: int
    """The cap under which the largest model is looked for."""
    ladder: dict[str, GPTConfig]
    """The models that are tried, the smallest first."""
    first: str
    """The first model of the ladder to be tried; then the search halves the ladder."""
    accumulated: dict[str, GPTConfig]
    """The models whose micro-batches pass block by block, in the order in which they are tried."""
    windows_of_micro_batch: int
    accumulated_windows: tuple[int, ...]
    """The windows of a step that is cut into micro-batches; each number is a workload."""
    host_activation_memory: int
    """Bytes of host memory in which inputs of blocks may wait."""


FULL = Sizes(
    tests={
        "torch on the device": ["-m", "gpu", "tests/gpu/test_gpu.py"],
        "JAX on the device": ["-m", "gpu", "tests/gpu/test_gpu_jax.py", "tests/jax_frontend/test_jax_accelerator.py"],
    },
    train=["--preset", "gpt2-124m", "--steps", "20", "--compare", "5"],
    gpt=GPTS["gpt2-1.5b"],
    jax_gpts={"124 M": GPTS["gpt2-124m"], "1.5 B": GPTS["gpt2-1.5b"]},
    windows=(16, 64),
    context=1024,
    rounds=2,
    steps=3,
    warm_up=2,
    copied_bytes=1 << 28,
    device_bytes=32 * 10**9,
    ladder={
        "1.5 B": GPTS["gpt2-1.5b"],
        "3 B": _gpt(36, 2560, 32),
        "6 B": _gpt(29, 4096, 32),
        "8 B": _gpt(39, 4096, 32),
        "9 B": _gpt(44, 4096, 32),
        "10 B": GPTS["gpt2-10b"],
        "13 B": _gpt(40, 5120, 40),
        "20 B": _gpt(44, 6144, 48),
    },
    first="10 B",
    accumulated={"8 B": _gpt(39, 4096, 32), "6 B": _gpt(29, 4096, 32), "3 B": _gpt(36, 2560, 32)},
    windows_of_micro_batch=8,
    accumulated_windows=(8, 32, 128, 512),
    host_activation_memory=8 * 10**9,
)
TINY = Sizes(
    tests={
        "torch on the device": ["-m", "gpu", "tests/gpu/test_gpu.py", "-k", "staging_is_pinned or changed_by_hand"],
        "JAX on the device": ["tests/jax_frontend/test_jax_accelerator.py", "-k", "while_one or donated"],
    },
    train=["--steps", "2", "--compare", "0", "--eval-batches", "1", "--sample-bytes", "0"],
    gpt=_tiny(2, 32),
    jax_gpts={"tiny": _tiny(2, 32)},
    windows=(1, 2),
    context=16,
    rounds=1,
    steps=1,
    warm_up=1,
    copied_bytes=1 << 16,
    device_bytes=4 << 20,
    ladder={"small": _tiny(2, 32), "middle": _tiny(2, 128), "large": _tiny(4, 192), "largest": _tiny(8, 512)},
    first="large",
    accumulated={"large": _tiny(4, 192), "small": _tiny(2, 32)},
    windows_of_micro_batch=1,
    accumulated_windows=(1, 4),
    host_activation_memory=1 << 14,
)
