"""Weights of a checkpoint on the disk, without an engine, are those that the engine itself exports."""

import resource
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from frontends.torch import deepspeed, load_deepspeed, wrap
from frontends.torch.deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from offload_core.__main__ import main
from offload_core.checkpoint.manifest import read_manifest, write_manifest
from offload_core.checkpoint.saved_weights import SavedWeights
from offload_core.errors import CheckpointError, ConfigError
from offload_core.support.checkpoint_folder import MANIFEST, find
from tests.support import one_process_group
from tests.support.deepspeed_checkpoints import Run, model, write
from tests.support.processes import ROOT, on_ranks, torch_server
from tests.support.torch_models import loss_of, make, same_bits

FIELDS = {
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3, "param_persistence_threshold": 0, "reduce_bucket_size": 1000},
    "16-bit masters": {"stage": 3, "param_persistence_threshold": 0, "master_dtype": "bfloat16"},
    "8-bit states": {"stage": 1, "state_format": "8bit"},
}


class Mixed(nn.Module):
    """A tied weight, a frozen one, one in channels_last, buffers, and sizes that two ranks do not divide."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5)
        self.out = nn.Linear(5, 5)
        self.again = nn.Linear(5, 5)
        self.again.weight = self.out.weight
        self.frozen = nn.Linear(5, 7).requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.again(self.out(self.norm(self.conv(x)).mean((2, 3)))))


@pytest.mark.draws(1)
@pytest.mark.parametrize("name", FIELDS)
def test_two_ranks_checkpoint_has_what_their_engine_exports(name, tmp_path):
    @on_ranks(2)
    def _(rank):
        engine = wrap(Mixed(), lr=1e-2, param_dtype="bfloat16", **FIELDS[name])
        for seed in range(2):
            torch.manual_seed(2 * seed + rank)
            x = torch.randn(4, 3, 6, 6, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
            engine.backward(engine(x).float().pow(2).mean())
            engine.step()
        engine.save_checkpoint(tmp_path / "saved")
        for dtype in ("float32", "bfloat16"):
            engine.export_safetensors(tmp_path / f"engine {dtype}", dtype=dtype)

    for dtype in ("float32", "bfloat16"):
        assert main(["export", str(tmp_path / "saved"), str(tmp_path / dtype), "--dtype", dtype]) == 0
        mine, engines = (load_file(tmp_path / each / "model.safetensors") for each in (dtype, f"engine {dtype}"))
        assert mine.keys() == engines.keys()
        for key, value in engines.items():
            assert mine[key].dtype == value.dtype, key
            assert same_bits(mine[key], value), key


def whole_bits(state):
    return {name: tensor.numpy().tobytes() for name, tensor in state.items()}


CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0},
}


def test_a_scripts_zero_to_fp32_takes_the_faces_checkpoints(tmp_path):
    with one_process_group.alone():
        module = make()
        engine = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=CONFIG)[0]
        found = []
        for seed in range(2):
            engine.backward(loss_of(engine, seed))
            engine.step()
            engine.save_checkpoint(tmp_path, tag=seed)
            found.append({n: deepspeed.utils.safe_get_full_fp32_param(p).clone() for n, p in module.named_parameters()})
        assert whole_bits(get_fp32_state_dict_from_zero_checkpoint(tmp_path)) == whole_bits(found[1])
        assert whole_bits(get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), 0)) == whole_bits(found[0])
        other = load_state_dict_from_zero_checkpoint(make(), tmp_path, "0")
        assert whole_bits(other.state_dict()) == whole_bits(found[0])
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "bin")
        written = torch.load(tmp_path / "bin" / "pytorch_model.bin", weights_only=True)
        assert whole_bits(written) == whole_bits(found[1])
        for size in ("5GB", 10**9):
            convert_zero_checkpoint_to_fp32_state_dict(
                tmp_path, tmp_path / "safe", size, safe_serialization=True, tag="0"
            )
            assert whole_bits(load_file(tmp_path / "safe" / "model.safetensors")) == whole_bits(found[0])
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "cut", "1KB", safe_serialization=True)
        assert len([*(tmp_path / "cut").glob("*.safetensors")]) > 1
        for wrong, error, words in (
            (lambda: get_fp32_state_dict_from_zero_checkpoint(tmp_path / "none"), CheckpointError, "latest"),
            (lambda: get_fp32_state_dict_from_zero_checkpoint(tmp_path, "7"), CheckpointError, "no such checkpoint"),
            (
                lambda: convert_zero_checkpoint_to_fp32_state_dict(
                    tmp_path, tmp_path / "x", "5", safe_serialization=True
                ),
                ConfigError,
                "max_shard_size: got '5', expected a size such as 32GB",
            ),
        ):
            with pytest.raises(error, match=words):
                wrong()
        assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 3), (2, 2), (3, 3)])
def test_and_deepspeeds_own(stage, ranks, tmp_path):
    run = Run()
    write(tmp_path, run, stage, ranks)
    plain = model()
    load_deepspeed(plain, tmp_path)
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert found.keys() == plain.state_dict().keys()
    if stage:
        assert found["head.weight"] is found["embedding.weight"]
    for name, value in plain.state_dict().items():
        assert found[name].dtype == torch.float32
        assert same_bits(found[name], value), name
    without = get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert found.keys() - without.keys() == ({"frozen.weight", "frozen.bias"} if stage else set())
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "safe", safe_serialization=True)
    written = load_file(tmp_path / "safe" / "model.safetensors")
    for name, value in written.items():
        assert same_bits(found[name], value), name


def test_tied_weights_have_all_their_names_and_frozen_ones_are_told_from_buffers(tmp_path):
    module = Mixed()
    engine = wrap(module, lr=1e-2)
    engine.save_checkpoint(tmp_path)
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert found["again.weight"] is found["out.weight"]
    Mixed().load_state_dict(found)  # strict
    trained = get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert found.keys() - trained.keys() == {"frozen.weight", "frozen.bias"}
    itself = get_fp32_state_dict_from_zero_checkpoint(find(tmp_path))
    assert whole_bits(itself) == whole_bits(found)


def test_a_checkpoint_of_before_these_were_noted_is_read(tmp_path):
    engine = wrap(Mixed(), lr=1e-2)
    path = engine.save_checkpoint(tmp_path)
    content = read_manifest(path / MANIFEST)
    for name in ("tied", "buffers"):
        del content[name]
    write_manifest(path, content)
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert Mixed().state_dict().keys() - found.keys() == {"again.weight"}
    trained = get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert trained.keys() == {name for name, p in Mixed().named_parameters() if p.requires_grad}


def test_a_parameter_without_elements_is_written_too(tmp_path):
    module = nn.Linear(2, 2)
    module.empty = nn.Parameter(torch.empty(0, 3))
    engine = wrap(module, lr=1e-2, param_dtype="bfloat16")
    engine.save_checkpoint(tmp_path / "saved")
    engine.export_safetensors(tmp_path / "engine", dtype="float32")
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "mine")]) == 0
    mine, engines = (load_file(tmp_path / each / "model.safetensors") for each in ("mine", "engine"))
    assert mine["empty"].shape == (0, 3)
    assert {n: (t.shape, t.dtype) for n, t in mine.items()} == {n: (t.shape, t.dtype) for n, t in engines.items()}


def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path):
    engine = wrap(nn.Linear(2, 2), lr=1e-2)
    engine.save_checkpoint(tmp_path / "secret", tag="x")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "latest").write_text("../secret/x")
    for read in (
        lambda: get_fp32_state_dict_from_zero_checkpoint(tmp_path / "mine"),
        lambda: get_fp32_state_dict_from_zero_checkpoint(tmp_path / "mine", "../secret/x"),
        lambda: get_fp32_state_dict_from_zero_checkpoint(tmp_path / "secret", "."),
        lambda: get_fp32_state_dict_from_zero_checkpoint(tmp_path / "secret", ""),
    ):
        with pytest.raises(CheckpointError, match="expected the name of a folder there"):
            read()


RUN = """
import runpy, sys, warnings
warnings.simplefilter("error")
module = sys.argv.pop(1)
sys.modules.pop(module, None)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("forks", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["forks", "processes"])
def test_the_command_takes_deepspeeds_arguments_and_says_one_line_of_what_is_wrong(tmp_path, forks):
    run = Run()
    write(tmp_path / "theirs", run, 2, 2)
    module = "frontends.torch.deepspeed.utils.zero_to_fp32"
    options = ["--safe_serialization", "--max_shard_size", "1KB", "--tag", "now", "--exclude_frozen_parameters"]

    def call(*arguments):
        if forks:
            [done] = torch_server().run(["-c", RUN, module, *arguments])
        else:
            command = [sys.executable, "-W", "error", "-m", module, *map(str, arguments)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        return done.returncode, done.stderr

    assert call(tmp_path / "theirs", tmp_path / "bin") == (0, "")
    written = torch.load(tmp_path / "bin" / "pytorch_model.bin", weights_only=True)
    assert whole_bits(written) == whole_bits(get_fp32_state_dict_from_zero_checkpoint(tmp_path / "theirs"))
    assert call(tmp_path / "theirs", tmp_path / "safe", *options) == (0, "")
    names = {name for file in (tmp_path / "safe").glob("*.safetensors") for name in load_file(file)}
    assert names == {*run.trained, "offset"}
    for wrong, words in (
        ((tmp_path / "none", tmp_path / "x"), "none/latest: no such file"),
        ((tmp_path / "theirs", tmp_path / "x", "-t", "then"), "then: no such checkpoint; expected one of now"),
        ((tmp_path / "theirs", tmp_path / "x", *options, "--max_shard_size", "5"), "max_shard_size: got '5'"),
        ((tmp_path / "theirs", tmp_path / "theirs" / "latest"), "cannot be written"),
    ):
        status, said = call(*wrong)
        assert (status, len(said.splitlines())) == (2, 1), said
        assert words in said
    assert not (tmp_path / "x").exists()
    with pytest.raises(CheckpointError, match="zero_to_fp32` takes its weights out"):
        SavedWeights(tmp_path / "theirs")


def test_a_full_disk_keeps_the_earlier_file(tmp_path):
    engine = wrap(nn.Linear(100, 100), lr=1e-2)
    engine.save_checkpoint(tmp_path / "saved")
    out = tmp_path / "out"
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", out)
    before = (out / "pytorch_model.bin").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"pytorch_model.bin: cannot be written \(.*; expected a folder with"):
            convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in out.iterdir()] == ["pytorch_model.bin"]
    assert (out / "pytorch_model.bin").read_bytes() == before


def test_an_element_type_that_no_file_has_is_named(tmp_path):
    run = Run()
    run.others["offset"] = run.others["offset"].to(torch.complex128)
    write(tmp_path, run, 2, 1)
    with pytest.raises(CheckpointError, match=r"'offset' is of torch.complex128, expected an element type of safetens"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)


def test_element_types_that_numpy_lacks_come_through(tmp_path):
    module = nn.Linear(3, 2)
    module.register_buffer("packed", torch.arange(6, dtype=torch.float32).to(torch.float8_e4m3fn))
    module.register_buffer("mask", torch.tensor([True, False]))
    module.register_buffer("none", torch.empty(0, 3))
    module.register_buffer("wide", torch.tensor(1 / 3, dtype=torch.float64))
    engine = wrap(module, lr=1e-2)
    engine.save_checkpoint(tmp_path)
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    for name in ("packed", "mask", "none", "wide"):
        value = module.get_buffer(name)
        assert found[name].dtype == (torch.float32 if value.is_floating_point() else value.dtype)
        assert found[name].shape == value.shape
        assert torch.equal(found[name], value.to(found[name].dtype))
