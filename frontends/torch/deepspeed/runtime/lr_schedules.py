"""``deepspeed.runtime.lr_schedules``: schedulers of an optimizer, which an engine steps after each update."""

from ..schedulers import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]
