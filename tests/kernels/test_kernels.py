"""Laws of the C kernels, against oracles written another way (``oracles.py``)."""

import os
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, example, find, given, settings
from hypothesis import strategies as st

from offload_core.dtypes import BFLOAT16, BY_NUMPY, FLOAT16, FLOAT32, ElementType
from offload_core.errors import ConfigError, KernelError
from offload_core.native import kernels
from offload_core.native.grad_norm import SumOfSquares
from tests.support import kernel_calls as call
from tests.support import oracles
from tests.support import strategies as our
from tests.support.kernel_calls import INSTRUCTION_SETS, State

NO_PARAM = {"rule": "adam_torch", "param_dtype": None}
MAX = np.finfo(np.float32).max


def state_of(n: int, grad=0.5, master=1.0, first=0.0, second=0.0) -> State:
    grad, master, *moments = (np.full(n, x, np.float32) for x in (grad, master, first, second))
    return State(grad, master, tuple(moments))


def cut(n: int, at: list[int]) -> list[slice]:
    edges = sorted({0, n, *(min(i, n) for i in at)})
    return [slice(a, b) for a, b in pairwise(edges)]


# --- the oracles and strategies themselves ----------------------------------------------------------


@our.law(200)
@given(*[our.float_arrays(FLOAT32, 1, finite=True)] * 3)
@example(*(np.float32([x]) for x in (1 + 2**-12, 1 + 2**-12, -1)))  # cancels all but the product's last bit
@example(*(np.float32([x]) for x in (1 + 2**-23, 2**-24, 1)))  # just above a tie, which float64 alone calls a tie
@example(*(np.float32([x]) for x in (2**-75, 2**-75, 2**-149)))  # at a tie between subnormals
def test_the_oracles_fma_rounds_the_exact_rational_once(a, b, c):
    exact = Fraction(float(a[0])) * Fraction(float(b[0])) + Fraction(float(c[0]))
    got = oracles.fma(a, b, c)[0]
    assert got == oracles.round_to_float32(exact), f"fma({a[0]!r}, {b[0]!r}, {c[0]!r}) gave {got!r}"


@pytest.mark.draws(1)
@pytest.mark.parametrize(
    "kind",
    [
        np.isnan,
        np.isposinf,
        np.isneginf,
        lambda x: (x == 0) & np.signbit(x),
        lambda x: np.abs(x) > 1e38,
        lambda x: (x != 0) & (np.abs(x) < 2.0**-126),
    ],
    ids=["NaN", "+inf", "-inf", "-0", "huge", "subnormal"],
)
def test_the_float_strategy_draws_every_kind_of_float(kind):
    unlimited = settings(max_examples=5000, suppress_health_check=list(HealthCheck), database=None)
    assert kind(find(our.float_arrays(FLOAT32, 1), lambda x: bool(kind(x)[0]), settings=unlimited)[0])


# --- updates ----------------------------------------------------------------------------------------


@pytest.mark.draws(1)
@pytest.mark.quick
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@our.law(150)
@given(our.states(), our.steps())
@example(state_of(9), (oracles.Adam(beta1=0.5), NO_PARAM))  # w1 = 0.5 takes the branch of the large
@example(state_of(17, second=-1.0), (oracles.Adam(), NO_PARAM))  # the root of a negative moment
@example(state_of(9, grad=0.0, master=-0.0), (oracles.Adam(eps=0.0), NO_PARAM))  # 0 / 0
@example(state_of(9, grad=1e-45, first=1e-45, second=1e-45), (oracles.Adam(), NO_PARAM))  # subnormals throughout
@example(state_of(9, grad=MAX, first=-MAX), (oracles.Adam(), {**NO_PARAM, "rule": "adam_optax"}))  # overflows
@example(state_of(9, grad=1e-45, first=1e-45), (oracles.Sgd(step=2), {**NO_PARAM, "rule": "sgd_torch"}))
@example(state_of(9, grad=MAX, first=MAX), (oracles.Sgd(), {**NO_PARAM, "rule": "sgd_optax"}))
def test_every_instruction_set_equals_the_numpy_oracle(instruction_set, state, case):
    step, kind = case
    with call.using(instruction_set):
        [got] = call.update([state], [step.scalars(kind["rule"])], **kind)
    oracles.assert_same_state(f"{instruction_set}, {step}, {kind}", got, oracles.update(state, step, **kind))


