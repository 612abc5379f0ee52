"""Carries one call to LiteLLM's app, which runs in another thread, and its reply back.

The app's side waits while too much of the reply is not taken, so that a slow client slows the
cloud down and no reply piles up here. Leaving a call tells the app that its client is gone, and
cancels it soon after: the cloud's connection is closed.
"""

import asyncio
import contextlib
import dataclasses
import gc
import threading
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Final, Protocol

from hearth.proxy.gateway.cloud.cloud_failure import CloudFailure, failure_of
from hearth.proxy.gateway.cloud.error_events import ErrorEventRedactor
from hearth.proxy.gateway.config.config_secrets import Secrets
from hearth.proxy.http.http_exchange import App, AsgiMessage, RawHeaders, Scope

HELD_BYTES_MAX: Final = 64 * 1024  # of a reply between both threads
LEAVE_S: Final = 0.2  # for the app to see that its client is gone, before it is cancelled
COLLECT_S: Final = 0.25  # for what held a call to let go of it, and for others to be left too
ERROR_BYTES_MAX: Final = 256 * 1024  # of a refusal's body
_KEPT_HEADERS: Final = frozenset((b"content-type", b"cache-control", b"retry-after"))


class HookedCall(Protocol):
    """What LiteLLM's hooks know of a call, and where they leave the error of its reply."""

    failure: BaseException | None

    def enter(self) -> None:
        """Have the hooks find it in the current task."""


class _End:
    """The app has returned; `error` is what it raised."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


_Item = AsgiMessage | _End


class _Handoff:
    """Takes a reply's parts from the app's loop to ours. Owners: both threads, by the lock."""

    def __init__(self, ours: asyncio.AbstractEventLoop, apps: asyncio.AbstractEventLoop) -> None:
        self._ours, self._apps = ours, apps
        self._lock = threading.Lock()
        self._items: list[_Item] = []
        self._held_bytes = 0
        self._room: asyncio.Future[None] | None = None  # the app waits for it
        self._is_open = True
        self._arrived = asyncio.Event()  # of our loop

    def end(self, error: BaseException | None) -> None:
        """Let nothing follow what has come; the app goes on where it waits. On our loop."""
        items = self._taken(is_open=False)
        self._items = [*items, _End(error)]
        self._arrived.set()

    async def put(self, item: _Item) -> None:
        """Add a part; return when there is room for the next. Called on the app's loop."""
        if not self._is_open:
            await asyncio.sleep(0)  # an app that has all of its reply would never see that we left
            return
        size = 0 if isinstance(item, _End) else len(item.get("body", b""))
        room = None
        with self._lock:
            if not self._is_open:
                return
            is_first = not self._items
            self._items.append(item)
            self._held_bytes += size
            if size and self._held_bytes >= HELD_BYTES_MAX:
                room = self._room = self._apps.create_future()
        if is_first:
            with contextlib.suppress(RuntimeError):  # our loop is closed: nobody waits
                self._ours.call_soon_threadsafe(self._arrived.set)
        if room is not None:
            await room

    async def take(self) -> list[_Item]:
        """Return the parts that came, in order; none where the wake was late. On our loop."""
        await self._arrived.wait()
        return self._taken(is_open=True)

    def close(self) -> None:
        """Take nothing any more, and let the app go on where it waits. On our loop."""
        self._taken(is_open=False)

    def _taken(self, *, is_open: bool) -> list[_Item]:
        self._arrived.clear()
        with self._lock:
            items, self._items = self._items, []
            self._held_bytes = 0
            room, self._room = self._room, None
            self._is_open = is_open
        if room is not None:
            self._apps.call_soon_threadsafe(_release, room)
        return items


def _release(room: "asyncio.Future[None]") -> None:
    if not room.done():
        room.set_result(None)


class _AppSide:
    """Runs the app for one call. Owner: the app's loop."""

    def __init__(self, app: App, scope: Scope, body: bytes, handoff: _Handoff) -> None:
        self._app, self._scope = app, scope
        self._body: bytes | None = body
        self._handoff = handoff
        self._gone = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def begin(self, context: HookedCall) -> None:
        """Start the app in a task of its own."""
        self._task = asyncio.create_task(self._run(context), name="litellm call")

    def leave(self) -> None:
        """Tell the app that its client is gone; cancel it where it does not end by that."""
        self._gone.set()
        if self._task is not None and not self._task.done():
            asyncio.get_running_loop().call_later(LEAVE_S, self._task.cancel)

    async def _run(self, context: HookedCall) -> None:
        context.enter()
        error: BaseException | None = None
        try:
            await self._app(self._scope, self._receive, self._handoff.put)
        except asyncio.CancelledError as cancelled:
            error = cancelled
        except Exception as raised:  # what LiteLLM leaves unhandled ends this call alone
            error = raised
        await self._handoff.put(_End(error))
        if self._gone.is_set():
            # LiteLLM closes no Responses stream that was left between two chunks: the connection
            # to the cloud is closed when what is left of it is collected.
            _collect_soon(asyncio.get_running_loop())

    async def _receive(self) -> AsgiMessage:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}


