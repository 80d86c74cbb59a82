"""Whatever a file or a command line says: it is taken, or refused by an error that has a name.

The examples are always the same, unless ``OFFLOAD_CORE_FUZZ_SECONDS`` has the slow test look for others for so long.
"""

import copy
import io
import itertools
import json
import os
import time
import warnings
from contextlib import redirect_stderr, redirect_stdout, suppress

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from frontends.torch import export_deepspeed, wrap, zero_checkpoint
from offload_core.__main__ import main
from offload_core.checkpoint.manifest import read_manifest, write_manifest
from offload_core.commands.model_shapes import INDEX, shapes_of
from offload_core.config.options import FIELDS, OffloadConfig
from offload_core.deepspeed.keys import KEYS
from offload_core.errors import CheckpointError, ConfigError, ConfigWarning
from offload_core.support.checkpoint_folder import MANIFEST
from tests.support import deepspeed_checkpoints
from tests.support.damaged import VALUES, Written, nodes, put
from tests.support.hostile import not_forever

SECONDS = float(os.environ.get("OFFLOAD_CORE_FUZZ_SECONDS", "0"))

# --- what is put into files ------------------------------------------------------------------------

INTEGERS = st.sampled_from([-1, 0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64, -(2**63), 10**30])
SCALARS = st.one_of(
    st.none(), st.booleans(), INTEGERS, st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from(["auto", "nan", "inf", "..", "/", "\0", "F64", "I64", "BF16", "Adam", "cpu", "step-00000001"]),
)  # fmt: skip
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
KINDS = ("tuple", "set", "dict", "Counter", "float", "complex", "bytes", "scalar", "array", "torch", "jax", "os.system")
PLAIN = JSON | st.builds(lambda kind, value: {"$": kind, "value": value}, st.sampled_from(KINDS), JSON)
EDITS = st.lists(
    st.tuples(st.integers(0, 10**6), st.sampled_from(VALUES) | PLAIN | st.just("like another")), min_size=1, max_size=3
)


def edited(content, edits):
    """A copy with some values replaced, or exchanged for others in it; None if an edit is in what another removed."""
    content = copy.deepcopy(content)
    paths = [*nodes(content)]
    for at, value in edits:
        path = paths[at % len(paths)]
        try:
            if value == "like another":
                value = content
                for key in paths[at * 7919 % len(paths)]:
                    value = value[key]
                value = copy.deepcopy(value)
            put(content, path, value)
        except (KeyError, IndexError, TypeError):
            return None
    return content


@st.composite
def changed_text(draw, text):
    """A text with a few places cut out, doubled or filled with something else."""
    for _ in range(draw(st.integers(1, 3))):
        at, length = draw(st.integers(0, len(text))), draw(st.integers(0, 9))
        new = draw(
            st.sampled_from(
                ["", "'''", '"', "{", "}", "[", ",", ":", "/*", "#", "\\", "9" * 5000, "[" * 2000, "\n", "\0"]
            )
            | st.text(max_size=3)
        )
        text = text[:at] + new + text[at + length :]
    return text


def command(arguments):
    """The status of a command. What it prints must be writable as UTF-8."""
    with redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")), redirect_stderr(io.StringIO()):
        return main(arguments)


# --- the targets -------------------------------------------------------------------------------------


class Manifest:
    """``Checkpoint`` in the core, and the command that shows it."""

    errors = (CheckpointError,)

    def __init__(self, folder):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("offload_core.checkpoint.shard_writer.BLOCK_BYTES", 1024)
            self.written = Written(folder)
        text = (self.written.new / MANIFEST).read_text()
        self.examples = EDITS | JSON | st.binary(max_size=40) | changed_text(text)

    def run(self, example):
        path = self.written.new
        if isinstance(example, str | bytes):
            (path / MANIFEST).write_bytes(
                example.encode(errors="surrogatepass") if isinstance(example, str) else example
            )
        else:
            edits = isinstance(example, list) and example and isinstance(example[0], tuple)
            content = edited(self.written.content, example) if edits else example
            try:
                self.written.edit(content)
            except (ValueError, TypeError, UnicodeEncodeError, RecursionError):  # nothing that JSON holds
                return
        assert command(["inspect", str(path)]) in (0, 1, 2)
        self.written.load(path)


