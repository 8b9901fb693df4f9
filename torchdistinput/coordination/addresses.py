"""The addresses by which other hosts may reach this one.

The best one is the address on the route to the store, which all ranks reach. The addresses of the interfaces follow:
a route to an own name (``127.0.1.1`` on Debian) tells nothing. The name of the host is looked up only where both gave
nothing, as a resolver may take long.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchdistinput.errors import InputError


class Address(NamedTuple):
    """The address of a rank.

    Args:
      host: identifies the host; ranks with the same value can use the loopback address.
      port: the port, the same for all addresses.
      addresses: IP addresses, the best one first.
      secret: the first bytes of a connection to this rank.
    """

    host: str
    port: int
    addresses: tuple[str, ...]
    secret: bytes

    def to_text(self) -> str:
        """The address as a text for the store. Local."""
        return json.dumps([self.host, self.port, list(self.addresses), self.secret.hex()])

    @staticmethod
    def of(values: Sequence[Any]) -> Address:
        """The address from the values in the text that another rank wrote to the store. Local."""
        host, port, addresses, secret = values
        return Address(str(host), int(port), tuple(map(str, addresses)), bytes.fromhex(secret))


def host_identity() -> str:
    """A text that is equal for ranks which reach each other by the loopback address. Local."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return f"{boot} {os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()


def own_addresses(towards: str | None) -> tuple[str, ...]:
    """The addresses of this host, the best one first. Local; it may wait for a resolver.

    Args:
      towards: the name or address of the store's host, if it is known.
    """
    found = _usable(_on_the_route(towards)) if towards else []
    for interface in interfaces():
        found += _usable([_ipv4_of(interface), _ipv6_of(interface)])
    return tuple(dict.fromkeys(found or _usable(_looked_up(socket.gethostname()))))


def _usable(addresses: Iterable[str]) -> list[str]:
    """Those of the addresses that mean the same host everywhere."""
    found = []
    for each in filter(None, addresses):
        address = ipaddress.ip_address(each.partition("%")[0])
        if not (address.is_loopback or address.is_link_local or address.is_unspecified):
            found.append(str(address))
    return found


def _on_the_route(towards: str) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(place)  # of a datagram: nothing is sent
                yield str(probe.getsockname()[0])


def _looked_up(name: str) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for *_, place in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
            yield str(place[0])


def interfaces() -> list[str]:
    """The names of the network interfaces; empty where the system does not tell. Local."""
    return [name for _, name in socket.if_nameindex()] if sys.platform != "win32" else []


def address_of(interface: str) -> str:
    """The first address of a network interface. Local.

    Raises:
      InputError: there is no such interface, or it has no address.
    """
    names = interfaces()
    if interface in names and (found := _ipv4_of(interface) or _ipv6_of(interface)):
        return found
    raise InputError(
        f"GLOO_SOCKET_IFNAME names the network interface {interface!r}, which has no address here; the interfaces are "
        f"{', '.join(names) or 'not known on this system'}. Name one of them, or unset it."
    )


def _ipv4_of(interface: str) -> str:
    if sys.platform == "win32":
        return ""
    import fcntl  # noqa: PLC0415 - there is none on Windows

    request = 0xC0206921 if sys.platform == "darwin" else 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer: Any = fcntl.ioctl(probe, request, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _ipv6_of(interface: str) -> str:
    """The first IPv6 address of an interface on Linux, except link-local ones; empty where there is none."""
    table = Path("/proc/net/if_inet6")
    rows = [row.split() for row in table.read_text().splitlines()] if table.exists() else []
    for address, _, _, scope, _, name in rows:
        if name == interface and int(scope, 16) != 0x20:
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
    return ""
