"""Checks how a reply comes from an app in another thread: in order, held back, and cancelled."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from hearth.proxy.gateway.cloud.cloud_call import HELD_BYTES_MAX, CloudCall, scope_of
from hearth.proxy.gateway.config.config_secrets import Secrets
from hearth.shared.errors import RequestError

pytestmark = pytest.mark.process  # each loop has sockets
SECRET = "sk-0123456789abcdef"
App = Callable[[Any, Any, Any], Awaitable[None]]


class Context:
    """What a call's hooks would know."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.entered_in = ""

    def enter(self) -> None:
        self.entered_in = threading.current_thread().name


@pytest.fixture(scope="module")
def apps_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="apps")
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def call_of(app: App, loop: asyncio.AbstractEventLoop, context: Context | None = None) -> CloudCall:
    scope = scope_of("/v1/messages", [(b"x-a", b"1")], b"{}", {"s": 1})
    secrets = Secrets(frozenset({SECRET}))
    return CloudCall(app, loop, scope, b"{}", context or Context(), secrets)


async def start(send: Any, status: int = 200) -> None:
    headers = [(b"content-type", b"text/plain"), (b"x-litellm-model-api-base", b"http://secret")]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def body(send: Any, data: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


def test_a_reply_comes_whole_and_in_order(apps_loop: asyncio.AbstractEventLoop) -> None:
    seen: list[Any] = []
    context = Context()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend([scope, await receive(), threading.current_thread().name])
        await start(send)
        for number in range(2_000):
            await body(send, b"%d," % number)
        await body(send, b"end", more=False)

    async def talk() -> tuple[Any, bytes, CloudCall]:
        async with call_of(app, apps_loop, context) as call:
            begun = await call.start()
            return begun, b"".join([part async for part in call.chunks()]), call

    begun, data, call = asyncio.run(talk())
    assert begun == (200, [(b"content-type", b"text/plain")])
    assert data == b"".join(b"%d," % number for number in range(2_000)) + b"end"
    assert call.failure is None
    scope, request, thread = seen
    assert thread == context.entered_in == "apps"
    assert request == {"type": "http.request", "body": b"{}", "more_body": False}
    assert (b"x-a", b"1") in scope["headers"] and scope["state"] == {"s": 1}


def test_the_app_waits_while_nobody_takes_its_reply(apps_loop: asyncio.AbstractEventLoop) -> None:
    sent = 0
    part = b"x" * 8_192

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await start(send)
        for _ in range(100):
            await body(send, part)
            sent += 1
        await body(send, b"", more=False)

    async def talk() -> tuple[int, int]:
        async with call_of(app, apps_loop) as call:
            await call.start()
            await asyncio.sleep(0.1)
            early = sent
            return early, sum([len(part) async for part in call.chunks()])

    early, size = asyncio.run(talk())
    assert early * len(part) <= 2 * HELD_BYTES_MAX  # what `start` took, and what came since
    assert size == 100 * len(part)


def test_an_error_comes_with_its_status_and_without_secrets(
    apps_loop: asyncio.AbstractEventLoop,
) -> None:
    context = Context()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        context.failure = ValueError("x")
        await start(send, 503)
        await body(send, b'{"error": {"message": "wrong key %s"}}' % SECRET.encode(), more=False)

    async def talk() -> tuple[int, CloudCall]:
        async with call_of(app, apps_loop, context) as call:
            status, _ = await call.start()
            return status, call

    status, call = asyncio.run(talk())
    assert status == 503 and call.failure is not None
    assert (call.failure.text, call.failure.name) == ("wrong key ***", "ValueError")


def test_an_app_that_raises_before_a_reply_is_an_error(
    apps_loop: asyncio.AbstractEventLoop,
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError(f"a bug with {SECRET}")

    async def talk() -> tuple[int, CloudCall]:
        async with call_of(app, apps_loop) as call:
            return (await call.start())[0], call

    status, call = asyncio.run(talk())
    assert status == 502 and call.failure is not None
    assert (call.failure.kind, call.failure.text) == ("error", "a bug with ***")


@pytest.mark.parametrize("raises", [True, False])
def test_a_reply_that_breaks_off_is_told_after_what_came(
    apps_loop: asyncio.AbstractEventLoop, raises: bool
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await start(send)
        await body(send, b"half")
        if raises:
            raise RuntimeError("cut")

    async def talk() -> tuple[bytes, CloudCall]:
        async with call_of(app, apps_loop) as call:
            await call.start()
            return b"".join([part async for part in call.chunks()]), call

    data, call = asyncio.run(talk())
    assert data == b"half" and call.failure is not None
    assert call.failure.text == ("cut" if raises else "no answer came")


def test_what_a_broken_stream_says_is_without_secrets(
    apps_loop: asyncio.AbstractEventLoop,
) -> None:
    context = Context()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await start(send)
        context.failure = ValueError(f"the cloud said {SECRET}")
        await body(send, b"data: the cloud said " + SECRET.encode(), more=False)

    async def talk() -> tuple[bytes, CloudCall]:
        async with call_of(app, apps_loop, context) as call:
            await call.start()
            return b"".join([part async for part in call.chunks()]), call

    data, call = asyncio.run(talk())
    assert data == b"data: the cloud said ***"
    assert call.failure is not None and call.failure.text == "the cloud said ***"


@pytest.mark.parametrize("heeds", ["disconnect", "cancel", "room", "nothing"])
def test_leaving_a_call_ends_the_app(apps_loop: asyncio.AbstractEventLoop, heeds: str) -> None:
    ended = threading.Event()
    ran_out: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await receive()
            await start(send)
            if heeds == "disconnect":
                assert (await receive())["type"] == "http.disconnect"
            elif heeds == "cancel":
                await asyncio.sleep(60)
            for _ in range(5_000_000):  # so that the test ends where it fails
                await body(send, b"x" * HELD_BYTES_MAX)
                if heeds == "disconnect":
                    return
                if heeds == "room":
                    await asyncio.sleep(0)
            ran_out.append(heeds)
        finally:
            ended.set()

    async def talk() -> None:
        async with call_of(app, apps_loop) as call:
            await call.start()
            await asyncio.sleep(0.05)
        await asyncio.to_thread(ended.wait, 30)  # by itself it would take a minute

    asyncio.run(talk())
    assert ended.is_set() and not ran_out


def test_a_caller_that_is_cancelled_leaves_its_call(apps_loop: asyncio.AbstractEventLoop) -> None:
    ended = threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        assert (await receive())["type"] == "http.disconnect"
        ended.set()

    async def wait() -> None:
        async with call_of(app, apps_loop) as call:
            await call.start()

    async def talk() -> bool:
        task = asyncio.create_task(wait())
        await asyncio.sleep(0.05)
        task.cancel()
        return await asyncio.to_thread(ended.wait, 5)

    assert asyncio.run(talk())


@pytest.mark.parametrize("place", ["before the head", "amid the text", "behind the end"])
def test_a_call_that_is_broken_off_ends_at_once_behind_what_has_come(
    apps_loop: asyncio.AbstractEventLoop, place: str
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if place != "before the head":
            await start(send)
            await body(send, b"half", more=place == "amid the text")
        while place != "behind the end" and (await receive())["type"] != "http.disconnect":
            pass

    async def talk() -> tuple[int, bytes, CloudCall]:
        async with call_of(app, apps_loop) as call:
            await asyncio.sleep(0.05)
            call.break_off(RequestError("The server is shutting down.", status=503))
            status, _ = await call.start()
            data = b"" if call.failure else b"".join([part async for part in call.chunks()])
            return status, data, call

    status, data, call = asyncio.run(asyncio.wait_for(talk(), 5))
    if place == "behind the end":
        assert (status, data, call.failure) == (200, b"half", None)
        return
    assert (status, data) == ((503, b"") if place == "before the head" else (200, b"half"))
    assert call.failure is not None and call.failure.kind == "error"
    assert (call.failure.status, call.failure.text) == (503, "The server is shutting down.")


def test_an_error_event_is_a_failure_although_the_app_ends_its_reply(
    apps_loop: asyncio.AbstractEventLoop,
) -> None:
    """LiteLLM passes Anthropic's streams on, and tells its hooks nothing of an error in them."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await start(send)
        await body(send, b"data: {}\n\n")
        await body(send, b'event: error\ndata: {"type": "error"}\n\n', more=False)

    async def talk() -> CloudCall:
        async with call_of(app, apps_loop) as call:
            await call.start()
            assert b"".join([part async for part in call.chunks()]).count(b"\n\n") == 2
            return call

    call = asyncio.run(talk())
    assert call.is_complete and call.failure is not None
