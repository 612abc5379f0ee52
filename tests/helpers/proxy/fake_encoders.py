"""Stands in for the process that embeds and ranks: vectors by digest, scores by shared words."""

import asyncio
import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

from hearth.proxy.embeddings.embedding_process import Embeddings, Reranking
from hearth.shared.embedding_messages import EmbeddingInput, EncoderFacts
from hearth.shared.errors import RequestError


class FakeEncoders:
    """Answers at once, or `error`, or never where it `hangs`; remembers what it was asked."""

    def __init__(self, dimensions: int = 8) -> None:
        self.dimensions = dimensions
        self.asked: list[tuple[Any, ...]] = []
        self.error: RequestError | None = None
        self.hangs = False
        self.cancelled = 0
        self.watch: Callable[[], None] = lambda: None  # called as something is asked

    async def embed(
        self, texts: Sequence[EmbeddingInput], dimensions: int | None = None, truncate: bool = False
    ) -> Embeddings:
        await self._asked(list(texts), dimensions, truncate)
        length = dimensions or self.dimensions
        rows = (vector(text, length) for text in texts)
        packed = b"".join(struct.pack(f"<{length}f", *row) for row in rows)
        return Embeddings(packed, length, [tokens_of(text) for text in texts])

    async def rerank(
        self, query: str, documents: Sequence[str], truncate: bool = False
    ) -> Reranking:
        await self._asked(query, list(documents), truncate)
        words = set(query.split())
        scores = [len(words & set(row.split())) / (len(words) + 1) for row in documents]
        return Reranking(scores, sum(map(tokens_of, documents)))

    def facts(self) -> dict[str, Any]:
        embedding = EncoderFacts("bert", 512, 1_000, self.dimensions, "mean")
        told = {"state": "ready", "embedding": embedding, "rerank": None}
        return told | {"waiting": 0, "starts": 3, "deaths": 2}

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