@pytest.mark.quick
@our.law()
@given(our.states(), our.steps(), st.lists(st.integers(0, 4100), max_size=5), st.data())
def test_a_cut_anywhere_changes_no_bits(state, case, at, data):
    step, kind = case
    scalars = [step.scalars(kind["rule"])]
    parts = data.draw(st.permutations(cut(state.master.size, at)))
    [whole] = call.update([state], scalars, **kind)
    for part, got in zip(parts, call.update([state[p] for p in parts], scalars, **kind), strict=True):
        oracles.assert_same_state(f"{part}", got, whole[part])


@pytest.mark.quick
@our.law(15)
@given(our.states(our.long_lengths), our.steps(), st.integers(2, 9))
def test_thread_count_changes_no_bits(state, case, threads):
    step, kind = case
    scalars = [step.scalars(kind["rule"])]
    [one] = call.update([state], scalars, **kind)
    [many] = call.update([state], scalars, **kind, threads=threads)
    oracles.assert_same_state(f"{threads} threads", many, one)


@our.law()
@given(our.states(), our.steps(), st.lists(our.offsets, min_size=5, max_size=5))
def test_alignment_changes_no_bits(state, case, offsets):
    step, kind = case
    scalars = [step.scalars(kind["rule"])]
    [aligned] = call.update([state], scalars, **kind)
    [misaligned] = call.update([state], scalars, **kind, offsets=offsets)
    oracles.assert_same_state(f"offsets {offsets}", misaligned, aligned)


@our.law()
@given(st.lists(our.states(st.integers(0, 40)), min_size=2, max_size=4), our.steps(), st.data())
def test_segments_of_one_call_keep_to_their_own_scalars(states, case, data):
    states = [replace(s, grad=s.grad.astype(np.float32)) for s in states]
    step, kind = case
    steps = [step, *(data.draw(our.steps(kind["rule"]))[0] for _ in states[1:])]
    together = call.update(states, [s.scalars(kind["rule"]) for s in steps], **kind)
    for state, step, got in zip(states, steps, together, strict=True):
        oracles.assert_same_state(f"{step}", got, oracles.update(state, step, **kind))


@our.law()
@given(our.states(), our.steps())
def test_a_moment_that_the_rule_lacks_may_be_absent(state, case):
    step, kind = case
    few = replace(state, moments=state.moments[: step.n_moments])
    [got] = call.update([few], [step.scalars(kind["rule"])], **kind)
    expected = oracles.update(state, step, **kind)
    oracles.assert_same_state(f"{step}", got, replace(expected, moments=expected.moments[: step.n_moments]))


# --- sum of squares ---------------------------------------------------------------------------------

finite_arrays = st.tuples(our.element_types, our.lengths).flatmap(lambda t: our.float_arrays(*t, finite=True))


@pytest.mark.draws(1)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@our.law()
@given(finite_arrays)
@example(np.full(2049, MAX, np.float32))
@example(np.full(2049, 1e-45, np.float32))
@example(np.float32([MAX, 1, 1e-20, 1e-45] * 5))  # reaches into every window
@example(np.zeros(0, ml_dtypes.bfloat16))
def test_sum_of_squares_equals_exact_rationals(instruction_set, values):
    with call.using(instruction_set):
        total = call.sum_of_squares(values)
    assert total.finite
    assert total.exact() == oracles.sum_of_squares(values)


@our.law()
@given(finite_arrays, st.lists(st.integers(0, 4100), max_size=5), our.offsets, st.integers(0, 2**32))
def test_sum_of_squares_does_not_depend_on_order_or_cut(values, at, offset, seed):
    order = np.random.default_rng(seed).permutation(values.size)
    parts = [values[order][part] for part in cut(values.size, at)] or [values]
    assert call.sum_of_squares(*parts, offset=offset).exact() == call.sum_of_squares(values).exact()


@our.law()
@given(finite_arrays, st.integers(0, 4100))
def test_bins_of_ranks_add_up_to_the_bins_of_all(values, at):
    merged = SumOfSquares()
    for part in (values[:at], values[at:]):
        merged.bins += call.sum_of_squares(part).bins
    assert merged.exact() == oracles.sum_of_squares(values)


