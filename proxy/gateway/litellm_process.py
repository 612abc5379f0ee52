"""Runs LiteLLM in a process of its own, and asks it over a socket in the private directory.

Its import takes seconds, its jobs and callbacks go on for as long as it runs: none of that holds
our event loop up, and the process has LiteLLM's environment alone. It is given the user's config
with what is ours in it. Fallbacks are ours and taken out, so that LiteLLM never falls back itself.
Nothing in it listens, prints, or looks for what is new.
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

# Each of these is fetched from the network at import unless told otherwise. A user who wants it
# sets the variable to False.
OFFLINE: Final = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_LOCAL_BLOG_POSTS": "True",
    "LITELLM_LOCAL_POLICY_TEMPLATES": "True",
    "LITELLM_LOCAL_AUTOROUTER_PRESETS": "True",
}
SET: Final = {
    "LITELLM_RUST": "False",  # its clients there follow redirects
    "LITELLM_MODE": "PRODUCTION",  # else it loads .env files by itself
    "LITELLM_LOG": "ERROR",
    "LITELLM_DONT_SHOW_FEEDBACK_BOX": "true",
    "LITELLM_TELEMETRY": "False",
    "NO_DOCS": "True",
    "NO_REDOC": "True",
    "DISABLE_ADMIN_UI": "True",
}
# They name another config, change the paths that we call, or are the keys of our own clients.
UNSET: Final = (
    *("CONFIG_FILE_PATH", "WORKER_CONFIG", "LITELLM_CONFIG_BUCKET_", "STORE_MODEL_IN_DB"),
    *("SERVER_ROOT_PATH", "DOCS_URL", "REDOC_URL", "PROMETHEUS_MULTIPROC_DIR", "NUM_WORKERS"),
    "PROXY_API_KEY",
)

_OURS: Final = (*LISTS.values(), DEFAULT)
_SUGGESTED: Final = {
    "drop_params": True,
    "expose_router_debug_in_errors": False,
    "disable_hf_tokenizer_download": True,  # a count reaches no hub
}
_NEEDED: Final = {
    "telemetry": False,
    # A ping before the first event would begin the reply, and nothing could fall back then.
    "sse_keepalive_ping_interval_seconds": 0,
    "anthropic_sse_ping_interval_seconds": 0,
}
_NEEDED_GENERAL: Final = {
    "cancel_on_disconnect": True,
    "store_model_in_db": False,  # the table would not know them
    # Whose a stored response is, we know by its owner. LiteLLM's own way encrypts the ids of
    # responses with PyNaCl, which is not installed: every Responses answer would be a 500.
    "disable_responses_id_security": True,
}


def environment(table: RoutingTable) -> dict[str, str]:
    """Return this process's environment as LiteLLM needs it."""
    kept = {name: text for name, text in table.environ.items() if not name.startswith(UNSET)}
    return OFFLINE | kept | SET


def merged_config(table: RoutingTable, token: str) -> dict[str, Any]:
    """Return the config as LiteLLM is given it; `token` opens its app to us."""
    general, settings, router = (
        {name: value for name, value in table.config.section(each).items() if name not in _OURS}
        for each in ("general_settings", "litellm_settings", "router_settings")
    )
    settings = _SUGGESTED | settings | _NEEDED
    settings["callbacks"] = [*_as_list(settings.get("callbacks")), f"{HOOKS}.routing_hook"]
    ours = {"provider": PROVIDER, "custom_handler": f"{HOOKS}.local_model"}
    settings["custom_provider_map"] = [*_as_list(settings.get("custom_provider_map")), ours]
    if table.fallback_lists.has_any and not router.get("retry_policy"):
        # It would sleep for a provider's Retry-After, up to a minute before each of its tries.
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
READY_S_MAX: Final = 60.0  # that a request waits for it to be loaded
ASK_S_MAX: Final = 10.0  # for its Router, or its database; a callback may hold it up
REASON_CHARS_MAX: Final = 500
RESTART_S_MIN: Final = 10.0  # from one start to the next, of one that has ended
STALL_S_MAX: Final = 60.0  # of its event loop that one call holds up: all others wait for it
CLOSE_S_MAX: Final = 4.0  # for its callbacks to send what they hold
COMMAND: Final = (sys.executable, "-P", "-m", "hearth.proxy.gateway.litellm_main")


