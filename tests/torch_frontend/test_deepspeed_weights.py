"""Weights of real DeepSpeed checkpoints (tests/fixtures/deepspeed/make.py), against what DeepSpeed reads from them."""

import copy
import io
import os
import tarfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from frontends.torch import gathered_parameters, load_deepspeed, wrap
from frontends.torch.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from frontends.torch.integrations.zero_files import pickles
from offload_core import CheckpointError
from tests import sampling
from tests.support.archives import unpack
from tests.support.deepspeed_checkpoints import CASES, model
from tests.support.processes import on_ranks

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "deepspeed"
STAGE_3 = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 10, "reduce_bucket_size": 1000}


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    """A checkpoint's folder, and the fp32 weights that are in it."""
    with tarfile.open(FIXTURES / f"{request.param}.tar.xz") as archive:
        unpack(archive, tmp_path)
    return tmp_path, load_file(FIXTURES / f"{request.param}.safetensors")


def blank():
    made = model()
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.fill_(7.0)
    return made


def assert_loaded(state, weights, frozen):
    """Every trained weight and the buffer have DeepSpeed's bits, and nothing is left as it was."""
    assert weights.keys() - {"frozen.weight", "frozen.bias"} == state.keys() - {"frozen.weight", "frozen.bias"}
    for name, tensor in weights.items():
        assert torch.equal(state[name], tensor.to(state[name].dtype)), name
    for name, tensor in frozen.items():  # which zero_to_fp32 misses on one rank of stage 1
        assert torch.equal(state[name], tensor.to(state[name].dtype)), name


def frozen_of(folder):
    """The frozen parameters are as they were made, rounded to what the run was in."""
    dtype = torch.float16 if list(folder.rglob("zero_pp_rank_0_mp_rank_00_optim_states.pt")) else torch.bfloat16
    return {n: p.detach().to(dtype).float() for n, p in model().named_parameters() if n.startswith("frozen")}


