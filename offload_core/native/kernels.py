"""The C library: declare (``c_src/api.h``), call, check, raise. The only importer of the compiled module.

Arguments are NumPy structured arrays with the layout of the C structs, so that a call costs the same for one parameter
and for a thousand.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..dtypes import ElementType
from ..errors import ConfigError, KernelError
from ..support.processors import default_threads

try:
    from ._offload import ffi, lib
except ModuleNotFoundError as error:
    raise ImportError(
        f"the C kernels are not built in {os.path.dirname(__file__)}, whose sources Python found first: run "
        "pip install -e . or make setup there, or run the program from another folder"
    ) from error

_NUMPY = {"double": np.float64, "int64_t": np.int64, "uint64_t": np.uint64}


def _record(struct: str) -> np.dtype:
    """The NumPy type of a C struct; a pointer is an address, an array a subarray."""
    fields: list[tuple[str, type, tuple[int, ...]]] = []
    for name, field in ffi.typeof(struct).fields:
        is_array = field.type.kind == "array"
        item = field.type.item if is_array else field.type
        fields.append((name, _NUMPY.get(item.cname, np.uintp), (field.type.length,) if is_array else ()))
    dtype = np.dtype(fields)
    assert ffi.sizeof(struct) == dtype.itemsize, f"{struct} differs between C and Python"
    return dtype


SEGMENT = _record("oc_segment")
SPAN = _record("oc_span")
SCALARS = _record("oc_scalars")

NORM_BINS = lib.OC_NORM_BINS
NORM_NONFINITE = lib.OC_NORM_NONFINITE
NORM_DIGITS = lib.OC_NORM_DIGITS

MOMENTS = lib.OC_MOMENTS
"""The most moments that a rule has."""
N_SCALARS = lib.OC_SCALARS
"""The length of ``values`` in ``SCALARS``. ``c_src/rules.h`` has their order for each rule."""
RULES = {
    "adam_torch": lib.OC_ADAM_TORCH,
    "adam_optax": lib.OC_ADAM_OPTAX,
    "sgd_torch": lib.OC_SGD_TORCH,
    "sgd_optax": lib.OC_SGD_OPTAX,
    "lion": lib.OC_LION,
    "adagrad_torch": lib.OC_ADAGRAD_TORCH,
    "adagrad_optax": lib.OC_ADAGRAD_OPTAX,
    "direction_muon": lib.OC_MUON_DIRECTION,
    "muon": lib.OC_MUON,
}
FORMATS = {"float32": lib.OC_FLOAT32, "bfloat16": lib.OC_BFLOAT16, "float8": lib.OC_FLOAT8, "split": lib.OC_SPLIT}
"""Formats of states: masters are ``"float32"``, ``"bfloat16"`` or ``"split"``, moments ``"float32"``, ``"bfloat16"`` or
``"float8"`` (docs/numerics.md)."""
STATE_BLOCK = lib.OC_STATE_BLOCK
"""Elements that have one scale in ``"float8"``."""
GROUP_BLOCKS, SUM_BLOCKS = lib.OC_GROUP_BLOCKS, lib.OC_SUM_BLOCKS
"""Blocks of elements that one group of a device's threads goes through, and of a sum of squares."""
INSTRUCTION_SETS = {
    "scalar": lib.OC_SCALAR,
    "avx2": lib.OC_AVX2,
    "avx512": lib.OC_AVX512,
    "neon": lib.OC_NEON,
}
_ISA_VARIABLE = "OFFLOAD_CORE_ISA"

_REASONS = {
    lib.OC_EARGUMENT: "an argument is out of range or a pointer is null",
    lib.OC_EMEMORY: "no memory for the list of chunks",
    lib.OC_EUNSUPPORTED: "this processor lacks the instruction set",
}


@dataclass(frozen=True)
class KernelInfo:
    """The instruction set that the kernels use, those that this processor has, and the thread counts."""

    instruction_set: str
    supported: tuple[str, ...]
    num_threads: int
    pool_workers: int


def kernel_info() -> KernelInfo:
    """Report the kernels in use. ``num_threads`` is the default of ``OffloadConfig.num_threads``."""
    names = {code: name for name, code in INSTRUCTION_SETS.items()}
    supported = tuple(name for name, code in INSTRUCTION_SETS.items() if lib.oc_isa_supported(code))
    return KernelInfo(names[lib.oc_isa()], supported, default_threads(), lib.oc_pool_workers())


