"""Five scripts for DeepSpeed run with their imports changed, and give what they give with the installed DeepSpeed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offload_core.deepspeed.names import VERSION
from tests.support.processes import ROOT, environment_of, free_port, torch_server
from tests.support.torch_models import same_bits

SCRIPTS = ROOT / "tests" / "workers" / "deepspeed_scripts"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
GPT = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 0.01, "weight_decay": 0.1, "betas": [0.9, 0.95], "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 20, "warmup_max_lr": 0.01, "warmup_num_steps": 3},
    },
    "zero_optimization": {"stage": 1},
    "steps_per_print": 1000,
}
GAN = {"train_micro_batch_size_per_gpu": 8, "zero_allow_untested_optimizer": True}
FILES = {
    "gpt": ["--save", "OUT", "--deepspeed", "--deepspeed_config", "OUT/config.json"],
    "gan": ["--outf", "OUT", "--deepspeed", "--deepspeed_config", "OUT/config.json"],
    "vit": ["--out", "OUT"],
    "lora": ["--output_dir", "OUT"],
    "resume": ["--checkpoint_dir", "OUT", "--metrics", "OUT/log.jsonl"],
}
"""The arguments of each script that say where it reads and writes."""


def command_of(script, out, *arguments, theirs=False):
    """What Python runs. ``theirs``: the script as it was before its imports were changed."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(GPT if script == "gpt" else GAN))
    file = SCRIPTS / f"{script}.py"
    if theirs:
        text, n_changed = re.subn(r"from frontends\.torch import deepspeed\b", "import deepspeed", file.read_text())
        assert n_changed == 1
        file = out / f"{script}.py"
        file.write_text(re.sub(r"\bfrontends\.torch\.deepspeed\b", "deepspeed", text))
        assert "frontends" not in file.read_text()
    return [str(file), *(each.replace("OUT", str(out)) for each in FILES[script]), *arguments]


def run(*commands, ranks=1, fails=False, modules=()):
    """Run commands at once, or one as each rank of a group. ``modules`` are imported once for all of them."""
    if ranks > 1:
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
        places = [{**group, **sizes, **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))} for rank in range(ranks)]
        commands = [*commands] * ranks
    else:
        places = [{} for _ in commands]
    for ended in torch_server().run(*commands, environments=places, merge=True, modules=modules):
        assert (ended.returncode != 0) == fails, ended.stdout[-3000:]


def launched(command):
    """Run torchrun, or another program that starts ranks; return its output."""
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    ended = subprocess.run(
        [sys.executable, *command],
        env={**environment_of(ROOT), **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-5000:]
    return ended.stdout


def log_of(out):
    if (out / "log.json").exists():
        return json.loads((out / "log.json").read_text())
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def weights_of(file):
    return torch.load(file, weights_only=True)


def falls(losses):
    return sum(losses[-3:]) < 0.9 * sum(losses[:3])


# --- with the face alone -------------------------------------------------------------------------------------------


def test_a_gpt_with_megatrons_arguments_learns_and_saves(tmp_path):
    run(command_of("gpt", tmp_path))
    log = log_of(tmp_path)
    assert falls([line["loss"] for line in log])
    assert [line["iteration"] for line in log if "valid" in line] == [4, 8, 12]
    assert [line["samples"] for line in log] == [8 * (1 + i) for i in range(12)]
    assert all(line["weight decay"] == [0.1, 0.0] for line in log)
    assert log[5]["lr"] == pytest.approx([0.01 * 15 / 17] * 2)
    assert {"iter_0000006", "iter_0000012"} <= set(os.listdir(tmp_path))
    assert (tmp_path / "latest").read_text().strip() == "iter_0000012"
    weights = weights_of(tmp_path / "pytorch_model.bin")
    assert weights["layers.1.mlp.2.weight"].shape == (32, 128)


def test_a_gan_of_two_engines_trains_both_models(tmp_path):
    run(command_of("gan", tmp_path))
    log = log_of(tmp_path)
    assert len(log) == 16
    assert falls([line["D"] for line in log]) or falls([line["G"] for line in log])
    for name, modules in ("netG", 2), ("netD", 3):
        weights = weights_of(tmp_path / f"{name}.pth")
        assert sum(value.dim() == 4 for value in weights.values()) == modules
    assert int(weights["main.3.num_batches_tracked"]) == 3 * 16  # real, fake, and the generator's


@pytest.mark.draws(1)
@pytest.mark.parametrize("arguments", [["--dtype=bf16", "--stage=1"], ["--dtype=fp16", "--stage=3"]], ids=" ".join)
def test_a_vision_transformer_learns_from_the_loader_that_it_gets(tmp_path, arguments):
    run(command_of("vit", tmp_path, *arguments))
    log = log_of(tmp_path)
    assert falls([line["loss"] for line in log[:-1]])
    assert log[-1]["accuracy"] > 0.6
    assert (tmp_path / "global_step18").is_dir()
    weights = weights_of(tmp_path / "weights.pt")
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert any(not same_bits(value, value.bfloat16().float()) for value in weights.values())


@pytest.mark.integration
def test_adapters_are_trained_in_stage_3_and_saved_whole(tmp_path):
    pytest.importorskip("peft")
    run(command_of("lora", tmp_path / "3"), command_of("lora", tmp_path / "2", "--zero_stage=2"), modules=["peft"])
    log = log_of(tmp_path / "3")
    assert log[0]["parameters"] > 20_000
    losses = [line["loss"] for line in log[1:]]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    found, expected = (weights_of(tmp_path / stage / "adapter_model.bin") for stage in "32")
    assert len(found) == 8
    for name, value in expected.items():
        assert value.abs().max() > 1e-3, name  # B began with zeros
        assert same_bits(found[name], value), name
    assert (tmp_path / "3" / "adapter_config.json").exists()


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["forks", "torchrun"])
def test_a_run_that_was_killed_and_started_again_has_the_bits_of_one_that_was_not(tmp_path, torchrun):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(command_of("resume", whole), ranks=2)
    run(command_of("resume", killed, "--killed_at=7"), ranks=2, fails=True)
    assert (killed / "latest").read_text().strip() == "global_step6"
    assert not (killed / "weights.pt").exists()
    if torchrun:
        launched([*TORCHRUN, *command_of("resume", killed)])
    else:
        run(command_of("resume", killed), ranks=2)
    expected, found = log_of(whole), log_of(killed)
    assert [line["step"] for line in expected] == [*range(10)]
    assert [line["step"] for line in found] == [*range(7), *range(6, 10)]
    assert {json.dumps(line) for line in found} == {json.dumps(line) for line in expected}
    assert falls([line["loss"] for line in expected])
    assert (whole / "latest").read_text().strip() == "global_step9"  # the last one was saved without it
    assert (whole / "last").is_dir()
    expected, found = (weights_of(out / "weights.pt") for out in (whole, killed))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert same_bits(found[name], value), name


