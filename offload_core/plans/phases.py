"""The memory of several models in one process whose engines take turns: one has the device, the others are released.

A release does not change host memory, with two exceptions. Engines use staging and gradient memory in turn
(``memory/working_memory.py``). The first release of frozen parameters on the device makes a copy on the host.
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
        name: the name in the names of phases.
        plan: the plan of this model alone.
        working: the sizes of the host memory that engines use in turn (:meth:`BucketTerms.working_sizes`).
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
        """The bytes of the host copy of a frozen model's parameters, which a release makes."""
        rows = [row.n_bytes for row in self.plan.rows if (row.where, row.what) == (DEVICE, PARAMETERS)]
        return sum(rows) if self.frozen and not self.plan.shared else 0


@dataclass(frozen=True)
class Phase:
    """The bytes that one process needs in one phase, by place."""

    name: str
    needs: Mapping[str, int]

    def missing(self, free: Mapping[str, int | None], *, processes: int) -> list[str]:
        """Return the places with less free memory than ``processes`` processes of one machine need. Processes do not
        share a device."""
        return [
            where
            for where, n in self.needs.items()
            if (has := free.get(where)) is not None and n * (1 if where == DEVICE else processes) > has
        ]


def phases(members: Sequence[Member]) -> list[Phase]:
    """Return a phase for each model alone on the device, and last a phase for all models on it at once."""
    places = dict.fromkeys([HOST, DEVICE, *(where for each in members for where in each.plan.elsewhere)])
    total = {where: sum(each.plan.bytes_in(where) for each in members) for where in places}
    separately = sum(each.working_bytes + each.activations for each in members)
    in_turn = sum(bytes_in_turn([each.working[pinned] for each in members]) for pinned in (True, False))
    copies = sum(each.copies for each in members)
    found = []
    for member in members if not members[0].plan.shared else ():
        host = total[HOST] - separately + in_turn + member.activations + copies
        name = f"{member.name} {'runs' if member.frozen else 'trains'}"
        found.append(Phase(name, {**total, HOST: host, DEVICE: member.plan.bytes_in(DEVICE)}))
    at_once = dict(total)
    if members[0].plan.shared:  # device memory is host memory, and stays
        at_once[HOST] += at_once.pop(DEVICE)
    return [*found, Phase("all at once", at_once)]
