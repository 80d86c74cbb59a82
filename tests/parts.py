"""The parts of ``make test-all``: what is too slow for every run of ``make test``.

``python -m tests.parts`` runs all of them and ``--part NAME`` runs one. ``--part share`` runs a slice of one, of about
two minutes, which the commit chooses: each commit runs the slice after that of the commit before, and a series of them
runs all. Other arguments are pytest's.
"""

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

from tests.sampling import commit_number

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "kernels": ["kernels", "mutation/test_mutations.py"],
    "device-kernels": ["device_kernels"],
    "waits": ["mutation/test_waits.py", "mutation/test_device_waits.py"],
    "core": ["core", "checkpoint", "packaging/test_setup.py"],
    "laws": ["laws"],
    "torch": ["torch_frontend"],
    "jax": ["jax_frontend", "gpu"],
    "integrations": ["integrations"],
    "pages": ["packaging/test_docs.py"],
    "bench": ["bench"],
}
"""The tests marked slow, by part. ``test_parts.py`` checks that none is in no part."""
LATE = [
    "core/test_pipeline.py",
    "core/test_ranks.py",
    "core/test_state_formats.py",
    "core/test_gradient_memory.py",
    "core/test_finalized_gradients.py",
    "core/test_live_params.py",
    "core/test_trace.py",
    "checkpoint",
    "torch_frontend/test_torch_optimizer.py",
    "torch_frontend/test_optimizer_behaviours.py",
    "torch_frontend/test_state_formats.py",
    "torch_frontend/test_rules.py",
    "torch_frontend/test_sgd.py",
    "torch_frontend/test_torch_checkpoint.py",
    "torch_frontend/test_torch_overlap.py",
    "laws",
    "torch_frontend/test_partitioned.py",
    "torch_frontend/test_data_writes.py",
    "torch_frontend/test_put_back.py",
    "jax_frontend/test_jax.py",
    "jax_frontend/test_jax_rules.py",
    "jax_frontend/test_jax_checkpoint.py",
    "jax_frontend/mesh/test_bits.py",
    "jax_frontend/mesh/test_formats.py",
    "jax_frontend/mesh/test_states.py",
]
"""The laws that parts ``store`` and ``disk`` check again, with states in a late store and on disk."""
STAGE_3 = [
    *(
        f"torch_frontend/test_{name}.py"
        for name in (
            *("partitioned", "partitioned_ranks", "construction", "put_back", "data_writes", "muon"),
            *("rules", "split_masters", "taking_over", "casting", "deepspeed_weights", "torch_ranks", "signals"),
            *("torch_checkpoint", "torch_checkpoint_ranks", "simulated_ranks", "simulated_device", "devices"),
            *("inputs_and_sizes", "device_failures", "graphs_that_leave", "saved_activations", "torch_trace"),
        )
    ),
    "checkpoint/test_export.py",
    "integrations/test_mixtures.py",
    "integrations/test_peft.py",
    "integrations/test_quantised.py",
]
"""The laws that part ``parameters`` checks again, with parameters of stage 3 on disk."""
ON_DEVICE = [
    *(f"core/test_{name}.py" for name in ("pipeline", "ranks", "state_formats", "gradient_access", "trace")),
    *("core/test_finalized_gradients.py", "core/test_live_params.py", "checkpoint", "laws"),
    *(
        f"torch_frontend/test_{name}.py"
        for name in (
            *("simulated_device", "simulated_ranks", "devices", "device_failures", "compiled_blocks", "construction"),
            *("generating", "gradient_access", "layerwise", "optimizer_behaviours", "partitioned", "release"),
            *("release_ranks", "several_engines", "torch_engine", "torch_overlap", "torch_trace"),
        )
    ),
]
"""The laws that parts ``device`` and ``half-device`` check again, with states in the device's memory."""
STORE_OF = {
    "store": ("late", LATE),
    "disk": ("disk", LATE),
    "parameters": ("nvme", STAGE_3),
    "device": ("device", ON_DEVICE),
    "half-device": ("half device", ON_DEVICE),
}
"""The store of each of these parts, and the files."""
PYTHONS = {f"python-{version}": f"other-{version}" for version in ("3.12", "3.13", "3.14")}
"""The core, the kernels and JAX's laws on another Python: a part, and the target of make that runs it."""
WITH_DEEPSPEED = [
    "core/test_deepspeed_installed.py",
    "torch_frontend/deepspeed",
    "torch_frontend/test_deepspeed_runs.py",
]
"""The tests of part ``deepspeed``, which installs DeepSpeed first. They are in no other part, where they would skip."""
PARTS = [*FOLDERS, "deepspeed", *STORE_OF, *PYTHONS]
LONG = {
    "kernels": 4,
    "device-kernels": 2,
    "core": 12,
    "laws": 12,
    "torch": 20,
    "jax": 12,
    "integrations": 8,
    "store": 6,
    "disk": 6,
    "parameters": 6,
    "device": 4,
    "half-device": 4,
}
"""Into how many slices a part is cut that takes more than two minutes."""
SLICES = [(part, i, n) for i in range(max(LONG.values())) for part in PARTS if i < (n := LONG.get(part, 1))]
"""All that ``--part share`` chooses from, each time of another part: a part, the slice's number, and of how many."""


def command_of(part: str, arguments: list[str]) -> list[str]:
    if part in PYTHONS:
        return ["make", "--no-print-directory", PYTHONS[part]]
    if part == "deepspeed":
        files = " ".join(f"tests/{path}" for path in WITH_DEEPSPEED)
        return ["make", "--no-print-directory", "with-deepspeed", f"ARGS={shlex.join(arguments)}", f"FILES={files}"]
    if part in STORE_OF:
        store, files = STORE_OF[part]
        chosen = ["--store", store, "-m", "not slow and not soak"]
    else:
        files, chosen = FOLDERS[part], ["-m", "slow", "--whole", *(f"--ignore=tests/{path}" for path in WITH_DEEPSPEED)]
    return [sys.executable, "-m", "pytest", "-q", *chosen, *(f"tests/{path}" for path in files), *arguments]


def share() -> tuple[str, list[str]]:
    """Return the part that the commit chooses, and the option of pytest that takes a slice of it."""
    part, i, count = SLICES[commit_number() % len(SLICES)]
    return part, [f"--slice={i}/{count}"] if count > 1 else []


def run(part: str, arguments: list[str]) -> bool:
    """Run one part; True if it passed."""
    said = "".join(f' ARGS="{each}"' for each in arguments if each.startswith("--slice"))
    print(f"\npart {PARTS.index(part) + 1} of {len(PARTS)}: make test-all PART={part}{said}", flush=True)
    start = time.monotonic()
    status = subprocess.run(command_of(part, arguments), cwd=ROOT, check=False).returncode
    passed = status in (0, 5)  # 5: these arguments choose no test of this part
    print(f"part {part}: {'passed' if passed else 'FAILED'} in {time.monotonic() - start:.0f} s", flush=True)
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.parts", description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=[*PARTS, "share"])
    options, arguments = parser.parse_known_args()
    parts = [options.part] if options.part else PARTS
    if options.part == "share":
        part, chosen = share()
        parts, arguments = [part], [*chosen, *arguments]
    failed = [part for part in parts if not run(part, arguments)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}. To run one alone: make test-all PART={failed[0]}")


if __name__ == "__main__":
    main()
