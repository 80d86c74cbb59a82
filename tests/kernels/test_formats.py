"""Laws of the narrow formats of states: which bits an update leaves, and that rounding is fair."""

from dataclasses import replace
from itertools import combinations, pairwise, product

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from offload_core.dtypes import BFLOAT16, FLOAT16, FLOAT32
from offload_core.errors import KernelError
from offload_core.native import kernels
from tests.support import kernel_calls as call
from tests.support import oracles
from tests.support import state_formats as formats
from tests.support import strategies as our
from tests.support.kernel_calls import INSTRUCTION_SETS, State
from tests.support.state_formats import BLOCK, MASTERS, MOMENTS, STATES

lengths = st.one_of(our.lengths, st.sampled_from([255, 256, 257, 511, 513]))
state_formats = st.tuples(*map(st.sampled_from, (MASTERS, MOMENTS, MOMENTS)))
narrow = state_formats.filter(lambda names: names != ("float32",) * 3)
seeds = st.integers(0, 2**64 - 1)


@st.composite
def updates(draw, of_length=lengths, of_formats=narrow) -> formats.Update:
    """An update of values of every kind, somewhere in a parameter."""
    names = draw(of_formats)
    start = draw(
        st.sampled_from([0, 256, 2560, 2**40]) if "float8" in names else st.sampled_from([0, 1, 203, 255, 257])
    )
    return formats.update_of(draw(our.states(of_length)), names, start=start, seed=draw(seeds))


