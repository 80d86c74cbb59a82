"""The headers of all ranks, over TCP connections to rank 0.

Every exchange waits for the headers, and no other activity hides this wait. Gloo hands a header from thread to thread.
Here the waiting thread makes two system calls (on two processors 26 µs a header; with gloo's all-to-all 390 µs).
"""

import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np

from offload_core.ranks.headers import HEADER_BYTES

_ALIKE, _DIFFERENT, _FAILED = b"=", b"!", b"x"
_TOKEN_BYTES = 16
_RANK_BYTES = 4
_STRANGERS = 100
"""The number of connections from strangers, such as port scanners, that may come before the ranks' connections."""
_CONNECT_SECONDS = 3.0
"""The time for a connection to each of rank 0's addresses, and for rank 0 to tell the ranks from strangers."""
_LOOPBACK = "127.0.0.1"
_LATER = 0.5
"""Seconds that the others wait longer than rank 0, which can name the missing rank. A rank that has failed waits longer
than this for the other ranks' errors."""


class HeaderLine:
    """Exchanges headers, until :meth:`close` or an error.

    Making it is collective. Ranks that cannot reach rank 0 make it unusable on all: see :attr:`usable`.

    Args:
        store: a store that only these ranks use.
        timeout: the time that ranks wait for each other.

    Raises:
        RuntimeError: ranks did not come in time. The store raises it.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        self._rank, self._world_size, self._process = rank, world_size, os.getpid()
        self._seconds = timeout.total_seconds()
        self._peers: list[socket.socket] = []
        """On rank 0 the connections to ranks 1, 2, …; on another rank its connection to rank 0."""
        self.usable = world_size == 1
        """False if messages must go another way; the same on all ranks."""
        self.awaited: int | None = None
        """The rank whose answer :meth:`exchange` waits for; None: it has ended. Rank 0 takes the others' in turn."""
        with ExitStack() as undo:
            undo.callback(self.close)
            if world_size > 1:
                self._machine = _machine()
                store.set(_machine_of(rank), self._machine)
                self.usable = self._listen(store, timeout) if rank == 0 else self._connect(store, timeout)
            if self.usable:
                undo.pop_all()

    def _listen(self, store: Any, timeout: timedelta) -> bool:
        token = secrets.token_bytes(_TOKEN_BYTES)
        others = [str(rank) for rank in range(1, self._world_size)]
        machines = [_machine_of(rank) for rank in range(self._world_size)]
        store.wait(machines, timeout)
        local = len({*map(store.get, machines)}) == 1
        with ExitStack() as opened:
            server = None
            with suppress(OSError):
                server = opened.enter_context(_server(_STRANGERS + self._world_size, local=local))
            place = {"port": server and server.getsockname()[1], "machine": self._machine}
            addresses = [_LOOPBACK] if local else _addresses()
            store.set("place", json.dumps({**place, "addresses": addresses, "token": token.hex()}))
            store.wait(others, timeout)
            found: dict[int, socket.socket] = {}
            if server is not None and all(store.get(rank) == b"reached" for rank in others):
                found = self._admitted(server, token)
            usable = sorted(found) == list(range(1, self._world_size))
            store.set("all", "reached" if usable else "not reached")
        for stranger in {*self._peers} - {*found.values()}:
            stranger.close()
        self._peers = [found[rank] for rank in sorted(found)]
        for peer in self._peers:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.settimeout(self._seconds)
        return usable

    def _admitted(self, server: socket.socket, token: bytes) -> dict[int, socket.socket]:
        """The connections that say the token, by rank.

        Ranks have said it by now. Strangers may say nothing, or one byte at a time: all are listened to at once, under
        one time limit.
        """
        found: dict[int, socket.socket] = {}
        deadline, n_bytes = time.monotonic() + min(self._seconds, _CONNECT_SECONDS), _TOKEN_BYTES + _RANK_BYTES
        server.setblocking(False)  # a stranger may have gone before accept()
        with selectors.DefaultSelector() as ready:
            ready.register(server, selectors.EVENT_READ)
            while len(found) < self._world_size - 1 and (left := deadline - time.monotonic()) > 0:
                for key, _ in ready.select(left):
                    with suppress(OSError):
                        if key.fileobj is server:
                            self._peers.append(server.accept()[0])
                            ready.register(self._peers[-1], selectors.EVENT_READ, bytearray())
                            continue
                        peer, said = cast(socket.socket, key.fileobj), key.data
                        said += peer.recv(n_bytes - len(said)) or bytes(n_bytes)  # nothing: it was closed
                        if len(said) >= n_bytes:
                            ready.unregister(peer)
                            if secrets.compare_digest(bytes(said[:_TOKEN_BYTES]), token):
                                found[int.from_bytes(said[_TOKEN_BYTES:], "little")] = peer
        return found

    def _connect(self, store: Any, timeout: timedelta) -> bool:
        store.wait(["place"], timeout)
        place = json.loads(store.get("place"))
        addresses = place["addresses"]
        if place["machine"] == self._machine and addresses != [_LOOPBACK]:
            addresses = ["localhost"]
        for address in addresses if place["port"] else ():
            try:
                peer = socket.create_connection((address, place["port"]), min(self._seconds, _CONNECT_SECONDS))
                self._peers.append(peer)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                peer.sendall(bytes.fromhex(place["token"]) + self._rank.to_bytes(_RANK_BYTES, "little"))
                break
            except OSError:
                self.close()  # and try the next address
        store.set(str(self._rank), "reached" if self._peers else "not reached")
        store.wait(["all"], timeout)
        return bool(store.get("all") == b"reached")

    def exchange(self, mine: np.ndarray) -> np.ndarray | None:
        """Give this rank's header to the others. Return all ranks' if they differ; None if they are alike.

        Args:
            mine: uint8[HEADER_BYTES].

        Returns:
            uint8[ranks, HEADER_BYTES].

        Raises:
            OSError: a rank was lost or did not come in time; on all ranks. This process is a fork of the rank's.
        """
        if os.getpid() != self._process:
            raise ConnectionError("this process was forked from that of the rank, whose connections are not its own")
        rows = self._collect(mine) if self._rank == 0 else self._ask(mine)
        self.awaited = None
        return rows

    def _collect(self, mine: np.ndarray) -> np.ndarray | None:
        rows = np.zeros((self._world_size, HEADER_BYTES), np.uint8)
        rows[0] = mine
        deadline = time.monotonic() + self._seconds
        for rank, peer in enumerate(self._peers, 1):
            self.awaited = rank
            try:
                _receive(peer, rows[rank].data, deadline)
            except OSError as error:
                failure = type(error)(f"rank {rank} {_what_happened(error, self._seconds)}")
                told = str(failure).encode()[:HEADER_BYTES].ljust(HEADER_BYTES)
                for other in self._peers:
                    with suppress(OSError):
                        other.sendall(_FAILED + told)
                raise failure from error
        alike = bool((rows == mine).all())
        answer = _ALIKE if alike else _DIFFERENT + rows.tobytes()
        for rank, peer in enumerate(self._peers, 1):
            try:
                peer.sendall(answer)
            except OSError as error:
                raise type(error)(f"rank {rank} {_what_happened(error, self._seconds)}") from error
        return None if alike else rows

    def _ask(self, mine: np.ndarray) -> np.ndarray | None:
        [peer], self.awaited = self._peers, 0
        deadline = time.monotonic() + self._seconds + _LATER
        kind = bytearray(1)
        try:
            peer.settimeout(self._seconds)
            peer.sendall(mine.data)
            _receive(peer, kind, deadline)
            if kind == _ALIKE:
                return None
            rows = np.empty((self._world_size if kind == _DIFFERENT else 1, HEADER_BYTES), np.uint8)
            _receive(peer, rows.reshape(-1).data, deadline)
        except OSError as error:
            raise type(error)(f"rank 0 {_what_happened(error, self._seconds)}") from error
        if kind == _DIFFERENT:
            return rows
        raise ConnectionError(rows.tobytes().decode(errors="replace").strip())

    def lost(self) -> list[int]:
        """Return the ranks that have closed their connection, as far as this rank can tell: rank 0 has one to each
        other rank, and the others have one to it. Never waits."""
        found = []
        for rank, peer in enumerate(self._peers, 0 if self._rank else 1):
            try:
                peer.setblocking(False)
                ended = not peer.recv(1, socket.MSG_PEEK)
            except BlockingIOError:  # nothing was said
                ended = False
            except OSError:
                ended = True
            found += [rank] * ended
        return found

    def close(self) -> None:
        """End the connections, also where a forked process holds them, too; other ranks that wait get an error.

        A forked process only lets go of its copies, at its exit or before.
        """
        while self._peers:
            if os.getpid() == self._process:
                with suppress(OSError):
                    self._peers[-1].shutdown(socket.SHUT_RDWR)
            self._peers.pop().close()


