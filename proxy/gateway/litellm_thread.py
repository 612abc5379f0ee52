"""Runs LiteLLM's proxy app and Router in a thread and an event loop of their own.

Its import takes seconds, its jobs and callbacks go on for as long as it runs, and none of that may
hold our event loop up. Used of it are `app` and `llm_router` of its proxy's module, and the
Router's public methods; tests/unit/proxy/gateway/test_litellm_contract.py holds it to them.
"""

import asyncio
import contextlib
import gc
import importlib
import io
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from hearth.proxy.gateway.cloud.cloud_call import CloudCall, scope_of
from hearth.proxy.gateway.config.config_secrets import Secrets
from hearth.proxy.gateway.config.merged_config import HOOKS, environment, merged_config
from hearth.proxy.gateway.config.routing_table import Cause, Deployment, RoutingTable
from hearth.proxy.http.http_exchange import RawHeaders
from hearth.shared.errors import RETRY_AFTER_S_MAX, RequestError

log = logging.getLogger(__name__)

CONFIG_NAME: Final = "litellm.yaml"
READY_S_MAX: Final = 60.0  # that a request waits for it to be loaded
CHOICE_S_MAX: Final = 10.0  # for its Router, which counts long prompts; a callback may hold it up
CLOSE_S_MAX: Final = 3.0  # for its callbacks to send what they hold
CANCEL_S_MAX: Final = 1.0  # for what ran on its loop when that ended
REASON_CHARS_MAX: Final = 500
_LOGGERS: Final = ("LiteLLM", "LiteLLM Proxy", "LiteLLM Router")
SCHEMAS: Final = "litellm.litellm_core_utils.prompt_templates.common_utils"
SCHEMA_BYTES_MAX: Final = 1_000_000  # of JSON that is put in place; 0.4 s of CPU
OVER_BUDGET: Final = "crossed budget"  # as RouterErrors has it
T = TypeVar("T")


