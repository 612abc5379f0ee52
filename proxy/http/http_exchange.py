"""Carries one HTTP exchange: reads its body within limits, watches its client, replies once.

Large bodies are parsed in threads, so that the event loop goes on serving small ones. Python code
in such a thread shares the interpreter with the event loop. A single C call on a body keeps the
interpreter, but only for tenths of a second, since bodies are limited.
"""

import asyncio
import contextlib
import functools
import re
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, unquote

import orjson

from hearth.proxy.http.http1_protocol import CONNECTION, Http1Protocol
from hearth.proxy.http.strict_json import parse_object
from hearth.shared.errors import Overloaded, RequestError

AsgiMessage = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
RawHeaders = list[tuple[bytes, bytes]]
T = TypeVar("T")

SERVED_BY_HEADER: Final = b"x-hearth-served-by"  # names the model that answered
BODY_BYTES_MAX: Final = 64 * 1024 * 1024
BODY_WAIT_S_MAX: Final = 120.0
DRAIN_BYTES_MAX: Final = 4 * BODY_BYTES_MAX  # read past the limit so that the client sees the 413
DRAIN_WAIT_S_MAX: Final = 10.0
BODIES_BYTES_MAX: Final = 512 * 1024 * 1024  # bytes of the bodies of all open requests
SMALL_BYTES_MAX: Final = 256 * 1024  # a body parsed on the event loop, in some 10 ms
MIDDLE_BYTES_MAX: Final = 4 * 1024 * 1024  # an agent's body, which never waits for a larger one
EVENT_STREAM: Final = b"text/event-stream; charset=utf-8"
_SLASHES: Final = re.compile("/+")
_STREAMED: Final = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]

# One thread per size: with two busy threads the event loop gets a third of the interpreter.
_middle: Final = ThreadPoolExecutor(1, "bodies")
_large: Final = ThreadPoolExecutor(1, "large-bodies")


async def work_on_body(size: int, work: Callable[[], T]) -> T:
    """Return the result of `work` on a body of `size` bytes; large bodies go to a thread.

    If the caller is cancelled, `work` does not start; if it has started, it runs to its end.
    """
    if size <= SMALL_BYTES_MAX:
        return work()
    thread = _middle if size <= MIDDLE_BYTES_MAX else _large
    return await asyncio.get_running_loop().run_in_executor(thread, work)


class BodyBudget:
    """Counts the bytes of the bodies and images of all requests until each request ends.

    Invariant: 0 <= bytes_held <= BODIES_BYTES_MAX. Owner: the event loop.
    """

    def __init__(self) -> None:
        self.bytes_held = 0

    def check(self, count: int) -> None:
        """Raise Overloaded if `count` more bytes are over the budget now."""
        if self.bytes_held + count > BODIES_BYTES_MAX:
            raise Overloaded(
                f"The requests that are being served hold {self.bytes_held:,} bytes of bodies and "
                f"images, and this server holds {BODIES_BYTES_MAX:,} at once; {count:,} more have "
                "no room. Try again in a few seconds, or send less."
            )

    def take(self, count: int) -> None:
        """Reserve `count` bytes more. Raises: Overloaded."""
        assert count >= 0, count
        self.check(count)
        self.bytes_held += count

    def give_back(self, count: int) -> None:
        self.bytes_held -= count
        assert self.bytes_held >= 0, self.bytes_held


@dataclass(frozen=True, slots=True)
class ClientBody:
    """The JSON object that a client sent, and its size in bytes."""

    fields: dict[str, Any]
    size: int


class ClientGone(RequestError):
    """The client closed its connection, so no answer can be read."""

    def __init__(self) -> None:
        super().__init__("The client is gone.", status=499, code="client_closed")


