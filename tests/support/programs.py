"""Random programs over one engine, beside plain torch: any order of what a script may call.

A program is a list of calls with small numbers. Each is legal in any state: one that a script may not make there is
left out. The loss is linear in the parameters, with coefficients that are multiples of 1/16: so gradients, their sums
over backwards and ranks and the squares of their norm are exact, and plain torch has the same bits.
"""

import contextlib
import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn

from frontends.torch import gathered_parameters, wrap
from offload_core.errors import StateError
from tests.support import residencies
from tests.support.torch_lion import Lion
from tests.support.torch_models import same_bits

# --- the model and its gradients ---------------------------------------------------------------------------

SHAPES = {
    "a.weight": (16, 8),
    "a.bias": (8,),
    "b.weight": (5, 3),  # on two ranks, three rows and two
    "c.weight": (1, 12),  # one rank has all of it
    "c.bias": (1,),
    "d.weight": (7,),
    "e.weight": (4, 4),  # frozen at first
    "g.weight": (3, 4),  # frozen and in no group, until it is added
}
PIECES = ("a", "b", "c", "d", "e", "f", "g")  # f has the weight of a
ALL = 2 ** len(PIECES) - 1
FROZEN_AT_FIRST = ("e.weight", "g.weight")
ADDED = "g.weight"


class Piece(nn.Module):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), None if bias is None else nn.Parameter(bias)

    def forward(self, pulls: Mapping[str, torch.Tensor]) -> torch.Tensor:
        found = [(getattr(self, name).float() * pull).sum() for name, pull in pulls.items()]
        return torch.stack(found).sum()


class Net(nn.Module):
    """Its loss has the gradients that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        values = {name: torch.randn(shape, generator=random).bfloat16().float() for name, shape in SHAPES.items()}
        for piece in PIECES:
            if piece != "f":
                self.add_module(piece, Piece(values[f"{piece}.weight"], values.get(f"{piece}.bias")))
        self.f = Piece(torch.zeros(1), None)
        self.f.weight = self.a.weight
        self.register_buffer("seen", torch.arange(3.0))
        for name in FROZEN_AT_FIRST:
            self.get_parameter(name).requires_grad_(False)

    def forward(self, pulls: Mapping[str, Mapping[str, torch.Tensor]]) -> torch.Tensor:
        found = [getattr(self, piece)(of_piece) for piece, of_piece in pulls.items()]
        return torch.stack(found).sum()


def pulls_of(seed: int, mask: int, poison: str | None) -> dict[str, dict[str, torch.Tensor]]:
    """The gradients of one backward on one rank, by piece and parameter.

    Args:
        mask: the pieces whose forward runs, as bits.
        poison: a value for an element of the first gradient.
    """
    found: dict[str, dict[str, torch.Tensor]] = {}
    for i, piece in enumerate(PIECES):
        if mask >> i & 1:
            random = torch.Generator().manual_seed(100 * seed + i)
            own = "a" if piece == "f" else piece
            names = [name for name in SHAPES if name.startswith(f"{own}.") and not (piece == "f" and "bias" in name)]
            found[piece] = {
                name.partition(".")[2]: torch.randint(-16, 17, SHAPES[name], generator=random) / 16 for name in names
            }
    if poison is not None and found:
        first = next(iter(found.values()))["weight"]
        first.view(-1)[seed % first.numel()] = float(poison)
    return found


def gradients_of(pulls: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The same by the parameters' names: a tied weight has the sum."""
    found: dict[str, torch.Tensor] = {}
    for piece, of_piece in pulls.items():
        for own, value in of_piece.items():
            name = f"{'a' if piece == 'f' else piece}.{own}"
            found[name] = found[name] + value if name in found else value.clone()
    return found


# --- settings ----------------------------------------------------------------------------------------------

RULES: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 2e-2, "weight_decay": 0.01},
    "sgd": {"lr": 1e-1, "momentum": 0.9, "weight_decay": 0.01},
    "lion": {"lr": 1e-2, "weight_decay": 0.01},
    "adagrad": {"lr": 1e-1},
    "muon": {"lr": 2e-2, "weight_decay": 0.1},
}
STAGE_3 = {"stage": 3, "param_persistence_threshold": 0}
WAYS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1, "reduce_bucket_size": 64},
    "stage 2": {},
    "serial": {"schedule": "serial", "reduce_bucket_size": 32},
    "in backward": {"update_in_backward": True, "reduce_bucket_size": 32},
    "stage 3": {**STAGE_3, "reduce_bucket_size": 48},
    "stage 3 on the host": {**STAGE_3, "offload_param": "cpu", "max_live_parameters": 1},
    "states on disk": {"offload_optimizer": "nvme", "nvme_host_bytes": 0, "reduce_bucket_size": 64},
    "on disk": {**STAGE_3, "offload_param": "nvme", "offload_optimizer": "nvme", "nvme_host_bytes": 0},
}
FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"state_format": "bf16"},
    "8bit": {"state_format": "8bit"},
    "8bit, bf16 masters": {"state_format": "8bit", "master_dtype": "bfloat16"},
}