class Engine:
    """``load_checkpoint`` of the torch front end: plain values, groups, random states."""

    errors = (CheckpointError,)

    def __init__(self, folder):
        self.engine = wrap(nn.Linear(4, 2), lr=1e-2, param_dtype="float16")
        self.schedule = torch.optim.lr_scheduler.StepLR(self.engine.optimizer, 3)
        extras = {"table": torch.arange(3), "pair": (1, {2, 3}), "z": 1j}
        self.path = self.engine.save_checkpoint(folder, stateful={"s": self.schedule}, extras=extras)
        self.content = read_manifest(self.path / MANIFEST)
        self.examples = EDITS

    def run(self, example):
        # Files and tensors are those of the other target.
        plain = {key: value for key, value in self.content.items() if key != "files"}
        content = edited(plain, example)
        try:
            write_manifest(self.path, content | {"files": self.content["files"]})
        except (ValueError, TypeError, RecursionError):
            return
        state = torch.get_rng_state()
        try:
            self.engine.load_checkpoint(self.path, stateful={"s": self.schedule})
        finally:
            torch.set_rng_state(state)
        self.engine.backward(self.engine(torch.ones(1, 4)).float().sum())
        self.engine.step()


def forged_tensors():
    """What torch can save, and ZeRO would not."""
    made = st.sampled_from([
        lambda: torch.zeros(1).expand(36), lambda: torch.zeros(72)[::2], lambda: torch.zeros(1).expand(2**40),
        lambda: torch.zeros(36, dtype=torch.int64), lambda: torch.zeros(36, dtype=torch.complex64),
        lambda: torch.full((36,), float("nan")), lambda: torch.empty(0), lambda: torch.tensor(5.0),
        lambda: torch.zeros(3, 3).t(), lambda: torch.zeros(36, dtype=torch.float64), lambda: torch.zeros(2).to_sparse(),
        lambda: torch.empty(4, device="meta"), lambda: torch.zeros(36, dtype=torch.float8_e5m2),
        lambda: torch.Size([7, 3]), lambda: torch.Size([2**62, 4]), lambda: {1, 2}, lambda: 1j, lambda: b"\xff",
        lambda: complex, lambda: os.system,
    ])  # fmt: skip
    return made.map(lambda make: make())


class ZeroFiles:
    """The files of a run that DeepSpeed has saved: values in them, or bytes, are others."""

    errors = (CheckpointError,)

    def __init__(self, folder):
        self.runs = []
        for stage in (0, 2, 3):
            run = deepspeed_checkpoints.Run()
            run.described = {"epoch": [1, {"best": 0.5}]}
            deepspeed_checkpoints.write(folder / f"stage{stage}", run, stage, 2 if stage else 1)
            self.runs.append(folder / f"stage{stage}")
        self.engine = deepspeed_checkpoints.engine_of(param_dtype="float16")
        zero_checkpoint(self.runs[1]).load(self.engine)  # as a checkpoint of DeepSpeed's that is written here has it
        export_deepspeed(self.engine, folder / "universal")
        self.runs.append(folder / "universal")
        self.bytes = {path: path.read_bytes() for path in sorted(folder.rglob("*.pt"))}
        values = st.sampled_from(VALUES) | SCALARS | JSON | forged_tensors() | st.just("like another")
        edits = st.lists(st.tuples(st.integers(0, 10**6), values), min_size=1, max_size=3)
        flips = st.lists(st.tuples(st.integers(0, 10**5), st.binary(min_size=1, max_size=4)), min_size=1, max_size=4)
        self.examples = st.tuples(
            st.integers(0, 10**6),
            st.tuples(st.just(self.forged), edits) | st.tuples(st.just(self.flipped), flips),
            st.booleans(),
        )

    def run(self, example):
        number, (change, edits), states = example
        path = [*self.bytes][number % len(self.bytes)]
        run = next(run for run in self.runs if run in path.parents)
        before = str(self.engine.optimizer.state_dict()["state"])
        try:
            if change(path, edits):
                zero_checkpoint(run).load(self.engine, optimizer_states=states)
        except CheckpointError as error:
            unchanged = str(self.engine.optimizer.state_dict()["state"]) == before and "broke off" not in str(error)
            if not unchanged:
                raise AssertionError("an error after something had changed") from error
            raise
        finally:
            path.write_bytes(self.bytes[path])

    def flipped(self, path, edits):
        """Bytes are others, most of them in the pickle, which lies at the beginning, or in the archive's directory."""
        data = bytearray(self.bytes[path])
        for at, new in edits:
            ranges = ((0, len(data)), (0, min(len(data), 3000)), (max(len(data) - 900, 0), len(data)))
            first, end = ranges[at % 3]
            place = first + at // 3 % (end - first)
            data[place : place + len(new)] = new
        path.write_bytes(data)
        return True

    def forged(self, path, edits):
        with deepspeed_checkpoints.importable_scalers(), suppress(Exception):
            state = edited(torch.load(path, weights_only=False), edits)
            if state is not None:
                torch.save(state, path)
                return True
        return False