class NoDeployment(Exception):
    """No deployment of a group may answer now; the text says why, without secrets."""

    def __init__(self, reason: str, cause: Cause = "error", retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.cause = cause
        self.retry_after_s = retry_after_s


class LiteLLMUnavailable(RequestError):
    """LiteLLM could not be started, or not yet, or has ended: nothing is answered through it."""

    def __init__(self, reason: str, retry_after_s: int | None = None) -> None:
        super().__init__(
            reason,
            status=503,
            code="gateway_unavailable",
            retry_after_s=retry_after_s,
        )


class LiteLLMThread:
    """LiteLLM, from its import to its end. Owner: our event loop, which calls every method.

    Invariant: what is under `_server` and `_hooks` is touched in the thread alone.
    """

    def __init__(
        self,
        table: RoutingTable,
        directory: Path,
        make_loop: Callable[[], asyncio.AbstractEventLoop],
        log_level: str = "info",
    ) -> None:
        """`directory` is private; `make_loop` gives the loop that LiteLLM runs on."""
        self.failure = ""  # a sentence: why it cannot be used, without secrets
        self.started_s = 0.0  # what its start took
        self._table = table
        self._path = directory / CONFIG_NAME
        self._log_level = log_level
        self._is_ready = asyncio.Event()
        self._calls: weakref.WeakSet[CloudCall] = weakref.WeakSet()
        self._refusal = ""  # a sentence: why no call is begun any more
        self._ours: asyncio.AbstractEventLoop | None = None
        self._loop = make_loop()
        self._thread = threading.Thread(target=self._work, name="litellm", daemon=True)
        self._stop: asyncio.Event | None = None
        self._server: Any = None
        self._hooks: Any = None
        self._state: dict[str, Any] = {}

    def start(self) -> None:
        """Begin to import LiteLLM; returns at once. Changes this process's environment."""
        self._ours = asyncio.get_running_loop()
        self._thread.start()

    @property
    def is_usable(self) -> bool:
        return self._is_ready.is_set() and not self.failure

    async def ready(self) -> None:
        """Wait until LiteLLM can be asked.

        Raises:
            LiteLLMUnavailable: it never can, or not within READY_S_MAX.
        """
        try:
            async with asyncio.timeout(READY_S_MAX):
                await self._is_ready.wait()
        except TimeoutError:
            text = f"LiteLLM is still loading after {READY_S_MAX:g} s. Local models are served."
            raise LiteLLMUnavailable(text, RETRY_AFTER_S_MAX) from None
        if self.failure:
            raise LiteLLMUnavailable(self.failure)

    def end_calls(self, reason: str) -> None:
        """End each call with an error, and let none begin; `reason` is a sentence."""
        self._refusal = reason
        if not self._is_ready.is_set():
            self._told(reason)  # whoever waits for it has waited enough
        for call in tuple(self._calls):
            call.break_off(LiteLLMUnavailable(reason))

    async def close(self) -> None:
        """End LiteLLM, and wait a little for what its callbacks still hold."""
        stop = self._stop
        if stop is None or not self._thread.is_alive():
            return
        with contextlib.suppress(RuntimeError):  # its loop has just ended
            self._loop.call_soon_threadsafe(stop.set)
        if self.is_usable:  # else it was told nothing that it could hold
            await asyncio.to_thread(self._thread.join, CLOSE_S_MAX)

    async def run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what `make()` returns when awaited on LiteLLM's loop.

        Raises: LiteLLMUnavailable
        """
        await self.ready()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(make(), self._loop))

    async def choose(
        self,
        group: str,
        *,
        excluded: Collection[str] = (),
        preferred: str = "",
        request_kwargs: Mapping[str, Any] | None = None,
    ) -> Deployment:
        """Return the deployment of `group` that LiteLLM's Router takes for a request.

        `excluded` are ids that were tried, `preferred` is taken where it is healthy.
        `request_kwargs` is what LiteLLM's routing looks at: messages or input, metadata (tags,
        user_api_key_team_id), session ids.

        Raises:
            NoDeployment: all of them are excluded, cool down, or are over a limit or a budget.
            LiteLLMUnavailable: also where it has not chosen within CHOICE_S_MAX.
        """
        asked = dict(request_kwargs or {})
        await self._open()
        try:
            async with asyncio.timeout(CHOICE_S_MAX):
                return await self.run(
                    lambda: self._choose(group, frozenset(excluded), preferred, asked)
                )
        except TimeoutError:
            text = f"LiteLLM has chosen no deployment within {CHOICE_S_MAX:g} s."
            raise LiteLLMUnavailable(text, RETRY_AFTER_S_MAX) from None

    async def call(
        self, deployment: Deployment, path: str, body: bytes, headers: RawHeaders
    ) -> CloudCall:
        """Return a call of `deployment`, which begins when it is entered.

        The body's model is `deployment.group`. `headers` are all that the app sees of the client's;
        where LiteLLM checks keys, the client's key is among them.

        Raises: LiteLLMUnavailable
        """
        await self._open()
        routed = self._hooks.RoutedCall(pinned=deployment.id)
        if not self._table.checks_keys:
            token = (b"authorization", b"Bearer " + self._hooks.app_token.encode())
            headers = [*((k, v) for k, v in headers if k.lower() != b"authorization"), token]
        call = CloudCall(
            self._server.app,
            self._loop,
            scope_of(path, headers, body, self._state),
            body,
            routed,
            self._table.secrets,
        )
        self._calls.add(call)
        return call

    async def _open(self) -> None:
        """Wait until calls may begin. Raises: LiteLLMUnavailable"""
        await self.ready()
        if self._refusal:
            raise LiteLLMUnavailable(self._refusal)

    async def _choose(
        self, group: str, excluded: frozenset[str], preferred: str, asked: dict[str, Any]
    ) -> Deployment:
        self._hooks.RoutedCall(excluded=excluded, preferred=preferred).enter()
        messages, asked_input = asked.get("messages"), asked.get("input")
        try:
            row = await self._server.llm_router.async_get_available_deployment(
                model=group, request_kwargs=asked, messages=messages, input=asked_input
            )
        except Exception as error:  # each kind of LiteLLM's means that none can be had
            raise self._none_for(error) from None
        found = self._table.deployment(group, str(row["model_info"]["id"]))
        if found is not None:
            return found
        # It is of another group where the list has a router of LiteLLM's own (auto_router/...).
        model = row["litellm_params"]["model"]
        return Deployment(str(row["model_info"]["id"]), row["model_name"], model)

    def _none_for(self, error: Exception) -> NoDeployment:
        reason = self._reason(error)
        if OVER_BUDGET in reason.lower():
            return NoDeployment(f"over budget: {reason}")
        if type(error).__name__ == "ContextWindowExceededError":
            return NoDeployment(reason, "context_window")
        return NoDeployment(reason, retry_after_s=getattr(error, "cooldown_time", 0.0))

    def _reason(self, error: BaseException) -> str:
        """Return the first line of an error, without secrets."""
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return self._table.redacted(first)[:REASON_CHARS_MAX]

    # What follows runs in the thread.

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:  # a config may make it raise anything, SystemExit too
            self._path.unlink(missing_ok=True)
            what = "has ended" if self.started_s else "could not be started with LITELLM_CONFIG"
            reason = self._reason(error).removesuffix(".")
            told = f"LiteLLM {what}: {type(error).__name__}: {reason}."
            self._tell(f"{told} Local models are served.")
        finally:
            self._path.unlink(missing_ok=True)
            with contextlib.suppress(BaseException):  # what is left may raise the same
                self._loop.run_until_complete(_cancel_all())

    async def _serve(self) -> None:
        begun = time.monotonic()
        self._stop = asyncio.Event()
        self._load()
        app = self._server.app
        async with contextlib.AsyncExitStack() as stack:
            with printing_nothing(threading.get_ident()):
                lifespan = app.router.lifespan_context(app)
                self._state = await stack.enter_async_context(lifespan) or {}
            self._path.unlink(missing_ok=True)  # it was read, and it holds keys
            if self._server.llm_router is None:
                raise RuntimeError("LiteLLM made no router of the config.")
            self.started_s = time.monotonic() - begun
            self._tell("")
            await self._stop.wait()

    def _load(self) -> None:
        """Import LiteLLM with its environment and the merged config in place."""
        wanted = environment(self._table)
        for name in os.environ.keys() - wanted.keys():
            del os.environ[name]
        os.environ.update(wanted)
        # The user's own callbacks lie beside the user's file, which LiteLLM is not given.
        sys.path.append(str(self._table.config.path.resolve().parent))
        _quieten(self._log_level, self._table.secrets)
        with without_collecting(), printing_nothing(threading.get_ident()):
            self._hooks = importlib.import_module(HOOKS)
            self._server = importlib.import_module("litellm.proxy.proxy_server")
            litellm: Any = importlib.import_module("litellm")
            litellm.suppress_debug_info = True  # it prints where to ask for help
            _limit_schemas()
            from hearth.proxy.gateway.refuse_redirects import refuse_redirects  # imports httpx

            refuse_redirects()
        text = json.dumps(merged_config(self._table, self._hooks.app_token))  # JSON is YAML
        _write_private(self._path, text)
        os.environ["CONFIG_FILE_PATH"] = str(self._path)

    def _tell(self, failure: str) -> None:
        """Let our loop know that LiteLLM can be used, or why not."""
        if failure:
            log.error("%s", failure)
        else:
            log.info("LiteLLM is ready wall_s=%.1f", self.started_s)
        assert self._ours is not None
        with contextlib.suppress(RuntimeError):  # our loop is closed: the server has ended
            self._ours.call_soon_threadsafe(self._told, failure)

    def _told(self, failure: str) -> None:
        self.failure = self.failure or failure
        self._is_ready.set()
        if failure and not self._refusal:
            self.end_calls(failure)


async def _cancel_all() -> None:
    """Cancel what else runs on this loop, so that connections to clouds are closed."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=CANCEL_S_MAX)


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Collect no garbage within, and never again look through what was made.

    Modules make hundreds of thousands of objects that all stay: looking through them takes a
    quarter of the time that LiteLLM's import takes, and holds every thread up later.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class _StdoutOfOthers(io.TextIOBase):
    """A stdout that takes nothing from one thread; the others' goes on to the real one."""

    def __init__(self, real: Any, ident: int) -> None:
        self._real = real
        self._ident = ident

    def write(self, text: str) -> int:
        if threading.get_ident() == self._ident:
            return len(text)
        return self._real.write(text)

    def flush(self) -> None:
        self._real.flush()


