"""Each update rule in optax's words: the transformation that optax has of it, and the states in its state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from offload_core.config.options import OffloadConfig
from offload_core.errors import StateError
from offload_core.rules import RULES, Rule
from offload_core.rules.adam import Adam

from ..devices.numbers import bias_corrections


@dataclass(frozen=True)
class OptaxWords:
    """A rule in optax's words."""

    node_name: str
    """The name of the part of optax's state that holds the rule's states."""
    whose: str
    """The transformation whose state has this part."""
    fields: Mapping[str, str]
    """The names of the rule's states in that part, by our names."""
    transformation: Callable[..., Any]
    """``transformation(config, values, lr, mask)``: optax's own, with these hyperparameters. ``lr`` may be a schedule,
    ``mask`` says which parameters weight decay applies to. Muon's also takes the leaves that are its own."""
    in_xlas_numbers: Callable[[Rule], Rule] = lambda rule: rule
    """Return the rule with scalars as eager optax computes them."""

    @property
    def node(self) -> Any:
        """The type of that part."""
        import optax.contrib

        return getattr(optax if hasattr(optax, self.node_name) else optax.contrib, self.node_name)


def _adamw(config: OffloadConfig, values: Mapping[str, Any], lr: Any, mask: Any) -> Any:
    import optax

    b1, b2 = values["betas"]
    terms = {"b1": b1, "b2": b2, "eps": values["eps"], "eps_root": values["eps_root"]}
    if config.adam_mode == "adamw":
        return optax.adamw(lr, **terms, weight_decay=values["weight_decay"], mask=mask)
    return optax.chain(optax.add_decayed_weights(values["weight_decay"], mask), optax.adam(lr, **terms))


def _muon(config: OffloadConfig, values: Mapping[str, Any], lr: Any, mask: Any, matrices: Any) -> Any:
    """As ``OptaxWords.transformation``, also with AdamW's settings.

    Args:
        matrices: a tree of booleans: True for the leaves that Muon updates.
    """
    import optax.contrib

    if not hasattr(optax.contrib, "MuonDimensionNumbers"):
        raise StateError(
            f"optax {optax.__version__} cannot say which parameters Muon updates; expected a later one, which has "
            "optax.contrib.MuonDimensionNumbers"
        )
    own, group = config.adamw_group(), config.values(0, config.groups()[1])
    adam = {**vars(RULES["adamw"].hyper()), **group}
    dimensions = optax.contrib.MuonDimensionNumbers(-2, -1)  # one object: a tree's leaves, as optax takes them
    return optax.contrib.muon(
        lr,
        values["ns_coefficients"],
        values["ns_steps"],
        values["momentum"],
        values["eps"],
        values["weight_decay"],
        mask,
        nesterov=values["nesterov"],
        adam_b1=adam["betas"][0],
        adam_b2=adam["betas"][1],
        adam_eps_root=adam["eps_root"],
        adam_weight_decay=adam["weight_decay"],
        adam_learning_rate=own.get("lr"),
        muon_weight_dimension_numbers=jax.tree.map(lambda is_matrix: dimensions if is_matrix else None, matrices),
    )


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
    "muon": OptaxWords("MuonState", "optax.contrib.muon", {"momentum_buffer": "mu"}, _muon),
}
"""By the value of ``OffloadConfig.optimizer``."""
