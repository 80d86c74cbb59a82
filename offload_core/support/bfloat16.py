"""Processors on which PyTorch multiplies bf16 matrices many times as slowly as fp32 ones."""

import os
from collections.abc import Mapping
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
_CONVERTS = frozenset({"avx_vnni_int8", "avx_ne_convert"})
"""Features of the processors without AVX-512 for which oneDNN has bf16 kernels."""
_CAPS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Environment variables that keep oneDNN from newer instructions; the first that is set counts."""
_WITHOUT = ("SSE41", "AVX", "AVX2", "AVX2_VNNI")
"""Values of these variables that leave no bf16 kernels."""


def why_bfloat16_is_slow(cpuinfo: Path = _CPUINFO, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return why matrix products in bf16 are slow in PyTorch on the CPU; None: they are not, as far as is known.

    PyTorch gives them to oneDNN if that has kernels for them: on x86 with AVX-512, and on the few processors that
    convert bf16 in AVX2. PyTorch's own loops, which do them elsewhere, take 20 to 500 times as long as fp32's.
    ``torch.ops.mkldnn._is_mkldnn_bf16_supported()`` says the same, but is private. Of processors that are not x86
    nothing is known here.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:  # macOS
        return None
    flags = next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), None)
    if flags is None:  # not x86
        return None
    if not (flags >= _AVX512 or flags >= _CONVERTS):
        return "this processor lacks AVX-512"
    variable = next((name for name in _CAPS if environ.get(name)), None)
    cap = environ[variable].upper() if variable else ""
    if cap in _WITHOUT or (cap == "AVX2_VNNI_2" and not flags >= _CONVERTS):
        return f"{variable}={cap} keeps oneDNN from AVX-512"
    return None
