"""Learning rates, and Adam's betas, as functions of the number of updates made so far: the schedules of DeepSpeed.

Their arguments have DeepSpeed's names. DeepSpeed advances a schedule after each update, so that the second update
(``updates == 1``) of a ``Warmup…`` has the rate of its step 0, as the first update has. ``offload_core.deepspeed``
defines them.
"""

from .deepspeed.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]
