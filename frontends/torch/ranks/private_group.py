"""A gloo group that belongs to one owner, beside the process group of the program."""

import os
import resource
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from datetime import timedelta
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from offload_core.errors import CollectiveError, ConfigError
from offload_core.ranks.exchanges import Exchanges
from offload_core.ranks.headers import HEADER_BYTES, Header, check_alike
from offload_core.support.last_words import say_lost

from .header_line import HeaderLine

_PATIENCE = 1.0
"""Seconds to wait for the group's thread to release a buffer, and for the other ranks' errors."""
_SPARE_DESCRIPTORS = 16
"""File descriptors that a group takes, at most, besides two for each rank."""
_MAKING = "making a group of the engine's ranks"
_NUMBERS: "weakref.WeakKeyDictionary[Any, count[int]]" = weakref.WeakKeyDictionary()
"""Numbers the groups that were made over each process group; ranks make them in one order."""


class PrivateGroup:
    """A separate gloo group of the ranks of a process group. All ranks compare headers before each exchange.

    The program may use ``group`` at the same time. The group is not one of ``torch.distributed``'s, so that an update
    that is running ends as it should when the program destroys those. It ends with :meth:`close`, or with its owner.

    Making it is collective. After an error nothing more is exchanged: ranks may have different parts of what was sent.

    Raises:
        ConfigError: this process is not one of the ranks.
        CollectiveError: ranks did not come in the group's time, or the process has too few file descriptors left.
    """

    def __init__(self, group: Any) -> None:
        group = group or dist.group.WORLD
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ConfigError(
                "process_group: this process is not one of its ranks; expected wrap() on its members only, or a group "
                "that this process belongs to"
            )
        self.world_size = dist.get_world_size(group)
        self._of = weakref.ref(group)  # a reference kept after destroy_process_group() can abort the exit
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._exchanges = Exchanges()
        timeout, store = timeout_of(group), group.get_group_store()
        self._failures = dist.PrefixStore("offload-core/failures/", store)
        with suppress(RuntimeError):
            self._failures.delete_key(str(self.rank))  # of an engine before
        number = next(_NUMBERS.setdefault(group, count()))
        store = dist.PrefixStore(f"offload-core/{number}/", store)
        self._check_descriptors()
        self._meet(store, timeout)
        try:
            with ExitStack() as undo:
                self._line = HeaderLine(dist.PrefixStore("headers/", store), self.rank, self.world_size, timeout)
                undo.callback(self._line.close)
                store = dist.PrefixStore("gloo/", store)
                gloo = dist.ProcessGroupGloo(store, self.rank, self.world_size, timeout=timeout)
                undo.pop_all()
        except RuntimeError as error:
            raise CollectiveError.of(self.rank, _MAKING, error) from error
        self._gloo: list[Any] = [gloo]
        # At exit, too: the group's threads need the interpreter to free tensors.
        self._end = weakref.finalize(self, _end, self._gloo, self._line)
        self._header = torch.zeros(self.world_size * HEADER_BYTES, dtype=torch.uint8, device="cpu")
        self._headers = torch.zeros_like(self._header)

    def _check_descriptors(self) -> None:
        """Refuse a group for which file descriptors would not suffice: gloo aborts the process then."""
        limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], 2 * self.world_size + _SPARE_DESCRIPTORS
        used = next((len(os.listdir(place)) for place in ("/proc/self/fd", "/dev/fd") if os.path.isdir(place)), 0)
        if limit != resource.RLIM_INFINITY and used + needed > limit:
            raise CollectiveError(
                f"rank {self.rank}: an engine of {self.world_size} ranks takes up to {needed} file descriptors, and "
                f"{max(limit - used, 0)} of this process's {limit} are left; expected enough: close() engines that are "
                "no longer used, or raise the limit (ulimit -n)"
            )

    def _meet(self, store: Any, timeout: timedelta) -> None:
        """Wait for all ranks. Gloo alone would try five times to reach a rank that came and went."""
        others = [str(rank) for rank in range(self.world_size) if rank != self.rank]
        missing: list[str] = []
        try:
            store.set(str(self.rank), "here")
            store.wait(others, timeout)
            gone = [rank for rank in others if store.get(rank) == b"gone"]
        except RuntimeError as error:
            with suppress(RuntimeError):
                store.set(str(self.rank), "gone")
                missing = [rank for rank in others if not store.check([rank])]
            said = f"missing: rank {', '.join(missing)}" if missing else ""
            raise CollectiveError.of(self.rank, _MAKING, error, said) from error
        if gone:
            raise CollectiveError.of(self.rank, _MAKING, TimeoutError(f"rank {', '.join(gone)} has given up waiting"))

    @property
    def is_gone(self) -> bool:
        """True if the program has destroyed the process group."""
        group = self._of()
        try:
            return group is None or not dist.get_process_group_ranks(group)
        except (KeyError, ValueError, RuntimeError):
            return True

    def refuse_if_gone(self, what: str) -> None:
        """Raise :class:`CollectiveError` if the program has destroyed the process group."""
        if self.is_gone:
            raise CollectiveError(
                f"rank {self.rank}: {what}: the process group of this engine was destroyed, and the engine ends with "
                "it; expected destroy_process_group() after the last step: wrap the model anew in a new group. Its "
                "parameters are those of the last step"
            )

    def compare_headers(self, what: str, n_bytes: int) -> None:
        """Compare the headers of all ranks.

        Raises:
            CollectiveError: they differ, or a rank was lost; on all ranks.
        """
        with self._lock:
            self._guarded(what, lambda: self._compare_headers(Header(what, n_bytes)))

    def run(self, what: str, start: Callable[..., Iterable[Any]], *arrays: np.ndarray) -> None:
        """Exchange, after a comparison of all ranks' headers.

        Args:
            what: names the data, alike on all ranks.
            start: given the group (torch's ``Backend``) and the bytes of each array as a tensor, starts the exchange.
            arrays: C-contiguous; the first, which receives, is as large as all ranks' data.

        Raises:
            CollectiveError: ranks are about to exchange different things, or a rank was lost; on all ranks.
        """
        readers: list[weakref.ref[np.ndarray]] = []

        def transfer() -> None:
            self._compare_headers(Header(what, arrays[0].nbytes))
            # Made here: where the compiler evaluates frames, a caller keeps its arguments until the call returns.
            views = [array.reshape(-1).view(np.uint8) for array in arrays]
            readers.extend(map(weakref.ref, views))
            for handle in start(self._gloo[0], *map(torch.from_numpy, views)):
                handle.wait()

        with self._lock:
            self._guarded(what, transfer)
            # The group's thread releases the tensors after the wait. If it were the last owner, it would need the
            # interpreter to free NumPy's memory, and would abort a process that is exiting by then.
            deadline = time.monotonic() + _PATIENCE
            while any(reader() is not None for reader in readers) and time.monotonic() < deadline:
                time.sleep(0)

    def _compare_headers(self, header: Header) -> None:
        mine = self._header.numpy().reshape(self.world_size, HEADER_BYTES)
        header.write(mine[0])
        if self._line.usable:
            rows = self._line.exchange(mine[0])
            if rows is not None:
                check_alike(rows)
            return
        mine[1:] = mine[0]
        self._gloo[0].alltoall_base(self._headers, self._header, [], []).wait()
        check_alike(self._headers.numpy().reshape(self.world_size, HEADER_BYTES))

    def _guarded(self, what: str, act: Callable[[], None]) -> None:
        """Call ``act``, unless an exchange has failed before. If it fails, no later exchange begins."""
        if self._failure is not None:
            raise CollectiveError(self._failure)
        if not self._gloo:
            raise CollectiveError(f"rank {self.rank}: {what}: this engine was closed; expected an open one")
        try:
            with self._exchanges.over(what):
                act()
        except CollectiveError as error:
            self._failure = str(error)
            raise
        except Exception as error:
            if lost := self._line.lost():
                say_lost(f"rank {', '.join(map(str, lost))} was lost, or has ended: {what} failed")
            self._line.close()
            failure = CollectiveError.of(self.rank, what, error, self._failed_elsewhere(what))
            self._failure = str(failure)
            raise failure from error
        except BaseException as error:  # an interrupt: other ranks may have more than this one
            self._line.close()
            self._failure = str(CollectiveError.of(self.rank, what, error))
            raise

    def _failed_elsewhere(self, what: str) -> str:
        """Tell the other ranks the exchange that failed here, and return their failures: they may wait in another
        group."""
        said: list[str] = []

        def ask() -> None:
            deadline = time.monotonic() + _PATIENCE
            with suppress(Exception):
                if not self._failures.check([str(self.rank)]):  # the first failure is the cause of others
                    self._failures.set(str(self.rank), what)
                for rank in range(self.world_size):
                    left = timedelta(seconds=max(deadline - time.monotonic(), 0.01))
                    with suppress(Exception):
                        if rank != self.rank:
                            self._failures.wait([str(rank)], left)
                            said.append(f"rank {rank} failed in {self._failures.get(str(rank)).decode()}")

        # In a thread that may outlive this call: without a network the store never answers, with any timeout.
        asking = threading.Thread(target=ask, name="offload-failures", daemon=True)
        with suppress(RuntimeError):  # at the interpreter's end no thread can be started
            asking.start()
            asking.join(2 * _PATIENCE)
        return ", ".join(said)

    def where(self) -> str:
        """As :meth:`Collectives.where`. Rank 0 knows the rank that has not come."""
        awaited = f"rank {self._line.awaited}" + " and all other ranks" * (self.rank > 0)
        if self._line.awaited is None:
            awaited = "data: all ranks have come" if self._line.usable else "the other ranks"
        return self._exchanges.where(awaited)

    def close(self) -> None:
        """Free the connections and threads. No exchange follows."""
        with self._lock:
            self._end()


def _end(gloo: list[Any], line: HeaderLine) -> None:
    gloo.clear()
    line.close()


def timeout_of(group: Any) -> timedelta:
    """The time that a group's ranks wait for each other; gloo's own if its backend does not tell."""
    for device in (torch.device("cpu"), torch.accelerator.current_accelerator()):
        with suppress(AttributeError, RuntimeError):
            return group._get_backend(device).options._timeout
    return dist.constants.default_pg_timeout
