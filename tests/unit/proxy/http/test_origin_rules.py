"""Checks the Host and Origin rules: names, addresses, patterns, and what a 403 says."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hearth.proxy.app import ProxyApp
from hearth.proxy.http.api_keys import Headers
from hearth.proxy.http.origin_rules import OriginRules
from hearth.proxy.monitoring.admin_routes import AdminRoutes
from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.proxy.workers.supervisor import Supervisor
from hearth.shared.errors import RequestError, StartError
from hearth.shared.settings_from_env import load_settings
from tests.helpers.proxy.proxy_app import ask

NAMES = ("mac.local", "*.lan", "Host.Docker.Internal", "[fd7a::1]", "192.168.1.5")


def takes(hosts: list[str], rules: OriginRules) -> bool:
    try:
        rules.check_host(hosts)
    except RequestError as error:
        assert (error.status, error.code) == (403, "host_refused")
        return False
    return True


LOOPBACK = "localhost localhost:4000 127.0.0.1 127.9.9.9:1 [::1]:4000 [::1] LOCALHOST"
OTHERS = (
    "evil.example localhost.evil.example 127.0.0.1.nip.io 192.168.0.9 0.0.0.0 localhost:4000:1 "
    "user@localhost localhost/ 2130706433 [::2]"
)
LISTED = (
    "mac.local MAC.LOCAL:4000 mac.local. nas.lan:80 a.b.lan [fd7a:0::1]:4000 "
    "host.docker.internal:4000 192.168.1.5:4000 localhost:4000"
)
ALIKE = (
    "xmac.local a.mac.local lan .lan evil-lan x.lan.evil.example mac.local.. 192.168.1.50 "
    "[fd7a::2] docker.internal mac.local@evil.example"
)


def test_loopback_and_listed_names_are_served_and_no_other_that_looks_alike() -> None:
    bare, listing = OriginRules("127.0.0.1", ()), OriginRules("127.0.0.1", (), NAMES)
    for rules, served, refused in ((bare, LOOPBACK, OTHERS), (listing, LISTED, ALIKE)):
        assert [host for host in served.split() if not takes([host], rules)] == []
        assert [host for host in refused.split() if takes([host], rules)] == []
    for hosts in ([], [""], ["localhost", "localhost"]):
        assert not takes(hosts, bare), "a missing or doubled one"


def test_a_wildcard_bind_takes_addresses_but_no_names() -> None:
    for bind in ("0.0.0.0", "::"):
        rules = OriginRules(bind, ())
        rules.check_host(["192.168.0.9:4000"])
        rules.check_host(["[fe80::1]:4000"])
        with pytest.raises(RequestError):
            rules.check_host(["rebound.example"])
    OriginRules("10.0.0.5", ()).check_host(["10.0.0.5"])
    with pytest.raises(RequestError):
        OriginRules("10.0.0.5", ()).check_host(["10.0.0.6"])


def test_an_origin_is_refused_unless_listed_or_our_own() -> None:
    rules = OriginRules("127.0.0.1", ("http://App.example:3000/",))

    def origin(text: str) -> str | None:
        headers = {"origin": text, "host": "127.0.0.1:4000"}
        return rules.check_origin(headers, "http", "POST")

    assert origin("http://app.example:3000") == "http://app.example:3000"
    assert origin("http://127.0.0.1:4000") is None
    for other in ("null", "http://evil.example", "http://127.0.0.1:4001", "https://127.0.0.1:4000"):
        with pytest.raises(RequestError):
            origin(other)


def test_a_cross_site_fetch_without_an_origin_is_refused_but_a_link_is_not() -> None:
    rules = OriginRules("127.0.0.1", ())
    with pytest.raises(RequestError):
        rules.check_origin({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, "", "GET")
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert rules.check_origin(link, "http", "GET") is None
    with pytest.raises(RequestError):
        rules.check_origin(link, "http", "POST")


def test_something_that_is_no_origin_refuses_to_start() -> None:
    for text in ("*", "app.example", "http://a/b", "file://"):
        with pytest.raises(StartError):
            OriginRules("127.0.0.1", (text,))


# ---------------------------------------------------------------- names that are listed


def test_what_is_no_host_refuses_to_start_and_is_named() -> None:
    wrong = "* *. http://mac.local mac.local:4000 mac.* m*c.local *.*.lan 127.1"
    for text in (*wrong.split(), "a b"):
        with pytest.raises(StartError, match="ALLOWED_HOSTS holds") as caught:
            OriginRules("127.0.0.1", (), [text])
        assert repr(text) in str(caught.value)


def test_the_403_of_an_unlisted_name_says_what_to_set() -> None:
    with pytest.raises(RequestError, match=r"Add mac\.local to ALLOWED_HOSTS") as caught:
        OriginRules("127.0.0.1", ()).check_host(["mac.local:4000"])
    assert caught.value.status == 403 and caught.value.code == "host_refused"


def test_where_a_key_is_needed_any_one_name_will_do() -> None:
    rules = OriginRules("127.0.0.1", ())
    for host in ("evil.example", "mac.local:4000", "192.168.0.9", "[fe80::1]:4000"):
        rules.check_host([host], is_key_needed=True)
    for hosts in ([], ["a.example", "b.example"], [""], ["a b"], ["a@b"]):
        with pytest.raises(RequestError, match="The Host header is"):
            rules.check_host(hosts, is_key_needed=True)


def test_a_name_to_listen_on_is_served_and_so_are_its_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [(0, 0, 0, "", ("10.1.2.3", 0)), (0, 0, 0, "", ("fd7a::9", 0, 0, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    rules = OriginRules("Our-Mac.test", ())
    for host in ("our-mac.test:4000", "10.1.2.3:4000", "[fd7a::9]"):
        rules.check_host([host])
    with pytest.raises(RequestError):
        rules.check_host(["10.1.2.4"])


# ---------------------------------------------------------------- origins by pattern


def asked_by(rules: OriginRules, origin: str, host: str = "127.0.0.1:4000") -> str | None:
    """Return the origin that `rules` let in; "refused" where they do not."""
    try:
        return rules.check_origin({"origin": origin, "host": host}, "http", "POST")
    except RequestError as error:
        assert error.status == 403 and "CORS_ORIGINS" in str(error)
        return "refused"


@pytest.mark.parametrize(
    ("pattern", "taken", "refused"),
    [
        (
            "vscode-webview://*",
            ["vscode-webview://0a1b-2c"],
            ["vscode-file://vscode-app", "https://vscode-webview", "vscode-webview://"],
        ),
        (
            "app://*",
            ["app://obsidian.md", "app://."],
            ["http://app", "myapp://obsidian.md", "app:"],
        ),
        (
            "http://localhost:*",
            ["http://localhost:3000", "http://localhost"],
            [
                *("https://localhost:3000", "http://localhost.evil.example:3000"),
                *(
                    "http://localhost:3000.evil.example",
                    "http://localhost:x",
                    "http://alocalhost:1",
                ),
            ],
        ),
        (
            "https://*.example.com",
            ["https://a.example.com", "https://a.b.example.com"],
            ["https://example.com", "https://xexample.com", "https://a.example.com:8443"],
        ),
        ("http://[::1]:*", ["http://[::1]:5000"], ["http://[::2]:5000"]),
        ("https://*.lan:*", ["https://nas.lan:5001", "https://nas.lan"], ["https://user@x.lan"]),
    ],
)
def test_a_pattern_of_origins_takes_what_it_says_and_nothing_else(
    pattern: str, taken: list[str], refused: list[str]
) -> None:
    rules = OriginRules("127.0.0.1", (pattern,))
    assert [asked_by(rules, origin) for origin in taken] == taken
    assert {asked_by(rules, origin) for origin in refused} == {"refused"}


@pytest.mark.parametrize(
    "text",
    [
        *("http://*", "https://*:443", "*://localhost", "http://local*", "http://*a.example"),
        *("null", "https://*.", "https://*.:*", "https://user@localhost:*", "https://bücher.de"),
    ],
)
def test_a_pattern_that_would_let_every_page_in_refuses_to_start(text: str) -> None:
    with pytest.raises(StartError, match="CORS_ORIGINS holds"):
        OriginRules("127.0.0.1", (text,))


def test_a_page_behind_tls_is_our_own_where_its_name_is_listed() -> None:
    host = "hearth.example"
    rules = OriginRules("127.0.0.1", (), (host,))
    assert asked_by(rules, f"https://{host}", host) is None
    assert asked_by(rules, "https://hearth.example:8443", host) == "refused"
    assert asked_by(OriginRules("127.0.0.1", ()), f"https://{host}", host) == "refused"


class TheirKeys:
    """Stands for LiteLLM's check, which knows no key here."""

    async def identity(self, headers: Headers, path: str = "") -> str | None:
        raise RequestError("An API key is required.", status=401)


def test_where_litellm_checks_keys_any_name_leads_to_its_check_and_none_past_it(
    tmp_path: Path,
) -> None:
    settings, pool = load_settings({"MAX_KV_SIZE_GB": "0"}, None), WorkerPool()
    routes = AdminRoutes(settings, "0", Supervisor(["true"], 1, tmp_path, pool, {}), pool)
    gateway: Any = SimpleNamespace(accounts=SimpleNamespace(keys=TheirKeys()))
    app = ProxyApp(settings, pool, routes, gateway=gateway)
    host = (b"host", b"evil.example")
    told = [ask(app, "GET", path, host=host).status for path in ("/v1/models", "/health", "/x")]
    assert told == [401, 403, 401]
