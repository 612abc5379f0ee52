"""Reaches a server from another machine, a network namespace, by names that its hosts file has."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.servers.network_namespaces import (
    NEEDS_NAMESPACES,
    SERVER_ADDRESSES,
    Machine,
    two_machines,
)
from tests.helpers.servers.server import Server

pytestmark = NEEDS_NAMESPACES
KEY = "sk-from-afar"
NAMES = "hearth.local mac.local host.docker.internal evil.example"
# What a stranger's program does, with its own HTTP client: asks a model by the server's name.
CHAT = """
import sys, openai
for name in sys.argv[3:]:
    with openai.OpenAI(base_url=f"http://{name}:{sys.argv[1]}/v1", api_key=sys.argv[2]) as client:
        told = client.chat.completions.create(
            model="local", max_tokens=8, messages=[{"role": "user", "content": "Hello"}]
        )
        print(name, told.usage.completion_tokens)
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines("hearth.local", NAMES) as both:
        yield both


def row(name: str, server: Server, path: str, key: str = "", **headers: str) -> tuple[Any, ...]:
    """Return a request of an attack's: a POST where the path is a model's."""
    keyed = {"Authorization": f"Bearer {key}"} if key else {}
    is_post = path.startswith("/v1/chat")
    asked = {"model": "local", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    body = json.dumps(asked) if is_post else None
    return (name, server.port, "POST" if is_post else "GET", path, headers | keyed, body)


def chatted(client: Machine, server: Server, key: str, *names: str) -> list[str]:
    """Return the names under which a model has answered."""
    told = client.run("-c", CHAT, str(server.port), key, *names).splitlines()
    return [line.split()[0] for line in told if int(line.split()[1]) > 0]


def test_with_a_key_every_name_leads_to_the_model_and_none_to_what_needs_no_key(
    machines: tuple[Machine, Machine],
) -> None:
    here, client = machines
    server = Server(PROXY_HOST="hearth.local", PROXY_API_KEY=KEY)
    try:
        here.start_server(server)
        assert client.ask(row("hearth.local", server, "/health"))[0][0] == 200
        names = ("host.docker.internal", "mac.local", "hearth.local", SERVER_ADDRESSES[0])
        both = (*names, f"[{SERVER_ADDRESSES[1]}]")  # all addresses of the name are listened on
        assert chatted(client, server, KEY, *both) == list(both)
        attacks = ["/v1/chat/completions", "/v1/models", "/v1/sessions", "/metrics"]
        refused = client.ask(*(row("evil.example", server, path) for path in attacks))
        assert [status for status, _ in refused] == [401] * len(attacks)
        refused = client.ask(
            *(row("evil.example", server, path, KEY) for path in ("/health", "/dashboard"))
        )
        assert {status for status, _ in refused} == {403}
        assert all("Add evil.example to ALLOWED_HOSTS" in text for _, text in refused)
    finally:
        server.__exit__()


def test_without_a_key_only_listed_names_lead_to_it_over_a_forwarder_to_loopback(
    machines: tuple[Machine, Machine],
) -> None:
    """Docker Desktop forwards host.docker.internal so; `tailscale serve` and proxies do too."""
    here, client = machines
    server = Server(ALLOWED_HOSTS="*.local, host.docker.internal")
    try:
        here.start_server(server)
        with here.forwarding(server.port):
            assert client.ask(row("mac.local", server, "/health"))[0][0] == 200
            names = ("host.docker.internal", "mac.local")
            assert chatted(client, server, "none", *names) == list(names)
            paths = ["/v1/chat/completions", "/v1/models", "/health", "/dashboard", "/metrics"]
            page = {"Origin": f"http://evil.example:{server.port}", "Sec_Fetch_Site": "same-origin"}
            refused = client.ask(
                *(row("evil.example", server, path) for path in paths),
                *(row("evil.example", server, path, **page) for path in paths),
            )
            assert {status for status, _ in refused} == {403}
            assert all("Add evil.example to ALLOWED_HOSTS" in text for _, text in refused)
    finally:
        server.__exit__()


def test_a_name_whose_address_is_another_machines_refuses_to_start(
    machines: tuple[Machine, Machine],
) -> None:
    _, client = machines
    server = Server(PROXY_HOST="mac.local", PROXY_API_KEY=KEY)
    try:
        client.start_server(server)
        assert server.process is not None and server.process.wait(60) == 78
        told = server.log.read_text()
        assert told.startswith("hearth: PROXY_HOST: ") and "Set PROXY_HOST to an address" in told
        assert any(address in told for address in SERVER_ADDRESSES)
    finally:
        server.__exit__()
