"""``engine.named_weights``: the weights of an export, in bounded memory, for receivers that fail, wait or leave."""

import gc
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from frontends.torch import gathered_parameters, wrap
from frontends.torch.weights.reading import Weights
from offload_core.errors import ConfigError, ParameterError, StateError
from tests.support.exports import load
from tests.support.late_stores import STATES_ON_DISK
from tests.support.partitioned_models import gpt, gpt_loss
from tests.support.plan_of_torch import resident, status
from tests.support.processes import on_ranks
from tests.support.torch_models import same_bits
from tests.support.torch_rank import batch, loss_of, make, said_by
from tests.support.ways import STAGE_3

BF16 = {"param_dtype": "bfloat16"}
DTYPES = (None, "float32", "bfloat16", torch.float16)
WAYS = {
    "fp32": {},
    "bf16": BF16,
    "8-bit": {**BF16, "state_format": "8bit"},
    "delayed": {**BF16, "schedule": "delayed", "delay_warmup_steps": 1},
    "stage 3": {**STAGE_3, **BF16},
    "stage 3, fp32": {**STAGE_3, "offload_param": None},
    "stage 3, on disk": {**STAGE_3, **STATES_ON_DISK, "offload_param": "nvme"},
}


class Model(nn.Module):
    """A tied weight, a frozen part, buffers of several types, another memory order, a scalar, an empty weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 8)
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.frozen = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last).requires_grad_(False)
        self.late = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, ids):
        x = self.embedding(ids) + self.conv.weight.sum() * self.scale + self.empty.sum() + self.frozen.weight.sum()
        return self.head(self.norm(self.late(x)))


def train(engine, seeds):
    for seed in seeds:
        ids = torch.randint(0, 16, (6,), generator=torch.Generator().manual_seed(seed))
        engine.backward(engine(ids).float().pow(2).mean())
        engine.step()
    return engine.optimizer.report


def engine_of(**fields):
    return wrap(Model(), lr=1e-2, **fields)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in found if not same_bits(found[name], expected[name])] == []


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


# --- values, names, order --------------------------------------------------------------------------------


@pytest.mark.draws(2)
def test_weights_are_those_of_an_export_bit_for_bit_in_the_order_of_the_model(way, tmp_path):
    engine = engine_of(**way)
    train(engine, range(3))
    names = [name for name in engine.module.state_dict(keep_vars=True) if name != "head.weight"]
    for dtype in DTYPES:
        given = list(engine.named_weights(dtype=dtype))
        engine.export_safetensors(tmp_path / str(dtype), dtype=dtype)
        assert [name for name, _ in given] == names
        assert_same(dict(given), load(tmp_path / str(dtype))[0])
        assert all(tensor.is_contiguous() and not tensor.requires_grad for _, tensor in given)


@pytest.mark.draws(2)
def test_weights_are_copies_and_training_goes_on_as_if_none_had_been_given(way):
    ends = []
    for gives in (False, True):
        engine = engine_of(**way)
        train(engine, range(2))
        for dtype in (None, "float32") if gives else ():
            given = dict(engine.named_weights(dtype=dtype))
            before = {name: tensor.clone() for name, tensor in given.items()}
            train(engine, [2 if dtype is None else 3])
            assert_same(given, before)
            for tensor in given.values():
                tensor.zero_()
        train(engine, range(4 if gives else 2, 6))
        engine.close()
        ends.append({name: tensor.clone() for name, tensor in engine.module.state_dict().items()})
    assert_same(*ends) if way.get("schedule") != "delayed" else None  # a flush ends the delay


@pytest.mark.parametrize("fields", [{}, {**STAGE_3, **BF16}], ids=["stage 2", "stage 3"])
def test_a_weight_is_given_in_c_order_or_in_its_own(fields):
    engine = engine_of(**fields)
    for dtype in (None, "float32"):
        in_c, own = dict(engine.named_weights(dtype=dtype)), dict(engine.named_weights(dtype=dtype, layout="own"))
        assert_same({name: tensor.contiguous() for name, tensor in own.items()}, in_c)
        for name in ("conv.weight", "frozen.weight"):
            assert in_c[name].is_contiguous()
            assert own[name].is_contiguous(memory_format=torch.channels_last)
            assert not own[name].is_contiguous()


@pytest.mark.draws(2)
def test_weights_of_a_released_engine_are_the_same(way):
    """Of frozen tensors the host has copies, of trained ones the master weights."""
    engine = engine_of(**way)
    train(engine, range(2))
    before = {dtype: dict(engine.named_weights(dtype=dtype)) for dtype in DTYPES}
    with engine.released():
        for dtype in DTYPES:
            assert_same(dict(engine.named_weights(dtype=dtype)), before[dtype])
    assert_same(dict(engine.named_weights()), before[None])
    assert engine.module.passing.tolist() == [1, 1]


def receiver(got, fails_at):
    def receive(bucket):
        got.append(bucket)
        if len(got) == fails_at:
            raise OSError("the receiver has gone")

    return receive


# --- receivers -------------------------------------------------------------------------------------------


def test_a_function_gets_buckets_of_at_most_the_configured_size_or_one_larger_weight():
    engine = engine_of(reduce_bucket_size=100)
    buckets = []
    assert engine.named_weights(into=buckets.append) == sum(map(len, buckets))
    sizes = [[tensor.numel() for _, tensor in bucket] for bucket in buckets]
    assert all(sum(each) <= 100 or len(each) == 1 for each in sizes)
    assert max(map(sum, sizes)) == 128
    assert max(map(len, sizes)) > 2
    given = [named for bucket in buckets for named in bucket]
    assert [name for name, _ in given] == [name for name, _ in engine.named_weights()]
    assert_same(dict(given), dict(engine.named_weights()))


@pytest.mark.draws(2)
def test_tensors_are_written_in_place_in_their_own_type_and_order(way):
    engine = engine_of(**way)
    train(engine, range(2))
    targets = {name: torch.zeros_like(t, dtype=torch.float64) if t.is_floating_point() else torch.zeros_like(t)
               for name, t in engine.named_weights()}  # fmt: skip
    targets["conv.weight"] = torch.zeros(4, 3, 2, 2, dtype=torch.float16).to(memory_format=torch.channels_last)
    targets["scale"] = nn.Parameter(torch.zeros(()))
    with torch.inference_mode():
        targets["late.weight"] = torch.zeros(8, 8)
    targets["head.weight"] = torch.zeros(16, 8)  # another name of the embedding's
    objects = dict(targets)
    assert engine.named_weights(dtype="float32", into=targets) == len(targets) - 1
    expected = dict(engine.named_weights(dtype="float32"))
    expected["head.weight"] = expected["embedding.weight"]
    assert all(targets[name] is objects[name] for name in objects)
    assert_same(targets, {name: expected[name].to(tensor.dtype) for name, tensor in targets.items()})


def test_a_sparse_buffer_is_refused_by_name():
    engine = engine_of()
    engine.module.register_buffer("sparse", torch.eye(3).to_sparse())
    with pytest.raises(ParameterError, match=r"named_weights\(\): 'sparse' is torch.float32, torch.sparse_coo"):
        engine.named_weights()


@pytest.mark.draws(2)
def test_a_receiver_that_fails_in_the_middle_loses_nothing_and_the_next_call_is_whole(way):
    expected, engine = (engine_of(reduce_bucket_size=100, **way) for _ in range(2))
    train(expected, range(2))
    expected.flush()
    train(engine, range(2))
    got = []
    for _ in range(2):
        got.clear()
        with pytest.raises(OSError, match="the receiver has gone"):
            engine.named_weights(into=receiver(got, 3))
        assert len(got) == 3
    weights = engine.named_weights()
    next(weights)
    weights.close()
    assert list(weights) == []
    assert_same(dict(engine.named_weights()), dict(expected.named_weights()))
    train(expected, [2])
    train(engine, [2])
    assert_same(dict(engine.named_weights(dtype="float32")), dict(expected.named_weights(dtype="float32")))


def test_an_iterator_does_not_go_on_over_an_update_or_a_load(tmp_path):
    """Its weights would be of two steps."""
    engine = engine_of(reduce_bucket_size=100)
    train(engine, [0])
    engine.save_checkpoint(tmp_path)
    for act in (lambda: train(engine, [1]), lambda: engine.load_checkpoint(tmp_path)):
        weights = engine.named_weights()
        next(weights)
        act()
        with pytest.raises(StateError, match="an update or a load since the call"):
            list(weights)
        assert len(dict(engine.named_weights())) == len(dict(engine.named_weights(dtype="float32")))


# --- what has changed ------------------------------------------------------------------------------------


class Sparse(nn.Module):
    """Layers that a step may leave out, a frozen one, and one that is partitioned and frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))
        self.layers[3].requires_grad_(False)

    def forward(self, used):
        x = self.layers[3](torch.ones(2, 4, dtype=self.layers[3].weight.dtype))
        for i in used:
            x = self.layers[i](x)
        return x


