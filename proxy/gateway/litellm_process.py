"""Runs LiteLLM in a process of its own, and talks to it over a socket in the private directory.

LiteLLM's import takes seconds, and its jobs and callbacks run all the time; in a process of its own
they do not block our event loop. LiteLLM gets an environment of its own, and the user's config with
our hooks added and the fallbacks removed, since the gateway falls back. LiteLLM listens on no port,
prints nothing and downloads nothing at its start.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

import orjson

from hearth.proxy.gateway.cloud_failure import CloudError
from hearth.proxy.gateway.litellm_messages import HELD_BYTES_MAX, LENGTH_BYTES, read_frame
from hearth.proxy.gateway.routing_table import DEFAULT, LISTS, PROVIDER, Deployment, RoutingTable
from hearth.proxy.http.http_exchange import RawHeaders, work_on_body
from hearth.proxy.monitoring.metrics import CloudUsage
from hearth.shared.errors import RETRY_AFTER_S_MAX, RequestError

HOOKS: Final = "hearth.proxy.gateway.litellm_hooks"

# LiteLLM would download each of these at import. A user allows a download by the value False.
OFFLINE: Final = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_LOCAL_BLOG_POSTS": "True",
    "LITELLM_LOCAL_POLICY_TEMPLATES": "True",
    "LITELLM_LOCAL_AUTOROUTER_PRESETS": "True",
}
SET: Final = {
    "LITELLM_RUST": "False",  # LiteLLM's Rust clients follow redirects
    "LITELLM_MODE": "PRODUCTION",  # otherwise LiteLLM loads .env files by itself
    "LITELLM_LOG": "ERROR",
    "LITELLM_DONT_SHOW_FEEDBACK_BOX": "true",
    "LITELLM_TELEMETRY": "False",
    "NO_DOCS": "True",
    "NO_REDOC": "True",
    "DISABLE_ADMIN_UI": "True",
}
# Variables that name another config or change the paths that we call, and our own clients' key.
UNSET: Final = (
    *("CONFIG_FILE_PATH", "WORKER_CONFIG", "LITELLM_CONFIG_BUCKET_", "STORE_MODEL_IN_DB"),
    *("SERVER_ROOT_PATH", "DOCS_URL", "REDOC_URL", "PROMETHEUS_MULTIPROC_DIR", "NUM_WORKERS"),
    "PROXY_API_KEY",
)

_OURS: Final = (*LISTS.values(), DEFAULT)
_SUGGESTED: Final = {
    "drop_params": True,
    "expose_router_debug_in_errors": False,
    "disable_hf_tokenizer_download": True,  # counting tokens must not download from a hub
}
_NEEDED: Final = {
    "telemetry": False,
    # A ping before the first event would begin the reply, after which no fallback is possible.
    "sse_keepalive_ping_interval_seconds": 0,
    "anthropic_sse_ping_interval_seconds": 0,
}
_NEEDED_GENERAL: Final = {
    "cancel_on_disconnect": True,
    "store_model_in_db": False,  # the routing table would not have such models
    # Our response store checks the owner of a response. LiteLLM would encrypt response ids with
    # PyNaCl, which is not installed, so every Responses answer would be a 500.
    "disable_responses_id_security": True,
}


def environment(table: RoutingTable) -> dict[str, str]:
    """Return the environment of LiteLLM's process."""
    kept = {name: text for name, text in table.environ.items() if not name.startswith(UNSET)}
    return OFFLINE | kept | SET


def merged_config(table: RoutingTable, token: str) -> dict[str, Any]:
    """Return the config for LiteLLM; `token` is its master key if the user's config has none."""
    general, settings, router = (
        {name: value for name, value in table.config.section(section).items() if name not in _OURS}
        for section in ("general_settings", "litellm_settings", "router_settings")
    )
    settings = _SUGGESTED | settings | _NEEDED
    settings["callbacks"] = [*_as_list(settings.get("callbacks")), f"{HOOKS}.routing_hook"]
    ours = {"provider": PROVIDER, "custom_handler": f"{HOOKS}.local_model"}
    settings["custom_provider_map"] = [*_as_list(settings.get("custom_provider_map")), ours]
    if table.fallback_lists.has_any and not router.get("retry_policy"):
        # Otherwise LiteLLM sleeps for a provider's Retry-After, up to a minute, before each retry.
        router["retry_policy"] = {"RateLimitErrorRetries": 0}
    general |= _NEEDED_GENERAL
    if not table.has_master_key:  # LiteLLM refuses to start without one
        general["master_key"] = token
    if not table.checks_keys:
        general["custom_auth"] = f"{HOOKS}.authorise"
    return {
        **table.config.values,
        "model_list": table.entries,
        "general_settings": general,
        "litellm_settings": settings,
        "router_settings": router,
    }


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [] if value is None else [value]


