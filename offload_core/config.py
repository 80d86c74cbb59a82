"""``OffloadConfig``: every setting, checked when it is made."""

import difflib
import math
import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from .cpus import default_threads
from .dtypes import BY_NAME, ElementType
from .errors import ConfigError

_CHOICES: dict[str, tuple] = {
    "adam_mode": ("adamw", "adam"),
    "op_order": ("torch", "optax"),
    "param_dtype": (None, *BY_NAME),
    "communication_dtype": (None, *BY_NAME),
    "reduction": ("ordered", "native"),
    "schedule": ("overlap", "serial", "delayed"),
}

# What the design names and this version does not build yet.
_NOT_YET: dict[str, tuple[tuple, str]] = {
    "stage": ((), ""),
    "offload_optimizer": ((None, "nvme"), "offload_optimizer='cpu'"),
    "offload_param": (("nvme",), "offload_param='cpu'"),
}
_BUILT: dict[str, tuple] = {
    "stage": (1, 2, 3),
    "offload_optimizer": ("cpu",),
    "offload_param": (None, "cpu"),
}


@dataclass(frozen=True)
class OffloadConfig:
    """Settings of an offloaded optimizer. Raises :class:`ConfigError` where a value is out of range.

    The Adam fields mean what they mean in ``torch.optim.AdamW`` and ``optax.adamw``; ``lr`` may be a
    schedule (a function of the number of updates made so far) in JAX.
    """

    lr: float | Callable[[Any], Any] = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    eps_root: float = 0.0
    """Added under the square root; ``op_order="optax"`` only."""
    weight_decay: float = 0.01
    adam_mode: str = "adamw"
    """``"adamw"`` decouples weight decay from the gradient; ``"adam"`` adds it to the gradient (L2)."""
    op_order: str | None = None
    """Whose rounding to reproduce, ``"torch"`` or ``"optax"``; None: the front end's own library."""
    stage: int = 2
    """ZeRO stage: 1 partitions optimizer states, 2 gradients too, 3 parameters too. On one rank they are the same."""
    param_dtype: str | None = None
    """Element type of the device parameters; None keeps the model's."""
    gradient_clipping: float | None = None
    """Bound on the global L2 norm of the gradients, or None."""
    gradient_accumulation_steps: int = 1
    """Micro-steps an update averages over, accumulated in fp32."""
    skip_nonfinite: bool | None = None
    """Skip an update whose gradients hold an inf or a NaN. None: where the gradients are examined anyway, that is with
    clipping, loss scaling or gradients that travel as float16; True examines them always, at the cost of one more
    pass."""
    loss_scale: float | str | None = None
    """``"dynamic"``, a fixed factor, or None: dynamic for float16 parameters, else 1."""
    initial_loss_scale: float = 65536.0
    loss_scale_window: int = 2000
    """Updates without overflow after which a dynamic loss scale doubles."""
    reduce_bucket_size: int = 32 * 2**20
    """Elements of a communication bucket; bounds staging memory."""
    communication_dtype: str | None = None
    """Element type in which gradients travel between ranks; None: their own. A narrower one rounds them."""
    reduction: str = "ordered"
    """``"ordered"`` sums in rank order in fp32, the same bits on any backend; ``"native"`` is the backend's own
    reduce-scatter, in the element type that travels."""
    schedule: str = "overlap"
    """``"overlap"`` hides copies, reduction and the update behind what the device computes; ``"serial"`` does one thing
    after the other. The bits are the same. On one rank on the CPU there is nothing to hide. ``"delayed"`` is another
    algorithm: after ``delay_warmup_steps`` each step's gradients change the parameters one step later, so that the
    update has a whole step to hide behind (one-step delayed parameter update, ZeRO-Offload, section 5.2 of
    arXiv:2101.06840)."""
    delay_warmup_steps: int = 40
    """``schedule="delayed"``: the first updates, which are not delayed."""
    update_in_backward: bool = False
    """``schedule="overlap"``: send new parameters to the device as soon as a bucket's gradients are on the host, during
    ``engine.backward()``. The bits are the same. Where nothing looks at all gradients first (clipping, loss scaling,
    ``skip_nonfinite``) states are updated then, too: between ``engine.backward()`` and ``engine.step()``
    hyperparameters may not change, gradients not be discarded or added to, parameters not be read; that is an error.
    Else states keep till the step, and parameters are sent in the hope that it neither clips nor skips; where it does
    they are sent again. That takes 16 bytes a parameter more of the host's bandwidth, and is not tried right after a
    step that was clipped or skipped. In JAX, in stage 3, and on one rank on the CPU, it has no effect."""
    offload_optimizer: str | None = "cpu"
    offload_param: str | None = None
    """``"cpu"`` (stage 3): parameters wait in host memory, also those of one rank, and come to the device for the
    modules that use them."""
    param_persistence_threshold: int = 100_000
    """Stage 3: parameters of fewer elements stay whole on every rank."""
    max_live_parameters: int = 1_000_000_000
    """Stage 3: elements of parameters that are whole at a time, at most; what the running modules need comes first."""
    prefetch_bucket_size: int = 50_000_000
    """Stage 3: elements that are gathered before they are needed, at most."""
    max_reuse_distance: int = 1_000_000_000
    """Stage 3: a parameter stays whole where it is used again within so many elements of others."""
    pin_memory: bool = True
    """Pin the staging buffers where the device copies from host memory."""
    num_threads: int | None = None
    """Threads of the update; None: this process's share of the processors."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices and not (name == "op_order" and value is None):
                raise ConfigError(f"{name}: got {value!r}, expected one of {', '.join(map(repr, choices))}")
        for name, (later, instead) in _NOT_YET.items():
            value = getattr(self, name)
            if value in later:
                raise ConfigError(f"{name}={value!r} is not built yet in this version; it has {instead}")
            if value not in _BUILT[name]:
                choices = (*_BUILT[name], *later)
                raise ConfigError(f"{name}: got {value!r}, expected one of {', '.join(map(repr, choices))}")
        if not callable(self.lr):
            _number("lr", self.lr, least=0.0)
        check_betas(self.betas)
        for name in ("eps", "eps_root", "weight_decay"):
            _number(name, getattr(self, name), least=0.0)
        if self.eps_root and self.op_order == "torch":
            raise ConfigError(f"eps_root={self.eps_root!r} has no place in op_order='torch'; expected 0")
        if self.gradient_clipping is not None:
            _number("gradient_clipping", self.gradient_clipping, above=0.0)
        for name in ("gradient_accumulation_steps", "reduce_bucket_size", "loss_scale_window"):
            _integer(name, getattr(self, name))
        for name in (
            "param_persistence_threshold",
            "max_live_parameters",
            "prefetch_bucket_size",
            "max_reuse_distance",
        ):
            _integer(name, getattr(self, name), least=0)
        if self.offload_param is not None and self.stage != 3:
            raise ConfigError(
                f"offload_param={self.offload_param!r} with stage={self.stage}: only stage 3 takes parameters apart; "
                "expected stage=3"
            )
        if self.num_threads is not None:
            _integer("num_threads", self.num_threads)
        if self.loss_scale not in (None, "dynamic"):
            if isinstance(self.loss_scale, str):
                raise ConfigError(f"loss_scale: got {self.loss_scale!r}, expected 'dynamic', a number or None")
            _number("loss_scale", self.loss_scale, above=0.0)
        _number("initial_loss_scale", self.initial_loss_scale, above=0.0)
        _integer("delay_warmup_steps", self.delay_warmup_steps, least=0)
        for name in ("pin_memory", "skip_nonfinite", "update_in_backward"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "skip_nonfinite" and value is None):
                raise ConfigError(f"{name}: got {value!r}, expected True or False")

    @classmethod
    def resolve(cls, config: "OffloadConfig | Mapping[str, Any] | None" = None, **overrides: Any) -> "OffloadConfig":
        """The configuration that ``wrap(…, config, **overrides)`` means.

        Args:
            config: an ``OffloadConfig``, a mapping of its fields, or None for the defaults.
            overrides: fields that replace those of ``config``.

        Raises:
            ConfigError: a field is unknown (the nearest known name is given) or its value is out of range.
        """
        if isinstance(config, str | os.PathLike):
            raise ConfigError(
                f"config: got the path {os.fspath(config)!r}; DeepSpeed JSON files are not read yet in this version: "
                "pass the fields of OffloadConfig as keyword arguments"
            )
        if config is None:
            config = {}
        if not isinstance(config, cls | Mapping):
            raise ConfigError(
                f"config: got {type(config).__name__}, expected an OffloadConfig, a dict of its fields or None"
            )
        given: dict[str, Any] = {} if isinstance(config, OffloadConfig) else dict(config)
        known = [f.name for f in fields(cls)]
        for name in [*given, *overrides]:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known fields: {', '.join(known)}"
                raise ConfigError(f"unknown configuration field {name!r}; {hint}")
        merged = {**given, **overrides}
        for name in ("betas",):
            if isinstance(merged.get(name), list):
                merged[name] = tuple(merged[name])
        return replace(config, **merged) if isinstance(config, cls) else cls(**merged)

    @property
    def threads(self) -> int:
        """Threads of the update."""
        return self.num_threads or default_threads()

    @property
    def target_dtype(self) -> ElementType | None:
        """``param_dtype`` as an element type."""
        return None if self.param_dtype is None else BY_NAME[self.param_dtype]

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def check_betas(betas: object) -> None:
    """Raise :class:`ConfigError` unless ``betas`` is a pair of numbers in [0, 1)."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ConfigError(f"betas: got {betas!r}, expected a pair of numbers in [0, 1)")
    for i, beta in enumerate(betas):
        _number(f"betas[{i}]", beta, least=0.0, below=1.0)


def check_hyperparameters(where: str, lr: float, betas: object, eps: float, weight_decay: float) -> None:
    """Check one parameter group's hyper-parameters; ``where`` names the group in the error."""
    try:
        _number("lr", lr, least=0.0)
        check_betas(betas)
        _number("eps", eps, least=0.0)
        _number("weight_decay", weight_decay, least=0.0)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _number(
    name: str, value: object, *, least: float = -math.inf, above: float = -math.inf, below: float = math.inf
) -> None:
    try:
        if isinstance(value, str | bool):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ConfigError(f"{name}: got {value!r}, expected a number") from None
    if not (math.isfinite(number) and number >= least and number > above and number < below):
        bounds = [
            f">= {least:g}" * (least > -math.inf),
            f"> {above:g}" * (above > -math.inf),
            f"< {below:g}" * (below < math.inf),
        ]
        raise ConfigError(f"{name}: got {value!r}, expected a finite number {' and '.join(b for b in bounds if b)}")


def _integer(name: str, value: object, *, least: int = 1) -> None:
    if not hasattr(value, "__index__") or isinstance(value, bool) or operator.index(value) < least:
        raise ConfigError(f"{name}: got {value!r}, expected an integer of at least {least}")