def sparse_step(engine, used):
    engine.backward(engine(used).pow(2).mean())
    return engine.step()


def changed(engine, since, **options):
    weights = dict(engine.named_weights(since=since, **options))
    everything = dict(engine.named_weights(**options))
    assert_same(weights, {name: everything[name] for name in weights})
    return [int(name.split(".")[1]) for name in weights]


FIELDS = [{}, BF16, {**STAGE_3, **BF16}, {**STAGE_3, "offload_param": None}, {"update_in_backward": True}]


@pytest.mark.parametrize("fields", FIELDS)
def test_since_a_report_only_what_an_update_has_changed_is_given(fields):
    engine = wrap(Sparse(), lr=1e-2, **fields)
    first = sparse_step(engine, [0, 1])
    assert changed(engine, first) == []
    second = sparse_step(engine, [1])
    assert changed(engine, first) == [1]
    third = sparse_step(engine, [0, 2])
    assert [changed(engine, report) for report in (first, second, third)] == [[0, 1, 2], [0, 2], []]
    assert engine.named_weights(since=second, into=lambda bucket: None) == 2


@pytest.mark.draws(1)
@pytest.mark.parametrize("fields", FIELDS[:4])
def test_since_a_report_what_was_written_or_loaded_from_outside_is_given(fields, tmp_path):
    engine = wrap(Sparse(), lr=1e-2, **fields)
    layers = engine.module.layers
    report = sparse_step(engine, [0, 1, 2])
    with torch.no_grad(), gathered_parameters(layers[1].weight, modifier_rank=0):
        layers[1].weight.fill_(3)
    assert changed(engine, report) == [1]
    report = sparse_step(engine, [0])
    with torch.no_grad(), gathered_parameters(layers[3].weight, modifier_rank=0):
        layers[3].weight.fill_(3)
    assert changed(engine, report) == changed(engine, report) == [3]
    report = sparse_step(engine, [0])
    assert changed(engine, report) == []
    engine.optimizer.load_master(layers[2].weight, torch.ones(4, 4))
    assert changed(engine, report) == [2]
    engine.save_checkpoint(tmp_path)
    report = sparse_step(engine, [0])
    assert changed(engine, report) == []
    engine.load_checkpoint(tmp_path)
    assert changed(engine, report) == [0, 1, 2, 3]  # the frozen one was read from the file, too
    assert changed(engine, sparse_step(engine, [0])) == []


