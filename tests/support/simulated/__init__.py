"""A simulated accelerator as a PyTorch device, built on first use; ``device.cpp`` says what it simulates.

``load()`` makes ``"simulated"`` a device of this process, and the process's accelerator. If the process runs a backward
before that, ``prepare()`` must come first. This module is torch's device module for it, as ``torch.cuda`` is for CUDA.
"""

import atexit
import ctypes
import fcntl
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.accelerator import _utils, memory

from frontends.torch.ranks import pinning
from offload_core.dtypes import FLOAT32
from offload_core.memory.pinning import Registered
from offload_core.native import kernels

NAME = "simulated"
_SOURCE = Path(__file__).with_name("device.cpp")
_FLAGS = ["-O1", "-g0", "-w"]
_DEVICES = 2
_available = True


def why_not() -> str | None:
    """Return the reason why this machine cannot build the simulated device, or None if it can."""
    if torch.cuda.is_available():
        return "torch has one accelerator in a process, and here it is CUDA"
    if sys.platform != "linux":
        return "the simulated device is for Linux alone"
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "the simulated device needs a C++ compiler"
    if shutil.which("ninja", path=_path_with_ninja()) is None:
        return "the simulated device needs ninja"
    return None


def _path_with_ninja() -> str:
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def _built() -> Path:
    """The compiled backend, kept for later processes; of several at a time, one builds it."""
    key = hashlib.sha256(_SOURCE.read_bytes() + repr((torch.__version__, _FLAGS)).encode()).hexdigest()[:16]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = caches / "offload-core" / f"simulated-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    library, done = folder / "simulated.so", folder / "done"
    with (folder / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            from torch.utils import cpp_extension

            (folder / "lock").unlink(missing_ok=True)  # torch's own, of a process that was killed
            os.environ["PATH"] = _path_with_ninja()
            cpp_extension.load(
                "simulated", [str(_SOURCE)], extra_cflags=_FLAGS, build_directory=str(folder), is_python_module=False
            )
            done.touch()
    return library


@cache
def prepare() -> ctypes.CDLL:
    """Tell torch how many devices there may be: its first backward starts a thread for each, and none later."""
    path = str(_built())
    torch.ops.load_library(path)
    library = ctypes.CDLL(path)
    library.simulated_hold.restype = ctypes.c_void_p
    library.simulated_time.restype = ctypes.c_double
    library.simulated_open_offset.restype = ctypes.c_int64
    library.simulated_bytes_to_host.restype = library.simulated_bytes_to_device.restype = ctypes.c_int64
    return library


@cache
def load() -> ctypes.CDLL:
    """Make the simulated devices this process's accelerator."""
    library = prepare()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, sys.modules[__name__])
    library.simulated_start()
    torch.utils.generate_methods_for_privateuse1_backend()
    pinning.REGISTERED[NAME] = Registered(register)
    pinning.LAUNCHERS[NAME] = SimulatedLauncher
    atexit.register(_end)
    _hide()
    return library


def _hide() -> None:
    """Let torch's own libraries, too, find the accelerator only while it is available.

    One that is named is there all the same: garbage of engines may be collected at any time.
    """
    current, get, index_of = torch.accelerator.current_accelerator, torch._C._get_accelerator, _utils._get_device_index

    def index(place: Any, optional: bool = False) -> int:
        given = torch.device(place) if isinstance(place, str) else place
        if isinstance(given, torch.device) and given.type == NAME:
            return _index(given)
        return index_of(place, optional)

    torch.accelerator.current_accelerator = lambda *options, **named: current(*options, **named) if _available else None
    torch._C._get_accelerator = lambda: get() if _available else torch.device("cpu")
    for module in (torch.accelerator, memory):
        module._get_device_index = index


def _end() -> None:
    for device in range(_DEVICES):
        torch.accelerator.synchronize(device)


# --- what torch asks of a device's module ------------------------------------------------------------------------


def is_available() -> bool:
    return _available


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return _DEVICES


def current_device() -> int:
    return torch.accelerator.current_device_index()


def device(place: Any) -> Any:
    """A context with another current device."""
    return torch.accelerator.device_index(_index(place))


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    pass


def manual_seed_all(seed: int) -> None:
    for device in range(_DEVICES):
        set_rng_state(torch.tensor([seed, 0], device="cpu").view(torch.uint8), device)


