"""Every update rule as tests see it. A new rule adds its oracle and one entry here."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from offload_core.config.options import OffloadConfig
from offload_core.device.host import newton_schulz
from offload_core.dtypes import BFLOAT16
from offload_core.rules import RULES, Hyper, Matrix, Rule
from offload_core.rules.muon import MuonHyper
from tests.support import oracles
from tests.support.kernel_calls import State
from tests.support.oracles import Adagrad, Adam, Lion, Muon, MuonDirection, Sgd

LR = 1e-2
_RATES = st.sampled_from([1e-2, 0.0, 1e-8, 1.0])
_DECAYS = st.sampled_from([0.1, 0.0, 0.01])
_EVERY = {"grad_scale": st.sampled_from([1.0, 0.3, 2.0**-16]), "step": st.sampled_from([1, 2, 1000, 10**6])}


@dataclass(frozen=True)
class Reference:
    """A rule's oracle, and the same rule in the frameworks."""

    step: type[oracles.Step]
    drawn: st.SearchStrategy[oracles.Step]
    kinds: Mapping[str, Mapping[str, Any]]
    """Settings beside the learning rate that show each part of the rule; ``"most"`` are those of laws about something
    else."""
    of_torch: Callable[[Any, Mapping[str, Any]], Any]
    """``of_torch(params, settings)``: torch's optimizer."""
    of_optax: Callable[[Any, Mapping[str, Any]], Any]
    """``of_optax(lr, settings)``: optax's transformation."""
    states: tuple[str, ...]
    """With the settings ``"most"``."""
    torchs_alone: tuple[str, ...] = ()
    """Settings that optax does not have."""
    refused: tuple[tuple[Mapping[str, Any], str], ...] = ()
    """Settings that are refused, and the error."""

    def optaxs_kinds(self) -> dict[str, Mapping[str, Any]]:
        return {name: kind for name, kind in self.kinds.items() if not kind.keys() & set(self.torchs_alone)}


def _adamw_of_torch(params: Any, settings: Mapping[str, Any]) -> Any:
    import torch

    given = dict(settings)
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[given.pop("adam_mode", "adamw")]
    return kind(params, **{"weight_decay": 0.01, **given}, fused=True)


def _of_torch(name: str) -> Callable[[Any, Mapping[str, Any]], Any]:
    def made(params: Any, settings: Mapping[str, Any]) -> Any:
        import torch

        return getattr(torch.optim, name)(params, **settings, fused=True)

    return made


def _lion_of_torch(params: Any, settings: Mapping[str, Any]) -> Any:
    from tests.support.torch_lion import Lion

    return Lion(params, **settings)


def _adamw_of_optax(lr: Any, settings: Mapping[str, Any]) -> Any:
    import optax

    b1, b2 = settings.get("betas", (0.9, 0.999))
    terms = {"b1": b1, "b2": b2, "eps": settings.get("eps", 1e-8)}
    decay = settings.get("weight_decay", 0.01)
    if settings.get("adam_mode") != "adam":
        return optax.adamw(lr, **terms, weight_decay=decay)
    return optax.chain(optax.add_decayed_weights(decay), optax.adam(lr, **terms))


def _sgd_of_optax(lr: Any, settings: Mapping[str, Any]) -> Any:
    import optax

    return _decayed(settings, optax.sgd(lr, settings.get("momentum"), settings.get("nesterov", False)))


def _lion_of_optax(lr: Any, settings: Mapping[str, Any]) -> Any:
    import optax

    b1, b2 = settings.get("betas", (0.9, 0.99))
    return optax.lion(lr, b1, b2, weight_decay=settings.get("weight_decay", 1e-3))


def _adagrad_of_optax(lr: Any, settings: Mapping[str, Any]) -> Any:
    import optax

    first = settings.get("initial_accumulator_value", 0.0)
    return _decayed(settings, optax.adagrad(lr, first, settings.get("eps", 1e-10)))


def _decayed(settings: Mapping[str, Any], transformation: Any) -> Any:
    import optax

    decay = settings.get("weight_decay")
    return optax.chain(optax.add_decayed_weights(decay), transformation) if decay else transformation


