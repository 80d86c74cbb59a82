"""Checkpoints of a pipeline: saved by all processes in parallel, loaded by any other number of them.

A checkpoint holds the state that training continues from, in logical elements: master weights and moments of trained
parameters, the values of other tensors, and plain values. A device parameter is its master weight rounded, and is not
saved, except a stale one (``schedule="delayed"``), which is older than its master weight.

Each process writes a file of tensors, and a *part* that describes it. When all parts are there, process 0 joins them
to a manifest (``saving.py``). So no process waits for another while training goes on.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from ..config.state_formats import StateFormat
from ..dtypes import FLOAT32
from ..errors import CheckpointError, CheckpointWarning, StateError
from ..layout.regions import Region
from ..ranks.collectives import Collectives
from ..ranks.consistency import combine, fingerprint, processes
from ..rules import MASTER, STATE_NAMES
from ..step.loss_scale import LossScaler
from ..step.pipeline import Pipeline
from ..step.state_access import StateAccess
from ..step.state_lock import consistent, uses
from ..support.checkpoint_folder import MANIFEST, file_name, find_tag, has_none
from ..support.checks import LARGEST, shown
from ..support.progress import progress
from ..support.threads import await_sections, uninterrupted
from ..support.user_line import UserLine
from .loading import Reading, Target, check_model, read_targets
from .reader import Checkpoint, Loaded, Opened, Readable, Want
from .safetensors import NOT_AS_WRITTEN
from .saving import Save, TargetFolder, all_or_none, failed_elsewhere
from .shard_writer import ShardWriter, Source
from .stateful import DeferredLoad, TrainingRun, check_run, run_deferred
from .values import ArrayType, encode

Names = Mapping[str, str] | Callable[[str], str] | None
"""A translation from a model's names to those in a checkpoint."""


@dataclass
class Contents:
    """The part of a checkpoint that comes from the front end."""

    names: Sequence[str]
    """The names of the pipeline's parameters."""
    sources: Sequence[Source] = ()
    """This process's runs of tensors that are not trained."""
    shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]] = field(default_factory=dict)
    """Shape and element type of every tensor that is not trained, in any process."""
    run: TrainingRun | None = None
    """The run that the checkpoint is of; None: weights and states alone are saved."""
    state: Any = None
    """Further plain values. Process 0's values are saved. With a ``run``, ``state`` is a dictionary."""
    own: Any = None
    """Plain values of this process; saved for each process. With a ``run`` they are the run's."""
    types: Sequence[ArrayType] = ()
    """The types of arrays that ``state`` and ``own`` may hold."""
    gradients_wait: bool = False
    """True if the front end holds gradients that it has not given to the pipeline yet."""
    front_end: str | None = None
    """The front end's name, for information."""
    left_out: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of tensors that are not trained and not saved: a model that loads the checkpoint keeps its own values."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Further names of tied tensors, each with the name under which the tensor is saved."""
    buffers: Sequence[str] = ()
    """The names in ``shapes`` that are no parameters."""
    parts: bool = False
    """True if parameters with the same name are parts of one parameter."""
    groups: Sequence[int] | None = None
    """The number of each parameter's group in ``state``; None: as they were when the pipeline took them on."""


