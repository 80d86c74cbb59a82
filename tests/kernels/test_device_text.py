"""The kernels of a device: their text, run on the host by an emulated device, has the bits of the host's kernels."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.dtypes import BFLOAT16, FLOAT32
from offload_core.errors import KernelError
from offload_core.native import kernels
from offload_core.native._ffi_build import C_SRC, device_text
from offload_core.native.device_code import update_kernel
from tests.support import device_emulator as emulator
from tests.support import kernel_calls as call
from tests.support import oracles
from tests.support import state_formats as formats
from tests.support import strategies as our
from tests.support.device_emulator import TURNS, Emulated
from tests.support.state_formats import MASTERS, MOMENTS

GROUP = kernels.GROUP_BLOCKS * kernels.STATE_BLOCK
"""Elements that one group of threads updates."""
lengths = st.one_of(
    st.sampled_from([0, 1, 7, 255, 256, 257, 300, GROUP - 1, GROUP, GROUP + 1, 5000]), st.integers(0, 70)
)
turns = st.sampled_from(TURNS)


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return emulator.build(tmp_path_factory.mktemp("device"), kernels.device_text())


@pytest.fixture(scope="module")
def device(library) -> Emulated:
    return Emulated(library)


@st.composite
def updates(draw) -> list[formats.Update]:
    """Segments of one call: of the same types, and of lengths, places and values of their own."""
    names = draw(st.tuples(*map(st.sampled_from, (MASTERS, MOMENTS, MOMENTS))))
    starts = [0, 256, 2**40] if "float8" in names else [0, 1, 203, 255, 257]
    dtype, segments = draw(our.element_types), []
    for _ in range(draw(st.integers(1, 4))):
        n = draw(lengths)
        grad = draw(our.float_arrays(dtype, n))
        master, first, second = (draw(our.float_arrays(FLOAT32, n)) for _ in range(3))
        state = call.State(grad, master, (first, np.abs(second)))
        place = {"start": draw(st.sampled_from(starts)), "seed": draw(st.integers(0, 2**64 - 1))}
        segments.append(formats.update_of(state, names, **place))
    return segments


def test_the_compiled_module_has_the_text_of_the_sources():
    assert kernels.device_text() == device_text(C_SRC)


@our.law(150)
@given(updates(), our.steps(), turns, st.lists(our.offsets, min_size=5, max_size=5))
def test_a_devices_update_has_the_bits_of_the_hosts(device, segments, case, turn, offsets):
    """Of every rule, format and element type, for any order of the device's threads, and wherever segments lie."""
    step, kind = case
    segments, scalars = [segment.of(step) for segment in segments], step.scalars(kind["rule"])
    expected = formats.run(segments, scalars, **kind)
    with device.in_place_of_kernels(turn):
        got = formats.run(segments, scalars, **kind, offsets=offsets)
    for i, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        formats.assert_same_update(f"segment {i} of {step}, {kind}", ours, theirs)


@our.law(30)
@given(updates(), our.steps(), st.data())
def test_a_device_gives_each_segment_its_own_scalars(device, segments, case, data):
    step, kind = case
    rows = [data.draw(our.steps(kind["rule"]))[0].scalars(kind["rule"]) for _ in segments]
    states = [call.State(segment.grad.astype(np.float32), *plain(segment)) for segment in segments if segment.grad.size]
    expected = call.update(states, rows, **kind)
    with device.in_place_of_kernels():
        got = call.update(states, rows, **kind)
    for ours, theirs in zip(got, expected, strict=True):
        oracles.assert_same_state(f"{step}, {kind}", ours, theirs)


def plain(segment: formats.Update) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    state = segment.decoded()
    return state.master.astype(np.float32), tuple(moment.astype(np.float32) for moment in state.moments)


@our.law()
@given(updates(), our.steps())
def test_a_parameter_in_its_masters_memory_changes_no_bits_on_a_device(device, segments, case):
    step, kind = case
    segments = [s.of(step) for s in segments if s.master.format != "float32"]
    kind = {"rule": kind["rule"], "param_dtype": BFLOAT16}
    if not segments:
        return
    expected = formats.run(segments, step.scalars(kind["rule"]), **kind)
    with device.in_place_of_kernels():
        got = formats.run(segments, step.scalars(kind["rule"]), **kind, shared=True)
    for ours, theirs in zip(got, expected, strict=True):
        formats.assert_same_update("shared", ours, theirs)


