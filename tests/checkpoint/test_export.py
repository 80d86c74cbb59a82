"""Weights and states that leave for other programs: safetensors, ``transformers``, ``torch.optim.AdamW``."""

import errno
import os
import resource
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from frontends.torch import OffloadedAdamW, gathered_parameters, wrap
from offload_core import CheckpointError, ConfigError, ParameterError
from offload_core.checkpoint.export import Weight, export_weights
from offload_core.checkpoint.safetensors import read_header
from offload_core.ranks.collectives import SingleRank, merge
from offload_core.testing.thread_ranks import run_ranks as run_threads
from tests.support.exports import load
from tests.support.partitioned_models import gpt, gpt_loss
from tests.support.processes import on_ranks
from tests.support.strategies import law

BF16 = {"param_dtype": "bfloat16"}
STAGE_3 = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 40, "reduce_bucket_size": 1000}


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(got[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


# --- files -------------------------------------------------------------------------------------------


def weights_of(arrays):
    return [Weight(name, a.dtype, a.shape, lambda wanted, a=a: a) for name, a in arrays.items()]


def export(folder, arrays, max_shard_bytes=10**9):
    export_weights(folder, weights_of(arrays), max_shard_bytes=max_shard_bytes, collectives=SingleRank())


@law(40)
@given(data=st.data())
def test_shards_hold_every_tensor_once_within_the_bound_and_in_order(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("export")
    dtypes = st.sampled_from([np.float32, ml_dtypes.bfloat16, np.int8, np.float64])
    for _ in range(data.draw(st.integers(1, 3))):  # onto an earlier export
        sizes = data.draw(st.lists(st.tuples(dtypes, st.integers(0, 40)), max_size=8))
        arrays = {f"w{i}": np.arange(n).astype(dtype) for i, (dtype, n) in enumerate(sizes)}
        bound = data.draw(st.integers(1, 500))
        export(folder, arrays, bound)
        found, files = load(folder)
        assert {n: t.double().tolist() for n, t in found.items()} == {n: a.tolist() for n, a in arrays.items()}
        shards = []
        for name in sorted(files):
            with safetensors.safe_open(folder / name, "pt") as file:
                assert file.metadata() == {"format": "pt"}
                shards.append(sorted(file.keys()))
            stored = read_header(folder / name).values()
            assert all(tensor.offset % tensor.dtype.itemsize == 0 for tensor in stored)
        assert [name for shard in shards for name in shard] == list(arrays)
        for shard in shards:
            assert sum(arrays[n].nbytes for n in shard) <= bound or len([n for n in shard if arrays[n].nbytes]) == 1
        assert len(shards) == 1 or all(shards)
        assert {path.name for path in folder.iterdir()} == files | (
            {"model.safetensors.index.json"} if len(files) > 1 else set()
        )


def test_what_is_moved_into_place_is_on_the_disk_and_the_index_comes_last(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (fsync(fd), events.append(("sync", Path(os.readlink(f"/proc/self/fd/{fd}")).name)))
    )
    monkeypatch.setattr(os, "replace", lambda a, b: (replace(a, b), events.append(("move", Path(b).name))))
    export(tmp_path / "folder", {f"w{i}": np.zeros(4, np.float32) for i in range(2)}, 16)
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = "model.safetensors.index.json"
    assert events == [
        *(("sync", f"{name}.tmp") for name in (*names, index)), *(("move", name) for name in names),
        ("sync", "folder"), ("move", index), ("sync", "folder"), ("sync", "folder"),
    ]  # fmt: skip


@law(20)
@given(st.integers(1, 4), st.lists(st.integers(0, 3), max_size=20), st.integers(1, 25))
def test_merging_gives_all_ranks_every_word_whatever_the_pieces(world_size, owners, piece):
    words = np.arange(len(owners), dtype=np.int64) * 2**40 - 5

    def body(rank):
        mine = np.where(np.array(owners, int) % world_size == rank.rank, words, 0)
        merge(rank.sum_integers, mine, "words")
        return mine.tolist()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offload_core.ranks.collectives._PIECE_WORDS", piece)
        assert run_threads(world_size, body) == [words.tolist()] * world_size


class Killed(BaseException):
    pass


@pytest.mark.draws(2)
@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_an_export_that_is_cut_off_leaves_the_old_weights_or_the_new_and_never_a_mixture(
    tmp_path, monkeypatch, before, after
):
    old = {f"w{i}": np.zeros(4, np.float32) for i in range(before)}
    new = {f"w{i}": np.ones(4, np.float32) for i in range(after)}
    outcomes = []
    for n in range(100):
        folder = tmp_path / str(n)
        export(folder, old, 16)
        left = n

        def counted(real):
            def act(*args, **kwargs):
                nonlocal left
                if left == 0:
                    raise Killed
                left -= 1
                return real(*args, **kwargs)

            return act

        with monkeypatch.context() as patch:
            for owner, name in ((os, "replace"), (os, "unlink"), (os, "fsync")):
                patch.setattr(owner, name, counted(getattr(owner, name)))
            patch.setattr(
                "offload_core.checkpoint.export._FileWriter.abandon", lambda self: self._file and self._file.close()
            )
            try:
                export(folder, new, 16)
                done = True
            except Killed:
                done = False
        try:
            # transformers looks for the one file first
            one = folder / "model.safetensors"
            found = safetensors.torch.load_file(one) if one.exists() else load(folder)[0]
        except FileNotFoundError:
            outcomes.append("none")
        else:
            values = [t.tolist() for t in found.values()]
            assert values in ([[0.0] * 4] * before, [[1.0] * 4] * after)
            outcomes.append("old" if values[0][0] == 0 else "new")
        if done:
            break
    assert done
    assert outcomes[-1] == "new"
    assert outcomes == sorted(outcomes, key=["old", "none", "new"].index)
    assert ("none" in outcomes) == (before == after > 1)  # the files of both have the same names
    export(folder, new, 16)
    assert len(list(folder.iterdir())) == after + (after > 1)


def test_a_full_disk_is_one_error_that_names_the_file_and_leaves_nothing(tmp_path):
    export(tmp_path / "old", {"a": np.zeros(4, np.float32)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # a real write that fails
    try:
        for folder in (tmp_path / "old", tmp_path / "new" / "deep"):
            with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors: cannot be written") as caught:
                export(folder, {"a": np.ones(4, np.float32), "b": np.ones(2000, np.float32)}, 20)
            assert caught.value.__cause__.errno == errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["model.safetensors"]
    assert load(tmp_path / "old")[0]["a"].tolist() == [0] * 4
    assert not (tmp_path / "new").exists()


def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path):
    a = np.zeros(3, np.float32)
    for name in ("", "__metadata__"):
        with pytest.raises(ParameterError, match="no tensor may have this name"):
            export(tmp_path, {name: a})
    with pytest.raises(ParameterError, match="two tensors have this name"):
        export_weights(tmp_path, 2 * weights_of({"a": a}), max_shard_bytes=1, collectives=SingleRank())
    for wrong in (0, 1.5, True):
        with pytest.raises(ConfigError, match="max_shard_bytes"):
            export(tmp_path, {"a": a}, wrong)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file: cannot be written"):
        export(tmp_path / "file", {"a": a})


# --- torch -------------------------------------------------------------------------------------------


class Model(nn.Module):
    """A tied weight, a frozen part, buffers of several types, another memory order, a scalar."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 8)
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.late = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, ids):
        x = self.embedding(ids) + self.conv.weight.sum() * self.scale + self.empty.sum()
        return self.head(self.norm(self.late(self.frozen(x))))


def train(model, optimizer, seeds):
    for seed in seeds:
        ids = torch.randint(0, 16, (6,), generator=torch.Generator().manual_seed(seed))
        loss = model(ids).float().pow(2).mean()
        if hasattr(model, "backward"):
            model.backward(loss)
            model.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def expected_of(state_dict):
    return {name: tensor.contiguous() for name, tensor in state_dict.items() if name != "head.weight"}


@pytest.mark.draws(2)
@pytest.mark.parametrize("fields", [{}, BF16, {**BF16, "schedule": "delayed", "delay_warmup_steps": 1}, STAGE_3,
                                    {**STAGE_3, **BF16}, {**BF16, "update_in_backward": True}])  # fmt: skip
def test_what_is_written_is_the_state_dict_or_the_master_weights(tmp_path, fields):
    engine = wrap(Model(), lr=1e-2, **fields)
    train(engine, None, range(3))
    held_back = fields.get("schedule") == "delayed"
    before = engine.module.embedding.weight.detach().clone() if held_back else None
    if not held_back:
        with torch.no_grad():
            engine.module.norm.bias.fill_(1 / 3)  # a change from outside, which the next step would follow
    engine.export_safetensors(tmp_path / "model")
    engine.export_safetensors(tmp_path / "fp32", dtype="float32", max_shard_bytes=300)
    engine.export_safetensors(tmp_path / "fp16", dtype=torch.float16)
    masters = {
        name: engine.optimizer.whole_states(param)["master"]
        for name, param in engine.module.named_parameters()
        if engine.optimizer.has_states(param)
    }
    engine.close()
    state = expected_of(engine.module.state_dict())
    assert before is None or not torch.equal(before, state["embedding.weight"])  # what was held back is in it
    assert_same(load(tmp_path / "model")[0], state)
    fp32 = {n: masters.get(n, t.float() if t.is_floating_point() else t).contiguous() for n, t in state.items()}
    exported, files = load(tmp_path / "fp32")
    assert_same(exported, fp32)
    assert len(files) > 2
    assert_same(load(tmp_path / "fp16")[0], {n: t.half() if t.is_floating_point() else t for n, t in fp32.items()})
    if BF16.items() <= fields.items():
        assert any(not torch.equal(fp32[n], t.float()) for n, t in state.items() if t.is_floating_point())
    if not held_back:
        assert fp32["norm.bias"][0] == torch.tensor(1 / 3, dtype=state["norm.bias"].dtype).float()


def test_training_goes_on_as_if_nothing_had_been_exported(tmp_path):
    ends = []
    for exported in (False, True):
        engine = wrap(Model(), lr=1e-2, **BF16, **STAGE_3)
        train(engine, None, range(2))
        if exported:
            engine.export_safetensors(tmp_path, dtype="float32")
            engine.export_safetensors(tmp_path)
            engine.optimizer.torch_state_dict()
        train(engine, None, range(2, 4))
        engine.close()
        ends.append({n: t.clone() for n, t in engine.module.state_dict().items()})
    assert_same(*ends)


@pytest.mark.parametrize("compiled", ["model", "part"])
def test_compilation_does_not_show_in_the_names(tmp_path, compiled):
    model = Model()
    engine = wrap(model)
    if compiled == "model":
        engine.module = torch.compile(model, backend="eager")
    else:
        model.late = torch.compile(model.late, backend="eager")
    engine.export_safetensors(tmp_path)
    assert load(tmp_path)[0].keys() == expected_of(Model().state_dict()).keys()


def test_only_tensors_of_known_types_are_written(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"version": 1}

        def set_extra_state(self, state):
            pass

    with pytest.raises(ParameterError, match=r"'_extra_state' .* is a dict, expected a tensor"):
        wrap(Extra(4, 4)).export_safetensors(tmp_path)
    model = nn.Linear(4, 4)
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    with pytest.raises(ParameterError, match=r"'sparse' is torch.float32, torch.sparse_coo; expected a dense tensor"):
        wrap(model).export_safetensors(tmp_path)
    with pytest.raises(ConfigError, match="dtype: got 'int8'"):
        wrap(nn.Linear(4, 4)).export_safetensors(tmp_path, dtype="int8")
    assert not list(tmp_path.iterdir())


@pytest.mark.long("several trainings on two ranks or more")
def test_one_parameter_is_gathered_at_a_time_and_none_where_one_rank_has_all_shards(tmp_path):
    for world_size, expected in ((1, []), (2, [64 * 64] * 8)):

        @on_ranks(world_size)
        def found(rank):
            engine = wrap(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))), **STAGE_3, **BF16)
            live, sizes = engine.optimizer.sharding.live, []
            acquire = live.acquire
            live.acquire = lambda params: (acquire(params), sizes.append(live.numel))[0]
            engine.export_safetensors(tmp_path)
            return [*sizes], live.numel

        assert found == [(expected, 0)] * world_size


# --- transformers ------------------------------------------------------------------------------------


def transformer(kind, tied):
    import transformers as hf

    torch.manual_seed(0)
    if kind.startswith("llama"):
        config = hf.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                                num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied)  # fmt: skip
        model = hf.LlamaForCausalLM(config)
        if kind == "llama, head first":
            model._modules["model"] = model._modules.pop("model")
        return model
    if kind == "gpt2":
        config = hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=32, tie_word_embeddings=tied)
        return hf.GPT2LMHeadModel(config)
    config = hf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=2,
                         tie_word_embeddings=tied, decoder_start_token_id=0)  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


@pytest.mark.draws(7)
@pytest.mark.integration
@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("llama", False), ("gpt2", True), ("gpt2", False),
                                            ("t5", True), ("llama, head first", True)])  # fmt: skip
@pytest.mark.parametrize("fields", [{}, {**STAGE_3, **BF16}], ids=["stage 2", "stage 3"])
def test_from_pretrained_reads_an_export_and_ties_again(tmp_path, kind, tied, fields):
    model = transformer(kind, tied)
    engine = wrap(model, lr=1e-2, **fields)
    ids = torch.arange(16).view(2, 8)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    engine.export_safetensors(tmp_path, max_shard_bytes=20_000)
    model.config.save_pretrained(tmp_path)
    dtype = torch.bfloat16 if fields else torch.float32
    read, said = type(model).from_pretrained(tmp_path, dtype=dtype, output_loading_info=True)
    assert not any(said.values()), said
    engine.close()
    assert_same(read.state_dict(), model.state_dict())
    for has in (read, model):
        assert (has.get_output_embeddings().weight is has.get_input_embeddings().weight) == tied
    found, files = load(tmp_path)
    assert len(files) > 1
    model.save_pretrained(tmp_path / "theirs")
    assert found.keys() == load(tmp_path / "theirs")[0].keys()


# --- ranks --------------------------------------------------------------------------------------------


def trained(rank, steps, **fields):
    engine = wrap(gpt(), lr=1e-2, **fields)
    for step in range(steps):
        engine.backward(gpt_loss(engine, 2 * step + rank))
        engine.step()
    return engine


def exported(engine, folder, **options):
    engine.export_safetensors(folder, **options)
    dist.barrier()
    return safetensors.torch.load_file(folder / "model.safetensors")


def test_ranks_export_weights_and_states_of_ddp_with_fused_adamw_in_every_stage(tmp_path, drawn):
    on_device = {**STAGE_3, "offload_param": None}
    stages = drawn({"1": {"stage": 1}, "2": {"reduce_bucket_size": 1000}, "3": on_device}.items(), 1)

    @on_ranks(2)
    def _(rank):
        ddp = nn.parallel.DistributedDataParallel(gpt())
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2, fused=True)
        for step in range(3):
            gpt_loss(ddp, 2 * step + rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights, states = dict(ddp.module.named_parameters()), optimizer.state_dict()["state"]
        for name, fields in stages:
            engine = trained(rank, 3, **fields)
            for dtype in (None, "float32"):
                assert_same(exported(engine, tmp_path / f"{name} {dtype}", dtype=dtype), weights)
            assert (engine.optimizer.torch_state_dict() is None) == bool(rank)
            saved = engine.optimizer.torch_state_dict(rank0_only=False)["state"]
            assert saved.keys() == states.keys()
            for i, entry in saved.items():
                assert_same(entry, states[i])


@pytest.mark.long("several trainings on two ranks or more")
def test_ranks_export_their_master_weights_end_to_end_also_while_gradients_are_on_their_way(tmp_path):
    @on_ranks(2)
    def _(rank):
        engine = trained(rank, 2, **BF16)  # which has one bucket
        found = exported(engine, tmp_path / "whole", dtype="float32")
        for name, param in engine.module.named_parameters():
            parts = [None, None]
            dist.all_gather_object(parts, engine.optimizer.state[param].get("master", torch.empty(0)).clone())
            assert torch.equal(torch.cat(parts).view(param.shape), found[name])
        parted = trained(rank, 2, **BF16, **STAGE_3)
        assert_same(exported(parted, tmp_path / "parted", dtype="float32"), found)
        with gathered_parameters(parted.module.parameters()):
            whole = {name: param.detach().clone() for name, param in parted.module.named_parameters()}
        assert_same(exported(parted, tmp_path / "device"), whole)
        # Between backward and step, rank 1's exchanges begin when it waits for them: ranks meet in one order.
        pipeline, waits = parted.optimizer.core._pipeline, threading.Event()
        exchange, wait = pipeline.device.collectives.exchange, pipeline.buckets.wait
        if rank == 1:
            pipeline.device.collectives.exchange = lambda *args: (waits.wait(60), exchange(*args))[1]
            pipeline.buckets.wait = lambda *args: (waits.set(), wait(*args))[1]
        parted.backward(gpt_loss(parted, rank))
        moments = parted.optimizer.torch_state_dict(rank0_only=False)["state"]
        assert all(int(entry["step"]) == 2 for entry in moments.values())
        assert rank == 0 or waits.is_set()
        assert_same(exported(parted, tmp_path / "under way", dtype="float32"), found)
        assert parted.step().updated


def test_where_rank_0_cannot_write_all_ranks_are_told_and_train_on(tmp_path):
    (tmp_path / "file").touch()

    @on_ranks(2)
    def _(rank):
        engine = wrap(gpt(), lr=1e-2)
        said = "rank 0 could not write" if rank else r"file: cannot be written \(File exists\)"
        with pytest.raises(CheckpointError, match=said):
            engine.export_safetensors(tmp_path / "file")
        engine.backward(gpt_loss(engine, rank))
        assert engine.step().updated

    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# --- torch.optim.AdamW -------------------------------------------------------------------------------


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)).to(memory_format=torch.channels_last)


def groups(model, frozen=True):
    model[0].bias.requires_grad_(not frozen)
    return [{"params": [model[0].weight, model[2].weight]}, {"params": [model[0].bias, model[2].bias],
                                                             "weight_decay": 0.0, "lr": 3e-3}]  # fmt: skip


def run(model, optimizer, seeds, engine=None):
    for seed in seeds:
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
        if engine is None:
            model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.backward(engine(x).pow(2).mean())
            engine.step()


HYPER = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}


@pytest.mark.draws(1)
@pytest.mark.parametrize("adam_mode", ["adamw", "adam"])
@pytest.mark.parametrize("fields", [{}, STAGE_3], ids=["stage 2", "stage 3"])
def test_torch_goes_on_from_the_export_with_the_same_bits_and_back(fields, adam_mode):
    ours, theirs = net(), net()
    engine = wrap(ours, params=groups(ours), adam_mode=adam_mode, **HYPER, **fields)
    run(ours, None, range(3), engine)
    assert engine.optimizer.param_groups[1]["lr"] == 3e-3
    saved = engine.optimizer.torch_state_dict()
    assert sorted(saved["state"]) == [0, 1, 3]  # torch has no state of what is frozen
    cls = torch.optim.AdamW if adam_mode == "adamw" else torch.optim.Adam
    optimizer = cls(groups(theirs), lr=7.0, foreach=False)
    assert saved["param_groups"][0].keys() == optimizer.state_dict()["param_groups"][0].keys()
    with gathered_parameters(ours.parameters()):
        theirs.load_state_dict(ours.state_dict())
    run(ours, None, range(3, 6), engine)  # what was saved is a copy
    optimizer.load_state_dict(saved)
    run(theirs, optimizer, range(3, 6))
    last = engine.optimizer.torch_state_dict()
    engine.close()
    assert_same(ours.state_dict(), theirs.state_dict())
    for i, entry in optimizer.state_dict()["state"].items():
        assert_same(last["state"][i], entry)
    again = net()
    again.load_state_dict(theirs.state_dict())
    back = OffloadedAdamW(groups(again), adam_mode=adam_mode, **HYPER)
    back.load_state_dict(optimizer.state_dict())
    run(theirs, optimizer, range(6, 9))
    run(again, back, range(6, 9))
    assert_same(again.state_dict(), theirs.state_dict())


def test_states_keep_the_memory_order_of_their_parameters():
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    optimizer = OffloadedAdamW(conv.parameters())
    for p in conv.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    for name in ("exp_avg", "exp_avg_sq"):
        entry = optimizer.torch_state_dict()["state"][0][name]
        assert entry.stride() == conv.weight.stride()
        assert torch.equal(entry, optimizer.state[conv.weight][name])
        assert entry.data_ptr() != optimizer.state[conv.weight][name].data_ptr()
