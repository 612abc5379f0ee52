"""A path in any spelling leads where its plain one does, or nowhere: no check sees another path.

Of slashes in a row one counts and at the end none. An escaped slash and dots are a name's own.
"""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import pytest
from hypothesis import example, given, strategies as st

from hearth.proxy.app import ProxyApp
from hearth.proxy.http.api_keys import ApiKeyCheck
from hearth.proxy.http.http_exchange import Receive, Scope, Send
from tests.helpers.proxy.proxy_app import HOST, Reply, app_of, ask, cookie_of, sign_in

KEY: Final = (b"x-api-key", b"sk-mine")
MODEL: Final = "a-name-to-leak"
POSTED: Final = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat"),
    *("/api/generate", "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize"),
    *("/api/show", "/chat/completions", "/completions", "/responses", "/v1/cache/prefill"),
)
PATHS: Final = (
    *("/v1/models", f"/v1/models/{MODEL}", "/models", "/v1/sessions", "/v1/cache", "/v1/doctor"),
    *("/health", "/health/ready", "/metrics", "/api/tags", "/chat/chat.js", "/", *POSTED),
    *("/v1/responses/resp_x", "/v1/cache/pins/x", "/nothing"),
    *("/chat/sign-in", "/chat/api/v1/models", "/chat/api/health", "/chat/api/v1/sessions"),
    *("/dashboard", "/dashboard/login", "/v1/embeddings", "/rerank", "/responses/compact"),
)
OWN: Final = (b"origin", b"http://127.0.0.1:4000")
CALLERS: Final[dict[str, tuple[tuple[bytes, bytes], ...]]] = {
    "nobody": (),
    "the key": (KEY,),
    "another key": ((b"x-api-key", b"sk-other"),),
    "its page": (OWN,),
    "another site's page": ((b"origin", b"http://attacker.test"), KEY),
    "a browser": ((b"accept", b"text/html"), (b"sec-fetch-site", b"cross-site")),
}
HOSTS: Final = (HOST, (b"host", b"evil.example"))


@pytest.fixture(scope="module")
def app() -> Iterator[ProxyApp]:
    with tempfile.TemporaryDirectory() as directory:
        settings = {"PROXY_API_KEY": "sk-mine", "PROXY_MODEL_ID": MODEL}
        yield app_of(Path(directory), **settings)


def as_sent(app: ProxyApp) -> Any:
    """Return the app behind a server that gives a path as uvicorn does: as sent, and unescaped."""

    async def edge(scope: Scope, receive: Receive, send: Send) -> None:
        sent = scope["path"]
        await app({**scope, "raw_path": sent.encode(), "path": unquote(sent)}, receive, send)

    return edge


@st.composite
def spelled(draw: Any) -> tuple[str, str]:
    """Return a path and another spelling of it, with slashes that count for nothing."""
    path = draw(st.sampled_from(PATHS))
    slashes = st.sampled_from(["/", "//", "///"])
    spelling = "".join(draw(slashes) if sign == "/" else sign for sign in path)
    if draw(st.booleans()):  # a letter that is escaped is the letter
        spelling = spelling.replace("a", "%61").replace("h", "%68")
    return path, spelling + draw(st.sampled_from(["", "/", "//"]))


def told(reply: Reply) -> tuple[int, list[str], bytes]:
    """Return what a client sees of a reply but ids and times."""
    content = re.sub(
        rb'"(created|request_id|id|[a-z_]*_s)":\s?("[^"]*"|[\d.]+)|_uptime_seconds [\d.]+',
        b"",
        reply.content,
    )
    return reply.status, [name for name in reply.headers if name != "content-length"], content


@given(
    spelled(),
    st.sampled_from(["GET", "POST", "DELETE", "HEAD"]),
    st.sampled_from(sorted(CALLERS)),
    st.sampled_from(HOSTS),
)
@example(("/v1/models", "/v1/models/"), "GET", "the key", HOST)
@example(("/v1/chat/completions", "//v1/chat/completions"), "POST", "the key", HOST)
def test_a_path_with_doubled_or_last_slashes_was_not_found(
    app: ProxyApp, paths: tuple[str, str], method: str, caller: str, host: tuple[bytes, bytes]
) -> None:
    edge, (path, spelling) = as_sent(app), paths
    if method == "DELETE":  # behind a last slash a name is missing: all is no answer to that
        spelling = spelling.rstrip("/") or "/"
    body = b'{"model": "no-such-model"}'  # nobody waits for a worker: the app outlives its loop
    length = (b"content-length", str(len(body)).encode())
    given_to = [
        ask(edge, method, each, length, *CALLERS[caller], host=host, body=body)
        for each in (path, spelling)
    ]
    assert told(given_to[0]) == told(given_to[1])


