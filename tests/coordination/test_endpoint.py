"""How ranks connect: bounded, by name, whoever dies, refuses, is late or is somebody else. Ranks are threads here."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.support.socket_ranks import HANG_SECONDS, on_threads
from torchdistinput.coordination import addresses, connections, endpoint
from torchdistinput.coordination.addresses import Address, own_addresses
from torchdistinput.coordination.connections import AbortMessage, Connections, Departed
from torchdistinput.coordination.dial import Dial
from torchdistinput.coordination.endpoint import CONTROL, Endpoint, Late
from torchdistinput.coordination.exchanges import StartedExchange, conclude
from torchdistinput.coordination.recursive_doubling import partners, sum_up
from torchdistinput.errors import InputError

Made = Callable[[int], list[Endpoint]]


def silent(missing: list[int], waited: float) -> None:
    """Nobody needs to be told."""


@pytest.fixture
def made() -> Iterator[Made]:
    """Makes ranks that know where their partners are; closes them in the end."""
    all_made: list[Endpoint] = []

    def make(num_ranks: int) -> list[Endpoint]:
        ranks = [Endpoint(rank, range(10, 10 + num_ranks), "", "", 60.0) for rank in range(num_ranks)]
        for rank, each in enumerate(ranks):
            each.meet(
                {peer: Address.of(json.loads(ranks[peer].address.to_text())) for peer in partners(rank, num_ranks)}
            )
        all_made.extend(ranks)
        return ranks

    yield make
    for each in all_made:
        each.close()


def opened(rank: Endpoint, number: int, seconds: float = HANG_SECONDS) -> Connections | str:
    try:
        return rank.open(number, seconds, silent)
    except Late as late:
        return f"late: {late.ranks}"
    except Departed as departed:
        return str(departed)


def summed(found: Connections) -> int:
    (total,) = conclude(sum_up(found, [found.rank + 1]))
    return total


@pytest.mark.parametrize(("rank", "late"), [(0, [1, 2]), (3, [2, 1])], ids=["is dialled", "dials"])
def test_a_rank_that_does_not_come_is_late(rank: int, late: list[int], made: Made) -> None:
    ranks = made(4)
    asked: list[list[int]] = []
    with pytest.raises(Late) as caught:
        ranks[rank].open(0, 1.2, lambda missing, _: asked.append(missing))
    assert caught.value.ranks == late
    assert asked[0] == late


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_whose_port_is_closed_has_ended(dead: int, made: Made) -> None:
    ranks = made(2)
    ranks[dead].close()
    assert str(opened(ranks[1 - dead], 0)).startswith(f"rank {dead} {AbortMessage.DIED} (it refuses connections at ")


@pytest.mark.parametrize("refusing", range(5))
@pytest.mark.parametrize("when", ["before", "after"])
def test_all_hear_of_a_rank_that_refuses(refusing: int, when: str, made: Made) -> None:
    """Those that it does not exchange messages with hear of it in their first exchange."""

    def takes_part(rank: int) -> str:
        if rank == refusing:
            time.sleep(0.3 if when == "after" else 0.0)
            ranks[rank].refuse(3, AbortMessage(rank, "could not open a file"))
            return "refused"
        time.sleep(0.3 if when == "before" else 0.0)
        found = opened(ranks[rank], 3)
        if isinstance(found, str):
            return found
        try:
            return str(summed(found))
        except Departed as departed:
            found.send_abort(departed.message)
            return str(departed)
        finally:
            found.close()

    ranks = made(5)
    for rank, told in enumerate(on_threads([partial(takes_part, rank) for rank in range(5)])):
        assert told == ("refused" if rank == refusing else f"rank {refusing} could not open a file"), (rank, told)


def test_an_interruption_while_it_waits_is_told_to_the_others(made: Made) -> None:
    def interrupted(missing: list[int], waited: float) -> None:
        raise KeyboardInterrupt

    ranks = made(4)
    with pytest.raises(KeyboardInterrupt):
        ranks[0].open(0, HANG_SECONDS, interrupted)
    for told in on_threads([partial(opened, ranks[rank], 0) for rank in (1, 2)]):  # rank 3 is not there yet
        assert told == "rank 0 was interrupted by KeyboardInterrupt"


def test_strangers_are_turned_away(made: Made) -> None:
    """Whoever looks whether the port is open, speaks otherwise, has another secret, or comes for an older channel."""
    ranks = made(2)
    secret, shake = ranks[0].address.secret, endpoint._HANDSHAKE.pack
    said = [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: x\r\n\r\n",
        shake(os.urandom(16), 2, 1, 0),
        shake(secret, 2, 7, 0),  # no partner of this rank
        shake(secret, 1, 1, 0),
        *(shake(secret, 2, 1, length) for length in (-1, 1 << 17, 1 << 62)),  # of an abort message
    ]
    strangers = [socket.create_connection(("127.0.0.1", ranks[0].address.port)) for _ in ["", *said]]
    strangers.pop().close()
    for stranger, words in zip(strangers, said, strict=True):
        stranger.sendall(words)
    found = on_threads([partial(opened, rank, 2) for rank in ranks])
    assert on_threads([partial(summed, each) for each in found]) == [3, 3]
    for stranger in strangers:
        stranger.settimeout(HANG_SECONDS)
        with pytest.raises((ConnectionError, AssertionError)):
            assert stranger.recv(1)
        stranger.close()
    for each in found:
        each.close()


def test_a_guess_of_the_secret_tells_nothing_about_its_bytes(made: Made) -> None:
    """Else 256 connections find the first byte, and 256 more the next one."""
    rank = made(2)[0]
    right = endpoint._HANDSHAKE.pack(rank.address.secret, 0, 1, 0)
    guesses = {known: right[:known] + bytes([right[known] ^ 1]) for known in (0, 1, 8, 15)}
    strangers = {known: socket.create_connection(("127.0.0.1", rank.address.port)) for known in guesses}
    for known, guess in guesses.items():
        strangers[known].sendall(guess)
    rank._accept_all()
    assert len(rank._arriving) == len(guesses)
    for known, guess in guesses.items():
        strangers[known].sendall(right[len(guess) :])
        strangers[known].settimeout(HANG_SECONDS)
        rank._accept_all()
        assert strangers[known].recv(1) == b"", known
        strangers[known].close()


def test_a_rank_that_stands_still_before_its_handshake_connects_when_it_goes_on(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may be stopped at any line, also between its connection and the first bytes of it."""
    ranks = made(2)
    real = Dial.go_on
    until = time.monotonic() + 2.5

    def slowly(dial: Dial) -> socket.socket | None:
        found = real(dial)
        if dial.is_connected:
            threading.Event().wait(until - time.monotonic())
        return found

    monkeypatch.setattr(Dial, "go_on", slowly)
    found = on_threads([partial(opened, rank, 0) for rank in ranks])
    assert on_threads([partial(summed, each) for each in found]) == [3, 3]
    for each in found:
        each.close()


