"""Reads a file of ``torch.save``: an archive with one pickle and the bytes of each storage.

A stranger may have written it. So this module reads it by its own rules, and not by ``torch.load``: the file's size
bounds the memory that it takes, each tensor's elements lie inside their storage, and no code runs. A class or function
that is none of the plain ones below becomes an :class:`Inert` object.
"""

import os
import pickle
import struct
import sys
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from offload_core.support.checks import kind_of
from offload_core.support.files import open_regular

from ...internals.private import SAVED_BYTES, SAVED_PARAMETERS, SAVED_SUBCLASS, SAVED_TENSORS

_PICKLE_BYTES = 2**28
"""The most bytes of the pickle. That of a model of 100,000 parameters takes some 20 MB."""
_DEEPEST = 200
"""The most levels of nesting, as in our own checkpoints."""
_MOST_DIMENSIONS = 64
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_OPCODES = b"\x80.(tN\x89\x88)]}\x8fQaesu0Rb\x81JKMGX\x8ah\x6aqr\x85\x86\x87cU"  # protocol 2, as torch.save writes it


_STORAGES = {
    f"{name}Storage": dtype
    for name, dtype in {
        "Float": "float32",
        "Double": "float64",
        "Half": "float16",
        "BFloat16": "bfloat16",
        "Long": "int64",
        "Int": "int32",
        "Short": "int16",
        "Char": "int8",
        "Byte": "uint8",
        "Bool": "bool",
        "ComplexFloat": "complex64",
        "ComplexDouble": "complex128",
    }.items()
}
"""The element type of each class of storages."""


class Inert(int):
    """A harmless substitute for a class or a function. It keeps an integer argument and the attributes of an object."""

    path = ""
    """The name of the class."""

    def __new__(cls, *args: Any) -> "Inert":
        return super().__new__(cls, args[0] if args and type(args[0]) is int else 0)

    def __setstate__(self, state: Any) -> None:
        self.values = state if isinstance(state, dict) else {}


class _Record(NamedTuple):
    """A file in the archive."""

    start: int
    n_bytes: int


class _Storage(NamedTuple):
    """A storage, with the type and the number of its elements."""

    memory: torch.UntypedStorage
    dtype: torch.dtype
    numel: int


def read_archive(path: Path) -> Any:
    """Return what was saved to a file. Tensors are mapped, and stay on the disk.

    Raises:
        OSError: it cannot be opened, or is no regular file.
        ValueError and others: it is not laid out as ``torch.save`` lays out a file, or is more than that.
    """
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        records = _records(file, size)
        [at] = [record for name, record in records.items() if name.rpartition("/")[2] == "data.pkl"]
        if at.n_bytes > _PICKLE_BYTES:
            raise ValueError(f"a pickle of {at.n_bytes:,} bytes, expected at most {_PICKLE_BYTES:,}")
        folder = next(name for name, record in records.items() if record is at).removesuffix("data.pkl")
        if (order := records.get(f"{folder}byteorder")) is not None:
            file.seek(order.start)
            if (said := file.read(min(order.n_bytes, 9)).decode("ascii", "replace")) != sys.byteorder:
                raise ValueError(f"tensors of byte order {said!r}, expected {sys.byteorder!r}")
        file.seek(at.start)
        held = file.read(at.n_bytes)
    mapped = torch.from_file(os.fspath(path), shared=False, size=size, dtype=torch.uint8)
    value = _Unpickler(BytesIO(held), mapped, records, folder).load()
    _check_bounded(value, most=max(10**6, 4 * len(held)))
    return value


def _records(file: Any, size: int) -> dict[str, _Record]:
    """The files in an archive, by name: none is compressed, and no name is there twice."""
    with zipfile.ZipFile(file) as archive:
        entries, comment = archive.infolist(), archive.comment
    if comment:
        raise ValueError("an archive with a comment, expected what torch.save writes")
    if len({entry.filename.lower() for entry in entries}) != len(entries):
        raise ValueError("an archive that has a file twice")
    found = {}
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise ValueError(f"{entry.filename[:80]!r} is compressed there, expected what torch.save writes")
        file.seek(entry.header_offset)
        magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        start = entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if magic != b"PK\x03\x04" or start + entry.file_size > size:
            raise ValueError(f"{entry.filename[:80]!r} does not lie in the archive")
        found[entry.filename] = _Record(start, entry.file_size)
    return found


# --- the pickle --------------------------------------------------------------------------------------


