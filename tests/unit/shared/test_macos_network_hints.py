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


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.4", "::"])
def test_listening_where_others_can_connect_names_the_firewall_and_the_program(host: str) -> None:
    hint = listening_hint(host, "/opt/python3.12", "darwin")
    assert f"listening on {host}:" in hint and "--unblockapp /opt/python3.12" in hint
    assert listening_hint(host, "/opt/python3.12", "linux") == ""
