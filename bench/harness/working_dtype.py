"""The type that the CPU's parts compute in: fp32 where PyTorch multiplies bf16 matrices many times as slowly.

PyTorch does so on x86 processors without AVX-512 (docs/troubleshooting.md). A step in bf16 would take minutes there,
and measure only that slowness. The type is chosen by a measurement, because it decides what the benchmarks compare.
"""

import subprocess
import sys
from typing import NamedTuple

from bench.harness.rounds import interleave, timed

SLOW = 4.0
"""The ratio of times, bf16 to fp32, above which the parts compute in fp32."""


class WorkingDtype(NamedTuple):
    """The type's name, and the time of a matrix product in bf16 divided by its time in fp32."""

    name: str
    slowdown: float

    @property
    def words(self) -> str:
        return "bf16" if self.name == "bfloat16" else "fp32"

    @property
    def notes(self) -> list[str]:
        """The notes that a reader of the results needs."""
        if self.name == "bfloat16":
            return []
        return [
            "in fp32: on this processor a matrix product in bf16 takes PyTorch "
            f"{self.slowdown:.0f} times as long as one in fp32; targets are of bf16 and do not count here"
        ]


def working_dtype(threads: int) -> WorkingDtype:
    """Measure the ratio in a separate process, and return the type to compute in."""
    command = [sys.executable, "-m", __name__, str(threads)]
    return of(float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout))


def of(slowdown: float) -> WorkingDtype:
    return WorkingDtype("float32" if slowdown > SLOW else "bfloat16", slowdown)


def slowdown(threads: int) -> float:
    """Return the least time of a product of 128 x 512 by 512 x 2048 in bf16, divided by the least in fp32."""
    import torch

    torch.set_num_threads(threads)
    x, weight = torch.randn(128, 512), torch.randn(512, 2048)
    narrow = x.bfloat16(), weight.bfloat16()
    times = interleave({"bf16": timed(lambda: narrow[0] @ narrow[1]), "fp32": timed(lambda: x @ weight)}, 3)
    return min(times["bf16"]) / min(times["fp32"])


if __name__ == "__main__":
    print(slowdown(int(sys.argv[1])))
