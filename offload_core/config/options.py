"""``OffloadConfig``: every setting, checked when it is made."""

import difflib
import math
import operator
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, Unpack

import numpy as np

from ..deepspeed import translation
from ..deepspeed.keys import KEYS
from ..dtypes import BFLOAT16, BY_NAME, ElementType
from ..errors import ConfigError
from ..rules import RULES, Rule, State
from ..rules.muon import COEFFICIENTS
from ..support import checks
from ..support.processors import default_threads
from .schedules import GroupSchedule, Schedule
from .settings import OffloadSettings
from .state_formats import FORMATS, SHORT_NAMES, StateFormat, formats_of

_CHOICES: dict[str, tuple] = {
    "optimizer": tuple(RULES),
    "adam_mode": ("adamw", "adam"),
    "op_order": ("torch", "optax"),
    "param_dtype": (None, *BY_NAME),
    "buffer_dtype": (None, *BY_NAME),
    "communication_dtype": (None, *BY_NAME),
    "reduction": ("ordered", "native"),
    "schedule": ("overlap", "serial", "delayed"),
    "state_format": tuple(SHORT_NAMES),
    "master_dtype": (None, "float32", "bfloat16"),
    "exp_avg_dtype": (None, *FORMATS),
    "exp_avg_sq_dtype": (None, *FORMATS),
}

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_OTHER_NAMES = {
    **dict.fromkeys(("learning_rate", "step_size"), "lr"),
    **dict.fromkeys(("wd", "decay", "l2"), "weight_decay"),
    **dict.fromkeys(
        ("clip", "clipping", "clip_norm", "max_norm", "max_grad_norm", "clip_grad_norm"), "gradient_clipping"
    ),
    **dict.fromkeys(("accumulate", "accumulation_steps", "grad_accum"), "gradient_accumulation_steps"),
    **dict.fromkeys(("dtype", "torch_dtype", "precision", "mixed_precision"), "param_dtype"),
    **dict.fromkeys(("epsilon",), "eps"),
    **dict.fromkeys(("bucket_size", "bucket_cap_mb"), "reduce_bucket_size"),
    **dict.fromkeys(("threads", "nthreads"), "num_threads"),
    "mu_dtype": "exp_avg_dtype",
}
"""Fields by the names that other libraries give them."""
_ARGUMENTS = {
    **dict.fromkeys(("model_parameters", "parameters"), "expected params=..., parameters or groups"),
    **dict.fromkeys(
        ("config_dict_or_path", "config_params", "ds_config", "deepspeed_config"),
        "expected config=..., or the second argument",
    ),
    **dict.fromkeys(
        ("lr_scheduler", "scheduler"),
        "expected a scheduler of torch on engine.optimizer, a function of the number of updates as lr=..., or a "
        "`scheduler` section in a DeepSpeed configuration",
    ),
    "optimizer_offload_fraction": "expected device_states_bytes=1.0 less this fraction, as a float",
    "training_data": "expected a data loader of your own",
    "mpu": "expected process_group=..., the ranks that share the states",
}
"""Arguments of other libraries' functions that are no fields here, and what to give."""
_OF_GROUPS_ELSEWHERE = {"learning_rate": "lr", "wd": "weight_decay", "epsilon": "eps"}
"""Hyperparameters of a parameter group by names that can hardly be a key of the user's own."""

_MOST_THREADS = 2**31 - 1  # a C int

_MAY_DIFFER = {"may_differ": True}
"""Metadata of a field that may differ between ranks. All others must be equal on all ranks."""

_BUCKETS = {None: 32 * 2**20, "cpu": 32 * 2**20, "nvme": 4 * 2**20}
"""The elements of a bucket where none are given, by ``offload_optimizer``."""
_BUILT: dict[str, tuple] = {
    "stage": (1, 2, 3),
    "offload_optimizer": (None, "cpu", "nvme"),
    "offload_param": (None, "cpu", "nvme"),
}


class _Number(float):
    """A number that was not set, and is the rule's default. It gives way to that of another rule."""


class _Size(int):
    """A number of elements that was not set, and is the default of ``offload_optimizer``. It gives way to another's."""


class _Pair(tuple):
    """A pair of numbers that was not set, and is the rule's default."""


