"""Has texts embedded and documents ranked in a process of its own, which starts when it is needed.

The process holds EMBEDDING_MODEL and RERANK_MODEL, and ends when nobody has asked for a while, so
that all of its memory returns. Nothing here imports MLX or numpy.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from hearth.shared.embedding_messages import (
    LENGTH_BYTES,
    CancelJob,
    CannotLoad,
    Computing,
    Embed,
    Embedded,
    EmbeddingInput,
    EmbeddingMessage,
    EncoderFacts,
    Loaded,
    Refused,
    Rerank,
    Reranked,
    ShortTurns,
    body_length,
    decode,
    encode,
)
from hearth.shared.errors import Overloaded, RequestError, StartError, WireError
from hearth.shared.models.model_path import named_model
from hearth.shared.paths import PROJECT_DIR

log = logging.getLogger(__name__)

QUEUE_MAX: Final = 1_000  # requests that wait or are computed: as many as there are connections
REPLAYS_MAX: Final = 2  # of a request whose process died while it computed another one
LOAD_S_MAX: Final = 1_800.0  # a hub id is downloaded
STALL_S_MAX: Final = 300.0  # without a word while something is computed
END_S_MAX: Final = 5.0  # for the forward of a process that is told to end
FAILED_REST_S: Final = 5.0  # before a model that could not be loaded is tried again
PACE_S: Final = 0.05  # between two looks at whether answers stream
COMMAND: Final = (sys.executable, "-P", "-m", "hearth.worker.embeddings.main")

State = Literal["unloaded", "loading", "ready"]


@dataclass(frozen=True, slots=True)
class EmbeddingSettings:
    """What the process is started with."""

    embedding_model: str = ""  # as in EMBEDDING_MODEL; "" = none
    rerank_model: str = ""
    idle_s: float = 300.0  # without a request, before the process ends; 0 = never
    environ: Mapping[str, str] = field(default_factory=dict)  # of the process


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors of some texts, in their order, each of length 1."""

    vectors: bytes  # float32, little endian, one text after the other
    dimensions: int
    tokens: list[int]  # of each text


@dataclass(frozen=True, slots=True)
class Reranking:
    """How much each document answers the query, in their order: from 0 to 1."""

    scores: list[float]
    tokens: int  # of all documents, each with its query


@dataclass(slots=True)
class _Asked:
    """A request that has no answer yet."""

    frame: bytes
    answer: "asyncio.Future[Embedded | Reranked]"
    replays: int = 0


