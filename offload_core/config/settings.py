"""The settings that ``wrap`` takes as keywords, for type checkers and editors.

They cannot read them from the fields of ``OffloadConfig``, so that these names stand here a second time;
``tests/packaging/test_types.py`` holds them equal.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat, TypedDict

ElementTypeLike = Any
"""The name of an element type, or the type as torch, JAX or NumPy have it; None."""


class SettingsButLr(TypedDict, total=False):
    """The settings without ``lr``, for functions that have a parameter of this name."""

    betas: tuple[Any, Any] | list[Any] | Callable[[Any], tuple[float, float]]
    eps: float
    eps_root: float
    weight_decay: float
    adam_mode: str
    optimizer: str
    momentum: float
    dampening: float
    nesterov: bool | None
    lr_decay: float
    initial_accumulator_value: float
    ns_coefficients: tuple[float, float, float] | list[float]
    ns_steps: int
    muon_params: tuple[str, ...] | list[str] | None
    adamw: Mapping[str, Any] | None
    adjust_lr_fn: str | None
    op_order: str | None
    stage: int
    state_format: str
    master_dtype: ElementTypeLike
    exp_avg_dtype: ElementTypeLike
    exp_avg_sq_dtype: ElementTypeLike
    param_dtype: ElementTypeLike
    buffer_dtype: ElementTypeLike
    cast_inputs: bool
    gradient_clipping: float | None
    gradient_accumulation_steps: int
    layerwise: bool
    average_plain_backward: bool
    average_over_ranks: bool
    skip_nonfinite: bool | None
    loss_scale: float | str | None
    initial_loss_scale: float
    loss_scale_window: int
    min_loss_scale: float
    loss_scale_hysteresis: int
    loss_scale_consecutive_hysteresis: bool
    reduce_bucket_size: int
    communication_dtype: ElementTypeLike
    reduction: str
    schedule: str
    delay_warmup_steps: int
    update_in_backward: bool
    offload_optimizer: str | None
    device_states_bytes: int | float | str | None
    offload_param: str | None
    nvme_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
    nvme_host_bytes: int | None
    param_persistence_threshold: int
    max_live_parameters: int
    prefetch_bucket_size: int
    max_reuse_distance: int
    leaf_modules: tuple[str, ...] | list[str]
    activation_memory: int
    host_activation_memory: int
    pin_memory: bool | str
    num_threads: int | None
    bind_threads: bool


class OffloadSettings(SettingsButLr, total=False):
    """The fields of :class:`OffloadConfig`, each of which may be missing.

    It annotates keywords that a function passes on to ``wrap``: ``**settings: Unpack[OffloadSettings]``. Numbers and
    element types may be those of torch, JAX and NumPy.
    """

    lr: SupportsFloat | Callable[[Any], Any]