def set_instruction_set(name: str) -> None:
    """Use this instruction set (``"scalar"``, ``"avx2"``, ``"avx512"`` or ``"neon"``) from now on.

    All give the same bits; the widest supported one is the default. The environment variable
    ``OFFLOAD_CORE_ISA`` does the same at import.
    """
    supported = kernel_info().supported
    if name not in supported:
        raise ConfigError(f"instruction set {name!r}: this processor has {', '.join(supported)}; choose one of them")
    if code := lib.oc_set_isa(INSTRUCTION_SETS[name]):
        raise _failed("oc_set_isa", code)


def _failed(function: str, code: int) -> KernelError:
    return KernelError(f"{function} failed: {_REASONS.get(code, f'code {code}')}")


def _pointer(ctype: str, array: np.ndarray) -> Any:
    return ffi.cast(ctype, array.ctypes.data)


def address(array: np.ndarray) -> int:
    """Address of the first element of a C-contiguous array."""
    assert array.flags.c_contiguous
    return array.ctypes.data


def kind_of(
    grad_dtype: ElementType,
    param_dtype: ElementType | None,
    rule: str,
    keep_states: bool = False,
    master_format: str = "float32",
    moment_formats: Sequence[str] = (),
) -> Any:
    """An ``oc_kind`` of these arguments of :func:`update`."""
    kind = ffi.new("oc_kind *")
    kind.grad_dtype = grad_dtype.code
    kind.param_dtype = lib.OC_NO_PARAM if param_dtype is None else param_dtype.code
    kind.rule = RULES[rule]
    kind.keep_states = keep_states
    kind.master_format = FORMATS[master_format]
    for i, moment_format in enumerate(moment_formats):
        kind.moment_formats[i] = FORMATS[moment_format]
    return kind


def update(
    segments: np.ndarray,
    scalars: np.ndarray,
    *,
    grad_dtype: ElementType,
    param_dtype: ElementType | None,
    rule: str,
    threads: int,
    keep_states: bool = False,
    master_format: str = "float32",
    moment_formats: Sequence[str] = (),
) -> None:
    """Update every segment (dtype ``SEGMENT``) in place by a rule of ``RULES``, with the ``scalars`` (dtype
    ``SCALARS``) it names.

    The kernel rounds the scalars to float32: NumPy would flush subnormal ones to zero in a thread that does.
    ``param_dtype=None`` writes no device parameter; ``keep_states`` writes nothing but the device parameter,
    with the same bits. The formats are of ``FORMATS``; moments without one are in ``"float32"``. ``c_src/api.h`` says
    what a segment of each format needs. The caller keeps the memory at the addresses alive during the call.
    """
    assert segments.dtype == SEGMENT
    assert scalars.dtype == SCALARS
    kind = kind_of(grad_dtype, param_dtype, rule, keep_states, master_format, moment_formats)
    rows, values = ffi.from_buffer("oc_segment[]", segments), ffi.from_buffer("oc_scalars[]", scalars)
    if code := lib.oc_update(rows, len(rows), values, len(values), kind[0], threads):
        raise _failed("oc_update", code)


class Kernels(Protocol):
    """The kernels of one kind of memory, host or device. All addresses are addresses of this memory.

    :class:`HostKernels` returns when a kernel has run. A device's kernels run later, in the order of the calls.
    """

    def update(
        self,
        segments: np.ndarray,
        scalars: np.ndarray,
        *,
        grad_dtype: ElementType,
        param_dtype: ElementType | None,
        rule: str,
        keep_states: bool = False,
        master_format: str = "float32",
        moment_formats: Sequence[str] = (),
    ) -> None:
        """As :func:`update`."""
        ...

    def accumulate(self, spans: np.ndarray, dtype: ElementType) -> None:
        """As :func:`accumulate`."""
        ...

    def cast(self, spans: np.ndarray, src: ElementType, dst: ElementType) -> None:
        """As :func:`cast`."""
        ...


