"""Makes a record of each update, and gives it to writers."""

import math
import os
from collections.abc import Mapping
from numbers import Integral
from statistics import fmean
from types import TracebackType
from typing import Any, Protocol, Self

from ..errors import ConfigError
from ..memory.report import DeviceUse
from ..step.pipeline import StepReport
from ..support.checks import integer
from ..support.launchers import Launched
from .files import JsonLines
from .measures import Speed, device_memory, host_memory
from .writer import Value, Writer


class Trains(Protocol):
    """An engine, an optimizer or the offloaded parameters of a front end."""

    def device_use(self) -> DeviceUse | None:
        """Return the memory in use on this process's devices; None: it is host memory, or nobody counts it."""


class StepLog:
    """Gives each update's record to writers: ``log(engine.step(), loss=loss)``, ``log(offloaded.report, loss=loss)``.

    A record has the report's numbers (:func:`numbers`), the values of the call, ``seconds`` (the time since the last
    record, divided by the updates in between), and ``host_bytes`` and ``host_peak_bytes`` of this process. Values of
    the micro-steps of an update are averaged; ``tokens=`` is summed, and gives ``tokens_per_second``.

    Args:
        writers: each a :class:`Writer`, or the path of a file for :class:`JsonLines`.
        every: write one record every so many updates, and one of each skipped update. Between records nothing is
            computed, and the device is not waited for.
        rank: this process's rank; only rank 0 writes. None: the launcher's, or 0 without one.
        every_rank: every rank writes, to its own file or folder, with the rank in its name.
        engine: what trains: an ``Engine``, an optimizer, or JAX's offloaded parameters. Records then have
            ``device_bytes`` and ``device_peak_bytes``, as the device's allocator counts them, activations included.
        total: the updates of the whole run. Records then have ``seconds_left``.
        flops_per_token: operations of the model for one token, forward and backward: about 6 for each parameter, if all
            are trained. With ``tokens=`` records then have ``flops_per_second``, and ``mfu`` (model flops utilization),
            its share of the peak of this process's devices, where that is known.
        peak_flops: bfloat16 operations a second that one device can reach, for ``mfu``. None: that of the maker's data
            sheet, for the devices in ``step_log/measures.py``; other devices and the CPU have no ``mfu``.

    Raises:
        ConfigError: a number is not positive.
        OSError, StateError, ModuleNotFoundError: a writer cannot begin.
    """

    def __init__(
        self,
        *writers: Writer | str | os.PathLike[str],
        every: int = 1,
        rank: int | None = None,
        every_rank: bool = False,
        engine: Trains | None = None,
        total: int | None = None,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        integer("every", every)
        if total is not None:
            integer("total", total)
        for name, value in (("flops_per_token", flops_per_token), ("peak_flops", peak_flops)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}: got {value}, expected a positive number of operations")
        self._every = every
        rank = Launched.read().rank if rank is None else rank
        self._writers: list[Writer] = []
        self._given: dict[str, list[Any]] = {}
        self._tokens: list[Any] = []
        """The numbers of tokens of the micro-steps since the last record."""
        self._updates = 0
        """Reports since the last record."""
        self._speed = Speed(total, flops_per_token, peak_flops)
        self._engine = engine
        if rank != 0 and not every_rank:
            return
        try:
            for writer in writers:
                writer = writer if isinstance(writer, Writer) else JsonLines(writer)
                writer.open(rank if every_rank else None)
                self._writers.append(writer)
        except BaseException:
            self.close()
            raise

    def __call__(self, report: StepReport | None, **values: Any) -> None:
        """Note a micro-step's values, and at the end of an update write its record.

        Args:
            report: the result of ``step``; None (no step yet) writes nothing.
            values: words, numbers, and anything that ``float()`` takes (tensors and arrays of one element). ``tokens``
                is the number of this process's tokens in the micro-step.

        Raises:
            ConfigError: a value is named ``step``.
            TypeError, ValueError: a value is not a number.
            OSError: the record cannot be written; no part of it was.
        """
        if report is None or not self._writers:
            return
        if "step" in values:
            raise ConfigError("step: a record has its update's number under this name; expected another one")
        if "tokens" in values:
            self._tokens.append(values["tokens"])
        for name, value in values.items():
            self._given.setdefault(name, []).append(value.detach() if hasattr(value, "detach") else value)
        if report.skipped == "accumulating":
            return
        given, self._given = self._given, {}
        self._updates += 1
        if report.step % self._every and report.skipped is None:
            return
        record = {name: _of_update(name, each) for name, each in given.items()}
        tokens, self._tokens = self._tokens, []
        updates, self._updates = self._updates, 0
        use = None if self._engine is None else self._engine.device_use()
        speed = self._speed.record(report.step, updates, _sum("tokens", tokens) if tokens else None, use)
        self.write(report.step, {**speed, **host_memory(), **device_memory(use), **numbers(report), **record})

    def write(self, step: int, record: Mapping[str, Value]) -> None:
        """Write a record of your own, for loops without a :class:`StepReport`."""
        for writer in self._writers:
            writer.write(step, record)

    def close(self) -> None:
        """End all writers. Later records are dropped."""
        while self._writers:
            self._writers.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def numbers(report: StepReport) -> dict[str, Value]:
    """A report's record: ``lr`` (of the first parameter group; ``lr_1`` and so on for groups with another one),
    ``grad_norm``, ``clip_coefficient``, ``loss_scale`` and ``skipped``."""
    lr = {f"lr_{i}" if i else "lr": rate for i, rate in enumerate(report.lr) if i == 0 or rate != report.lr[0]}
    return {
        **lr,
        "grad_norm": report.grad_norm,
        "clip_coefficient": report.clip_coefficient,
        "loss_scale": report.loss_scale,
        "skipped": report.skipped,
    }


def _of_update(name: str, values: list[Any]) -> Value:
    """The value of an update: the mean of its micro-steps' numbers, or the sum of their tokens, or the last word."""
    if name == "tokens":
        return _sum(name, values)
    plain = _plain(name, values)
    if len(plain) > 1 and all(isinstance(value, float | int) for value in plain):
        return fmean(plain)  # type: ignore[arg-type]
    return plain[-1]


def _sum(name: str, values: list[Any]) -> float:
    return sum(value for value in _plain(name, values) if isinstance(value, float | int))


def _plain(name: str, values: list[Any]) -> list[Value]:
    try:
        return [_number(value) for value in values]
    except (TypeError, ValueError) as error:
        error.add_note(f"in the log as {name!r}; expected a number, or a tensor or array of one")
        raise


def _number(value: Any) -> Value:
    if value is None or isinstance(value, str | float):
        return value
    return int(value) if isinstance(value, Integral) else float(value)
