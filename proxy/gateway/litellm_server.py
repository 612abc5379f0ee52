"""Serves LiteLLM's proxy app and Router to Hearth's proxy, in LiteLLM's own process.

This module uses `app` and `llm_router` of LiteLLM's proxy module and the Router's public methods;
tests/unit/proxy/gateway/test_litellm_contract.py checks them.
"""

import asyncio
import contextlib
import faulthandler
import gc
import importlib
import logging
import math
import os
import signal
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Final, TypeVar

import litellm
import orjson
from litellm.proxy import proxy_server

from hearth.proxy.gateway import litellm_accounts
from hearth.proxy.gateway.cloud_failure import (
    STATUS_UNKNOWN,
    SWALLOWED,
    UNPROCESSABLE,
    CloudError,
    failure_of,
    is_redirect,
)
from hearth.proxy.gateway.config_file import ErrorEventRedactor, Secrets
from hearth.proxy.gateway.litellm_accounts import KeyedCall
from hearth.proxy.gateway.litellm_hooks import RoutedCall, current_call, routing_hook
from hearth.proxy.gateway.litellm_messages import HELD_BYTES_MAX, OVER_BUDGET, frame, read_frame
from hearth.proxy.gateway.refuse_redirects import refuse_redirects
from hearth.proxy.http.http_exchange import AsgiMessage
from hearth.shared.errors import RETRY_AFTER_S_MAX, RequestError

T = TypeVar("T")

LEAVE_S: Final = 0.2  # time for the app to notice a client's leaving, before its call is cancelled
COLLECT_S: Final = 0.25  # time from a cancelled call to the collection of its objects
CLOCK_READ_S: Final = 1.0  # a clock that is not read for 5 s stops: shared/suspending_clock.py
REFUSED: Final = 300  # statuses from here on are refusals; redirects are not followed
ERROR_BYTES_MAX: Final = 256 * 1024  # bytes of a refusal's body
TEXT_CHARS_MAX: Final = 2_000  # characters of an error's text, cut after secrets are masked
_LOGGERS: Final = ("LiteLLM", "LiteLLM Proxy", "LiteLLM Router")
SCHEMAS: Final = "litellm.litellm_core_utils.prompt_templates.common_utils"
SCHEMA_BYTES_MAX: Final = 1_000_000  # bytes of a schema with inlined references; takes 0.4 s of CPU
_KEPT_HEADERS: Final = frozenset((b"content-type", b"cache-control", b"retry-after"))


async def serve(options: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> None:
    """Serve until SIGTERM; then let LiteLLM's callbacks send what they buffer.

    `options` come from the proxy; `send` writes a message to the proxy.
    """
    stop = asyncio.Event()
    secrets = Secrets(frozenset(options["secrets"]))
    for name in _LOGGERS:  # loggers of broken answers, with tracebacks that hold prompts
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    # A schema with inlined references is limited to SCHEMA_BYTES_MAX. LiteLLM's code for
    # Gemini and Bedrock does not pass that parameter, so definitions that refer to one another
    # would fill all memory and block every other call meanwhile.
    schemas: Any = importlib.import_module(SCHEMAS)
    schemas.unpack_defs.__defaults__ = (SCHEMA_BYTES_MAX,)
    refuse_redirects()
    litellm.suppress_debug_info = True  # otherwise LiteLLM prints where to ask for help
    async with proxy_server.app.router.lifespan_context(proxy_server.app) as state:
        if proxy_server.llm_router is None:
            raise RuntimeError("LiteLLM made no router of the config.")
        routing_hook.on_usage = lambda usage: send({"usage": usage})
        server = _Server(secrets, dict(state or {}))
        await asyncio.start_unix_server(
            server.serve_connection, options["socket"], limit=HELD_BYTES_MAX
        )
        os.chmod(options["socket"], 0o600)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        gc.freeze()  # objects of imported modules stay, and are never collected
        gc.enable()
        send({"ready": True})
        while not stop.is_set():
            # A watchdog thread in C: LiteLLM searches a provider's error of megabytes for secrets
            # in one step, during which no Python code can run.
            faulthandler.dump_traceback_later(options["stall_s"], exit=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), CLOCK_READ_S)


