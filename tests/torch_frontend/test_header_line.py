"""Headers over TCP: all ranks see that they are alike, or all headers, or who was lost; nobody else takes part."""

import itertools
import json
import os
import socket
import threading
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist

from frontends.torch.ranks import header_line
from frontends.torch.ranks.header_line import HeaderLine
from offload_core.ranks.headers import HEADER_BYTES, Header
from tests.support.processes import on_ranks


def on_threads(world_size, act, make=HeaderLine):
    """Return the result of ``act(rank, line)``, or its error, on each rank."""
    store, results = dist.HashStore(), [None] * world_size

    def run(rank):
        line = make(store, rank, world_size, timedelta(seconds=60))
        try:
            results[rank] = act(rank, line)
        except OSError as error:
            results[rank] = str(error)
        finally:
            line.close()

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
        assert not rank.is_alive()
    return results


def header(what):
    row = np.empty(HEADER_BYTES, np.uint8)
    Header(what, 12).write(row)
    return row


@pytest.mark.parametrize("world_size", [2, 3, 9])
def test_ranks_at_the_same_exchange_go_on_and_others_all_see_where_each_is(world_size):
    def act(rank, line):
        assert line.usable
        for number in range(3):
            assert line.exchange(header(f"bucket {number}")) is None
        rows = line.exchange(header(f"bucket {3 + (rank == 1)}"))
        return [Header.read(row).what for row in rows]

    assert on_threads(world_size, act) == [["bucket 3", "bucket 4", *["bucket 3"] * (world_size - 2)]] * world_size


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_rank_that_does_not_come_is_named_on_the_others(missing):
    said_so = threading.Barrier(3)

    def act(rank, line):
        try:
            if rank != missing:
                if 0 in (rank, missing):  # else rank 0 says so
                    line._seconds = 0.2
                line.exchange(header("bucket 0"))
        finally:
            said_so.wait(60)

    said = on_threads(3, act)
    assert said.pop(missing) is None
    assert said == [f"rank {missing} did not come in 0.2 s"] * 2


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_rank_that_is_lost_is_named_on_the_others(lost):
    def act(rank, line):
        assert line.exchange(header("bucket 0")) is None
        if rank != lost:
            line.exchange(header("bucket 1"))

    said = on_threads(3, act)
    assert said.pop(lost) is None
    assert said == [f"rank {lost} has closed its connection"] * 2


def test_where_a_rank_cannot_reach_rank_0_no_rank_uses_the_line(monkeypatch):
    connect, number = socket.create_connection, itertools.count()

    def refused(*arguments):
        if next(number) == 1:
            raise ConnectionRefusedError
        return connect(*arguments)

    monkeypatch.setattr(socket, "create_connection", refused)
    assert on_threads(4, lambda rank, line: (line.usable, len(line._peers))) == [(False, 0)] * 4


def test_an_address_that_breaks_off_is_followed_by_the_next(monkeypatch):
    number = itertools.count()
    monkeypatch.setattr(header_line, "_machine", lambda: str(next(number)))
    monkeypatch.setattr(header_line, "_addresses", lambda: ["broken", "127.0.0.1"])
    connect = socket.create_connection

    class Broken(socket.socket):
        def sendall(self, data):
            raise ConnectionResetError

    def connected(place, timeout):
        return Broken() if place[0] == "broken" else connect(place, timeout)

    monkeypatch.setattr(socket, "create_connection", connected)
    assert on_threads(3, lambda rank, line: line.exchange(header("bucket 0"))) == [None] * 3


@pytest.mark.parametrize("forks", [0, 1])
def test_a_forked_process_neither_uses_the_ranks_connections_nor_ends_them(forks):
    """As a program's own child does at its exit. In a process of its own: this one has threads of earlier tests, and a
    child that a thread forks may not survive them."""

    @on_ranks(1)
    def _(_):
        def act(rank, line):
            assert line.exchange(header("bucket 0")) is None
            if rank == forks:
                child = os.fork()
                if child == 0:
                    refused = 1
                    try:
                        line.exchange(header("bucket 7"))
                    except ConnectionError:
                        refused = 0
                    line.close()
                    os._exit(refused)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            return line.exchange(header("bucket 1"))

        assert on_threads(2, act) == [None, None]


def test_where_no_port_can_be_opened_no_rank_uses_the_line(monkeypatch):
    def refused(backlog, *, local):
        raise PermissionError

    monkeypatch.setattr(header_line, "_server", refused)
    assert on_threads(3, lambda rank, line: line.usable) == [False] * 3


def assert_ranks_meet_beside(strangers_at, *, time=1):
    """The strangers connect as soon as rank 0 has said where; the ranks have this part of their time."""
    strangers = []

    class Store(dist.PrefixStore):
        def set(self, key, value):
            if key == "place":
                strangers.extend(strangers_at(json.loads(value)))
            super().set(key, value)

    def make(store, rank, world_size, timeout):
        return HeaderLine(Store("x", store), rank, world_size, timeout * time)

    assert on_threads(3, lambda rank, line: line.exchange(header("bucket 0")), make) == [None] * 3
    for stranger in strangers:
        stranger.close()


def stranger_at(place, said):
    stranger = socket.create_connection(("127.0.0.1", place["port"]))
    stranger.sendall(said)
    return stranger


def test_a_stranger_that_connects_is_not_taken_for_a_rank():
    def strangers_at(place):
        stranger_at(place, b"").close()
        for said in (b"GET / HTTP/1.1\r\n\r\n", bytes(16) + (1).to_bytes(4, "little")):
            yield stranger_at(place, said)

    assert_ranks_meet_beside(strangers_at)


def test_a_crowd_of_strangers_that_say_nothing_or_little_holds_nobody_up():
    """Each took a tenth of the time limit before."""

    def strangers_at(place):
        return [stranger_at(place, bytes.fromhex(place["token"])[: i % 3]) for i in range(40)]

    assert_ranks_meet_beside(strangers_at, time=1 / 6)


@pytest.mark.parametrize("machines", ["ab", "aa", "aab"])
def test_only_ranks_of_other_machines_have_rank_0_listen_on_all_interfaces(machines, monkeypatch):
    made, server, name = [], header_line._server, iter(machines)
    monkeypatch.setattr(header_line, "_machine", lambda: next(name))
    monkeypatch.setattr(header_line, "_addresses", lambda: ["127.0.0.1"])
    monkeypatch.setattr(header_line, "_server", lambda *args, **kw: made.append(server(*args, **kw)) or made[-1].dup())
    assert on_threads(len(machines), lambda rank, line: line.exchange(header("bucket 0"))) == [None] * len(machines)
    [listener] = made
    assert (listener.getsockname()[0] == "127.0.0.1") == (len({*machines}) == 1)
    listener.close()


def test_ranks_of_other_machines_reach_an_address_of_an_interface(monkeypatch):
    number = itertools.count()
    monkeypatch.setattr(header_line, "_machine", lambda: str(next(number)))
    monkeypatch.setattr(header_line, "_addresses", lambda: ["256.0.0.1", "127.0.0.1"])
    assert on_threads(2, lambda rank, line: line.exchange(header("bucket 0"))) == [None] * 2


def test_the_interface_that_gloo_is_told_comes_first(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert header_line._addresses()[0] in ("127.0.0.1", "::1")
