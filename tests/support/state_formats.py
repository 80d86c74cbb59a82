"""States in narrow formats: the kernels called on plain arrays, and NumPy's own account of what they give.

The oracle rounds by looking values up among those that a format has, in float64, where the kernels shift and add bits.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from offload_core.dtypes import BFLOAT16, BY_NUMPY, FLOAT16, FLOAT32, ElementType
from offload_core.native import kernels
from tests.support import oracles
from tests.support.kernel_calls import State, placed, using
from tests.support.rules import MUONS, REFERENCES, kernel_of

BLOCK = 256
NUMPY = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8": np.dtype(np.uint8),
    "split": np.dtype(np.uint16),
}
MASTERS = ("float32", "bfloat16", "split")
MOMENTS = ("float32", "bfloat16", "float8")
STATES = ("master", "first moment", "second moment")


@dataclass(frozen=True)
class Stored:
    """A state in its format. ``ties`` is a bool an element here, and packed where the kernels take it."""

    format: str
    data: np.ndarray
    has_sign: bool = True
    scales: np.ndarray | None = None
    high: np.ndarray | None = None
    ties: np.ndarray | None = None

    def __getitem__(self, part: slice) -> "Stored":
        a, b, _ = part.indices(self.data.size)
        scales = None if self.scales is None else self.scales[a // BLOCK : -(-b // BLOCK)]
        high, ties = (None if x is None else x[part] for x in (self.high, self.ties))
        return replace(self, data=self.data[part], scales=scales, high=high, ties=ties)

    def packed(self, offset: int = 0) -> dict[str, np.ndarray]:
        """Copies of the arrays as the kernels take them, ``offset`` elements from a 64-byte boundary."""
        arrays = {"data": self.data, "scales": self.scales, "high": self.high}
        if self.ties is not None:
            unused = np.ones(-self.ties.size % 8, bool)
            arrays["ties"] = np.packbits(np.concatenate([self.ties, unused]), bitorder="little")
        return {name: placed(array, offset) for name, array in arrays.items() if array is not None}

    def unpacked(self, arrays: dict[str, np.ndarray]) -> "Stored":
        """The state whose arrays ``packed`` gave, as they are now."""
        given = dict(arrays)
        if "ties" in given:
            given["ties"] = np.unpackbits(given["ties"], count=self.data.size, bitorder="little").astype(bool)
        return replace(self, **given)


def joined(parts: Sequence[Stored]) -> Stored:
    """One state of its parts."""
    columns = {name: [getattr(part, name) for part in parts] for name in ("data", "scales", "high", "ties")}
    whole = {name: np.concatenate(each) for name, each in columns.items() if each[0] is not None}
    return replace(parts[0], **whole)


def assert_same(what: str, got: Stored, expected: Stored) -> None:
    """Equal bits of all arrays, NaNs included; of fp32, any NaN equals any NaN."""
    for name in ("data", "scales", "high", "ties"):
        if getattr(expected, name) is not None:
            arrays = [getattr(state, name) for state in (got, expected)]
            if expected.format != "float32":
                arrays = [array.view(f"u{array.itemsize}") for array in arrays]
            oracles.assert_same_bits(f"{what}: {name}", *arrays)


# --- the oracle -------------------------------------------------------------------------------------


def random_bits(seed: int, update: int, start: int, n: int) -> np.ndarray:
    """The 32 random bits of elements [start, start + n) of a parameter, in Python's integers."""
    low64, low32 = 2**64 - 1, 2**32 - 1

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & low64
        z = (z ^ z >> 27) * 0x94D049BB133111EB & low64
        return z ^ z >> 31

    def key(block: int) -> int:
        return mix((mix((seed + update * 0x9E3779B97F4A7C15) & low64) + block * 0x9E3779B97F4A7C15) & low64)

    blocks = range(start // BLOCK, (start + n + BLOCK - 1) // BLOCK)
    keys = np.repeat(np.array([key(block) for block in blocks], np.uint64), BLOCK)
    x = (keys + np.tile(np.arange(BLOCK, dtype=np.uint64), len(blocks))) & low32
    x = x * 0x21F0AAAD & low32
    x = (x ^ x >> 15 ^ keys >> 32) * 0xD35A2D97 & low32
    return (x ^ x >> 16)[start % BLOCK :][:n].astype(np.uint32)


def random_of(state: int, state_format: str, bits: np.ndarray) -> np.ndarray:
    """The part of an element's random bits that rounds a state of ``STATES``, in units of what its format drops."""
    if state == 0:
        return (bits.astype(np.uint64) * 0x9E3779B1 % 2**32 >> 16).astype(np.uint32)
    width = 20 if state_format == "float8" else 16
    return bits % 2**width if state == 1 else bits >> (32 - width)


def code_values(scale: int, has_sign: bool) -> np.ndarray:
    """The magnitudes of all codes of a block with this scale, ascending."""
    top = 14 if has_sign else 30
    codes = np.arange(128 if has_sign else 256)
    exponent, fraction = codes // 8, codes % 8 / 8
    significand = np.where(exponent == 0, fraction, 1 + fraction)
    return np.ldexp(significand, np.maximum(exponent, 1) - top + max(scale, 52) - 127)


def to_float8(values: np.ndarray, has_sign: bool, random: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of blocks of ``values``; ``random`` in units of 2^-20 of a code, None: to nearest even."""
    n = values.size
    codes, scales = np.zeros(n, np.uint8), np.zeros(-(-n // BLOCK), np.uint8)
    for block in range(len(scales)):
        part = slice(block * BLOCK, min((block + 1) * BLOCK, n))
        magnitudes = np.abs(values[part].astype(np.float64))
        if not np.isfinite(magnitudes).all():
            scales[block] = 255
            continue
        largest = magnitudes.max()
        scale = int(max(52, 126 + np.frexp(largest)[1])) if largest else 52
        if random is None and scale > 52:  # the least scale that has a code near the largest value
            below = code_values(scale - 1, has_sign)
            scale -= bool(largest < 1.5 * below[-1] - 0.5 * below[-2])
        scales[block] = scale
        table = code_values(scale, has_sign)
        table = np.append(table, 2 * table[-1] - table[-2])
        code = np.searchsorted(table, magnitudes, side="right") - 1
        between = (magnitudes - table[code]) / (table[code + 1] - table[code])
        if random is None:
            code += (between > 0.5) | ((between == 0.5) & (code % 2 == 1))
        else:
            code += np.where(code < 8, np.rint(between * 2**20), between * 2**20) + random[part] >= 2**20
        codes[part] = code + 128 * (np.signbit(values[part]) & has_sign)
    return codes, scales


def from_float8(codes: np.ndarray, scales: np.ndarray, has_sign: bool) -> np.ndarray:
    """The values of codes, in fp32."""
    values = np.zeros(codes.size, np.float32)
    for block, scale in enumerate(scales):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        table = code_values(int(scale), has_sign)
        if scale == 255:
            table[:] = np.nan
        elif scale == 254:  # what is rounded up past the largest fp32
            table[table >= 2.0**128] = np.inf
        if has_sign:
            table = np.concatenate([table, -table])
        with np.errstate(all="ignore"):
            values[part] = table[codes[part]]
    return values


def to_bfloat16(values: np.ndarray, random: np.ndarray | None) -> np.ndarray:
    """``values`` rounded up in magnitude where the part that is dropped and ``random`` reach one last bit."""
    if random is None:
        values = np.where(np.isnan(values), np.float32(np.nan), values)
        return values.astype(ml_dtypes.bfloat16)
    bits = values.view(np.uint32).astype(np.int64)
    dropped = bits % 2**16
    rounded = (bits - dropped) // 2**16 + (dropped + random >= 2**16)
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16).view(ml_dtypes.bfloat16)


def encode(state_format: str, values: np.ndarray, *, has_sign: bool = True, random: np.ndarray | None = None) -> Stored:
    """fp32 values in a format."""
    with np.errstate(all="ignore"):
        if state_format == "float8":
            codes, scales = to_float8(values, has_sign, random)
            return Stored(state_format, codes, has_sign, scales)
        if state_format == "split":
            plain = np.where(np.isnan(values), np.float32(np.nan), values)
            bits, high = plain.view(np.uint32), plain.astype(ml_dtypes.bfloat16)
            low = (bits % 2**16).astype(np.uint16)
            ties = (low == 0x8000) & (high.view(np.uint16) != bits // 2**16)
            return Stored(state_format, low, high=high, ties=ties)
        if state_format == "bfloat16":
            return Stored(state_format, to_bfloat16(values, random), has_sign)
    return Stored(state_format, values.copy(), has_sign)


def decode(state: Stored) -> np.ndarray:
    """The fp32 values of a state."""
    with np.errstate(all="ignore"):
        if state.format == "float8":
            return from_float8(state.data, state.scales, state.has_sign)
        if state.format == "split":  # of the two floats with these lower bits, the one that rounds to `high`
            above = state.high.view(np.uint16).astype(np.uint32)
            whole = [
                (upper % 2**16 * 2**16 + state.data).astype(np.uint32).view(np.float32) for upper in (above, above - 1)
            ]
            rounds = [x.astype(ml_dtypes.bfloat16).view(np.uint16) == above for x in whole]
            return np.where(
                rounds[0] & rounds[1], np.where(state.ties, whole[1], whole[0]), np.where(rounds[1], *whole[::-1])
            )
        return state.data.astype(np.float32)


@dataclass(frozen=True)
class Update:
    """All that one update reads: the gradient, the master and two moments, and which elements they are of which
    parameter."""

    grad: np.ndarray
    states: tuple[Stored, ...]
    start: int = 0
    seed: int = 0
    param: np.ndarray | None = None

    @property
    def master(self) -> Stored:
        return self.states[0]

    def __getitem__(self, part: slice) -> "Update":
        a = part.indices(self.grad.size)[0]
        states = tuple(state[part] for state in self.states)
        param = None if self.param is None else self.param[part]
        return replace(self, grad=self.grad[part], states=states, start=self.start + a, param=param)

    def of(self, step: oracles.Step) -> "Update":
        """This update with the signs that the step's rule gives its moments."""
        master, *moments = self.states
        signed = [
            state if state.has_sign is sign else encode(state.format, decode(state), has_sign=sign)
            for state, sign in zip(moments, step.signs, strict=True)
        ]
        return replace(self, states=(master, *signed))

    def decoded(self) -> State:
        """The fp32 values."""
        master, *moments = map(decode, self.states)
        return State(self.grad, master, tuple(moments))


def update_of(
    values: State, formats: Sequence[str], *, start: int = 0, seed: int = 0, encode: Callable[..., Any] = encode
) -> Update:
    """An update of states that are rounded to nearest from these fp32 values, by NumPy or by :func:`kernel_encode`."""
    arrays = zip(formats, (values.master, *values.moments), (True, *oracles.Step.signs), strict=True)
    states = tuple(encode(state_format, array, has_sign=has_sign) for state_format, array, has_sign in arrays)
    return Update(values.grad, states, start=start, seed=seed)


def expected(
    before: Update, step: oracles.Step, *, rule: str, param_dtype: ElementType | None, keep_states: bool
) -> Update:
    """Return the result of fp32's update on decoded values, rounded to the formats."""
    bits = random_bits(before.seed, step.step, before.start, before.grad.size)
    after = oracles.update(before.decoded(), step, rule=rule, param_dtype=None)
    states = tuple(
        encode(state.format, array, has_sign=state.has_sign, random=random_of(i, state.format, bits))
        if i <= step.n_moments
        else state
        for i, (state, array) in enumerate(zip(before.states, (after.master, *after.moments), strict=True))
    )
    master = decode(states[0]) if before.master.format == "bfloat16" else after.master
    with np.errstate(all="ignore"):
        param = None if param_dtype is None else master.astype(param_dtype.numpy)
    return replace(before, param=param, states=before.states if keep_states else states)


def assert_same_update(what: str, got: Update, expected: Update) -> None:
    """Equal bits of all states and of the device parameter."""
    for name, ours, theirs in zip(STATES, got.states, expected.states, strict=True):
        assert_same(f"{what}: {name}", ours, theirs)
    if expected.param is not None:
        oracles.assert_same_bits(f"{what}: param", got.param, expected.param)


# --- the kernels ------------------------------------------------------------------------------------


def run(
    updates: Sequence[Update],
    scalars: np.ndarray,
    *,
    rule: str,
    param_dtype: ElementType | None,
    keep_states: bool = False,
    threads: int = 1,
    offsets: Sequence[int] = (0, 0, 0, 0, 0),
    shared: bool = False,
) -> list[Update]:
    """One call on copies of the updates. ``shared``: the device parameter lies in the master's memory."""
    rows, memory = [], []
    for update in updates:
        packed = [state.packed(offset) for state, offset in zip(update.states, offsets, strict=False)]
        addresses = [{name: array.ctypes.data for name, array in arrays.items()} for arrays in packed]
        grad, param = placed(update.grad, offsets[3]), None
        if shared:
            param = packed[0]["high" if update.master.format == "split" else "data"]
        elif param_dtype is not None:
            param = placed(np.zeros(update.grad.size, param_dtype.numpy), offsets[4])
        memory.append((grad, packed, param))
        master, *moments = addresses
        rows.append(
            {
                "grad": grad.ctypes.data,
                "master": master["data"],
                "moments": [moment["data"] for moment in moments],
                "param": 0 if param is None else param.ctypes.data,
                "high": master.get("high", 0),
                "ties": master.get("ties", 0),
                "scales": [moment.get("scales", 0) for moment in moments],
                "numel": update.grad.size,
                "start": update.start,
                "seed": update.seed,
            }
        )
    master_format, *moment_formats = (state.format for state in updates[0].states)
    kernels.update(
        kernels.segments_of(rows),
        scalars,
        grad_dtype=BY_NUMPY[updates[0].grad.dtype],
        param_dtype=param_dtype,
        rule=rule,
        keep_states=keep_states,
        threads=threads,
        master_format=master_format,
        moment_formats=moment_formats,
    )
    for update, (_, packed, _) in zip(updates, memory, strict=True):
        if "ties" in packed[0]:
            unused = np.unpackbits(packed[0]["ties"], bitorder="little")[update.grad.size :]
            assert unused.all(), "bits past the last element's have changed"
    return [
        replace(update, param=param, states=tuple(s.unpacked(p) for s, p in zip(update.states, packed, strict=True)))
        for update, (_, packed, param) in zip(updates, memory, strict=True)
    ]


def kernel_encode(state_format: str, values: np.ndarray, *, has_sign: bool = True, threads: int = 1) -> Stored:
    """The kernel's ``encode`` into fresh memory."""
    n = values.size
    arrays = {"data": np.zeros(n, NUMPY[state_format])}
    if state_format == "float8":
        arrays["scales"] = np.zeros(-(-n // BLOCK), np.uint8)
    if state_format == "split":
        arrays |= {"high": np.zeros(n, ml_dtypes.bfloat16), "ties": np.zeros(-(-n // 8), np.uint8)}
    kernels.encode(state_format, values, **arrays, has_sign=has_sign, threads=threads)
    return Stored(state_format, arrays["data"], has_sign).unpacked(arrays)


def kernel_decode(state: Stored, *, threads: int = 1) -> np.ndarray:
    """The kernel's ``decode``."""
    out = np.zeros(state.data.size, np.float32)
    kernels.decode(state.format, **state.packed(), out=out, has_sign=state.has_sign, threads=threads)
    return out


# --- a fixed sample ---------------------------------------------------------------------------------


def check_formats(instruction_set: str) -> None:
    """Compare the update of every pair of formats with the oracle on a fixed sample. Raises AssertionError."""
    with using(instruction_set):
        for what, before, scalars, kind, after in _sample():
            [got] = run([before], scalars, **kind)
            assert_same_update(what, got, after)


@cache
def _sample() -> list[tuple[str, Update, np.ndarray, dict, Update]]:
    rng = np.random.default_rng(0)
    special = np.float32([0, -0.0, 1e-45, -1e-38, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 3e38, np.inf, np.nan, 1e-12, 1e-30])
    rows = []
    for case, formats in enumerate(itertools.product(MASTERS, MOMENTS, MOMENTS)):
        for n, start in ((37, 512), (300, 256)) if "float8" in formats else ((37, 612), (300, 203)):
            exponents = rng.uniform(-9, 0, (4, n))
            grad, *values = (rng.standard_normal((4, n)) * 10.0**exponents).astype(np.float32)
            for array in values:
                array[rng.integers(0, 32, 3)] = rng.choice(special[: 7 if case % 2 else len(special)], 3)
            if formats[1] == "bfloat16" and not case % 2:
                grad[9], values[1][9] = np.inf, -np.inf  # their sum is on x86-64 a NaN with a sign
            if case % 4 == 3 and n == 37:  # blocks below the least scale
                grad, values[1], values[2] = (np.float32(1e-32) * (rng.standard_normal((3, n)))).astype(np.float32)
            state = State(grad, values[0], (values[1], np.abs(values[2])))
            before = update_of(state, formats, start=start, seed=2**63 + case)
            if before.master.format == "split":  # of an odd upper half: a tie that becomes one of the next
                before.master.data[5], before.master.ties[5] = 0x8000, False
                before.master.high.view(np.uint16)[5] = 0x3F81
            param_dtype = (FLOAT32, BFLOAT16, FLOAT16, None)[case % 4]
            keep_states = param_dtype is not None and (case + n) % 2 == 0
            # A tie shows only if an update leaves its master: no step.
            rates = {"lr": 0.0, "weight_decay": 0.0} if case % 3 == 0 else {"lr": 1e-3, "weight_decay": 0.1}
            order = ("torch", "optax")[case // 4 % 2]
            steps = [(kernel_of(name, order), reference.step) for name, reference in REFERENCES.items()]
            for rule, kind_of_step in [*steps, *MUONS.items()]:
                step = kind_of_step(**rates, step=3 + case)
                kind = {"rule": rule, "param_dtype": param_dtype, "keep_states": keep_states}
                what = f"{n} of {', '.join(formats)}, {kind}"
                given = before.of(step)
                rows.append((what, given, step.scalars(rule), kind, expected(given, step, **kind)))
    return rows
