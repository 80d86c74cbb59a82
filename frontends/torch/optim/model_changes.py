"""Finds parameters whose gradients no update uses: those that came after ``wrap``, and those in no group.

Each step compares the model's modules and parameters with those of the step before. It looks into the modules' own
tables, so that it finds parameters however they came. Only after a change does it walk through the model.
"""

from collections.abc import Sequence
from operator import is_
from typing import Any

from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from offload_core.errors import StateError
from offload_core.support.checks import some_of
from offload_core.support.user_line import UserLine

from ..internals.private import no_read
from ..params.fsdp import named_sharded
from ..training.groups import groups_of_params
from .optimizer import OffloadedOptimizer


class ModelChanges:
    """The parameters of an engine's model, as they were at ``wrap``. In a copy it begins anew, with a copied model."""

    def __init__(self, model: nn.Module | None = None, optimizer: OffloadedOptimizer | None = None) -> None:
        self._first = WeakTensorKeyDictionary()
        """The parameters at ``wrap``, as keys."""
        self._modules: list[nn.Module] = []
        self._members: list[Any] = []
        """The modules' parameters and modules at the last check."""
        self._left_out: dict[str, nn.Parameter] = {}
        """Parameters in no group, of which no warning was given yet."""
        self._later: dict[str, nn.Parameter] = {}
        """Parameters that came after ``wrap``."""
        self._gone: list[str] = []
        """Trained parameters that have left the model, by their former names."""
        if model is not None and optimizer is not None:
            self._begin(model, optimizer)

    def _begin(self, model: nn.Module, optimizer: OffloadedOptimizer) -> None:
        known = groups_of_params(optimizer.param_groups)
        named = named_sharded(model)
        self._first = WeakTensorKeyDictionary(dict.fromkeys(named.values()))
        self._left_out = {name: param for name, param in named.items() if param not in known}
        self._note(model)

    def _note(self, model: nn.Module) -> None:
        self._modules = [*model.modules()]
        self._members = self._present()

    def _present(self) -> list[Any]:
        return [one for m in self._modules for one in (*m._parameters.values(), *m._modules.values())]

    def check(self, model: nn.Module, optimizer: OffloadedOptimizer) -> None:
        """Warn of parameters that require a gradient and are in no group, once of each.

        Raises:
            StateError: a parameter that came after ``wrap`` is to be trained and has no states, or a frozen one has
                taken a trained one's place.
        """
        if not self._modules:
            self._begin(model, optimizer)
        present = self._present()
        if len(present) != len(self._members) or not all(map(is_, present, self._members)):
            self._note(model)
            self._later = {name: param for name, param in named_sharded(model).items() if param not in self._first}
            self._gone = _gone(model, optimizer)
        if self._later:
            self._refuse(optimizer)
        self._warn_of_left_out(optimizer)

    def _refuse(self, optimizer: OffloadedOptimizer) -> None:
        names = [name for name, p in self._later.items() if p.requires_grad and not optimizer.has_states(p)]
        replaced = [n for n in self._gone if n in self._later and not optimizer.has_states(self._later[n])]
        if replaced and (len(self._gone) == len(optimizer.slots) or not names):
            raise _replaced(self._gone)
        if names:
            raise StateError(
                f"parameter {some_of(names, 1)} came to the model after wrap() and requires a gradient, but the engine "
                "does not update it; expected it before wrap() (get_peft_model(), add_adapter(), load_adapter(), "
                "resize_token_embeddings()), in engine.optimizer.add_param_group(), or without requires_grad"
            )

    def _warn_of_left_out(self, optimizer: OffloadedOptimizer) -> None:
        with no_read():
            trained = [name for name, param in self._left_out.items() if param.requires_grad]
        if not trained:
            return
        known = groups_of_params(optimizer.param_groups)
        names = [name for name in trained if self._left_out.pop(name) not in known]
        if names:
            UserLine.now("torch").warn(
                UserWarning(
                    f"parameters of the model that require a gradient and are in no group: {some_of(names)}; they are "
                    "not trained. Expected them in params, in engine.optimizer.add_param_group(), or frozen "
                    "(requires_grad_(False))"
                )
            )

    def __reduce__(self) -> Any:
        return ModelChanges, ()


def check_present(model: nn.Module, optimizer: OffloadedOptimizer) -> None:
    """Raise :class:`StateError` if a trained parameter has left the model: its gradients go elsewhere."""
    gone = _gone(model, optimizer)
    if gone:
        raise _replaced(gone) from None


def _gone(model: nn.Module, optimizer: OffloadedOptimizer) -> list[str]:
    own = {*named_sharded(model).values()}
    return [slot.name for slot in optimizer.slots if slot.param not in own]


def _replaced(names: Sequence[str]) -> StateError:
    return StateError(
        f"parameter {some_of(names, 1)} has been replaced in the module since wrap(), so that no gradient of it "
        "arrives. Is there an FSDP or fully_shard around the engine? The engine shards itself: "
        "expected wrap(model, stage=3) and nothing around it; new values go into a parameter with p.copy_()"
    )
