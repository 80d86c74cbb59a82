"""The kernels' results, computed another way: NumPy and exact rationals. No line is shared with ``c_src``."""

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import ClassVar

import ml_dtypes
import numpy as np

from offload_core.dtypes import BFLOAT16, BY_NAME, FLOAT16, FLOAT32, ElementType
from offload_core.native.kernels import SCALARS
from offload_core.prove.definition import fma
from tests.support import kernel_calls as call

DTYPES = tuple(BY_NAME.values())
Arrays = tuple[np.ndarray, ...]


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


class Step:
    """The hyperparameters of one update, in double, and what the update does with them."""

    family: ClassVar[str]
    grad_scale: float
    step: int
    n_moments: int
    """Of the update: others it does not touch."""
    signs: ClassVar[tuple[bool, ...]] = (True, False)
    """For each moment, those that it does not touch included: False if its values are never negative."""

    def values(self, order: str) -> list[float]:
        """The values of the kernel's scalars."""
        raise NotImplementedError

    def arrays(self, g: np.ndarray, p: np.ndarray, moments: Arrays, order: str) -> tuple[np.ndarray, Arrays]:
        """The new master and moments, by the definition in docs/numerics.md. ``g`` is scaled; all are fp32."""
        raise NotImplementedError

    def scalars(self, rule: str) -> np.ndarray:
        """The kernel's scalars (one record of ``SCALARS``), which it rounds."""
        family, _, order = rule.partition("_")
        assert family == self.family
        values = self.values(order)
        record = np.zeros(1, SCALARS)
        record["grad_scale"], record["update"] = self.grad_scale, self.step
        record["values"][0, : len(values)] = values
        return record


@dataclass(frozen=True)
class Adam(Step):
    """AdamW, or Adam with L2 (``mode="adam"``)."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    eps_root: float = 0.0
    weight_decay: float = 0.1
    grad_scale: float = 1.0
    step: int = 1
    mode: str = "adamw"
    family = "adam"
    n_moments = 2

    def values(self, order: str) -> list[float]:
        unbias1, unbias2 = 1 - self.beta1**self.step, 1 - self.beta2**self.step
        torch, adamw = order == "torch", self.mode == "adamw"
        return [
            0.0 if adamw else self.weight_decay,
            self.weight_decay if adamw else 0.0,
            _LIBM.fma(-self.lr, self.weight_decay, 1.0) if adamw else 1.0,
            self.beta1,
            self.beta2,
            1 - self.beta1,
            1 - self.beta2,
            unbias1,
            math.sqrt(unbias2) if torch else unbias2,
            self.eps,
            self.eps_root,
            -self.lr / unbias1 if torch else -self.lr,
        ]

    def arrays(self, g: np.ndarray, p: np.ndarray, moments: Arrays, order: str) -> tuple[np.ndarray, Arrays]:
        l2, decoupled, decay, b1, b2, w1, w2, c1, c2, eps, eps_root, step_size = map(np.float32, self.values(order))
        m, v = moments
        if order == "torch":
            if l2 != 0:
                g = fma(p, l2, g)
            p = p * decay
            m = fma(w1, g - m, m) if w1 < 0.5 else fma(w1 - np.float32(1), g - m, g)
            v = fma(w2 * g, g, v * b2)
            return p + (step_size * m) / (np.sqrt(v) / c2 + eps), (m, v)
        if l2 != 0:
            g = g + l2 * p
        m = w1 * g + b1 * m
        v = w2 * (g * g) + b2 * v
        u = (m / c1) / (np.sqrt(v / c2 + eps_root) + eps)
        if decoupled != 0:
            u = u + decoupled * p
        return p + u * step_size, (m, v)


@dataclass(frozen=True)
class Sgd(Step):
    """SGD. ``dampening`` and the first update's rule are torch's alone."""

    lr: float = 1e-2
    momentum: float = 0.9
    dampening: float = 0.0
    weight_decay: float = 0.1
    nesterov: bool = False
    grad_scale: float = 1.0
    step: int = 1
    family = "sgd"

    @property
    def n_moments(self) -> int:
        return int(self.momentum != 0)

    def values(self, order: str) -> list[float]:
        return [self.lr, self.momentum, 1 - self.dampening, self.weight_decay, self.nesterov, self.step == 1]

    def arrays(self, g: np.ndarray, p: np.ndarray, moments: Arrays, order: str) -> tuple[np.ndarray, Arrays]:
        lr, momentum, undamped, weight_decay = map(np.float32, self.values(order)[:4])
        torch = order == "torch"

        def plus_product(x, a, b):
            return fma(a, b, x) if torch else x + a * b

        if weight_decay != 0:
            g = plus_product(g, p, weight_decay)
        if self.n_moments:
            m = moments[0]
            if not torch:
                m = g + momentum * m
            else:
                m = g if self.step == 1 else fma(g, undamped, m * momentum)
            moments = (m, *moments[1:])
            g = plus_product(g, m, momentum) if self.nesterov else m
        return plus_product(p, g, -lr), moments


@dataclass(frozen=True)
class Lion(Step):
    """Lion, the same in both orders."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.1
    grad_scale: float = 1.0
    step: int = 1
    family = "lion"
    n_moments = 1

    def values(self, order: str) -> list[float]:
        return [self.lr, self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2, self.weight_decay]

    def arrays(self, g: np.ndarray, p: np.ndarray, moments: Arrays, order: str) -> tuple[np.ndarray, Arrays]:
        lr, b1, w1, b2, w2, decay = map(np.float32, self.values(order))
        m, *others = moments
        mixed = b1 * m + w1 * g
        update = np.where(mixed == 0, mixed, np.sign(mixed))  # np.sign(-0.0) is 0
        if decay != 0:
            update = update + decay * p
        return p - lr * update, (b2 * m + w2 * g, *others)


