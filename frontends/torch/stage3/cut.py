"""The partition of one parameter over the ranks (stage 3)."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from offload_core.config.options import OffloadConfig
from offload_core.layout.partition import Bucket, ParamSpec, cut


class Cut:
    """A parameter's buckets, and the shards that this process holds.

    Args:
        ranks: the ranks whose shards this process holds.
    """

    def __init__(self, spec: ParamSpec, ranks: Sequence[int], world_size: int, config: OffloadConfig) -> None:
        self.spec = spec
        self._over = (ranks, world_size, config)
        self.buckets: list[Bucket] = cut(config, [spec], world_size=world_size)
        self._pieces = [(b, p) for b in self.buckets for p in b.shards(ranks)]

    @property
    def shard_numel(self) -> int:
        return sum(bucket.shard_numel for bucket in self.buckets)

    @property
    def padded_numel(self) -> int:
        return sum(bucket.padded_numel for bucket in self.buckets)

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """The contiguous ranges of elements that this rank has, each as ``(start in the parameter, start in the shards,
        number of elements)``."""
        return [run for bucket in self.buckets for run in self.runs_of(bucket)]

    def runs_of(self, bucket: Bucket) -> list[tuple[int, int, int]]:
        """Return the ranges of :attr:`runs` that are in this bucket."""
        pieces = [piece for other, piece in self._pieces if other is bucket]
        return [(piece.start, bucket.in_tensor(piece), piece.numel) for piece in pieces]

    def without_matrices(self) -> "Cut":
        """Return a cut of this parameter that may cut its matrices."""
        return Cut(replace(self.spec, matrix=None), *self._over)

    def alike(self, other: "Cut") -> bool:
        """True if ``other`` gives each rank the same elements as this cut."""
        return [(b.pieces, b.shard_numel) for b in self.buckets] == [(b.pieces, b.shard_numel) for b in other.buckets]

    def cut(self, run: torch.Tensor, out: torch.Tensor) -> None:
        """Copy this rank's elements of ``run``, the whole parameter, to ``out``. Both are one-dimensional."""
        for start, at, numel in self.runs:
            out[at : at + numel].copy_(run[start : start + numel])
