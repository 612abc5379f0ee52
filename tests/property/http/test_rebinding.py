"""Attacks every path by rebinding: a page under its own name reads nothing and does nothing.

By DNS such a page is sent to this server under its own name, so that for its browser both are one
origin. What it lacks is the key, and what stands for it: the cookie of a sign-in.
"""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import example, given, strategies as st

from hearth.proxy.app import ProxyApp
from hearth.shared.paths import PROJECT_DIR
from tests.helpers.proxy.proxy_app import Reply, app_of, ask

KEY: Final = b"sk-mine"
MODEL: Final = "a-name-to-leak"
LISTED: Final = ("mac.local", "nas.lan", "host.docker.internal")
OWN: Final = ("127.0.0.1:4000", "localhost", "[::1]:4000")
API: Final = (PROJECT_DIR / "docs" / "api.md").read_text()
# Every path that the documentation names, those without a version, and what belongs to none.
PATHS: Final = sorted(
    frozenset(re.findall(r"(?<![\w.])(/(?:v1|health|metrics|dashboard)[\w/]*)", API))
    | {"/", "/chat/completions", "/completions", "/responses", "/models", "/embeddings"}
    | {"/v1/models/x", "/v1/sessions/x", "/v1/cache/pins/x", "/v1/cache/prompts/x"}
    | {"/v1/responses/resp_x", "/v1/responses/resp_x/input_items", "/dashboard/login"}
    | {"/dashboard/events", "/dashboard/", "/chat", "/nothing", "/health/", "//"}
    | {"/chat/sign-in", "/chat/chat.js", "/chat/api/v1/models", "/chat/api/v1/chat/completions"}
    | {"/tokenize", "/detokenize", "/apply-template"}
)

labels = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)
evil_names = st.one_of(
    st.sampled_from(
        [
            *(
                "evil.example",
                "127.0.0.1.nip.io",
                "localhost.evil.example",
                "mac.local.evil.example",
            ),
            *("mac.local.evil.example", "xnas.lan.example"),
            *("10.0.0.9", "[fd00::9]", "0.0.0.0", "xmac.local", "lan"),
        ]
    ),
    st.lists(labels, min_size=1, max_size=3).map(lambda some: ".".join(some) + ".example"),
)
evil_hosts = st.tuples(evil_names, st.sampled_from(["", ":4000", ":80"])).map("".join)
methods = st.sampled_from(["GET", "HEAD", "POST", "DELETE", "PUT", "OPTIONS"])
accepts = st.sampled_from([b"*/*", b"text/html", b"application/json"])


@pytest.fixture(scope="module")
def apps() -> Iterator[dict[str, ProxyApp]]:
    """A server with a key and one without, both with names that are listed."""
    settings = {"ALLOWED_HOSTS": "mac.local, *.lan, host.docker.internal", "PROXY_MODEL_ID": MODEL}
    with tempfile.TemporaryDirectory() as keyed, tempfile.TemporaryDirectory() as open_:
        yield {
            "keyed": app_of(Path(keyed), **settings, PROXY_API_KEY=KEY.decode()),
            "open": app_of(Path(open_), **settings),
        }


def sent(app: ProxyApp, host: str, method: str, path: str, *headers: tuple[bytes, bytes]) -> Reply:
    body = b"{}" if method == "POST" else b""
    length = (b"content-length", str(len(body)).encode())
    return ask(
        app, method, path, length, *headers, host=(b"host", host.encode("latin-1")), body=body
    )


def is_keyless(path: str, accept: bytes, method: str = "GET") -> bool:
    path = re.sub("/+", "/", path).rstrip("/") or "/"  # as it is routed
    is_page = path == "/" and b"text/html" in accept and method in ("GET", "HEAD")
    is_chat = path in ("/chat/sign-in", "/chat/chat.js") or path.startswith("/chat/api/")
    is_dashboard = path == "/dashboard" or path.startswith("/dashboard/")
    return path in ("/health", "/health/ready") or is_dashboard or is_chat or is_page


@given(
    host=evil_hosts,
    method=methods,
    path=st.sampled_from(PATHS) | st.from_regex(r"/[a-z0-9/._-]{0,20}", fullmatch=True),
    accept=accepts,
    has_origin=st.booleans(),
    key=st.sampled_from([None, b"", b"sk-min", b"sk-mine ,", b"none"]),
)
@example("evil.example", "GET", "/dashboard/events", b"*/*", False, None)
def test_a_rebound_page_is_refused_on_every_path(
    apps: dict[str, ProxyApp],
    host: str,
    method: str,
    path: str,
    accept: bytes,
    has_origin: bool,
    key: bytes | None,
) -> None:
    headers = [(b"accept", accept)]
    if has_origin:  # the page's own: for its browser it is same-origin
        headers += [(b"origin", b"http://" + host.encode()), (b"sec-fetch-site", b"same-origin")]
    if key is not None:
        headers.append((b"authorization", b"Bearer " + key))
    for which, app in apps.items():
        reply = sent(app, host, method, path, *headers)
        needs_key = which == "keyed" and not is_keyless(path, accept, method)
        assert reply.status == (401 if needs_key else 403), reply
        assert MODEL.encode() not in reply.content
        names = [*reply.headers]
        assert not [name for name in names if name.startswith(("access-control", "set-cookie"))]
        if not needs_key and method != "HEAD":
            assert b"ALLOWED_HOSTS" in reply.content


@given(
    host=st.sampled_from([*LISTED, *OWN]) | evil_hosts,
    origin=st.sampled_from(
        ["http://attacker.test", "null", "http://127.0.0.1:1", "app://x", "file://"]
    ),
    method=methods,
    path=st.sampled_from(PATHS),
    key=st.sampled_from([None, KEY]),
    which=st.sampled_from(["keyed", "open"]),
)
def test_a_page_of_another_origin_is_refused_on_every_path_with_the_key_too(
    apps: dict[str, ProxyApp],
    host: str,
    origin: str,
    method: str,
    path: str,
    key: bytes | None,
    which: str,
) -> None:
    headers = [(b"origin", origin.encode())]
    headers += [] if key is None else [(b"x-api-key", key)]
    reply = sent(apps[which], host, method, path, *headers)
    assert reply.status == 403 and MODEL.encode() not in reply.content


@given(host=st.sampled_from([*LISTED, *OWN]), path=st.sampled_from(PATHS), accept=accepts)
def test_a_listed_name_is_served_what_localhost_is(
    apps: dict[str, ProxyApp], host: str, path: str, accept: bytes
) -> None:
    """The control: without the rule the attacks above would get through."""
    if path == "/dashboard/events":
        return  # which does not end
    for which in apps:
        key = [(b"x-api-key", KEY)] if which == "keyed" else []
        reply = sent(apps[which], host, "GET", path, (b"accept", accept), *key)
        local = sent(apps[which], "127.0.0.1", "GET", path, (b"accept", accept), *key)
        assert reply.status == local.status != 403


@given(host=evil_hosts, path=st.sampled_from(PATHS), accept=accepts)
def test_with_the_key_any_name_is_served_where_the_key_is_demanded(
    apps: dict[str, ProxyApp], host: str, path: str, accept: bytes
) -> None:
    reply = sent(apps["keyed"], host, "GET", path, (b"accept", accept), (b"x-api-key", KEY))
    assert (reply.status == 403) is is_keyless(path, accept)