def test_a_report_of_another_engine_or_an_accumulating_one():
    engine, other = wrap(Sparse(), gradient_accumulation_steps=2), wrap(Sparse())
    with pytest.raises(ConfigError, match="since: got the report of another engine"):
        engine.named_weights(since=sparse_step(other, [0]))
    with pytest.raises(ConfigError, match="since: got an int, expected a report"):
        engine.named_weights(since=1)
    assert sparse_step(engine, [0]).skipped
    updated = sparse_step(engine, [0])
    accumulating = sparse_step(engine, [1])
    assert accumulating.skipped
    assert changed(engine, updated) == changed(engine, accumulating) == []
    sparse_step(engine, [1])
    assert changed(engine, accumulating) == [1]


def test_buffers_are_always_given_since_a_forward_may_change_them():
    engine = engine_of()
    report = train(engine, [0])
    assert dict(engine.named_weights(since=report)).keys() == {name for name, _ in engine.module.named_buffers()} - {
        "passing"
    }


# --- memory ----------------------------------------------------------------------------------------------


def test_no_more_than_a_bucket_is_alive_at_a_time(monkeypatch):
    """Also while the next bucket is read: the one before is gone."""
    width, layers = 64, 12
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    engine = wrap(model, **BF16, reduce_bucket_size=3 * width * width)

    def alive():
        gc.collect()
        return sum(type(o) is torch.Tensor and o.shape == (width, width) and o.dtype == torch.float16
                   for o in gc.get_objects())  # fmt: skip

    held, read = [], Weights.whole
    monkeypatch.setattr(Weights, "whole", lambda *args, **kw: (held.append(alive()), read(*args, **kw))[1])
    assert engine.named_weights(dtype=torch.float16, into=lambda bucket: held.append(alive())) == layers
    assert held == [0, 1, 2, 3] * 4
    held.clear()
    for _, tensor in engine.named_weights(dtype=torch.float16):
        del tensor
    assert held == [0, 1, 2] * 4


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, STAGE_3], ids=["stage 2", "stage 3"])
def test_a_hundred_million_parameters_take_two_buckets_or_the_largest_weight(fields):
    @on_ranks(1, alone=True)
    def found(rank):
        torch.set_num_threads(1)
        width = 2048
        with torch.device("meta"):
            model = nn.Sequential(nn.Embedding(12 * width, width), *(nn.Linear(width, width) for _ in range(13)))
        model.to_empty(device="cpu")
        for param in model.parameters():
            nn.init.constant_(param, 1.0)
        assert sum(p.numel() for p in model.parameters()) > 100e6
        numel = 2 * width * width
        engine = wrap(model, **BF16, **fields, reduce_bucket_size=numel)
        taken = {}
        for dtype in (None, "float32", "float16"):
            largest = max(p.numel() for p in model.parameters()) * (4 if dtype == "float32" else 2)
            bound = max(2 * numel * (4 if dtype == "float32" else 2), largest)
            for _ in range(2):  # the first brings along what stays
                before = resident()
                Path("/proc/self/clear_refs").write_text("5")  # forget the peak
                for _, tensor in engine.named_weights(dtype=dtype):
                    del tensor
                took = status("VmHWM") - before
            taken[str(dtype)] = took, bound
        return taken

    for dtype, (took, bound) in found[0].items():
        assert took < bound + 2**23, (dtype, took, bound)  # a piece that is rounded, and pages of the allocator


