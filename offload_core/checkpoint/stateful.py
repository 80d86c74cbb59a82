"""States of a user's objects and of random generators, to and from a checkpoint.

Loading them runs code of others, which may fail anywhere. So everything else is read, checked and loaded first. They
come last, one :class:`DeferredLoad` after the other.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError, CheckpointWarning
from ..support.checkpoint_folder import MANIFEST
from ..support.checks import kind_of, shown
from ..support.user_line import UserLine
from .reader import Loaded
from .safetensors import checked_integer


class RandomState:
    """The global random generators of Python and NumPy. A front end adds its framework's generators."""

    def get(self) -> dict[str, Any]:
        """Return the states of the generators."""
        return {"python": random.getstate(), "numpy": np.random.get_state(legacy=True)}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise an error if :meth:`set` would: it is tried on generators of the same kinds."""
        random.Random().setstate(state["python"])
        kind = np.random.get_state(legacy=False)["bit_generator"]
        np.random.RandomState(getattr(np.random, kind)()).set_state(state["numpy"])

    def set(self, state: Mapping[str, Any]) -> None:
        """Restore the states that :meth:`get` returned."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])


@dataclass(frozen=True)
class DeferredLoad:
    """A part of loading that comes after the weights and the optimizer states."""

    what: str
    """The part's name in errors: ``"load_state_dict() of stateful['schedule']"``."""
    run: Callable[[], Any]
    ours: bool = False
    """True if the part runs only code of this package."""


def run_deferred(path: Path, parts: Sequence[DeferredLoad], before: Sequence[DeferredLoad] = ()) -> None:
    """Run the parts in order, after those that were run before.

    Raises:
        CheckpointError: a part failed. The message names it, the parts that were loaded and those that were not.
    """
    for i, part in enumerate(parts):
        try:
            part.run()
        except Exception as error:
            done = ", ".join(["weights", "optimizer states", *(other.what for other in (*before, *parts[:i]))])
            left = ", ".join(other.what for other in parts[i:])
            raise CheckpointError(
                f"{path}: loading broke off in {part.what} ({shown(error)}): loaded are {done}, and not {left}; mend "
                "what failed, or leave it out, and load again"
            ) from error


def check_run(loaded: Loaded) -> int:
    """Check the plain values that every front end saves, and return the number of updates.

    Raises:
        CheckpointError: one is missing or of another type.
    """
    try:
        state = loaded.state
        if not isinstance(state, dict) or not isinstance(state["stateful"], dict) or "extras" not in state:
            raise KeyError("stateful, extras")
        return checked_integer(state["updates"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{loaded.checkpoint.path / MANIFEST}: incomplete ({error!r})") from None


def _parts_of_states(
    stateful: Mapping[str, Any] | None, saved: Mapping[str, Any], path: Path, *, alone: bool
) -> list[DeferredLoad]:
    """The parts that give these objects their states. A warning names states for which there is no object.

    Args:
        stateful: by name; None for an object that is to be made anew.
        path: the checkpoint's.
        alone: True on the rank that warns.

    Raises:
        CheckpointError: there is no state for one of them, or it cannot take one.
    """
    given = {name: item for name, item in (stateful or {}).items() if item is not None}
    _check_objects(given)
    unclaimed = [name for name in saved if name not in (stateful or {})]
    if unclaimed and alone:
        UserLine.now("torch", "jax").warn(
            CheckpointWarning(
                f"{path}: its state of {', '.join(map(repr, unclaimed))} is not loaded, because no object was given "
                "for it: the run does not go on as it was saved. Expected load_checkpoint(..., stateful="
                f"{{{unclaimed[0]!r}: object}}), or None for the object, if that is meant"
            )
        )
    for name in given:
        if name not in saved:
            there = ", ".join(map(repr, saved)) or "none"
            raise CheckpointError(f"stateful[{name!r}]: the checkpoint has no state of that name; it has {there}")
    return [
        DeferredLoad(f"load_state_dict() of stateful[{name!r}]", partial(item.load_state_dict, saved[name]))
        for name, item in given.items()
    ]


def _parts_of_random_state(loaded: Loaded, generators: RandomState) -> list[DeferredLoad]:
    """The part that restores this process's random generators; none if the saving run had no such process."""
    if loaded.own is None:
        return []
    try:
        state = loaded.own["random"]
        generators.check(state)
    except Exception as error:  # generators raise errors of any type
        raise CheckpointError(
            f"{loaded.checkpoint.path}: its state of the random generators does not fit these generators ({error!r}); "
            "expected load_checkpoint(..., random_state=False), which leaves them as they are"
        ) from None
    return [DeferredLoad("the random generators", partial(generators.set, state))]


def _check_objects(stateful: Mapping[str, Any] | None) -> None:
    for name, item in (stateful or {}).items():
        if not (callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))):
            raise CheckpointError(
                f"stateful[{name!r}] is {kind_of(item)}; expected an object with state_dict() and "
                "load_state_dict(), as schedulers are"
            )


@dataclass(frozen=True)
class TrainingRun:
    """What a checkpoint holds of a training run beside weights and optimizer states."""

    stateful: Mapping[str, Any] | None = None
    """A user's objects by name: schedulers, data loaders, or any other with ``state_dict``."""
    extras: Any = None
    """Plain values of the user's, to save."""
    random: RandomState | None = None
    """The random generators; None: a load leaves them as they are."""

    def state(self, updates: int) -> dict[str, Any]:
        """Return the plain values to save of process 0. The rest of the run is each process's own.

        Raises:
            CheckpointError: an object has no ``state_dict`` or ``load_state_dict``.
        """
        _check_objects(self.stateful)
        states = {name: item.state_dict() for name, item in (self.stateful or {}).items()}
        return {"updates": updates, "stateful": states, "extras": self.extras}

    def own(self) -> dict[str, Any]:
        """Return the plain values to save of each process."""
        return {} if self.random is None else {"random": self.random.get()}

    def parts(self, loaded: Loaded, *, alone: bool) -> list[DeferredLoad]:
        """Return the parts of a load that give the objects and the generators their states.

        Args:
            alone: True on the rank that warns of states for which there is no object.

        Raises:
            CheckpointError: there is no state for an object, or it cannot take one.
        """
        parts = _parts_of_states(self.stateful, loaded.state["stateful"], loaded.checkpoint.path, alone=alone)
        return parts if self.random is None else [*parts, *_parts_of_random_state(loaded, self.random)]
