"""Reads the bodies of /v1/embeddings, /v1/rerank and Ollama's /api/embed, and writes the answers.

A large answer is serialised vector by vector in a thread, so that the event loop can run between
two vectors. It is sent in parts, because copying all of it at once would block the loop.
"""

import base64
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import orjson

from hearth.proxy.api.body import field_readers as fields
from hearth.proxy.api.body.field_readers import Body, boolean, integer, json_list, refuse, text
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Embedded, Reranked

TEXTS_MAX: Final = 2_048  # texts per request; OpenAI has the same limit
DIMENSIONS_MAX: Final = 65_536
TOKEN_ID_MAX: Final = 2**31 - 1

EmbeddingInput = str | list[int]  # a text, or its token ids
Encoding = Literal["float", "base64"]


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """The parsed body of a request to embed."""

    texts: list[EmbeddingInput]
    dimensions: int | None
    encoding: Encoding
    truncate: bool  # whether a text that is too long is cut, not refused


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """The parsed body of a request to rank."""

    query: str
    documents: list[str]
    results_max: int
    return_documents: bool


def read_embedding(body: Body) -> EmbeddingRequest:
    """Parse a body of OpenAI's shape. Raises: RequestError."""
    encoding = text(body, "encoding_format") or "float"
    if encoding not in ("float", "base64"):
        refuse("encoding_format", encoding, "float or base64")
    return EmbeddingRequest(
        texts=read_texts(body.get("input"), "input"),
        dimensions=integer(body, "dimensions", 1, DIMENSIONS_MAX),
        encoding="base64" if encoding == "base64" else "float",
        truncate=boolean(body, "truncate"),
    )


def read_rerank(body: Body) -> RerankRequest:
    """Parse a body of Cohere's or Jina's shape. Raises: RequestError."""
    query = text(body, "query")
    if not query:
        refuse("query", query, "a string that is not empty")
    inputs = json_list(body.get("documents"), "documents")
    _check_count(inputs, "documents")
    documents = [_document(document, index) for index, document in enumerate(inputs)]
    top = integer(body, "top_n", 1, 2**31)
    return RerankRequest(
        query=query,
        documents=documents,
        results_max=len(documents) if top is None else min(top, len(documents)),
        return_documents=boolean(body, "return_documents"),
    )


def read_texts(value: Any, param: str) -> list[EmbeddingInput]:
    """Return the inputs in one text, in one list of token ids, or in a list of both kinds."""
    if type(value) is str or (type(value) is list and value and type(value[0]) is int):
        return [_text(value, param)]
    if type(value) is not list:
        refuse(param, value, "a string, or a list of strings or of token ids")
    _check_count(value, param)
    return [_text(item, f"{param}[{index}]") for index, item in enumerate(value)]


def _text(value: Any, param: str) -> EmbeddingInput:
    if type(value) is str and value:
        return value
    if (
        type(value) is list
        and value
        and all(type(token_id) is int and 0 <= token_id <= TOKEN_ID_MAX for token_id in value)
    ):
        return value
    refuse(param, value, "a string that is not empty, or a list of token ids")


def _document(document: Any, index: int) -> str:
    text = document.get("text") if type(document) is dict else document
    if type(text) is not str or not text:
        refuse(f"documents[{index}]", document, 'a string that is not empty, or {"text": one}')
    return text


def _check_count(texts: list[Any], param: str) -> None:
    if not 1 <= len(texts) <= TEXTS_MAX:
        remedy = "Send more requests with fewer each." if texts else "Send at least one."
        raise RequestError(
            f"{param} has {len(texts):,} texts and this server accepts 1 to {TEXTS_MAX:,} in one "
            f"request. {remedy}",
            param=param,
        )


FLOAT_BYTES: Final = 4
PART_BYTES: Final = 256 * 1024
# JSON bytes per byte of a vector, rounded up: some 20 / 4 as a list of floats, 4 / 3 as base64.
_JSON_BYTES: Final[dict[Encoding, int]] = {"float": 6, "base64": 2}


def json_bytes_max(embedded: Embedded, encoding: Encoding) -> int:
    """Return an upper bound of the vectors' size as JSON."""
    return len(embedded.vectors) * _JSON_BYTES[encoding] + 64 * len(embedded.tokens) + 1_024