class EmbeddingProcess:
    """The process that embeds and ranks, and those that take its place. Owner: the event loop.

    Invariant: there is one process at a time, and one as long as `_asked` has a request.
    """

    def __init__(
        self,
        settings: EmbeddingSettings,
        is_busy: Callable[[], bool] = lambda: False,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """`is_busy` tells whether answers stream; no process is started here."""
        self._settings = settings
        self._is_busy = is_busy
        self._command = tuple(command)
        self._ids = itertools.count(1)
        self._asked: dict[int, _Asked] = {}
        self._process: Process | None = None
        self._life: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._loaded: Loaded | None = None  # of the last process that could load
        self._state: State = "unloaded"
        self._computing = 0  # the request whose forward began last
        self._is_told_to_end = self._is_closed = self._told_busy = False
        self._watching: asyncio.Task[None] | None = None
        self._heard_at = 0.0  # when the process said something, or the first of who waits came
        self._why_killed = ""
        self._why_failed, self._failed_at = "", 0.0
        self.starts = self.deaths = 0  # of the process; deaths unasked

    # ------------------------------------------------------------ what is asked

    async def embed(
        self, texts: Sequence[EmbeddingInput], dimensions: int | None = None, truncate: bool = False
    ) -> Embeddings:
        """Return a vector for each text. Cancelled, it is not computed on.

        Raises:
            RequestError: 400: a text is too long, or empty of tokens, or `dimensions` is more than
                the model has. 503: the process cannot be started, or died of this request.
        """
        assert self._settings.embedding_model, "the route tells that there is none"
        asked = Embed(next(self._ids), list(texts), dimensions, truncate)
        answer = await self._ask(asked)
        assert isinstance(answer, Embedded), answer
        return Embeddings(answer.vectors, answer.dimensions, answer.tokens)

    async def rerank(
        self, query: str, documents: Sequence[str], truncate: bool = False
    ) -> Reranking:
        """Return how much each document answers `query`. Cancelled, and raises, as `embed`."""
        assert self._settings.rerank_model, "the route tells that there is none"
        asked = Rerank(next(self._ids), query, list(documents), truncate)
        answer = await self._ask(asked)
        assert isinstance(answer, Reranked), answer
        return Reranking(answer.scores, answer.tokens)

    def facts(self) -> dict[str, Any]:
        """Return the state of the process, and what is known of its models once one was loaded.

        "embedding" and "rerank" are EncoderFacts, or None.
        """
        loaded = self._loaded or Loaded(None, None)
        return {
            "state": self._state,
            "pid": self.pid,
            "embedding": loaded.embedding and EncoderFacts(**loaded.embedding),
            "rerank": loaded.rerank and EncoderFacts(**loaded.rerank),
            "waiting": len(self._asked),
            "starts": self.starts,
            "deaths": self.deaths,
            "why_failed": self._why_failed,
        }

    @property
    def pid(self) -> int | None:
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if running and self._process is not None else None

    async def close(self) -> None:
        """End the process once its forward ends. Who waits is told that the server stops."""
        self._is_closed = True
        self._fail_all(_stopping)
        self._stop_idling()
        if self._life is not None:
            self._tell_to_end()
            await asyncio.gather(self._life, return_exceptions=True)

    # ------------------------------------------------------------ a request

    async def _ask(self, asked: Embed | Rerank) -> Embedded | Reranked:
        self._refuse_now()
        try:
            frame = encode(asked)
        except WireError as error:
            raise RequestError(str(error), param="input") from error
        row = _Asked(frame, asyncio.get_running_loop().create_future())
        self._enter(asked.request_id, row)
        try:
            return await row.answer
        except asyncio.CancelledError:
            self._write(encode(CancelJob(asked.request_id)))
            raise
        finally:
            del self._asked[asked.request_id]
            self._begin_idling()

    def _enter(self, request_id: int, row: _Asked) -> None:
        """Send a request to the process, or have one started for it."""
        loop = asyncio.get_running_loop()
        if not self._open_requests():
            self._heard_at = loop.time()
        self._asked[request_id] = row
        self._stop_idling()
        self._write(row.frame)
        if self._life is None:
            self._life = loop.create_task(self._live(), name="embeddings")
        if self._watching is None or self._watching.done():
            self._watching = loop.create_task(self._watch(), name="embedding watch")

    def _refuse_now(self) -> None:
        """Raise RequestError where a request would get nothing else."""
        if self._is_closed:
            raise _stopping()
        if len(self._asked) >= QUEUE_MAX:
            raise Overloaded(
                f"{len(self._asked)} requests wait for embeddings or rankings, and the limit is "
                f"{QUEUE_MAX}. Send this one again in a few seconds."
            )
        if self._why_failed and time.monotonic() - self._failed_at < FAILED_REST_S:
            raise _unavailable(self._why_failed)

    def _fail_all(self, error: Callable[[], RequestError]) -> None:
        for row in self._open_requests().values():
            row.answer.set_exception(error())  # one each: what is raised keeps its traceback

    # ------------------------------------------------------------ idleness

    def _stop_idling(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _begin_idling(self) -> None:
        """End the process after a while, if nobody asks for anything until then."""
        self._stop_idling()
        if not self._asked and self._life is not None and self._settings.idle_s:
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(self._settings.idle_s, self._tell_to_end)

    def _tell_to_end(self) -> None:
        """Close the pipe of the process, at whose end it ends; it is killed if it does not."""
        self._is_told_to_end = True
        process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()
            asyncio.get_running_loop().call_later(END_S_MAX, _kill, process)

    # ------------------------------------------------------------ the process

    async def _live(self) -> None:
        """Run one process after the other, as long as a request waits."""
        try:
            while self._open_requests():
                await self._live_once()
        except Exception as error:  # a bug of ours: nobody waits for what never comes
            log.error("embeddings failed", exc_info=error)
            self._fail_all(lambda: _unavailable("the proxy lost its line to the process"))
        finally:
            self._life, self._state = None, "unloaded"

    def _open_requests(self) -> dict[int, _Asked]:
        return {name: row for name, row in self._asked.items() if not row.answer.done()}

    async def _live_once(self) -> None:
        self._is_told_to_end, self._told_busy, self._why_killed = False, False, ""
        self._computing, self._state, self._why_failed = 0, "loading", ""
        self._heard_at = asyncio.get_running_loop().time()
        try:
            process = self._process = await self._start()
        except OSError as error:
            self._note_failure(f"the system starts no process ({error.strerror})")
            return
        except StartError as error:  # a model is not here
            self._note_failure(str(error))
            self._failed_at = -math.inf  # the next request may find it pulled
            return
        self.starts += 1
        log.info("embedding process started pid=%d", process.pid)
        if self._is_told_to_end:  # as it was started, when there was no pipe to close
            self._tell_to_end()
        try:
            self._write(b"".join(row.frame for row in self._open_requests().values()))
            how = await self._hear(process)
        finally:
            code = await self._end(process)
            self._process = None
        self._note_end(how or _how(code))

    async def _start(self) -> Process:
        """Return a process that loads the models. Raises: OSError; StartError: one is not here."""
        told = self._settings
        embedding = await asyncio.to_thread(_named, told.embedding_model, "EMBEDDING_MODEL")
        rerank = await asyncio.to_thread(_named, told.rerank_model, "RERANK_MODEL")
        return await asyncio.create_subprocess_exec(
            *self._command,
            *("--embedding-model", embedding, "--rerank-model", rerank),
            stdin=PIPE,  # its end ends the process, however this one dies
            stdout=PIPE,
            cwd=PROJECT_DIR,
            env=dict(told.environ),
            start_new_session=True,  # Ctrl-C is ours to pass on
        )

    async def _hear(self, process: Process) -> str:
        """Take what the process says until it ends; return what is wrong with that, if it is."""
        assert process.stdout is not None
        while True:
            try:
                head = await process.stdout.readexactly(LENGTH_BYTES)
                body = await process.stdout.readexactly(body_length(head))
                self._take(decode(body))
            except asyncio.IncompleteReadError:
                return self._why_killed
            except WireError as error:
                return str(error)

    def _take(self, message: EmbeddingMessage) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        if isinstance(message, Computing):
            self._computing = message.request_id
        elif isinstance(message, Loaded):
            self._loaded, self._state = message, "ready"
        elif isinstance(message, CannotLoad):
            self._why_failed = message.text  # told once the process has ended
        elif isinstance(message, Embedded | Reranked | Refused):
            row = self._asked.get(message.request_id)  # None: its client has left
            if row is not None and not row.answer.done():
                self._settle(row, message)

    @staticmethod
    def _settle(row: _Asked, message: Embedded | Reranked | Refused) -> None:
        if isinstance(message, Refused):
            row.answer.set_exception(
                RequestError(
                    message.text, status=message.status, code=message.code, param=message.param
                )
            )
        else:
            row.answer.set_result(message)

    async def _watch(self) -> None:
        """Tell the process whether answers stream, and kill it where it stands still.

        Ends when nobody waits any more.
        """
        while self._open_requests():
            is_busy = self._is_busy()
            if is_busy != self._told_busy and self._write(encode(ShortTurns(is_busy))):
                self._told_busy = is_busy
            silent_s = asyncio.get_running_loop().time() - self._heard_at
            if silent_s > (STALL_S_MAX if self._state == "ready" else LOAD_S_MAX):
                self._why_killed = f"it said nothing for {silent_s:.0f} s"
                if self._process is not None:
                    _kill(self._process)
            await asyncio.sleep(PACE_S)

    def _write(self, frame: bytes) -> bool:
        """Send a frame to the process, and say whether there is one that hears."""
        process = self._process
        if process is None or process.stdin is None or self._is_told_to_end:
            return False
        process.stdin.write(frame)
        return True

    async def _end(self, process: Process) -> int:
        """Have the process end, and kill it where it does not; return its exit code."""
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(END_S_MAX):
                return await process.wait()
        except (TimeoutError, asyncio.CancelledError):
            _kill(process)
            return await process.wait()

    # ------------------------------------------------------------ its end

    def _note_end(self, how: str) -> None:
        """Tell the request that the process died of; others are asked of the next one."""
        was_ready, self._state = self._state == "ready", "unloaded"
        if self._is_told_to_end:
            log.info("embedding process ended")
            return
        self.deaths += 1
        if not was_ready:
            self._note_failure(self._why_failed or f"its process died while it loaded ({how})")
            return
        log.error("embedding process died how=%s requests=%d", how, len(self._open_requests()))
        for name, row in self._open_requests().items():
            row.replays += 1
            if name == self._computing or row.replays > REPLAYS_MAX:
                row.answer.set_exception(_died(how))

    def _note_failure(self, why: str) -> None:
        """Tell all who wait that the models cannot be loaded, and those of the next seconds."""
        log.error("embedding models cannot be loaded: %s", why)
        self._why_failed, self._failed_at = why, time.monotonic()
        self._fail_all(lambda: _unavailable(why))


def _named(source: str, setting: str) -> str:
    """Return the directory or the hub id that `source` names; "" where nothing is set.

    Raises:
        StartError: it names what is not here.
    """
    return str(named_model(source, setting)) if source else ""


def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        process.kill()


def _stopping() -> RequestError:
    return RequestError("The server is shutting down.", status=503, code="stopping")


def _unavailable(why: str) -> RequestError:
    return RequestError(
        f"Embeddings cannot be computed now: {why}",
        status=503,
        code="embeddings_unavailable",
        retry_after_s=round(FAILED_REST_S),
    )


def _died(how: str) -> RequestError:
    return RequestError(
        f"The process that embeds died ({how}) as it computed this request. Send it again in "
        "smaller parts: if that ends well, it was too large for this machine's memory.",
        status=503,
        code="embedding_process_died",
    )


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