log = logging.getLogger(__name__)

CONFIG_NAME: Final = "litellm.yaml"
SOCKET_NAME: Final = "litellm.sock"
READY_S_MAX: Final = 60.0  # time for a request to wait until LiteLLM is loaded
ASK_S_MAX: Final = 10.0  # time for LiteLLM's Router or database, which a callback may delay
REASON_CHARS_MAX: Final = 500
RESTART_S_MIN: Final = 10.0  # time between two starts
STALL_S_MAX: Final = 60.0  # time of one call that blocks LiteLLM's event loop
CLOSE_S_MAX: Final = 4.0  # time for callbacks to send what they buffer
COMMAND: Final = (sys.executable, "-P", "-m", "hearth.proxy.gateway.litellm_main")


class LiteLLMUnavailable(RequestError):
    """LiteLLM is not loaded yet, could not be started, or has ended."""

    def __init__(self, reason: str, retry_after_s: int | None = None) -> None:
        super().__init__(
            reason, status=503, code="gateway_unavailable", retry_after_s=retry_after_s
        )


class LiteLLMConnection:
    """A connection to LiteLLM's process; closing it cancels its question. Owner: one task.

    `start`, then `chunks`, read the reply to a call. If the reply breaks off amid its stream,
    `chunks` ends and `failure` is set.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.why_closed = "LiteLLM has ended. Send the request again."
        self.failure: RequestError | None = None  # failure in a call's reply
        self.is_complete = False  # LiteLLM has written the whole reply

    async def write(self, data: bytes) -> None:
        """Send a frame in parts, so that a large body does not block the event loop."""
        self._writer.write(len(data).to_bytes(LENGTH_BYTES, "big"))
        with contextlib.suppress(ConnectionError):  # `read` reports the loss
            for start in range(0, len(data), HELD_BYTES_MAX):
                self._writer.write(data[start : start + HELD_BYTES_MAX])
                await self._writer.drain()

    async def read(self) -> bytes:
        """Return the next frame. Raises: LiteLLMUnavailable: either side has closed."""
        try:
            return await read_frame(self._reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise LiteLLMUnavailable(self.why_closed) from None

    async def ask(self, what: str, fields: Any, wait_s: float = ASK_S_MAX, size: int = 0) -> Any:
        """Return the answer of LiteLLM's process to the question `what`.

        `fields` is a mapping or a dataclass with about `size` bytes.

        Raises:
            RequestError: LiteLLM refuses, or does not answer within `wait_s`.
        """
        question = await work_on_body(size, lambda: orjson.dumps([what, fields]))
        try:
            async with asyncio.timeout(wait_s):
                await self.write(question)
                return await self._read_result()
        except TimeoutError:
            text = f"LiteLLM has not answered within {wait_s:g} s. Send the request again."
            raise LiteLLMUnavailable(text, RETRY_AFTER_S_MAX) from None

    async def _read_result(self) -> Any:
        """Read an answer, and return its result. Raises: RequestError: the answer is an error."""
        answer = orjson.loads(await self.read())
        self.is_complete = answer.get("is_complete", False)
        if error := answer.get("error"):
            raise (CloudError if "cause" in error else RequestError)(error.pop("text"), **error)
        return answer.get("found")

    def close(self) -> None:
        self._writer.close()

    async def start(self) -> tuple[int, RawHeaders]:
        """Return the status and headers of a call's reply, for the client.

        Raises:
            RequestError: the call failed, and nothing may be sent to the client.
        """
        status, headers = await self._read_result()
        return status, [(name.encode(), value.encode()) for name, value in headers]

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the reply's body in parts: each is one whole event, or the whole reply."""
        try:
            while part := await self.read():
                yield part
            await self._read_result()
        except RequestError as error:
            self.failure = error