# --- with the installed DeepSpeed, too -----------------------------------------------------------------------------

RUNS = [
    ("gpt", [], 1),
    ("gpt", [], 2),
    ("gan", [], 1),
    ("gan", [], 2),
    *(("vit", [f"--stage={stage}", "--dtype=fp32"], 1) for stage in range(4)),
    *(("vit", [f"--stage={stage}", "--dtype=bf16"], 1) for stage in (1, 2)),
    ("vit", ["--stage=2", "--dtype=fp32"], 2),
    ("lora", ["--torch_adam"], 1),
    ("lora", ["--torch_adam"], 2),
    ("lora", ["--torch_adam", "--zero_stage=2"], 1),
    *(("resume", [f"--stage={stage}"], 2) for stage in (1, 2, 3)),
]
"""Without a transformer in bfloat16 in stage 3: there DeepSpeed rounds some gradients otherwise than in its own stage
1. Those of the face are those of DeepSpeed's stage 1, in all stages."""


@pytest.fixture
def deepspeed():
    """The package, and the file of its launcher."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        found = distribution("deepspeed")
    except PackageNotFoundError:
        pytest.skip("DeepSpeed is not installed")
    if found.version != VERSION:
        pytest.skip(f"the face is that of DeepSpeed {VERSION}")
    return Path(found.locate_file("deepspeed"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "ranks"), RUNS, ids=lambda of: " ".join(of) if isinstance(of, list) else str(of)
)
def test_the_script_gives_what_it_gives_with_deepspeed(deepspeed, tmp_path, script, arguments, ranks):
    if script == "lora":
        pytest.importorskip("peft")
    outs = {theirs: tmp_path / ("theirs" if theirs else "ours") for theirs in (True, False)}
    launcher = [*TORCHRUN[:-1], f"--nproc-per-node={ranks}"]
    for theirs, out in outs.items():
        launched([*launcher, *command_of(script, out, *arguments, theirs=theirs)])
    expected, found = log_of(outs[True]), log_of(outs[False])
    apart = [*differences(expected, found, "log")]
    files = [*outs[True].glob("*.pt"), *outs[True].glob("*.pth"), *outs[True].glob("*.bin")]
    assert files
    for file in files:
        apart += differences(weights_of(file), weights_of(outs[False] / file.name), file.name)
    assert not apart, "\n".join(apart)


def differences(expected, found, place):
    """The places at which two results differ, each with the values."""
    if isinstance(expected, dict):
        if expected.keys() != found.keys():
            yield f"{place}: {sorted(expected)} and {sorted(found)}"
            return
        for name, value in expected.items():
            yield from differences(value, found[name], f"{place}/{name}")
    elif isinstance(expected, list):
        if len(expected) != len(found):
            yield f"{place}: {len(expected)} and {len(found)} entries"
            return
        for i, pair in enumerate(zip(expected, found, strict=True)):
            yield from differences(*pair, f"{place}/{i}")
    elif isinstance(expected, torch.Tensor):
        if (expected.dtype, expected.shape) != (found.dtype, found.shape):
            yield f"{place}: {expected.dtype} {expected.shape} and {found.dtype} {found.shape}"
        elif not torch.allclose(expected, found, rtol=1e-6, atol=1e-6):
            yield f"{place}: apart by {(expected - found).abs().max().item():.1e}"
    elif expected != found and not (isinstance(expected, float) and abs(expected - found) <= 1e-6 * max(1, expected)):
        yield f"{place}: {expected} and {found}"


@pytest.mark.slow
def test_the_launcher_of_deepspeed_starts_a_script_with_the_face(deepspeed, tmp_path):
    """As ``deepspeed --num_gpus 2 script.py`` does; on the CPU, it counts slots and asks for no GPU."""
    by_torchrun, by_theirs = tmp_path / "torchrun", tmp_path / "deepspeed"
    launched([*TORCHRUN, *command_of("resume", by_torchrun)])
    launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus=2", "--master_port", str(free_port())]
    said = launched([*launcher, *command_of("resume", by_theirs)])
    assert "--local_rank=1" in said  # the launcher gives each script its number
    assert log_of(by_theirs) == log_of(by_torchrun)
    for name, value in weights_of(by_torchrun / "weights.pt").items():
        assert same_bits(weights_of(by_theirs / "weights.pt")[name], value), name