def test_strangers_that_say_nothing_are_kept_to_a_bounded_number(made: Made) -> None:
    ranks = made(2)
    place = ("127.0.0.1", ranks[0].address.port)
    strangers = []
    for _ in range(150):
        strangers.append(socket.create_connection(place))
        ranks[0]._accept_all()
    assert len(ranks[0]._arriving) == 128
    strangers[0].settimeout(HANG_SECONDS)
    assert strangers[0].recv(1) == b""
    for stranger in strangers:
        stranger.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8")
def test_another_program_at_an_address_of_a_rank_does_not_take_its_place() -> None:
    """Each host may have a 172.17.0.1 of its own. What listens there says nothing, or something."""
    ranks = [Endpoint(rank, range(2), "lo", "", 60.0) for rank in range(2)]
    addresses = ("127.0.0.2", "127.0.0.3", "127.0.0.1")
    ranks[0].meet({1: ranks[1].address})
    ranks[1].meet({0: ranks[0].address._replace(host="elsewhere", addresses=addresses)})
    port = ranks[0].address.port
    with socket.create_server(("127.0.0.2", port)), socket.create_server(("127.0.0.3", port)) as other:
        answered = threading.Event()

        def answer() -> None:
            with other.accept()[0] as taken:
                taken.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                answered.set()
                taken.recv(1 << 10)

        def opened_late() -> Connections | str:
            answered.wait(HANG_SECONDS)
            return opened(ranks[0], 0)

        _, *found = on_threads([answer, opened_late, partial(opened, ranks[1], 0)])
    assert on_threads([partial(summed, each) for each in found]) == [3, 3]
    for each in (*found, *ranks):
        each.close()