class Checkpoints:
    """The checkpoints of one pipeline. All processes make the same calls."""

    def __init__(self, pipeline: Pipeline, states: StateAccess) -> None:
        self._pipeline = pipeline
        self._state_lock = pipeline.state_lock
        self._states = states
        self._save: Save | None = None

    @property
    def _collectives(self) -> Collectives:
        return self._pipeline.collectives

    def together(self, what: str) -> AbstractContextManager[None]:
        """Fail on all processes if the body fails on one. Its exchanges follow those that the pipeline has started."""
        return all_or_none(self._collectives, what)

    def _check_alike(self, what: str, mine: Sequence[int], differs: Callable[[list[int]], str]) -> None:
        """Raise :class:`CheckpointError` on all processes unless all give the same words.

        Args:
            mine: this process's words.
            differs: makes the message of a process whose words differ, from process 0's words.
        """
        collectives = self._collectives
        rows = combine(collectives, f"checkpoint: {what}", of_each=mine).of_each
        others = np.flatnonzero((rows != rows[0]).any(axis=1))
        if collectives.rank in others:
            raise CheckpointError(differs(rows[0].tolist()))
        if others.size:
            raise failed_elsewhere(what, processes(others))

    # --- saving --------------------------------------------------------------------------------------

    @consistent("save_checkpoint()")
    def save(
        self,
        folder: str | os.PathLike[str],
        contents: Contents,
        tensors: Sequence[Any],
        *,
        step: int,
        keep: int | None,
        wait: bool,
        tag: str | None = None,
        latest: bool = True,
    ) -> Path:
        """Save the present state, and return the checkpoint's folder.

        Args:
            tensors: the device parameters, as :meth:`Pipeline.step` takes them.
            step: the number of updates made; it names the checkpoint, unless ``tag`` does.
            keep: the number of checkpoints to keep, this one included; None: all. Those with a tag are kept.
            tag: the checkpoint's name in the folder; one of that name is replaced.
            latest: False: the latest checkpoint stays the latest.
            wait: False to write optimizer states while training goes on. A block that an update would change before it
                is written is copied first, to one of at most ``BUFFERS`` buffers. Everything else is copied before this
                returns.

        Raises:
            CheckpointError: on all processes, if one could not save; earlier checkpoints are unchanged.
        """
        if (run := contents.run) is not None:
            with self.together("save"):  # code of a user's, which may use the engine: before anything is locked
                contents = replace(contents, state=run.state(step) | (contents.state or {}), own=run.own())
        return self._save_contents(folder, contents, tensors, step, keep, wait, tag, latest)

    @uses("save_checkpoint()")
    def _save_contents(
        self,
        folder: str | os.PathLike[str],
        contents: Contents,
        tensors: Sequence[Any],
        step: int,
        keep: int | None,
        wait: bool,
        tag: str | None,
        latest: bool,
    ) -> Path:
        self._wait()
        with self.together("save"):
            if type(step) is not int or not 0 <= step <= LARGEST:
                raise CheckpointError(f"step: got {shown(step)}, expected the number of updates made, an integer")
            if keep is not None and (type(keep) is not int or not 1 <= keep <= LARGEST):
                raise CheckpointError(
                    f"keep: got {shown(keep)}, expected a number of checkpoints of at least 1, or None for all"
                )
            names = dict.fromkeys(contents.names) if contents.parts else contents.names
            _check_names([*names, *contents.shapes, *contents.left_out])
            if contents.gradients_wait or self._pipeline.gradients.are_waiting:
                raise StateError(
                    "a checkpoint is asked for between backward() and step(), or between micro-steps: gradients that "
                    "wait for an update are not saved; expected the call after an update"
                )
            self._pipeline.last_step.finish()
            if keep is not None and (tag is not None or not latest):
                raise CheckpointError(
                    f"keep={keep} with tag={tag!r}, latest={latest}: those with a tag are kept, and so is the one "
                    "that 'latest' names; expected one of them"
                )
        asked = {"step": step, "keep": keep or 0, "wait": int(wait), "left out": len(contents.left_out)}
        asked |= {"tag": 0 if tag is None else fingerprint(str(tag)), "latest": int(latest)}
        self._check_alike(
            "save",
            [*asked.values()],
            lambda first: (
                f"save: process {self._collectives.rank} was given {asked}, and process 0 "
                f"{dict(zip(asked, first, strict=True))}; expected the same of all"
            ),
        )
        place = TargetFolder(Path(folder), self._collectives, tag, latest=latest)
        save = Save(place, keep, quiet=wait)
        try:
            save.prepare(step, lambda path: self._prepare(path, contents, tensors, step))
            uninterrupted(partial(self._begin, save))
            save.writer.capture([None])
        except BaseException as error:
            await_sections()  # it may have begun
            if self._save is save:
                save.writer.cancel(error)  # the caller may now change tensors that were not copied
            else:
                save.give_up()
            raise
        if wait:
            self._wait()
        return place.folder / place.name

    def _begin(self, save: Save) -> None:
        """Begin to write. From now on, a change of states waits until the blocks that it changes are copied."""
        save.start()
        self._save = save
        self._states.watch(save.writer.capture)

    @consistent("wait_for_checkpoint()")
    def wait(self) -> None:  # waits
        """Return when the last save is complete.

        Raises:
            CheckpointError: on all processes, if it could not be completed.
            StateError: a signal handler calls this in the middle of a step or a save.
        """
        self._wait()

    @uses("wait_for_checkpoint()")
    def _wait(self) -> None:  # waits
        if self._save is not None:
            try:
                self._save.wait()
            except Exception:
                self._end()
                raise
            self._end()  # not after an interrupt: the save goes on, and needs to know of changes

    @property
    def saving(self) -> bool:
        """True if this process is still writing."""
        return self._save is not None and self._save.running

    def _end(self) -> None:
        self._save = None
        self._states.watch(None)

    def _prepare(
        self, path: Path, contents: Contents, tensors: Sequence[Any], step: int
    ) -> tuple[ShardWriter, dict[str, Any]]:
        """The writer of this process's file, and its part of the manifest."""
        pipeline, rank = self._pipeline, self._collectives.rank
        arrays: list[np.ndarray] = []
        stale = pipeline.last_step.stale
        part: dict[str, Any] = {"own": encode(contents.own, arrays, contents.types, where="random state")}
        if rank == 0:
            scaler = pipeline.scaler
            part["step"] = step
            part["written"] = _written(pipeline, contents.front_end)
            part["state"] = encode(contents.state, arrays, contents.types, where="state")
            part["state_formats"] = _format_names(pipeline)
            part["loss_scale"] = None if scaler is None else scaler.state_dict()
            part["parameters"] = {
                name: {
                    "shape": list(self._states.elements(i).shape),
                    "dtype": spec.dtype.name,
                    "step": int(pipeline.counts.steps[i]),
                    "group": spec.group if contents.groups is None else contents.groups[i],
                    "behind": i in stale,
                    "optimizer": self._states.rule(i).name,
                }
                for i, (name, spec) in enumerate(zip(contents.names, pipeline.params, strict=True))
            }
            part["others"] = {
                name: {"shape": list(shape), "dtype": str(dtype)} for name, (shape, dtype) in contents.shapes.items()
            }
            if contents.left_out:
                part["left_out"] = {name: {"shape": list(shape)} for name, shape in contents.left_out.items()}
            if contents.tied:
                part["tied"] = dict(contents.tied)
            if contents.buffers:
                part["buffers"] = [*contents.buffers]
        sources = [*contents.sources]
        for i, array in enumerate(arrays):
            array = np.array(array, order="C")
            sources.append(Source.of(f"{rank}.{i}", "value", Region(array.shape, 0, array.size), array))
        for i, name in enumerate(contents.names):
            sources += self._sources_of(i, name, tensors[i], i in stale)
        world = self._collectives.world_size
        writer = ShardWriter(path / file_name(rank, world), sources, pipeline.memory)
        return writer, part

    def _sources_of(self, i: int, name: str, tensor: Any, stale: bool) -> list[Source]:
        found: list[Source] = []
        if not self._pipeline.params[i].counted:
            return found
        for run in self._states.runs(i, tensor):
            for at, region in self._states.elements(i).regions(run.start, run.numel):
                for kind, array in run.arrays.items():
                    fixed = kind == "master" and run.in_place
                    part = array[at : at + region.numel]
                    dtype = part.format.values.numpy
                    found.append(Source(name, kind, region, dtype, partial(part.read), None if fixed else i))
                if stale:
                    dtype = self._pipeline.device.dtype(tensor).numpy
                    found.append(Source(name, "param", region, dtype, partial(_read_from, run.read_parameter, at)))
        return found

    # --- loading -------------------------------------------------------------------------------------

    @consistent("load_checkpoint()")
    def has_none(self, path: str | os.PathLike[str]) -> bool:
        """True if there is no checkpoint at this path yet, as before the first save of a run. All processes call it.

        Raises:
            CheckpointError: on all processes, if they do not find the same.
        """
        self._wait()
        none = has_none(path)
        found = "no checkpoint" if none else "a checkpoint"
        differs = f"{path}: {found} on process {self._collectives.rank}, and not so on process 0; expected one folder"
        self._check_alike("load", [none], lambda first: f"{differs} that all processes share")
        return none

    @consistent("load_checkpoint()")
    def find_tag(self, folder: str | os.PathLike[str], tag: str | None) -> Path | None:
        """As :func:`~offload_core.support.checkpoint_folder.find_tag`, of all processes.

        Raises:
            CheckpointError: on all processes, if one finds none of that name, or they do not find the same.
        """
        self._wait()
        with self.together("load"):
            found = find_tag(Path(folder), tag)
        name = "no checkpoint" if found is None else found.name
        differs = f"{folder}: {name} on process {self._collectives.rank}, and another on process 0; expected one folder"
        self._check_alike("load", [fingerprint(name)], lambda first: f"{differs} that all processes share")
        return found

    @consistent("load_checkpoint()")
    def load(
        self,
        path: Opened,
        names: Sequence[str],
        targets: Sequence[Target],
        tensors: Sequence[Any],
        publish: Callable[[], None],
        types: Sequence[ArrayType] = (),
        *,
        run: TrainingRun | None = None,
        accept: Callable[[Loaded], Sequence[DeferredLoad]] = lambda loaded: (),
        states: bool = True,
        strict: bool = True,
        warns: bool = True,
    ) -> Loaded:
        """Load a checkpoint into the existing parameters, states and targets.

        Args:
            path: of a checkpoint of ours, or a function that opens one of another program.
            names: the names of the pipeline's parameters in the checkpoint.
            targets: other tensors to load.
            states: False loads master weights alone: other states, step counts and the loss scale stay.
            strict: False: tensors that the checkpoint lacks stay as they are, and those that are not here are left out.
            publish: calls :meth:`Parameters.flush` with the device parameters.
            run: gets its states and the count of updates back; None: the checkpoint may be of no run.
            accept: checks the front end's part before anything changes, and may raise :class:`CheckpointError`. It
                returns parts of the load that come when everything else is loaded.
            warns: False: states of the run for which there is no object are left out without a warning.

        Raises:
            CheckpointError: on all processes, if one found an error. Unless the message says that loading broke off,
                nothing has changed. Else the states are partly loaded, and every use of them raises until a checkpoint
                has been loaded.
        """
        self._wait()
        pipeline = self._pipeline
        loaded: Loaded | None = None
        with self.together("load"):
            opened = path() if callable(path) else _opened(path)
            loaded = Loaded(opened, self._collectives.rank, types)
            shapes = {name: self._states.elements(i).shape for i, name in enumerate(names)}
            there, targets = check_model(loaded, shapes, targets, strict=strict)
            here = [i for i, name in enumerate(names) if name in there]
            if states:
                self._check_states(loaded, names)
            last: list[DeferredLoad] = []
            if run is not None:
                updates = check_run(loaded)
            if run is not None and states:
                count = partial(setattr, pipeline.counts, "updates", updates)
                last.append(DeferredLoad("the count of updates", count, ours=True))
            last += accept(loaded)
            if run is not None:
                last += run.parts(loaded, alone=warns and states and self._collectives.rank == 0)
            scale = self._loss_scale(loaded)
            self._say_conversions(loaded)
        assert loaded is not None
        content = fingerprint(json.dumps(loaded.content, sort_keys=True))
        differs = f"{loaded.checkpoint.path}: not the checkpoint that process 0 loads; expected the same"
        self._check_alike("load", [content], lambda first: differs)
        ours, users = ([part for part in last if part.ours is own] for own in (True, False))

        def load() -> None:
            replaced.enter_context(pipeline.replacing_states())
            delayed = pipeline.config.schedule == "delayed"
            entries = [loaded.parameters.get(name) for name in names]
            stale = {i for i, entry in enumerate(entries) if entry and entry["behind"] and delayed}
            with self.together("load"):
                read = Reading(loaded.checkpoint, advance)
                for i in here:
                    self._read_states(read, i, names[i], tensors[i], i in stale, masters_alone=not states)
                read.finish()
                if self._collectives.rank == 0:  # check the blocks that no process reads, too
                    loaded.checkpoint.verify(besides=(*STATE_NAMES, "param"))
                read_targets(loaded, targets, advance)
            self._states.publish_later(range(len(names)))
            publish()
            with self.together("load"):
                read = Reading(loaded.checkpoint, advance)
                for i in stale:
                    for run in self._states.runs(i, tensors[i]):
                        values = read.values_of(run.arrays[MASTER])
                        for at, region in self._states.elements(i).regions(run.start, run.numel):
                            read.want(Want(names[i], MASTER, region, values[at : at + region.numel]))
                        read.go_on()
                read.finish()
            self._states.publish_later(stale)
            for i in here if states else ():
                entry = entries[i]
                pipeline.counts.steps[i][...] = entry["step"] if entry else 0
            if states and pipeline.scaler is not None and scale is not None:
                pipeline.scaler.load_state_dict(scale)
            run_deferred(loaded.checkpoint.path, ours)

        what, n_bytes = f"loading {loaded.checkpoint.path.name}", _share_of_bytes(loaded.checkpoint, self._collectives)
        with ExitStack() as replaced:
            advance = replaced.enter_context(progress(what, n_bytes, rank=self._collectives.rank))
            self._state_lock.change("load_checkpoint()", load)
            with self.together("load"):  # their code may read the states
                run_deferred(loaded.checkpoint.path, users, ours)
        return loaded

    def _check_states(self, loaded: Loaded, names: Sequence[str]) -> None:
        """Raise :class:`CheckpointError` if a parameter was updated there by another rule."""
        checkpoint = loaded.checkpoint
        for i, name in enumerate(names):
            rule, there = self._states.rule(i), loaded.parameters.get(name, {}).get("optimizer")
            if there not in (None, rule.name):  # None: it was written before there were several
                raise CheckpointError(
                    f"{checkpoint.path}: {name!r} was updated by optimizer={there!r} there, and is by {rule.name!r} "
                    "here: it was saved with another optimizer; expected the same `optimizer` of each parameter"
                )
            theirs = [state for state in STATE_NAMES if state != MASTER and checkpoint.has(name, state)]
            mine = [state.name for state in rule.states]
            if theirs != mine and checkpoint.has(name, MASTER):
                raise CheckpointError(
                    f"{checkpoint.path}: {name!r} has {_these(theirs)} in it, expected {_these(mine)}: it was saved "
                    "with another optimizer, or with its momentum 0 and not now; expected the same `optimizer` and "
                    "hyperparameters here"
                )

    def _say_conversions(self, loaded: Loaded) -> None:
        """Warn if states were saved in another format than this run keeps them in."""
        mine = _format_names(self._pipeline)
        theirs = loaded.state_formats
        shared = [state for state in mine if state in theirs]
        differ = [f"{state} from {theirs[state]} to {mine[state]}" for state in shared if theirs[state] != mine[state]]
        if differ:
            UserLine.now().warn(
                CheckpointWarning(
                    f"{loaded.checkpoint.path}: states are converted once, each value to the nearest: "
                    f"{', '.join(differ)}. To go on exactly, expected the settings that it was saved with: "
                    "state_format, master_dtype, exp_avg_dtype, exp_avg_sq_dtype"
                )
            )

    def _loss_scale(self, loaded: Loaded) -> Mapping[str, Any] | None:
        """The state of the loss scaler, checked if there is one here."""
        try:
            scale = loaded.content["loss_scale"]
            if self._pipeline.scaler is not None and scale is not None:
                LossScaler.checked(scale)
            return scale
        except NOT_AS_WRITTEN as error:
            raise CheckpointError(f"{loaded.checkpoint.path / MANIFEST}: the loss scale ({error!r})") from None

    def _read_states(self, read: Reading, i: int, name: str, tensor: Any, stale: bool, *, masters_alone: bool) -> None:
        elements = self._states.elements(i)
        first = {state.name: state.first for state in self._states.rule(i).states}
        master = "master" if read.checkpoint.has(name, "master") and not stale else "param"
        for run in self._states.runs(i, tensor):
            for state in run.arrays if not run.in_place else run.arrays.keys() - {MASTER}:
                if masters_alone and state != MASTER:
                    continue
                kind = master if state == MASTER else state
                values = read.values_of(run.arrays[state])
                for at, region in elements.regions(run.start, run.numel):
                    part = values[at : at + region.numel]
                    if read.checkpoint.has(name, kind) or state == MASTER:
                        read.want(Want(name, kind, region, part))
                    else:  # the parameter was not trained
                        part[:] = first[state]
                read.go_on()
        for start, array in self._states.own_masters(i, tensor):
            for at, region in elements.regions(start, array.size):
                read.want(Want(name, master, region, array[at : at + region.numel]))