REFERENCES: dict[str, Reference] = {
    "adamw": Reference(
        Adam,
        # beta1 on each side of the branch at 1 - beta1 = 0.5, and on it; factors of 1 or 0, which are then left out
        st.builds(
            Adam,
            lr=_RATES,
            beta1=st.sampled_from([0.9, 0.5, 0.3, 0.0, 0.99]),
            beta2=st.sampled_from([0.999, 0.95, 0.0]),
            eps=st.sampled_from([1e-8, 0.0, 1e-3]),
            eps_root=st.sampled_from([0.0, 1e-12]),
            weight_decay=_DECAYS,
            mode=st.sampled_from(["adamw", "adam"]),
            **_EVERY,
        ),
        {
            "plain": {},
            "most": {"betas": (0.9, 0.99), "weight_decay": 0.1},
            "L2": {"weight_decay": 0.1, "adam_mode": "adam"},
            "short": {"betas": (0.4, 0.95), "eps": 1e-6, "weight_decay": 0.0},
        },
        _adamw_of_torch,
        _adamw_of_optax,
        ("exp_avg", "exp_avg_sq"),
        refused=(({"momentum": 0.9}, "momentum=0.9 has no place in optimizer='adamw'; expected optimizer='sgd'"),),
    ),
    "sgd": Reference(
        Sgd,
        st.builds(
            Sgd,
            lr=_RATES,
            momentum=st.sampled_from([0.9, 0.0, 0.5, 1e-50]),
            dampening=st.sampled_from([0.0, 0.1, 0.9]),
            weight_decay=_DECAYS,
            nesterov=st.booleans(),
            **_EVERY,
        ),
        {
            "plain": {},
            "decay": {"weight_decay": 0.1},
            "most": {"momentum": 0.9, "weight_decay": 0.1},
            "dampening": {"momentum": 0.9, "dampening": 0.3},
            "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        },
        _of_torch("SGD"),
        _sgd_of_optax,
        ("momentum_buffer",),
        ("dampening",),
        (
            ({"momentum": lambda updates: 0.9}, "momentum: got a function, expected a number"),
            ({"betas": (0.9, 0.95)}, r"betas=.* has no place in optimizer='sgd'"),
            ({"nesterov": True}, "nesterov=True with momentum=0.0 and dampening=0.0; expected"),
            ({"momentum": -1.0}, "momentum: got -1.0, expected a finite number >= 0"),
        ),
    ),
    "lion": Reference(
        Lion,
        st.builds(
            Lion,
            lr=_RATES,
            beta1=st.sampled_from([0.9, 0.0, 0.95]),
            beta2=st.sampled_from([0.99, 0.0, 0.5]),
            weight_decay=_DECAYS,
            **_EVERY,
        ),
        {
            "plain": {"weight_decay": 0.0},
            "most": {"weight_decay": 0.1},
            "betas": {"betas": (0.95, 0.5), "weight_decay": 0.01},
        },
        _lion_of_torch,
        _lion_of_optax,
        ("exp_avg",),
        refused=(
            ({"eps": 1e-8}, "eps=1e-08 has no place in optimizer='lion'"),
            ({"betas": (0.9, 1.0)}, r"betas\[1\]: got 1.0"),
            ({"exp_avg_sq_dtype": "bfloat16"}, "exp_avg_sq_dtype='bfloat16' has no place in optimizer='lion'"),
        ),
    ),
    "adagrad": Reference(
        Adagrad,
        st.builds(
            Adagrad,
            lr=_RATES,
            lr_decay=st.sampled_from([0.0, 0.1]),
            weight_decay=_DECAYS,
            eps=st.sampled_from([1e-10, 0.0, 1e-3]),
            **_EVERY,
        ),
        {
            "plain": {},
            "most": {"weight_decay": 0.1, "initial_accumulator_value": 0.5},
            "lr_decay": {"lr_decay": 0.1, "eps": 1e-6},
        },
        _of_torch("Adagrad"),
        _adagrad_of_optax,
        ("sum",),
        ("lr_decay",),
        (
            ({"momentum": 0.9}, "momentum=0.9 has no place in optimizer='adagrad'"),
            ({"initial_accumulator_value": -1.0}, "initial_accumulator_value: got -1.0, expected a finite number >= 0"),
            ({"exp_avg_dtype": "float8"}, "exp_avg_dtype='float8' has no place in optimizer='adagrad'"),
        ),
    ),
}
"""By the value of ``OffloadConfig.optimizer``."""
KINDS = [(name, kind) for name, reference in REFERENCES.items() for kind in reference.kinds]
OPTAXS_KINDS = [(name, kind) for name, reference in REFERENCES.items() for kind in reference.optaxs_kinds()]
MUONS: dict[str, type[oracles.Step]] = {"muon": Muon, "direction_muon": MuonDirection}
"""The oracles of Muon's passes, by the kernel's rule."""
_MUONS = {
    "lr": _RATES,
    "momentum": st.sampled_from([0.95, 0.5, 0.3, 0.0]),
    "weight_decay": _DECAYS,
    "nesterov": st.booleans(),
    "adjustment": st.sampled_from([1.0, 0.2 * 2**0.5]),
    "adds": st.booleans(),
    **_EVERY,
}
DRAWN = {
    **{reference.step.family: reference.drawn for reference in REFERENCES.values()},
    **{step.family: st.builds(step, **_MUONS) for step in MUONS.values()},
}
"""Steps by the first word of the kernels' rules."""


def settings_of(name: str, kind: str = "most") -> dict[str, Any]:
    """The fields of ``OffloadConfig``, ``optimizer`` and ``lr`` included."""
    return {"optimizer": name, "lr": LR, **REFERENCES[name].kinds[kind]}


def hyper_of(name: str, kind: str) -> Hyper:
    config = OffloadConfig(**settings_of(name, kind))
    return RULES[name].hyper(**config.values(0))


def rule_of(config: OffloadConfig, hyper: Hyper) -> Rule:
    """The rule of a group with these hyperparameters."""
    [name] = [name for name, rule in RULES.items() if rule.hyper is type(hyper)]
    return config.rule({"optimizer": name, **vars(hyper)})


def kernel_of(name: str, order: str) -> str:
    """The kernels' rule."""
    return RULES[name].of({**vars(OffloadConfig(optimizer=name)), "op_order": order}).kernel


def matrix_of(rule: Rule | None, numel: int) -> Matrix | None:
    """A shape for a parameter of a rule that needs matrices: as square as can be."""
    rows = next(n for n in range(math.isqrt(numel), 0, -1) if numel % n == 0)
    return None if rule is None else rule.matrix("", (rows, numel // rows))


def updated(rule: Rule, hyper: Hyper, before: State, grad_scale: float, step: int) -> State:
    """An update of a whole parameter by the definition."""
    if rule.device_kernel is None:
        return oracles.update(before, oracle_of(rule, hyper, grad_scale, step), rule=rule.kernel, param_dtype=None)
    assert isinstance(hyper, MuonHyper)
    matrix = matrix_of(rule, before.master.size)
    assert matrix is not None
    given = {name: getattr(hyper, name) for name in ("lr", "momentum", "weight_decay", "nesterov")}
    adds = rule.op_order == "optax"
    scale = math.sqrt(max(1, matrix[0] / matrix[1]))
    own = {**given, "adjustment": scale, "grad_scale": grad_scale, "step": step, "adds": adds}
    both = replace(before, moments=(*before.moments, np.zeros_like(before.master)))
    first = oracles.update(both, MuonDirection(**own), rule="direction_muon", param_dtype=BFLOAT16)
    made = newton_schulz(first.param.reshape(matrix), rule.device_kernel).reshape(-1).astype(np.float32)
    both = replace(before, moments=(*before.moments, made))
    after = oracles.update(both, Muon(**own), rule="muon", param_dtype=None)
    return replace(after, moments=after.moments[:1])


def oracle_of(rule: Rule, hyper: Hyper, grad_scale: float, step: int) -> oracles.Step:
    """An update of a group with these hyperparameters."""
    given = {**vars(rule), **vars(hyper), "grad_scale": grad_scale, "step": step}
    if "betas" in given:
        given["beta1"], given["beta2"] = given["betas"]
    kind = REFERENCES[rule.name].step
    return kind(**{each.name: given[each.name] for each in fields(kind)})
