"""Embeds texts and ranks documents for the proxy: `python -m hearth.worker.embeddings.main`.

The proxy starts it, asks on its standard input and hears on its standard output. It ends where its
standard input does, so it never outlives the proxy. Nothing that it is asked is logged.

Threads: this one computes and is the only one that touches MLX; `reader` reads the pipe.
"""

import argparse
import contextlib
import dataclasses
import logging
import os
import queue
import resource
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, BinaryIO, Final, TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from hearth.shared.embedding_messages import (
    LENGTH_BYTES,
    CancelJob,
    CannotLoad,
    Computing,
    Embed,
    Embedded,
    EmbeddingMessage,
    Loaded,
    Refused,
    Rerank,
    Reranked,
    ShortTurns,
    body_length,
    decode,
    encode,
)
from hearth.shared.errors import EXIT_CANNOT_START, RequestError, StartError
from hearth.shared.logging_setup import configure
from hearth.shared.paths import env_file
from hearth.shared.private_temp_directory import temp_environment
from hearth.shared.settings_from_env import Settings, load_settings
from hearth.worker.embeddings.embedding_model import EmbeddingModel, check_dimensions, cut_vectors
from hearth.worker.embeddings.forward_pace import ForwardPace
from hearth.worker.embeddings.job_queue import Job, JobQueue
from hearth.worker.embeddings.layer_rests import LayerRests
from hearth.worker.embeddings.length_batches import MLX_CACHE_BYTES
from hearth.worker.embeddings.rerank_model import RankedPairs, RerankModel
from hearth.worker.embeddings.token_rows import check_numbers
from hearth.worker.engine.model_loader import may_run_code

log = logging.getLogger("hearth.worker.embeddings.main")  # run with -m, its name is __main__

FREE_S: Final = 0.1  # of a forward beside which no answer streams: others wait for its end
BUSY_S: Final = 0.025  # of one beside which answers stream
FREE_TOKENS: Final = 2_048  # first guesses
BUSY_TOKENS: Final = 128
END_S_MAX: Final = 5.0  # for a forward whose process is to end

Inbox: TypeAlias = "queue.SimpleQueue[EmbeddingMessage | None]"  # None: the proxy is gone


