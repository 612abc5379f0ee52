"""Checks what is said where macOS may refuse the network, and that nothing is said elsewhere."""

import errno

import pytest

from hearth.shared.macos_network_hints import listening_hint, refused_hint

NO_ROUTE = OSError(errno.EHOSTUNREACH, "No route to host")


def test_no_route_to_a_neighbour_names_the_local_network_setting() -> None:
    hint = refused_hint(NO_ROUTE, "darwin")
    assert hint.startswith("Connecting gives 'No route to host'.")
    for remedy in ("Privacy & Security > Local Network", "Terminal", "ssh", "launchd daemon"):
        assert remedy in hint


def test_no_answer_at_all_names_the_firewall_of_the_other_mac() -> None:
    hint = refused_hint(TimeoutError(), "darwin")
    assert "firewall" in hint and "Local Network" not in hint


@pytest.mark.parametrize("error", [NO_ROUTE, TimeoutError(), ConnectionRefusedError()])
def test_other_systems_refuse_no_program(error: OSError) -> None:
    assert refused_hint(error, "linux") == ""


def test_a_machine_where_nobody_listens_says_so_itself() -> None:
    assert refused_hint(ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "darwin") == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.4", "::"])
def test_listening_where_others_can_connect_names_the_firewall_and_the_program(host: str) -> None:
    hint = listening_hint(host, "/opt/python3.12", "darwin")
    assert f"listening on {host}:" in hint and "--unblockapp /opt/python3.12" in hint
    assert listening_hint(host, "/opt/python3.12", "linux") == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_the_firewall_does_not_ask_about_loopback(host: str) -> None:
    assert listening_hint(host, "python", "darwin") == ""
