"""Runs one worker that embeds texts and ranks documents: `python -m hearth.worker.embeddings.main`.

The proxy's supervisor starts it for EMBEDDING_MODEL and RERANK_MODEL. The texts of requests are
never logged.

Threads: the main thread is the wire thread (socket, heartbeats). The `inference` thread loads the
models and computes, and is the only thread that uses MLX.
"""

import os
import queue
import resource
import sys
import time
from collections.abc import Sequence
from typing import Final, TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from hearth.shared.errors import RequestError, StartError
from hearth.shared.settings import Settings
from hearth.shared.wire_messages import (
    Embed,
    Embedded,
    EncoderFacts,
    Failed,
    Heartbeat,
    Rerank,
    Reranked,
)
from hearth.shared.worker_files import forwarded_path
from hearth.shared.zmq_transport import RouterPort
from hearth.worker.embeddings.encoder_models import (
    EmbeddingModel,
    LayerRests,
    RerankModel,
    check_dimensions,
    check_numbers,
    cut_vectors,
)
from hearth.worker.embeddings.job_queue import Job, JobQueue
from hearth.worker.embeddings.length_batches import MLX_CACHE_BYTES, ForwardPace
from hearth.worker.engine.model_loader import may_run_code
from hearth.worker.schedule.client_lease import ClientLease
from hearth.worker.threads.shutdown import Shutdown
from hearth.worker.threads.start_worker import refuse_start, run_worker
from hearth.worker.threads.wire_thread import WireThread

FREE_S: Final = 0.1  # time of a forward while no answer streams; new requests wait as long
BUSY_S: Final = 0.025  # time of a forward while answers stream
FREE_TOKENS: Final = 2_048  # first guess of the tokens that a forward computes in FREE_S
BUSY_TOKENS: Final = 128  # first guess of the tokens that a forward computes in BUSY_S
OPEN_MAX: Final = 4_096  # open requests; the proxy sends fewer
END_S_MAX: Final = 5.0  # time for a forward to end when the process ends

# Requests from the wire thread; None = this worker ends.
Inbox: TypeAlias = "queue.SimpleQueue[tuple[ClientLease, Embed | Rerank] | None]"


