"""Embeds texts and ranks documents in a separate worker, which starts at the first request.

The worker holds EMBEDDING_MODEL and RERANK_MODEL. After some time without requests it ends,
which frees all of its memory.
"""

import asyncio
import contextlib
import logging
import math
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from hearth.proxy.pool.worker_link import WorkerLink, WorkerReply
from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.proxy.request.encoder_names import SETTINGS, encoders_of
from hearth.proxy.workers.supervisor import RestartRules, Supervisor, WorkerProcess
from hearth.shared.errors import RequestError, WorkerLost
from hearth.shared.models.model_path import ModelMissing, check_model, why_missing
from hearth.shared.private_files import private_directory
from hearth.shared.settings import Settings
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import Embed, Embedded, EncoderFacts, Rerank, Reranked, ShortTurns
from hearth.shared.worker_files import forwarded_path

log = logging.getLogger(__name__)

REPLAYS_MAX: Final = 2  # retries of a request whose worker died in another request
IDLE_S: Final = 300.0  # time without a request before the worker ends
END_S_MAX: Final = 5.0  # time for the last forward of a worker that stops
FAILED_REST_S: Final = 5.0  # pause before a model that failed to load is tried again
PACE_S: Final = 0.05  # time between two checks whether answers stream
COMMAND: Final = (sys.executable, "-P", "-m", "hearth.worker.embeddings.main")


