"""Plans the memory of several models in one process whose engines take turns: one engine has its parameters on the
device, and all other engines have released theirs.

A release does not change host memory, with three exceptions. Engines use the same staging and gradient memory in turn
(``memory/working_memory.py``). The first release of a frozen model copies its device parameters to the host. A release
copies the states that are on the device to the host, until they are restored.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..memory.plan import DEVICE, HOST, PARAMETERS, MemoryPlan
from ..memory.working_memory import bytes_in_turn
from .planner import ACTIVATIONS


@dataclass(frozen=True)
class Member:
    """One of the models.

    Attributes:
        name: the model's name, for the names of phases.
        plan: the plan of this model alone.
        working: the host buffers that engines use in turn (:meth:`BucketTerms.working_sizes`). The keys are True
            (pinned) and False (pageable). Each value counts the buffers of each size in bytes.
        frozen: True if the model is not trained.
    """

    name: str
    plan: MemoryPlan
    working: Mapping[bool, Counter[int]]
    frozen: bool

    @property
    def activations(self) -> int:
        """The bytes of activations that wait on the host."""
        return sum(row.n_bytes for row in self.plan.rows if (row.where, row.what) == (HOST, ACTIVATIONS))

    @property
    def working_bytes(self) -> int:
        return sum(size * n for sizes in self.working.values() for size, n in sizes.items())

    @property
    def copies(self) -> int:
        """The bytes of the copy that a release makes of a frozen model's device parameters on the host."""
        rows = [row.n_bytes for row in self.plan.rows if (row.where, row.what) == (DEVICE, PARAMETERS)]
        return sum(rows) if self.frozen and not self.plan.shared else 0

    @property
    def leaving(self) -> int:
        """The bytes of states on the device, which are on the host while the model is released."""
        return sum(row.n_bytes for row in self.plan.rows if row.leaves)


@dataclass(frozen=True)
class Phase:
    """The bytes that one process needs in one phase of a program, by memory: host, device, disk."""

    name: str
    needs: Mapping[str, int]

    def missing(self, free: Mapping[str, int | None], *, processes: int) -> list[str]:
        """Return the names of the memories that have too few free bytes.

        Args:
            free: the free bytes of each memory; None: unknown, and counted as enough.
            processes: the number of processes that share the machine's host and disk. Each has its own device.
        """
        return [
            where
            for where, n in self.needs.items()
            if (has := free.get(where)) is not None and n * (1 if where == DEVICE else processes) > has
        ]


def phases(members: Sequence[Member]) -> list[Phase]:
    """Return a phase for each model alone on the device, and last a phase for all models on the device at once. If the
    device's memory is host memory, return only the last."""
    places = dict.fromkeys([HOST, DEVICE, *(where for each in members for where in each.plan.elsewhere)])
    total = {where: sum(each.plan.bytes_in(where) for each in members) for where in places}
    separately = sum(each.working_bytes + each.activations for each in members)
    in_turn = sum(bytes_in_turn([each.working[pinned] for each in members]) for pinned in (True, False))
    copies = sum(each.copies for each in members)
    found = []
    for member in members if not members[0].plan.shared else ():
        released = sum(each.leaving for each in members if each is not member)
        host = total[HOST] - separately + in_turn + member.activations + copies + released
        name = f"{member.name} {'runs' if member.frozen else 'trains'}"
        found.append(Phase(name, {**total, HOST: host, DEVICE: member.plan.bytes_in(DEVICE)}))
    at_once = dict(total)
    if members[0].plan.shared:  # device memory is host memory, and stays
        at_once[HOST] += at_once.pop(DEVICE)
    return [*found, Phase("all at once", at_once)]