def cut_at(update: formats.Update, places: list[int]) -> list[slice]:
    """The update in parts, at these places, or the blocks' ends before them where blocks have scales."""
    blocks = any(state.format == "float8" for state in update.states)
    edges = {0, update.grad.size, *(min(i // BLOCK * BLOCK if blocks else i, update.grad.size) for i in places)}
    return [slice(a, b) for a, b in pairwise(sorted(edges))]


# --- an update ----------------------------------------------------------------------------------------


@pytest.mark.draws(1)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@our.law(150)
@given(updates(), our.steps())
def test_every_instruction_set_equals_the_numpy_oracle(instruction_set, update, case):
    step, kind = case
    update = update.of(step)
    with call.using(instruction_set):
        [got] = formats.run([update], step.scalars(kind["rule"]), **kind)
    formats.assert_same_update(f"{instruction_set}, {step}, {kind}", got, formats.expected(update, step, **kind))


@our.law()
@given(updates(), our.steps(), st.lists(st.integers(0, 4100), max_size=5), st.data())
def test_a_cut_anywhere_changes_no_bits(update, case, places, data):
    step, kind = case
    update, scalars = update.of(step), step.scalars(kind["rule"])
    [whole] = formats.run([update], scalars, **kind)
    parts = data.draw(st.permutations(cut_at(update, places)))
    for part, got in zip(parts, formats.run([update[p] for p in parts], scalars, **kind) if parts else [], strict=True):
        formats.assert_same_update(f"{part}", got, whole[part])


@our.law(15)
@given(updates(our.long_lengths), our.steps(), st.integers(2, 9))
def test_thread_count_changes_no_bits(update, case, threads):
    step, kind = case
    update, scalars = update.of(step), step.scalars(kind["rule"])
    [one] = formats.run([update], scalars, **kind)
    [many] = formats.run([update], scalars, **kind, threads=threads)
    formats.assert_same_update(f"{threads} threads", many, one)


@our.law()
@given(updates(), our.steps(), st.lists(our.offsets, min_size=5, max_size=5))
def test_alignment_changes_no_bits(update, case, offsets):
    step, kind = case
    update, scalars = update.of(step), step.scalars(kind["rule"])
    [aligned] = formats.run([update], scalars, **kind)
    [misaligned] = formats.run([update], scalars, **kind, offsets=offsets)
    formats.assert_same_update(f"offsets {offsets}", misaligned, aligned)


@our.law()
@given(updates(of_formats=narrow.filter(lambda names: names[0] != "float32")), our.steps())
def test_a_parameter_in_its_masters_memory_changes_no_bits(update, case):
    step, kind = case
    update, kind = update.of(step), {"rule": kind["rule"], "param_dtype": BFLOAT16}
    [apart] = formats.run([update], step.scalars(kind["rule"]), **kind)
    [shared] = formats.run([update], step.scalars(kind["rule"]), **kind, shared=True)
    formats.assert_same_update("shared", shared, apart)


@our.law()
@given(updates(), our.steps(), our.element_types)
def test_an_early_parameter_has_the_bits_of_the_update_that_follows(update, case, param_dtype):
    step, kind = case
    update, kind = update.of(step), {"rule": kind["rule"], "param_dtype": param_dtype}
    [early] = formats.run([update], step.scalars(kind["rule"]), **kind, keep_states=True)
    [late] = formats.run([update], step.scalars(kind["rule"]), **kind)
    formats.assert_same_update("states", early, replace(update, param=None))
    oracles.assert_same_bits("param", early.param, late.param)


ties = st.integers(0, 2**16 - 1).map(lambda upper: upper << 16 | 0x8000)


@pytest.mark.draws(1)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@our.law()
@given(our.states(lengths), st.lists(ties, max_size=9), our.steps(), our.offsets)
@example(
    State(*np.zeros((2, 40), np.float32), tuple(np.zeros((2, 40), np.float32))),
    [0x3F808000, 0x3F818000, 0x7F7F8000, 0x8000],
    (oracles.Adam(lr=0.0), {"rule": "adam_torch"}),
    0,
)
def test_split_masters_have_every_bit_of_whole_ones(instruction_set, state, halves, case, offset):
    master = state.master.copy()
    master.view(np.uint32)[: len(halves)] = halves[: master.size]
    state = replace(state, master=master)
    step, kind = case
    kind = {"rule": kind["rule"], "param_dtype": BFLOAT16, "offsets": (offset,) * 5}
    split, whole = (formats.update_of(state, (name, "float32", "float32")) for name in ("split", "float32"))
    for _ in range(3):
        with call.using(instruction_set):
            [split] = formats.run([split], step.scalars(kind["rule"]), **kind)
            [whole] = formats.run([whole], step.scalars(kind["rule"]), **kind)
        oracles.assert_same_bits("master", formats.kernel_decode(split.master), whole.master.data)
        for name, ours, theirs in zip(STATES[1:], split.states[1:], whole.states[1:], strict=True):
            oracles.assert_same_bits(name, ours.data, theirs.data)
        oracles.assert_same_bits("param", split.param, whole.param)


@pytest.mark.draws(1)
@pytest.mark.parametrize("names", [("split", "float32", "float32"), ("bfloat16", "float8", "float8")], ids="-".join)
def test_streaming_stores_change_no_bits(names, drawn):
    """One large call streams the parameter; small calls do not."""
    n = (8 << 20) + 512
    rng = np.random.default_rng(0)
    grad, master, first, second = (np.resize(rng.standard_normal(4099).astype(np.float32), n) for _ in range(4))
    state = State(grad, master, (first, np.abs(second)))
    update = formats.update_of(state, names, encode=formats.kernel_encode)
    updates = (
        *((oracles.Adam(), "adam_torch", dtype) for dtype in (BFLOAT16, FLOAT16, None)),
        (oracles.Sgd(), "sgd_torch", BFLOAT16),
    )
    for step, rule, param_dtype in drawn(updates, 1):
        kind = {"rule": rule, "param_dtype": param_dtype}
        [large] = formats.run([update], step.scalars(rule), **kind, threads=2)
        for part in (slice(0, 1 << 20), slice(n - (1 << 20), n)):
            [small] = formats.run([update[part]], step.scalars(rule), **kind)
            formats.assert_same_update(f"{rule}, {param_dtype}, {part}", large[part], small)


# --- conversions ----------------------------------------------------------------------------------------

signed = st.booleans()
values = lengths.flatmap(lambda n: our.float_arrays(FLOAT32, n))


@our.law(150)
@given(st.sampled_from(sorted(kernels.FORMATS)), values, signed, st.integers(1, 3))
def test_conversions_equal_the_numpy_oracle(name, values, has_sign, threads):
    got = formats.kernel_encode(name, values, has_sign=has_sign, threads=threads)
    formats.assert_same("encoded", got, formats.encode(name, values, has_sign=has_sign))
    oracles.assert_same_bits("decoded", formats.kernel_decode(got, threads=threads), formats.decode(got))


@our.law(150)
@given(st.sampled_from(sorted(kernels.FORMATS)), values, signed, st.none() | st.integers(0, 2**32 - 1))
def test_a_state_that_is_decoded_and_encoded_has_the_same_values(name, values, has_sign, seed):
    """However it was rounded; but an infinity makes its whole block one that is not finite."""
    width = 20 if name == "float8" else 16
    random = None if seed is None else np.random.default_rng(seed).integers(0, 2**width, values.size)
    decoded = formats.kernel_decode(formats.encode(name, values, has_sign=has_sign, random=random))
    again = formats.kernel_decode(formats.kernel_encode(name, decoded, has_sign=has_sign))
    kept = np.ones(values.size, bool)
    for start in range(0, values.size if name == "float8" else 0, BLOCK):
        kept[start : start + BLOCK] = np.isfinite(decoded[start : start + BLOCK]).all()
    oracles.assert_same_bits("decoded twice", again[kept], decoded[kept])
    assert not np.isfinite(again[~kept]).any()


@our.law(150)
@given(values)
def test_split_loses_nothing_but_the_payload_of_a_nan(values):
    split = formats.kernel_encode("split", values)
    oracles.assert_same_bits("joined", formats.kernel_decode(split), values)
    oracles.assert_same_bits("high", split.high, oracles.cast(values, BFLOAT16))


@our.law(150)
@given(lengths.flatmap(lambda n: our.float_arrays(FLOAT32, n, finite=True)), signed)
def test_eight_bits_are_right_to_a_sixteenth_or_half_a_step_of_the_blocks_least(values, has_sign):
    encoded = formats.kernel_encode("float8", values, has_sign=has_sign)
    exact = values.astype(np.float64) if has_sign else np.abs(values.astype(np.float64))
    got = formats.kernel_decode(encoded).astype(np.float64)
    step = np.repeat(np.ldexp(1.0, encoded.scales.astype(int) - (14 if has_sign else 30) - 2 - 127), BLOCK)[
        : exact.size
    ]
    finite = np.isfinite(got)  # the largest floats round to infinity, as in bf16
    assert (np.abs(got - exact)[finite] <= np.maximum(np.abs(exact) / 16, step / 2)[finite]).all()
    assert (np.abs(exact[~finite]) > 1.9 * 2.0**127).all()


def test_every_bf16_parameter_with_a_zero_half_is_its_own_master():
    high = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    n = high.size
    state = formats.Stored("split", np.zeros(n, np.uint16), high=high, ties=np.zeros(n, bool))
    bits = formats.kernel_decode(state).view(np.uint32)
    assert (bits == np.arange(2**16, dtype=np.uint32) << 16).all()


@pytest.mark.parametrize("name", sorted(kernels.FORMATS))
@pytest.mark.parametrize("has_sign", [True, False])
def test_memory_of_zeros_is_a_state_of_zeros(name, has_sign):
    zeros = formats.encode(name, np.zeros(300, np.float32), has_sign=has_sign)
    zeros = replace(zeros, scales=None if zeros.scales is None else np.zeros_like(zeros.scales))
    oracles.assert_same_bits("decoded", formats.kernel_decode(zeros), np.zeros(300, np.float32))


# --- rounding is fair -----------------------------------------------------------------------------------

FAIR = [("bfloat16", "bfloat16", "bfloat16"), ("bfloat16", "float8", "float8"), ("split", "float8", "bfloat16")]


def deviations(names: tuple[str, ...], n: int, times: int) -> dict[str, float]:
    """In standard errors, the mean of rounded minus exact of each state, over elements and update numbers."""
    rng = np.random.default_rng(1)
    grad, master, first, second = (
        (rng.standard_normal(n) * np.exp(rng.uniform(-6, 0, n))).astype(np.float32) for _ in range(4)
    )
    update = formats.update_of(State(grad, master, (first, second**2)), names, seed=5)
    step = oracles.Adam()
    scalars = step.scalars("adam_torch")
    kind = {"rule": "adam_torch", "param_dtype": None}
    exact = oracles.update(update.decoded(), step, **kind)
    references = dict(zip(STATES, (exact.master, *exact.moments), strict=True))
    sums = {f"{name}, {of}": np.zeros(2) for name in STATES for of in ("absolute", "relative")}
    for number in range(times):
        scalars["update"] = number + 1
        [after] = formats.run([update], scalars, **kind, threads=2)
        for name, state in zip(STATES, after.states, strict=True):
            reference = references[name].astype(np.float64)
            error = formats.kernel_decode(state, threads=2) - reference
            for of, value in (("absolute", error), ("relative", error / np.where(reference == 0, 1, reference))):
                sums[f"{name}, {of}"] += value.sum(), (value**2).sum()
    return {name: total / np.sqrt(squares) if squares else 0.0 for name, (total, squares) in sums.items()}


@pytest.mark.parametrize("names", FAIR, ids="-".join)
def test_rounding_is_unbiased(names):
    for name, deviation in deviations(names, 2**14, 40).items():
        assert abs(deviation) < 4, f"{name}: {deviation:.1f} standard errors from 0"


@pytest.mark.slow
@pytest.mark.parametrize("names", FAIR, ids="-".join)
def test_rounding_is_unbiased_over_a_billion(names):
    for name, deviation in deviations(names, 2**20, 1000).items():
        assert abs(deviation) < 4, f"{name}: {deviation:.1f} standard errors from 0"


@pytest.mark.parametrize("name", ["bfloat16", "float8"])
def test_the_second_moment_decays_without_gradients(name):
    n, times = 2**14, 5000
    rng = np.random.default_rng(2)
    exp_avg_sq = formats.encode(name, np.exp(rng.normal(-12, 3, n)).astype(np.float32), has_sign=False)
    before = formats.decode(exp_avg_sq).astype(np.float64)
    zeros, first = np.zeros((2, n), np.float32)
    arrays = {"grad": zeros, "master": zeros.copy()}
    row = {key: array.ctypes.data for key, array in arrays.items()} | {"numel": n, "seed": 3}
    row["moments"] = [first.ctypes.data, exp_avg_sq.data.ctypes.data]
    row["scales"] = [0, 0 if exp_avg_sq.scales is None else exp_avg_sq.scales.ctypes.data]
    segments, scalars = kernels.segments_of([row]), oracles.Adam().scalars("adam_torch")
    for number in range(times):
        scalars["update"] = number + 1
        kernels.update(
            segments,
            scalars,
            rule="adam_torch",
            grad_dtype=FLOAT32,
            param_dtype=None,
            threads=1,
            moment_formats=("float32", name),
        )
    left = formats.decode(exp_avg_sq).astype(np.float64) / 0.999**times
    assert left.sum() / before.sum() == pytest.approx(1, abs=0.05)
    typical = (before > np.median(before) / 4) & (before < np.median(before) * 4)
    assert left[typical].sum() / before[typical].sum() == pytest.approx(1, abs=0.05)


# --- the random bits themselves -------------------------------------------------------------------------


def fields(update: int) -> dict[str, np.ndarray]:
    """Return the random values that round each state, as fractions of one, of 2^12 blocks of a parameter."""
    bits = formats.random_bits(11, update, 0, 2**20)
    return {
        f"{STATES[i]} in {name}": formats.random_of(i, name, bits) / 2.0 ** (20 if name == "float8" else 16)
        for i, name in ((0, "bfloat16"), *product((1, 2), ("bfloat16", "float8")))
    }


def chi_square(counts: np.ndarray) -> float:
    """In standard deviations, how far counts of equally likely events are from equal."""
    likely = counts.sum() / counts.size
    return (((counts - likely) ** 2 / likely).sum() - (counts.size - 1)) / np.sqrt(2 * (counts.size - 1))


def joint(a: np.ndarray, b: np.ndarray) -> float:
    return chi_square(np.bincount((a * 16).astype(int) * 16 + (b * 16).astype(int), minlength=256))


def test_random_bits_are_even_and_independent():
    now, then = fields(7), fields(8)
    for name, x in now.items():
        assert abs(chi_square(np.bincount((x * 1024).astype(int), minlength=1024))) < 5, name
        for lag in (1, 2, 3, 4, 8, 16, 64, 128, BLOCK):
            assert abs(joint(x[:-lag], x[lag:])) < 5, f"{name}, {lag} apart"
        assert abs(joint(x, then[name])) < 5, f"{name}, two updates"
        for share in (0.01, 0.5):  # elements of a block that are rounded up: as many as of coins
            ups = (x.reshape(-1, BLOCK) < share).sum(axis=1)
            spread = ups.var() / (BLOCK * share * (1 - share))
            assert abs(spread - 1) < 5 * np.sqrt(2 / ups.size), f"{name}, {share}"
    for other in ("bfloat16", "float8"):
        for first, second in combinations(STATES, 2):
            pair = [now[f"{state} in {'bfloat16' if state == 'master' else other}"] for state in (first, second)]
            assert abs(joint(*pair)) < 5, f"{first} and {second} in {other}"


# --- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "damage"),
    [
        (("split", "float32", "float32"), {"high": 0}),
        (("split", "float32", "float32"), {"ties": 0}),
        (("float32", "float8", "float32"), {"scales": [0, 1]}),
        (("float32", "float32", "float8"), {"scales": [1, 0]}),
        (("float32", "float8", "float32"), {"start": 255}),
        (("float32", "float32", "float8"), {"start": -256}),
        (("float8", "float32", "float32"), {}),
        (("float32", "split", "float32"), {}),
    ],
    ids=str,
)
def test_a_bad_segment_is_refused_and_nothing_is_written(names, damage):
    x = np.ones(64, np.float32)
    row = row_in(x)
    with pytest.raises(KernelError, match="oc_update failed: an argument is out of range or a pointer is null"):
        refused_call(row | damage, names)
    assert (x == 1).all()


@pytest.mark.parametrize("names", [("split", "float32", "float32"), ("bfloat16", "float32", "float32")], ids="-".join)
@pytest.mark.parametrize("kind", [{"keep_states": True}, {"param_dtype": FLOAT16}], ids=str)
def test_a_parameter_in_its_masters_memory_is_its_master_alone(names, kind):
    """Written without its master, or as another type, it would be a master that never was."""
    x = np.ones(64, np.float32)
    row = row_in(x)
    with pytest.raises(KernelError, match="oc_update failed"):
        refused_call(row | {"param": row["high" if names[0] == "split" else "master"]}, names, **kind)
    assert (x == 1).all()


def row_in(x: np.ndarray) -> dict:
    """A segment of one element, each of whose arrays begins at another place of ``x``."""
    grad, master, first, second, param, high, ties, *scales = (x[4 * i :].ctypes.data for i in range(9))
    named = {"grad": grad, "master": master, "param": param, "high": high, "ties": ties}
    return named | {"moments": [first, second], "scales": scales, "numel": 1}


def refused_call(row: dict, names: tuple[str, ...], *, param_dtype=BFLOAT16, keep_states=False) -> None:
    kernels.update(
        kernels.segments_of([row]),
        oracles.Adam().scalars("adam_torch"),
        rule="adam_torch",
        grad_dtype=FLOAT32,
        param_dtype=param_dtype,
        threads=1,
        keep_states=keep_states,
        master_format=names[0],
        moment_formats=names[1:],
    )
