"""NVRTC compiles the kernels of a device without a device, and its PTX rounds as the text says.

PTX is what the driver's assembler takes as it stands: an operation with a rounding mode (``.rn``) is not contracted.
"""

import ctypes
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from offload_core.dtypes import BFLOAT16, BY_NUMPY, FLOAT16, FLOAT32
from offload_core.native import device_code, kernels
from offload_core.native.device_code import Kernel, Nvrtc, update_kernel
from tests.support.state_formats import MASTERS, MOMENTS

WHEELS = {12: "nvidia-cuda-nvrtc-cu12==12.9.86", 13: "nvidia-cuda-nvrtc==13.0.88"}
"""A version of NVRTC for each major version of CUDA that torch and JAX have builds for."""
ARCHITECTURES = ("80", "90", "100")
TYPES = [*BY_NUMPY.values()]
OF_ADAM_AND_MUON = [*itertools.product(MOMENTS, MOMENTS)]

# Correctly rounded arithmetic; conversions, of which only one rounds (a scalar, from double); what is exact.
ALLOWED = re.compile(
    r"(add|sub|mul|fma|div|sqrt|rcp)\.rn\.f32|cvt\.rn\.f32\.(f64|[us](16|32))|cvt\.rni\.f32\.f32|cvt\.rzi\.[us]32\.f32"
    r"|(abs|neg|copysign|mov|selp)\.f32|setp\.[a-z]+\.f(32|64)|(ld|st)\.[a-z0-9.]*f(32|64)"
)
FMAS = {"adam_torch": 4, "sgd_torch": 4, "adagrad_torch": 2, "direction_muon": 4, "muon": 3}
"""The times that ``fmaf`` stands in a rule, both branches counted. A moment in eight bits has one more."""


@pytest.fixture(scope="module", params=WHEELS, ids=lambda version: f"CUDA {version}")
def nvrtc(request) -> Nvrtc:
    folder = Path(sys.prefix, f"nvrtc-{request.param}")
    if not folder.exists():  # several workers may install it: the first one's stays
        made = Path(tempfile.mkdtemp(dir=sys.prefix))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(made)]
        done = subprocess.run([*command, WHEELS[request.param]], capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(made)
            pytest.skip(f"pip cannot install {WHEELS[request.param]}: {done.stderr.strip()[-300:]}")
        try:
            made.rename(folder)
        except OSError:
            shutil.rmtree(made)
    (library,) = folder.glob(f"nvidia/*/lib/libnvrtc.so.{request.param}")
    return Nvrtc(str(library))


def moments_of(rule: str) -> list[tuple[str, ...]]:
    """The formats of the moments that a rule has."""
    return OF_ADAM_AND_MUON if rule.startswith(("adam_", "muon")) else [(name,) for name in MOMENTS]


def kinds(rule: str) -> list[tuple[Kernel, int]]:
    """Kernels of a rule in every combination of formats, which go through the element types in turn, and the number of
    FMAs in the text of each."""
    rows = []
    outputs = [(param, keep) for param in (*TYPES, None) for keep in (False, True) if param or not keep]
    types = itertools.cycle(itertools.product(TYPES, outputs))
    for master, moments in itertools.product(MASTERS, moments_of(rule)):
        for _ in range(2):
            grad, (param, keep) = next(types)
            kind = kernels.kind_of(grad, param, rule, keep, master, moments)
            fmas = FMAS.get(rule, 0) - (2 if rule == "muon" and keep else 0)  # unused: its momentum
            rows.append((update_kernel(kind), fmas + (0 if keep else moments.count("float8"))))
    return rows


def operations(ptx: bytes) -> list[str]:
    """The instructions of PTX that have a floating-point type."""
    names = re.findall(r"^\s+(?:@!?%p\d+\s+)?([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)+)\s", ptx.decode(), re.MULTILINE)
    return [name for name in names if re.search(r"\.b?f(16|32|64)", name)]


def check(ptx: bytes, fmas: int) -> None:
    """Check that all arithmetic is correctly rounded, with these many FMAs, and that nothing lies in local memory."""
    found = operations(ptx)
    assert not [name for name in found if not ALLOWED.fullmatch(name)]
    assert found.count("fma.rn.f32") == fmas
    assert b".ftz" not in ptx
    assert b".approx" not in ptx
    assert b".local" not in ptx, "a state that belongs in registers is in memory"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("rule", kernels.RULES)
def test_an_update_rounds_as_its_text_says(nvrtc, rule, architecture):
    for kernel, fmas in kinds(rule):
        check(nvrtc.assembly(kernel, f"compute_{architecture}"), fmas)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_other_kernels_round_as_their_text_says(nvrtc, architecture):
    one_type = (device_code.sum_squares_kernel, device_code.accumulate_kernel, device_code.reduce_kernel)
    others = [kernel(dtype) for kernel in one_type for dtype in TYPES]
    for kernel in (*others, *(device_code.cast_kernel(a, b) for a in TYPES for b in TYPES)):
        check(nvrtc.assembly(kernel, f"compute_{architecture}"), 0)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_devices_code_is_made_for_it_or_for_the_newest_that_the_compiler_knows(nvrtc, architecture):
    kernel = update_kernel(kernels.kind_of(BFLOAT16, BFLOAT16, "adam_torch"))
    assert device_code.compile_text(nvrtc.library, f"sm_{architecture}", kernel).startswith(b"\x7fELF")
    newest = max(nvrtc.architectures())
    assert f".target sm_{newest}".encode() in nvrtc.compile(kernel, f"sm_{newest + 9}")


@pytest.mark.slow
def test_the_compilers_words_are_in_the_error(nvrtc):
    kernel = Kernel("oc_device_update", (("OC_UPDATE", "{nonsense}"),))
    with pytest.raises(device_code.KernelError, match=r"(?s)cannot compile oc_device_update .*--fmad=false.*nonsense"):
        nvrtc.compile(kernel, "sm_90")
    with pytest.raises(device_code.KernelError, match="compiles for sm_[0-9]+ and newer, and the device is sm_10"):
        nvrtc.compile(kernel, "sm_10")


@pytest.mark.slow
def test_a_loaded_compiler_is_found(nvrtc):
    ctypes.CDLL(nvrtc.library)
    major = int(nvrtc.library.rpartition(".")[2])
    assert device_code.find_compiler("CUDA", major).library == f"libnvrtc.so.{major}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "fmas"),
    [
        ("--fmad=false", "--fmad=true", 0),
        ("--ftz=false", "--ftz=true", 0),
        ("--prec-div=true", "--prec-div=false", 0),
        ("--prec-sqrt=true", "--prec-sqrt=false", 0),
        ("--fmad=false", "--use_fast_math", 0),
        ("--fmad=false", "--fmad=false", 1),
    ],
)
def test_the_check_fails_with_other_options(nvrtc, old, new, fmas):
    kernel = update_kernel(kernels.kind_of(FLOAT32, FLOAT16, "adam_optax"))
    others = Nvrtc(nvrtc.library)
    others.options = tuple(new if option == old else option for option in nvrtc.options)
    check(nvrtc.assembly(kernel, "compute_90"), 0)
    with pytest.raises(AssertionError):
        check(others.assembly(kernel, "compute_90"), fmas)
