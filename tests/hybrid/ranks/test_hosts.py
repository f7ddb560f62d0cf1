"""Hosts connect beside MPI, know each other from strangers, and go without where they cannot."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid.doctor import ranks
from hybrid.ranks import hosts

LEADS = {0: "hosta", 2: "hostb"}


class Comm:
    """Three ranks on threads: the collectives that `connect` uses."""

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.shared, self.barrier = rank, shared, barrier

    def allgather(self, value: Any) -> list[Any]:
        self.shared[self.rank] = value
        self.barrier.wait()
        everyone = list(self.shared)
        self.barrier.wait()
        return everyone

    def bcast(self, value: Any) -> Any:
        return self.allgather(value)[0]


def meet(monkeypatch: pytest.MonkeyPatch, addresses: list[str], seconds: float) -> list[Any]:
    """What `connect` gives to three ranks, of which 0 and 2 lead a host."""
    monkeypatch.setattr(hosts, "_addresses", lambda: addresses)
    monkeypatch.setattr(hosts, "MEETING_SECONDS", seconds)
    names = iter(LEADS.values())
    monkeypatch.setattr(socket, "gethostname", lambda: next(names))
    shared, barrier = [None] * 3, threading.Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        ranks = [
            pool.submit(hosts.connect, Comm(rank, shared, barrier), rank in LEADS, 10)
            for rank in range(3)
        ]
        return [rank.result(timeout=100) for rank in ranks]


def test_the_lead_of_each_host_is_connected_with_rank_0(monkeypatch) -> None:
    zero, one, two = meet(monkeypatch, ["127.0.0.1"], seconds=60)
    assert [list(zero[0]), list(one[0]), list(two[0])] == [[2], [], [0]]
    assert sorted(zero[1]) == [0, 2]
    zero[0][2].sendall(b"?")
    assert two[0][0].recv(1) == b"?"
    for connection in (zero[0][2], two[0][0]):
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
        connection.close()


@pytest.mark.parametrize("addresses", [[], ["127.0.0.2:0"]], ids=["none", "leads nowhere"])
def test_a_host_that_cannot_be_reached_goes_without(addresses, monkeypatch) -> None:
    assert [list(found) for found, _ in meet(monkeypatch, addresses, seconds=0.2)] == [[], [], []]


def test_a_stranger_at_the_address_is_not_taken_for_rank_0(monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        answer = threading.Thread(target=lambda: stranger.accept()[0].sendall(bytes(64)))
        answer.start()
        port = stranger.getsockname()[1]
        assert hosts._reach(["127.0.0.1"], port, bytes(range(32)), 2) == {}
        answer.join(5)


def test_a_stranger_is_not_taken_for_a_lead(monkeypatch) -> None:
    monkeypatch.setattr(hosts, "MEETING_SECONDS", 0.2)
    listener = socket.create_server(("127.0.0.1", 0))
    with socket.create_connection(listener.getsockname()) as stranger:
        stranger.sendall(bytes(20))
        assert hosts._accept(listener, bytes(range(32)), {2}) == {}


def test_strangers_that_keep_knocking_do_not_hold_the_ranks_up(monkeypatch) -> None:
    monkeypatch.setattr(hosts, "MEETING_SECONDS", 0.5)
    listener, over = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def knock() -> None:
        held = []
        while not over.wait(0.05):
            with suppress(OSError):
                held.append(socket.create_connection(address, timeout=1))

    address = listener.getsockname()
    knocking = threading.Thread(target=knock)
    knocking.start()
    assert hosts._accept(listener, bytes(range(32)), {2}) == {}
    over.set()
    knocking.join()


@pytest.mark.parametrize("silence", [1, 127, 128, 500, 86_400])
def test_any_silence_can_be_asked_for(silence: int) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as connection:
        hosts._keep_alive(connection, silence)
        asked = [
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        ]
    assert silence <= asked[0] * asked[1] < silence + asked[0]


def test_one_host_opens_no_socket(monkeypatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a socket")

    monkeypatch.setattr(socket, "socket", refuse)
    alone = SimpleNamespace(rank=0, allgather=lambda name: [name, ""])
    assert hosts.connect(alone, True, 10)[0] == {}


@pytest.mark.parametrize(("timeout", "unwatched"), [(10, []), (10, ["hostb"]), (0, ["hostb"])])
def test_doctor_tells_of_hosts_that_would_fail_unnoticed(timeout, unwatched) -> None:
    found = ranks.hosts(SimpleNamespace(num_hosts=2, timeout=timeout, unwatched=unwatched))
    told = [finding.value for finding in found]
    assert told == ["no connection between rank 0 and hostb"] * bool(timeout and unwatched)