@dataclass(frozen=True)
class Adagrad(Step):
    """Adagrad. ``lr_decay`` is torch's alone."""

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.1
    eps: float = 1e-10
    grad_scale: float = 1.0
    step: int = 1
    family = "adagrad"
    n_moments = 1
    signs = (False, False)

    def values(self, order: str) -> list[float]:
        return [self.lr / (1 + (self.step - 1) * self.lr_decay), self.eps, self.weight_decay]

    def arrays(self, g: np.ndarray, p: np.ndarray, moments: Arrays, order: str) -> tuple[np.ndarray, Arrays]:
        lr, eps, decay = map(np.float32, self.values(order))
        total, *others = moments
        if order == "torch":
            g = fma(p, decay, g) if decay != 0 else g
            total = fma(g, g, total)
            return p - (lr * g) / (np.sqrt(total) + eps), (total, *others)
        g = g + decay * p if decay != 0 else g
        total = g * g + total
        inverse = np.where(total == 0, np.float32(0), np.float32(1) / np.sqrt(total + eps))
        return p - lr * (inverse * g), (total, *others)


@dataclass(frozen=True)
class Muon(Step):
    """The second pass of Muon. What the device made of the directions is its second moment, which stays as it is."""

    lr: float = 1e-2
    momentum: float = 0.95
    weight_decay: float = 0.1
    nesterov: bool = True
    adjustment: float = 1.0
    grad_scale: float = 1.0
    step: int = 1
    adds: bool = False
    """True in optax's order of operations: the step is a number that is added to the parameter."""
    family = "muon"
    n_moments = 2
    signs = (True, True)

    def values(self, order: str) -> list[float]:
        decay, step_size = (not self.adds) - self.lr * self.weight_decay, -self.lr * self.adjustment
        return [self.momentum, 1 - self.momentum, self.nesterov, decay, step_size, self.adds]

    def arrays(self, g: np.ndarray, p: np.ndarray, moments: Arrays, order: str) -> tuple[np.ndarray, Arrays]:
        _, rest, _, decay, step_size, _ = map(np.float32, self.values(order))
        step = fma(moments[1], step_size, p * decay)
        return (p + step if self.adds else step), (_lerp(moments[0], g, rest), *moments[1:])


class MuonDirection(Muon):
    """The first pass: the direction of the step in place of the parameter."""

    family = "direction"
    n_moments = 1

    def arrays(self, g: np.ndarray, p: np.ndarray, moments: Arrays, order: str) -> tuple[np.ndarray, Arrays]:
        momentum, rest = map(np.float32, self.values(order)[:2])
        m = _lerp(moments[0], g, rest)
        return (_lerp(g, m, momentum) if self.nesterov else m), (m, *moments[1:])


def _lerp(start: np.ndarray, end: np.ndarray, weight: np.float32) -> np.ndarray:
    """``torch.lerp``."""
    if weight < 0.5:
        return fma(weight, end - start, start)
    return fma(weight - np.float32(1), end - start, end)


def update(
    state: call.State, step: Step, *, rule: str, param_dtype: ElementType | None, keep_states: bool = False
) -> call.State:
    """The state after one step, by the definition in docs/numerics.md."""
    with np.errstate(all="ignore"):
        g, p, *moments = (x.astype(np.float32) for x in (state.grad, state.master, *state.moments))
        if np.float32(step.grad_scale) != 1:
            g = g * np.float32(step.grad_scale)
        p, after = step.arrays(g, p, tuple(moments), rule.partition("_")[2])
        param = None if param_dtype is None else p.astype(param_dtype.numpy)
    return replace(state, param=param) if keep_states else call.State(state.grad, p, after, param)


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


