"""Vectors from a hash, and the bits that the kernels make of them, on every platform and with every instruction set."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from offload_core.dtypes import BFLOAT16, BY_NAME
from offload_core.native.kernels import SCALARS
from offload_core.rules.adam import Adam, AdamHyper
from tests.support.kernel_calls import (
    State,
    accumulate,
    cast,
    reduce,
    sum_of_squares,
    update,
    using,
)
from tests.support.oracles import Adagrad, Lion, Sgd

BITS = "456f573b58d216902e00d71593fa2bb81c87a508d37b8f2731cdd7700c7c05fc"
"""SHA-256 of what the kernels make of the pinned vector, on every platform and with every instruction set."""
NUMEL = 1003
STEPS = 3


def pinned(label: str, numel: int, *, exponents: range, positive: bool = False) -> np.ndarray:
    """Float32s from a hash, so that neither NumPy's version nor the platform's libm has a part in them."""
    raw = np.frombuffer(hashlib.shake_128(label.encode()).digest(4 * numel), "<u4")
    exponent = 127 + exponents.start + (raw >> 23 & 255) % len(exponents)
    return (raw & (0x7FFFFF if positive else 0x807FFFFF) | exponent << 23).astype(np.uint32).view(np.float32)


def cases() -> Iterator[tuple[dict, State, list[np.ndarray]]]:
    """For each kind of update: the arguments of ``kernel_calls.update``, a state, and the scalars of its steps."""
    state = State(
        pinned("grad", NUMEL, exponents=range(-20, 4)),
        pinned("master", NUMEL, exponents=range(-10, 2)),
        (
            pinned("exp_avg", NUMEL, exponents=range(-20, 1)),
            pinned("exp_avg_sq", NUMEL, exponents=range(-127, 1), positive=True),
        ),
    )
    hyper = AdamHyper(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    for op_order, adam_mode, grad_dtype, param_dtype in product(
        ("torch", "optax"), ("adamw", "adam"), BY_NAME.values(), (*BY_NAME.values(), None)
    ):
        kind = {"rule": f"adam_{op_order}", "param_dtype": param_dtype}
        scalars = [
            np.array([Adam(op_order, adam_mode).scalars(hyper, t, grad_scale=0.3)], SCALARS)
            for t in range(1, STEPS + 1)
        ]
        yield kind, replace(state, grad=cast(state.grad, grad_dtype)), scalars
    for rule, momentum, nesterov, grad_dtype in product(
        ("sgd_torch", "sgd_optax"), (0.0, 0.9), (False, True), BY_NAME.values()
    ):
        steps = [Sgd(momentum=momentum, dampening=0.1, nesterov=nesterov, step=t) for t in range(1, STEPS + 1)]
        kind = {"rule": rule, "param_dtype": BFLOAT16}
        yield kind, replace(state, grad=cast(state.grad, grad_dtype)), [step.scalars(rule) for step in steps]
    positive = replace(state, moments=state.moments[::-1])
    for (rule, before, step), grad_dtype in product(
        (("lion", state, Lion()), ("adagrad_torch", positive, Adagrad()), ("adagrad_optax", positive, Adagrad())),
        BY_NAME.values(),
    ):
        scalars = [replace(step, step=t).scalars(rule) for t in range(1, STEPS + 1)]
        yield {"rule": rule, "param_dtype": BFLOAT16}, replace(before, grad=cast(state.grad, grad_dtype)), scalars


def after_steps(kind: dict, state: State, scalars: list[np.ndarray]) -> State:
    """The state after one update with each of the scalars, all with the same gradient."""
    for record in scalars:
        (state,) = update([state], [record], **kind, threads=2)
    return state


def digest(instruction_set: str) -> str:
    """Return a digest of the results of all kernels of an instruction set for the pinned vector."""
    found = hashlib.sha256()
    values = pinned("values", NUMEL, exponents=range(-30, 14))
    with using(instruction_set):
        for case in cases():
            after = after_steps(*case)
            for array in (after.master, *after.moments, after.param):
                if array is not None:
                    found.update(array.tobytes())
        for dtype in BY_NAME.values():
            narrow = cast(values, dtype)
            found.update(narrow.tobytes())
            found.update(accumulate(narrow, values).tobytes())
            found.update(reduce(np.split(narrow[:-1], 3), values[:334], divisor=3.0, add=True).tobytes())
        found.update(str(sum_of_squares(values).exact()).encode())
    return found.hexdigest()