@contextlib.contextmanager
def printing_nothing(ident: int) -> Iterator[None]:
    """Let thread `ident` print nothing: LiteLLM prints its model list at its start, in green."""
    with contextlib.redirect_stdout(_StdoutOfOthers(sys.stdout, ident)):
        yield


def _limit_schemas() -> None:
    """Let no schema grow over SCHEMA_BYTES_MAX when LiteLLM puts its references in their places.

    It has the limit as a parameter that its code for Gemini and Bedrock leaves out: definitions
    that name one another would fill all memory, and hold each other call up until then.
    """
    schemas: Any = importlib.import_module(SCHEMAS)
    schemas.unpack_defs.__defaults__ = (SCHEMA_BYTES_MAX,)


class _WithoutSecrets(logging.Filter):
    """Takes secrets and tracebacks, which show prompts, out of what LiteLLM logs."""

    def __init__(self, secrets: Secrets) -> None:
        super().__init__()
        self._secrets = secrets

    def filter(self, record: logging.LogRecord) -> bool:
        text = self._secrets.redacted(record.getMessage())
        record.msg, record.args = text.splitlines()[0] if text else "", ()
        record.exc_info = record.exc_text = record.stack_info = None
        return True


def _quieten(level: str, secrets: Secrets) -> None:
    """Silence LiteLLM, which logs every broken answer with its traceback."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.addFilter(_WithoutSecrets(secrets))
        logger.setLevel(logging.WARNING if level == "debug" else logging.CRITICAL + 1)


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