@dataclass(frozen=True)
class Setting:
    """What a program's engine is made with. ``ways`` are changed by its moves."""

    ways: tuple[str, ...]
    rules: tuple[str, str]
    dtype: str = "float32"
    format: str = "fp32"
    clipping: float | None = None
    fsdp: bool = False

    @property
    def examines(self) -> bool:
        """True if an inf or a NaN skips the step."""
        return self.clipping is not None

    @property
    def fields(self) -> dict[str, Any]:
        return {**FORMATS[self.format], **({} if self.clipping is None else {"gradient_clipping": self.clipping})}

    def groups(self) -> list[tuple[str, list[str]]]:
        """Each group's rule and parameters."""
        first, second = self.rules
        matrices = ["a.weight", "b.weight", "e.weight"]
        mine = matrices if first == "muon" else ["a.weight", "a.bias", "e.weight"]
        return [(first, mine), (second, [name for name in SHAPES if name not in (*mine, ADDED)]), ("adamw", [ADDED])]


@st.composite
def settings(draw: Any, *, fsdp: bool = False) -> Setting:
    """Draw a setting. With FSDP2 the ways are those of one engine over DTensors, and the format is fp32: the random
    bits of others follow from an element's place in its shard (docs/formats.md)."""
    ways = [*WAYS] if not fsdp else ["stage 2", "serial", "in backward", "states on disk"]
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    formats = ["fp32", "fp32", "bf16", "8bit", *(["8bit, bf16 masters"] * (dtype == "bfloat16"))]
    first = draw(st.sampled_from([*RULES] if not fsdp else [rule for rule in RULES if rule != "muon"]))
    return Setting(
        ways=tuple(draw(st.lists(st.sampled_from(ways), min_size=1, max_size=3))),
        rules=(first, draw(st.sampled_from(["adamw", "sgd"]))),
        dtype=dtype,
        format="fp32" if fsdp else draw(st.sampled_from(formats)),
        clipping=draw(st.sampled_from([None, 0.5, 1e3])),
        fsdp=fsdp,
    )


_seeds = st.integers(0, 9)
_params = st.sampled_from([*SHAPES])
_masks = st.integers(1, ALL)
CALLS = st.one_of(
    st.tuples(st.just("backward"), _seeds, _masks, _masks, st.none() | st.sampled_from(["inf", "nan"])),
    st.tuples(st.just("backward"), _seeds, st.just(ALL), st.just(ALL), st.none()),
    st.tuples(st.just("kept_backward"), _seeds, _masks),
    st.tuples(st.just("step")),
    st.tuples(st.just("step")),
    st.tuples(st.just("zero_grad")),
    st.tuples(st.just("release"), st.none() | _params),
    st.tuples(st.just("restore")),
    st.tuples(st.just("named_weights"), st.sampled_from([None, "float32"]), st.booleans()),
    st.tuples(st.just("export"), st.sampled_from([None, "float32"])),
    st.tuples(st.just("whole_state_dict")),
    st.tuples(st.just("save")),
    st.tuples(st.just("move")),
    st.tuples(st.just("freeze"), _params),
    st.tuples(st.just("unfreeze"), _params),
    st.tuples(st.just("add_group")),
    st.tuples(st.just("rate"), st.integers(0, 2), st.sampled_from([0.5, 0.25])),
    st.tuples(st.just("edit"), _params, st.sampled_from([0.5, -1.0])),
    st.tuples(st.just("states"), _params),
    st.tuples(st.just("gradient"), _params),
    st.tuples(st.just("state_dict")),
    st.tuples(st.just("reset"), _params),
    st.tuples(st.just("flush")),
)
programs = st.lists(CALLS, min_size=3, max_size=16)


# --- the oracles -------------------------------------------------------------------------------------------