def _written(pipeline: Pipeline, front_end: str | None) -> dict[str, Any]:
    """Return versions, settings and date, for information. Loading does not depend on them."""
    config = {
        field.name: value
        if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
        else repr(value)
        for field in fields(pipeline.config)
        for value in [getattr(pipeline.config, field.name)]
    }
    try:
        package = version("offload-core")
    except PackageNotFoundError:
        package = None
    return {
        "version": package,
        "front_end": front_end,
        "world_size": pipeline.device.collectives.world_size,
        "stage": pipeline.config.stage,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": config,
    }


def _format_names(pipeline: Pipeline) -> dict[str, str]:
    """The formats of the states by name; the narrowest where they depend on the parameter's type."""
    types = {spec.dtype for spec in pipeline.params} or {FLOAT32}
    rules = dict.fromkeys(map(pipeline.buckets.terms.rule_of, pipeline.params)) or {pipeline.config.rule(): None}
    of_each = [pipeline.config.state_formats(dtype, rule) for dtype in types for rule in rules]
    states = dict.fromkeys(state for formats in of_each for state in formats)
    return {
        state: min((formats[state] for formats in of_each if state in formats), key=_width).name for state in states
    }


def _these(states: Sequence[str]) -> str:
    return f"states {', '.join(states)}" if states else "a master weight alone"


def _width(format: StateFormat) -> int:
    return format.n_bytes(format.block)


def _read_from(read: Callable[[int, np.ndarray], None], at: int, start: int, out: np.ndarray) -> None:
    read(at + start, out)


def _check_names(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise CheckpointError(
                f"two tensors are named {name!r}, and a checkpoint tells them apart by their names; expected different "
                "ones: rename one (add_param_group() takes names, too)"
            )
        seen.add(name)


def translation(names: Names) -> Callable[[str], str]:
    """``names`` as a function. A name that is not in the mapping stays as it is."""
    if isinstance(names, Mapping):
        return lambda name: names.get(name, name)
    return names or (lambda name: name)


def _share_of_bytes(checkpoint: Readable, collectives: Collectives) -> int | None:
    """Return about as many bytes as one process reads; None: another program's checkpoint does not say."""
    return checkpoint.n_bytes // collectives.world_size if isinstance(checkpoint, Checkpoint) else None


def _opened(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint. The error says how to go on where none was saved yet."""
    try:
        return Checkpoint(path)
    except CheckpointError as error:
        if has_none(path):
            raise CheckpointError(f"{error}; load_checkpoint(..., missing_ok=True) goes on without one") from None
        raise
