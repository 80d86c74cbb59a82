"""Each update rule in optax's words: the transformation that optax has of it, and the states in its state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from offload_core.config.options import OffloadConfig
from offload_core.rules import Rule
from offload_core.rules.adam import Adam

from ..devices.numbers import bias_corrections


@dataclass(frozen=True)
class OptaxWords:
    """A rule in optax's words."""

    node: str
    """The name of the part of optax's state that holds the rule's states."""
    whose: str
    """The transformation whose state has this part."""
    fields: Mapping[str, str]
    """The names of the rule's states in that part, by our names."""
    transformation: Callable[[OffloadConfig, Mapping[str, Any], Any, Any], Any]
    """``transformation(config, values, lr, mask)``: optax's own, with these hyperparameters. ``lr`` may be a schedule,
    ``mask`` says which parameters weight decay applies to."""
    in_xlas_numbers: Callable[[Rule], Rule] = lambda rule: rule
    """Return the rule with scalars as eager optax computes them."""


def _adamw(config: OffloadConfig, values: Mapping[str, Any], lr: Any, mask: Any) -> Any:
    import optax

    b1, b2 = values["betas"]
    terms = {"b1": b1, "b2": b2, "eps": values["eps"], "eps_root": values["eps_root"]}
    if config.adam_mode == "adamw":
        return optax.adamw(lr, **terms, weight_decay=values["weight_decay"], mask=mask)
    return optax.chain(optax.add_decayed_weights(values["weight_decay"], mask), optax.adam(lr, **terms))


def _adam_in_xlas_numbers(rule: Rule) -> Rule:
    assert isinstance(rule, Adam)
    return replace(rule, bias_corrections=bias_corrections)


def _sgd(config: OffloadConfig, values: Mapping[str, Any], lr: Any, mask: Any) -> Any:
    import optax

    return _after_decay(optax.sgd(lr, values["momentum"] or None, values["nesterov"]), values, mask)


def _lion(config: OffloadConfig, values: Mapping[str, Any], lr: Any, mask: Any) -> Any:
    import optax

    return optax.lion(lr, *values["betas"], weight_decay=values["weight_decay"], mask=mask)


def _adagrad(config: OffloadConfig, values: Mapping[str, Any], lr: Any, mask: Any) -> Any:
    import optax

    return _after_decay(optax.adagrad(lr, values["initial_accumulator_value"], values["eps"]), values, mask)


def _after_decay(tx: Any, values: Mapping[str, Any], mask: Any) -> Any:
    """Return the transformation after L2 decay, if there is any."""
    import optax

    decay = values["weight_decay"]
    return optax.chain(optax.add_decayed_weights(decay, mask), tx) if decay else tx


WORDS: dict[str, OptaxWords] = {
    "adamw": OptaxWords(
        "ScaleByAdamState", "optax.adamw", {"exp_avg": "mu", "exp_avg_sq": "nu"}, _adamw, _adam_in_xlas_numbers
    ),
    "sgd": OptaxWords("TraceState", "optax.sgd with a momentum", {"momentum_buffer": "trace"}, _sgd),
    "lion": OptaxWords("ScaleByLionState", "optax.lion", {"exp_avg": "mu"}, _lion),
    "adagrad": OptaxWords("ScaleByRssState", "optax.adagrad", {"sum": "sum_of_squares"}, _adagrad),
}
"""By the value of ``OffloadConfig.optimizer``."""