class PlainTorch:
    """fp32 masters and torch's own optimizers.

    A master is flat and padded to a multiple of 16 elements: torch computes the last ones of other sizes otherwise.
    """

    def __init__(self, setting: Setting) -> None:
        self.dtype = getattr(torch, setting.dtype)
        self._clipping = setting.clipping
        values = dict(Net().named_parameters())
        self.masters: dict[str, nn.Parameter] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        """One for each parameter: torch's fused SGD fails where some of several have a momentum and others none."""
        self._groups = setting.groups()
        for rule, names in setting.groups():
            for name in names:
                value = values[name].detach()
                if rule != "muon":
                    value = torch.nn.functional.pad(value.reshape(-1), (0, -value.numel() % 16))
                self.masters[name] = nn.Parameter(value.clone())
                self.optimizers[name] = _of_torch(rule)([self.masters[name]], **RULES[rule])

    def step(self, gradients: Mapping[str, torch.Tensor]) -> bool:
        """Update, and return False if an inf or a NaN skips it."""
        factor = 1.0
        if self._clipping is not None:
            norm = math.sqrt(sum(g.double().square().sum().item() for g in gradients.values()))
            if not math.isfinite(norm):
                return False
            factor = min(1.0, self._clipping / (norm + 1e-6))
        for name, master in self.masters.items():
            grad = gradients.get(name)
            if grad is not None and factor != 1.0:
                grad = grad * torch.tensor(factor, dtype=torch.float32)
            if grad is not None and master.shape != grad.shape:
                grad = torch.nn.functional.pad(grad.reshape(-1), (0, -grad.numel() % 16))
            master.grad = grad
        for optimizer in self.optimizers.values():
            optimizer.step()
        return True

    def master(self, name: str) -> torch.Tensor:
        return self.masters[name].detach().view(-1)[: math.prod(SHAPES[name])].view(SHAPES[name])

    def value(self, name: str) -> torch.Tensor:
        return self.master(name).to(self.dtype)

    def edit(self, name: str, value: torch.Tensor) -> None:
        """A master that still rounds to the parameter keeps its low bits."""
        master = self.master(name)
        master.copy_(torch.where(master.to(self.dtype) == value, master, value.float()))

    def states(self, name: str) -> dict[str, torch.Tensor]:
        """The moments; empty before the first update."""
        state = self.optimizers[name].state.get(self.masters[name], {})
        numel = math.prod(SHAPES[name])
        return {key: value.view(-1)[:numel].view(SHAPES[name]) for key, value in state.items() if key in STATES}

    def reset(self, name: str) -> None:
        optimizer, master = self.optimizers[name], self.masters[name]
        state = optimizer.state.pop(master)
        if isinstance(optimizer, torch.optim.Adagrad):  # it makes its states in its constructor
            optimizer.state[master] = {"step": torch.tensor(0.0), "sum": torch.zeros_like(state["sum"])}

    def add(self) -> None:
        """The master is there already."""

    def rate(self, group: int, factor: float) -> None:
        for name in self._groups[group][1]:
            self.optimizers[name].param_groups[0]["lr"] *= factor

    def freeze(self, name: str, *, frozen: bool) -> None:
        """It gets no gradients."""

    def close(self) -> None:
        pass


STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum")


def _of_torch(rule: str) -> Any:
    def fused(kind: Any) -> Any:
        return lambda params, **settings: kind(params, **settings, fused=True)

    return {
        "adamw": fused(torch.optim.AdamW),
        "sgd": fused(torch.optim.SGD),
        "adagrad": fused(torch.optim.Adagrad),
        "muon": torch.optim.Muon,
        "lion": Lion,
    }[rule]