def _server(backlog: int, *, local: bool) -> socket.socket:
    """A listener on all interfaces, or for ranks of this machine alone (``local``) on the loopback interface."""
    if local:
        return socket.create_server((_LOOPBACK, 0), backlog=backlog)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def _receive(peer: socket.socket, into: Any, deadline: float) -> None:
    """Fill the buffer."""
    left = memoryview(into)
    while left:
        peer.settimeout(max(deadline - time.monotonic(), 1e-3))
        n_bytes = peer.recv_into(left)
        if n_bytes == 0:
            raise ConnectionResetError("closed")
        left = left[n_bytes:]


def _what_happened(error: OSError, seconds: float) -> str:
    return f"did not come in {seconds:g} s" if isinstance(error, TimeoutError) else "has closed its connection"


def _machine_of(rank: int) -> str:
    """The store's key for :func:`_machine` of a rank."""
    return f"machine of {rank}"


def _machine() -> str:
    """Return text that is equal in processes for which ``localhost`` is the same."""
    said = [socket.gethostname()]
    with suppress(OSError):
        said.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        said.append(str(Path("/proc/self/ns/net").stat().st_ino))
    return " ".join(said)


def _addresses() -> list[str]:
    """Return the addresses at which other machines may reach this one, the likeliest first."""
    return [*dict.fromkeys(_candidates())]


def _candidates() -> Iterator[str]:
    import psutil  # not where one process trains

    families = (socket.AF_INET, socket.AF_INET6)
    of_interfaces = {
        name: [entry.address for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }
    for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):  # as gloo is told
        yield from of_interfaces.get(name, [])
    with suppress(OSError):
        yield from (str(info[4][0]) for info in socket.getaddrinfo(os.environ.get("MASTER_ADDR", ""), None))
    for name, entries in of_interfaces.items():
        if name != "lo":
            yield from entries