def get_rng_state(device: Any = NAME) -> torch.Tensor:
    state = torch.empty(16, dtype=torch.uint8, device="cpu")
    load().simulated_random_state(_index(device), ctypes.c_void_p(state.data_ptr()))
    return state


def set_rng_state(state: torch.Tensor, device: Any = NAME) -> None:
    torch.Generator(NAME).set_state(state)  # says what is wrong with it
    load().simulated_set_random_state(_index(device), ctypes.c_void_p(state.data_ptr()))


def _index(device: Any) -> int:
    index = device if isinstance(device, int) else torch.device(device).index
    return current_device() if index is None else index


def get_device_name(device: Any = NAME) -> str:
    return f"{NAME} device {_index(device)}"


def set_per_process_memory_fraction(fraction: float, device: Any = NAME) -> None:
    """As ``torch.cuda``'s: what it would take beyond is out of memory."""
    load().simulated_capacity(_index(device), ctypes.c_size_t(int(fraction * 2**30)))


def Stream(device: Any = NAME, priority: int = 0) -> torch.Stream:
    return torch.Stream(device)


def Event(**options: bool) -> torch.Event:
    return torch.Event(NAME, **options)


def synchronize(device: Any = NAME) -> None:
    torch.accelerator.synchronize(_index(device))


def current_stream(device: Any = NAME) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def stream(of: torch.Stream) -> torch.Stream:
    """A context with this current stream."""
    return of


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


# --- what tests ask of it ----------------------------------------------------------------------------------------


@contextmanager
def available() -> Iterator[None]:
    """Programs that ask for an accelerator find this one, and not afterwards."""
    global _available
    load()
    _available = True
    try:
        yield
        _end()
    finally:
        _available = False


@contextmanager
def delays(*, seed: int = 0, kernel: int = 50, copy: int = 500) -> Iterator[None]:
    """Other random delays of kernels and copies, of so many microseconds at most."""
    load().simulated_delays(ctypes.c_uint64(seed), kernel, copy)
    try:
        yield
    finally:
        load().simulated_delays(ctypes.c_uint64(0), 50, 500)


@contextmanager
def capacity(n_bytes: int, device: int = 0) -> Iterator[None]:
    """A device that has so much memory."""
    load().simulated_capacity(device, ctypes.c_size_t(n_bytes))
    try:
        yield
    finally:
        load().simulated_capacity(device, ctypes.c_size_t(2**62))


def hold(stream: torch.Stream) -> Callable[[], None]:
    """Let the stream do nothing of what it is given from now on, until the returned function is called."""
    gate = load().simulated_hold(stream.device_index, stream.stream_id)
    return partial(load().simulated_release, ctypes.c_void_p(gate))


@contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """The stream does nothing of what it is given meanwhile."""
    release = hold(stream)
    try:
        yield
    finally:
        release()


@contextmanager
def in_turn(*, ahead: bool = False, link: float = 0.0) -> Iterator[None]:
    """Streams act only when the host waits for them, and then no more than they must: alike in every run.

    Args:
        ahead: the devices' default streams do what they can at once.
        link: bytes a second between host and device; with it there is a clock, which begins at zero. 0: none.
    """
    load().simulated_in_turn(True, ahead, ctypes.c_double(link))
    try:
        yield
    finally:
        load().simulated_in_turn(False, False, ctypes.c_double(0.0))


def now() -> float:
    """The host's time by the clock, in seconds."""
    return load().simulated_time()


def set_now(seconds: float) -> None:
    """The host goes on at this time: another of its threads does."""
    load().simulated_set_time(ctypes.c_double(seconds))


def keep_busy(stream: torch.Stream, seconds: float) -> None:
    """The stream takes so long, by the clock, before it goes on."""
    load().simulated_keep_busy(stream.device_index, stream.stream_id, ctypes.c_double(seconds))


def copies_waited_for() -> int:
    """Copies between host and device for which the host has waited: blocking ones, and of memory that is not pinned."""
    return load().simulated_copies_waited_for()


def bytes_copied() -> tuple[int, int]:
    """Bytes of all copies so far: from the devices to the host, and from the host to the devices."""
    return load().simulated_bytes_to_host(), load().simulated_bytes_to_device()


