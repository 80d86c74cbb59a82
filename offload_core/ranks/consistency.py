"""Decisions that all processes make together: each adds its words to one sum of integers, and all read the same result.

:func:`combine` is that sum. :func:`together` makes an error of one process an error of all, and :func:`heard_by_all`
tells them why. :func:`check_start` sends the first message of the processes of a group: their version, their settings,
and the parameters that they are about to add.

[Note: the first message] A row of sixteen little-endian int64 words a process, in the order of the processes; each
process fills its own row and leaves the others zero, so that the sum has all rows. Its layout never changes, so that a
process of any version can read every row:

====== =======================================================================
word   content
====== =======================================================================
0      the format of all other messages (:data:`FORMAT`)
1..8   the package's version: ASCII text, cut to 64 bytes, padded with zeros
9      fingerprint of the settings that must be equal
10     number of the parameters that are added
11     fingerprint of these parameters
12..15 zeros
====== =======================================================================
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from .. import errors
from ..config.options import SHARED_FIELDS, OffloadConfig
from ..errors import CollectiveError, ConfigError, ParameterError, StateError
from ..layout.partition import ParamSpec
from .collectives import Collectives

FORMAT = 4
"""The version of the messages between processes. Increase it by one whenever a message changes."""
VERSION = "0.1.0.dev0"
"""The package's version, as in pyproject.toml. Installed metadata may belong to another copy than the one imported."""

_EXPECTED = "expected the same model and configuration on every rank"
_ROW_WORDS, _VERSION_BYTES = 16, 64
_SAID_BYTES = 2048


# --- one sum ----------------------------------------------------------------------------------------------


class Combined(NamedTuple):
    """The result of :func:`combine`, the same on every process."""

    sums: np.ndarray
    """The sums of the words given as ``sums``."""
    alike: np.ndarray
    """For each word given as ``same``: True if it was the same on all processes."""
    of_first: np.ndarray
    """Process 0's words."""
    of_each: np.ndarray
    """int64[processes, words]: the words that each process gave as ``of_each``."""


def combine(
    collectives: Collectives,
    what: str,
    *,
    sums: Sequence[int] | np.ndarray = (),
    same: Sequence[int] | np.ndarray = (),
    of_first: Sequence[int] | np.ndarray = (),
    of_each: Sequence[int] | np.ndarray = (),
) -> Combined:
    """Exchange words between all processes, in one sum. All processes give equally many words of each kind.

    Args:
        what: names the sum in the :class:`CollectiveError` that a lost process causes.
        sums: words to add up.
        same: words to compare: fingerprints, or 0 and 1. (With other numbers, a process's word may happen to be the
            mean of all, which counts as the same.) Each takes one word, for any number of processes.
        of_first: words; all processes get process 0's.
        of_each: words; all processes get every process's.
    """
    n = collectives.world_size
    first, rows = np.array(of_first, np.int64), np.zeros((n, len(of_each)), np.int64)
    if collectives.rank:
        first[:] = 0
    rows[collectives.rank] = of_each
    mine = np.asarray(same, np.int64)
    parts = [np.asarray(sums, np.int64), mine, first, rows.reshape(-1)]
    words = np.concatenate(parts)
    collectives.sum_integers(words, what)
    summed, same_summed, first, rows = np.split(words, np.cumsum([part.size for part in parts[:-1]]))
    return Combined(summed, same_summed == n * mine, first, rows.reshape(n, len(of_each)))


@contextmanager
def together(collectives: Collectives, what: str, failed: Callable[[str], Exception]) -> Iterator[None]:
    """Raise on all processes if the body raises on one. A process whose own body raised raises that error.

    Args:
        failed: makes the error of the other processes, from the numbers of those that failed.
    """
    try:
        yield
    except Exception:
        combine(collectives, what, of_each=[1])
        raise
    others = np.flatnonzero(combine(collectives, what, of_each=[0]).of_each)
    if others.size:
        raise failed(processes(others))


@contextmanager
def heard_by_all(collectives: Collectives, what: str) -> Iterator[None]:
    """Raise on all processes if the body raises on one: the others raise an error of the same class that names the
    process and has its words. All processes enter it, and nothing is exchanged inside."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    try:
        failed = _failed_on(collectives, what, error) if collectives.world_size > 1 else None
    except CollectiveError:
        if error is None:
            raise
    if error is not None:
        raise error
    if failed is not None:
        raise failed


def _failed_on(collectives: Collectives, what: str, error: Exception | None) -> Exception | None:
    """Tell all processes this one's error. Return that of the first process that has one, for the others."""
    failed = np.flatnonzero(combine(collectives, what, of_each=[error is not None]).of_each)
    if not failed.size:
        return None
    said = "" if error is None else f"{type(error).__name__}: {error}"
    text = said.encode()[:_SAID_BYTES].ljust(_SAID_BYTES, b"\0")
    rows = combine(collectives, what, of_each=np.frombuffer(text, np.int64)).of_each
    first = int(failed[0])
    kind, _, words = rows[first].tobytes().rstrip(b"\0").decode(errors="replace").partition(": ")
    known: type[Exception] = getattr(errors, kind, StateError)
    return known(f"{what} failed on rank {first}, and so on all: {words or kind}")


