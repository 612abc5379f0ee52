"""A sign-in stands for its key, for a while, and as long as the key is accepted."""

import time
from typing import Any
from urllib.parse import urlencode

import pytest

from hearth.proxy.http.api_keys import ApiKeyCheck, Headers, sent_keys
from hearth.proxy.http.browser_pages import SIGN_IN_S, SIGN_INS_MAX, BrowserSignIns, form_key
from hearth.proxy.http.http_exchange import BodyBudget, HttpExchange
from hearth.shared.errors import RequestError


class ChangingKeys:
    """Accepts whatever is in `accepted` at the moment, as LiteLLM's database does."""

    def __init__(self, *accepted: bytes) -> None:
        self.accepted = set(accepted)
        self.asked: list[bytes] = []

    async def identity(self, headers: Headers, path: str = "") -> str | None:
        keys = list(sent_keys(headers))
        self.asked += keys
        if not self.accepted.intersection(keys):
            raise RequestError("no", status=401, code="invalid_api_key")
        return "owner"


def exchange_of(method: str, body: bytes = b"", cookie: bytes = b"") -> HttpExchange:
    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    headers = [(b"content-length", b"%d" % len(body)), (b"cookie", cookie)]
    scope = {"type": "http", "method": method, "path": "/chat/sign-in", "headers": headers}
    return HttpExchange(scope, receive, send, BodyBudget())


async def signed_in(sign_ins: BrowserSignIns, key: bytes) -> HttpExchange:
    """Sign in with `key`, and return a request with the cookie that is given for it."""
    form = exchange_of("POST", urlencode({"key": key}).encode())
    await sign_ins.sign_in(form, await form_key(form))
    return exchange_of("GET", cookie=form.reply_headers[0][1].partition(b";")[0])


async def test_sign_ins_are_bounded_for_each_key_and_run_out_while_the_machine_sleeps_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sign_ins, now = BrowserSignIns(4000, ChangingKeys(b"one", b"other")), time.time()

    other = await signed_in(sign_ins, b"other")
    ones = [await signed_in(sign_ins, b"one") for _ in range(SIGN_INS_MAX + 1)]
    assert len({each.headers["cookie"] for each in ones}) == SIGN_INS_MAX + 1
    known = [sign_ins.key_of(each) for each in ones]
    assert known == [None] + [b"one"] * SIGN_INS_MAX
    assert sign_ins.key_of(other) == b"other", "who signs in often ends nobody else's"
    assert ones[-1].headers["cookie"].partition("=")[2] not in repr(vars(sign_ins))
    monkeypatch.setattr(time, "time", lambda: now + SIGN_IN_S + 9)
    assert sign_ins.key_of(other) is sign_ins.key_of(ones[-1]) is None
    await signed_in(sign_ins, b"other")
    assert b"one" not in str(vars(sign_ins)).encode(), "forgotten at the next sign-in"


async def test_a_key_that_was_taken_back_opens_nothing_though_its_sign_in_holds() -> None:
    keys = ChangingKeys(b"sk-one")
    sign_ins = BrowserSignIns(4000, keys)

    known = await signed_in(sign_ins, b"sk-one")
    assert await sign_ins.identity(known) == "owner"
    assert sign_ins.key_of(known) == b"sk-one"
    keys.accepted.clear()
    with pytest.raises(RequestError, match="no"):
        await sign_ins.identity(known)
    assert keys.asked == [b"sk-one"] * 3, "it is asked after each time"


async def test_where_no_key_is_needed_none_is_kept_however_many_are_sent() -> None:
    form = exchange_of("POST", urlencode({"key": "whatever"}).encode())

    sign_ins = BrowserSignIns(4000, ApiKeyCheck(()))
    await sign_ins.sign_in(form, await form_key(form))
    assert form.reply_headers == []
