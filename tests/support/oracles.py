"""The kernels' results, computed another way: NumPy and exact rationals. No line is shared with ``c_src``."""

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

import ml_dtypes
import numpy as np

from offload_core.dtypes import BFLOAT16, BY_NAME, FLOAT16, FLOAT32, ElementType
from offload_core.native.kernels import SCALARS
from tests.support import kernel_calls as call

DTYPES = tuple(BY_NAME.values())


def round_to_float32(x: Fraction) -> np.float32:
    """A rational to the nearest float32, ties to even, subnormals kept."""
    if x == 0:
        return np.float32(0)
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    exponent -= abs(x) < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(x / unit) * unit
    return np.float32(float(rounded) if abs(rounded) < 2**128 else math.copysign(math.inf, x))


_LIBM = ctypes.CDLL(None)
_LIBM.fma.argtypes, _LIBM.fma.restype = [ctypes.c_double] * 3, ctypes.c_double


def fma(a, b, c) -> np.ndarray:
    """``a * b + c`` in float32, rounded once.

    The product is exact in float64. Its sum with c is rounded to odd there (to the neighbour with an odd last
    bit where inexact), which a second rounding to no more than 51 bits cannot see: S. Boldo and G. Melquiond,
    "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", section 3.
    """
    with np.errstate(all="ignore"):
        a, b, c = (np.asarray(each, np.float64) for each in (a, b, c))
        product = a * b
        total = np.asarray(product + c)
        back = total - product
        error = (product - (total - back)) + (c - back)
        to_odd = np.isfinite(total) & (error != 0) & (total.view(np.int64) % 2 == 0)
        return np.where(to_odd, np.nextafter(total, np.copysign(np.inf, error)), total).astype(np.float32)


@dataclass(frozen=True)
class Hyper:
    """What a user sets for one step, in double."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    eps_root: float = 0.0
    weight_decay: float = 0.1
    grad_scale: float = 1.0
    step: int = 1

    def scalars(self, op_order: str) -> np.ndarray:
        """The kernel's scalars (one record of ``SCALARS``), which it rounds."""
        unbias1, unbias2 = 1 - self.beta1**self.step, 1 - self.beta2**self.step
        torch = op_order == "torch"
        record = np.zeros(1, SCALARS)
        for name, value in {
            "grad_scale": self.grad_scale,
            "weight_decay": self.weight_decay,
            "decay": _LIBM.fma(-self.lr, self.weight_decay, 1.0),
            "beta1": self.beta1,
            "beta2": self.beta2,
            "one_minus_beta1": 1 - self.beta1,
            "one_minus_beta2": 1 - self.beta2,
            "correction1": unbias1,
            "correction2": math.sqrt(unbias2) if torch else unbias2,
            "eps": self.eps,
            "eps_root": self.eps_root,
            "step_size": -self.lr / unbias1 if torch else -self.lr,
            "update": self.step,
        }.items():
            record[name] = value
        return record


def adam(
    state: call.AdamState,
    hyper: Hyper,
    *,
    op_order: str,
    adam_mode: str,
    param_dtype: ElementType | None,
    keep_states: bool = False,
) -> call.AdamState:
    """The state after one step, by the definition in docs/numerics.md."""
    [exact] = hyper.scalars(op_order)
    s = {name: np.float32(exact[name]) for name in SCALARS.names}
    one = np.float32(1)
    with np.errstate(all="ignore"):
        g, p, m, v = (x.astype(np.float32) for x in (state.grad, state.master, state.exp_avg, state.exp_avg_sq))
        if s["grad_scale"] != 1:
            g = g * s["grad_scale"]
        l2 = adam_mode == "adam" and s["weight_decay"] != 0
        if op_order == "torch":
            if adam_mode == "adamw":
                p = p * s["decay"]
            if l2:
                g = fma(p, s["weight_decay"], g)
            w1, w2 = s["one_minus_beta1"], s["one_minus_beta2"]
            m = fma(w1, g - m, m) if w1 < 0.5 else fma(w1 - one, g - m, g)
            v = fma(w2 * g, g, v * s["beta2"])
            d = np.sqrt(v) / s["correction2"] + s["eps"]
            p = p + (s["step_size"] * m) / d
        else:
            if l2:
                g = g + s["weight_decay"] * p
            m = s["one_minus_beta1"] * g + s["beta1"] * m
            v = s["one_minus_beta2"] * (g * g) + s["beta2"] * v
            u = (m / s["correction1"]) / (np.sqrt(v / s["correction2"] + s["eps_root"]) + s["eps"])
            if adam_mode == "adamw" and s["weight_decay"] != 0:
                u = u + s["weight_decay"] * p
            p = p + u * s["step_size"]
        param = None if param_dtype is None else p.astype(param_dtype.numpy)
    if keep_states:
        return replace(state, param=param)
    return call.AdamState(state.grad, p, m, v, param)


def accumulate(src: np.ndarray, dst: np.ndarray) -> np.ndarray:
    """``dst + float32(src)``."""
    with np.errstate(all="ignore"):
        return dst + src.astype(np.float32)


def reduce(parts: list[np.ndarray], dst: np.ndarray, *, divisor: float, add: bool) -> np.ndarray:
    """The parts summed in their order in float32, divided once, and added to ``dst`` or put in its place."""
    with np.errstate(all="ignore"):
        total = parts[0].astype(np.float32)
        for part in parts[1:]:
            total = total + part.astype(np.float32)
        total = total / np.float32(divisor)
        return dst + total if add else total


