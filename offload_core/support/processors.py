"""The number of processors that this process may use."""

import math
import os
from pathlib import Path

from . import control_groups, launchers


def _quota(root: Path = control_groups.ROOT, membership: Path = control_groups.MEMBERSHIP) -> int | None:
    """Processors' worth of time that the control groups above this process grant, rounded up; None: no bound."""
    quotas = []
    for folder, version in control_groups.folders("cpu", root, membership):
        try:
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{what}_us").read_text() for what in ("quota", "period"))
            if int(quota) > 0:
                quotas.append(math.ceil(int(quota) / int(period)))
        except (OSError, ValueError):
            pass  # no bound here ("max"), or no such file
    return min(quotas, default=None)


def available_cpus() -> int:
    """Processors in this process's affinity mask, bounded by its control groups' quota and what Slurm gave its task."""
    if hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    else:  # macOS
        cpus = os.cpu_count() or 1
    return max(1, min(cpus, _quota() or cpus, launchers.granted_cpus() or cpus))


def default_threads() -> int:
    """This process's share of the processors that it sees; the ranks on this machine divide them.

    ``OMP_NUM_THREADS`` is ignored, because launchers set it to 1.
    """
    return launchers.share_of_cpus(available_cpus())