class EncoderWorker:
    """Computes the proxy's requests, step by step.

    Invariant: `_facts` is empty until the models are loaded; until then heartbeats say "loading".
    """

    def __init__(self, settings: Settings, worker_id: int, endpoint: str) -> None:
        """Bind `endpoint`. Raises StartError if it cannot be bound."""
        self._settings, self._endpoint = settings, endpoint
        self._inbox: Inbox = queue.SimpleQueue()
        self._embedding: EmbeddingModel  # set only if its setting names a model
        self._rerank: RerankModel
        self._facts: dict[str, EncoderFacts] = {}
        self._jobs = JobQueue()
        self._steps = 0
        self._rests = LayerRests()  # rests are wanted while answers stream
        self._paces = {  # key: whether answers stream
            False: ForwardPace(FREE_S, FREE_TOKENS),
            True: ForwardPace(BUSY_S, BUSY_TOKENS),
        }
        self._port = RouterPort(endpoint)
        self._shutdown = Shutdown(self._port.wake)
        self._wire = WireThread(self._port, worker_id, self._inbox, self._heartbeat, OPEN_MAX)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._forwarded = os.open(forwarded_path(endpoint), flags, 0o600)

    def run(self) -> int:
        """Work until SIGTERM or the supervisor's end; return the exit code."""
        self._shutdown.listen()
        inference = self._shutdown.start_thread("inference", self._inference)
        with self._shutdown.guard("wire"):
            self._wire.run(self._shutdown.is_begun)
        self._inbox.put(None)
        inference.join(END_S_MAX)
        self._port.close()
        return self._shutdown.exit_code

    def _heartbeat(self, _: Sequence[str]) -> Heartbeat:
        return Heartbeat(
            "ready" if self._facts else "loading",
            *(len(self._jobs), self._inbox.qsize(), self._steps, 0, None),
            cpu_s=time.process_time(),
            encoders=self._facts,
        )

    # ------------------------------------------------------------ the inference thread

    def _inference(self) -> None:
        """Load the models, and compute jobs until the worker ends."""
        try:
            self._load()
        except StartError as error:
            self._shutdown.begin(refuse_start(self._endpoint, error))
            return
        while self._take_requests():
            job = self._jobs.next()
            try:
                self._step(job)
            except RequestError as error:
                self._jobs.remove(job)
                self._wire.send(_failed(job.lease, error))
            if not self._jobs:
                mx.clear_cache()

    def _load(self) -> None:
        """Load the models of the settings, and send a heartbeat with their facts.

        Raises StartError.
        """
        mx.set_cache_limit(MLX_CACHE_BYTES)
        settings, facts = self._settings, {}
        if source := settings.embedding_model:
            self._embedding = EmbeddingModel(source, self._rests, may_run_code(settings, source))
            facts["embeddings"] = self._embedding.facts
        if source := settings.rerank_model:
            self._rerank = RerankModel(source, self._rests, may_run_code(settings, source))
            facts["rerank"] = self._rerank.facts
        self._facts = facts
        self._wire.beat_now()

    def _take_requests(self) -> bool:
        """Take the new requests, and wait for one if there is no job; False = the worker ends."""
        for job in self._jobs.take_gone():
            self._wire.send(_failed(job.lease, RequestError("Its client has left.", status=503)))
        while not self._jobs or not self._inbox.empty():
            item = self._inbox.get()
            if item is None:
                return False
            lease, request = item
            try:
                self._jobs.append(self._job(lease, request))
            except RequestError as error:
                self._wire.send(_failed(lease, error))
        return True

    def _job(self, lease: ClientLease, request: Embed | Rerank) -> Job:
        """Return the job of a request. Raises RequestError if it cannot be computed."""
        if isinstance(request, Embed):
            dimensions = request.dimensions
            check_dimensions(dimensions, self._embedding.facts.dimensions)

            def embedded(values: NDArray[np.float32], tokens: list[int]) -> Embedded:
                vectors = cut_vectors(values, dimensions)
                return Embedded(lease.request_id, vectors.tobytes(), vectors.shape[1], tokens)

            return Job(lease, self._embedding, request.texts, request.truncate, embedded)

        self._record_request(lease)  # as tokenising the query may crash
        self._rerank.check_query(request.query)

        def reranked(values: NDArray[np.float32], tokens: list[int]) -> Reranked:
            check_numbers(values)
            return Reranked(lease.request_id, values[:, 0].astype(float).tolist(), sum(tokens))

        pairs = [(request.query, document) for document in request.documents]
        return Job(lease, self._rerank, pairs, True, reranked)

    def _record_request(self, lease: ClientLease) -> None:
        """Write the id of the computed request to a file, which the proxy reads after a crash."""
        os.pwrite(self._forwarded, lease.request_id.encode(), 0)

    def _step(self, job: Job) -> None:
        """Do one step of a job, and send the answer once all is computed."""
        self._record_request(job.lease)
        self._steps += 1
        if not job.is_tokenised:
            job.tokenise()
            return
        self._rests.are_wanted = self._wire.short_turns
        rested_s = self._rests.rested_s
        computed_s = job.compute(self._paces[self._rests.are_wanted], self._rests.clock)
        if job.is_computed:
            answer = job.answer()
            self._jobs.remove(job)
            self._wire.send(answer)
        self._rests.rest(computed_s - (self._rests.rested_s - rested_s))


def _failed(lease: ClientLease, error: RequestError) -> Failed:
    return Failed(lease.request_id, error.status, error.code, str(error), param=error.param)


def main() -> int:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a dump would hold clients' texts
    return run_worker(
        *("hearth.worker.embeddings.main", __doc__, "embed"),
        lambda settings, options: EncoderWorker(settings, options.worker_id, options.endpoint),
    )


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a forward may not have ended
