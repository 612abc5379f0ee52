"""Reads the bodies of Ollama's /api/embed and its older /api/embeddings, and writes the answers."""

import struct
from typing import Any, Final

import orjson

from hearth.proxy.api.body import field_readers as fields
from hearth.proxy.api.body.field_readers import Body
from hearth.proxy.embeddings.embedding_process import Embeddings
from hearth.proxy.embeddings.encoder_answers import FLOAT_BYTES
from hearth.proxy.embeddings.encoder_bodies import DIMENSIONS_MAX, EmbeddingRequest, read_texts

EMBED: Final = "/api/embed"
EMBED_ONE: Final = "/api/embeddings"
PATHS: Final = (EMBED, EMBED_ONE)


def read(path: str, body: Body) -> EmbeddingRequest:
    """Return what a body at `path` asks for; no texts = only that the model be there.

    Raises:
        RequestError: a field is not what the API allows.
    """
    name = "input" if path == EMBED else "prompt"
    given = body.get(name)
    if path == EMBED_ONE:
        fields.text(body, name)
    elif type(given) is list and not all(type(row) is str for row in given):
        fields.refuse(name, given, "a string or a list of strings")
    return EmbeddingRequest(
        texts=read_texts(given, name) if given else [],
        dimensions=fields.integer(body, "dimensions", 1, DIMENSIONS_MAX),
        encoding="float",
        truncate=fields.boolean(body, "truncate", default=True),
    )


def answer(path: str, found: Embeddings, model: str, seconds: float) -> bytes:
    """Return the answer in JSON; `model` is as the client named it. Any thread."""
    length = found.dimensions * FLOAT_BYTES
    floats = struct.Struct(f"<{found.dimensions}f")
    vectors = memoryview(found.vectors)
    starts = range(0, length * len(found.tokens), length or 1)
    rows = [orjson.dumps(floats.unpack(vectors[at : at + length])) for at in starts]
    if path == EMBED_ONE:
        return b'{"embedding":%b}' % (rows[0] if rows else b"[]")
    told: dict[str, Any] = {
        "model": model,
        "total_duration": round(seconds * 1e9),
        "prompt_eval_count": sum(found.tokens),
    }
    return b'%b,"embeddings":[%b]}' % (orjson.dumps(told)[:-1], b",".join(rows))