class Header:
    """A safetensors file or an index, read for ``plan``."""

    errors = (CheckpointError, OSError)

    def __init__(self, folder):
        self.folder = folder
        entry = st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "BF16", "F16", "I64", "F8_E4M3", "X"]) | JSON,
                "shape": st.lists(st.integers(-1, 4) | INTEGERS, max_size=4) | JSON,
                "data_offsets": st.tuples(st.integers(0, 64), st.integers(0, 64))
                | st.lists(INTEGERS, max_size=3)
                | JSON,
            }
        )
        header = st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), entry | JSON, max_size=3)
        text = (header | JSON).map(lambda value: json.dumps(value).encode())
        index = st.dictionaries(
            st.text(max_size=3), st.sampled_from(["x.safetensors", "..", INDEX, "/dev/zero", "\0"]) | JSON
        )
        self.examples = st.one_of(
            st.tuples(
                text, st.none() | st.integers(0, 100) | INTEGERS.filter(lambda n: 0 <= n < 2**64), st.integers(0, 64)
            ),
            st.binary(max_size=40),
            st.fixed_dictionaries({"weight_map": index | JSON}) | JSON,
        )

    def run(self, example):
        path = self.folder / ("x.safetensors" if isinstance(example, tuple | bytes) else INDEX)
        if isinstance(example, tuple):
            text, length, n_bytes = example
            example = (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(n_bytes)
        path.write_bytes(example if isinstance(example, bytes) else json.dumps(example).encode())
        arguments = ["plan", "--model", str(path), "--dram-bandwidth=1GB", "--host-memory=1GB"]
        assert command(arguments) in (0, 1, 2)
        shapes_of(path)


def _sections(keys):
    found = {}
    for name, key in keys.items():
        inner = PLAIN if key.keys is None else st.one_of(st.deferred(lambda key=key: _sections(key.keys)), SCALARS)
        likely = st.one_of(
            SCALARS, st.just("auto"), st.sampled_from([True, False, 1, 2, 0.5, "cpu", "fp16", [0.9, 0.99]])
        )
        found[name] = inner if key.keys is not None else likely | inner
    return st.lists(st.sampled_from([*found]), max_size=5, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: found[name] for name in names})
    )


CONFIGS = _sections(KEYS) | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=4), PLAIN | SCALARS, max_size=4)
SAMPLE = """{ // as in tutorials
  "train_batch_size": 8, 'gradient_clipping': 1.0, bf16: {enabled: true}
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": 1000}},
  "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}} # the end
}"""


class Configuration:
    """A dict, or a file of it or of a broken one."""

    errors = (ConfigError,)

    def __init__(self, folder):
        self.path = folder / "ds.json"
        huge = st.just({"train_batch_size": 10**5000}) | st.just({10**5000: 1})
        files = CONFIGS.map(lambda config: json.dumps(config)) | changed_text(SAMPLE)
        self.examples = st.tuples(CONFIGS | huge | files | st.binary(max_size=30), st.integers(1, 8))

    def run(self, example):
        config, world_size = example
        if isinstance(config, str | bytes):
            self.path.write_bytes(config if isinstance(config, bytes) else config.encode(errors="surrogatepass"))
            config = self.path
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConfigWarning)
            resolved = OffloadConfig.resolve(config, world_size=world_size)
        for updates in (0, 1, 10**6):
            resolved.hyperparameters(updates)