def processes(numbers: np.ndarray) -> str:
    """Process numbers as text for errors."""
    return ", ".join(map(str, numbers))


def fingerprint(line: str) -> int:
    """40 bits of a hash, so that the sum over 2^23 ranks fits in an int64."""
    return int.from_bytes(hashlib.sha256(line.encode()).digest()[:5])


# --- the first message --------------------------------------------------------------------------------------


class _Row(NamedTuple):
    """A process's row of [Note: the first message]."""

    format: int
    version: str
    settings: int
    n_params: int
    params: int

    def words(self) -> np.ndarray:
        words = np.zeros(_ROW_WORDS, np.int64)
        text = self.version.encode("ascii", "replace")[:_VERSION_BYTES].ljust(_VERSION_BYTES, b"\0")
        words[0], words[1:9] = self.format, np.frombuffer(text, "<i8")
        words[9:12] = self.settings, self.n_params, self.params
        return words

    @classmethod
    def read(cls, words: np.ndarray) -> "_Row":
        version = words[1:9].astype("<i8").tobytes().rstrip(b"\0").decode("ascii", "replace")
        return cls(int(words[0]), version, *map(int, words[9:12]))


def check_start(
    collectives: Collectives, config: OffloadConfig, specs: Sequence[ParamSpec] = (), given: Sequence[str] = ()
) -> None:
    """Check that all processes have the same version, the same settings and the same new parameters. The first exchange
    in a group.

    It takes one sum; if processes differ, a second one finds the difference.

    Args:
        given: the element type of each parameter's start value.

    Raises (on every process):
        ConfigError: processes run different versions.
        ParameterError: settings or parameters differ; each process names its first difference from process 0.
    """
    if collectives.world_size == 1:
        return
    settings = [fingerprint(_setting(name, config)) for name in SHARED_FIELDS]
    params = [
        fingerprint(f"{s.name} {s.numel} {s.dtype} {s.group} {s.elements} {s.partitioned} {s.rule} {s.matrix} {d}")
        for s, d in zip(specs, given, strict=True)
    ]
    row = _Row(FORMAT, VERSION, fingerprint(str(settings)), len(params), fingerprint(str(params)))
    rows = [_Row.read(words) for words in combine(collectives, "layout", of_each=row.words()).of_each]
    _check_versions(rows, collectives.rank)
    if any(other.settings != rows[0].settings for other in rows):
        known = combine(collectives, "layout", same=settings, of_first=settings)
        raise ParameterError(_differing_setting(settings, known, config))
    if any(other[3:] != rows[0][3:] for other in rows):
        mine = np.zeros(rows[0].n_params, np.int64)
        mine[: len(params)] = params[: mine.size]
        theirs = combine(collectives, "layout", of_first=mine).of_first
        raise ParameterError(_differing_param(params, theirs.tolist(), specs))


def _check_versions(rows: Sequence[_Row], rank: int) -> None:
    """Raise :class:`ConfigError` on all processes, naming two versions, if processes have different ones."""
    first = rows[0]
    others = [i for i, row in enumerate(rows) if row[:2] != first[:2]]
    if not others:
        return
    other = rank if rank in others else others[0]
    raise ConfigError(
        f"ranks run different versions: rank 0 has {_named(first)}, rank {other} has {_named(rows[other])}; expected "
        "one version on every rank: install the same offload-core wherever a rank runs"
    )


def _named(row: _Row) -> str:
    return f"offload-core {row.version or 'of unknown version'} (messages of format {row.format})"


def _setting(name: str, config: OffloadConfig) -> str:
    """A setting as text to compare. Functions are all alike here: their results are compared at every step."""
    value = getattr(config, name)
    return f"{name}={'a function' if callable(value) else value!r}"


def _differing_setting(mine: Sequence[int], known: Combined, config: OffloadConfig) -> str:
    for name, own, first in zip(SHARED_FIELDS, mine, known.of_first, strict=True):
        if own != first:
            return f"{name} is {getattr(config, name)!r} here and differs from rank 0's; {_EXPECTED}"
    name = SHARED_FIELDS[int(np.argmin(known.alike))]
    return f"{name} is {getattr(config, name)!r} here and differs on another rank; {_EXPECTED}"


def _differing_param(mine: Sequence[int], theirs: Sequence[int], specs: Sequence[ParamSpec]) -> str:
    for i, spec in enumerate(specs):
        if i >= len(theirs) or mine[i] != theirs[i]:
            shape = f"{spec.elements}, " if spec.elements else ""
            what = f"parameter {spec.name!r} ({shape}{spec.numel} elements, {spec.dtype}, group {spec.group})"
            return f"{what} differs from rank 0's; {_EXPECTED}"
    if len(mine) != len(theirs):
        return f"{len(specs)} parameters here and {len(theirs)} on rank 0; {_EXPECTED}"
    return f"another rank's parameters differ from rank 0's; {_EXPECTED}"
