"""Settings in the words of JAX and optax: ``learning_rate``, ``b1``, ``b2``, element types such as ``jnp.bfloat16``."""

from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat

import numpy as np

from offload_core.config.options import FIELDS, ConfigLike, OffloadConfig
from offload_core.config.settings import OffloadSettings
from offload_core.deepspeed.keys import KEYS
from offload_core.dtypes import BY_NUMPY
from offload_core.errors import ConfigError
from offload_core.support import checks


class JaxSettings(OffloadSettings, total=False):
    """The settings of ``wrap``, also in optax's words."""

    learning_rate: SupportsFloat | Callable[[Any], Any]
    b1: SupportsFloat
    b2: SupportsFloat


WORDS = {"learning_rate": "lr", "b1": "betas", "b2": "betas"}
"""The field for each of optax's words."""
_BETAS = ("b1", "b2")
_INSTEAD = {
    **dict.fromkeys(
        ("freeze", "frozen", "freeze_mask", "train_mask"),
        "expected trainable=, booleans in the parameters' structure or a function of the parameters: True trains",
    ),
    **dict.fromkeys(
        ("decay_mask", "weight_decay_mask"),
        "expected mask=, booleans in the parameters' structure or a function of the parameters: True decays",
    ),
    "tx": 'wrap() makes the optimizer: give its name and settings, such as optimizer="adamw", lr=1e-3',
    "nu_dtype": "expected 'exp_avg_sq_dtype'",
    "every_k_schedule": "expected 'gradient_accumulation_steps', a number",
    **dict.fromkeys(("axis_name", "mesh_axis"), "expected axis=, beside mesh="),
}
"""Hints for words of JAX's libraries that are no field here."""


def resolved(config: ConfigLike, overrides: Mapping[str, Any], *, world_size: int) -> OffloadConfig:
    """As ``OffloadConfig.resolve``, in JAX's words and in ours.

    Raises:
        ConfigError: also if a setting is given in both.
    """
    if isinstance(config, Mapping):
        named = config.get("optimizer")
        own: dict[str, Any] = {"optimizer": named} if isinstance(named, str) else {}
        config = _in_our_words(config, lambda: OffloadConfig(**own).betas)

    def betas() -> Any:
        own: Any = {name: overrides[name] for name in ("optimizer",) if name in overrides}
        return OffloadConfig.resolve(config, world_size=world_size, **own).betas

    words = _in_our_words(overrides, betas)
    if config is None and words.get("offload_param") is not None:
        words.setdefault("stage", 3)  # parameters that the model gathers, also on one device
    found = OffloadConfig.resolve(config, world_size=world_size, **words)
    if not found.average_over_ranks:
        raise ConfigError(
            "average_over_ranks=False: update() also takes gradients that are averaged already; expected True, and a "
            "loss that is multiplied by the number of devices"
        )
    return found


def _in_our_words(given: Mapping[str, Any], betas_of: Any) -> dict[str, Any]:
    """Return the settings by the names of our fields. ``betas_of()`` gives the present betas, of which ``b1`` or ``b2``
    may replace one."""
    found = {name: value for name, value in given.items() if name not in WORDS}
    for name, value in given.items():
        field = WORDS.get(name)
        if field in found:
            raise ConfigError(
                f"{name}={checks.shown(value)} beside {field}={checks.shown(found[field])}: they are one setting; "
                "expected one of the two"
            )
        if name in _INSTEAD:
            raise ConfigError(f"unknown configuration field {checks.shown(name)}; {_INSTEAD[name]}")
        if field is None and name not in FIELDS:
            hint = checks.nearest(name, FIELDS, also=[*KEYS, *WORDS])
            if any(repr(word) in hint for word in WORDS):
                raise ConfigError(f"unknown configuration field {checks.shown(name)}; {hint}")
        if name.endswith("_dtype"):
            found[name] = _name_of(value)
    if "learning_rate" in given:
        found["lr"] = given["learning_rate"]
    if any(name in given for name in _BETAS):
        both = all(name in given for name in _BETAS)
        others = (None, None) if both else betas_of() or (None, None)
        if callable(others):
            raise ConfigError("b1 or b2 beside betas that are a function; expected one of them")
        found["betas"] = tuple(given.get(name, other) for name, other in zip(_BETAS, others, strict=True))
    return found


def _name_of(dtype: Any) -> Any:
    """Return the name of an element type. Other values are returned unchanged, and ``OffloadConfig`` checks them."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    try:
        known = BY_NUMPY.get(np.dtype(dtype))
    except (TypeError, ValueError):
        return dtype
    return dtype if known is None else known.name