class HostKernels:
    """The kernels of host memory, on ``threads`` threads."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def update(self, segments: np.ndarray, scalars: np.ndarray, **kind: Any) -> None:
        """As :func:`update`."""
        update(segments, scalars, **kind, threads=self._threads)

    def accumulate(self, spans: np.ndarray, dtype: ElementType) -> None:
        """As :func:`accumulate`."""
        accumulate(spans, dtype, threads=self._threads)

    def cast(self, spans: np.ndarray, src: ElementType, dst: ElementType) -> None:
        """As :func:`cast`."""
        cast(spans, src, dst, threads=self._threads)


def _state(
    state_format: str,
    data: np.ndarray,
    numel: int,
    scales: np.ndarray | None,
    high: np.ndarray | None,
    ties: np.ndarray | None,
    has_sign: bool,
) -> Any:
    for array, needed in ((data, numel), (scales, -(-numel // STATE_BLOCK)), (high, numel), (ties, -(-numel // 8))):
        assert array is None or (array.flags.c_contiguous and array.size >= needed)
    state = ffi.new("oc_state *")
    state.data = _pointer("void *", data)
    state.scales = ffi.NULL if scales is None else _pointer("uint8_t *", scales)
    state.high = ffi.NULL if high is None else _pointer("void *", high)
    state.ties = ffi.NULL if ties is None else _pointer("uint8_t *", ties)
    state.numel = numel
    state.format = FORMATS[state_format]
    state.has_sign = has_sign
    return state


def decode(
    state_format: str,
    data: np.ndarray,
    out: np.ndarray,
    *,
    scales: np.ndarray | None = None,
    high: np.ndarray | None = None,
    ties: np.ndarray | None = None,
    has_sign: bool = True,
    threads: int,
) -> None:
    """``out`` (float32) = the values of a state in this format.

    Args:
        scales: for ``"float8"``: a byte for every 256 elements.
        high: for ``"split"``: the bfloat16 parameter, whose lower bits are ``data``.
        ties: for ``"split"``: a bit an element.
        has_sign: for ``"float8"``: False for a moment without a sign, whose bytes have one more exponent bit.
    """
    assert out.dtype == np.float32
    state = _state(state_format, data, out.size, scales, high, ties, has_sign)
    if code := lib.oc_decode(state, _pointer("float *", out), threads):
        raise _failed("oc_decode", code)


def encode(
    state_format: str,
    values: np.ndarray,
    data: np.ndarray,
    *,
    scales: np.ndarray | None = None,
    high: np.ndarray | None = None,
    ties: np.ndarray | None = None,
    has_sign: bool = True,
    threads: int,
) -> None:
    """The state = ``values`` (float32), rounded to nearest even. The other arguments are those of ``decode``."""
    assert values.dtype == np.float32
    state = _state(state_format, data, values.size, scales, high, ties, has_sign)
    if code := lib.oc_encode(state, _pointer("float *", values), threads):
        raise _failed("oc_encode", code)


def sum_squares(spans: np.ndarray, dtype: ElementType, bins: np.ndarray, *, threads: int) -> None:
    """Add the exact sum of squares of the spans' ``src`` to ``bins`` (int64, ``NORM_BINS`` long)."""
    assert spans.dtype == SPAN
    assert bins.dtype == np.int64
    assert bins.shape == (NORM_BINS,)
    rows, sums = ffi.from_buffer("oc_span[]", spans), ffi.from_buffer("int64_t[]", bins, require_writable=True)
    if code := lib.oc_sum_squares(rows, len(rows), dtype.code, sums, threads):
        raise _failed("oc_sum_squares", code)


def accumulate(spans: np.ndarray, dtype: ElementType, *, threads: int) -> None:
    """``dst += float32(src)`` for every span; ``dst`` is float32, ``src`` is ``dtype``."""
    assert spans.dtype == SPAN
    rows = ffi.from_buffer("oc_span[]", spans)
    if code := lib.oc_accumulate(rows, len(rows), dtype.code, threads):
        raise _failed("oc_accumulate", code)


def reduction_of(
    src_at: int, n_sources: int, src_type: ElementType, dst_at: int, numel: int, *, divisor: float, add: bool
) -> Any:
    """An ``oc_reduction`` of runs of ``numel`` elements, one after another from the address ``src_at``."""
    reduction = ffi.new("oc_reduction *")
    reduction.src = ffi.cast("void *", src_at)
    reduction.dst = ffi.cast("float *", dst_at)
    reduction.n_sources = n_sources
    reduction.stride = reduction.numel = numel
    reduction.divisor = divisor
    reduction.dtype = src_type.code
    reduction.add = add
    return reduction


def reduce(
    src: np.ndarray, n_sources: int, src_type: ElementType, dst: np.ndarray, *, divisor: float, add: bool, threads: int
) -> None:
    """``dst`` (float32) = or += the sum of ``n_sources`` equal runs of ``src``, in order, divided by ``divisor``."""
    assert src.size == n_sources * dst.size
    assert dst.dtype == np.float32
    reduction = reduction_of(address(src), n_sources, src_type, address(dst), dst.size, divisor=divisor, add=add)
    if code := lib.oc_reduce(reduction, threads):
        raise _failed("oc_reduce", code)


