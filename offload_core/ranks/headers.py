"""Headers: before the data of an exchange, each rank tells the others which exchange it is about to make.

Without headers, ranks that went different ways (one skipped a module, or repeated a backward) would pair data of equal
size silently, and a backend that gets more bytes than it expects may end the process. All ranks see all headers before
any data moves. So all of them raise the same error, and it names the exchange at which each rank was.

[Note: a header] ``HEADER_BYTES`` bytes for each rank. The layout never changes, so that ranks of any version can read
it:

======= ==============================================================
bytes   content
======= ==============================================================
0..7    the bytes of the exchange, a little-endian integer
8..15   fingerprint of the whole text
16..    the text: the exchange's name, in UTF-8, cut, padded with zeros
======= ==============================================================
"""

import hashlib
from typing import NamedTuple

import numpy as np

from ..errors import CollectiveError

HEADER_BYTES = 256
_TEXT = 16
"""The place where the text begins."""


class Header(NamedTuple):
    """The name and size of a rank's next exchange. Two exchanges belong together only if their headers are equal."""

    what: str
    """The exchange's name: the bucket or the parameter, and the action on it."""
    n_bytes: int
    """Bytes of the whole exchange."""

    def write(self, out: np.ndarray) -> None:
        """Fill ``out``, uint8[HEADER_BYTES] ([Note: a header])."""
        text = self.what.encode()
        cut = text[: HEADER_BYTES - _TEXT]
        head = self.n_bytes.to_bytes(8, "little") + hashlib.sha256(text).digest()[:8]
        out[:] = 0
        out[: _TEXT + len(cut)] = np.frombuffer(head + cut, np.uint8)

    @classmethod
    def read(cls, row: np.ndarray) -> "Header":
        """The header that one rank sent; a long text is cut."""
        data = row.tobytes()
        return cls(data[_TEXT:].rstrip(b"\0").decode(errors="replace"), int.from_bytes(data[:8], "little"))

    def __str__(self) -> str:
        return f"{self.what} ({self.n_bytes:,} bytes)"


def check_alike(rows: np.ndarray) -> None:
    """Raise :class:`CollectiveError` unless all ranks sent the same header. All ranks raise the same error.

    Args:
        rows: uint8[ranks, HEADER_BYTES]: the header of each rank.
    """
    if (rows == rows[0]).all():
        return
    ranks_of: dict[bytes, list[int]] = {}
    for rank, row in enumerate(rows):
        ranks_of.setdefault(row.tobytes(), []).append(rank)
    places = [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} at {Header.read(rows[ranks[0]])}"
        for ranks in ranks_of.values()
    ]
    raise CollectiveError(
        f"ranks went different ways: {'; '.join(places)}; expected the same on every rank: equally many backwards and "
        "steps, in stage 3 the same modules in the same order: end this run and resume from the last checkpoint"
    )