@our.law()
@given(finite_arrays)
def test_adding_goes_on_from_the_sum_so_far(values):
    total = call.sum_of_squares(values)
    total.add(kernels.spans_of([(values.ctypes.data, 0, values.size)]), BY_NUMPY[values.dtype], threads=1)
    assert total.exact() == 2 * oracles.sum_of_squares(values)


@our.law(15)
@given(our.long_lengths.flatmap(lambda n: our.float_arrays(FLOAT32, n, finite=True)), st.integers(2, 9))
def test_sum_of_squares_does_not_depend_on_thread_count(values, threads):
    assert call.sum_of_squares(values, threads=threads).exact() == oracles.sum_of_squares(values)


@pytest.mark.draws(1)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@our.law()
@given(finite_arrays.filter(len), st.sampled_from([np.nan, np.inf, -np.inf]), st.data())
def test_one_nonfinite_element_anywhere_is_found(instruction_set, values, bad, data):
    values[data.draw(st.integers(0, values.size - 1))] = bad
    with call.using(instruction_set):
        total = call.sum_of_squares(values)
    assert not total.finite
    assert np.isnan(total.norm())


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_low_digit_takes_less_than_32_bits_a_chunk(instruction_set):
    """Else the int64 bins of a few billion elements overflow."""
    values = np.float32(np.exp2(np.random.default_rng(0).uniform(-140, 120, 4 * 32768)))
    with call.using(instruction_set):
        low_digits = call.sum_of_squares(values).bins[: kernels.NORM_DIGITS - 1]
    assert (low_digits >= 0).all()
    assert (low_digits < 4 << 32).all()


@pytest.mark.draws(1)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@our.law()
@given(our.lengths.filter(bool), our.element_types, our.offsets, st.integers(1, 8), st.booleans(), st.data())
def test_a_reduction_sums_in_rank_order_in_fp32_and_divides_once(instruction_set, n, dtype, offset, ranks, add, data):
    parts = [data.draw(our.float_arrays(dtype, n)) for _ in range(ranks)]
    dst = data.draw(our.float_arrays(FLOAT32, n))
    kind = {"divisor": float(ranks), "add": add}
    with call.using(instruction_set):
        got = call.reduce(parts, dst, **kind, offset=offset, threads=1 + ranks % 3)
    oracles.assert_same_bits("reduction", got, oracles.reduce(parts, dst, **kind))


# --- accumulate and cast ----------------------------------------------------------------------------


@pytest.mark.draws(1)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@our.law()
@given(our.lengths, our.element_types, our.offsets, st.data())
def test_accumulate_adds_in_float32(instruction_set, n, dtype, offset, data):
    src, dst = data.draw(our.float_arrays(dtype, n)), data.draw(our.float_arrays(FLOAT32, n))
    with call.using(instruction_set):
        got = call.accumulate(src, dst, offset=offset)
    oracles.assert_same_bits(f"{dtype}", got, oracles.accumulate(src, dst))


@our.law(15)
@given(our.long_lengths, our.element_types, st.integers(2, 9), st.data())
def test_accumulate_and_cast_do_not_depend_on_thread_count(n, dtype, threads, data):
    src, dst = data.draw(our.float_arrays(dtype, n)), data.draw(our.float_arrays(FLOAT32, n))
    oracles.assert_same_bits("sum", call.accumulate(src, dst, threads=threads), oracles.accumulate(src, dst))
    oracles.assert_same_bits("cast", call.cast(dst, dtype, threads=threads), oracles.cast(dst, dtype))


@pytest.mark.draws(1)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@our.law()
@given(our.lengths, our.element_types, our.element_types, our.offsets, st.data())
def test_casts_equal_ml_dtypes_and_numpy(instruction_set, n, src_type, dst_type, offset, data):
    src = data.draw(our.float_arrays(src_type, n))
    with call.using(instruction_set):
        got = call.cast(src, dst_type, offset=offset)
    oracles.assert_same_bits(f"{src_type} to {dst_type}", got, oracles.cast(src, dst_type))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("half", [BFLOAT16, FLOAT16], ids=str)
def test_casts_of_every_half_and_round_every_tie_equal_ml_dtypes_and_numpy(instruction_set, half):
    halves = np.arange(1 << 16, dtype=np.uint16).view(half.numpy)
    wide = oracles.cast(halves, FLOAT32)
    with np.errstate(all="ignore"):
        ties = ((np.float64(wide[:-1]) + np.float64(wide[1:])) / 2).astype(np.float32).view(np.uint32)
    around = np.concatenate([ties + np.uint32(d % 2**32) for d in (-2, -1, 0, 1, 2)]).view(np.float32)
    with call.using(instruction_set):
        oracles.assert_same_bits("widened", call.cast(halves, FLOAT32), wide)
        oracles.assert_same_bits("rounded", call.cast(around, half), oracles.cast(around, half))


