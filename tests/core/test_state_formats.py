"""Formats of optimizer states: what they take, what refuses them, and what they name where a model does not fit.

That updates in every format have the same bits over ranks, schedules, buckets, threads and checkpoints is drawn by the
laws of test_pipeline.py, test_ranks.py and tests/checkpoint; tests/kernels holds the arithmetic.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.config.options import OffloadConfig
from offload_core.config.state_formats import BLOCK, FORMATS, SPLIT
from offload_core.device.exchange_sizes import planned_device
from offload_core.device.host import HostDevice
from offload_core.dtypes import BFLOAT16, FLOAT16, FLOAT32
from offload_core.errors import CheckpointError, CheckpointWarning, ConfigError, HostMemoryError
from offload_core.layout.partition import ParamSpec, build_buckets
from offload_core.plans.planner import Planner
from offload_core.plans.terms import BucketTerms
from offload_core.states.arrays import StateArray
from offload_core.step.state_access import StateAccess
from offload_core.testing.fake_device import FakeDevice
from tests.support import state_formats
from tests.support.checkpoints import load, one_step, save
from tests.support.oracles import assert_same_bits, cast
from tests.support.pipelines import STATES, Subject, make
from tests.support.strategies import law

BYTES = [
    ({}, 12.0),
    ({"state_format": "bf16"}, 8.0),
    ({"state_format": "8bit"}, 4 + 2 * (1 + 1 / BLOCK)),
    ({"state_format": "8bit", "master_dtype": "bfloat16"}, 2 + 2 * (1 + 1 / BLOCK)),
    ({"exp_avg_dtype": "float8"}, 8 + 1 + 1 / BLOCK),
    ({"state_format": "8bit", "exp_avg_sq_dtype": "float32"}, 8 + 1 + 1 / BLOCK),
]


def specs_of(*sizes, dtype=BFLOAT16):
    return [ParamSpec(f"p{i}", size, dtype) for i, size in enumerate(sizes)]


@pytest.mark.states_in_memory
@pytest.mark.parametrize(("fields", "each"), BYTES)
def test_states_take_the_bytes_that_the_plan_says(fields, each):
    """Measured on a device with memory of its own, where bfloat16 parameters are never their own master weights."""
    numel = 40 * BLOCK
    config = OffloadConfig(op_order="torch", **fields)
    subject = Subject(FakeDevice(), [np.zeros(numel, np.float32)], [BFLOAT16], [0], config)
    held = {name: n for name, n in subject.pipeline.memory.report().items() if name in STATES}
    assert sum(held.values()) == each * numel
    rows = Planner(BucketTerms(config, planned_device(1, addressable=False))).host_rows(subject.specs)
    assert {row.what: row.n_bytes for row in rows if row.what in STATES} == held


def test_on_the_host_a_bfloat16_parameter_is_its_own_bfloat16_master():
    for dtype, names in ((BFLOAT16, STATES[1:]), (FLOAT32, STATES[1:]), (FLOAT16, STATES)):
        subject = make(HostDevice(), dtype, op_order="torch", master_dtype="bfloat16")
        [(_, states)] = StateAccess(subject.pipeline).states(0)
        assert tuple(states) == names
    assert states["master"].dtype == np.float32, "one of float16 would lose bits in bfloat16"


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("state_format", "int8", "state_format: got 'int8', expected one of 'fp32', 'bf16', '8bit'"),
        ("state_format", None, "expected one of 'fp32', 'bf16', '8bit'"),
        ("master_dtype", "float16", "expected one of None, 'float32', 'bfloat16'"),
        ("master_dtype", "float8", "expected one of None, 'float32', 'bfloat16'"),
        ("exp_avg_dtype", "bf16", "expected one of None, 'float32', 'bfloat16', 'float8'"),
    ],
)
def test_an_unknown_format_is_refused_with_those_that_there_are(field, value, expected):
    with pytest.raises(ConfigError) as error:
        OffloadConfig(**{field: value})
    assert expected in str(error.value)


@law(200)
@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=6),
    partitioned=st.booleans(),
    world_size=st.integers(1, 5),
    bucket_numel=st.sampled_from([1, 300, 1000, 5000, 10**6]),
    block=st.sampled_from([1, 16, BLOCK]),
)
def test_parameters_are_cut_at_whole_blocks_alone(sizes, partitioned, world_size, bucket_numel, block):
    specs = [ParamSpec(f"p{i}", size, BFLOAT16, partitioned=partitioned) for i, size in enumerate(sizes)]
    buckets = build_buckets(specs, world_size=world_size, bucket_numel=bucket_numel, block=block)
    seen = {i: [] for i in range(len(sizes))}
    for bucket in buckets:
        for rank in range(world_size):
            for piece in bucket.shards([rank]):
                assert piece.start % block == 0
                assert piece.offset % block == 0
                assert piece.numel % block == 0 or piece.stop == sizes[piece.param]
                assert piece.offset + piece.numel <= bucket.shard_numel
                seen[piece.param].append((piece.start, piece.stop))
    for i, size in enumerate(sizes):
        runs = sorted(seen[i])
        assert [0, *(stop for _, stop in runs)] == [*(start for start, _ in runs), size]


@law(100)
@given(
    format=st.sampled_from([*FORMATS.values(), SPLIT]),
    sizes=st.lists(st.integers(1, 4 * BLOCK), min_size=1, max_size=4),
    part=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    seed=st.integers(0, 2**32 - 1),
)
def test_an_array_of_states_reads_any_part_and_writes_whole_runs(format, sizes, part, seed):
    rng = np.random.default_rng(seed)
    starts = np.cumsum([0] + [-(-size // format.block) * format.block for size in sizes]).tolist()
    whole = StateArray.allocate(format, starts[-1], np.zeros, np.zeros, 2)
    expected = []
    for start, size in zip(starts, sizes, strict=False):
        values = (rng.standard_normal(size) * np.exp2(rng.uniform(-20, 5))).astype(np.float32)
        whole[start : start + size].write(values)
        lossless = format is SPLIT
        expected.append(values if lossless else state_formats.decode(state_formats.encode(format.name, values)))
    for start, size, values in zip(starts, sizes, expected, strict=False):
        run = whole[start : start + size]
        low, high = sorted(int(share * size) for share in part)
        out = np.empty(high - low, np.float32)
        run.read(low, out)
        assert_same_bits("a part", out, values[low:high])
        assert_same_bits("all of it, in the format's own type", run.values().astype(np.float32), values)
        run.write(run.values().astype(np.float32))
        assert_same_bits("what was read is what is written", run.values().astype(np.float32), values)
        if run.upper is not None:
            assert_same_bits("the parameter", run.upper, cast(values, BFLOAT16))


@law(100)
@given(
    format=st.sampled_from([FORMATS["float32"], SPLIT]),
    change=st.lists(st.booleans(), min_size=1, max_size=3 * SPLIT.block),
    seed=st.integers(0, 2**32 - 1),
)
def test_where_a_parameter_was_changed_its_master_follows_and_nowhere_else(format, change, seed):
    rng = np.random.default_rng(seed)
    masters = rng.standard_normal(len(change)).astype(np.float32)
    array = StateArray.allocate(format, masters.size, np.zeros, np.zeros, 2)
    array.write(masters)
    param = cast(masters, BFLOAT16)
    other = cast(rng.standard_normal(masters.size).astype(np.float32), BFLOAT16)
    change = np.array(change) & (param != other)
    param[change] = other[change]
    replaced: dict[int, np.ndarray] = {}
    array.follow(param, replaced)
    assert_same_bits("masters", array.values(), np.where(change, param.astype(np.float32), masters))
    if array.upper is not None:
        assert_same_bits("the parameter", array.upper, param)
    array.follow(cast(masters, BFLOAT16), replaced)
    assert_same_bits("masters that were put back", array.values(), masters)
    assert not replaced


@pytest.mark.parametrize("threshold", [1, 2**30], ids=["a run at a time", "all at once"])
def test_a_checkpoint_in_another_format_is_converted_once_and_says_so(tmp_path, monkeypatch, threshold):
    monkeypatch.setattr("offload_core.checkpoint.loading._TARGET_BYTES", threshold)
    saved = make(FakeDevice(), op_order="torch")
    one_step(saved)
    path, _ = save(saved, tmp_path)
    for fields in ({"state_format": "bf16"}, {"state_format": "8bit", "master_dtype": "bfloat16"}):
        subject = make(FakeDevice(), op_order="torch", **fields)
        with pytest.warns(CheckpointWarning, match="states are converted once, each value to the nearest: ") as said:
            load(subject, path)
        formats = subject.pipeline.config.state_formats(BFLOAT16)
        for name in STATES:
            assert (f"{name} from float32 to {formats[name]}" in str(said[0].message)) == (
                formats[name].name != "float32"
            )
        for i in range(2):
            for name, mine, theirs in zip(STATES, subject.states(i), saved.states(i), strict=True):
                stored = state_formats.encode(formats[name].name, theirs, has_sign=name != "exp_avg_sq")
                assert_same_bits(name, mine, state_formats.decode(stored))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"master": "float32", "exp_avg": "float4", "exp_avg_sq": "float8"}, "exp_avg was kept as 'float4', and this"),
        ({"master": "float32", "exp_avg": "\x1b[2J\n", "exp_avg_sq": "float8"}, r"exp_avg was kept as '\\x1b[2J\\n'"),
        ({"master": "float32", "exp_avg": 8, "exp_avg_sq": "float8"}, "exp_avg was kept as 8, and this"),
        ({}, "state_formats is {}"),
        ([], "state_formats is []"),
    ],
)
def test_a_checkpoint_of_a_format_that_is_not_known_is_refused(tmp_path, monkeypatch, given, told):
    subject = make(FakeDevice(), op_order="torch")
    one_step(subject)
    before = [values.tobytes() for values in subject.states(0)]
    monkeypatch.setattr("offload_core.checkpoint.checkpoints._format_names", lambda pipeline: given)
    path, _ = save(subject, tmp_path)
    with pytest.raises(CheckpointError) as error:
        load(subject, path)
    assert told in str(error.value)
    assert "\x1b" not in str(error.value)
    assert [values.tobytes() for values in subject.states(0)] == before


@pytest.mark.draws(2)
@pytest.mark.filterwarnings("error::offload_core.errors.CheckpointWarning")
@pytest.mark.parametrize("fields", [fields for fields, _ in BYTES])
def test_in_the_same_format_training_goes_on_bit_for_bit_and_nothing_is_said(tmp_path, fields):
    one, other = (make(FakeDevice(), op_order="torch", **fields) for _ in range(2))
    for value in (0.5, -0.3):
        one_step(one, value)
    path, _ = save(one, tmp_path)
    load(other, path)
    for _ in range(3):
        for subject in (one, other):
            one_step(subject, 0.1)
    for i in range(2):
        assert_same_bits("parameter", one.params()[i], other.params()[i])
        for name, mine, theirs in zip(STATES, one.states(i), other.states(i), strict=True):
            assert_same_bits(name, mine, theirs)


@pytest.mark.states_in_memory
def test_a_model_that_does_not_fit_is_told_the_first_format_that_would():
    terms = BucketTerms(OffloadConfig(op_order="torch"), planned_device(1, addressable=False))
    plan = Planner(terms).plan(specs_of(50_000_000))
    assert [setting for setting, _ in plan.savings] == [
        "state_format='bf16'",
        "state_format='8bit'",
        "state_format='8bit', master_dtype='bfloat16'",
    ]
    for setting, saved in plan.savings:
        with pytest.raises(HostMemoryError) as error:
            plan.check(plan.host_bytes - saved)
        assert f"With {setting} it would fit, in " in str(error.value)
    with pytest.raises(HostMemoryError) as error:
        plan.check(plan.host_bytes - saved - 1)
    assert "state_format='8bit', master_dtype='bfloat16' it would fit" not in str(error.value)
    assert "nvme_path='/folder/on/a/disk' it would fit, in " in str(error.value)
    narrow = BucketTerms(OffloadConfig(state_format="8bit"), planned_device(1, addressable=False))
    assert [setting for setting, _ in Planner(narrow).plan(specs_of(1000)).savings] == [
        "state_format='8bit', master_dtype='bfloat16'"
    ]


def test_states_name_the_format_that_makes_them_smaller():
    def remedies(fields, dtype=BFLOAT16):
        terms = BucketTerms(OffloadConfig(**fields), planned_device(1, addressable=False))
        return {
            row.what: row.remedy for row in Planner(terms).host_rows(specs_of(1000, dtype=dtype)) if row.what in STATES
        }

    fp32, bf16 = "state_format='bf16'", "state_format='8bit'"
    assert remedies({}) == {"master": "master_dtype='bfloat16'", "exp_avg": fp32, "exp_avg_sq": fp32}
    assert remedies({"state_format": "bf16"})["exp_avg"] == bf16
    smallest = remedies({"state_format": "8bit", "master_dtype": "bfloat16"})
    assert set(smallest.values()) == {"more ranks, on other machines"}
    assert remedies({}, FLOAT16)["master"] == "more ranks, on other machines"
    own = remedies({"state_format": "8bit", "exp_avg_sq_dtype": "float32"})
    assert own["exp_avg_sq"] == "exp_avg_sq_dtype='bfloat16'", "state_format would not change it"