class _Unpickler(pickle._Unpickler):  # Python's: C's allocates what a number says
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {code: pickle._Unpickler.dispatch[code] for code in _OPCODES}

    def __init__(self, file: Any, mapped: torch.Tensor, records: Mapping[str, _Record], folder: str) -> None:
        super().__init__(file, encoding="ascii")
        self._mapped, self._records, self._folder = mapped, records, folder
        self._inert: dict[str, type[Inert]] = {}
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._plain: dict[str, Any] = {
            "collections.OrderedDict": OrderedDict,
            "collections.Counter": Counter,
            "builtins.set": set,
            "builtins.complex": complex,
            "builtins.bytearray": _bytes,
            "_codecs.encode": _bytes,
            "torch.Size": torch.Size,
            "torch.device": torch.device,
            **dict.fromkeys(SAVED_TENSORS, self._tensor),
            **dict.fromkeys(SAVED_PARAMETERS, _first),
            SAVED_BYTES: self._of_bytes,
            SAVED_SUBCLASS: self._of_type,
            "torch.storage.UntypedStorage": torch.uint8,
        }

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module.replace('__builtin__', 'builtins')}.{name}"
        if full in self._plain:
            return self._plain[full]
        if module == "torch" and (dtype := _dtype(name)) is not None:
            return dtype
        if full not in self._inert:
            self._inert[full] = type("Inert", (Inert,), {"path": full})
        return self._inert[full]

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, numel = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or type(key) is not str:
            raise ValueError(f"{pid!r:.80} in place of a storage")
        record = self._records[f"{self._folder}data/{key}"]
        if not _is_count(numel) or numel * dtype.itemsize > record.n_bytes or record.start % dtype.itemsize:
            raise ValueError(f"storage {key[:40]!r} has {record.n_bytes:,} bytes, expected {numel!r:.40} of {dtype}")
        if key not in self._storages:
            self._storages[key] = self._mapped.untyped_storage()[record.start : record.start + record.n_bytes]
        return _Storage(self._storages[key], dtype, numel)

    def _tensor(
        self,
        storage: Any,
        offset: Any,
        shape: Any,
        strides: Any,
        requires_grad: Any = False,
        hooks: Any = None,
        metadata: Any = None,
    ) -> torch.Tensor:
        """A tensor whose elements lie in its storage. It has no more bytes than the file, whatever its strides are."""
        alike = isinstance(storage, _Storage) and isinstance(shape, tuple) and isinstance(strides, tuple)
        if not alike or metadata or len(shape) != len(strides) or len(shape) > _MOST_DIMENSIONS:
            raise ValueError("a tensor that is not one of torch.save's")
        if not all(map(_is_count, (offset, *shape, *strides))):
            raise ValueError(f"a tensor of shape {shape!r:.80} and strides {strides!r:.80} from {offset!r:.40} on")
        numel, last = 1, offset
        for n, stride in zip(shape, strides, strict=True):
            numel *= n
            last += (n - 1) * stride
        if numel and (last >= storage.numel or numel * storage.dtype.itemsize > self._mapped.numel()):
            raise ValueError(
                f"a tensor of shape {shape!r:.80} and strides {strides!r:.80} in {storage.numel:,} elements"
            )
        if not numel:
            return torch.empty(shape, dtype=storage.dtype, device="cpu")
        return torch.empty(0, dtype=storage.dtype, device="cpu").set_(storage.memory, offset, shape, strides)

    def _of_bytes(
        self, storage: Any, offset: Any, shape: Any, strides: Any, gradient: Any, hooks: Any, dtype: Any, *rest: Any
    ) -> torch.Tensor:
        """A tensor of a newer type, whose storage has plain bytes."""
        if not (isinstance(storage, _Storage) and isinstance(dtype, torch.dtype) and storage.dtype is torch.uint8):
            raise ValueError("a tensor that is not one of torch.save's")
        if storage.memory.data_ptr() % dtype.itemsize:
            raise ValueError(f"a storage of {dtype} that is not aligned")
        typed = _Storage(storage.memory, dtype, storage.numel // dtype.itemsize)
        return self._tensor(typed, offset, shape, strides, gradient, hooks, *rest)

    def _of_type(self, rebuild: Any, kind: Any, args: Any, state: Any) -> Any:
        if rebuild not in (self._tensor, _first):
            raise ValueError(f"{rebuild!r:.80} in place of a tensor")
        return rebuild(*args)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _dtype(name: str) -> torch.dtype | None:
    """The type of ``torch.float32`` or ``torch.FloatStorage``; None: the name is another one."""
    found = getattr(torch, _STORAGES.get(name, name), None)
    return found if isinstance(found, torch.dtype) else None


def _first(value: Any, *others: Any) -> Any:
    return value


def _bytes(value: Any = "", encoding: Any = "latin1") -> bytes:
    """Bytes as protocol 2 holds them: text in Latin-1."""
    if not isinstance(value, str | bytes) or encoding != "latin1":
        raise ValueError(f"bytes of {kind_of(value)} in {encoding!r:.40}")
    return value.encode("latin1") if isinstance(value, str) else value


# --- bounds ------------------------------------------------------------------------------------------


def parts_of(value: Any) -> Iterator[Any]:
    """The values inside a value: the keys and values of a dict, the items of a list, the attributes of an object."""
    if isinstance(value, Mapping):
        yield from value
        yield from value.values()
    elif isinstance(value, list | tuple | set):
        yield from value
    elif isinstance(value, Inert):
        yield from getattr(value, "values", {}).values()


def _check_bounded(value: Any, most: int) -> None:
    """Raise :class:`ValueError` if a tree of values is too deep, holds itself, or has more than ``most`` values, where
    one that is there several times counts each time: whoever walks it needs no bounds then."""
    known: dict[int, tuple[int, int]] = {}
    """The number of values in each value that was walked, and its depth."""
    walked: set[int] = set()
    stack: list[tuple[Any, Iterator[Any], list[int]]] = [(value, parts_of(value), [1, 0])]
    while stack:
        holder, rest, totals = stack[-1]
        if len(stack) > _DEEPEST:
            raise ValueError(f"values are more than {_DEEPEST} levels deep")
        walked.add(id(holder))
        for part in rest:
            if not isinstance(part, Mapping | list | tuple | set | Inert):
                totals[0] += 1
            elif id(part) in known:
                count, depth = known[id(part)]
                totals[0] += count
                totals[1] = max(totals[1], depth)
            elif id(part) in walked:
                raise ValueError("a value that holds itself")
            else:
                stack.append((part, parts_of(part), [1, 0]))
                break
            if totals[0] > most:
                raise ValueError(f"more than {most:,} values")
        else:
            stack.pop()
            known[id(holder)] = totals[0], totals[1] + 1
            if totals[1] + 1 + len(stack) > _DEEPEST:
                raise ValueError(f"values are more than {_DEEPEST} levels deep")
            if stack:
                above = stack[-1][2]
                above[0] += totals[0]
                above[1] = max(above[1], totals[1] + 1)
                if above[0] > most:
                    raise ValueError(f"more than {most:,} values")
