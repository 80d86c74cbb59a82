"""TensorBoard's event files, written without TensorBoard.

A file is a sequence of records: a length (8 bytes, little-endian), its checksum, so many bytes, their checksum. A
record is an ``Event`` of https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/util/event.proto in the
encoding of https://protobuf.dev/programming-guides/encoding. The checksum is CRC-32C (RFC 3720), rotated and offset
("masked"). Numbers with a name are all that is needed here, so neither protobuf nor a framework is.
"""

import os
import socket
import struct
import time
import weakref
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

_POLYNOMIAL = 0x82F63B78
"""Of CRC-32C, its bits reversed."""
_MASK = 0xA282EAD8
_VERSION = b"brain.Event:2"
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5
"""How a field is written, as protobuf numbers it."""
_WALL_TIME, _STEP, _FILE_VERSION, _SUMMARY, _SESSION_LOG = 1, 2, 3, 5, 7
"""Fields of ``Event``. ``Summary`` has values in 1; a value its tag in 1 and a number in 2; ``SessionLog`` a status in
1."""
_START = 1
"""The status of a run that begins or goes on: what other files have of later steps does not count."""


def _table() -> list[int]:
    """The checksum of each byte."""
    table = list(range(256))
    for _ in range(8):
        table = [crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0) for crc in table]
    return table


_TABLE = _table()


class EventFile:
    """A new event file in a folder; each call writes one record whole, so that a killed run loses none.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"  # read in this order
        self._file = FileIO(folder / name, "ab")
        weakref.finalize(self, self._file.close)
        self._write(0, _field(_FILE_VERSION, _BYTES, _VERSION))

    def start(self, step: int) -> None:
        """Of this step and later ones nothing counts that was written before."""
        self._write(step, _field(_SESSION_LOG, _BYTES, _field(1, _VARINT, _varint(_START))))

    def scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers of a step, by name; inf and NaN are numbers, too."""
        values = (_field(1, _BYTES, tag.encode()) + _field(2, _FLOAT, _float(x)) for tag, x in numbers.items())
        self._write(step, _field(_SUMMARY, _BYTES, b"".join(_field(1, _BYTES, value) for value in values)))

    def close(self) -> None:
        self._file.close()

    def _write(self, step: int, content: bytes) -> None:
        event = _field(_WALL_TIME, _DOUBLE, struct.pack("<d", time.time())) + _field(_STEP, _VARINT, _varint(step))
        event += content
        length = struct.pack("<Q", len(event))
        append(self._file, length + _checksum(length) + event + _checksum(event))


def append(file: FileIO, record: bytes) -> None:
    """Write all of a record to an unbuffered file, or, where the system does not take it, nothing."""
    before, written = os.fstat(file.fileno()).st_size, 0
    try:
        while written < len(record):
            written += file.write(record[written:])
    except BaseException:
        if written:
            os.ftruncate(file.fileno(), before)
        raise


def _float(x: float) -> bytes:
    try:
        return struct.pack("<f", x)
    except OverflowError:
        return struct.pack("<f", float("inf") if x > 0 else float("-inf"))


def _field(number: int, how: int, content: bytes) -> bytes:
    length = _varint(len(content)) if how == _BYTES else b""
    return _varint(number << 3 | how) + length + content


def _varint(n: int) -> bytes:
    """Seven bits a byte, the lowest first; the highest bit says that more follow."""
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes([*out, n])


def _checksum(content: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (crc >> 15 | crc << 17) + _MASK & 0xFFFFFFFF)
