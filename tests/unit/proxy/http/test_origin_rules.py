"""Checks the Host and Origin rules: names, addresses, patterns, and what a 403 says."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import yaml

from hearth.proxy.app import ProxyApp
from hearth.proxy.http.api_keys import Headers
from hearth.proxy.http.origin_rules import OriginRules
from hearth.proxy.monitoring.admin_routes import AdminRoutes
from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.proxy.workers.supervisor import Supervisor
from hearth.shared.errors import RequestError, StartError
from hearth.shared.settings import load_settings
from tests.helpers.cases import DATA_DIR, cases
from tests.helpers.proxy.proxy_app import ask

TABLE: Final = "proxy/origins.yaml"
REFUSED: Final = yaml.safe_load((DATA_DIR / TABLE).read_text("utf-8"))
FOUND: Final = [(0, 0, 0, "", ("10.1.2.3", 0)), (0, 0, 0, "", ("fd7a::9", 0, 0, 0))]


def takes(rules: OriginRules, *hosts: str, needs_key: bool = False) -> bool:
    try:
        rules.check_host(hosts, is_key_needed=needs_key)
    except RequestError as error:
        assert (error.status, error.code) == (403, "host_refused")
        return False
    return True


@pytest.mark.parametrize("case", cases(TABLE, "hosts"))
def test_a_host_is_served_or_refused_as_the_table_says(
    monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: FOUND)
    rules = OriginRules(case.get("bind", "127.0.0.1"), (), case.get("allowed", ()))
    needs_key = case.get("needs_key", False)
    hosts = [*case["served"], *case["refused"]]
    served = [host for host in hosts if takes(rules, host, needs_key=needs_key)]
    assert served == case["served"]
    assert not takes(rules, needs_key=needs_key)
    assert not takes(rules, served[0], served[0], needs_key=needs_key), "a doubled one"


def test_the_403_of_an_unlisted_name_says_what_to_set() -> None:
    with pytest.raises(RequestError, match=r"Add mac\.local to ALLOWED_HOSTS"):
        OriginRules("127.0.0.1", ()).check_host(["mac.local:4000"])


@pytest.mark.parametrize("text", REFUSED["no_hosts"])
def test_what_is_no_host_refuses_to_start_and_is_named(text: str) -> None:
    with pytest.raises(StartError, match="ALLOWED_HOSTS holds") as caught:
        OriginRules("127.0.0.1", (), [text])
    assert repr(text) in str(caught.value)


def asked_by(rules: OriginRules, origin: str, host: str = "127.0.0.1:4000") -> str | None:
    """Return the origin that `rules` let in, None for our own; "refused" where they do not."""
    try:
        return rules.check_origin({"origin": origin, "host": host}, "http", "POST")
    except RequestError as error:
        assert error.status == 403 and "CORS_ORIGINS" in str(error)
        return "refused"


@pytest.mark.parametrize("case", cases(TABLE, "origins"))
def test_an_origin_is_let_in_or_refused_as_the_table_says(case: dict[str, Any]) -> None:
    rules = OriginRules("127.0.0.1", (case["listed"],))
    assert [asked_by(rules, origin) for origin in case["taken"]] == case["taken"]
    assert {asked_by(rules, origin) for origin in case["refused"]} == {"refused"}
    assert asked_by(rules, "http://127.0.0.1:4000") is None


@pytest.mark.parametrize("text", REFUSED["no_origins"])
def test_a_pattern_that_would_let_every_page_in_refuses_to_start(text: str) -> None:
    with pytest.raises(StartError, match="CORS_ORIGINS holds"):
        OriginRules("127.0.0.1", (text,))


def test_a_cross_site_fetch_without_an_origin_is_refused_but_a_link_is_not() -> None:
    rules = OriginRules("127.0.0.1", ())
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert rules.check_origin(link, "http", "GET") is None
    for headers, method in ((link | {"sec-fetch-mode": "no-cors"}, "GET"), (link, "POST")):
        with pytest.raises(RequestError):
            rules.check_origin(headers, "http", method)


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
