"""How ranks meet: bounded, by name, whoever does not come, is late, is somebody else, or left an old address."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from tests.support.socket_ranks import HANG_SECONDS, on_threads, summed
from tests.support.waiting import wait_for
from torchdistinput.coordination import addresses, meeting, tree
from torchdistinput.coordination.addresses import Address, own_addresses
from torchdistinput.coordination.meeting import Listener, Meeting, Met
from torchdistinput.errors import CoordinationTimeout, InputError, RankLost
from torchdistinput.testing.ranks import free_port


class Store(dict[str, bytes]):
    """A store of one process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str, default: Any = None) -> Any:
        return self[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def meet(rank: int, world: int, store: Any, seconds: float = HANG_SECONDS, ports: str = "") -> Met | str:
    """Whom a rank meets, or the error."""
    try:
        made = Meeting(rank, range(10, 10 + world), seconds, host=None, interface="lo", ports=ports)
        return made.wait_for_all(lambda _: store, " at the host")
    except InputError as error:
        return f"{type(error).__name__}: {error}"


def met(world: int, store: Any, **more: Any) -> list[Any]:
    return on_threads([partial(meet, rank, world, store, **more) for rank in range(world)])


def check_and_end(found: Sequence[Any]) -> None:
    """All have met."""
    assert all(isinstance(each, Met) for each in found), found
    assert len({each.token for each in found}) == 1
    sums = on_threads([partial(each.calls.make, "a sum", 10.0, lambda channel: summed(channel, [1])) for each in found])
    assert sums == [[len(found)]] * len(found)
    for each in found:
        each.tree.end()


@pytest.mark.parametrize("absent", [0, 1, 3])
def test_a_rank_that_does_not_come_is_named_by_all_that_came(absent: int) -> None:
    store = Store()
    ranks = [rank for rank in range(4) if rank != absent]
    told = on_threads([partial(meet, rank, 4, store, 4.0) for rank in ranks])
    for text in told:
        assert f"rank {10 + absent}" in text
        assert text.startswith((f"CoordinationTimeout: Strategy(): rank {10 + absent} did not come", "RankLost: "))
    assert any("CoordinationTimeout" in text for text in told)
    check_and_end(met(4, store))  # they may come again


def test_a_parent_that_does_not_come_is_named_by_those_above_it_and_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "FAN_OUT", 2)
    told = on_threads([partial(meet, rank, 4, store, 4.0) for store in [Store()] for rank in (0, 1, 3)])
    assert all("rank 12" in text for text in told), told


def test_a_rank_that_comes_late_is_waited_for_and_named_in_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torchdistinput.coordination.timeouts._WARN_SECONDS", 0.5)
    store = Store()

    def late() -> Any:
        wait_for(lambda: any(text.startswith("Strategy(): waiting for rank 11 for") for text in caplog.messages))
        return meet(1, 3, store)

    check_and_end(on_threads([partial(meet, 0, 3, store), late, partial(meet, 2, 3, store)]))


def address_at(port: int) -> str:
    return Address("elsewhere", port, ("127.0.0.1",), b"0" * 16).to_text()


def come_late(store: Any, seconds: float) -> list[Any]:
    def first() -> Any:
        time.sleep(seconds)
        return meet(0, 3, store)

    return on_threads([first, partial(meet, 1, 3, store), partial(meet, 2, 3, store)])


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 2, b"x"])
def test_another_program_at_the_port_does_not_take_the_place_of_a_rank(answer: bytes) -> None:
    store, held = Store(), list[socket.socket]()
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answers() -> None:
            while True:
                try:
                    taken, _ = other.accept()
                except OSError:
                    return
                held.append(taken)
                with contextlib.suppress(ConnectionError):  # the rank has left meanwhile
                    taken.sendall(answer)
                if answer == b"x":
                    taken.close()

        thread = threading.Thread(target=answers, daemon=True)
        thread.start()
        store.set("0", address_at(other.getsockname()[1]))
        check_and_end(come_late(store, 0.5))
        other.shutdown(socket.SHUT_RDWR)
        thread.join(HANG_SECONDS)
    for each in held:
        each.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8")
