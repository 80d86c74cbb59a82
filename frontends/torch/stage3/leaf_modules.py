"""The leaf modules of a model, and the finalizing of their parameters.

A run is one forward of a module and the backward of its outputs. A leaf module's run keeps the parameters of all inner
modules whole. The runs of inner modules keep none, because ranks may run different inner modules (experts), in
different orders.

[Note: when a leaf module's parameters are finalized] Ranks may have gradients of different parameters of a leaf module,
at different times. So all ranks finalize a parameter ([Note: finalized parameters] in ``arrivals.py``) at the same
point: when the last expected backward of a leaf-module run with this parameter has ended. Then no node of these runs
is left.

Three kinds of runs have no such point. The end of the whole backward finalizes their parameters:

- a run inside a backward: checkpointing computes forward again and runs a separate backward
- a run whose graph is kept for another backward (``retain_graph=True``)
- a run that shares a parameter with a run whose backward has not come
"""

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offload_core.errors import ParameterError

from ..internals.private import NO_BACKWARD, backward_number, keeps_graph


@dataclass(eq=False)
class LeafRun:
    """One forward of a leaf module, and its backward, after which the module's parameters are finalized."""

    params: Sequence[torch.Tensor]
    step: int | None = None
    """The step in which the run's backward is expected. None: it has come, or the forward recorded no graph."""
    retained: bool = False
    """True if another backward may follow (``retain_graph=True``)."""


class LeafModules:
    """The leaf modules of a model, and their runs in the current step.

    Args:
        modules: the leaf modules.
        several: True on several ranks; on one rank nothing is finalized.
    """

    def __init__(self, model: nn.Module, modules: Iterable[nn.Module], *, several: bool) -> None:
        self._model = weakref.ref(model)
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet(modules)
        self._several = several
        self._method: weakref.WeakMethod[Callable[..., Collection[torch.Tensor]]] | None = None
        self._step = 0
        self._awaited: Counter[torch.Tensor] = Counter()
        """Maps a parameter to the number of runs whose backward is expected in this step."""
        self._unfinalized: dict[int, set[torch.Tensor]] = {}
        """Maps a backward (``backward_number``) to the parameters that it has reached and that are not finalized
        yet."""

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._modules

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules)

    def choose(self, module: nn.Module, leaf: bool) -> None:
        """Make a module a leaf module. The module must not be running.

        Args:
            leaf: False: make it an ordinary module again.
        """
        (self._modules.add if leaf else self._modules.discard)(module)

    def finalize_by(self, method: Callable[..., Collection[torch.Tensor]]) -> None:
        """Set the method that finalizes parameters (``GradHooks.finalize``). The object of the method is not kept
        alive."""
        self._method = weakref.WeakMethod(method) if self._several else None

    def _finalize(self, params: Iterable[torch.Tensor], *, ended: bool) -> Collection[torch.Tensor]:
        finalize = None if self._method is None else self._method()
        return () if finalize is None else finalize(params, ended=ended)

    def numbers(self) -> dict[torch.Tensor, int]:
        """Return, for each parameter in a leaf module, a number of its outermost leaf module. Empty on one rank."""
        model, found = self._model(), dict[torch.Tensor, int]()
        if model is not None and self._several:
            leaves = (module for module in model.modules() if module in self._modules)
            for number, leaf in enumerate(leaves):  # an outer module comes before those in it
                for param in leaf.parameters():
                    found.setdefault(param, number)
        return found

    def begin_run(self, module: nn.Module) -> LeafRun | None:
        """Return a new run of an outermost leaf module or unit; None: there are no parameters to finalize."""
        params = [*module.parameters()] if self._modules and self._method is not None else []
        return LeafRun(params) if params else None

    def expect_backward(self, run: LeafRun) -> None:
        """Record that the run's forward recorded a graph, so that the run's backward is expected in this step."""
        if run.step is None and backward_number() == NO_BACKWARD:
            run.step = self._step
            self._awaited.update(run.params)

    def begin_backward(self, run: LeafRun, task: int) -> None:
        """Record that the backward ``task`` has reached the run's graph."""
        run.retained = keeps_graph()
        self._unfinalized.setdefault(task, set()).update(run.params)

    def end_runs(self, runs: Iterable[LeafRun], task: int) -> None:
        """Finalize the parameters of runs whose nodes have all run in backward ``task``, except parameters for which
        the backward of another run is expected."""
        finalized = [param for run in runs for param in self._last_of(run)]
        if finalized:
            stragglers = self._finalize(finalized, ended=False)
            self._unfinalized[task].difference_update(param for param in finalized if param not in stragglers)

    def end_backward(self, runs: Iterable[LeafRun], task: int) -> None:
        """End these runs, and finalize all other parameters that the backward has reached."""
        for run in runs:
            self._last_of(run)
        unfinalized = self._unfinalized.pop(task, None)
        if unfinalized is not None:
            self._finalize(unfinalized, ended=True)

    def _last_of(self, run: LeafRun) -> list[torch.Tensor]:
        """End the run's backward. Return the parameters for which no other run's backward is expected."""
        if run.step != self._step or run.retained:
            return []
        run.step = None
        self._awaited.subtract(run.params)
        return [param for param in run.params if not self._awaited[param]]

    def forget(self, *, graphs: bool) -> None:
        """Forget all backwards.

        Args:
            graphs: True: also expect no backward of earlier runs.
        """
        self._unfinalized = {}
        if graphs:
            self._step += 1
            self._awaited.clear()


_MARK = "_offload_leaf"
"""The attribute of a module that :func:`mark_leaf` sets: True for a leaf module."""


def mark_leaf(module: nn.Module, leaf: bool) -> None:
    """Mark a module as a leaf module for engines that are made later.

    Args:
        leaf: False: remove the mark.
    """
    setattr(module, _MARK, leaf)


def is_marked_leaf(module: nn.Module) -> bool:
    """Return True if :func:`mark_leaf` has marked the module."""
    return getattr(module, _MARK, False)


def chosen_modules(
    model: nn.Module, wanted: Iterable[Any], fits: Callable[[str, nn.Module, Any], bool]
) -> tuple[list[nn.Module], list[Any]]:
    """Return the modules for which ``fits(name, module, entry)`` is true for an ``entry`` of ``wanted``, and the
    entries that fit no module."""
    named = [*model.named_modules()]
    of_each = {each: [module for name, module in named if fits(name, module, each)] for each in wanted}
    missing = [each for each, found in of_each.items() if not found]
    return [*dict.fromkeys(module for found in of_each.values() for module in found)], missing


def is_of_one(name: str, module: nn.Module, classes: Iterable[type | str]) -> bool:
    """Return True if the module is an instance of one of these classes, or if its class has one of these names."""
    kind = type(module)
    names = (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    return any(isinstance(module, each) if isinstance(each, type) else each in names for each in classes)


def leaf_modules(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the modules that :func:`mark_leaf` has marked, and the modules that ``names`` selects.

    Args:
        names: names of modules or of their classes (``OffloadConfig.leaf_modules``).

    Raises:
        ParameterError: a name selects no module.
    """

    def fits(name: str, module: nn.Module, wanted: str) -> bool:
        return is_of_one(name, module, [wanted]) or f".{name}".endswith(f".{wanted}")

    found, missing = chosen_modules(model, names, fits)
    if missing:
        raise ParameterError(
            f"leaf_modules: the model has no module {missing[0]!r} and none of this class; expected names of "
            f"model.named_modules(), or of classes such as {type(model).__name__!r}"
        )
    return [*(module for module in model.modules() if is_marked_leaf(module)), *found]