class _Server:
    """Answers the proxy's questions, each connection in its own task. Owner: the event loop."""

    def __init__(self, secrets: Secrets, state: dict[str, Any]) -> None:
        """`state` comes from the app's lifespan."""
        self._secrets = secrets
        self._state = state

    async def serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer one connection until it closes, then release what its key has reserved."""
        booked: list[KeyedCall] = []
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                what, fields = orjson.loads(await read_frame(reader))
                if what == "call":
                    body = await read_frame(reader)
                    reply = _Reply(writer, RoutedCall(pinned=fields["deployment"]), self._secrets)
                    await _while_there(reader, self._call(reply, body, **fields), reply.gone)
                else:
                    work = self._result_of(what, fields, booked)
                    answer = await _while_there(reader, work, asyncio.Event())
                    writer.write(frame(orjson.dumps(answer)))
        writer.close()
        if booked:
            await litellm_accounts.give_back(booked.pop())

    async def _result_of(
        self, what: str, fields: dict[str, Any], booked: list[KeyedCall]
    ) -> dict[str, Any]:
        """Return the answer to any question but a call; `booked` has the connection's calls."""
        try:
            if what == "choose":
                return {"found": await self._choose(**fields)}
            if what == "owner":
                return {"found": await litellm_accounts.owner(**fields)}
            if what == "begin":
                booked.append(await litellm_accounts.begin(**fields))
            else:
                await litellm_accounts.log_answer(fields, booked.pop() if booked else None)
        except RequestError as error:
            return {"error": _error_fields(error, self._secrets)}
        except Exception as error:
            text = f"LiteLLM failed at this: {type(error).__name__}."
            return {"error": {"text": text, "status": 500, "code": "litellm_failed"}}
        return {"found": None}

    async def _choose(
        self, group: str, excluded: Collection[str], preferred: str, request: dict[str, Any]
    ) -> tuple[str, str, str]:
        """Return id, group and model of the deployment that the Router chooses for a request.

        The deployment is of another group if `group` is one of LiteLLM's own auto routers.

        Raises:
            RequestError: all deployments are excluded, cool down, or are over a limit or budget.
        """
        current_call.set(RoutedCall(excluded=excluded, preferred=preferred))
        router: Any = proxy_server.llm_router
        try:
            deployment = await router.async_get_available_deployment(
                model=group,
                request_kwargs=request,
                messages=request.get("messages"),
                input=request.get("input"),
            )
        except Exception as error:  # each kind of LiteLLM's errors means that none is available
            raise _no_deployment_error(error) from None
        return (
            str(deployment["model_info"]["id"]),
            deployment["model_name"],
            deployment["litellm_params"]["model"],
        )

    async def _call(
        self, reply: "_Reply", body: bytes, deployment: str, path: str, headers: list[list[str]]
    ) -> None:
        """Run LiteLLM's app on a POST of `body`."""
        current_call.set(reply.call)
        sent = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        scope = {
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
                *sent,
            ],
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
            "state": dict(self._state),
        }
        parts: list[AsgiMessage] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> AsgiMessage:
            if parts:
                return parts.pop()
            await reply.gone.wait()
            return {"type": "http.disconnect"}

        error: BaseException | None = None
        app: Any = proxy_server.app
        try:
            await app(scope, receive, reply.send)
        except Exception as raised:  # an unhandled error of LiteLLM ends this call alone
            error = raised
        reply.end(error)


