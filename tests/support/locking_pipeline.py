"""An engine, and its pipeline, that tests call themselves, without a front end."""

from offload_core.engine import Engine
from offload_core.step.early_publish import EarlyPublish
from offload_core.step.gradients import Gradients
from offload_core.step.last_step import LastStep
from offload_core.step.parameters import Parameters
from offload_core.step.pipeline import Pipeline
from offload_core.step.state_lock import changes


def _locking(kind, *names):
    """The class, with these methods taking the state lock."""
    return type(kind.__name__, (kind,), {name: changes(f"{name}()")(getattr(kind, name)) for name in names})


_OWN = ("add_parameters", "start_over", "step")
_PARTS = {
    "gradients": (Gradients, ("add", "finalize", "drop", "discard_all", "reduce_now", "end_micro_step")),
    "early": (EarlyPublish, ("expect_step", "recall", "stop", "undo")),
    "parameters": (Parameters, ("finish", "flush")),
    "last_step": (LastStep, ("finish", "finish_publications")),
}
LOCKED = [*_OWN, *(f"{part}.{name}" for part, (_, names) in _PARTS.items() for name in names)]
"""The methods of a pipeline and its parts that need the state lock."""
_LOCKING_PARTS = {part: _locking(kind, *names) for part, (kind, names) in _PARTS.items()}


class LockingPipeline(_locking(Pipeline, *_OWN)):
    """Takes the state lock in each call, as front ends do around theirs."""

    @property
    def _state_lock(self):
        return self.state_lock

    def _begin(self):
        super()._begin()
        self.lock_parts()

    def lock_parts(self):
        for part, kind in _LOCKING_PARTS.items():
            getattr(self, part).__class__ = kind


class LockingEngine(Engine):
    """Its pipeline takes the state lock in each call."""

    def __init__(self, config, device, scaler=None):
        super().__init__(config, device, scaler)
        self.pipeline = self._pipeline
        self.pipeline.__class__ = LockingPipeline
        self.pipeline.lock_parts()