class PlainEngine:
    """For formats that torch lacks: an engine on one process in memory, which only steps and is edited."""

    def __init__(self, setting: Setting, group: Any) -> None:
        self._setting = setting
        self.engine = engine_of(setting, Net(), {"schedule": "serial"}, group)
        self.params = dict(self.engine.module.named_parameters())

    def add(self) -> None:
        self.params[ADDED].requires_grad_(True)
        self.engine.optimizer.add_param_group(added_group(self.params))

    def step(self, gradients: Mapping[str, torch.Tensor]) -> bool:
        pulls: dict[str, dict[str, torch.Tensor]] = {}
        for name, gradient in gradients.items():
            piece, _, own = name.partition(".")
            pulls.setdefault(piece, {})[own] = gradient
        trains = [name for name in gradients if self.params[name].requires_grad]
        if not trains:
            return True
        self.engine.backward(self.engine(pulls))
        return bool(self.engine.step().updated)

    def value(self, name: str) -> torch.Tensor:
        return self.params[name].detach().clone()

    def master(self, name: str) -> torch.Tensor:
        if not self.engine.optimizer.has_states(self.params[name]):
            return self.value(name).float()
        return self.engine.optimizer.whole_states(self.params[name])["master"]

    def edit(self, name: str, value: torch.Tensor) -> None:
        with torch.no_grad():
            self.params[name].copy_(value)

    def states(self, name: str) -> dict[str, torch.Tensor]:
        if not self.engine.optimizer.has_states(self.params[name]):
            return {}
        return {k: v for k, v in self.engine.optimizer.whole_states(self.params[name]).items() if k in STATES}

    def reset(self, name: str) -> None:
        del self.engine.optimizer.state[self.params[name]]

    def rate(self, group: int, factor: float) -> None:
        self.engine.optimizer.param_groups[group]["lr"] *= factor

    def freeze(self, name: str, *, frozen: bool) -> None:
        self.params[name].requires_grad_(not frozen)

    def close(self) -> None:
        self.engine.close()


# --- the program -------------------------------------------------------------------------------------------