def exchanged(rank: Endpoint, found: Connections, cuts: Sequence[int]) -> list[int]:
    """The sums of some exchanges, before which this rank cuts its first connection so many times."""
    sums = []
    for number, times in enumerate(cuts):
        meeting = StartedExchange(sum_up(found, [number + found.rank]))
        for _ in range(times):
            connection = next(iter(found._by_rank.values()))
            with suppress(OSError):
                connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.socket.close()  # what is on its way is lost
            meeting.poll()
        began = time.monotonic()
        while not meeting.poll():
            assert time.monotonic() - began < HANG_SECONDS / 2
            rank.rest(found, 0.1, time.monotonic() - began)
        sums += meeting.conclude()
    return sums


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5])
def test_a_connection_that_is_cut_is_opened_again_and_loses_nothing(num_ranks: int, made: Made) -> None:
    ranks = made(num_ranks)
    dice = random.Random(num_ranks)
    found = on_threads([partial(opened, rank, CONTROL) for rank in ranks])
    for rank, each in zip(on_threads([partial(opened, rank, 0) for rank in ranks]), found, strict=True):
        rank.close()  # a channel that was opened meanwhile
        assert each.disconnected() == []
    cuts = [[*(dice.choice((0, 0, 0, 1)) for _ in range(11)), 0] for _ in ranks]
    sums = on_threads([partial(exchanged, *each) for each in zip(ranks, found, cuts, strict=True)])
    assert sums == [[num_ranks * number + sum(range(num_ranks)) for number in range(12)]] * num_ranks
    for each in found:
        each.close()


def test_a_rank_that_waits_elsewhere_hears_that_its_connection_is_lost(made: Made) -> None:
    """The higher rank dials, and here it is the one that reads nothing. Else ranks could wait in a circle."""
    ranks = made(2)
    found = on_threads([partial(opened, rank, CONTROL) for rank in ranks])
    found[1].send(np.array([7]), 0, 1)
    found[0].connection(1).socket.close()
    words = np.zeros(1, np.int64)
    expected = found[0].recv(words, 1, 1)
    has_come = threading.Event()

    def wait(rank: Endpoint) -> None:
        until = time.monotonic() + HANG_SECONDS
        while not has_come.is_set() and time.monotonic() < until:
            rank.rest(found[rank._rank], 0.1, 0.0)
            if rank is ranks[0] and expected.has_come():
                has_come.set()

    on_threads([partial(wait, rank) for rank in ranks])
    for each in found:
        each.close()
    assert (has_come.is_set(), words.tolist()) == (True, [7])


def test_a_connection_that_was_not_kept_may_come_late(made: Made) -> None:
    """The sender tries several addresses, and keeps one connection. Another one must not end it."""
    ranks = made(2)
    found = on_threads([partial(opened, rank, CONTROL) for rank in ranks])
    assert on_threads([partial(exchanged, *each, [1, 0]) for each in zip(ranks, found, strict=True)]) == [[1, 3]] * 2
    renewals = found[0].connection(1).renewals
    assert renewals > 0
    for number in range(CONTROL, CONTROL - renewals - 1, -1):
        with socket.create_connection(("127.0.0.1", ranks[0].address.port)) as late:
            late.sendall(endpoint._HANDSHAKE.pack(ranks[0].address.secret, number, 1, 0))
            ranks[0]._accept_all()
        assert (found[0].disconnected(), found[0].connection(1).renewals) == ([], renewals), number
    for each in found:
        each.close()