# --- ranks -----------------------------------------------------------------------------------------------


def rank_step(engine, rank, step):
    engine.backward(gpt_loss(engine, 2 * step + rank))
    return engine.step()


@pytest.mark.long("several trainings on two ranks or more")
def test_ranks_give_the_weights_of_an_export_in_every_stage(tmp_path, drawn):
    ways = {
        "1": {"stage": 1, **BF16},
        "2": BF16,
        "3": {**STAGE_3, **BF16},
        "3d": {**STAGE_3, "offload_param": None},
    }
    cases = drawn([(kind, dtype) for kind in ways for dtype in (None, "float32", "bfloat16")], 2)

    @on_ranks(2)
    def _(rank):
        for kind in {kind: None for kind, _ in cases}:
            fields, dtypes = ways[kind], [dtype for of, dtype in cases if of == kind]
            model = gpt()
            model.blocks[0].requires_grad_(False)
            engine = wrap(model, lr=1e-2, reduce_bucket_size=3000, **fields)
            for step in range(2):
                rank_step(engine, rank, step)
            for dtype in dtypes:
                folder = tmp_path / f"{kind} {dtype}"
                engine.export_safetensors(folder, dtype=dtype)
                torch.distributed.barrier()
                expected = load(folder)[0]
                assert_same(dict(engine.named_weights(dtype=dtype)), expected)
                on_first = dict(engine.named_weights(dtype=dtype, rank0_only=True))
                assert_same(on_first, {} if rank else expected)
                with engine.released():
                    assert_same(dict(engine.named_weights(dtype=dtype)), expected)
            targets = None if rank else {name: torch.zeros_like(t) for name, t in expected.items()}
            got = engine.named_weights(dtype=dtypes[-1], into=targets or {}, rank0_only=True)
            assert got == (0 if rank else len(expected))
            assert_same(targets or expected, expected)


