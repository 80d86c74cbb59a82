"""``python -m offload_core plan`` and ``info``: what they print, and that the plan is the one that ``wrap`` makes."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save_file

import frontends.torch.training.components as parts_module
from bench.train.gpt_jax import init_params
from bench.train.gpt_torch import GPT
from frontends.jax import wrap as wrap_jax
from frontends.jax.placement import placement as jax_placement
from frontends.jax.placement.as_placed import AsPlaced
from frontends.jax.tree.shards import local_shards
from frontends.torch import wrap
from frontends.torch.training import registration
from offload_core import DeviceMemoryError, HostMemoryError
from offload_core.__main__ import READER_GONE, main
from offload_core.commands.jax_shapes import MeshPart, cuts_of
from offload_core.commands.model_shapes import GPTS, LEAST, GPTConfig, gpt_of
from offload_core.config.options import OffloadConfig
from offload_core.device.exchange_sizes import planned_device, planned_jax_device
from offload_core.device.host_ranks import HostRanks
from offload_core.dtypes import BFLOAT16, FLOAT32
from offload_core.layout.partition import ParamSpec
from offload_core.memory.host_memory import HostMemory
from offload_core.memory.plan import ArrayBytes, MemoryPlan, PlanRow
from offload_core.plans.at_once import rows_at_once
from offload_core.plans.planner import Planner
from offload_core.plans.prediction import Speeds, predict
from offload_core.plans.terms import BucketTerms
from offload_core.ranks.consistency import VERSION
from offload_core.support.units import count, rate, size
from tests.support.slow_torch_device import SlowTorchDevice
from tests.support.strategies import law

ROOT = Path(__file__).resolve().parents[2]
SMALL = GPTConfig(layers=3, width=96, heads=3, vocabulary=500, positions=64)
RATES = ["--dram-bandwidth=100GB/s", "--link-bandwidth=25GB"]


def plan(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> dict:
    assert main(["plan", "--json", *RATES[: 1 if "--device=cpu" in arguments else 2], *map(str, arguments)]) == status
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Wrong arguments: status 2, one line."""
    try:
        status = main([*map(str, arguments)])
    except SystemExit as exit_:
        status = exit_.code
    out, complaint = capsys.readouterr()
    assert (status, out, complaint.count("\n")) == (2, "", 1), (status, out, complaint)
    return complaint


# --- models by their shapes -----------------------------------------------------------------------------


@pytest.mark.draws(1)
@pytest.mark.parametrize("gpt", [*GPTS.values(), SMALL])
def test_a_gpts_shapes_are_those_of_the_model_that_is_trained(gpt: GPTConfig) -> None:
    with torch.device("meta"):
        model = GPT(gpt)
    assert list(gpt.shapes.items()) == [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    tree = jax.eval_shape(lambda key: init_params(key, gpt, jnp.bfloat16), jax.random.key(0))
    assert gpt.numel == sum(p.numel() for p in model.parameters())
    assert gpt.numel == sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


@law(100)
@given(numel=st.integers(LEAST, 10**13))
@example(10 * 10**9)
def test_a_gpt_of_a_count_has_about_that_count(numel: int) -> None:
    gpt = gpt_of(numel)
    assert abs(gpt.numel / numel - 1) <= (0.1 if numel >= 10**7 else 0.25)
    assert gpt.width == 128 * gpt.heads


def test_safetensors_are_planned_from_their_headers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file, a folder, an index and the preset of the same shapes: the same plan, and no tensor is read."""
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in GPTS["tiny"].shapes.items()}
    one, several = tmp_path / "one", tmp_path / "several"
    one.mkdir()
    several.mkdir()
    save_file({**tensors, "ids": torch.arange(4)}, one / "model.safetensors")
    names = list(tensors)
    for i, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, several / f"{i}.safetensors")
    index = several / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: f"{i % 2}.safetensors" for i, name in enumerate(names)}}))

    expected = plan(capsys, "--preset=tiny", "--world-size=2", "--host-memory=1GB")
    for path in (one / "model.safetensors", one, index, several):
        found = plan(capsys, f"--model={path}", "--world-size=2", "--host-memory=1GB")
        assert found["parameters"] == expected["parameters"]
        assert [t["host_bytes"] for t in found["tiers"]] == [t["host_bytes"] for t in expected["tiers"]]

    (several / "1.safetensors").write_bytes(b"\0" * 100)
    assert "1.safetensors" in refusal(capsys, "plan", f"--model={index}")
    index.write_text("{}")
    assert "no index" in refusal(capsys, "plan", f"--model={several}")
    (tmp_path / "none").mkdir()
    assert "holds neither" in refusal(capsys, "plan", f"--model={tmp_path / 'none'}")
    assert "no such file or folder here" in refusal(capsys, "plan", f"--model={tmp_path / 'x.safetensors'}")


@pytest.mark.integration
def test_a_hugging_face_model_is_planned_from_its_configuration(tmp_path, capsys) -> None:
    """The shapes of the model itself, tied weights once; of a file, or of a folder without weights."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 128, "n_positions": 32}
    config = transformers.GPT2Config(architectures=["GPT2LMHeadModel"], dtype="float32", **sizes)
    config.save_pretrained(tmp_path)
    model = transformers.GPT2LMHeadModel(config)

    def on_device(found: dict) -> int:
        [row] = [row for row in found["tiers"][0]["rows"] if row["what"] == "parameters"]
        return row["n_bytes"]

    for path in (tmp_path / "config.json", tmp_path):
        found = plan(capsys, f"--model={path}", "--host-memory=1GB")
        assert found["parameters"] == sum(p.numel() for p in model.parameters())
        assert on_device(found) == 4 * found["parameters"], "in fp32, as it says"
    asked = [f"--model={tmp_path}", "--host-memory=1GB", "--param-dtype=bfloat16"]
    half = plan(capsys, *asked, "--micro-batches=2", "--tokens=100")
    assert on_device(half) == 2 * found["parameters"]
    for tier in half["tiers"]:
        assert tier["comparison"]["inputs"]["on_device"] == (2 + 1) * 100 * 64 * 2


@pytest.mark.integration
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "no index of safetensors files (weight_map) and no config.json (model_type)"),
        ("[1]", "no index of safetensors files and no config.json"),
        ('{"model_type": "no such"}', "cannot build a 'no such'"),
        ('{"model_type": "gpt2", "n_layer": "x"}', "cannot build a 'gpt2'"),
        ('{"model_type": "gpt2", "architectures": 3}', "cannot build a 'gpt2'"),
        ('{"model_type": "gpt2", "architectures": ["AutoConfig"]}', "cannot build a 'gpt2'"),
    ],
)
def test_a_configuration_of_no_model_is_one_line(content: str, words: str, tmp_path, capsys) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(content)
    said = refusal(capsys, "plan", f"--model={tmp_path}")
    assert words in said
    assert len(said) < 500


