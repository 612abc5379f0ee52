"""Stands in for the worker that embeds and ranks: vectors by digest, scores by shared words."""

import asyncio
import hashlib
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hearth.proxy.embeddings.encoder_bodies import EmbeddingInput
from hearth.proxy.request.model_names import ServedModel
from hearth.proxy.workers.supervisor import WorkerProcess
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Embedded, EncoderFacts, Reranked


class FakeEncoders:
    """Answers at once, or `error`, or never where it `hangs`; remembers what it was asked."""

    def __init__(self, dimensions: int = 8) -> None:
        self.dimensions = dimensions
        self.facts = {"embeddings": EncoderFacts("bert", 512, 1_000, dimensions, "mean")}
        self.state, self.waiting = "ready", 0
        self.worker = WorkerProcess(0, Path(), "", ServedModel(""), starts=3, restarts=2)
        self.asked: list[tuple[Any, ...]] = []
        self.error: RequestError | None = None
        self.hangs = False
        self.cancelled = 0
        self.watch: Callable[[], None] = lambda: None  # called as something is asked

    async def embed(
        self, texts: Sequence[EmbeddingInput], dimensions: int | None = None, truncate: bool = False
    ) -> Embedded:
        await self._asked(list(texts), dimensions, truncate)
        length = dimensions or self.dimensions
        rows = (vector(text, length) for text in texts)
        packed = b"".join(struct.pack(f"<{length}f", *row) for row in rows)
        return Embedded("id", packed, length, [tokens_of(text) for text in texts])

    async def rerank(self, query: str, documents: Sequence[str]) -> Reranked:
        await self._asked(query, list(documents))
        words = set(query.split())
        scores = [len(words & set(row.split())) / (len(words) + 1) for row in documents]
        return Reranked("id", scores, sum(map(tokens_of, documents)))

    async def _asked(self, *request: Any) -> None:
        self.asked.append(request)
        self.watch()
        try:
            if self.hangs:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error


def vector(text: EmbeddingInput, length: int) -> list[float]:
    """Return what a text is embedded as: float32 values that fit no shorter form."""
    digest = hashlib.sha256(str(text).encode()).digest()
    values = ((digest[index % 32] + index % 7 + 1) / 991 for index in range(length))
    return list(struct.unpack(f"<{length}f", struct.pack(f"<{length}f", *values)))


def tokens_of(text: EmbeddingInput) -> int:
    return len(text.split()) if isinstance(text, str) else len(text)