class _Reply:
    """Forwards the app's reply to one call. Owner: the task of its connection.

    A refusal is sent as an error with its meaning. `drain` blocks the app while the proxy does not
    read, so that a slow client slows the cloud down and no reply piles up in memory.
    """

    def __init__(self, writer: asyncio.StreamWriter, call: RoutedCall, secrets: Secrets) -> None:
        self.call = call
        self.gone = asyncio.Event()  # the proxy has closed the connection
        self._writer = writer
        self._secrets = secrets
        self._redactor = ErrorEventRedactor(secrets)
        self._status = 0
        self._is_begun = False  # the head was sent to the proxy
        self._headers: list[tuple[str, str]] = []
        self._refusal = b""
        self._is_complete = False

    async def send(self, message: AsgiMessage) -> None:
        if self.gone.is_set():
            await asyncio.sleep(0)  # lets the app notice the disconnect
        elif message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = [
                (name.decode("latin-1"), value.decode("latin-1"))
                for name, value in message["headers"]
                if name.lower() in _KEPT_HEADERS
            ]
        else:
            part = message.get("body", b"")
            self._is_complete |= not message.get("more_body", False)
            if self._status < REFUSED and not self._is_begun:
                if part == b"null":  # LiteLLM's reply to a 422 with `drop_params`
                    self._status, part = UNPROCESSABLE, orjson.dumps({"error": SWALLOWED})
                elif is_redirect(self.call.failure):
                    self._status = STATUS_UNKNOWN
                else:
                    self._is_begun = True
                    self._put_json({"found": [self._status, self._headers]})
            if self._status >= REFUSED:
                self._refusal = (self._refusal + part)[:ERROR_BYTES_MAX]
            elif is_redirect(self.call.failure):
                self._is_complete = False  # the proxy's own error event names the remedy
            else:
                self._put(self._redactor.feed(part))
                with contextlib.suppress(ConnectionError):
                    await self._writer.drain()

    def end(self, error: BaseException | None) -> None:
        """Send how the reply ended; `error` is what the app raised."""
        if not self._is_begun:
            status = self._status if self._status >= REFUSED else 0
            self._put_json({"error": _error_fields(self._failure(error, status), self._secrets)})
            return
        self._put(self._redactor.rest())
        has_failed = self.call.failure or self._redactor.has_errors or not self._is_complete
        failed = _error_fields(self._failure(error, 0), self._secrets) if has_failed else None
        self._writer.write(frame(b""))
        self._put_json({"is_complete": self._is_complete, "error": failed})

    def _put(self, part: bytes) -> None:
        if part:
            has_failed = self.call.failure is not None
            self._writer.write(frame(self._secrets.redacted_bytes(part) if has_failed else part))

    def _put_json(self, message: dict[str, Any]) -> None:
        self._writer.write(frame(orjson.dumps(message)))

    def _failure(self, error: BaseException | None, status: int) -> CloudError:
        wait = dict(self._headers).get("retry-after", "")
        return failure_of(self.call.failure or error, status, self._refusal, wait)


def _error_fields(error: RequestError, secrets: Secrets) -> dict[str, Any]:
    """Return an error as JSON fields for the proxy."""
    names = ("status", "retry_after_s", "cause" if isinstance(error, CloudError) else "code")
    values = {name: getattr(error, name) for name in names}
    return values | {"text": secrets.redacted(str(error))[:TEXT_CHARS_MAX]}


async def _while_there(
    reader: asyncio.StreamReader, work: Coroutine[Any, Any, T], gone: asyncio.Event
) -> T:
    """Return the result of `work`; if the proxy disconnects, set `gone` and cancel `work`.

    Raises:
        ConnectionResetError: the proxy closed the connection.
    """
    task = asyncio.create_task(work)
    leaving = asyncio.create_task(reader.read(1))
    await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        gone.set()
        await asyncio.wait({task}, timeout=LEAVE_S)
        task.cancel()
        await asyncio.wait({task})
        # LiteLLM does not close a Responses stream that is cancelled between two chunks. Its
        # connection to the cloud closes only when its objects are collected.
        _collect_soon()
        raise ConnectionResetError
    leaving.cancel()
    await asyncio.wait({leaving})
    return task.result()


_collecting: set[asyncio.TimerHandle] = set()


def _collect_soon() -> None:
    """Collect garbage in COLLECT_S, once for all calls that are cancelled until then."""

    def collect() -> None:
        _collecting.clear()
        gc.collect()

    if not _collecting:
        _collecting.add(asyncio.get_running_loop().call_later(COLLECT_S, collect))


def _no_deployment_error(error: Exception) -> RequestError:
    """Return the error that the Router found no deployment; its text may hold secrets."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, litellm.ContextWindowExceededError):
        return RequestError(text, code="context_length_exceeded")
    if OVER_BUDGET in text.lower():
        return RequestError(f"over budget: {text}", status=503, code="over_budget")
    wait_s = min(RETRY_AFTER_S_MAX, math.ceil(getattr(error, "cooldown_time", 0.0))) or None
    return RequestError(text, status=503, code="no_deployment", retry_after_s=wait_s)