class EmbeddingServer:
    """Computes what the proxy asks, step by step. Owner: the main thread."""

    def __init__(self, inbox: Inbox, answers: BinaryIO) -> None:
        self._inbox, self._answers = inbox, answers
        self._embedding: EmbeddingModel | None = None
        self._rerank: RerankModel | None = None
        self._jobs = JobQueue()
        self._rests = LayerRests()  # wanted = answers stream
        self._paces = {False: ForwardPace(FREE_S, FREE_TOKENS)}
        self._paces[True] = ForwardPace(BUSY_S, BUSY_TOKENS)

    def load(self, settings: Settings, embedding: str, rerank: str) -> None:
        """Load the models that are named, and tell the proxy. Raises StartError."""
        if embedding:
            runs_code = may_run_code(settings, embedding)
            self._embedding = EmbeddingModel(embedding, self._rests, runs_code)
        if rerank:
            runs_code = may_run_code(settings, rerank)
            self._rerank = RerankModel(rerank, self._rests, runs_code)
        self.send(Loaded(_facts_of(self._embedding), _facts_of(self._rerank)))

    def send(self, message: EmbeddingMessage) -> None:
        self._answers.write(encode(message))
        self._answers.flush()

    def run(self) -> None:
        """Answer until the proxy has nothing more to ask."""
        while self._take_messages():
            job = self._jobs.next()
            with self._refusing(job.request_id):
                self._step(job)
            if not self._jobs:
                mx.clear_cache()

    @contextlib.contextmanager
    def _refusing(self, request_id: int) -> Iterator[None]:
        """Have a request that cannot be computed end, and the proxy told why."""
        try:
            yield
        except RequestError as error:
            self._jobs.remove(request_id)
            told = (str(error), error.status, error.code, error.param)
            self.send(Refused(request_id, *told))

    def _take_messages(self) -> bool:
        """Take what has come, and wait where there is nothing to do; False = the proxy is gone."""
        while not self._jobs or not self._inbox.empty():
            message = self._inbox.get()
            if message is None:
                return False
            self._take(message)
        return True

    def _take(self, message: EmbeddingMessage) -> None:
        if isinstance(message, ShortTurns):
            self._rests.are_wanted = message.are_wanted
        elif isinstance(message, CancelJob):
            self._jobs.remove(message.request_id)
        elif isinstance(message, Rerank):
            with self._refusing(message.request_id):
                self._jobs.add(self._rerank_job(message))
        elif isinstance(message, Embed):
            with self._refusing(message.request_id):
                self._jobs.add(self._embedding_job(message))

    def _embedding_job(self, asked: Embed) -> Job:
        assert self._embedding is not None, "the proxy asks for what it named"
        check_dimensions(asked.dimensions, self._embedding.facts.dimensions)

        def finish(values: NDArray[np.float32], tokens: list[int]) -> Embedded:
            vectors = cut_vectors(values, asked.dimensions)
            return Embedded(asked.request_id, vectors.tobytes(), vectors.shape[1], tokens)

        return Job(asked.request_id, self._embedding, asked.texts, asked.truncate, finish)

    def _rerank_job(self, asked: Rerank) -> Job:
        assert self._rerank is not None, "the proxy asks for what it named"
        self.send(Computing(asked.request_id))  # the query is tokenised

        def finish(values: NDArray[np.float32], tokens: list[int]) -> Reranked:
            check_numbers(values)
            return Reranked(asked.request_id, [float(value) for value in values[:, 0]], sum(tokens))

        pairs = RankedPairs(self._rerank, asked.query)
        return Job(asked.request_id, pairs, asked.documents, asked.truncate, finish)

    def _step(self, job: Job) -> None:
        """Do a part of a job, and answer it once it is whole."""
        self.send(Computing(job.request_id))
        if not job.is_tokenised:
            job.tokenise()
            return
        rested_s = self._rests.rested_s
        computed_s = job.compute(self._paces[self._rests.are_wanted], self._rests.clock)
        if job.is_computed:
            self._jobs.remove(job.request_id)
            self.send(job.answer())
        self._rests.rest(computed_s - (self._rests.rested_s - rested_s))


def _facts_of(model: EmbeddingModel | RerankModel | None) -> dict[str, Any] | None:
    return None if model is None else dataclasses.asdict(model.facts)


def read_frames(pipe: BinaryIO, inbox: Inbox) -> None:
    """Put what the proxy says into `inbox`; end this process where the proxy is gone."""
    try:
        while len(head := pipe.read(LENGTH_BYTES)) == LENGTH_BYTES:
            inbox.put(decode(pipe.read(body_length(head))))
    finally:
        inbox.put(None)
        time.sleep(END_S_MAX)
        os._exit(1)  # the main thread loads a model, or a forward does not end


def main() -> int:
    parser = argparse.ArgumentParser(prog="hearth.worker.embeddings.main", description=__doc__)
    parser.add_argument("--embedding-model", default="")
    parser.add_argument("--rerank-model", default="")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a dump would hold clients' texts
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    inbox: Inbox = queue.SimpleQueue()
    server = EmbeddingServer(inbox, answers)
    reader = threading.Thread(target=read_frames, args=(sys.stdin.buffer, inbox), daemon=True)
    reader.start()
    try:
        settings = load_settings(os.environ, env_file())
        configure(settings.log_level.upper(), "embed", settings.log_prompts)
        os.environ |= temp_environment(os.environ, settings.instance_dir)
        mx.set_cache_limit(MLX_CACHE_BYTES)
        server.load(settings, options.embedding_model, options.rerank_model)
    except StartError as error:
        server.send(CannotLoad(str(error)))
        return EXIT_CANNOT_START
    with contextlib.suppress(BrokenPipeError):  # the proxy is gone
        server.run()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # the reader may wait for a pipe
