"""Reads the bodies of Ollama's /api/embed and its older /api/embeddings, and writes the answers."""

from typing import Any, Final

import orjson

from hearth.proxy.api.body import field_readers as fields
from hearth.proxy.api.body.field_readers import Body
from hearth.proxy.embeddings.encoder_answers import in_parts, vectors_json
from hearth.proxy.embeddings.encoder_bodies import DIMENSIONS_MAX, EmbeddingRequest, read_texts
from hearth.shared.wire_messages import Embedded

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


def answer(path: str, found: Embedded, model: str, seconds: float) -> list[bytes]:
    """Return the answer in parts; `model` is as the client named it. Any thread."""
    vectors = vectors_json(found, "float")
    if path == EMBED_ONE:
        return [b'{"embedding":%b}' % next(vectors, b"[]")]
    told: dict[str, Any] = {
        "model": model,
        "total_duration": round(seconds * 1e9),
        "prompt_eval_count": sum(found.tokens),
    }
    return in_parts(b'%b,"embeddings":[' % orjson.dumps(told)[:-1], vectors)