def embeddings_json(embedded: Embedded, encoding: Encoding, model: str) -> list[bytes]:
    """Return the answer in OpenAI's shape, in parts."""
    tokens = sum(embedded.tokens)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    head = orjson.dumps({"object": "list", "model": model, "usage": usage})
    items = (
        b'{"object":"embedding","index":%d,"embedding":%b}' % (index, vector)
        for index, vector in enumerate(vectors_json(embedded, encoding))
    )
    return in_parts(b'%b,"data":[' % head[:-1], items)


def in_parts(head: bytes, items: Iterator[bytes]) -> list[bytes]:
    """Return the JSON of `head` and `items` in parts, each at most one item above PART_BYTES."""
    parts, part = [], bytearray(head)
    for index, item in enumerate(items):
        part += b"," + item if index else item
        if len(part) >= PART_BYTES:
            parts.append(bytes(part))
            part.clear()
    return [*parts, bytes(part) + b"]}"]


def vectors_json(embedded: Embedded, encoding: Encoding) -> Iterator[bytes]:
    """Yield each vector as JSON."""
    length = embedded.dimensions * FLOAT_BYTES
    assert len(embedded.vectors) == length * len(embedded.tokens), (len(embedded.vectors), length)
    floats = struct.Struct(f"<{embedded.dimensions}f")
    vectors = memoryview(embedded.vectors)
    for index in range(len(embedded.tokens)):
        vector = vectors[index * length : (index + 1) * length]
        if encoding == "base64":
            yield b'"%b"' % base64.b64encode(vector)
        else:
            yield orjson.dumps(floats.unpack(vector))


def rerank_answer(
    reranked: Reranked, request: RerankRequest, model: str, request_id: str
) -> dict[str, Any]:
    """Return an answer in both Cohere's and Jina's shape, with the best document first."""
    order = sorted(range(len(reranked.scores)), key=lambda index: -reranked.scores[index])
    results = [_result(reranked, request, index) for index in order[: request.results_max]]
    return {
        "id": request_id,
        "object": "list",
        "model": model,
        "results": results,
        "usage": {"prompt_tokens": reranked.tokens, "total_tokens": reranked.tokens},
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": reranked.tokens, "output_tokens": 0},
        },
    }


def _result(reranked: Reranked, request: RerankRequest, index: int) -> dict[str, Any]:
    result: dict[str, Any] = {"index": index, "relevance_score": reranked.scores[index]}
    if request.return_documents:
        result["document"] = {"text": request.documents[index]}
    return result


EMBED: Final = "/api/embed"
EMBED_ONE: Final = "/api/embeddings"
OLLAMA_PATHS: Final = (EMBED, EMBED_ONE)


def read_ollama(path: str, body: Body) -> EmbeddingRequest:
    """Parse an Ollama body at `path`; a request without texts only checks the model.

    Raises:
        RequestError: a field has a value that the API does not allow.
    """
    name = "input" if path == EMBED else "prompt"
    value = body.get(name)
    if path == EMBED_ONE:
        fields.text(body, name)
    elif type(value) is list and not all(type(item) is str for item in value):
        fields.refuse(name, value, "a string or a list of strings")
    return EmbeddingRequest(
        texts=read_texts(value, name) if value else [],
        dimensions=fields.integer(body, "dimensions", 1, DIMENSIONS_MAX),
        encoding="float",
        truncate=fields.boolean(body, "truncate", default=True),
    )


def ollama_json(path: str, embedded: Embedded, model: str, seconds: float) -> list[bytes]:
    """Return the answer in Ollama's shape, in parts; `model` is the client's name. Any thread."""
    vectors = vectors_json(embedded, "float")
    if path == EMBED_ONE:
        return [b'{"embedding":%b}' % next(vectors, b"[]")]
    fields: dict[str, Any] = {
        "model": model,
        "total_duration": round(seconds * 1e9),
        "prompt_eval_count": sum(embedded.tokens),
    }
    return in_parts(b'%b,"embeddings":[' % orjson.dumps(fields)[:-1], vectors)