def cast(src: np.ndarray, dst: ElementType) -> np.ndarray:
    """``src`` in another type, by NumPy and ml_dtypes."""
    with np.errstate(all="ignore"):
        return src.astype(np.float32).astype(dst.numpy)


def sum_of_squares(values: np.ndarray) -> Fraction:
    """The exact sum of squares of finite values."""
    distinct, counts = np.unique(values.astype(np.float64), return_counts=True)
    return sum((int(n) * Fraction(float(x)) ** 2 for x, n in zip(distinct, counts, strict=True)), Fraction(0))


def assert_same_bits(what: str, got: np.ndarray, expected: np.ndarray) -> None:
    """Equal bits everywhere, except that any NaN equals any NaN."""
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}, expected {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    bits = np.dtype(f"u{got.dtype.itemsize}")
    with np.errstate(all="ignore"):
        differ = (got.view(bits) != expected.view(bits)) & ~(np.isnan(got) & np.isnan(expected))
    if differ.any():
        i = int(np.argmax(differ))
        raise AssertionError(
            f"{what}: {differ.sum()} of {got.size} elements differ; the first is [{i}]: got {got[i]} "
            f"(0x{got.view(bits)[i]:x}), expected {expected[i]} (0x{expected.view(bits)[i]:x})"
        )


def assert_same_state(what: str, got: call.AdamState, expected: call.AdamState) -> None:
    """``assert_same_bits`` of each array of two states."""
    for name in ("grad", "master", "exp_avg", "exp_avg_sq", "param"):
        if getattr(expected, name) is not None:
            assert_same_bits(f"{what}: {name}", getattr(got, name), getattr(expected, name))


def check_kernels(instruction_set: str) -> None:
    """Compare every kernel of one instruction set with the oracles on a fixed sample. Raises AssertionError."""
    with call.using(instruction_set):
        for check in _sample():
            check()


@cache
def _sample() -> list[Callable[[], None]]:
    """Checks of the kernels that are set now, with what the oracles expect: computed once, used for every mutant."""
    rng = np.random.default_rng(0)
    hypers = (
        Hyper(weight_decay=0.1, grad_scale=0.3, step=3),
        Hyper(beta1=0.3, beta2=0.95, eps_root=1e-12, step=2),
        Hyper(weight_decay=0.0, step=10),
    )

    def normal(n, dtype=FLOAT32, scale=1.0):
        return (scale * rng.standard_normal(n)).astype(np.float32).astype(dtype.numpy)

    checks: list[Callable[[], None]] = []

    def same(what, kernel, oracle, *args, **kind):
        expected = oracle(*args, **kind)
        checks.append(lambda: assert_same_bits(what, kernel(*args, **kind), expected))

    def same_state(what, state, hyper, **kind):
        scalars, expected = hyper.scalars(kind["op_order"]), adam(state, hyper, **kind)
        checks.append(lambda: assert_same_state(what, call.adam([state], [scalars], **kind)[0], expected))

    def same_sum(values):
        what, expected = f"sum of {values.size} squares of {values.dtype}", sum_of_squares(values)

        def check():
            total = call.sum_of_squares(values)
            assert total.finite, f"{what}: found an inf or a NaN, there is none"
            difference = total.exact() - expected
            assert difference == 0, f"{what} is off by {float(difference)}"

        checks.append(check)

    for n in (0, 1, 7, 8, 9, 16, 17, 33, 100):
        for case in range(len(hypers) * len(DTYPES) * 4):
            hyper, grad_dtype = hypers[case % 3], DTYPES[case // 3 % 3]
            kind = {
                "op_order": ("torch", "optax")[case // 9 % 2],
                "adam_mode": ("adamw", "adam")[case // 18],
                "param_dtype": (FLOAT32, BFLOAT16, FLOAT16, None)[(case + n) % 4],
                "keep_states": (case + n) % 4 != 3 and case % 5 == 0,
            }
            state = call.AdamState(normal(n, grad_dtype), normal(n), normal(n, scale=0.1), normal(n) ** 2)
            same_state(f"adam of {n} with {hyper}, {kind}", state, hyper, **kind)
        for dtype in DTYPES:
            src, dst = normal(n, dtype), normal(n)
            same(f"accumulate of {n} {dtype}", call.accumulate, accumulate, src, dst)
            parts = [normal(n, dtype) for _ in range(3)]
            if n:
                for kind in ({"divisor": 3.0, "add": True}, {"divisor": 1.0, "add": False}):
                    same(f"reduction of {n} {dtype}, {kind}", call.reduce, reduce, parts, dst, **kind)
            for to in DTYPES:
                # halfway between two halves as often as not, so that the direction of a tie shows
                ties = (src.view(f"u{dtype.itemsize}") | (0x9000 if dtype is FLOAT32 else 0)).view(src.dtype)
                for values in (src, ties):
                    same(f"cast of {n} {dtype} to {to}", call.cast, cast, values, to)
    for n in (1, 5, 8, 2048, 2051, 5000):
        wide = np.exp2(rng.uniform(-140, 120, n)).astype(np.float32)
        narrow, between = normal(n), np.exp2(rng.uniform(-20, 0, n)).astype(np.float32)
        bf16s = [values.astype(ml_dtypes.bfloat16) for values in (wide, narrow, between)]
        for values in (wide, narrow, between, *bf16s, narrow.astype(np.float16)):
            same_sum(values)
    return checks
