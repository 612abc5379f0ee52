"""Checks what PROXY_HOST may be, where a name leads, when it needs a key, and macOS's hints."""

import errno
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from hearth.shared.errors import StartError
from hearth.shared.listen_addresses import (
    ADDRESSES_MAX,
    is_host_name,
    is_loopback,
    listen_addresses,
)
from hearth.shared.macos_network_hints import listening_hint, refused_hint
from hearth.shared.settings import load_settings


class Names:
    """Stands for this machine's resolver, and counts what it was asked."""

    def __init__(self) -> None:
        self.known: dict[str, list[tuple[Any, ...]]] = {}
        self.asked: list[str] = []

    def resolve(self, host: str, *_: object, **__: object) -> list[tuple[Any, ...]]:
        self.asked.append(host)
        if host not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 0, 0, "", address) for address in self.known[host]]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    names = Names()
    monkeypatch.setattr(socket, "getaddrinfo", names.resolve)
    listen_addresses.cache_clear()
    yield names
    listen_addresses.cache_clear()


def test_a_name_stands_for_each_of_its_addresses_once(names: Names) -> None:
    names.known["mac.local"] = [
        *(("192.168.1.5", 0), ("192.168.1.5", 0)),
        *(("fe80::1", 0, 0, 4), ("fd7a::1", 0, 0, 0)),
    ]
    assert listen_addresses("mac.local") == ("192.168.1.5", "fe80::1%4", "fd7a::1")


def test_a_name_is_resolved_once_so_that_what_was_checked_is_what_is_bound(names: Names) -> None:
    names.known["box"] = [("127.0.1.1", 0)]
    assert is_loopback("box")
    names.known["box"] = [("10.0.0.1", 0)]
    assert listen_addresses("box") == ("127.0.1.1",) and names.asked == ["box"]


def test_addresses_and_localhost_are_asked_of_nobody(names: Names) -> None:
    for host in ("127.0.0.1", "::1", "0.0.0.0", "192.168.1.5"):
        assert listen_addresses(host) == (host,)
    assert listen_addresses("localhost") == ("127.0.0.1",) and names.asked == []


@pytest.mark.parametrize("others", [[], [("10.0.0.1", 0)], [("fd7a::1", 0, 0, 0)]])
def test_a_name_needs_a_key_unless_all_its_addresses_are_loopback(
    names: Names, others: list[tuple[Any, ...]]
) -> None:
    names.known["box"] = [("127.0.1.1", 0), *others]
    if others:
        with pytest.raises(StartError, match="PROXY_HOST is box, which others can reach"):
            load_settings({"PROXY_HOST": "box"}, None)
    assert load_settings({"PROXY_HOST": "box", "PROXY_API_KEY": "k"}, None).proxy_host == "box"
    assert is_loopback("box") is not bool(others)
    assert bool(listening_hint("box", "python", "darwin")) is bool(others)


@pytest.mark.parametrize(
    ("text", "is_name"),
    [
        *(("mac.local", True), ("hearth_proxy", True), ("a-b.example.", True), ("x1", True)),
        *(("127.1", False), ("0x7f000001", False), ("a..b", False), ("-a", False), ("", False)),
        *(("a" * 64, False), (".".join(["a" * 60] * 5), False), ("müller", False), ("a.1", False)),
    ],
)
def test_a_name_is_told_from_an_address_in_disguise(text: str, is_name: bool) -> None:
    assert is_host_name(text) is is_name


def test_a_name_without_an_address_refuses_to_start_with_the_reason(names: Names) -> None:
    with pytest.raises(StartError, match=r"PROXY_HOST is my\.host, .*Name or service not known"):
        load_settings({"PROXY_HOST": "my.host"}, None)


def test_a_name_of_too_many_addresses_is_refused(names: Names) -> None:
    names.known["cdn"] = [(f"10.0.0.{last}", 0) for last in range(ADDRESSES_MAX + 1)]
    with pytest.raises(StartError, match=f"has {ADDRESSES_MAX + 1} addresses"):
        listen_addresses("cdn")


# ---------------------------------------------------------------- where macOS may refuse it


def test_no_route_to_a_neighbour_names_the_local_network_setting() -> None:
    hint = refused_hint(OSError(errno.EHOSTUNREACH, "No route to host"), "darwin")
    assert hint.startswith("Connecting gives 'No route to host'.")
    for remedy in ("Privacy & Security > Local Network", "Terminal", "ssh", "launchd daemon"):
        assert remedy in hint


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.4", "::"])
def test_listening_where_others_can_connect_names_the_firewall_and_the_program(host: str) -> None:
    hint = listening_hint(host, "/opt/python3.12", "darwin")
    assert f"listening on {host}:" in hint and "--unblockapp /opt/python3.12" in hint
    assert listening_hint(host, "/opt/python3.12", "linux") == ""
