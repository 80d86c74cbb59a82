"""States of a user's objects and of random generators, to and from a checkpoint."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import CheckpointError


def states_of(stateful: Mapping[str, Any] | None) -> dict[str, Any]:
    """The states of a user's objects: schedulers, data loaders, or any other with ``state_dict``.

    Raises:
        CheckpointError: an object has no ``state_dict`` or ``load_state_dict``.
    """
    _check_objects(stateful)
    return {name: item.state_dict() for name, item in (stateful or {}).items()}


def check_states(stateful: Mapping[str, Any] | None, saved: Mapping[str, Any]) -> None:
    """Raise :class:`CheckpointError` unless there is a state for each of these objects."""
    _check_objects(stateful)
    for name in stateful or {}:
        if name not in saved:
            there = ", ".join(map(repr, saved)) or "none"
            raise CheckpointError(f"stateful[{name!r}]: the checkpoint has no state of that name; it has {there}")


def load_states(stateful: Mapping[str, Any] | None, saved: Mapping[str, Any]) -> None:
    """Give the objects their states."""
    for name, item in (stateful or {}).items():
        item.load_state_dict(saved[name])


def _check_objects(stateful: Mapping[str, Any] | None) -> None:
    for name, item in (stateful or {}).items():
        if not (callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))):
            raise CheckpointError(
                f"stateful[{name!r}] is a {type(item).__name__}; expected an object with state_dict() and "
                "load_state_dict(), as schedulers are"
            )


def random_state() -> dict[str, Any]:
    """The state of Python's and NumPy's global generators."""
    return {"python": random.getstate(), "numpy": np.random.get_state(legacy=True)}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the states that :func:`random_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
