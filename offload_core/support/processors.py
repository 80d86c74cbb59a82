"""The processors that this process may use, and its share of them beside the other ranks of this machine.

A share is made of physical cores: SMT siblings add nothing to an update, which waits for memory. Where the nodes of the
ranks' devices are known, a rank has cores of its device's node, and the ranks of one node split them. The rules are in
docs/decisions/0019.
"""

import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import control_groups, launchers
from .topology import Topology, numbers

_PROC = Path("/proc")

_trained_on: set[int] = set()
"""The devices that this process trains on, by their numbers among those that it sees. It only grows."""
_node_of_device: Callable[[int], int | None] = dict[int, int]().get


@dataclass(frozen=True)
class Share:
    """The processors for the kernels of one process."""

    cpus: tuple[int, ...]
    """One of each physical core, in the order of nodes."""
    threads: int
    """The number of threads: one for each processor, or fewer if the control group or Slurm grants less."""
    allowed: frozenset[int]
    """The processors that the process may use."""
    nodes: tuple[int, ...]
    """The nodes of its devices, whose cores these are; empty: no node was chosen."""
    why: str
    """The reason, as a sentence's end."""


def train_on(ordinals: Collection[int], node_of: Callable[[int], int | None]) -> None:
    """Note that this process trains on these devices, and on those that were noted before.

    Args:
        ordinals: their numbers among the devices that this process sees.
        node_of: gives the memory node of any device that this process sees; None: unknown, or no such device.
    """
    global _node_of_device
    _trained_on.update(ordinals)
    _node_of_device = node_of


def share() -> Share:
    """This process's share, near the devices that it trains on so far."""
    rank, ranks = launchers.place_on_machine()
    return share_near(nodes_of_ranks(_trained_on, _node_of_device, rank, ranks))


def share_near(near: Sequence[frozenset[int]], root: Path | None = None, proc: Path = _PROC) -> Share:
    """This process's share if the devices of the ranks on this machine are on these nodes."""
    rank, ranks = launchers.place_on_machine()
    allowed = _allowed()
    of_parent = len(_of_parent(allowed, proc))
    together = launchers.cpus_together() or of_parent
    return choose(
        Topology.read(root),
        allowed,
        near,
        rank,
        ranks,
        own=ranks > 1 and len(allowed) * ranks <= together,
        alike=len(allowed) >= together,
        limit=launchers.share_of_cpus(available_cpus(), together=_granted(of_parent)),
    )


def choose(
    topology: Topology,
    allowed: frozenset[int],
    near: Sequence[frozenset[int]],
    rank: int | None,
    ranks: int,
    *,
    own: bool = False,
    alike: bool = True,
    limit: int | None = None,
) -> Share:
    """The share of one of the ranks on a machine. Those of others are disjoint if there are enough cores.

    Args:
        allowed: the processors that this rank may use.
        near: the nodes of each rank's devices; empty: unknown.
        rank: its number among them; None: unknown. It then may use the processors of all.
        own: True if ``allowed`` belongs to this rank alone; all of it is used.
        alike: True if all ranks have the same ``allowed``; False if only the ranks near the same node have.
        limit: the most threads.
    """
    cores, nodes, sharing = topology.cores(allowed), frozenset[int](), list(range(ranks))
    why = "the cores that its launcher bound it to" if own else "all cores that it may use"
    if not own and near:
        mine = near[rank or 0]
        there = [[cpu for cpu in cores if topology.node_of(cpu) in theirs] for theirs in near]
        named = f"node{'s' if len(mine) > 1 else ''} {', '.join(map(str, sorted(mine)))}"
        if all(there) if alike else there[rank or 0]:
            cores, nodes = there[rank or 0], mine
            sharing = [other for other, theirs in enumerate(near) if theirs & mine]
            why = f"the cores of {named}, which its devices are nearest to"
        else:
            why += f" (its devices are nearest to {named}, but this rank or another one may use no core there)"
    n = 1 if own else len(sharing)
    each = max(1, len(cores) // n)
    if n > 1 and rank is None:
        why += f", which {n} ranks use together"
    elif n > 1 and rank is not None:
        first = len(cores) * sharing.index(rank) // n
        why += f", cut for {n} ranks" if len(cores) >= n else f", shared by {n} ranks"
        cores = cores[first : first + each]
    threads = each if limit is None else min(each, limit)
    if threads < each:
        why += f"; its control group or Slurm allows {threads} of {each} threads"
    return Share(tuple(cores), threads, allowed, tuple(sorted(nodes)), why)


def nodes_of_ranks(
    ordinals: Collection[int], node_of: Callable[[int], int | None], rank: int | None, ranks: int
) -> list[frozenset[int]]:
    """The nodes of each rank's devices, as far as this process can know; empty: not even its own.

    If this is rank ``r`` and trains on device number ``r``, so do the others. Otherwise (it sees its own devices only,
    for example) it assumes that all ranks are on its node. No other rank then has its part of the cores, which may be
    small.
    """
    own = {node_of(ordinal) for ordinal in ordinals}
    if not own or None in own:
        return []
    if rank is not None and set(ordinals) == {rank}:
        each = [node_of(other) for other in range(ranks)]
        if None not in each:
            return [frozenset({node}) for node in each if node is not None]
    return [frozenset(node for node in own if node is not None)] * ranks


def default_threads() -> int:
    """The number of physical cores in this process's share, bounded by its control groups' quota and Slurm's grant.

    ``OMP_NUM_THREADS`` is ignored, because launchers set it to 1.
    """
    return share().threads


def available_cpus() -> int:
    """Processors in this process's affinity mask, bounded by its control groups' quota and what Slurm gave its task."""
    return _granted(len(_allowed()))


def _granted(cpus: int) -> int:
    """Return ``cpus``, or fewer if the control groups or Slurm grant less."""
    return max(1, min(cpus, _quota() or cpus, launchers.granted_cpus() or cpus))


def _allowed() -> frozenset[int]:
    """The affinity mask of the calling thread."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))  # macOS


def _of_parent(allowed: frozenset[int], proc: Path) -> frozenset[int]:
    """The processors of the process that started this one, if it bound this one to fewer than its own; else
    ``allowed``. Processes of different control groups cannot be compared."""
    parent = proc / str(os.getppid())
    try:
        if (parent / "cgroup").read_text() != (proc / "self/cgroup").read_text():
            return allowed
        lines = (parent / "status").read_text().splitlines()
    except OSError:
        return allowed
    theirs = next((numbers(line.partition(":")[2]) for line in lines if line.startswith("Cpus_allowed_list:")), allowed)
    return theirs if allowed < theirs else allowed


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
