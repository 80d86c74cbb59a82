"""The time that ``import frontends.torch`` takes beyond ``import torch``, and the same of JAX.

Fresh processes take turns, with bytecode as an installed package has it. A user with none of the optional libraries
pays for none: ``tests/core/test_imports.py`` says which modules come along.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PAIRS = {"torch": ("torch", "frontends.torch"), "jax": ("jax", "frontends.jax")}
_TIMED = """
import json, os, time
began, used = time.perf_counter(), time.process_time()
import {module}
print(json.dumps([time.perf_counter() - began, time.process_time() - used]))
"""


def import_times(module: str, pycache: str) -> tuple[float, float]:
    """Return the seconds that a fresh process takes to import a module: by the clock, and of the processor."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": path, "PYTHONPYCACHEPREFIX": pycache}
    command = [sys.executable, "-c", _TIMED.format(module=module)]
    wall, cpu = json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
    return wall, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("frameworks", nargs="*", choices=[*PAIRS, []], default=[*PAIRS])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as pycache:
        for framework in options.frameworks:
            times: dict[str, list[tuple[float, float]]] = {module: [] for module in PAIRS[framework]}
            for i in range(options.rounds + 1):
                for module, taken in times.items():
                    one = import_times(module, pycache)
                    if i:  # the first writes bytecode
                        taken.append(one)
            base, ours = ([statistics.median(x) for x in zip(*taken, strict=True)] for taken in times.values())
            for name, a, b in zip(("clock", "processor"), base, ours, strict=True):
                print(
                    f"{framework}, {name}: {a * 1e3:.0f} ms, with the front end {b * 1e3:.0f} ms: "
                    f"{(b - a) * 1e3:+.0f} ms, {b / a:.3f} times (medians of {options.rounds} processes each)"
                )


if __name__ == "__main__":
    main()