def assert_same_state(what: str, got: call.State, expected: call.State) -> None:
    """``assert_same_bits`` of each array of two states."""
    for name in ("grad", "master", "param"):
        if getattr(expected, name) is not None:
            assert_same_bits(f"{what}: {name}", getattr(got, name), getattr(expected, name))
    for i, (ours, theirs) in enumerate(zip(got.moments, expected.moments, strict=True)):
        assert_same_bits(f"{what}: moment {i}", ours, theirs)


def check_kernels(instruction_set: str) -> None:
    """Compare every kernel of one instruction set with the oracles on a fixed sample. Raises AssertionError."""
    with call.using(instruction_set):
        for check in _sample():
            check()


@cache
def _sample() -> list[Callable[[], None]]:
    """Checks of the kernels that are set now, with what the oracles expect: computed once, used for every mutant."""
    rng = np.random.default_rng(0)
    adams = (
        Adam(weight_decay=0.1, grad_scale=0.3, step=3),
        Adam(beta1=0.3, beta2=0.95, eps_root=1e-12, step=2),
        Adam(weight_decay=0.0, step=10),
    )
    sgds = (
        Sgd(dampening=0.5, grad_scale=0.3, step=3),
        Sgd(nesterov=True, step=3),
        Sgd(dampening=0.5, weight_decay=0.0, step=1),
        Sgd(momentum=0.0, step=2),
    )

    def normal(n, dtype=FLOAT32, scale=1.0):
        return (scale * rng.standard_normal(n)).astype(np.float32).astype(dtype.numpy)

    lions = (Lion(grad_scale=0.3), Lion(weight_decay=0.0), Lion(beta1=0.0, beta2=0.5))
    muons = (
        {"grad_scale": 0.3, "adds": True},
        {"momentum": 0.3, "adjustment": 1.5},
        {"nesterov": False, "weight_decay": 0.0},
    )
    adagrads = (Adagrad(grad_scale=0.3, lr_decay=0.1, step=3), Adagrad(weight_decay=0.0, eps=0.0), Adagrad(eps=1e-2))
    checks: list[Callable[[], None]] = []

    def same(what, kernel, oracle, *args, **kind):
        expected = oracle(*args, **kind)
        checks.append(lambda: assert_same_bits(what, kernel(*args, **kind), expected))

    def same_state(n, grad_dtype, step, *, zeros=False, **kind):
        state = call.State(normal(n, grad_dtype), normal(n), (normal(n, scale=0.1), normal(n) ** 2))
        for array in (state.grad, *state.moments) if zeros else ():
            array[::3] = 0
        scalars, expected = step.scalars(kind["rule"]), update(state, step, **kind)
        what = f"update of {n} {grad_dtype} with {step}, {kind}"
        checks.append(lambda: assert_same_state(what, call.update([state], [scalars], **kind)[0], expected))

    def same_sum(values):
        what, expected = f"sum of {values.size} squares of {values.dtype}", sum_of_squares(values)

        def check():
            total = call.sum_of_squares(values)
            assert total.finite, f"{what}: found an inf or a NaN, there is none"
            difference = total.exact() - expected
            assert difference == 0, f"{what} is off by {float(difference)}"

        checks.append(check)

    for n in (0, 1, 7, 8, 9, 16, 17, 33, 100):
        for case in range(len(adams) * len(DTYPES) * 4):
            kind = {
                "rule": ("adam_torch", "adam_optax")[case // 9 % 2],
                "param_dtype": (FLOAT32, BFLOAT16, FLOAT16, None)[(case + n) % 4],
                "keep_states": (case + n) % 4 != 3 and case % 5 == 0,
            }
            step = replace(adams[case % 3], mode=("adamw", "adam")[case // 18])
            same_state(n, DTYPES[case // 3 % 3], step, **kind)
        for case in range(len(sgds) * len(DTYPES) * 2):
            kind = {
                "rule": ("sgd_torch", "sgd_optax")[case // 4 % 2],
                "param_dtype": (FLOAT32, BFLOAT16, FLOAT16, None)[(case // 4 + n) % 4],
                "keep_states": False,
            }
            same_state(n, DTYPES[case // 8], sgds[case % 4], **kind)
        for case in range(9):
            dtype, param_dtype = DTYPES[case % 3], (FLOAT32, BFLOAT16, FLOAT16, None)[(case + n) % 4]
            kind = {"param_dtype": param_dtype, "keep_states": False, "zeros": case > 2}
            same_state(n, dtype, lions[case // 3], rule="lion", **kind)
            same_state(n, dtype, Muon(**muons[case // 3]), rule="muon", **kind)
            same_state(n, dtype, MuonDirection(**muons[case // 3]), rule="direction_muon", **kind)
            for rule in ("adagrad_torch", "adagrad_optax"):
                same_state(n, dtype, adagrads[case // 3], rule=rule, **kind)
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