def test_a_rank_that_ended_meanwhile_is_not_waited_for(made: Made) -> None:
    ranks = made(2)
    found = on_threads([partial(opened, rank, CONTROL) for rank in ranks])
    found[1].close()
    ranks[1].close()
    with pytest.raises(Departed, match=r"rank 1 died or lost its connection \(it refuses connections at "):
        exchanged(ranks[0], found[0], [0])
    found[0].close()


def test_a_connection_that_is_cut_in_a_large_message_is_given_up(made: Made) -> None:
    """A copy of all that is on its way would cost the memory of the values."""
    ranks = made(2)
    found = on_threads([partial(opened, rank, CONTROL) for rank in ranks])
    found[1].send(np.zeros(1_000_000), 0, 7)
    receipt = found[0].recv(np.zeros(1_000_000), 1, 7)
    found[0]._by_rank[1].socket.close()
    until = time.monotonic() + HANG_SECONDS
    while not receipt.has_come() and time.monotonic() < until:
        ranks[0].rest(found[0], 0.02, 0.0)
        found[1].recv(np.zeros(1), 0, 7).has_come()
        ranks[1].rest(found[1], 0.02, 0.0)
        if found[1]._by_rank[0]._given_up is not None:
            break
    with pytest.raises(Departed, match="in the middle of a large message"):
        found[1].recv(np.zeros(1), 0, 7).wait()
    for each in found:
        each.close()


def test_a_timeout_may_be_longer_than_the_system_can_count() -> None:
    with socket.socket() as connecting:
        connections.configure(connecting, float("inf"))
        assert connecting.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_idle_connections_are_kept_alive(made: Made) -> None:
    """Firewalls forget a connection that was idle for some minutes."""
    ranks = made(2)
    for each in on_threads([partial(opened, rank, 0) for rank in ranks]):
        (connection,) = each._by_rank.values()
        assert connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_KEEPIDLE"):
            assert connection.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 30
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert connection.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
        each.close()


def test_an_address_is_one_line_of_json_without_loopback_addresses() -> None:
    address = Address("here", 1, own_addresses("127.0.0.1"), b"secret")
    text = address.to_text()
    assert Address.of(json.loads(text)) == address
    assert "\n" not in text
    assert not any(each.startswith("127.") or each == "::1" for each in address.addresses)


def test_a_name_is_looked_up_only_where_the_route_and_the_interfaces_gave_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A resolver may be slow; and the own name may be a loopback address."""
    asked: list[Any] = []
    found = "10.1.2.3"

    def answer(host: str, *args: Any, **options: Any) -> Any:
        asked.append(host)
        if host == "the-first-host":
            return []
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (found, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    monkeypatch.setattr(addresses, "_ipv4_of", lambda interface: {"lo": "127.0.0.1"}.get(interface, "10.9.9.9"))
    monkeypatch.setattr(addresses, "_ipv6_of", lambda interface: {"lo": "::1"}.get(interface, "fe80::1"))
    monkeypatch.setattr(addresses, "interfaces", lambda: ["lo", "eth0"])
    assert own_addresses("the-first-host") == ("10.9.9.9",)
    assert asked == ["the-first-host"]
    monkeypatch.setattr(addresses, "interfaces", lambda: ["lo"])
    assert own_addresses("the-first-host") == (found,)
    found = "127.0.1.1"
    assert own_addresses("the-first-host") == ()


def test_an_interface_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match=r"'no-such-interface', which has no address here; the interfaces are .*lo"):
        Endpoint(0, range(2), "no-such-interface", "", 60.0)
    rank = Endpoint(0, range(2), "lo", "", 60.0)
    assert rank.address.addresses == ("127.0.0.1",)
    rank.close()