def check_update(segments: np.ndarray, scalars: np.ndarray, kind: Any) -> None:
    """Refuse the arguments that :func:`update` refuses. Addresses may be a device's."""
    assert segments.dtype == SEGMENT
    assert scalars.dtype == SCALARS
    rows, values = ffi.from_buffer("oc_segment[]", segments), ffi.from_buffer("oc_scalars[]", scalars)
    if code := lib.oc_check_update(rows, len(rows), values, len(values), kind[0]):
        raise _failed("oc_update", code)


def check_spans(function: str, spans: np.ndarray, src: ElementType, dst: ElementType | None) -> None:
    """Refuse the arguments that this function of spans refuses. Addresses may be a device's."""
    assert spans.dtype == SPAN
    rows, types = ffi.from_buffer("oc_span[]", spans), (src.code, lib.OC_FLOAT32 if dst is None else dst.code)
    if code := lib.oc_check_spans(rows, len(rows), *types, dst is not None):
        raise _failed(function, code)


def check_reduction(reduction: Any) -> None:
    """Refuse the reduction that :func:`reduce` refuses. Addresses may be a device's."""
    if code := lib.oc_check_reduction(reduction):
        raise _failed("oc_reduce", code)


def device_text() -> str:
    """The C++ text of the kernels of a device (``c_src/device.h``), as it was when this module was compiled."""
    return ffi.string(lib.oc_device_text).decode()


def view(address: int, numel: int, dtype: ElementType) -> np.ndarray:
    """The memory at an address as a writable array. The caller keeps the memory alive."""
    buffer = ffi.buffer(ffi.cast("char *", address), numel * dtype.itemsize)
    return np.frombuffer(buffer, dtype.numpy)


def cast(spans: np.ndarray, src: ElementType, dst: ElementType, *, threads: int) -> None:
    """``dst = src`` for every span, rounded to nearest even."""
    assert spans.dtype == SPAN
    rows = ffi.from_buffer("oc_span[]", spans)
    if code := lib.oc_cast(rows, len(rows), src.code, dst.code, threads):
        raise _failed("oc_cast", code)


def cast_array(src: np.ndarray, src_type: ElementType, dst: np.ndarray, dst_type: ElementType, threads: int) -> None:
    """``cast`` of one whole array into another of the same length."""
    cast_arrays([src], src_type, [dst], dst_type, threads)


def cast_arrays(
    sources: Sequence[np.ndarray],
    src_type: ElementType,
    targets: Sequence[np.ndarray],
    dst_type: ElementType,
    threads: int,
) -> None:
    """``cast`` of whole arrays, each into another of the same length."""
    rows = np.empty(len(sources), SPAN)
    for i, (src, dst) in enumerate(zip(sources, targets, strict=True)):
        assert src.size == dst.size
        assert src.flags.c_contiguous
        assert dst.flags.c_contiguous
        rows[i] = src.ctypes.data, dst.ctypes.data, src.size
    cast(rows, src_type, dst_type, threads=threads)


def bind_workers(cpus: Sequence[int]) -> None:
    """Have the pool's workers run on these processors alone (Linux); some may be offline.

    The calling threads are not bound. From now on, a calling thread that may run elsewhere leaves all pieces to the
    workers.
    """
    if code := lib.oc_bind_workers(ffi.new("int32_t[]", list(cpus)), len(cpus)):
        raise _failed("oc_bind_workers", code)


def first_touch(array: np.ndarray, *, threads: int) -> None:
    """Write one zero to each page of a fresh array, from the pool's threads."""
    if code := lib.oc_first_touch(_pointer("void *", array), array.nbytes, threads):
        raise _failed("oc_first_touch", code)


def segments_of(rows: Sequence[Mapping[str, int | Sequence[int]]]) -> np.ndarray:
    """An array of ``SEGMENT`` from the fields of each row; those that are not named are 0."""
    segments = np.zeros(len(rows), SEGMENT)
    for segment, row in zip(segments, rows, strict=True):
        for name, value in row.items():
            segment[name] = value
    return segments


def spans_of(rows: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """An array of ``SPAN`` from ``(src, dst, numel)`` rows."""
    return np.array(rows, dtype=SPAN)


def spans(src: np.ndarray, dst: np.ndarray | int, numel: np.ndarray) -> np.ndarray:
    """An array of ``SPAN`` from its columns."""
    rows = np.empty(len(numel), SPAN)
    rows["src"], rows["dst"], rows["numel"] = src, dst, numel
    return rows


if os.environ.get(_ISA_VARIABLE):
    try:
        set_instruction_set(os.environ[_ISA_VARIABLE])
    except ConfigError as error:
        raise ConfigError(f"environment variable {_ISA_VARIABLE}: {error}") from None
