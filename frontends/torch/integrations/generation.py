"""Generation of texts, which finds a model's engine: parameters in shards are gathered once for all tokens."""

import weakref
from typing import Any

import torch.distributed as dist
from torch import nn

from ..engine import Engine

_NAMES = ("generate", "generate_batch")
"""Methods of transformers' models that make many forwards."""


def generate_whole(engine: Engine, *, gather: bool = True) -> None:
    """Have the model's own ``generate`` run in :meth:`Engine.generating`.

    Args:
        gather: False gathers each layer for each token, for a model that does not fit on the device.
    """
    for name in _NAMES:
        if hasattr(type(engine.module), name):
            vars(engine.module)[name] = _Generate(engine, name, gather)


class _Generate:
    """A method of an engine's model that generates. In a copy of the model it is that of its class."""

    def __init__(self, engine: Engine, name: str, gather: bool) -> None:
        self._engine = weakref.ref(engine)
        self._model = weakref.ref(engine.module)
        self._name = name
        self._gather = gather

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model, engine = self._model(), self._engine()
        assert model is not None
        method = _own(model, self._name)
        if engine is None or not engine.optimizer.sharding.gathers:
            return method(*args, **kwargs)
        if self._gather:
            with engine.generating():
                return method(*args, **kwargs)
        if self._name == "generate" and dist.is_initialized() and dist.get_world_size() > 1:
            kwargs.setdefault("synced_gpus", True)
        return method(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _own, (self._model(), self._name)


def _own(model: nn.Module, name: str) -> Any:
    """Return the method that the model's class gives it."""
    return getattr(type(model), name).__get__(model)