def test_a_configuration_needs_transformers(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert "pip install 'offload-core[transformers]'; or name a .safetensors file" in refusal(
        capsys, "plan", f"--model={tmp_path}"
    )


@pytest.mark.draws(1)
@pytest.mark.parametrize(
    ("memory", "rates"),
    [
        (["--host-memory=9TB"], ["--link-bandwidth=12GB", "--flops=50T", "--tokens=4096"]),
        (["--device-memory=1GB", "--host-memory=1GB"], []),
    ],
)
@pytest.mark.parametrize(
    "tiers", [["--stage=1"], ["--stage=2"], ["--stage=3"], pytest.param([], marks=pytest.mark.slow)]
)
def test_what_is_printed_is_at_most_100_columns_wide(memory, rates, tiers, capsys) -> None:
    asked = ["--parameters=900B", "--world-size=64", "--local-world-size=8", "--reduce-bucket-size=500000000"]
    main(["plan", *asked, *tiers, *RATES[:1], *memory, *rates])
    printed = capsys.readouterr().out
    assert ("nothing fits" in printed) == (len(memory) == 2)
    assert max(map(len, printed.splitlines())) <= 100


# --- several models -------------------------------------------------------------------------------------


IN_TURN = ["--parameters=7B", "--parameters=2B", "--frozen=3B", *RATES[:1]]


def phases_of(found: dict, stage: int, offload_param: str | None) -> dict:
    [tier] = [t for t in found["phases"] if (t["stage"], t["offload_param"]) == (stage, offload_param)]
    return {phase["phase"]: phase["bytes"] for phase in tier["phases"]}


def test_models_in_turn_need_the_largest_on_the_device_and_all_states_on_the_host(capsys) -> None:
    found = plan(capsys, *IN_TURN, "--host-memory=9TB")
    assert [(each["name"], each["frozen"]) for each in found["models"]] == [("A", False), ("B", False), ("C", True)]
    for stage, offload_param in ((2, None), (3, "cpu")):
        [a, b, c] = [
            next(t for t in each["tiers"] if (t["stage"], t["offload_param"]) == (stage, offload_param))
            for each in found["models"]
        ]
        given = phases_of(found, stage, offload_param)
        assert list(given) == ["A trains", "B trains", "C runs", "all at once"]
        assert [given[phase]["device"] for phase in list(given)[:-1]] == [t["device_bytes"] for t in (a, b, c)]
        at_once = {where: sum(t[f"{where}_bytes"] for t in (a, b, c)) for where in ("host", "device")}
        assert given["all at once"] == at_once
        working = sum(row["n_bytes"] for row in b["rows"] if row["what"] in ("gradients on the host", "staging"))
        frozen = c["device_bytes"] if offload_param is None else 0  # the copy of what was released
        assert frozen in (0, 2 * found["models"][2]["parameters"])
        hosts = {given[phase]["host"] for phase in list(given)[:-1]}
        [host] = hosts
        saved = at_once["host"] + frozen - host
        assert working * 0.9 <= saved <= working  # B's few odd sizes may be none of A's


@pytest.mark.draws(1)
@pytest.mark.parametrize(
    ("memory", "fits"),
    [
        (["--host-memory=9TB"], True),
        (["--host-memory=9TB", "--device-memory=16GB"], True),
        (["--host-memory=9TB", "--device-memory=1GB"], False),
        (["--host-memory=99GB"], False),
    ],
)
def test_models_in_turn_fit_where_each_phase_does(memory, fits, capsys) -> None:
    found = plan(capsys, *IN_TURN, "--stage=2", *memory, status=0 if fits else 1)
    assert found["fits"] is fits
    [tier] = found["phases"]
    *in_turn, at_once = [phase["missing"] for phase in tier["phases"]]
    assert any(in_turn) is not fits
    assert ("device" in at_once) is ("device" in str(memory))


def test_models_in_turn_are_printed_with_a_table_of_each_and_of_phases(capsys) -> None:
    assert main(["plan", *IN_TURN, "--host-memory=9TB"]) == 0
    printed = capsys.readouterr().out
    for words in ("\nB: a GPT", "parameters, frozen\n", "\nA trains ", "\nC runs ", "\nall at once "):
        assert words in printed
    assert printed.count("all at once") == 4
    assert max(map(len, printed.splitlines())) <= 100


def test_on_the_cpu_and_on_disks_models_have_what_they_have_alone(capsys) -> None:
    found = plan(capsys, *IN_TURN, "--device=cpu", "--host-memory=9TB", "--stage=2")
    [[phase]] = [tier["phases"] for tier in found["phases"]]
    alone = sum(tier[f"{where}_bytes"] for each in found["models"] for tier in each["tiers"] for where in WHERE)
    assert phase == {"phase": "all at once", "bytes": {"host": alone}, "missing": []}
    disk = ["--offload-optimizer=nvme", "--disk-memory=9TB", "--disk-bandwidth=1GB"]
    found = plan(capsys, *IN_TURN, *disk, "--host-memory=9TB", "--stage=2")
    [tier] = found["phases"]
    n_bytes = sum(each["tiers"][0]["disk_bytes"] for each in found["models"])
    assert {phase["bytes"]["disk"] for phase in tier["phases"]} == {n_bytes}
    assert n_bytes > 12 * 8 * 10**9


WHERE = ("host", "device")


# --- the plan -------------------------------------------------------------------------------------------


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[MemoryPlan]:
    """The plans that wrap checks."""
    seen: list[MemoryPlan] = []
    check = MemoryPlan.check
    monkeypatch.setattr(MemoryPlan, "check", lambda p, *args, **kw: seen.append(p) or check(p, *args, **kw))
    return seen


@pytest.mark.draws(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_the_plan_of_wrap(dtype: str, checked, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({name: torch.zeros(shape) for name, shape in SMALL.shapes.items()}, tmp_path / "a.safetensors")
    asked = [f"--model={tmp_path}", f"--param-dtype={dtype}", "--device=cpu", "--reduce-bucket-size=10000"]
    asked += ["--activation-memory=2MB", "--host-activation-memory=3MB"]
    declared = {"activation_memory": 2_000_000, "host_activation_memory": 3_000_000}
    tiers = plan(capsys, *asked, "--max-live-parameters=30000")["tiers"]
    assert [(tier["stage"], tier["offload_param"]) for tier in tiers] == [(1, None), (2, None), (3, None), (3, "cpu")]
    for tier in tiers:
        fields = {"stage": tier["stage"], "offload_param": tier["offload_param"]}
        sizes = {"reduce_bucket_size": 10000, "max_live_parameters": 30000}
        wrap(GPT(SMALL), param_dtype=dtype, **sizes, **fields, **declared)
        ours = {(row.where, row.what): row.n_bytes for row in checked[-1].rows if row.n_bytes and not row.passing}
        assert ours == {(row["where"], row["what"]): row["n_bytes"] for row in tier["rows"]}


def test_jax_takes_parameters_two_gradients_and_two_buckets_where_all_are_given_away() -> None:
    """By hand: a bucket of 160 holds two parameters of 80, or half of one of 320."""

    def rows(numels: list[int], copies: int = 1, **fields: object) -> dict[str, int]:
        specs = [ParamSpec(str(i), numel, BFLOAT16) for i, numel in enumerate(numels)]
        config = OffloadConfig(reduce_bucket_size=160, schedule="serial" if "depth" in fields else "overlap")
        on_host = bool(fields.get("on_host"))
        terms = BucketTerms(config, planned_jax_device(on_host=on_host))
        arrays = [
            ArrayBytes.of_shards([i], [spec], [copies], on_host=False, leaves=not on_host)
            for i, spec in enumerate(specs)
        ]
        found = rows_at_once(terms, specs, arrays, on_host=False, donate=bool(fields.get("donate", True)))
        return {f"{row.where}: {row.what}": row.n_bytes // 2 for row in found if row.n_bytes}

    def held(parameters: int, gradients: int, leaving: int, on_way: int) -> dict[str, int]:
        of = {"device: parameters": parameters, "host: gradients": gradients}
        return {**of, "device: gradients on their way": leaving, "device: buckets on their way": on_way}

    assert rows([320, 320, 320]) == held(960, 960, 640, 320)
    assert rows([320], copies=3) == held(960, 320, 320, 320) | {"device: gradients": 960}  # the devices keep replicas'
    assert rows([80] * 8) == held(640, 640, 160, 320)
    assert rows([320, 320], depth=1) == held(640, 640, 640, 160)
    assert rows([320], donate=False) == held(320, 320, 320, 320) | {"device: next parameters": 320}
    three = {"device: parameters": 320, "device: next parameters": 320, "device: gradients": 320}
    assert rows([320], on_host=True) == three


@pytest.mark.parametrize(
    ("shape", "mesh", "cuts"),
    [
        ((8, 12), (2, 2), ((1,), (0,))),
        ((8, 12), (4, 1), ((), (0,))),
        ((12, 8), (2, 8), ((0,), (1,))),
        ((7, 6), (2, 3), ((), (0,))),
        ((5,), (2,), ((),)),
        ((), (2,), ()),
        ((4, 4), (2,), ((0,), ())),
    ],
)
def test_each_axis_of_a_mesh_cuts_the_largest_dimension_that_is_left(shape, mesh, cuts) -> None:
    assert cuts_of(shape, mesh) == cuts


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_shards_are_those_that_jax_has(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan knows the device whose gradient is read and the processes that have a part, on a mesh of eight."""
    mesh, n = (2, 4), 8 // processes
    part = MeshPart(mesh, processes)
    for number, cuts in enumerate([((0,), (1,)), ((1,), ()), ((), (0,)), ((), ())]):
        shape = (16, 16)
        counts = [math.prod(mesh[axis] for axis in axes) for axes in cuts]

        def index(device: int, counts=counts, cuts=cuts) -> tuple[slice, ...]:
            at = divmod(device, mesh[1])
            steps = [(sum(at[axis] for axis in axes), 16 // n) for axes, n in zip(cuts, counts, strict=True)]
            return tuple(slice(k * step, (k + 1) * step) for k, step in steps)

        devices = [SimpleNamespace(id=i, process_index=i // n) for i in range(8)]
        places = {_Hashable(device): index(device.id) for device in devices}
        sharding = SimpleNamespace(devices_indices_map=lambda shape, places=places: places)
        found = local_shards.__wrapped__(sharding, shape, number)
        assert [(len(shard.devices), shard.primary.id) for shard in found] == list(part.shards_of(cuts, number))


class _Hashable(SimpleNamespace):
    def __init__(self, device: SimpleNamespace) -> None:
        super().__init__(id=device.id, process_index=device.process_index)

    def __hash__(self) -> int:
        return self.id


def test_the_devices_of_a_mesh_share_what_is_sharded(capsys: pytest.CaptureFixture[str], drawn) -> None:
    asked = ["--frontend=jax", "--preset=gpt2-10b", "--host-memory=400GB", "--device-memory=20GB"]
    alone = plan(capsys, *asked, status=1)
    [donated, kept] = alone["tiers"]
    assert (donated["donate"], kept["donate"]) == (True, False)
    assert donated["missing"] == {"device": donated["device_bytes"]}
    assert 2 < donated["device_bytes"] / alone["parameters"] < 2.1 < 4 < kept["device_bytes"] / alone["parameters"]
    assert 14 < donated["host_bytes"] / alone["parameters"] < 14.1

    def one_process() -> None:
        several = plan(capsys, *asked, "--mesh=4x2")  # 8 devices have 20 GB each
        assert several["parameters"] == alone["parameters"]
        assert several["tiers"][1]["fits"]
        assert several["tiers"][0]["host_bytes"] == pytest.approx(donated["host_bytes"], rel=0.01)
        assert several["tiers"][0]["step"]["to_host"] == pytest.approx(donated["step"]["to_host"] / 8, rel=0.01)

    def two_processes() -> None:
        half = plan(capsys, *asked, "--mesh=4x2", "--world-size=2")
        assert half["parameters"] == alone["parameters"]
        assert half["tiers"][0]["host_bytes"] == pytest.approx(donated["host_bytes"] / 2, rel=0.01)

    def printed() -> None:
        assert main(["plan", *asked, "--mesh=4x2", *RATES]) == 0
        shown = capsys.readouterr().out
        for words in ("1 process(es) of 8 device(s)", "its devices together", "next parameters"):
            assert words in shown

    for check in drawn((one_process, two_processes, printed), 1):
        check()


def test_gradients_are_counted_for_as_long_as_they_are_on_the_device() -> None:
    """Ten parameters of a bucket each: by hand."""
    specs = [ParamSpec(str(i), 160, BFLOAT16) for i in range(10)]

    def gradients(world_size: int, addressable: bool, **fields: object) -> int:
        config = OffloadConfig(reduce_bucket_size=160, **fields)
        terms = BucketTerms(config, planned_device(world_size, addressable=addressable))
        [row] = [row for row in Planner(terms).plan(specs).rows if (row.where, row.what) == ("device", "gradients")]
        return row.n_bytes // 320

    assert gradients(1, True) == 10  # read where they are, at the step
    assert gradients(1, True, gradient_accumulation_steps=2) == 1  # summed at once
    assert gradients(2, True) == 1  # copied to staging at once
    assert gradients(1, False, schedule="serial") == 2  # one copy on its way
    assert gradients(1, False) == 3  # two
    wide = BucketTerms(OffloadConfig(reduce_bucket_size=160), planned_device(2, addressable=True))
    stay = Planner(wide).plan(specs, gradients_stay=True)
    assert max(row.n_bytes for row in stay.rows if row.what == "gradients") == 3200
    together = [replace(spec, finalized_with=i // 4 if i < 8 else None) for i, spec in enumerate(specs)]
    assert max(row.n_bytes for row in Planner(wide).plan(together).rows if row.what == "gradients") == 4 * 320


def test_what_is_missing_is_what_is_more_than_there_is() -> None:
    rows = (
        PlanRow("a", "host", 100, "x"),
        PlanRow("b", "device", 50, "y"),
        PlanRow("c", "host", 30, "z", passing=True),
    )
    assert MemoryPlan(rows, 1).missing(130, 50) == {}
    assert MemoryPlan(rows, 1).missing(129, 49) == {"host": 130, "device": 50}
    assert MemoryPlan(rows, 1, held=20).missing(130, 30) == {}
    assert MemoryPlan(rows, 1).missing(259, None, processes=2) == {"host": 260}
    shared = MemoryPlan(rows, 1, shared=True)
    assert (shared.missing(150), shared.missing(149)) == ({}, {"host": 150})
    held = MemoryPlan(rows, 1, shared=True, held=40)
    assert (held.missing(130), held.missing(129)) == ({}, {"host": 130})  # while wrap runs all is there still


@pytest.mark.long("searches through settings with the whole plan at each")
def test_a_machine_is_enough_or_it_is_said_what_is_not(capsys: pytest.CaptureFixture[str], drawn) -> None:
    asked = ["--preset=gpt2-10b", "--host-memory=128GB", "--device-memory=32GB"]
    found = plan(capsys, *asked, status=1)
    assert not found["fits"]
    assert found["parameters"] == GPTS["gpt2-10b"].numel
    for tier in found["tiers"]:
        for where in ("host", "device"):
            assert tier[f"{where}_bytes"] == sum(row["n_bytes"] for row in tier["rows"] if row["where"] == where)
        assert tier["missing"] == {"host": tier["host_bytes"]}
    *_, narrowest = found["formats"]
    assert narrowest["state_format"] == "8bit"
    assert narrowest["master_dtype"] == "bfloat16"
    assert [tier["fits"] for tier in narrowest["tiers"]] == [True] * 4

    def printed() -> None:
        assert main(["plan", *asked, *RATES]) == 1
        shown = capsys.readouterr().out
        last = " ".join(shown.partition("nothing fits:")[2].partition("stage 2")[0].split())
        for what, remedy in (("master", "master_dtype"), ("exp_avg", "state_format"), ("exp_avg_sq", "state_format")):
            assert re.search(rf"{what} 38\.3 GiB \({remedy}=", last), shown

    def narrower_states() -> None:
        fits = plan(capsys, *asked, "--state-format=8bit", "--master-dtype=bfloat16")
        assert [tier["host_bytes"] for tier in fits["tiers"]] == [tier["host_bytes"] for tier in narrowest["tiers"]]

    def more_host_memory() -> None:
        enough = plan(capsys, *asked, "--host-memory=200GB")
        assert enough["fits"]
        assert all(tier["fits"] for tier in enough["tiers"])

    def less_device_memory() -> None:
        small = plan(capsys, *asked, "--host-memory=200GB", "--device-memory=8GB")
        assert [tier["fits"] for tier in small["tiers"]] == [False, False, False, True]
        assert plan(capsys, *asked, "--host-memory=200GB", "--device-memory=8GB", "--stage=2", status=1)["tiers"]

    def several_machines() -> None:
        several = plan(capsys, *asked, "--world-size=4", status=1)
        apart = plan(capsys, *asked, "--world-size=4", "--local-world-size=1")
        for tier, alone in zip(several["tiers"], apart["tiers"], strict=True):
            assert tier["missing"]["host"] == 4 * tier["host_bytes"]
            assert alone["fits"]

    for check in drawn((printed, narrower_states, more_host_memory, less_device_memory, several_machines), 1):
        check()


def test_activations_are_counted_where_they_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--preset=gpt2-124m", "--host-memory=8GB", "--device-memory=1GB", "--stage=2", *RATES]
    assert main(asked) == 0
    assert "activations: not counted" in capsys.readouterr().out
    assert main([*asked, "--activation-memory=1GB"]) == 1
    assert re.search(r"device +activations +953.7 MiB", capsys.readouterr().out)
    assert main([*asked, "--host-activation-memory=1GB"]) == 0
    assert re.search(r"host +activations +953.7 MiB", capsys.readouterr().out)
    assert main([*asked, "--host-activation-memory=7GB"]) == 1  # with the states it is too much


@pytest.mark.draws(24)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "plan|info"),
        (["plan"], "--preset --parameters --model"),
        (["plan", "--preset=gpt3"], "gpt2-10b"),
        (["plan", "--parameters=10X"], "expected a count such as 10B"),
        (["plan", "--parameters=0"], "at least 1,000,000"),
        (["plan", "--parameters=7,000,000,00"], "expected a count such as 10B"),
        (["plan", "--parameters=10"], "at least 1,000,000"),
        (["plan", "--model=org/name"], "org/name: no such file or folder here; expected a path. For a model on a hub"),
        (["plan", "--model=gpt2"], "download its config.json first"),
        (["plan", "--parameters=1e30"], "at most 1,000,000,000,000"),
        (["plan", "--preset=tiny", "--world-size=2.5"], "a whole number"),
        (["plan", "--preset=tiny", "--world-size=0.4"], "expected a count"),
        (["plan", "--preset=tiny", "--dram-bandwidth=1e-320"], "expected bytes a second"),
        (["plan", "--preset=tiny", "--parameters=10B"], "not allowed with"),
        (["plan", "--preset=tiny", "--host-memory=-1GB"], "expected a size such as 32GB"),
        (["plan", "--preset=tiny", "--host-memory=64"], "expected a size such as 32GB"),
        (["plan", "--preset=tiny", "--stage=4"], "--stage"),
        (["plan", "--preset=tiny", "--flops=1T"], "expected both or neither"),
        (["plan", "--preset=tiny", "--local-world-size=2"], "expected at most"),
        (["plan", "--preset=tiny", "--device=cpu", "--device-memory=1GB"], "its memory is the host's"),
        (["plan", "--preset=tiny", "--device=mps"], "MPS has one stream"),
        (["plan", "--preset=tiny", "--device=cuda:0"], "expected cpu or an accelerator's name"),
        (["plan", "--preset=tiny", "--stage=2", "--offload-param=cpu"], "of stage 3"),
        (["plan", "--preset=tiny", "--world-size=1e300"], "expected a count"),
        (["plan", "--preset=tiny", "--micro-batches=0"], "expected a count"),
        (["plan", "--preset=tiny", "--micro-batches=4", "--flops=1T"], "expected both or neither"),
        (["plan", "--preset=tiny", "--micro-batches=4", "--gradient-accumulation-steps=2"], "expected one of them"),
        (["plan", "--preset=tiny", "--micro-batches=4", "--frontend=jax"], "a scan over micro-batches"),
        (["plan", "--preset=tiny", "--micro-batches=4", "--frozen=2M"], "expected no further models"),
        (["plan", "--preset=tiny", "--mesh=2x2"], "expected --frontend jax beside it"),
        (["plan", "--preset=tiny", "--frontend=jax", "--mesh=2x0"], "the sizes of a mesh's axes, such as 8 or 4x2"),
        (["plan", "--preset=tiny", "--frontend=jax", "--mesh=64x65"], "at most 4,096 devices"),
        (["plan", "--preset=tiny", "--frontend=jax", "--mesh=2x2", "--world-size=3"], "2x2 has 4 devices"),
        (["plan", "--preset=tiny", "--frontend=jax", "--stage=2"], "--stage is torch's"),
        (["plan", "--preset=gpt2-124m", "--reduce-bucket-size=3700"], "expected at most 32,768: give at least 3,799"),
        (["plan", "--preset=tiny", "--device-states-bytes=8"], "a size such as 8GB, a share such as 0.25"),
        (["plan", "--preset=tiny", "--device-states-bytes=1.5"], "a share such as 0.25 or 1.0, or auto"),
        (["plan", "--preset=tiny", "--device-states-bytes=0.5", "--device=cpu"], "of CUDA and ROCm devices"),
        (["plan", "--preset=tiny", "--offload-optimizer=none", "--device=xpu"], "expected --device cuda, and got xpu"),
        (["plan", "--preset=tiny", "--device-states-bytes=0.5", "--frontend=jax"], "cannot be written in place"),
        (["plan", "--preset=tiny", "--offload-optimizer=none", "--device-states-bytes=0.5"], "expected one of them"),
        (["plan", "--preset=tiny", "--device-states-bytes=1GB", "--offload-param=cpu"], "would leave a device"),
        (["plan", "--preset=tiny", "--device-states-bytes=auto", "--device-memory=1GB"], "--activation-memory beside"),
        (["plan", "--preset=tiny", "--offload-optimizer=none", "--nvme-host-bytes=0"], "none beside it"),
        (["plan", "--preset=tiny", "--device-bandwidth=1TB"], "--device-bandwidth is of states on the device"),
        (["info", "--fast"], "--fast"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refusal(capsys, *arguments)


@law(100)
@given(value=st.integers(1, 10**6), unit=st.sampled_from("KMGT"))
@example(1, "G")
def test_quantities_have_the_units_of_their_kind(value: int, unit: str) -> None:
    power = 1 + "KMGT".index(unit)
    assert size(f"{value}{unit}B") == size(f"{value} {unit.lower()}") == value * 1000**power
    assert size(f"{value}{unit}iB") == value * 1024**power
    assert rate(f"{value}{unit}B/s") == value * 1000**power
    assert count(f"{value}") == value
    assert count(f"{value}B") == value * 10**9 == size(f"{value}GB")


# --- a step's time --------------------------------------------------------------------------------------


def step_time(
    world_size: int = 1, *, dtype=BFLOAT16, addressable: bool = False, speeds=None, partitioned=False, **fields
):
    terms = BucketTerms(
        OffloadConfig(reduce_bucket_size=1600, **fields), planned_device(world_size, addressable=addressable)
    )
    specs = [ParamSpec(str(i), 16_000, dtype, partitioned=partitioned) for i in range(10)]
    speeds = speeds or Speeds(28e6, 2e6, 6e9)
    return predict(Planner(terms), specs, speeds, processes=world_size, tokens=100)


def test_a_steps_time_is_that_of_its_slowest_part_and_a_tail() -> None:
    n, bucket = 160_000, 1600
    time = step_time()
    assert time.update == pytest.approx(28 * n / 28e6)
    assert time.to_host == time.to_device == pytest.approx(2 * n / 2e6)
    assert time.compute == pytest.approx(6 * n * 100 / 6e9)
    assert time.tail == pytest.approx(28 * bucket / 28e6 + 2 * 2 * bucket / 2e6)
    assert time.seconds == pytest.approx(max(time.update, time.to_host, time.compute) + time.tail)
    serial = step_time(schedule="serial")
    assert serial.seconds == pytest.approx(time.update + 2 * time.to_host + time.compute)

    # Two ranks a machine: each updates half, of fp32 sums, and shares the memory; over nccl shards of sums cross.
    two = step_time(2)
    assert two.update == pytest.approx((4 + 24 + 2) * n / 28e6)
    assert two.to_host == pytest.approx(4 * n / 2 / 2e6)
    assert two.to_device == pytest.approx(2 * n / 2 / 2e6)

    # What waits on the host comes twice, for forward and backward, unless it may stay.
    tier = {"stage": 3, "offload_param": "cpu", "partitioned": True}
    assert step_time(**tier).to_device == pytest.approx(time.to_device)
    assert step_time(**tier, max_live_parameters=100_000).to_device == pytest.approx(2 * time.to_device)

    host = step_time(addressable=True, dtype=FLOAT32)
    assert (host.update, host.to_host, host.to_device) == (pytest.approx(28 * n / 28e6), 0, 0)
    assert host.seconds == pytest.approx(host.update + host.compute)
    unknown = step_time(speeds=Speeds(28e6))
    assert (unknown.to_host, unknown.compute) == (None, None)
    assert unknown.seconds == pytest.approx(unknown.update + 28 * bucket / 28e6)


# --- many micro-batches ---------------------------------------------------------------------------------


def moved(world_size: int, *, addressable: bool = False, inputs: int = 0, **fields: object) -> dict[str, float]:
    """Bytes of a step, for each element of ten bf16 parameters of 16,000; by four micro-batches."""
    config = OffloadConfig(reduce_bucket_size=1600, gradient_accumulation_steps=4, **fields)
    specs = [ParamSpec(str(i), 16_000, BFLOAT16, partitioned=config.stage == 3) for i in range(10)]
    terms = BucketTerms(config, planned_device(world_size, addressable=addressable))
    whole, _ = Planner(terms).traffic(specs, inputs=160_000 * inputs)
    return {name: getattr(whole, name) / 160_000 for name in ("to_device", "to_host", "sent")}


def test_all_micro_batches_pass_a_gathered_block_and_its_gradient_leaves_once() -> None:
    narrow = {"stage": 3, "offload_param": "cpu", "max_live_parameters": 100_000}
    assert moved(1, **narrow) == {"to_device": 4 * 2 * 2, "to_host": 4 * 2, "sent": 0}
    assert moved(1, **narrow, layerwise=True) == {"to_device": 2 * 2, "to_host": 4, "sent": 0}
    # Two ranks: half of each sum crosses in fp32, and half of each parameter goes to the other rank.
    assert moved(2, **narrow) == {"to_device": 4 * 2, "to_host": 4 * 2, "sent": 4 * (2 + 2 * 2) / 2}
    assert moved(2, **narrow, layerwise=True) == {"to_device": 2, "to_host": 2, "sent": (4 + 2 * 2) / 2}
    # Whole parameters come back once, after the update.
    assert moved(2) == {"to_device": 1, "to_host": 4 * 2, "sent": (4 * 2 + 2) / 2}
    assert moved(2, layerwise=True) == {"to_device": 1, "to_host": 2, "sent": (4 + 2) / 2}
    assert moved(4, layerwise=True)["sent"] == 3 / 4 * (4 + 2)
    # Blocks' inputs cross if the device has memory of its own.
    assert moved(1, **narrow, layerwise=True, inputs=5) == {"to_device": 4 + 15, "to_host": 4 + 10, "sent": 0}
    assert moved(1, addressable=True, layerwise=True, inputs=5) == {"to_device": 0, "to_host": 0, "sent": 0}


def test_gradients_that_the_device_sums_are_fp32_there() -> None:
    specs = [ParamSpec(str(i), 160, BFLOAT16) for i in range(10)]
    found = {}
    for layerwise in (False, True):
        config = OffloadConfig(reduce_bucket_size=160, gradient_accumulation_steps=2, layerwise=layerwise)
        terms = BucketTerms(config, planned_device(1, addressable=False))
        [found[layerwise]] = [row.n_bytes for row in Planner(terms).plan(specs).rows if row.what == "gradients"]
    assert found == {False: 3 * 160 * 2, True: 3 * 160 * 4}


MANY = ["--preset=gpt2-1.5b", "--stage=3", "--offload-param=cpu", "--host-memory=900GB", "--micro-batches=8"]
FLOPS = ["--flops=100T", "--tokens=65536"]
INPUTS = (48 + 1) * 65536 * 1600 * 2


def compared(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> dict:
    [tier] = plan(capsys, *MANY, *arguments, status=status)["tiers"]
    return tier["comparison"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The table of micro-batches and the lines after it."""
    assert main(["plan", *MANY, *RATES, *arguments]) == 0
    _, found, rest = capsys.readouterr().out.partition("\n8 micro-batches")
    assert found
    assert max(map(len, rest.splitlines())) <= 100
    return " ".join(rest.split())


def test_a_loop_and_accumulate_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the link takes longest the loop is slower; where compute does, it is if it is checkpointed, too."""
    found = compared(capsys, *FLOPS, "--max-live-parameters=1M")
    loop, accumulate = found["loop"], found["accumulate"]
    assert loop["traffic"]["to_device"] == pytest.approx(8 * accumulate["traffic"]["to_device"], rel=1e-3)
    assert loop["traffic"]["to_host"] == pytest.approx(4 * accumulate["traffic"]["to_host"])
    assert found["inputs"] == {"on_host": 0, "on_device": INPUTS, "bytes": INPUTS}
    assert accumulate["step"]["compute"] == pytest.approx(loop["step"]["compute"] * 8 / 6)
    assert found["faster_by"] == loop["step"]["seconds"] / accumulate["step"]["seconds"] < 1
    again = compared(capsys, *FLOPS, "--activation-checkpointing")
    assert again["loop"]["step"]["compute"] == again["accumulate"]["step"]["compute"]

    assert re.search(r"loop is 1\.3\d times as fast as accumulate", printed(capsys, *FLOPS))
    assert "take the same time" in printed(capsys, *FLOPS, "--activation-checkpointing")
    slow = ["--link-bandwidth=2GB", *FLOPS]
    [factor] = re.findall(r"accumulate is (\d\.\d\d) times as fast as loop", printed(capsys, *slow))
    assert float(factor) == pytest.approx(compared(capsys, *slow)["faster_by"], abs=0.006)
    assert "ranks is not counted" in printed(capsys, *slow, "--world-size=2")
    assert "ranks is not counted" not in printed(capsys, *slow)


def test_what_must_be_given_to_compare_times_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "not known: give --flops, --tokens" in printed(capsys)
    assert "not known: give --flops inputs" in printed(capsys, "--tokens=65536")
    assert main(["plan", *MANY, RATES[0], *FLOPS]) == 0
    assert "not known: give --link-bandwidth" in capsys.readouterr().out
    assert compared(capsys)["faster_by"] is None


def test_inputs_wait_on_the_host_up_to_the_bytes_that_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    whole = compared(capsys, *FLOPS)["accumulate"]
    on_host = 10**9
    found = compared(capsys, *FLOPS, f"--host-activation-memory={on_host}B")
    assert found["inputs"] == {"on_host": on_host, "on_device": INPUTS - on_host, "bytes": INPUTS}
    for way, times in (("to_host", 2), ("to_device", 3)):
        assert found["accumulate"]["traffic"][way] == whole["traffic"][way] + times * on_host
        assert found["accumulate"]["step"][way] == pytest.approx(whole["step"][way] + times * on_host / 25e9)
    assert compared(capsys, *FLOPS, "--host-activation-memory=99GB")["inputs"]["on_device"] == 0

    small = [*FLOPS, "--device-memory=4GB"]
    assert compared(capsys, *small)["accumulate"]["missing"].keys() == {"device"}
    assert f"with host_activation_memory={INPUTS} they wait on the host" in printed(capsys, *small)
    assert compared(capsys, *small, "--host-activation-memory=11GB")["accumulate"]["fits"]
    assert "they wait" not in printed(capsys, *small, "--host-activation-memory=11GB")
    assert "they wait" not in printed(capsys, *FLOPS)
    assert not compared(capsys, *FLOPS, "--device-memory=1MB", status=1)["accumulate"]["fits"]


def test_gradients_take_less_host_memory_where_their_buckets_pass_through(capsys: pytest.CaptureFixture[str]) -> None:
    same = compared(capsys)
    assert same["loop"]["host_gradients"] == same["accumulate"]["host_gradients"]
    assert "host gradients" not in printed(capsys)
    early = compared(capsys, "--update-in-backward")
    assert early["loop"]["host_gradients"] > 10 * early["accumulate"]["host_gradients"] > 0
    assert "host gradients" in printed(capsys, "--update-in-backward")
    between = ["--update-in-backward", "--host-memory=24GB"]
    found = compared(capsys, *between)  # a way fits: status 0
    assert (found["loop"]["fits"], found["accumulate"]["fits"]) == (False, True)
    assert "loop does not fit: " in (shown := printed(capsys, *between))
    assert "nothing fits" not in shown
    on_cpu = compared(capsys, "--device=cpu", "--param-dtype=float32")
    assert on_cpu["accumulate"]["host_gradients"] == pytest.approx(4 * GPTS["gpt2-1.5b"].numel, rel=0.01)


def test_inputs_of_blocks_that_a_file_does_not_name_are_left_out(tmp_path: Path, capsys) -> None:
    save_file({name: torch.zeros(shape) for name, shape in SMALL.shapes.items()}, tmp_path / "a.safetensors")
    asked = [f"--model={tmp_path}", "--host-memory=1GB", "--micro-batches=2", "--tokens=64"]
    assert {tier["comparison"]["inputs"] for tier in plan(capsys, *asked)["tiers"]} == {None}
    assert main(["plan", *asked, *RATES]) == 0
    shown = capsys.readouterr().out
    assert shown.count("2 micro-batches") == 1, "stages are alike on one rank, and no parameter is large"
    assert "inputs of blocks" not in shown


# --- what wrap does with it -----------------------------------------------------------------------------


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list:
    seen: list = []
    allocate = HostMemory.allocate
    monkeypatch.setattr(HostMemory, "allocate", lambda *args, **kw: seen.append(args) or allocate(*args, **kw))
    return seen


def test_a_device_too_small_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch, allocated) -> None:
    device = SlowTorchDevice()
    monkeypatch.setattr(parts_module, "device_for", lambda *args, **kw: HostRanks(device))
    model = GPT(SMALL)
    before = [(id(p), p.detach().clone(), p.dtype) for p in model.parameters()]
    monkeypatch.setattr(device, "free_bytes", lambda: 0, raising=False)
    with pytest.raises(
        DeviceMemoryError, match=r"(?s)of device memory.*nothing was allocated.*made smaller by"
    ) as error:
        wrap(model)
    needed = re.search(r"parameters besides the ([\d.]+ .iB) that.*Largest consumers: (.*)\. Free", str(error.value))
    assert needed[1] == "1.5 MiB"
    named = re.findall(r"(\w[\w ]*) [\d.]+ .iB \(", needed[2])
    assert set(named) == {"gradients", "parameters", "buckets on their way"}
    assert not allocated
    for p, (identity, value, dtype) in zip(model.parameters(), before, strict=True):
        assert (id(p), p.dtype, p.grad) == (identity, dtype, None)
        assert torch.equal(p, value)
    monkeypatch.setattr(device, "free_bytes", lambda: 10**8, raising=False)
    engine = wrap(model)
    ids = torch.randint(0, 64, (1, 9))
    engine.backward(engine(ids[:, :-1], ids[:, 1:]))
    assert engine.step().updated


def test_on_the_cpu_parameters_and_gradients_count_as_host_memory(monkeypatch: pytest.MonkeyPatch, allocated) -> None:
    """States 8 bytes, gradients 4; the parameters are there."""
    model = GPT(SMALL)
    needed = 12 * SMALL.numel
    monkeypatch.setattr("offload_core.engine.available_bytes", lambda: needed - 1)
    with pytest.raises(HostMemoryError, match=r"(?s)Largest consumers: exp_avg 1.5 MiB.*device +gradients"):
        wrap(model)
    assert not allocated
    padded = 16 * -(-needed // 16) + 64 * 8
    monkeypatch.setattr("offload_core.engine.available_bytes", lambda: padded)
    with pytest.raises(HostMemoryError, match=r"(?s)host +activations +1\.0 MiB +\S+ +smaller micro-batches"):
        wrap(model, host_activation_memory=2**20)
    assert not allocated
    wrap(model)
    assert allocated


def test_ranks_on_a_machine_share_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the launcher's word is that there are more processes than ranks: those are other runs."""
    model = GPT(SMALL)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("offload_core.engine.available_bytes", lambda: 13 * SMALL.numel)
    wrap(model).close()
    monkeypatch.setattr(registration.MemoryPlan, "check", lambda plan, *args, processes: 1 / (processes - 1))
    with pytest.raises(ZeroDivisionError):
        wrap(model)


def test_jax_on_a_small_device_is_refused_before_anything_is_placed(monkeypatch: pytest.MonkeyPatch, allocated) -> None:
    params, fields = {"w": np.ones((300, 1000), np.float32)}, {"reduce_bucket_size": 16_000}
    needed = 2 * 4 * 300_000 + 2 * 4 * 16_000  # parameters, gradients, which are given away, and two packed buckets
    monkeypatch.setattr(jax_placement, "on_cpu", lambda array: False)
    placed = []
    place = AsPlaced.place
    monkeypatch.setattr(AsPlaced, "place", lambda *args: placed.append(args) or place(*args))
    monkeypatch.setattr("frontends.jax.devices.mesh.places.free_bytes", lambda devices: needed - 1)
    with pytest.raises(
        DeviceMemoryError, match=r"(?s)2\.4 MiB of device memory for 300,000.*gradients on their way 1\.1 MiB"
    ):
        wrap_jax(params, **fields)
    assert not allocated
    assert not placed
    monkeypatch.setattr("frontends.jax.devices.mesh.places.free_bytes", lambda devices: needed)
    with pytest.raises(DeviceMemoryError, match=r"device +activations +1 bytes"):
        wrap_jax(params, activation_memory=1, **fields)
    assert not placed
    wrap_jax(params, **fields)
    assert allocated
    assert placed
    monkeypatch.setattr("frontends.jax.devices.mesh.places.free_bytes", lambda devices: needed - 4 * 300_000)
    wrap_jax({"w": jnp.ones((300, 1000))}, **fields)  # there already


# --- info -----------------------------------------------------------------------------------------------


def test_info_tells_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == main(["info", "--json"]) == 0
    shown, _, found = capsys.readouterr().out.rpartition("\n{")
    about = json.loads("{" + found)
    assert about["memory"] == psutil.virtual_memory().total
    assert about["versions"]["numpy"] == np.__version__
    assert about["instruction set"] in about["instruction sets"]
    assert about["bandwidth"]["dram"] > 0
    assert about["bandwidth"]["copy"] > 0
    assert about["bandwidth"]["link"] is None
    for line in ("processor", "kernels", "memory bandwidth", "link to a device"):
        assert re.search(rf"^{line} ", shown, re.M), shown
    assert about["cpu"] in shown


def test_no_framework_is_needed() -> None:
    code = (
        "import sys; sys.argv = ['', 'plan', '--preset=tiny', '--dram-bandwidth=1GB'];"
        "import runpy; sys.modules.update(torch=None, jax=None)\n"
        "runpy.run_module('offload_core', run_name='__main__')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60, capture_output=True)


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """As with ``| head -1``."""
    command = [sys.executable, "-m", "offload_core", "plan", "--preset=tiny", "--dram-bandwidth=1GB", "--json"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == READER_GONE


def test_a_count_may_have_the_commas_that_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with_commas, without = (plan(capsys, f"--parameters={n}", "--host-memory=1GB") for n in ("7,000,000", "7M"))
    assert with_commas["parameters"] == without["parameters"]


@pytest.mark.draws(1)
@pytest.mark.parametrize("frontend", ["torch", "jax"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_heading_names_the_element_type(dtype: str, frontend: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--preset=tiny", "--host-memory=9GB", f"--param-dtype={dtype}", f"--frontend={frontend}")
    assert main(["plan", *RATES, *arguments]) == 0
    assert f"parameters are {dtype}" in capsys.readouterr().out.partition("\n\n")[0]


def test_the_console_script_is_this_program() -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="offload-core")
    assert script.load() is main


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"offload-core {VERSION}\n"