def test_addresses_that_lead_elsewhere_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host may have a 172.17.0.1 of its own."""
    store, port = Store(), free_port()
    monkeypatch.setattr(meeting, "host_identity", object)
    monkeypatch.setattr(Address, "to_text", text_with_more)
    with socket.create_server(("127.0.0.3", port)):
        check_and_end(met(2, store, ports=f"{port}"))


def text_with_more(address: Address) -> str:
    return json.dumps(["x", address.port, ["127.0.0.2", "127.0.0.3", "127.0.0.1"], address.secret.hex()])


def listener_of(children: Sequence[int] = (1, 2)) -> Listener:
    return Listener(10, children, "lo", "")


def arrived(listener: Listener, is_here: Callable[[int], bool] = lambda _: False) -> list[int]:
    found = []
    for link in listener.arrivals(is_here):
        found.append(link.peer)
        link.close()
    return found


def arrived_until(
    is_over: Callable[[list[int]], object], listener: Listener, is_here: Callable[[int], bool] = lambda _: False
) -> list[int]:
    """Whom a listener takes until something is so: what was sent may need a moment, also on one host."""
    found: list[int] = []

    def look() -> object:
        found.extend(arrived(listener, is_here))
        return is_over(found)

    wait_for(look)
    return found


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed it."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_strangers_are_turned_away() -> None:
    """Whoever looks whether the port is open, speaks otherwise, or has another secret."""
    listener = listener_of()
    secret, shake = listener.address.secret, meeting._HANDSHAKE.pack
    said = [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: x\r\n\r\n",
        shake(os.urandom(16), meeting.VERSION, 1, 1),
        shake(secret, meeting.VERSION, 7, 1),  # no child of this rank
    ]
    place = ("127.0.0.1", listener.address.port)
    strangers = [socket.create_connection(place) for _ in ["", *said]]
    strangers.pop().close()
    for stranger, words in zip(strangers, said, strict=True):
        stranger.sendall(words)
    child = socket.create_connection(place)
    child.sendall(shake(secret, meeting.VERSION, 2, 1))
    assert arrived_until(lambda found: found and all(map(is_closed, strangers)), listener) == [2]
    for stranger in strangers:
        stranger.close()
    assert child.recv(16) == meeting._proof_of(secret)
    child.close()
    listener.close()


def test_a_guess_of_the_secret_tells_nothing_about_its_bytes() -> None:
    """Else 256 connections find the first byte, and 256 more the next one."""
    listener = listener_of()
    right = meeting._HANDSHAKE.pack(listener.address.secret, meeting.VERSION, 1, 1)
    guesses = {known: right[:known] + bytes([right[known] ^ 1]) for known in (0, 1, 8, 15)}
    strangers = {known: socket.create_connection(("127.0.0.1", listener.address.port)) for known in guesses}
    for known, guess in guesses.items():
        strangers[known].sendall(guess)
    lengths = sorted(map(len, guesses.values()))
    assert arrived_until(lambda _: sorted(len(part) for _, part in listener._arriving) == lengths, listener) == []
    for known, guess in guesses.items():
        strangers[known].sendall(right[len(guess) :])
        assert arrived_until(lambda _: is_closed(strangers[known]), listener) == []  # noqa: B023 - runs at once
        strangers[known].close()
    listener.close()


def test_strangers_that_say_nothing_are_kept_to_a_bounded_number() -> None:
    listener = listener_of()
    strangers = []
    for _ in range(150):
        strangers.append(socket.create_connection(("127.0.0.1", listener.address.port)))
        assert arrived(listener) == []
    assert arrived_until(lambda _: is_closed(strangers[0]), listener) == []
    assert len(listener._arriving) == 128
    for stranger in strangers:
        stranger.close()
    listener.close()


@pytest.mark.parametrize(("attempt", "taken"), [(4, []), (6, [1])])
def test_an_earlier_attempt_that_comes_late_does_not_end_the_connection(attempt: int, taken: list[int]) -> None:
    listener, found = listener_of(), list[int]()
    for number in (5, attempt):
        with socket.create_connection(("127.0.0.1", listener.address.port)) as child:
            child.sendall(meeting._HANDSHAKE.pack(listener.address.secret, meeting.VERSION, 1, number))
            is_second = number != 5
            found = arrived_until(lambda taken: taken or is_closed(child), listener, lambda _: is_second)  # noqa: B023
    assert found == taken
    listener.close()


def test_another_version_is_named_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = meeting._HANDSHAKE.pack

    class Older:
        size, unpack = meeting._HANDSHAKE.size, staticmethod(meeting._HANDSHAKE.unpack)

        @staticmethod
        def pack(secret: bytes, _: int, *more: int) -> bytes:
            return pack(secret, 2, *more)

    monkeypatch.setattr(meeting, "_HANDSHAKE", Older)
    first, second = met(2, Store(), seconds=5.0)
    assert first.startswith("InputError: rank 10 runs another version of torchdistinput than rank 1")
    assert "rank" in second


def test_a_port_that_is_taken_is_the_trouble_of_the_rank_that_needs_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        first, second, third = met(3, Store(), seconds=20.0, ports=f"{port}")
    trouble = f"this rank cannot listen for the others: TORCHDISTINPUT_PORTS={port} gave no port"
    assert first.startswith(f"InputError: {trouble}")
    for told in (second, third):
        assert told.startswith(f"RankLost: Strategy(): rank 10 could not take part: {trouble}"), told


def test_an_interruption_is_told_to_those_that_have_come() -> None:
    store = Store()

    def first() -> str:
        made = Meeting(0, range(10, 14), HANG_SECONDS, host=None, interface="lo", ports="")
        add_children = made._add_children

        def add() -> None:
            add_children()
            if len(made._tree.links()) == 2:
                raise KeyboardInterrupt

        made._add_children = add  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            made.wait_for_all(lambda _: store, "")
        return "interrupted"

    told = on_threads([first, partial(meet, 1, 4, store), partial(meet, 2, 4, store)])
    assert told[0] == "interrupted"
    for text in told[1:]:
        assert text.startswith("RankLost: Strategy(): rank 10 was interrupted by KeyboardInterrupt in Strategy()."), (
            text
        )


@pytest.mark.parametrize("kind", [RankLost, CoordinationTimeout])
def test_a_store_that_is_gone_or_silent_is_told(kind: type[Exception]) -> None:
    def asked(given_up: threading.Event) -> Any:
        if kind is RankLost:
            raise RankLost("the store is gone")
        given_up.wait(HANG_SECONDS)

    made = Meeting(1, range(2), 0.3, host=None, interface="lo", ports="")
    with pytest.raises(kind, match=r"the store( at the host did not come within 0.3 seconds| is gone)"):
        made.wait_for_all(asked, " at the host")


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
        Listener(0, [1], "no-such-interface", "")
    listener = Listener(0, [1], "lo", "")
    assert listener.address.addresses == ("127.0.0.1",)
    listener.close()
