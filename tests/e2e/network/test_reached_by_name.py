"""Reaches a server by names, of which its machine's resolver knows some."""

from collections.abc import Iterator

import httpx
import pytest

from tests.helpers.servers.audited_server import body_of
from tests.helpers.servers.server import WAIT_S_MAX, Server

KEY = "sk-from-afar"
CHAT = "/v1/chat/completions"
ADDRESSES = ("127.0.0.2", "127.0.0.3")  # of hearth.local; mac.local is another machine's
LAUNCH = f"""
import socket, sys
NAMES = {{"hearth.local": {ADDRESSES}, "mac.local": ("192.0.2.1",)}}
known = socket.getaddrinfo
def resolved(host, *rest, **more):
    return [row for each in NAMES.get(host, (host,)) for row in known(each, *rest, **more)]
socket.getaddrinfo = resolved
from hearth.proxy.main import end, main
end(main([sys.executable, "-m", "tests.helpers.worker_processes.fake_worker"]))
"""


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    made = Server(**request.param)
    made.start("-c", LAUNCH)
    yield made
    made.__exit__()


def asked(server: Server, address: str, name: str, path: str, **headers: str) -> httpx.Response:
    """Ask at an address by a name; a POST where the path is a model's."""
    body = body_of(CHAT, "n=1") if path == CHAT else None
    headers = {"host": f"{name}:{server.port}", **headers}
    url = f"http://{address}:{server.port}{path}"
    method = "POST" if body else "GET"
    return httpx.request(method, url, json=body, headers=headers, timeout=WAIT_S_MAX)


def assert_not_allowed(reply: httpx.Response) -> None:
    assert reply.status_code == 403
    assert "Add evil.example to ALLOWED_HOSTS" in reply.text


@pytest.mark.parametrize(
    "server", [{"PROXY_HOST": "hearth.local", "PROXY_API_KEY": KEY}], indirect=True
)
def test_with_a_key_every_name_leads_to_the_model_and_none_to_what_needs_no_key(
    server: Server,
) -> None:
    server.url = f"http://{ADDRESSES[0]}:{server.port}"
    server.wait_until_ready()
    for address in ADDRESSES:  # all addresses of the name are listened on
        for name in ("host.docker.internal", "mac.local", "hearth.local", address):
            reply = asked(server, address, name, CHAT, authorization=f"Bearer {KEY}")
            assert (reply.status_code, "tok0" in reply.text) == (200, True)
    for path in (CHAT, "/v1/models", "/v1/sessions", "/metrics"):
        assert asked(server, ADDRESSES[0], "evil.example", path).status_code == 401
    for path in ("/health", "/dashboard"):
        assert_not_allowed(asked(server, ADDRESSES[0], "evil.example", path))


@pytest.mark.parametrize(
    "server", [{"ALLOWED_HOSTS": "*.local, host.docker.internal"}], indirect=True
)
def test_without_a_key_only_listed_names_lead_to_it_over_a_forwarder_to_loopback(
    server: Server,
) -> None:
    """Docker Desktop forwards host.docker.internal so; `tailscale serve` and proxies do too."""
    server.wait_until_ready()
    for name in ("host.docker.internal", "mac.local"):
        assert asked(server, "127.0.0.1", name, CHAT).status_code == 200
    page = {
        "origin": f"http://evil.example:{server.port}",
        "sec-fetch-site": "same-origin",
    }
    for path in (CHAT, "/v1/models", "/health", "/dashboard", "/metrics"):
        assert_not_allowed(asked(server, "127.0.0.1", "evil.example", path))
        assert_not_allowed(asked(server, "127.0.0.1", "evil.example", path, **page))


@pytest.mark.parametrize(
    "server", [{"PROXY_HOST": "mac.local", "PROXY_API_KEY": KEY}], indirect=True
)
def test_a_name_whose_address_is_another_machines_refuses_to_start(server: Server) -> None:
    assert server.process is not None and server.process.wait(WAIT_S_MAX) == 78
    told = server.log.read_text()
    assert told.startswith("hearth: PROXY_HOST: ") and "Set PROXY_HOST to an address" in told
    assert "192.0.2.1" in told