# --- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "damage"),
    [
        *(("adam_torch", {name: 0}) for name in ("grad", "master", "param")),
        *(("adam_torch", {"moments": at}) for at in ([0, 1], [1, 0])),
        *(("adam_torch", {name: -1}) for name in ("numel", "scalars")),
        ("adam_torch", {"scalars": 1}),
        ("sgd_torch", {"moments": [0, 1]}),
        ("sgd_optax", {"moments": [0, 0]}),
    ],
    ids=str,
)
def test_a_bad_segment_is_refused_and_nothing_is_written(rule, damage):
    x = np.ones(5, np.float32)
    grad, master, *moments, param = (x[i:].ctypes.data for i in range(5))
    row = {"grad": grad, "master": master, "moments": moments, "param": param, "numel": 1}
    step = oracles.Adam() if rule == "adam_torch" else oracles.Sgd()
    with pytest.raises(KernelError, match=r"oc_update failed: an argument is out of range or a pointer is null"):
        kernels.update(
            kernels.segments_of([row | damage]),
            step.scalars(rule),
            rule=rule,
            grad_dtype=FLOAT32,
            param_dtype=FLOAT32,
            threads=1,
        )
    assert (x == 1).all()


@pytest.mark.parametrize("span", [(0, 1, 1), (1, 0, 1), (1, 1, -1)], ids=["no src", "no dst", "negative numel"])
def test_a_bad_span_is_refused_and_nothing_is_written(span):
    x = np.ones(2, np.float32)
    spans = kernels.spans_of([(span[0] * x.ctypes.data, span[1] * x[1:].ctypes.data, span[2])])
    for function, refused in {
        "oc_cast": lambda: kernels.cast(spans, FLOAT32, FLOAT32, threads=1),
        "oc_accumulate": lambda: kernels.accumulate(spans, FLOAT32, threads=1),
    }.items():
        with pytest.raises(KernelError, match=f"{function} failed"):
            refused()
    assert (x == 1).all()


def test_an_unknown_element_type_is_refused():
    x = np.ones(1, np.float32)
    spans = kernels.spans_of([(x.ctypes.data, x.ctypes.data, 1)])
    unknown = ElementType("float8", 1, np.dtype(np.int8), 9)
    with pytest.raises(KernelError, match="oc_sum_squares failed"):
        kernels.sum_squares(spans, unknown, np.zeros(kernels.NORM_BINS, np.int64), threads=1)


def test_no_work_is_no_error():
    assert call.update([], [oracles.Adam().scalars("adam_torch")], **NO_PARAM) == []
    assert call.sum_of_squares(np.zeros(0, np.float32)).exact() == 0


# --- choice of instruction set ----------------------------------------------------------------------


def instruction_set_of_a_fresh_process(name: str) -> subprocess.CompletedProcess:
    program = "from offload_core.native.kernels import kernel_info; print(kernel_info().instruction_set)"
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "OFFLOAD_CORE_ISA": name},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.draws(1)
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_the_environment_chooses_the_instruction_set(name):
    assert instruction_set_of_a_fresh_process(name).stdout.strip() == name


def test_the_widest_instruction_set_is_the_default():
    assert instruction_set_of_a_fresh_process("").stdout.strip() == INSTRUCTION_SETS[-1]


@pytest.mark.draws(1)
@pytest.mark.parametrize("name", ["mmx", *(n for n in kernels.INSTRUCTION_SETS if n not in INSTRUCTION_SETS)])
def test_an_instruction_set_that_is_not_there_is_an_error_that_names_the_choices(name):
    message = f"instruction set '{name}': this processor has {', '.join(INSTRUCTION_SETS)}; choose one of them"
    done = instruction_set_of_a_fresh_process(name)
    assert done.returncode == 1
    assert f"environment variable OFFLOAD_CORE_ISA: {message}" in done.stderr
    before = kernels.kernel_info().instruction_set
    with pytest.raises(ConfigError, match=message):
        kernels.set_instruction_set(name)
    assert kernels.kernel_info().instruction_set == before