arrays = st.tuples(our.element_types, st.one_of(lengths, st.just(20_000))).flatmap(lambda t: our.float_arrays(*t))


@st.composite
def parts_of_a_sum(draw) -> list[np.ndarray]:
    dtype, finite = draw(our.element_types), draw(st.booleans())
    sizes = draw(st.lists(st.sampled_from([0, 1, 300, 16385, 20_000]), max_size=3))
    return [draw(our.float_arrays(dtype, n, finite=finite)) for n in (*sizes, 1)]


@our.law()
@given(parts_of_a_sum(), turns)
def test_a_devices_sum_of_squares_is_the_hosts(device, parts, turn):
    expected = call.sum_of_squares(*parts)
    with device.in_place_of_kernels(turn):
        got = call.sum_of_squares(*parts)
    assert got.finite is expected.finite
    if expected.finite:
        assert got.exact() == expected.exact()
        assert (got.bins < 2**36).all(), "digits were not carried"


@our.law()
@given(arrays, our.element_types, our.offsets, st.sampled_from([1.0, 3.0]), st.booleans(), st.integers(1, 4))
def test_a_devices_other_kernels_have_the_bits_of_the_hosts(device, values, to, offset, divisor, add, ranks):
    def all_kernels() -> list[np.ndarray]:
        dst = np.resize(np.float32([1, -3e38, 1e-45]), values.size)
        parts = [np.roll(values, i) for i in range(ranks)]
        return [
            call.accumulate(values, dst, offset=offset),
            call.cast(values, to, offset=offset),
            *([call.reduce(parts, dst, divisor=divisor, add=add, offset=offset)] if values.size else []),
        ]

    expected = all_kernels()
    with device.in_place_of_kernels():
        got = all_kernels()
    for name, ours, theirs in zip(("accumulate", "cast", "reduce"), got, expected, strict=False):
        oracles.assert_same_bits(f"{name} of {values.size} {values.dtype}", ours, theirs)


def test_each_kind_is_compiled_once(library):
    device, state = Emulated(library), call.State(*np.ones((2, 3), np.float32), tuple(np.ones((2, 3), np.float32)))
    steps = [(oracles.Adam(), "adam_torch"), (oracles.Adam(step=7), "adam_torch"), (oracles.Lion(), "lion")]
    with device.in_place_of_kernels():
        for step, rule in steps * 2:
            call.update([state], [step.scalars(rule)], rule=rule, param_dtype=None)
    assert [types[2] for _, types in device.driver.loaded] == [kernels.RULES["adam_torch"], kernels.RULES["lion"]]


@pytest.mark.parametrize("damage", [{"master": 0}, {"scalars": 1}, {"numel": -1}], ids=str)
def test_a_device_is_not_given_what_the_host_refuses(device, damage):
    x = np.ones(4, np.float32)
    row = {"grad": x.ctypes.data, "master": x.ctypes.data, "moments": [x.ctypes.data] * 2, "numel": 1} | damage
    kind = {"grad_dtype": FLOAT32, "param_dtype": None, "rule": "adam_torch", "threads": 1}
    with (
        device.in_place_of_kernels(),
        pytest.raises(KernelError, match="oc_update failed: an argument is out of range"),
    ):
        kernels.update(kernels.segments_of([row]), oracles.Adam().scalars("adam_torch"), **kind)
    assert (x == 1).all()


def test_the_text_of_a_kernel_begins_with_its_types():
    kernel = update_kernel(kernels.kind_of(BFLOAT16, None, "lion", False, "split", ("float8",)))
    assert kernel.text() == "#define OC_UPDATE {1, 3, 4, 0, 5, {4, 0}}\n" + kernels.device_text()


# --- mutants ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """A replacement in the text, which the comparison must notice."""

    name: str
    old: str
    new: str

    def __str__(self) -> str:
        return self.name