QUANTITIES = st.one_of(
    st.sampled_from(
        ["1", "8", "3", "1e36", "1e300", "1e999", "-1", "0", "nan", "10B", "124M", "1T", "2.5", "32GiB", "x", ""]
    ),
    st.from_regex(r"[0-9]{1,40}(\.[0-9])?(e[0-9]{1,3})?[KMGTB]?(/s)?", fullmatch=True),
    st.text(max_size=5),
    st.just("9" * 5000),
)
FLAGS = [
    "--parameters", "--model", "--param-dtype", "--stage", "--offload-param", "--world-size", "--device", "--x",
    "--local-world-size", "--host-memory", "--device-memory", "--activation-memory", "--reduce-bucket-size",
    "--gradient-accumulation-steps", "--max-live-parameters", "--schedule", "--link-bandwidth", "--flops", "--tokens",
]  # fmt: skip
CHOICES = st.sampled_from(["cuda", "cpu", "none", "float32", "bfloat16", "float16", "1", "2", "3", "overlap", "serial"])


class CommandLine:
    """``python -m offload_core``."""

    errors = (SystemExit,)

    def __init__(self, folder):
        flag = st.builds("{}={}".format, st.sampled_from(FLAGS), QUANTITIES | CHOICES)
        switches = st.sampled_from(["--json", "--activation-checkpointing", "--help"])
        model = st.sampled_from([["--preset=tiny"], ["--preset=gpt2-124m"], ["--parameters=10M"], []])
        plan = st.builds(
            lambda model, flags: ["plan", "--dram-bandwidth=1GB", *model, *flags],
            model,
            st.lists(flag | switches, max_size=4),
        )
        paths = st.sampled_from(["/dev/zero", "/", "", "\0", "x" * 5000, str(folder)]) | st.text(max_size=4)
        inspect = st.builds(
            lambda path, flags: ["inspect", *flags, "--", path], paths, st.lists(st.just("--json"), max_size=1)
        )
        self.examples = plan | inspect | st.lists(st.text(max_size=5), max_size=3)

    def run(self, arguments):
        if arguments[:1] == ["info"]:  # it measures
            return
        assert command([argument.encode(errors="replace").decode() for argument in arguments]) in (0, 1, 2)


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*the run goes on with its hyperparameters"),
    pytest.mark.filterwarnings("ignore:.*its state of 'lr_scheduler' is not loaded"),
]
TARGETS = (Manifest, Engine, ZeroFiles, Header, Configuration, CommandLine)


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    return {kind: kind(tmp_path_factory.mktemp(kind.__name__)) for kind in TARGETS}


def fuzz(target, seed, examples):
    @hypothesis.seed(seed)
    @settings(max_examples=examples, suppress_health_check=[*HealthCheck])
    @given(target.examples)
    def one(example):
        try:
            with not_forever():
                target.run(example)
        except target.errors as error:
            said.append(error.code in (0, 2) if isinstance(error, SystemExit) else bool(str(error)))

    said = []
    one()
    assert said
    assert all(said)


@pytest.mark.draws(1)
@pytest.mark.parametrize("kind", TARGETS, ids=lambda kind: kind.__name__)
def test_no_input_raises_an_error_without_a_name(targets, kind):
    fuzz(targets[kind], 0, 60)


@pytest.mark.slow
def test_no_input_of_many_raises_an_error_without_a_name(targets):
    end = time.monotonic() + SECONDS
    for seed in itertools.count(time.time_ns()) if SECONDS else range(1, 4):
        for kind in TARGETS:
            print(kind.__name__, seed)
            fuzz(targets[kind], seed, 100)
        if SECONDS and time.monotonic() > end:
            break
