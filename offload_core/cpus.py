"""How many processors this process may use."""

import math
import os
from pathlib import Path


def _cgroup_cpus() -> int | None:
    """Processors' worth of time that the control group grants (``cpu.max``), rounded up; None: no bound."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        quota, period = (Path("/sys/fs/cgroup") / group.lstrip("/") / "cpu.max").read_text().split()
        return None if quota == "max" else math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return None


def available_cpus() -> int:
    """Processors in this process's affinity mask, bounded by its control group's quota."""
    if hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    else:  # macOS
        cpus = os.cpu_count() or 1
    return max(1, min(cpus, _cgroup_cpus() or cpus))


def local_processes() -> int:
    """Processes on this machine that a launcher started together, as ``LOCAL_WORLD_SIZE`` (torchrun) or
    ``SLURM_NTASKS_PER_NODE`` say; without one 1."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        processes = os.environ.get(name, "")
        if processes.isdigit() and int(processes) > 0:
            return int(processes)
    return 1


def default_threads() -> int:
    """This process's share of the processors: those available, over the processes on this machine.

    ``OMP_NUM_THREADS``, which launchers set to 1, is not looked at.
    """
    return max(1, available_cpus() // local_processes())