_collecting: set[asyncio.AbstractEventLoop] = set()  # the app's loops that will


def _collect_soon(loop: asyncio.AbstractEventLoop) -> None:
    """Collect garbage once for all calls that are left at about one time. On the app's loop."""

    def collect() -> None:
        _collecting.discard(loop)
        gc.collect()

    if loop not in _collecting:
        _collecting.add(loop)
        loop.call_later(COLLECT_S, collect)


class CloudCall:
    """One call, as our side sees it. Use: `async with`, then `start`, then `chunks`.

    `failure` is set where `start` returned a status from 400 on, or where `chunks` ended early:
    a reply that broke off amid its stream, after what LiteLLM wrote of it. Owner: one task of ours.
    """

    def __init__(
        self,
        app: App,
        loop: asyncio.AbstractEventLoop,
        scope: Scope,
        body: bytes,
        context: HookedCall,
        secrets: Secrets,
    ) -> None:
        self.failure: CloudFailure | None = None
        self.is_complete = False  # LiteLLM has written its reply to the end
        self._loop = loop
        self._secrets = secrets
        self._redactor = ErrorEventRedactor(secrets)
        self._context = context
        self._handoff = _Handoff(asyncio.get_running_loop(), loop)
        self._side = _AppSide(app, scope, body, self._handoff)
        self._waiting: list[_Item] = []

    async def __aenter__(self) -> "CloudCall":
        self._loop.call_soon_threadsafe(self._side.begin, self._context)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._handoff.close()
        with contextlib.suppress(RuntimeError):  # its loop is closed: all its calls are
            self._loop.call_soon_threadsafe(self._side.leave)

    def break_off(self, error: BaseException) -> None:
        """End the reply by `error` for whoever reads it; what has come is read before."""
        self._handoff.end(error)

    async def start(self) -> tuple[int, RawHeaders]:
        """Return the status and the headers that a client may see.

        From 400 on, the reply is over and `failure` says what it was.
        """
        item = await self._next()
        if isinstance(item, _End):
            self.failure = self._failed(item.error, 0, b"")
            return self.failure.status, []
        status: int = item["status"]
        headers = [(k, v) for k, v in item["headers"] if k.lower() in _KEPT_HEADERS]
        if status >= 400:
            body = b"".join([part async for part in self._parts()])
            self.failure = self._failed(None, status, body[:ERROR_BYTES_MAX])
        return status, headers

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the reply's body as it comes, what came together as one."""
        async for part in self._parts():
            yield part

    async def _parts(self) -> AsyncIterator[bytes]:
        while True:
            part = bytearray()
            end = None
            for item in self._waiting or await self._handoff.take():
                if isinstance(item, _End):
                    end = item
                elif item["type"] == "http.response.body":
                    part += item.get("body", b"")
                    self.is_complete |= not item.get("more_body", False)
            self._waiting = []
            told = self._told(bytes(part), is_last=end is not None)
            if told:
                yield told
            if end is not None:
                has_failed = self._context.failure is not None or self._redactor.has_errors
                if has_failed or not self.is_complete:
                    self.failure = self._failed(end.error, 0, b"")
                return

    async def _next(self) -> _Item:
        while not self._waiting:
            self._waiting = await self._handoff.take()
        return self._waiting.pop(0)

    def _told(self, part: bytes, *, is_last: bool) -> bytes:
        """Return what is sent on of `part`, without secrets where it tells an error."""
        told = self._redactor.feed(part)
        if is_last:
            told += self._redactor.rest()
        return told if self._context.failure is None else self._secrets.redacted_bytes(told)

    def _failed(self, error: BaseException | None, status: int, body: bytes) -> CloudFailure:
        found = failure_of(self._context.failure or error, status, body)
        text = self._secrets.redacted(found.text)
        return dataclasses.replace(found, text=text)


def scope_of(path: str, headers: RawHeaders, body: bytes, state: dict[str, Any]) -> Scope:
    """Return the scope of a POST of `body` that comes with `headers` alone."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *headers,
        ],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
        "state": dict(state),
    }