def test_what_fails_on_one_rank_ends_on_all_and_the_next_call_is_whole(drawn):
    settings = drawn(({"stage": 1}, {**STAGE_3, **BF16}), 1)

    @on_ranks(2)
    def found(rank):
        said = []
        for fields in settings:
            engine = wrap(gpt(), lr=1e-2, reduce_bucket_size=3000, **fields)
            rank_step(engine, rank, 0)
            names = [name for name, _ in engine.named_weights()]

            n_buckets = []
            engine.named_weights(into=n_buckets.append)
            for which in (0, 1):
                for at in (2, len(n_buckets)):
                    got = []
                    with pytest.raises(OSError if rank == which else StateError) as error:
                        engine.named_weights(into=receiver(got, rank == which and at))
                    assert len(got) == at  # the others stop at the same bucket
                    said.append(str(error.value))
            for leaver in (0, 1):
                taken = []
                try:
                    for name, _ in engine.named_weights():
                        taken.append(name)
                        if rank == leaver and len(taken) == 2:
                            break
                except StateError as error:
                    said.append(str(error))
                assert taken != names
            kept = engine.named_weights()  # all ranks leave theirs half way, and begin again
            next(kept)
            assert [name for name, _ in engine.named_weights()] == names
            with pytest.raises(StateError, match="ended before all weights were taken, by an error or by a later call"):
                list(kept)
            kept = engine.named_weights()
            next(kept)
            report = rank_step(engine, rank, 1)
            with pytest.raises(StateError, match="an update or a load"):
                list(kept)
            # One rank's arguments are wrong, or other than the other's.
            for options in (
                {"dtype": "float32" if rank else "bfloat16"},
                {"dtype": "int8" if rank else None},
                {"since": report if rank else None},
            ):
                said.append(said_by(partial(engine.named_weights, **options)))
            assert dict(engine.named_weights(since=report)).keys() == {n for n, _ in engine.module.named_buffers()}
            assert rank_step(engine, rank, 2).updated
        return said

    for rank, said in enumerate(found):
        for text in said:
            assert "receiver has gone" in text or f"rank {1 - rank}" in text or "another rank" in text or "int8" in text


def test_a_write_on_one_rank_alone_is_a_change_on_all():
    """Each rank sees only what was written to its own memory."""

    @on_ranks(2)
    def _(rank):
        engine = wrap(make(), lr=1e-2)
        engine.backward(loss_of(engine, 0, rank))
        report = engine.step()
        assert dict(engine.named_weights(since=report)) == {}
        if rank == 1:
            with torch.no_grad():
                engine.module[2].weight.add_(1)
        assert list(dict(engine.named_weights(since=report))) == ["2.weight"]
        assert batch(0, rank).shape  # the ranks train on
        engine.backward(loss_of(engine, 1, rank))


def test_parts_on_a_mesh_are_given_whole(tmp_path):
    from torch.distributed.fsdp import fully_shard

    @on_ranks(2)
    def _(rank):
        model = make()
        model[0].requires_grad_(False)
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        engine = wrap(model, lr=1e-2)
        engine.backward(loss_of(engine, 0, rank))
        report = engine.step()
        for dtype in (None, "float32", "bfloat16"):
            engine.export_safetensors(tmp_path / str(dtype), dtype=dtype)
            torch.distributed.barrier()
            assert_same(dict(engine.named_weights(dtype=dtype)), load(tmp_path / str(dtype))[0])
        assert dict(engine.named_weights(since=report)) == {}
        engine.backward(loss_of(engine, 1, rank))
        engine.step()
        assert list(dict(engine.named_weights(since=report))) == ["2.weight", "2.bias", "4.weight", "4.bias"]