@dataclass(frozen=True)
class OffloadConfig:
    """Settings of an offloaded optimizer. Raises :class:`ConfigError` if a value is out of range.

    Hyperparameters mean what they mean in ``torch.optim.AdamW`` and ``optax.adamw``, and in SGD, Lion, Adagrad and Muon
    of these libraries. ``lr`` and ``betas`` may be schedules: functions of the number of updates made so far (an optax
    schedule, those of ``lr_schedules``). ``None`` for ``lr``, ``betas``, ``eps`` or ``weight_decay`` is the default of
    the optimizer's own class in torch. An attribute then has that number, or None if the optimizer has no such thing. A
    default that is read from one configuration and given to another counts as not given.
    """

    optimizer: str = field(default="adamw", kw_only=True)
    """``"adamw"`` (Adam with ``adam_mode="adam"``), ``"sgd"``, ``"lion"``, ``"adagrad"`` or ``"muon"``. In torch a
    parameter group may have another one: ``{"params": ..., "optimizer": "sgd", "momentum": 0.9}``."""
    lr: float | Callable[[Any], Any] = None  # type: ignore[assignment]  # as all that follow the rule
    """Learning rate, or a function of the number of updates made so far. None: 1e-3; Adagrad's 1e-2, Lion's 1e-4."""
    betas: tuple[float, float] | Callable[[Any], tuple[float, float]] = None  # type: ignore[assignment]
    """AdamW's: decay of the first and of the second moment, or a function of the number of updates made so far. None:
    (0.9, 0.999). Lion's: the momentum's part in the step, and its decay. None: (0.9, 0.99)."""
    eps: float = None  # type: ignore[assignment]
    """AdamW's and Adagrad's: added to the square root of the second moment, or of the sum. None: 1e-8 and 1e-10. It is
    under the root in Adagrad with ``op_order="optax"``."""
    eps_root: float = 0.0
    """Added under the square root; ``op_order="optax"`` only."""
    weight_decay: float = None  # type: ignore[assignment]
    """None: 0.01 with AdamW in both front ends, as in torch (``optax.adamw`` has 1e-4), 1e-3 with Lion, as in optax,
    and 0 with SGD and Adagrad."""
    adam_mode: str = "adamw"
    """``"adamw"`` decouples weight decay from the gradient; ``"adam"`` adds it to the gradient (L2)."""
    momentum: float = field(default=None, kw_only=True)  # type: ignore[assignment]
    """SGD's and Muon's. SGD has no memory for a momentum of 0. None: 0 with SGD, 0.95 with Muon."""
    dampening: float = field(default=0.0, kw_only=True)
    """SGD's: 1 - dampening is the weight of a gradient in the momentum after the first."""
    nesterov: bool | None = field(default=None, kw_only=True)
    """SGD or Muon with Nesterov's momentum. None: False with SGD, True with Muon."""
    lr_decay: float = field(default=0.0, kw_only=True)
    """Adagrad's, with ``op_order="torch"``: update t has the rate lr / (1 + (t - 1) * lr_decay)."""
    initial_accumulator_value: float = field(default=0.0, kw_only=True)
    """Adagrad's: the first value of its sum of squares (``optax.adagrad`` has 0.1)."""
    ns_coefficients: tuple[float, float, float] = field(default=COEFFICIENTS, kw_only=True)
    """Muon's: the coefficients of the Newton-Schulz iteration."""
    ns_steps: int = field(default=5, kw_only=True)
    """Muon's: the steps of the iteration."""
    muon_params: tuple[str, ...] | None = field(default=None, kw_only=True)
    """Muon's: the names of the parameters of a wrapped model that it updates, whole or their end; AdamW updates the
    others. None: all matrices but embeddings, heads and tables."""
    adamw: Mapping[str, Any] | None = field(default=None, kw_only=True)
    """Muon's: hyperparameters of AdamW for the parameters that it updates, as in a parameter group: ``{"lr": 3e-4}``.
    Without a rate there it is ``lr`` if that is a function or ``adjust_lr_fn="match_rms_adamw"``, else AdamW's own."""
    adjust_lr_fn: str | None = field(default=None, kw_only=True)
    """Muon's: ``"original"`` (None) multiplies the learning rate by the root of max(1, rows / columns),
    ``"match_rms_adamw"`` by 0.2 times the root of the larger of both, so that AdamW's rate and weight decay fit."""
    op_order: str | None = None
    """The library whose rounding is reproduced, ``"torch"`` or ``"optax"``; None: the front end's own."""
    stage: int = 2
    """ZeRO stage: 1 partitions optimizer states, 2 gradients too, 3 parameters too. On one rank they are the same."""
    state_format: str = "fp32"
    """The format of the optimizer's states on the host. ``"fp32"``: 12 bytes a parameter. ``"bf16"``: moments in
    bfloat16, 8 bytes. ``"8bit"``: moments of 8 bits, with a scale for each 256 elements, 6.01 bytes. Narrower moments
    are rounded stochastically, so that results differ from fp32 AdamW's. They are the same bits for all ranks, buckets,
    threads, instruction sets and schedules. docs/formats.md compares them."""
    master_dtype: str | None = None
    """``"float32"``, or ``"bfloat16"``: master weights of bfloat16 parameters are these parameters themselves, rounded
    stochastically, 2 bytes less (parameters of other types keep theirs in float32). None: as ``state_format`` says."""
    exp_avg_dtype: str | None = None
    """``"float32"``, ``"bfloat16"`` or ``"float8"``, of the first moment; None: as ``state_format`` says."""
    exp_avg_sq_dtype: str | None = None
    """As ``exp_avg_dtype``, of the second moment."""
    param_dtype: str | None = None
    """Element type of the device parameters; None keeps the model's. In torch, layers with running statistics in
    float32 (BatchNorm) keep their parameters in float32, too: torch computes with both for an input of any type."""
    buffer_dtype: str | None = None
    """In torch: element type of the model's floating-point buffers; None keeps each one's own, also with
    ``param_dtype``, for RoPE's frequencies and BatchNorm's statistics are too coarse in 16 bits. A buffer that is added
    to or multiplied with activations makes them as wide as itself: set this where the next layer then refuses them."""
    cast_inputs: bool = True
    """In torch, with ``param_dtype``: cast the floating-point tensors among the arguments of the engine's forward to
    it. False passes them as they are, for labels, times and positions that 16 bits would round (in bfloat16, 1001 is
    1000)."""
    gradient_clipping: float | None = None
    """Bound on the global L2 norm of the gradients, or None. ``math.inf`` clips nothing, but has the norm computed."""
    gradient_accumulation_steps: int = 1
    """Micro-steps of an update; their gradients are accumulated in fp32 and averaged."""
    layerwise: bool = field(default=False, kw_only=True)
    """In torch: the gradients of several micro-batches are summed on the device, in fp32, by ``engine.accumulate()``,
    and leave for the host once, as fp32. True has memory for them: a bf16 parameter's gradient takes 4 bytes on its
    way and on the host, not 2."""
    average_plain_backward: bool = False
    """In torch: an engine averages the gradients of a plain ``loss.backward()`` over the micro-steps, too, as DeepSpeed
    does (True in its configurations). False sums them, as in PyTorch."""
    average_over_ranks: bool = field(default=True, kw_only=True)
    """In torch: average the gradients of the ranks, which is right where each rank's loss is a mean over its own
    samples. False sums them, for a loss that each rank divides by a number of all ranks, as the tokens of the whole
    batch."""
    skip_nonfinite: bool | None = None
    """Skip an update whose gradients hold an inf or a NaN. None: only if the gradients are examined anyway, that is
    with clipping, loss scaling or gradients that travel as float16. True always examines them, at the cost of one more
    pass."""
    loss_scale: float | str | None = None
    """``"dynamic"``, a fixed factor, or None: dynamic for float16 parameters, else 1."""
    initial_loss_scale: float = 65536.0
    """The first value of a dynamic loss scale."""
    loss_scale_window: int = 2000
    """Updates without overflow after which a dynamic loss scale doubles."""
    min_loss_scale: float = 1.0
    """A dynamic loss scale is not halved below this; updates that overflow there are skipped."""
    loss_scale_hysteresis: int = 1
    """Overflows since the scale last doubled: the one of this number and each later one halve the scale. Those before
    it only skip their update."""
    loss_scale_consecutive_hysteresis: bool = False
    """Count overflows for ``loss_scale_hysteresis`` since the last update without one."""
    reduce_bucket_size: int = None  # type: ignore[assignment]  # follows offload_optimizer
    """Elements of a bucket, the unit of communication; bounds staging memory. None: 32 Mi, and 4 Mi with states on
    disk, where four buckets' states are in host memory at a time."""
    communication_dtype: str | None = None
    """Element type in which gradients travel between ranks; None: their own. A narrower one rounds them."""
    reduction: str = "ordered"
    """``"ordered"`` sums in rank order in fp32, the same bits on any backend; ``"native"`` is the backend's own
    reduce-scatter, in the element type that travels."""
    schedule: str = "overlap"
    """``"overlap"`` hides copies, reduction and the update behind the device's computation; ``"serial"`` does one thing
    after the other. The bits are the same. On one rank on the CPU there is nothing to hide. ``"delayed"`` is another
    algorithm: after ``delay_warmup_steps`` each step's gradients change the parameters one step later, so that the
    update has the time of a whole step (one-step delayed parameter update, ZeRO-Offload, section 5.2 of
    arXiv:2101.06840)."""
    delay_warmup_steps: int = 40
    """``schedule="delayed"``: the number of updates before the first delayed one."""
    update_in_backward: bool = False
    """``schedule="overlap"``: send new parameters to the device as soon as a bucket's gradients are on the host, during
    ``engine.backward()``. The bits are the same. If a step does not need all gradients first (for clipping, loss
    scaling or ``skip_nonfinite``), states are updated then, too. In that case it is an error to change
    hyperparameters, to discard or add gradients or to read parameters between ``engine.backward()`` and
    ``engine.step()``. Otherwise states change at the step, and parameters are sent on the assumption that it neither
    clips nor skips; if it does, they are sent again. That takes 16 bytes a parameter more of the host's bandwidth, and
    is not tried right after a step that was clipped or skipped. In stage 3, and on one rank on the CPU, parameters are
    written where they are, and cannot be sent again: there it has no effect if a step needs all gradients first. In
    JAX it has none. Where states are updated in backward, and gradients are not accumulated, gradients take the memory
    of at most four buckets on the host, and on one rank on the CPU that of the bucket that is not full yet
    (docs/choosing.md)."""
    offload_optimizer: str | None = "cpu"
    """The place of master weights and moments: ``"cpu"``, host memory; ``"nvme"``: files in ``nvme_path``, of which a
    few buckets are in host memory at a time; or None: the device's memory, where the device updates them
    (docs/tiers.md). The bits are the same."""
    device_states_bytes: int | float | str | None = field(default=None, kw_only=True, metadata=_MAY_DIFFER)
    """The bytes of each device's memory that states may take, beside ``offload_optimizer="cpu"`` or ``"nvme"``: those
    of whole buckets, beginning with the buckets that forward needs first. The device updates them, and their gradients
    do not leave it. An integer is a number of bytes. A float from 0 to 1 is a share of the bytes of all states: 0.25
    is a quarter, and 1.0 all; 1 is one byte. ``"auto"``: what is free at ``wrap`` beside ``activation_memory``, less a
    reserve. None: 0. On the CPU, where the device's memory is the host's, it changes nothing (docs/tiers.md)."""
    nvme_path: str | tuple[str, ...] | None = field(default=None, kw_only=True, metadata=_MAY_DIFFER)
    """``offload_optimizer="nvme"``: the folder for scratch files, on a disk of this machine; several folders, one of
    each disk, share the states. The folders must exist. The files have no names, so that the end of the process frees
    their space. A path or a list becomes a tuple of strings."""
    nvme_host_bytes: int | None = field(default=None, kw_only=True, metadata=_MAY_DIFFER)
    """``offload_optimizer="nvme"``: the bytes of this process's host memory that states may take; the others lie on
    disk. Those on their way between both take four buckets' states more. 0: all lie on disk. None: what is free at
    ``wrap``, less a reserve."""
    offload_param: str | None = None
    """``"cpu"`` (stage 3): parameters are kept in host memory, also on one rank, and copied to the device for the
    modules that use them. ``"nvme"`` (torch, beside ``offload_optimizer="nvme"``): they are kept on disk with their
    states, and read before the modules that use them. ``schedule="delayed"`` cannot have it."""
    param_persistence_threshold: int = 100_000
    """Stage 3: parameters of fewer elements stay whole on every rank."""
    max_live_parameters: int = 1_000_000_000
    """Stage 3: the most elements of parameters that are whole at a time. Parameters of running modules are gathered
    even beyond it."""
    prefetch_bucket_size: int = 50_000_000
    """Stage 3: the most elements that are gathered before they are needed."""
    max_reuse_distance: int = 1_000_000_000
    """Stage 3: a parameter stays whole if at most so many elements of others are used before it is used again."""
    leaf_modules: tuple[str, ...] = ()
    """Stage 3, torch: modules whose parameters, those of all modules inside included, become whole together when they
    run: names of classes (``"MixtralSparseMoeBlock"``, or with the package), or of modules, whole or their end
    (``"layers.0.mlp"``, ``"mlp"``). For mixtures of experts: ranks then need not run the same experts."""
    activation_memory: int = field(default=0, metadata=_MAY_DIFFER)
    """Bytes on each device that activations take. Nothing is allocated for them: they are counted in the check,
    before any allocation, that training fits."""
    host_activation_memory: int = field(default=0, metadata=_MAY_DIFFER)
    """Bytes of activations that wait in a process's host memory (torch's ``save_on_cpu``), counted in the same way. In
    torch's ``engine.accumulate()`` the inputs of blocks wait there, up to so many bytes, and on the device beyond."""
    pin_memory: bool | str = field(default=True, metadata=_MAY_DIFFER)
    """Pin the host memory that the device copies from and to. True: register memory of exact size with the device's
    driver (``cudaHostRegister``). If the driver refuses, and in WSL2, have the driver allocate it (``cudaHostAlloc``).
    If that is refused, too, it is pageable. A warning says each step once; the results are the same. ``"register"`` and
    ``"allocate"`` try that way alone. False: the memory is pageable."""
    num_threads: int | None = field(default=None, metadata=_MAY_DIFFER)
    """Threads of the update; None: the physical cores in this process's share of the processors."""
    bind_threads: bool = field(default=True, metadata=_MAY_DIFFER)
    """Have the threads of the update run on this process's share of the processors alone: physical cores of the memory
    node that its devices are nearest to, split among the ranks of this machine. Host memory is then on that node, too.
    All engines of a process share these threads; the caller's own are never bound. Linux only."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if name == "optimizer" and _is_optimizer(value):
                raise ConfigError(f"optimizer: got {_name_of(value)}, expected a word{_MADE}")
            if not (name == "op_order" and value is None):
                checks.choice(name, value, choices)
        for name, built in _BUILT.items():
            value = getattr(self, name)
            checks.choice(name, value, built)
        self._check_hyperparameters()
        self._check_disk()
        if self.reduce_bucket_size is None or isinstance(self.reduce_bucket_size, _Size):
            object.__setattr__(self, "reduce_bucket_size", _Size(_BUCKETS[self.offload_optimizer]))
        if not checks.is_in(self.gradient_clipping, (None, math.inf)):
            checks.number("gradient_clipping", self.gradient_clipping, above=0.0)
        for name in (
            "gradient_accumulation_steps",
            "reduce_bucket_size",
            "loss_scale_window",
            "loss_scale_hysteresis",
        ):
            checks.integer(name, getattr(self, name))
        for name in (
            "param_persistence_threshold",
            "max_live_parameters",
            "prefetch_bucket_size",
            "max_reuse_distance",
            "activation_memory",
            "host_activation_memory",
        ):
            checks.integer(name, getattr(self, name), least=0)
        names = self.leaf_modules
        if not isinstance(names, tuple | list) or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(
                f"leaf_modules: got {checks.shown(names)}, expected a list of names of classes or of modules"
            )
        self._check_param_tier()
        self._check_device_tier()
        if not isinstance(self.pin_memory, bool) and not checks.is_in(self.pin_memory, ("register", "allocate")):
            raise ConfigError(
                f"pin_memory: got {checks.shown(self.pin_memory)}, expected True, False, 'register' or 'allocate'"
            )
        if self.num_threads is not None:
            checks.integer("num_threads", self.num_threads, most=_MOST_THREADS)
        if not checks.is_in(self.loss_scale, (None, "dynamic")):
            if isinstance(self.loss_scale, str):
                raise ConfigError(
                    f"loss_scale: got {checks.shown(self.loss_scale)}, expected 'dynamic', a number or None"
                )
            checks.number("loss_scale", self.loss_scale, above=0.0)
        for name in ("initial_loss_scale", "min_loss_scale"):
            checks.number(name, getattr(self, name), above=0.0)
        checks.integer("delay_warmup_steps", self.delay_warmup_steps, least=0)
        for name in (
            "cast_inputs",
            "bind_threads",
            "layerwise",
            "average_plain_backward",
            "average_over_ranks",
            "skip_nonfinite",
            "update_in_backward",
            "loss_scale_consecutive_hysteresis",
        ):
            if not (name == "skip_nonfinite" and self.skip_nonfinite is None):
                checks.boolean(name, getattr(self, name))

    def _check_disk(self) -> None:
        if self.nvme_path is not None:
            object.__setattr__(self, "nvme_path", _folders(self.nvme_path))
        if self.nvme_host_bytes is not None:
            checks.integer("nvme_host_bytes", self.nvme_host_bytes, least=0)
        if self.offload_optimizer == "nvme":
            if self.nvme_path is None:
                raise ConfigError(
                    "offload_optimizer='nvme' without nvme_path; expected nvme_path='/folder/on/a/disk' beside it"
                )
        else:
            for name in ("nvme_path", "nvme_host_bytes"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"{name}={checks.shown(getattr(self, name))} has no place beside "
                        f"offload_optimizer={self.offload_optimizer!r}; expected offload_optimizer='nvme', or "
                        f"{name}=None"
                    )

    def _check_param_tier(self) -> None:
        tier = self.offload_param
        if tier is not None and self.stage != 3:
            raise ConfigError(
                f"offload_param={tier!r} with stage={self.stage}: only stage 3 partitions parameters; expected stage=3"
            )
        if tier == "nvme" and self.offload_optimizer != "nvme":
            raise ConfigError(
                f"offload_param='nvme' with offload_optimizer={self.offload_optimizer!r}: a disk keeps a parameter and "
                "its states together; expected offload_optimizer='nvme' and nvme_path beside it, or offload_param='cpu'"
            )
        if tier == "nvme" and self.schedule == "delayed":
            raise ConfigError(
                "offload_param='nvme' with schedule='delayed', whose updates run while modules read the parameters; "
                "expected schedule='overlap' or 'serial', or offload_param='cpu'"
            )

    def _check_device_tier(self) -> None:
        there = self.device_states_bytes
        if not checks.is_in(there, (None, "auto")):
            there = _bytes_or_share(there)
            object.__setattr__(self, "device_states_bytes", there)
        if there is not None and self.offload_optimizer is None:
            raise ConfigError(
                f"device_states_bytes={checks.shown(there)} beside offload_optimizer=None, with which all states are "
                "on the device; expected offload_optimizer='cpu' or 'nvme' for the others, or no device_states_bytes"
            )
        if there == "auto" and not self.activation_memory:
            raise ConfigError(
                "device_states_bytes='auto' without activation_memory; expected activation_memory=BYTES, what "
                "activations take on each device, beside which states take what is free"
            )
        if self.offload_param is not None and self.keeps_states_on_device:
            setting = "offload_optimizer=None" if there is None else f"device_states_bytes={checks.shown(there)}"
            raise ConfigError(
                f"{setting} beside offload_param={self.offload_param!r}: parameters would leave a device that has "
                "memory for their states; expected offload_param=None, or no states on the device"
            )

    @property
    def keeps_states_on_device(self) -> bool:
        """True if states may be in the memory of a device that is not the host."""
        return self.offload_optimizer is None or self.device_states_bytes not in (None, 0)

    def _check_hyperparameters(self) -> None:
        rule = RULES[self.optimizer]
        for name in _OF_RULE:
            if not is_set(self, name):
                object.__setattr__(self, name, _unset(getattr(rule.hyper, name, None)))
        given = {name: value for name in names_of(rule) if (value := getattr(self, name)) is not None}
        functions = {name for name in _FUNCTIONS if callable(given.get(name))}
        rule.hyper(**{name: value for name, value in given.items() if name not in functions}).check()
        if self.adamw is not None:
            _check_group_of("adamw", "adamw", self.adamw)
        if self.muon_params is not None:
            given_names = self.muon_params
            is_list = isinstance(given_names, tuple | list) and given_names
            if not is_list or not all(isinstance(n, str) and n for n in given_names):
                raise ConfigError(
                    f"muon_params: got {checks.shown(given_names)}, expected a list of parameters' names that is not "
                    "empty, or None for all matrices but embeddings, heads and tables"
                )
        for other in RULES.values():
            for name in other.settings:
                if name in rule.settings:
                    continue
                if getattr(self, name) != _DEFAULTS[name]:
                    is_adamws = self.optimizer == "muon" and name in names_of(RULES["adamw"])
                    elsewhere = ", or it within adamw={...}" * is_adamws
                    raise ConfigError(
                        f"{name}={checks.shown(getattr(self, name))} has no place in optimizer={self.optimizer!r}; "
                        f"expected optimizer={other.name!r} beside it{elsewhere}"
                    )
        rule.of(vars(self))

    @classmethod
    def resolve(
        cls, config: "ConfigLike" = None, *, world_size: int = 1, **overrides: Unpack[OffloadSettings]
    ) -> "OffloadConfig":
        """The configuration that ``wrap(…, config, **overrides)`` means.

        Args:
            config: an ``OffloadConfig``, a mapping of its fields, a DeepSpeed configuration (a mapping, or the path of
                a file), or None for the defaults.
            world_size: the ranks that share a batch; a DeepSpeed configuration's batch sizes depend on it.
            overrides: fields that replace those of ``config``.

        Raises:
            ConfigError: a name is unknown (the nearest known one is given), a value is out of range or contradicts
                another, or a DeepSpeed file cannot be read.
        """
        if isinstance(config, cls):
            _check_names(overrides)
            return replace(config, **_converted(overrides))
        if isinstance(config, str | os.PathLike):
            given = translation.load(config)
            source = os.fspath(config)
        elif isinstance(config, Mapping) or config is None:
            given, source = dict(config or {}), None
        else:
            rate = f"; a learning rate is lr={checks.shown(config)}" * isinstance(config, int | float)
            raise ConfigError(
                f"config: got {checks.kind_of(config)}, expected an OffloadConfig, a dict of its fields, a DeepSpeed "
                f"configuration (a dict or the path of its file) or None{rate}{_MADE * _is_optimizer(config)}"
            )
        _check_names(overrides)
        if source is not None or translation.is_deepspeed(given, FIELDS):
            given = translation.fields_of(given, overrides, world_size=world_size, source=source)
        else:
            given = {**given, **overrides}
        _check_names(given)
        return cls(**_converted(given))

    def takes_apart(self, world_size: int) -> bool:
        """True if parameters of at least ``param_persistence_threshold`` elements are partitioned."""
        return self.stage == 3 and (world_size > 1 or self.offload_param is not None)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the fields of a pickled configuration; those that are newer than it have their defaults."""
        vars(self).update({**_DEFAULTS, **state})

    def rule(self, group: Mapping[str, Any] | None = None) -> Rule:
        """The update rule of these settings, or of a parameter group that replaces some of them."""
        own = group or {}
        kind = RULES[own.get("optimizer", self.optimizer)]
        return kind.of({**vars(self), **{name: own[name] for name in names_of(kind) if name in own}})

    def adamw_group(self) -> dict[str, Any]:
        """The parameter group of those parameters that Muon leaves to AdamW, without them."""
        own: dict[str, Any] = dict(self.adamw or {})
        if "lr" not in own and not callable(self.lr):
            own["lr"] = self.lr if self.adjust_lr_fn == "match_rms_adamw" else RULES["adamw"].hyper().lr
        return {**own, "optimizer": "adamw"}

    def state_formats(self, dtype: ElementType, rule: Rule | None = None) -> Mapping[str, StateFormat]:
        """The formats of the states of parameters of this element type, by name; ``rule`` is None: these settings'."""
        return self._formats(dtype, (rule or self.rule()).states)

    def _formats(self, dtype: ElementType, states: tuple[State, ...]) -> Mapping[str, StateFormat]:
        own = tuple(getattr(self, f"{state.name}_dtype", None) for state in states)
        return formats_of(self.state_format, self.master_dtype, states, own, dtype)

    @property
    def state_block(self) -> int:
        """Parameters are cut at whole multiples of so many elements."""
        every = [self._formats(BFLOAT16, kind.every_state) for kind in RULES.values()]
        return max(format.block for formats in every for format in formats.values())

    @property
    def threads(self) -> int:
        """Threads of the update."""
        return self.num_threads or default_threads()

    @property
    def target_dtype(self) -> ElementType | None:
        """``param_dtype`` as an element type."""
        return None if self.param_dtype is None else BY_NAME[self.param_dtype]

    def groups(self) -> tuple[Mapping[str, Any], ...]:
        """The parameter groups of a whole model, without their parameters: one, and with Muon that of AdamW."""
        return ({}, self.adamw_group()) if self.optimizer == "muon" else ({},)

    def values(self, updates: Any, group: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The hyperparameters of a group, by name, of the update that follows ``updates`` others. Values that functions
        return are not checked.

        Args:
            updates: an integer of the type that the functions take.
            group: one of :meth:`groups`; None: the first.
        """
        if group:
            given = {"lr": self.hyperparameters(updates)[0], **group}
            return {name: given[name] for name in names_of(RULES[given["optimizer"]]) if name in given}
        scheduled = dict(zip(_FUNCTIONS, self.hyperparameters(updates), strict=True))
        rule = RULES[self.optimizer]
        found = {name: scheduled.get(name, getattr(self, name)) for name in names_of(rule)}
        plain = {_Number: float, _Pair: tuple}
        known = {n: getattr(rule.hyper, n) if value is None else value for n, value in found.items()}
        return {name: plain[type(value)](value) if type(value) in plain else value for name, value in known.items()}

    def hyperparameters(self, updates: Any, own_lr: float | None = None) -> tuple[float, tuple[float, float]]:
        """``lr`` and ``betas`` (None: the rule has none) of the update that follows ``updates`` others. Values that
        functions return are not checked.

        Args:
            updates: an integer of the type that the functions take.
            own_lr: a parameter group's own rate, for an ``lr`` that is a :class:`GroupSchedule`; None: it has none.
        """
        schedule: float | Schedule = self.lr
        if own_lr is not None and isinstance(schedule, GroupSchedule):
            schedule = schedule.of_group(own_lr)
        lr = float(schedule(updates) if callable(schedule) else schedule)
        return lr, self.betas(updates) if callable(self.betas) else self.betas


ConfigLike = OffloadConfig | Mapping[str, Any] | str | os.PathLike[str] | None
"""The forms of ``config`` that ``wrap`` takes: see :meth:`OffloadConfig.resolve`."""

FIELDS = tuple(field.name for field in fields(OffloadConfig))

SHARED_FIELDS = tuple(field.name for field in fields(OffloadConfig) if not field.metadata.get("may_differ"))
"""The fields that must be equal on all ranks."""


_DEFAULTS = {field.name: field.default for field in fields(OffloadConfig)}
_LISTS = ("betas", "leaf_modules", "ns_coefficients", "muon_params", "nvme_path")
"""The fields that are tuples, and may be given as lists."""
_OF_RULE = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov")
"""The fields whose defaults are the rule's."""
_FUNCTIONS = ("lr", "betas")
"""Hyperparameters that may be functions of the number of updates, as ``OffloadConfig.hyperparameters`` returns them."""


def _unset(default: Any) -> Any:
    """A rule's default, marked; None where the rule has none, or where a mark would change its type."""
    if isinstance(default, tuple):
        return _Pair(default)
    return _Number(default) if isinstance(default, float) else None


def is_set(config: OffloadConfig, name: str) -> bool:
    """True if this field was given, and not as its default."""
    value = getattr(config, name)
    return not isinstance(value, _Number | _Pair) and not checks.is_in(value, (_DEFAULTS[name],))


def names_of(rule: type[Rule]) -> tuple[str, ...]:
    """The names of a rule's hyperparameters."""
    return tuple(field.name for field in fields(rule.hyper))


def _folders(given: Any) -> tuple[str, ...]:
    """The value of ``nvme_path`` as names of folders. Raises :class:`ConfigError`; no folder is looked at."""
    alone = isinstance(given, str | os.PathLike)
    if not alone and (not isinstance(given, tuple | list) or not given):
        raise ConfigError(f"nvme_path: got {checks.shown(given)}, expected a folder, a list of folders or None")
    names: list[str] = []
    for folder in [given] if alone else given:
        name = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None
        if not isinstance(name, str) or not name or "\0" in name:
            raise ConfigError(f"nvme_path: got {checks.shown(folder)}, expected the name of a folder")
        if os.path.normpath(name) in map(os.path.normpath, names):
            raise ConfigError(f"nvme_path: got {checks.shown(name)} twice, expected each folder once")
        names.append(name)
    return tuple(names)


def _bytes_or_share(given: Any) -> int | float:
    """The value of ``device_states_bytes`` as bytes (an int) or as a share of all states (a float). Raises
    :class:`ConfigError`."""
    value: int | float = -1
    for convert in (float, operator.index) if not isinstance(given, str | bool | np.bool_) else ():
        with suppress(Exception):  # an array of several elements raises its library's own error
            value = convert(given)
    if not 0 <= value <= (1 if isinstance(value, float) else checks.LARGEST):
        raise ConfigError(
            f"device_states_bytes: got {checks.shown(given)}, expected an integer, which is a number of bytes, a float "
            "from 0.0 to 1.0, which is a share of all states, 'auto' or None"
        )
    return value


def _check_group_of(where: str, optimizer: str, group: Any) -> None:
    """Raise :class:`ConfigError` unless ``group`` has hyperparameters of this optimizer alone, in their ranges."""
    names = names_of(RULES[optimizer])
    if not isinstance(group, Mapping):
        raise ConfigError(f"{where}: got {checks.shown(group)}, expected hyperparameters by name: {{'lr': 3e-4}}")
    for name in group:
        if name not in names:
            raise ConfigError(f"{where}: unknown hyperparameter {checks.shown(name)}; {checks.nearest(name, names)}")
    try:
        RULES[optimizer].hyper(**group).check()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def check_group_keys(where: str, keys: Collection[object], names: Collection[str]) -> None:
    """Raise :class:`ConfigError` if a parameter group has a hyperparameter under a wrong name: a misspelt one, or
    another library's. Other keys are the user's own, and so are all where the group has the hyperparameter, too.

    Args:
        where: names the group in the error.
        names: of the group's hyperparameters.
    """
    for name in names:
        for key in keys if name not in keys else ():
            if not isinstance(key, str) or key.startswith(f"{name}_"):
                continue
            plain, right = (text.lower().replace("_", "").replace("-", "") for text in (key, name))
            if _OF_GROUPS_ELSEWHERE.get(key) == name or difflib.SequenceMatcher(None, plain, right).ratio() > 0.88:
                raise ConfigError(f"{where}: {checks.shown(key)} is no hyperparameter; expected {name!r}")


def _check_names(given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in FIELDS:
            place = translation.place_of(name)
            hint = None
            if place:
                where = "it is a key of DeepSpeed's" if place == name else f"DeepSpeed has it as {place!r}"
                hint = f"{where}: give such a configuration as config"
            if name in _OTHER_NAMES:
                hint = f"expected {_OTHER_NAMES[name]!r}"
            hint = _ARGUMENTS.get(name, hint)
            hint = hint or checks.nearest(name, FIELDS, also=KEYS)
            raise ConfigError(f"unknown configuration field {checks.shown(name)}; {hint}")


def _converted(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with tuples for lists, as JSON has only lists, and with the names of element types."""
    lists = {name: given[name] for name in _LISTS if isinstance(given.get(name), list)}
    dtypes = {name: _dtype_name(value) for name, value in given.items() if name.endswith("_dtype")}
    return {**given, **dtypes, **{name: tuple(values) for name, values in lists.items()}}


def _dtype_name(value: Any) -> Any:
    """The name of an element type that is given by its short name, or as torch, JAX or NumPy have it."""
    if isinstance(value, str):
        return _SHORT_DTYPES.get(value, value)
    try:
        name = str(value) if type(value).__module__ == "torch" else "" if value is None else np.dtype(value).name
    except TypeError:
        return value
    name = name.removeprefix("torch.")
    return name if name in BY_NAME else value


_MADE = '; wrap() makes the optimizer: give its name and settings, such as optimizer="adamw", lr=1e-3'


def _is_optimizer(value: Any) -> bool:
    """True for optimizers of torch and of optax, and for what makes them."""
    made = hasattr(value, "param_groups") or (hasattr(value, "init") and hasattr(value, "update"))
    return made or hasattr(value, "zero_grad") or getattr(value, "__module__", "").startswith("optax")


def _name_of(value: Any) -> str:
    """Return the name of an optimizer's class or function, or that of its own type."""
    return getattr(value, "__name__", None) or checks.kind_of(value)