class HttpExchange:
    """One request and its one reply. Owner: the task that serves it.

    Invariant: a reply starts at most once, and nothing is sent after its end.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, budget: BodyBudget) -> None:
        """`budget` is shared by all requests; the bytes of this one count until `end`."""
        self.scope = scope
        self.request_id = uuid.uuid4().hex
        self.method: str = scope["method"]
        self.path = _route(scope)
        self.raw_headers: RawHeaders = list(scope["headers"])
        self.headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in self.raw_headers}
        self.query = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))
        self.reply_headers: RawHeaders = []  # added to every reply
        self.late_headers: Callable[[], RawHeaders] = list  # headers made when the reply starts
        self.is_trusted = False  # the request came with an accepted key, or needs none
        self.listed_origin: str | None = None  # the request's Origin, if CORS_ORIGINS lists it
        self._connection: Http1Protocol | None = scope.get("state", {}).get(CONNECTION)
        self.is_anthropic = (  # refusals take Anthropic's form
            self.path.startswith("/v1/messages") or "anthropic-version" in self.headers
        )
        self.has_started = False
        self._client_was_there = False  # the client was there when the reply began
        self._has_ended = False  # all of the reply was sent
        self.is_counted = False  # the request's end is in the metrics
        # Counts the request at its end. The gateway drops the count (`pop_all`) if another
        # deployment answers instead.
        self.counting = contextlib.ExitStack()
        self._has_body = False  # the body was read to its end
        self._budget = budget
        self._held_bytes = 0  # bytes reserved in the budget
        self.gone = asyncio.Event()
        self._receive = receive
        self._send = send
        self._watcher: asyncio.Task[None] | None = None

    def keep_slot(self) -> None:
        """Keep the connection open even if slots run out: the request has an accepted key."""
        if self._connection is not None:
            self._connection.trust()

    # -------------------------------------------------- the request

    async def read_object(self) -> ClientBody:
        """Return the body, a JSON object. Raises: as `read_body` and `parse_object`."""
        octets = await self.read_body(BODY_BYTES_MAX)
        fields = await self.work_on_body(len(octets), functools.partial(parse_object, octets))
        return ClientBody(fields, len(octets))

    async def work_on_body(self, size: int, work: Callable[[], T]) -> T:
        """Return the result of `work` on a body of `size` bytes, while the client is there."""
        working = work_on_body(size, work)
        return await (self.while_connected(working) if size > SMALL_BYTES_MAX else working)

    async def read_body(self, bytes_max: int) -> bytes:
        """Return the whole body.

        Raises:
            RequestError: the body is over `bytes_max`, compressed, slower than BODY_WAIT_S_MAX,
                or over the budget of all bodies, or the client has gone.
        """
        if self.headers.get("content-encoding", "identity") != "identity":
            raise RequestError(
                f"Content-Encoding {self.headers['content-encoding']!r:.40} is not supported; "
                "send the body uncompressed.",
                status=415,
                code="unsupported_encoding",
            )
        size = int(self.headers.get("content-length", 0))  # digits: see http1_protocol
        if size > bytes_max:
            raise _too_long(f"{size:,}", bytes_max)
        self._budget.check(size)  # reserved only as bytes arrive, not for an announced length
        try:
            async with asyncio.timeout(BODY_WAIT_S_MAX):
                return await self._read(bytes_max)
        except TimeoutError:
            raise RequestError(
                f"The body did not arrive within {BODY_WAIT_S_MAX:g} s.",
                status=408,
                code="body_timeout",
            ) from None

    def hold(self, count: int) -> None:
        """Reserve `count` bytes more of the budget, until `end`. Raises: Overloaded."""
        self._budget.take(count)
        self._held_bytes += count

    def _release_budget(self) -> None:
        """Release all bytes that this request has reserved."""
        self._budget.give_back(self._held_bytes)
        self._held_bytes = 0

    async def _read(self, kept_max: int) -> bytes:
        """Return the body. Raises: RequestError: it is over `kept_max`; nothing stays reserved."""
        chunks: list[bytes] = []
        size, more = 0, True
        while more and size <= DRAIN_BYTES_MAX:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone()
            chunk = message.get("body", b"")
            size += len(chunk)
            if size <= kept_max:
                self.hold(len(chunk))
                chunks.append(chunk)
            else:
                chunks.clear()
                self._release_budget()
            more = message.get("more_body", False)
        self._has_body = not more
        if size > kept_max:
            raise _too_long(f"{size:,}" if not more else f"over {size:,}", kept_max)
        return b"".join(chunks)

    async def drain(self) -> None:
        """Read and drop the rest of the body, since a client that still sends sees no reply."""
        self._release_budget()
        if not self._has_body and self._watcher is None:
            with contextlib.suppress(RequestError, TimeoutError):
                async with asyncio.timeout(DRAIN_WAIT_S_MAX):
                    await self._read(0)

    async def while_connected(self, work: Awaitable[T]) -> T:
        """Return the result of `work`; cancel `work` if the client goes away first.

        When this returns, `work` has ended, unless the caller was cancelled meanwhile.

        Raises:
            CancelledError: the caller was cancelled, whatever else happened meanwhile.
            ClientGone: the client has gone. And whatever `work` raises.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._watch()}, return_when=asyncio.FIRST_COMPLETED)
            is_gone = not task.done()
        finally:
            # Awaiting the task itself would mix up the task's cancellation with the caller's. The
            # callback reads the task's exception, so that asyncio does not log it.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        error = None if task.cancelled() else task.exception()
        if is_gone and (error is None or isinstance(error, RequestError)):
            raise ClientGone()
        return task.result()

    def on_disconnect(self, action: Callable[[], None]) -> None:
        """Call `action` when the client goes away, or at once if it has gone."""
        self._watch().add_done_callback(lambda _: action())

    def _watch(self) -> asyncio.Task[None]:
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._until_gone())
        return self._watcher

    async def _until_gone(self) -> None:
        """Return once the client has gone; the body must have been read before."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone.set()

    def end(self) -> None:
        """Count the request unless that was done, stop watching the client, release the budget."""
        self.counting.close()
        self._release_budget()
        if self._watcher is not None:
            self._watcher.cancel()

    # -------------------------------------------------- the reply

    async def start(self, status: int, headers: RawHeaders) -> None:
        assert not self.has_started, self.path
        self.has_started = True
        self._client_was_there = not self.gone.is_set()
        headers = [*headers, *self.reply_headers, *self.late_headers()]
        if self._connection is not None:
            kind = next((value for name, value in headers if name == b"content-type"), b"")
            self._connection.streams_events = kind.startswith(b"text/event-stream")
            if status == 401 or self._connection.slots.are_full:
                headers.append((b"connection", b"close"))  # frees the slot for another client
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def body(self, chunk: bytes, *, more: bool) -> None:
        assert self.has_started and not self._has_ended, (self.path, self.has_started)
        if self.method == "HEAD":
            chunk = b""
        await self._send({"type": "http.response.body", "body": chunk, "more_body": more})
        self._has_ended = not more

    @property
    def broken_by(self) -> RequestError | None:
        """Return why the reply is incomplete; None if it is complete, as far as is known.

        A client that leaves amid a stream counts as served: clients hang up at the last event.
        """
        if self.gone.is_set() and not self._client_was_there:
            return ClientGone()
        if self._has_ended or self.gone.is_set():
            return None
        return RequestError("The reply broke off.", status=500, code="internal_error")

    async def send_json(self, status: int, value: Any, headers: RawHeaders | None = None) -> None:
        await self.send_whole(status, orjson.dumps(value), b"application/json", headers)

    async def send_whole(
        self, status: int, content: bytes, kind: bytes, headers: RawHeaders | None = None
    ) -> None:
        """Send `content`, of the media type `kind`."""
        await self.send_parts(status, [content], kind, headers)

    async def send_parts(
        self, status: int, parts: Sequence[bytes], kind: bytes, headers: RawHeaders | None = None
    ) -> None:
        """Send the content in `parts`, each once the client has taken the previous ones."""
        length = b"%d" % sum(map(len, parts))
        fixed = [(b"content-type", kind), (b"content-length", length)]
        await self.start(status, fixed + (headers or []))
        for index, part in enumerate(parts, 1):
            await self.body(part, more=index < len(parts))

    async def send_events(
        self,
        frames: AsyncGenerator[bytes, None],
        wait_s: float | None = None,
        kind: bytes = EVENT_STREAM,
    ) -> None:
        """Send `frames` as a stream of the media type `kind`, and always close the generator.

        Raises:
            TimeoutError: the client has not taken a frame within `wait_s`.
        """
        await self.start(200, [(b"content-type", kind), *_STREAMED])
        send: Callable[[bytes], Awaitable[None]] = functools.partial(self.body, more=True)
        if self._connection is not None and self._connection.takes_parts and self.method != "HEAD":
            send = self._connection.send_part
        async with contextlib.aclosing(frames):
            async for frame in frames:
                if wait_s is None:
                    await send(frame)
                    continue
                async with asyncio.timeout(wait_s):
                    await send(frame)
        await self.body(b"", more=False)


def _route(scope: Scope) -> str:
    """Return the request's path in the form that routes use.

    Slashes in a row count as one, and one at the end is dropped; %2F is part of a name. A DELETE
    keeps its last slash, so that a missing name deletes nothing.
    """
    raw = scope.get("raw_path")
    path = _SLASHES.sub("/", scope["path"] if raw is None else raw.decode("latin-1"))
    path = path if scope["method"] == "DELETE" else path.rstrip("/") or "/"
    return path if raw is None else unquote(path)


def _too_long(measured: str, bytes_max: int) -> RequestError:
    return RequestError(
        f"The body is {measured} bytes and this server accepts {bytes_max:,}. Send less.",
        status=413,
        code="body_too_large",
    )


def wrong_method(exchange: HttpExchange, allowed: str) -> RequestError:
    """Return the 405 for `exchange`, and add the header `allow` to its reply."""
    exchange.reply_headers.append((b"allow", allowed.encode()))
    return RequestError(
        f"{exchange.path:.120} takes {allowed}, not {exchange.method:.20}.",
        status=405,
        code="method_not_allowed",
    )