def allocations() -> int:
    """Tensors that were given memory of the devices so far."""
    stats = map(torch.accelerator.memory_stats, range(_DEVICES))
    return sum(each["allocation.all.allocated"] for each in stats)


def call(stream: torch.Stream, act: Callable[[], object]) -> None:
    """Have this called in the stream's order, unless the stream has failed by then; with an error of it, it fails."""
    number = next(_NUMBERS)
    _CALLS[number] = act
    load().simulated_call(stream.device_index, stream.stream_id, _call, ctypes.c_size_t(number))


_NUMBERS = count()
_CALLS: dict[int, Callable[[], object]] = {}
"""Functions that streams will call, by number."""


@ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_size_t)
def _call(number: int) -> bool:
    try:
        _CALLS.pop(number)()
    except Exception:
        return False
    return True


def fail_copy(n: int) -> None:
    """The n-th copy from now between host and device, or between devices, fails; 0: none."""
    load().simulated_fail_copy(n)


def register(address: int, n_bytes: int) -> Callable[[], None]:
    """Pin host memory where it is, as ``cuMemHostRegister`` does."""
    load().simulated_register(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes))
    return partial(_unregister, address)


_UPDATE = kernels.update  # a test may replace the module's by one that calls a launcher


class SimulatedLauncher:
    """Launches the kernels of updates in a stream: the host's, on the memory that they find when the stream comes to
    them. Tables that the device's kernels would read are uploaded, too."""

    def __init__(self, device: torch.device, stream: torch.Stream) -> None:
        self._stream = stream
        self._offset = load().simulated_open_offset()

    def _open(self, table: np.ndarray, *fields: str) -> np.ndarray:
        """Return a table with the addresses at which kernels find the memory; 0 stays 0."""
        moved = table.copy()
        for name in fields:
            moved[name] = np.where(moved[name] == 0, 0, moved[name] + np.uint64(self._offset % 2**64))
        return moved

    def _upload(self, table: np.ndarray, upload: Callable[[np.ndarray], int]) -> None:
        """Upload a table. When the stream comes to its kernel, the table must be there."""
        expected, at = table.tobytes(), upload(table) + self._offset

        def check() -> None:
            if ctypes.string_at(at, len(expected)) != expected:
                raise RuntimeError("simulated device: the table of a kernel was freed")

        call(self._stream, check)

    def update(self, segments: np.ndarray, scalars: np.ndarray, *, upload: Callable[[np.ndarray], int], **kind: Any):
        self._upload(segments, upload), self._upload(scalars, upload)
        memory = self._open(segments, "grad", "master", "moments", "param", "high", "ties", "scales")
        call(self._stream, partial(_UPDATE, memory, scalars.copy(), **kind, threads=1))

    def sum_squares(self, spans: np.ndarray, dtype: Any, bins_at: int, *, upload: Callable[[np.ndarray], int]) -> None:
        self._upload(spans, upload)
        bins = np.ctypeslib.as_array((ctypes.c_int64 * kernels.NORM_BINS).from_address(bins_at + self._offset))
        call(self._stream, partial(kernels.sum_squares, self._open(spans, "src"), dtype, bins, threads=1))

    def accumulate(self, spans: np.ndarray, dtype: Any, *, upload: Callable[[np.ndarray], int]) -> None:
        self._upload(spans, upload)
        call(self._stream, partial(kernels.accumulate, self._open(spans, "src", "dst"), dtype, threads=1))

    def cast(self, spans: np.ndarray, src: Any, dst: Any, *, upload: Callable[[np.ndarray], int]) -> None:
        self._upload(spans, upload)
        call(self._stream, partial(kernels.cast, self._open(spans, "src", "dst"), src, dst, threads=1))

    def reduce(
        self, src_at: int, n_sources: int, src_type: Any, dst_at: int, numel: int, *, divisor: float, add: bool
    ) -> None:
        src = kernels.view(src_at + self._offset, n_sources * numel, src_type)
        dst = kernels.view(dst_at + self._offset, numel, FLOAT32)
        reduce = partial(kernels.reduce, src, n_sources, src_type, dst, divisor=divisor, add=add, threads=1)
        call(self._stream, reduce)


def _unregister(address: int) -> None:
    if load().simulated_unregister(ctypes.c_void_p(address)):
        raise RuntimeError("simulated device: this memory was not registered")