class LiteLLMUnavailable(RequestError):
    """LiteLLM could not be started, or not yet, or has ended: nothing is answered through it."""

    def __init__(self, reason: str, retry_after_s: int | None = None) -> None:
        super().__init__(
            reason, status=503, code="gateway_unavailable", retry_after_s=retry_after_s
        )


class LiteLLMConnection:
    """A connection to LiteLLM's process: closed, it ends what was asked on it. Owner: one task.

    The reply to a call of a deployment is read by `start`, then `chunks`. `failure` is set where
    `chunks` ended early: a reply that broke off amid its stream, after what LiteLLM wrote of it.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.why_closed = "LiteLLM has ended. Send the request again."
        self.failure: RequestError | None = None  # of a call
        self.is_complete = False  # LiteLLM has written its reply to the end

    async def write(self, data: bytes) -> None:
        """Send a frame, a part at a time: a body of any size holds nobody up."""
        self._writer.write(len(data).to_bytes(LENGTH_BYTES, "big"))
        with contextlib.suppress(ConnectionError):  # `read` tells of it
            for start in range(0, len(data), HELD_BYTES_MAX):
                self._writer.write(data[start : start + HELD_BYTES_MAX])
                await self._writer.drain()

    async def read(self) -> bytes:
        """Return the next frame. Raises: LiteLLMUnavailable: it is closed here or there."""
        try:
            return await read_frame(self._reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise LiteLLMUnavailable(self.why_closed) from None

    async def ask(self, what: str, fields: Any, wait_s: float = ASK_S_MAX, size: int = 0) -> Any:
        """Return what LiteLLM's process says; `asked`, of `size` bytes, is a mapping or dataclass.

        Raises:
            RequestError: it refuses, or says nothing within `wait_s`.
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
        """Return what was found. Raises: RequestError: what was told instead."""
        told = orjson.loads(await self.read())
        self.is_complete = told.get("is_complete", False)
        if error := told.get("error"):
            raise (CloudError if "cause" in error else RequestError)(error.pop("text"), **error)
        return told.get("found")

    def close(self) -> None:
        self._writer.close()

    async def start(self) -> tuple[int, RawHeaders]:
        """Return the status and the headers that a client may see.

        Raises:
            RequestError: it is refused, and nothing may be sent.
        """
        status, headers = await self._read_result()
        return status, [(name.encode(), value.encode()) for name, value in headers]

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the reply's body as it comes, an event or a whole reply in one piece."""
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
        self.failure = ""  # a sentence: why it cannot be used, without secrets
        self._table = table
        self._config = directory / CONFIG_NAME
        self._socket = directory / SOCKET_NAME
        self._log_level = log_level
        self._is_ready = asyncio.Event()
        self._refusal = ""  # a sentence: why no call is begun any more
        self._calls: set[LiteLLMConnection] = set()
        self._running: asyncio.Task[None] | None = None
        self._started_at = 0.0  # when it was started last, on the monotonic clock
        self._was_ready = False  # its config is one that it starts with
        self._control: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None

    def start(self, on_usage: Callable[[CloudUsage], None]) -> None:
        """Begin to load LiteLLM; `on_usage` is told what each cloud call costs."""
        self._on_usage = on_usage
        self._started_at = time.monotonic()
        self._running = asyncio.create_task(self._run(), name="litellm")

    @property
    def is_usable(self) -> bool:
        return self._is_ready.is_set() and not self.failure

    def end_calls(self, reason: str) -> None:
        """End each call with an error, and let none begin; `reason` is a sentence."""
        self._refusal = reason
        if not self._is_ready.is_set():
            self._fail(reason)  # whoever waits for it has waited enough
        for line in self._calls:
            line.why_closed = reason
            line.close()

    async def close(self) -> None:
        """End LiteLLM, and wait a little for what its callbacks still hold."""
        if self._running is None:
            return
        if self._control is not None and self.is_usable:
            self._control.close()
            await asyncio.wait({self._running}, timeout=CLOSE_S_MAX)
        if self._process is not None and self._process.returncode is None:
            self._process.kill()  # it stands still, or was told nothing that it could hold
            await self._process.wait()  # it is gone, and no zombie, when this returns
        self._running.cancel()
        await asyncio.wait({self._running})

    def wake(self) -> None:
        """Start LiteLLM again where it has ended, at most every RESTART_S_MIN."""
        rests = time.monotonic() - self._started_at < RESTART_S_MIN or self._refusal
        if self._was_ready and self.failure and not rests:
            self.failure = ""
            self._is_ready.clear()
            self.start(self._on_usage)

    async def connect(self) -> LiteLLMConnection:
        """Return a connection to LiteLLM, which the caller closes; one that has ended is restarted.

        Raises:
            LiteLLMUnavailable: there is none, or not within READY_S_MAX.
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
        """Return what LiteLLM says to one question. Raises: RequestError: see LiteLLMLine.ask."""
        with contextlib.closing(await self.connect()) as line:
            return await line.ask(what, fields, size=size)

    async def choose(
        self,
        group: str,
        *,
        excluded: Collection[str] = (),
        preferred: str = "",
        request: Mapping[str, Any],
        size: int = 0,
    ) -> Deployment:
        """Return the deployment of `group` that LiteLLM's Router takes for a request.

        `excluded` are ids that were tried, `preferred` is taken where it is healthy. `request` is
        what LiteLLM's routing looks at: messages and metadata; it has `size` bytes.

        Raises:
            RequestError: all of them are excluded, cool down, or are over a limit or a budget.
            LiteLLMUnavailable: it cannot say.
        """
        asked = {"group": group, "excluded": [*excluded], "preferred": preferred}
        self._refuse()
        found = await self.ask("choose", asked | {"request": request}, size)
        return self._table.deployment(group, found[0]) or Deployment(*found)

    @contextlib.asynccontextmanager
    async def call(
        self, deployment: Deployment, path: str, body: bytes, headers: RawHeaders
    ) -> AsyncIterator[LiteLLMConnection]:
        """Give a call of `deployment`; who leaves it ends it.

        The body's model is `deployment.group`. `headers` are all that the app sees of the client's;
        where LiteLLM checks keys, the client's key is among them.

        Raises: LiteLLMUnavailable
        """
        self._refuse()
        sent = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
        asked = {"deployment": deployment.id, "path": path, "headers": sent}
        line = await self.connect()
        self._calls.add(line)
        try:
            self._refuse()
            await line.write(orjson.dumps(["call", asked]))
            await line.write(body)
            yield line
        finally:
            self._calls.discard(line)
            line.close()

    def _refuse(self) -> None:
        """Raises: LiteLLMUnavailable: the server stops."""
        if self._refusal:
            raise LiteLLMUnavailable(self._refusal)

    # ------------------------------------------------------------ the process

    async def _run(self) -> None:
        what, why = "could not be started with LITELLM_CONFIG", ""
        try:
            reader = await self._start_process()
            with contextlib.suppress(ConnectionError):
                while row := await reader.readline():
                    told = orjson.loads(row)
                    if usage := told.get("usage"):
                        self._on_usage(CloudUsage(**usage))
                    elif "ready" in told:
                        self._config.unlink(missing_ok=True)  # it was read, and it holds keys
                        what = "has ended"
                        self._was_ready = True
                        self._is_ready.set()
                        log.info(
                            "LiteLLM is ready wall_s=%.1f", time.monotonic() - self._started_at
                        )
                    else:
                        why = (
                            f": {self._table.secrets.redacted(told['failure'])[:REASON_CHARS_MAX]}"
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
        """Start the process, and return what it tells. Raises: OSError."""
        for path in (self._config, self._socket):
            path.unlink(missing_ok=True)
        descriptor = os.open(self._config, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:  # JSON is YAML
            merged = merged_config(self._table, f"sk-{os.urandom(32).hex()}")
            file.write(orjson.dumps(merged, option=orjson.OPT_NON_STR_KEYS))
        ours, theirs = socket.socketpair()
        env = environment(self._table) | {"CONFIG_FILE_PATH": str(self._config)}
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    *COMMAND,
                    stdin=theirs.fileno(),  # its end ends the process, however this one dies
                    stdout=DEVNULL,  # LiteLLM prints its model list at its start, in green
                    env=env,
                    start_new_session=True,  # Ctrl-C is ours to pass on
                )
            reader, self._control = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        told = {
            "socket": str(self._socket),
            "beside": str(self._table.config.path.resolve().parent),
            "log_level": self._log_level,
            "stall_s": STALL_S_MAX,
            "secrets": sorted(self._table.secrets.texts),
        }
        self._control.write(orjson.dumps(told) + b"\n")
        return reader

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason
        self._is_ready.set()