@given(
    st.lists(
        st.sampled_from(
            [
                *("/", "//", "%2f", "%2F", "..", ".", "%2e", "%2e%2e", "\\", ";", "v1", "models"),
                *("chat", "api", "health", "ready", "dashboard", "login", "chat.js", "sign-in"),
                *(MODEL, "%00"),
            ]
        ),
        max_size=9,
    ).map(lambda parts: "/" + "".join(parts)),
    st.sampled_from(["GET", "HEAD", "POST", "DELETE"]),
    st.sampled_from(["nobody", "another key", "its page", "a browser", "another site's page"]),
    st.sampled_from(HOSTS),
)
@example("/health/../v1/models", "GET", "nobody", HOST)
@example("/health//%2e%2e//v1/models", "GET", "nobody", HOST)
@example("/chat/api/%2Fv1/models", "GET", "nobody", HOST)
@example("/chat//api/..//../v1/models", "GET", "its page", HOST)
@example("/dashboard%2f..%2fv1/models", "GET", "a browser", HOST)
def test_no_spelling_of_a_path_opens_it_without_the_key(
    app: ProxyApp, path: str, method: str, caller: str, host: tuple[bytes, bytes]
) -> None:
    reply = ask(as_sent(app), method, path, *CALLERS[caller], host=host)
    assert MODEL.encode() not in reply.content or MODEL in path
    if reply.status == 200:
        plain = re.sub("/+", "/", path).rstrip("/") or "/"
        assert unquote(plain) in ("/", "/health", "/chat/api/health", "/chat/chat.js") or (
            plain.startswith(("/chat/sign-in", "/dashboard"))
        )
        assert host == HOST
    if host != HOST:
        assert reply.status in (401, 403)


def test_a_pages_cookie_opens_the_pages_calls_alone_in_any_spelling(app: ProxyApp) -> None:
    edge = as_sent(app)
    cookie = cookie_of(sign_in(edge, "/chat/sign-in", "sk-mine", OWN))

    def statuses(*headers: tuple[bytes, bytes], paths: tuple[str, ...]) -> set[int]:
        return {ask(edge, "GET", path, cookie, *headers).status for path in paths}

    calls = ("/chat/api/v1/models", "/chat//api//v1/models/", "//chat/api/v1//models")
    assert statuses(OWN, paths=calls) == {200}
    assert statuses(paths=calls) == {401}, "any page of this host may send the cookie along"
    assert statuses((b"sec-fetch-site", b"cross-site"), paths=calls) == {403}
    none = ("/v1/models", "//v1/models", "/v1/models/", f"/v1//models/{MODEL}", "/chat/apis//x")
    assert statuses(OWN, paths=none) == {401}
    lost = ("/chat/api/%2Fv1/models", "/chat/api/../v1/models", "/chat/api/chat/api/v1/models")
    assert statuses(OWN, paths=(*lost, "/chat/api//v1/sessions", "/chat/api//")) <= {401, 404}
    assert ask(edge, "POST", "/chat//api/v1/models/", cookie, OWN).status == 405


BODY: Final = b'{"model": "no-such-model", "messages": [], "prompt": "x", "input": "x"}'


@pytest.mark.parametrize("path", POSTED)
def test_a_body_that_begins_with_a_byte_order_mark_was_no_json(app: ProxyApp, path: str) -> None:
    plain, marked = (
        told(ask(app, "POST", path, KEY, body=body)) for body in (BODY, b"\xef\xbb\xbf" + BODY)
    )
    assert plain == marked


@given(spelled())
def test_a_key_is_checked_for_the_path_that_is_served(
    app: ProxyApp, paths: tuple[str, str]
) -> None:
    """A virtual key may be good for some paths only."""
    path, spelling = paths
    checked: list[str] = []

    async def identity(_: Any, headers: Any, path: str = "") -> str | None:
        checked.append(path)
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ApiKeyCheck, "identity", identity)
        for each in (path, spelling):
            ask(as_sent(app), "PUT", each, OWN)
    assert checked[: len(checked) // 2] == checked[len(checked) // 2 :]
    assert set(checked) <= {path, path.removeprefix("/chat/api"), ""}