class LiteLLMProcess:
    """LiteLLM's process, from its start to its end. Owner: the event loop."""

    def __init__(self, table: RoutingTable, directory: Path, log_level: str = "info") -> None:
        """`directory` is private."""
        self.failure = ""  # why LiteLLM cannot be used, a sentence without secrets
        self._table = table
        self._config = directory / CONFIG_NAME
        self._socket = directory / SOCKET_NAME
        self._log_level = log_level
        self._is_ready = asyncio.Event()
        self._refusal = ""  # why no new call is allowed, a sentence
        self._calls: set[LiteLLMConnection] = set()
        self._running: asyncio.Task[None] | None = None
        self._started_at = 0.0  # last start, on the monotonic clock
        self._was_ready = False  # LiteLLM was ready once, so the config is usable
        self._control: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None

    def start(self, on_usage: Callable[[CloudUsage], None]) -> None:
        """Begin to load LiteLLM; `on_usage` is called with the usage of each cloud call."""
        self._on_usage = on_usage
        self._started_at = time.monotonic()
        self._running = asyncio.create_task(self._run(), name="litellm")

    @property
    def is_usable(self) -> bool:
        return self._is_ready.is_set() and not self.failure

    def end_calls(self, reason: str) -> None:
        """End each call with an error, and refuse new ones; `reason` is a sentence."""
        self._refusal = reason
        if not self._is_ready.is_set():
            self._fail(reason)  # wakes the requests that wait for LiteLLM
        for connection in self._calls:
            connection.why_closed = reason
            connection.close()

    async def close(self) -> None:
        """End LiteLLM, and wait up to CLOSE_S_MAX for its callbacks to send what they buffer."""
        if self._running is None:
            return
        if self._control is not None and self.is_usable:
            self._control.close()
            await asyncio.wait({self._running}, timeout=CLOSE_S_MAX)
        if self._process is not None and self._process.returncode is None:
            self._process.kill()  # LiteLLM hangs, or is still loading
            await self._process.wait()  # reaps the process
        self._running.cancel()
        await asyncio.wait({self._running})

    def wake(self) -> None:
        """Start LiteLLM again if it has ended, at most every RESTART_S_MIN."""
        rests = time.monotonic() - self._started_at < RESTART_S_MIN or self._refusal
        if self._was_ready and self.failure and not rests:
            self.failure = ""
            self._is_ready.clear()
            self.start(self._on_usage)

    async def connect(self) -> LiteLLMConnection:
        """Return a connection to LiteLLM, which the caller closes; restart LiteLLM if it has ended.

        Raises:
            LiteLLMUnavailable: LiteLLM cannot be used, or is not ready within READY_S_MAX.
        """
        self.wake()
        try:
            async with asyncio.timeout(READY_S_MAX):
                await self._is_ready.wait()
        except TimeoutError:
            text = f"LiteLLM is still loading after {READY_S_MAX:g} s. Send the request again."
            raise LiteLLMUnavailable(text, RETRY_AFTER_S_MAX) from None
        if self.failure:
            raise LiteLLMUnavailable(self.failure)
        try:
            opening = asyncio.open_unix_connection(str(self._socket), limit=HELD_BYTES_MAX)
            return LiteLLMConnection(*await opening)
        except OSError as error:
            text = f"LiteLLM cannot be reached ({error.strerror}). Send the request again."
            raise LiteLLMUnavailable(text) from None

    async def ask(self, what: str, fields: Any, size: int = 0) -> Any:
        """Return LiteLLM's answer to one question. Raises: as `LiteLLMConnection.ask`."""
        with contextlib.closing(await self.connect()) as connection:
            return await connection.ask(what, fields, size=size)

    async def choose(
        self,
        group: str,
        *,
        excluded: Collection[str] = (),
        preferred: str = "",
        request: Mapping[str, Any],
        size: int = 0,
    ) -> Deployment:
        """Return the deployment of `group` that LiteLLM's Router chooses for a request.

        `excluded` are ids of deployments that failed; `preferred` is chosen if it is healthy.
        `request` has the messages and metadata that the Router uses, about `size` bytes.

        Raises:
            RequestError: all deployments are excluded, cool down, or are over a limit or budget.
            LiteLLMUnavailable: LiteLLM cannot be asked.
        """
        fields = {"group": group, "excluded": [*excluded], "preferred": preferred}
        self._refuse()
        found = await self.ask("choose", fields | {"request": request}, size)
        return self._table.deployment(group, found[0]) or Deployment(*found)

    @contextlib.asynccontextmanager
    async def call(
        self, deployment: Deployment, path: str, body: bytes, headers: RawHeaders
    ) -> AsyncIterator[LiteLLMConnection]:
        """Begin a call of `deployment`; leaving the `async with` block ends it.

        The body's model is `deployment.group`. `headers` are all headers that the app gets, with
        the client's key if LiteLLM checks keys.

        Raises: LiteLLMUnavailable
        """
        self._refuse()
        sent = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
        fields = {"deployment": deployment.id, "path": path, "headers": sent}
        connection = await self.connect()
        self._calls.add(connection)
        try:
            self._refuse()
            await connection.write(orjson.dumps(["call", fields]))
            await connection.write(body)
            yield connection
        finally:
            self._calls.discard(connection)
            connection.close()

    def _refuse(self) -> None:
        """Raise LiteLLMUnavailable if the server is stopping."""
        if self._refusal:
            raise LiteLLMUnavailable(self._refusal)

    # ------------------------------------------------------------ the process

    async def _run(self) -> None:
        what, why = "could not be started with LITELLM_CONFIG", ""
        try:
            reader = await self._start_process()
            with contextlib.suppress(ConnectionError):
                while line := await reader.readline():
                    sent = orjson.loads(line)
                    if usage := sent.get("usage"):
                        self._on_usage(CloudUsage(**usage))
                    elif "ready" in sent:
                        self._config.unlink(missing_ok=True)  # already read, and holds keys
                        what = "has ended"
                        self._was_ready = True
                        self._is_ready.set()
                        log.info(
                            "LiteLLM is ready wall_s=%.1f", time.monotonic() - self._started_at
                        )
                    else:
                        why = (
                            f": {self._table.secrets.redacted(sent['failure'])[:REASON_CHARS_MAX]}"
                        )
            if self._process is not None:
                await self._process.wait()
        except OSError as error:
            why = f": {error.strerror}."
        finally:
            if self._control is not None:
                self._control.close()
            self._config.unlink(missing_ok=True)
            self._socket.unlink(missing_ok=True)
        if not self._refusal:
            self._fail(f"LiteLLM {what}{why or '.'} Local models are served.")
            log.error("%s", self.failure)

    async def _start_process(self) -> asyncio.StreamReader:
        """Start the process, and return the stream of its messages. Raises: OSError."""
        for path in (self._config, self._socket):
            path.unlink(missing_ok=True)
        descriptor = os.open(self._config, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:  # JSON is YAML
            merged = merged_config(self._table, f"sk-{os.urandom(32).hex()}")
            file.write(orjson.dumps(merged, option=orjson.OPT_NON_STR_KEYS))
        own_end, child_end = socket.socketpair()
        env = environment(self._table) | {"CONFIG_FILE_PATH": str(self._config)}
        try:
            with child_end:
                self._process = await asyncio.create_subprocess_exec(
                    *COMMAND,
                    stdin=child_end.fileno(),  # closing the socket ends the process
                    stdout=DEVNULL,  # LiteLLM prints a list of models at the start
                    env=env,
                    start_new_session=True,  # Ctrl-C must reach this process alone
                )
            reader, self._control = await asyncio.open_connection(sock=own_end)
        except BaseException:
            own_end.close()
            raise
        options = {
            "socket": str(self._socket),
            "beside": str(self._table.config.path.resolve().parent),
            "log_level": self._log_level,
            "stall_s": STALL_S_MAX,
            "secrets": sorted(self._table.secrets.texts),
        }
        self._control.write(orjson.dumps(options) + b"\n")
        return reader

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason
        self._is_ready.set()