def added_group(params: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {"params": [params[ADDED]], "optimizer": "adamw", **RULES["adamw"]}


def engine_of(setting: Setting, model: Net, way: Mapping[str, Any], group: Any = None, *, added: bool = False) -> Any:
    params = dict(model.named_parameters())
    groups = [
        {"params": [params[name] for name in names], "optimizer": rule, **RULES[rule]}
        for rule, names in setting.groups()[: 3 if added else 2]
    ]
    return wrap(
        model,
        params=groups,
        param_dtype=setting.dtype,
        process_group=group,
        optimizer=setting.rules[0],
        **{**setting.fields, **way},
    )


@dataclass
class Program:
    """One run of a program, on this rank."""

    setting: Setting
    folder: Path
    rank: int = 0
    world_size: int = 1
    group: Any = None
    """A process group of this rank alone; None: there is no other."""
    trace: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        plain = self.setting.format == "fp32"
        self.oracle: Any = PlainTorch(self.setting) if plain else PlainEngine(self.setting, self.group)
        self.pending: dict[str, torch.Tensor] | None = None
        """The sum of the gradients that wait for a step; None: there was no backward."""
        self.moves = self.saves = 0
        self.frozen = {*FROZEN_AT_FIRST}
        self.added = False
        self.trained: set[str] = set()
        """The parameters that have been taken on."""
        self._make()

    def _make(self) -> None:
        self.way = self.setting.ways[self.moves % len(self.setting.ways)]
        fields = dict(WAYS[self.way])
        if fields.get("offload_optimizer") == "nvme":
            fields["nvme_path"] = str(self.folder)
        model = Net()
        for name, param in model.named_parameters():
            param.requires_grad_(name not in self.frozen or name in self.trained)
        if self.setting.fsdp:
            model = sharded(model.to(getattr(torch, self.setting.dtype)))
        self.engine = engine_of(self.setting, model, fields, added=self.added)
        self.params = dict(self.engine.module.named_parameters())
        self.trained |= {name for name, param in self.params.items() if param.requires_grad}

    def run(self, calls: Sequence[tuple[Any, ...]]) -> None:
        try:
            for name, *values in calls:
                self.trace.append((name, *values))
                getattr(self, name)(*values)
                residencies.assert_agrees(self.engine)
                assert torch.is_grad_enabled()
                assert not torch.is_inference_mode_enabled()
                self._check_values()
            self.restore()
            if self.pending is None:
                self.backward(3, ALL, ALL, None)
            self.step()
            self.named_weights("float32", into=False)
            for name in SHAPES:
                self.states(name)
            self._check_values()
        except BaseException as error:
            error.add_note(f"{self.setting}\n{self.way}, rank {self.rank}: {self.trace}")
            raise
        finally:
            self.engine.close()
            self.oracle.close()

    # --- what may be called now

    @property
    def released(self) -> bool:
        return bool(self.engine.is_released)

    @property
    def fixed(self) -> bool:
        """True if states are updated in backward, so that nothing but a step may follow."""
        return self.way == "in backward" and self.pending is not None

    # --- calls

    def backward(self, seed: int, mask: int, other_mask: int, poison: str | None, *, after_kept: bool = False) -> None:
        self.restore()
        if self.fixed and not after_kept:
            self.step()
        if not self.setting.examines:
            poison = None
        alike = "stage" in WAYS[self.way] and WAYS[self.way]["stage"] == 3
        masks = [mask] * self.world_size if alike or self.setting.fsdp else [mask, other_mask][: self.world_size]
        poisons = [poison, None][: self.world_size]
        each = [pulls_of(10 * seed + r, masks[r], poisons[r]) for r in range(self.world_size)]
        mine = each[self.rank]
        trains = [bool({n for p in of_rank for n in _params_of(p)} - self.frozen) for of_rank in each]
        if not any(trains):
            return  # the loss requires no gradient
        loss = self.engine(mine)
        self.engine.backward(loss if trains[self.rank] else loss + torch.zeros((), requires_grad=True))
        self.pending = {} if self.pending is None else self.pending
        for of_rank in each:
            for name, gradient in gradients_of(of_rank).items():
                if name not in self.frozen:
                    average = gradient / self.world_size
                    self.pending[name] = self.pending[name] + average if name in self.pending else average

    def kept_backward(self, seed: int, mask: int) -> None:
        """A backward whose gradients FSDP2 keeps, and one of all pieces, with which they leave."""
        if self.setting.fsdp and not self.fixed:
            self.restore()
            self.engine.module.set_requires_gradient_sync(False)
            self.backward(seed, mask, mask, None)
            self.engine.module.set_requires_gradient_sync(True)
            self.backward(seed + 1, ALL, ALL, None, after_kept=True)  # until it, there is nothing to step with

    def step(self) -> None:
        self.restore()
        if self.pending is None:
            return
        gradients, self.pending = self.pending, None
        report = self.engine.step()
        updates = self.oracle.step(gradients)
        assert report.updated is updates, report
        self.trained |= gradients.keys()

    def zero_grad(self) -> None:
        if not self.fixed:
            self.engine.zero_grad()
            self.pending = None

    def release(self, keep: str | None) -> None:
        if self.pending is None and not self.released:
            self.engine.release(keep=() if keep is None else [keep])

    def restore(self) -> None:
        if self.released:
            self.engine.restore()

    def named_weights(self, dtype: str | None, into: bool) -> None:
        if self.fixed:
            return
        if into:
            given: dict[str, torch.Tensor] = {}
            self.engine.named_weights(dtype=dtype, into=lambda bucket: given.update(bucket))
        else:
            given = dict(self.engine.named_weights(dtype=dtype))
        self._check_given(given, dtype)

    def export(self, dtype: str | None) -> None:
        if self.fixed:
            return
        self.saves += 1
        folder = self.folder / f"export-{self.saves}"
        self.engine.export_safetensors(folder, dtype=dtype)
        self._barrier()
        self._check_given(safetensors.torch.load_file(folder / "model.safetensors"), dtype)

    def whole_state_dict(self) -> None:
        if self.fixed:
            return
        given = self.engine.whole_state_dict()
        if self.rank == 0:
            self._check_given(given, None)

    def save(self) -> None:
        """Gradients that wait are not saved: with some it is an error, and they are there afterwards."""
        if self.fixed:
            return
        self.saves += 1
        waits = self.pending is not None
        with pytest.raises(StateError, match="gradients that wait") if waits else contextlib.nullcontext():
            self.engine.save_checkpoint(self.folder / f"kept-{self.saves}")

    def move(self) -> None:
        """Save, and go on in another stage and tier."""
        if self.fixed:
            self.step()
        self.zero_grad()
        self.saves += 1
        rates = [group["lr"] for group in self.engine.optimizer.param_groups]
        path = self.engine.save_checkpoint(self.folder / f"moved-{self.saves}")
        self.engine.close()
        self.moves += 1
        self._make()
        self.engine.load_checkpoint(path)
        assert [group["lr"] for group in self.engine.optimizer.param_groups] == rates
        for name, param in self.params.items():
            param.requires_grad_(name not in self.frozen)

    def freeze(self, name: str) -> None:
        if self.pending is None and not self.released and len(self.frozen) < len(SHAPES) - 1:
            self.frozen.add(name)
            self._set_frozen(name)

    def unfreeze(self, name: str) -> None:
        if self.pending is None and not self.released and (name != ADDED or self.added):
            self.frozen.discard(name)
            self._set_frozen(name)

    def _set_frozen(self, name: str) -> None:
        self.params[name].requires_grad_(name not in self.frozen)
        self.oracle.freeze(name, frozen=name in self.frozen)

    def add_group(self) -> None:
        if self.pending is None and not self.released and not self.added:
            self.added = True
            self.frozen.discard(ADDED)
            self.params[ADDED].requires_grad_(True)
            self.engine.optimizer.add_param_group(added_group(self.params))
            self.oracle.add()
            self.trained.add(ADDED)

    def rate(self, group: int, factor: float) -> None:
        if not self.fixed and (group < 2 or self.added):
            self.engine.optimizer.param_groups[group]["lr"] *= factor
            self.oracle.rate(group, factor)

    def edit(self, name: str, factor: float) -> None:
        """By hand, between or after backwards."""
        self.restore()
        if self.fixed:
            return
        param = self.params[name]
        with torch.no_grad(), gathered_parameters(param, modifier_rank=0):
            param.mul_(factor)
        self.oracle.edit(name, self.oracle.value(name) * factor)

    def states(self, name: str) -> None:
        """Compare whole states: the master weight and the moments."""
        optimizer, param = self.engine.optimizer, self.params[name]
        if self.fixed or not optimizer.has_states(param):
            return
        given, expected = optimizer.whole_states(param), self.oracle.states(name)
        self._check(f"master of {name}", given["master"], self.oracle.master(name))
        for key, value in given.items():
            if key in STATES:
                other = expected.get(key)
                self._check(f"{key} of {name}", value, torch.zeros(SHAPES[name]) if other is None else other)

    def gradient(self, name: str) -> None:
        if self.fixed or self.released or self.pending is None:
            return
        given = self.engine.optimizer.whole_gradient(self.params[name])
        expected = self.pending.get(name)
        assert (given is None) == (expected is None), name
        if given is not None:
            self._check(f"gradient of {name}", given, expected)

    def state_dict(self) -> None:
        """Copy the optimizer's state dict, and load it again. The masters in it follow no parameter."""
        if self.released or self.fixed:
            return
        self.engine.flush()
        optimizer = self.engine.optimizer
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def reset(self, name: str) -> None:
        """Have a parameter's moments begin anew."""
        if self.released or self.pending is not None or not self.engine.optimizer.has_states(self.params[name]):
            return
        del self.engine.optimizer.state[self.params[name]]
        if self.oracle.states(name):
            self.oracle.reset(name)

    def flush(self) -> None:
        if not self.fixed:
            self.engine.flush()

    # --- comparisons

    def _check_values(self) -> None:
        """Compare all parameters, where they may be read."""
        if self.released or self.fixed:
            return
        with gathered_parameters(self.engine.module.parameters()):
            for name, param in self.params.items():
                value = param.detach()
                self._check(name, value.full_tensor() if self.setting.fsdp else value, self.oracle.value(name))

    def _check_given(self, given: Mapping[str, torch.Tensor], dtype: str | None) -> None:
        names = {name for name in given if name not in ("f.weight", "seen")}
        assert names == set(SHAPES), sorted(names)
        for name in names:
            own = self.oracle.value(name) if dtype is None else self.oracle.master(name)
            if dtype is not None and not self.engine.optimizer.has_states(self.params[name]):
                own = self.oracle.value(name).float()
            self._check(f"{name} as {dtype}", given[name], own)

    def _check(self, what: str, given: torch.Tensor, expected: torch.Tensor) -> None:
        given, expected = given.detach() + 0, expected.detach() + 0  # -0.0 is 0.0: decays of torch differ in it
        assert same_bits(given, expected), f"{what}: {given}, expected {expected}"

    def _barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()


def _params_of(piece: str) -> list[str]:
    return ["a.weight"] if piece == "f" else [name for name in SHAPES if name.startswith(f"{piece}.")]


def sharded(model: Net) -> Net:
    """Each piece is a group of FSDP2's; the root has those with the tied weight."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for piece in ("b", "c", "d", "e", "g"):
        fully_shard(getattr(model, piece), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def run_on_ranks(
    rank: int, world_size: int, drawn: Sequence[tuple[Setting, Sequence[tuple[Any, ...]]]], folder: Path
) -> None:
    """Run programs one after the other, the same on all ranks. An error names the program's number."""
    groups = [dist.new_group([each]) for each in range(world_size)]
    for number, (setting, calls) in enumerate(drawn):
        own = folder / f"{number}"
        own.mkdir(exist_ok=True)
        try:
            Program(setting, own, rank, world_size, groups[rank]).run(calls)
        except BaseException as error:
            error.add_note(f"program {number}")
            raise
        dist.barrier()
