"""Processors on which PyTorch is slow in bf16 are known, and who trains on one is told: on fake processors and here."""

import json

import pytest

from offload_core import ConfigWarning, OffloadConfig
from offload_core.commands import info, machine
from offload_core.native import kernels
from offload_core.support import bfloat16
from offload_core.support.bfloat16 import why_bfloat16_is_slow
from tests.support.processes import torch_server

ZEN_3 = "fpu sse4_1 avx f16c avx2 fma"
SKYLAKE = f"{ZEN_3} avx512f avx512bw avx512dq avx512vl"
KNIGHTS_LANDING = f"{ZEN_3} avx512f avx512cd avx512er avx512pf"
LUNAR_LAKE = f"{ZEN_3} avx_vnni avx_vnni_int8 avx_ne_convert"
LACKS, KEEPS = "this processor lacks AVX-512", "ONEDNN_MAX_CPU_ISA={} keeps oneDNN from AVX-512"


@pytest.fixture
def processor(tmp_path):
    """Make the file in which Linux describes a processor; None: the system has none."""

    def make(flags, field="flags\t\t"):
        path = tmp_path / "cpuinfo"
        if flags is not None:
            path.write_text(f"processor\t: 0\nmodel name\t: fake\n{field}: {flags}\n\nprocessor\t: 1\n")
        return path

    return make


@pytest.mark.parametrize(
    ("flags", "environ", "why"),
    [
        (SKYLAKE, {}, None),
        (f"{SKYLAKE} avx512_bf16 amx_bf16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, None),
        (LUNAR_LAKE, {"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI_2"}, None),
        (ZEN_3, {}, LACKS),
        (KNIGHTS_LANDING, {}, LACKS),
        (f"{ZEN_3} avx_vnni avx_ne_convert", {"ONEDNN_MAX_CPU_ISA": "ALL"}, LACKS),
        (SKYLAKE, {"ONEDNN_MAX_CPU_ISA": "avx2"}, KEEPS.format("AVX2")),
        (SKYLAKE, {"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI_2"}, KEEPS.format("AVX2_VNNI_2")),
        (LUNAR_LAKE, {"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI"}, KEEPS.format("AVX2_VNNI")),
        (SKYLAKE, {"DNNL_MAX_CPU_ISA": "SSE41"}, "DNNL_MAX_CPU_ISA=SSE41 keeps oneDNN from AVX-512"),
        (SKYLAKE, {"ONEDNN_MAX_CPU_ISA": "DEFAULT", "DNNL_MAX_CPU_ISA": "AVX2"}, None),
        (SKYLAKE, {"ONEDNN_MAX_CPU_ISA": ""}, None),
        (None, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, None),
    ],
)
def test_why_bf16_is_slow_follows_from_a_processors_features_and_onednns_cap(flags, environ, why, processor):
    assert why_bfloat16_is_slow(processor(flags), environ) == why


def test_of_processors_that_are_not_x86_nothing_is_said(processor):
    assert why_bfloat16_is_slow(processor("fp asimd bf16", "Features\t"), {}) is None


@pytest.mark.long("starts interpreters that import the frameworks")
def test_torch_says_the_same_of_this_processor():
    pytest.importorskip("torch")
    program = (
        "import torch\nfrom offload_core.support.bfloat16 import why_bfloat16_is_slow\n"
        "print(torch.ops.mkldnn._is_mkldnn_bf16_supported(), why_bfloat16_is_slow() is None)"
    )
    if "\nflags" not in bfloat16._CPUINFO.read_text():
        pytest.skip("nothing is known of processors that are not x86")
    caps = ["", "AVX2", "avx2_vnni_2", "AVX512_CORE", "ALL"]
    environments = [{"ONEDNN_MAX_CPU_ISA": cap, "DNNL_MAX_CPU_ISA": ""} for cap in caps]
    for done in torch_server().run(*[["-c", program]] * len(caps), environments=environments):
        theirs, ours = done.stdout.split()
        assert ours == theirs, done


@pytest.fixture
def slow(processor, monkeypatch):
    monkeypatch.setattr(bfloat16.why_bfloat16_is_slow, "__defaults__", (processor(ZEN_3), {}))


def test_info_shows_it(slow, monkeypatch, capsys):
    monkeypatch.setattr(info, "measure_bandwidths", lambda threads: machine.Bandwidths(1e9, 2e9))
    monkeypatch.setattr(kernels, "bind_workers", lambda cpus: None)
    info.run(info.argparse.Namespace(json=False, nvme_path=None))
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bf16 ")]
    assert line.split(maxsplit=1)[1].startswith(f"{LACKS}: in PyTorch a matrix product takes 20 to 500 times as long")
    info.run(info.argparse.Namespace(json=True, nvme_path=None))
    assert json.loads(capsys.readouterr().out)["why bf16 is slow"] == LACKS


def test_wrap_says_it_once_of_a_bf16_model_on_the_cpu(slow, monkeypatch):
    torch = pytest.importorskip("torch")
    from frontends.torch import wrap
    from frontends.torch.params import casting

    def model(place="cpu"):
        return torch.nn.Linear(2, 2, device=place)

    monkeypatch.setattr(casting, "_has_warned", False)
    wrap(model(), lr=1e-3)
    wrap(model(), lr=1e-3, param_dtype="float16")
    casting.warn_if_slow(OffloadConfig(param_dtype="bfloat16"), model("meta"))
    assert not casting._has_warned
    with pytest.warns(ConfigWarning, match=f"param_dtype='bfloat16': {LACKS}, so PyTorch takes 20 to 500") as warned:
        engines = [wrap(model(), lr=1e-3, param_dtype="bfloat16") for _ in range(2)]
    assert [warning.filename for warning in warned] == [__file__]
    assert engines[0].module.weight.dtype == torch.bfloat16