MUTANTS = [
    Mutant("the last thread does nothing", "left = k < (n); left;", "left = k < (n) && k < 255; left;"),
    Mutant(
        "the tail is skipped", "least(numel - begin, OC_STATE_BLOCK)", "least((numel - begin) / 8 * 8, OC_STATE_BLOCK)"
    ),
    Mutant("a moment's FMA is two roundings", "fmaf(w1, difference, m)", "w1 * difference + m"),
    Mutant(
        "a product and a sum are contracted",
        "p = p + update * k[ADAM_STEP_SIZE];",
        "p = fmaf(update, k[ADAM_STEP_SIZE], p);",
    ),
    Mutant("a group ends with its first run", "place->run++;\n", "place->run++, place->group_end = 0;\n"),
    Mutant("a group does one block", "place.block + group_blocks", "place.block + 1"),
    Mutant(
        "runs are counted from the group's first block",
        "(block - first[place.run]) * OC_STATE_BLOCK;\n            update",
        "(block - place.block) * OC_STATE_BLOCK;\n            update",
    ),
    Mutant("scalars are the first's", "oc_rounded(scalars + segment.scalars)", "oc_rounded(scalars)"),
    Mutant("the largest is read before all have it", "0x7fffffff);\n    OC_BARRIER();", "0x7fffffff);\n"),
    Mutant("the largest is of the block before", "OC_ONCE largest = 0;", ""),
    Mutant(
        "the largest is reset while others read it",
        "        OC_BARRIER(); /* the next call",
        "        ; /* the next call",
    ),
    Mutant("the largest is the last thread's", "atomicMax(largest, value)", "(*(largest) = (value))"),
    Mutant("ties are gathered before all are there", "== OC_SPLIT) {\n        OC_BARRIER();", "== OC_SPLIT) {"),
    Mutant("a thread of eight writes no ties", "if (k % 8 == 0) store_ties", "if (k % 16 == 0) store_ties"),
    Mutant("a scale is not written", "OC_ONCE s->scales[begin / OC_STATE_BLOCK] = (uint8_t)scale;", ";"),
    Mutant("digits of half of the threads are lost", "half; half /= 2", "half > 1; half /= 2"),
    Mutant("digits are added before they are there", "half /= 2) {\n        OC_BARRIER();", "half /= 2) {"),
    Mutant("digits are not carried", "OC_ONCE oc_carry(own);", ";"),
    Mutant(
        "a group's digits replace those of others", "atomicAdd((uint64_t *)bins + i, (uint64_t)", "bins[i] = ((int64_t)"
    ),
]


def compare_all(device: Emulated) -> None:
    """The fixed samples of the host's kernels, and sums, lengths and formats that a device treats in its own way."""
    rng = np.random.default_rng(0)
    names = ("split", "float8", "float8")
    segments = []
    for n, scale in ((GROUP + 300, 1e-3), (0, 1), (700, 1e3)):
        grad, *states = (scale * rng.standard_normal((4, n))).astype(np.float32)
        segments.append(formats.update_of(call.State(grad, states[0], (states[1], np.abs(states[2]))), names))
    step = oracles.Adam()
    kind = {"rule": "adam_torch", "param_dtype": BFLOAT16, "keep_states": False}
    expected = formats.run(segments, step.scalars("adam_torch"), **kind)
    values = rng.standard_normal(40_000).astype(np.float32)
    two = [call.State(*np.ones((2, 300), np.float32), tuple(np.ones((2, 300), np.float32)))] * 2
    rows = [oracles.Adam(lr=lr).scalars("adam_torch") for lr in (1e-3, 1e-1)]
    plain = {"rule": "adam_torch", "param_dtype": None}
    expected_two = call.update(two, rows, **plain)
    for turn in TURNS:
        with device.in_place_of_kernels(turn):
            for got, right in zip(formats.run(segments, step.scalars("adam_torch"), **kind), expected, strict=True):
                formats.assert_same_update("segments", got, right)
            for got, right in zip(
                call.update(two, rows, rule="adam_torch", param_dtype=None), expected_two, strict=True
            ):
                oracles.assert_same_state("two", got, right)
            total = call.sum_of_squares(values, values[:100])
        assert total.exact() == oracles.sum_of_squares(values) + oracles.sum_of_squares(values[:100])
        assert (total.bins < 2**36).all(), "digits were not carried"
    with device.in_place_of_kernels():
        oracles.check_kernels("scalar")
        formats.check_formats("scalar")


@pytest.mark.slow
def test_the_sound_text_passes(device):
    compare_all(device)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_the_comparison_fails_on_a_mutant(mutant, tmp_path):
    text = kernels.device_text()
    assert text.count(mutant.old) == 1, "the text does not hold once what this mutant replaces"
    with pytest.raises(AssertionError):
        compare_all(Emulated(emulator.build(tmp_path, text.replace(mutant.old, mutant.new))))