class Encoders:
    """Runs the worker that embeds and ranks. Owner: the event loop.

    Invariant: while a request waits, the worker's process runs or starts.
    """

    def __init__(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        is_busy: Callable[[], bool],
        command: Sequence[str] = COMMAND,
    ) -> None:
        """`is_busy` returns whether answers stream; no process is started here.

        Raises:
            StartError: the directory of the worker's socket cannot be made.
        """
        self._sources = {
            "EMBEDDING_MODEL": settings.embedding_model,
            "RERANK_MODEL": settings.rerank_model,
        }
        self._is_busy = is_busy
        self._pool = WorkerPool()
        self._pool.on_ready = self._on_ready
        self.supervisor = Supervisor(
            command,
            1,
            private_directory(settings.instance_dir / "encoders"),
            self._pool,
            {**environ, **self._sources},
            RestartRules(stall_s=settings.stall_seconds, chunk_wait_s=END_S_MAX, kind="encoder"),
        )
        self.supervisor.on_early_death = self._on_failure
        (self.worker,) = self.supervisor.workers
        self.supervisor.leave_empty(self.worker)
        self.facts: Mapping[str, EncoderFacts] = {}  # from the last process that was ready
        self.waiting = 0  # requests in progress, at most one per connection
        self._attend_task: asyncio.Task[None] | None = None
        self._request_came = asyncio.Event()  # a request came while none was in progress
        self._busy_link: WorkerLink | None = None  # link on which ShortTurns(True) was sent
        self._changed = asyncio.Event()  # the worker became ready, or failed to
        self._is_closed = False
        self._why_failed, self._failed_at = "", -math.inf

    @property
    def state(self) -> str:
        """Return "unloaded", "loading" or "ready"."""
        if not self.worker.wanted.is_set():
            return "unloaded"
        return "ready" if self.worker.state == "ready" else "loading"

    async def embed(
        self, texts: list[Any], dimensions: int | None = None, truncate: bool = False
    ) -> Embedded:
        """Return a vector for each text. A cancelled request is not computed further.

        Raises:
            RequestError: 400: a text is too long or has no tokens, or `dimensions` is more than
                the model has. 503: the worker cannot be started, or died of this request.
        """
        request = Embed(uuid.uuid4().hex, texts, dimensions, truncate)
        return await self._ask(request, Embedded)

    async def rerank(self, query: str, documents: list[str]) -> Reranked:
        """Return a score of each document against `query`. Raises: RequestError, as in `embed`."""
        return await self._ask(Rerank(uuid.uuid4().hex, query, documents), Reranked)

    async def close(self) -> None:
        """End the worker after its current forward. Waiting requests fail with "stopping"."""
        self._is_closed = True
        self._changed.set()
        if self._attend_task is not None:
            self._attend_task.cancel()
        self._pool.close()
        await self.supervisor.stop()
        forwarded_path(self.worker.endpoint).unlink(missing_ok=True)

    # ------------------------------------------------------------ a request

    async def _ask(self, request: Embed | Rerank, kind: type[WorkerReply]) -> WorkerReply:
        self.waiting += 1
        self._request_came.set()
        if self._attend_task is None or self._attend_task.done():
            self._attend_task = asyncio.create_task(self._attend(), name="encoders")
        try:
            return await self._answer(request, kind)
        finally:
            self.waiting -= 1

    async def _answer(self, request: Embed | Rerank, kind: type[WorkerReply]) -> WorkerReply:
        """Return the worker's reply; try again if the worker dies of another request."""
        replays = 0
        while True:
            link = await self._ready_link()
            try:
                return await link.reply(request, kind)
            except WorkerLost as lost:
                if self._forwarded_request_id() == request.request_id and not self._is_closed:
                    raise RequestError(
                        f"{lost} It computed this request as it died: send that in smaller parts. "
                        "If they end well, it was too large for this machine's memory.",
                        status=503,
                        code="embedding_process_died",
                    ) from None
                replays += 1
                if replays > REPLAYS_MAX:
                    raise

    def _forwarded_request_id(self) -> str:
        """Return the id of the request in the last forward of the process, or ""."""
        try:
            return forwarded_path(self.worker.endpoint).read_text()
        except OSError:
            return ""

    async def _ready_link(self) -> WorkerLink:
        """Return the link once the worker is ready; start the worker if needed. Raises: 503."""
        came_at = awake_s()
        while True:
            if self._is_closed:
                raise RequestError("The server is shutting down.", status=503, code="stopping")
            if self._failed_at >= came_at - FAILED_REST_S:
                raise _unavailable(self._why_failed)
            if self.worker.link is not None and self.worker.link.is_ready:
                return self.worker.link
            if not self.worker.wanted.is_set():
                for setting, source in self._sources.items():
                    if missing := why_missing(source, setting):
                        raise _unavailable(missing)
                self.supervisor.move(self.worker, self.worker.model)
            self._changed.clear()
            await self._changed.wait()

    # ------------------------------------------------------------ the worker

    async def _attend(self) -> None:
        """Report to the worker whether answers stream; end it once it is idle."""
        while True:
            link, is_busy = self.worker.link, self._is_busy()
            if link is not None and link.is_ready and is_busy != (link is self._busy_link):
                link.send_late(ShortTurns(is_busy))
                self._busy_link = link if is_busy else None
            await asyncio.sleep(PACE_S)
            if not self.waiting:
                self._request_came.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_S):
                        await self._request_came.wait()
                if not self._request_came.is_set():
                    self.supervisor.move(self.worker, None)
                    return

    def _on_ready(self, link: WorkerLink) -> None:
        assert link.heartbeat is not None, "a ready worker sent no heartbeat"
        self.facts = link.heartbeat.encoders
        self._changed.set()

    def _on_failure(self, worker: WorkerProcess, reason: str) -> bool:
        """Fail the waiting requests, and those of the next FAILED_REST_S, with `reason`."""
        self._why_failed, self._failed_at = reason, awake_s()
        self.supervisor.leave_empty(worker)
        self._changed.set()
        return True


def make_encoders(
    settings: Settings, environ: Mapping[str, str], pool: WorkerPool
) -> Encoders | None:
    """Return the encoders, or None if neither model is set. No process is started yet.

    A missing builtin model causes a warning now, and an error for each request later.

    Raises:
        StartError: a setting names no possible model, or a model whose name cannot be served.
    """
    for model in encoders_of(settings).values():
        setting = SETTINGS[model.kind]
        try:
            log.info("%s is %s", setting, check_model(model.path, setting))
        except ModelMissing as error:
            log.warning("%s", error)
    if not settings.embedding_model and not settings.rerank_model:
        return None
    return Encoders(settings, environ, lambda: any(link.answers for link in pool.links.values()))


def _unavailable(why: str) -> RequestError:
    return RequestError(
        f"Embeddings cannot be computed now: {why}",
        status=503,
        code="embeddings_unavailable",
        retry_after_s=round(FAILED_REST_S),
    )