@pytest.mark.draws(3)
@pytest.mark.parametrize("fields", [{}, {"param_dtype": "bfloat16"}, STAGE_3, {**STAGE_3, "param_dtype": "bfloat16"}])
def test_an_engine_has_the_fp32_weights_exactly_and_trains_on(case, fields):
    folder, weights = case
    engine = wrap(blank(), lr=1e-2, **fields)
    load_deepspeed(engine, folder)
    for name, param in engine.module.named_parameters():
        if engine.optimizer.has_states(param):
            assert torch.equal(engine.optimizer.whole_states(param)["master"], weights[name]), name
    with gathered_parameters(engine.module.parameters()):
        state = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    assert_loaded(state, weights, frozen_of(folder))
    other = blank()
    load_deepspeed(other, folder, tag="after-3")
    assert_loaded(other.state_dict(), weights, frozen_of(folder))
    twin = wrap(other, lr=1e-2, **fields)
    for e in (engine, twin):
        e.backward(e(torch.arange(7)).float().pow(2).mean())
        e.step()
        e.close()
    for (name, x), (_, y) in zip(engine.module.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(x, y), name


def test_whole_weights_are_those_that_deepspeeds_own_function_reads(case):
    folder, weights = case
    found = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert_loaded(found, weights, frozen_of(folder))
    assert found["head.weight"] is found["embedding.weight"]
    assert not any(name.startswith("frozen") for name in get_fp32_state_dict_from_zero_checkpoint(folder, None, True))


@pytest.mark.draws(1)
def test_nothing_in_a_file_is_run_and_nothing_half_is_loaded(case, tmp_path, monkeypatch):
    folder, _ = case
    files = sorted((folder / "after-3").glob("*.pt"))
    engine = wrap(blank(), param_dtype="bfloat16")
    before = copy.deepcopy(engine.module.state_dict())

    def refused(said, **kwargs):
        with pytest.raises(CheckpointError, match=said):
            load_deepspeed(engine, folder, **kwargs)
        for name, tensor in engine.module.state_dict().items():
            assert torch.equal(tensor, before[name])

    class Runs:
        def __init__(self, function, *args):
            self.call = function, args

        def __reduce__(self):
            return self.call

    for path in files:
        whole = path.read_bytes()
        state = torch.load(io.BytesIO(whole), weights_only=False) if "model" in path.name else {}
        for function, name in ((os.mkdir, "mkdir"), (eval, "eval"), (copy.copy, "copy.copy")):
            torch.save({**state, "module": Runs(function, str(tmp_path / "ran"))}, path)
            refused(rf"{path.name}: .*{name}")
        for length in (0, 100, len(whole) - 100):
            path.write_bytes(whole[:length])
            refused(rf"{path.name}: cannot be read")
        path.unlink()
        refused(r"states.pt|expected")
        path.write_bytes(whole)
    assert not (tmp_path / "ran").exists()
    (folder / "after-3" / "layer_00-model_states.pt").write_bytes(b"")
    refused(r"layer_00-model_states.pt: is of a pipeline's")
    (folder / "after-3" / "layer_00-model_states.pt").unlink()
    refused("other: no such folder", tag="other")
    (folder / "latest").unlink()
    refused("latest: no such file")
    load_deepspeed(engine, folder, tag="after-3")


def paths_of(tree, at=()):
    """The ways to everything in dicts and lists."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if type(tree) in (list, tuple) else ()
    for key, value in pairs:
        yield (*at, key)
        yield from paths_of(value, (*at, key))


@pytest.mark.draws(1)
def test_what_is_damaged_is_refused_or_does_not_matter(case, drawn):
    folder, _ = case
    sound, n_ways = blank(), 0
    load_deepspeed(sound, folder)
    for path in sorted((folder / "after-3").glob("*.pt")):
        state = pickles.load(path)
        for name in ("loss_scaler", "zero_stage", "param_slice_mappings"):  # DeepSpeed's own classes
            state.get("optimizer_state_dict", {}).pop(name, None)
        state = copy.deepcopy(state)  # it is mapped from the file that is to be written
        torch.save(state, path)
        load_deepspeed(blank(), folder)
        ways = [*paths_of({key: value for key, value in state.items() if key not in ("ds_config", "lr_scheduler")})]
        n_ways += len(ways)
        for way in drawn(ways, sampling.least(len(ways))):
            if "base_optimizer_state" in way or way.count("optimizer_state_dict") > 1:
                continue
            for kind in (7, torch.zeros(1), [], "no values"):
                damage = kind
                wrong = copy.deepcopy(state)
                holder = wrong
                for key in way[:-1]:
                    holder = holder[key]
                if isinstance(holder, tuple):
                    continue
                if type(kind) is str and isinstance(holder[way[-1]], torch.Tensor):
                    damage = holder[way[-1]].to("meta")
                holder[way[-1]] = damage
                torch.save(wrong, path)
                found = blank()
                refusal = None
                try:
                    load_deepspeed(found, folder)
                except CheckpointError as error:
                    refusal = str(error)
                assert refusal is None or str(folder) in refusal, way
                expected = blank() if refusal else sound
                for name, tensor in found.state_dict().items():
                    assert torch.equal(tensor, expected.state_dict()[name]), (way, damage, name)
        torch.save(state, path)
    assert n_ways > 100


def test_a_checkpoint_of_another_model_is_refused(case):
    folder, _ = case
    narrow, more, less = blank(), blank(), blank()
    narrow.back = torch.nn.Linear(5, 4)
    more.extra = torch.nn.Linear(2, 2)
    del less.norm
    refusals = {
        r"'back.weight' has shape \[3, 5\], expected \[4, 5\]": narrow,
        "has no 'extra.weight'": more,
        "has 'norm.weight', 'norm.bias', which the model has not": less,
    }
    for said, wrong in refusals.items():
        with pytest.raises(CheckpointError, match=said):
            load_deepspeed(wrong, folder)
        assert wrong.embedding.weight.unique().tolist() == [7]


def test_ranks_load_a_checkpoint_in_every_stage_and_write_it_again_as_it_was(tmp_path):
    with tarfile.open(FIXTURES / "stage3-bf16-2.tar.xz") as archive:
        unpack(archive, tmp_path / "deepspeed")
    (tmp_path / "none").mkdir()

    @on_ranks(2)
    def _(rank):
        expected = {n: tensor.float() for n, tensor in load_file(FIXTURES / "stage3-bf16-2.safetensors").items()}
        del expected["head.weight"]  # tied
        expected["offset"] = expected["offset"].bfloat16().float()  # a buffer, of the engine's element type
        for stage in (2, 3):
            types = {"param_dtype": "bfloat16", "buffer_dtype": "bfloat16"}
            engine = wrap(model(), **types, stage=stage, param_persistence_threshold=10)
            load_deepspeed(engine, tmp_path / "deepspeed")
            for dtype in ("float32", "bfloat16"):
                folder = tmp_path / f"{stage} {dtype}"
                engine.export_safetensors(folder, dtype=None if dtype == "bfloat16" else dtype)
                dist.barrier()
                found = load_file(folder / "model.safetensors")
                assert found.keys() == expected.keys()
                for name, tensor in found.items():
                    assert tensor.dtype is getattr(torch, dtype)
                    assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
            engine.backward(engine(torch.arange(7)).float().pow(2).mean())
            assert engine.step().updated
            with pytest.raises(CheckpointError, match="failed in process 0" if rank else "latest: no such file"):
                load_deepspeed(engine, tmp_path / ("deepspeed" if rank else "none"))
