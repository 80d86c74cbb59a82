"""Optimizer states of a process's shards, and the scalars of their update."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .host_memory import HostMemory
from .partition import Bucket

STATE_NAMES = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class AdamHyper:
    """One parameter group's hyper-parameters for one step, as in ``torch.optim.AdamW`` and ``optax.adamw``."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    eps_root: float = 0.0
    bias_correction: Callable[[float, int], float] | None = None
    """``op_order="optax"``: 1 - beta^t as the framework's own float32 arithmetic gives it; None: in double."""

    def scalars(self, t: int, *, op_order: str, grad_scale: float) -> tuple[float, ...]:
        """The kernel's scalars (``oc_adam_scalars``) for update number ``t``, counted from 1.

        Computed in double from ``t``, never from a running product, so that a resumed run gives the same bits.
        """
        beta1, beta2 = self.betas
        if op_order == "torch":
            correction1, correction2 = 0.0, math.sqrt(1 - beta2**t)
            step_size = -self.lr / (1 - beta1**t)
        else:
            correct = self.bias_correction or (lambda beta, t: 1 - beta**t)
            correction1, correction2 = correct(beta1, t), correct(beta2, t)
            step_size = -self.lr
        return (
            grad_scale,
            self.weight_decay,
            1 - self.lr * self.weight_decay,
            beta1,
            beta2,
            1 - beta1,
            1 - beta2,
            correction1,
            correction2,
            self.eps,
            self.eps_root,
            step_size,
        )


class AdamStates:
    """Master weights and moments, fp32, of the shards of ``n_ranks`` ranks.

    The shards of one (group, element type) lie end to end in one array a state, in bucket order, so that what a
    process has of a parameter is contiguous even where the parameter straddles buckets.
    """

    def __init__(self, memory: HostMemory, n_ranks: int) -> None:
        self._memory = memory
        self._n_ranks = n_ranks
        self._arena: dict[int, dict[str, np.ndarray]] = {}
        self._offset: dict[int, int] = {}

    def add(self, buckets: Sequence[Bucket], *, without_master: Callable[[Bucket], bool]) -> None:
        """Allocate the states of new buckets, zeroed; no master weights where the parameters serve as such."""
        by_key: dict[tuple[int, str, bool], list[Bucket]] = {}
        for bucket in buckets:
            by_key.setdefault(bucket.key, []).append(bucket)
        for alike in by_key.values():
            numel = self._n_ranks * sum(bucket.shard_numel for bucket in alike)
            names = [name for name in STATE_NAMES if not (name == "master" and without_master(alike[0]))]
            arena = {name: self._memory.allocate(name, numel, np.dtype(np.float32)) for name in names}
            offset = 0
            for bucket in alike:
                self._arena[bucket.index] = arena
                self._offset[bucket.index] = offset
                offset += self._n_ranks * bucket.shard_numel

    def locate(self, bucket: int, offset: int) -> tuple[dict[str, np.ndarray], int]:
        """The arrays that hold the bucket's shards, by state name, and where element ``offset`` of it lies in them."""
        return self._arena[bucket], self._offset[bucket] + offset
