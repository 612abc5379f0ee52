"""Reads the bodies of /v1/embeddings, /v1/rerank and Ollama's /api/embed, and writes the answers.

A large answer is written row by row, in a thread: between two rows the event loop gets its turn.
It is sent in parts, since to copy all of it at once would hold the loop up.
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

TEXTS_MAX: Final = 2_048  # of one request, as OpenAI has it
DIMENSIONS_MAX: Final = 65_536
TOKEN_ID_MAX: Final = 2**31 - 1

EmbeddingInput = str | list[int]  # a text, or the token ids of one
Encoding = Literal["float", "base64"]


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """What a request to embed asks for."""

    texts: list[EmbeddingInput]
    dimensions: int | None
    encoding: Encoding
    truncate: bool  # what is too long is cut; else it is refused


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """What a request to rank asks for."""

    query: str
    documents: list[str]
    results_max: int
    return_documents: bool


def read_embedding(body: Body) -> EmbeddingRequest:
    """Return what an OpenAI body asks for. Raises: RequestError."""
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
    """Return what a body of Cohere's or Jina's shape asks for. Raises: RequestError."""
    query = text(body, "query")
    if not query:
        refuse("query", query, "a string that is not empty")
    given = json_list(body.get("documents"), "documents")
    _check_count(given, "documents")
    documents = [_document(row, index) for index, row in enumerate(given)]
    top = integer(body, "top_n", 1, 2**31)
    return RerankRequest(
        query=query,
        documents=documents,
        results_max=len(documents) if top is None else min(top, len(documents)),
        return_documents=boolean(body, "return_documents"),
    )


def read_texts(given: Any, param: str) -> list[EmbeddingInput]:
    """Return the inputs: of one text, of the token ids of one, or of a list of either."""
    if type(given) is str or (type(given) is list and given and type(given[0]) is int):
        return [_text(given, param)]
    if type(given) is not list:
        refuse(param, given, "a string, or a list of strings or of token ids")
    _check_count(given, param)
    return [_text(row, f"{param}[{index}]") for index, row in enumerate(given)]


def _text(value: Any, param: str) -> EmbeddingInput:
    if type(value) is str and value:
        return value
    if (
        type(value) is list
        and value
        and all(type(one) is int and 0 <= one <= TOKEN_ID_MAX for one in value)
    ):
        return value
    refuse(param, value, "a string that is not empty, or a list of token ids")


def _document(row: Any, index: int) -> str:
    value = row.get("text") if type(row) is dict else row
    if type(value) is not str or not value:
        refuse(f"documents[{index}]", row, 'a string that is not empty, or {"text": one}')
    return value


def _check_count(given: list[Any], param: str) -> None:
    if not 1 <= len(given) <= TEXTS_MAX:
        remedy = "Send more requests with fewer each." if given else "Send at least one."
        raise RequestError(
            f"{param} has {len(given):,} texts and this server accepts 1 to {TEXTS_MAX:,} in one "
            f"request. {remedy}",
            param=param,
        )


FLOAT_BYTES: Final = 4
PART_BYTES: Final = 256 * 1024
# About what JSON takes for each byte of a vector: a float32 is some 20 characters, base64 is 4 / 3.
_JSON_BYTES: Final[dict[Encoding, int]] = {"float": 6, "base64": 2}


def json_bytes_max(found: Embedded, encoding: Encoding) -> int:
    """Return at least what the vectors take as JSON."""
    return len(found.vectors) * _JSON_BYTES[encoding] + 64 * len(found.tokens) + 1_024


def embeddings_json(found: Embedded, encoding: Encoding, model: str) -> list[bytes]:
    """Return OpenAI's answer in parts."""
    tokens = sum(found.tokens)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    head = orjson.dumps({"object": "list", "model": model, "usage": usage})
    rows = (
        b'{"object":"embedding","index":%d,"embedding":%b}' % (index, vector)
        for index, vector in enumerate(vectors_json(found, encoding))
    )
    return in_parts(b'%b,"data":[' % head[:-1], rows)


def in_parts(head: bytes, rows: Iterator[bytes]) -> list[bytes]:
    """Return `head`, the rows of its list and its end, each part PART_BYTES and a row at most."""
    parts, part = [], bytearray(head)
    for index, row in enumerate(rows):
        part += b"," + row if index else row
        if len(part) >= PART_BYTES:
            parts.append(bytes(part))
            part.clear()
    return [*parts, bytes(part) + b"]}"]


def vectors_json(found: Embedded, encoding: Encoding) -> Iterator[bytes]:
    """Yield each vector as JSON."""
    length = found.dimensions * FLOAT_BYTES
    assert len(found.vectors) == length * len(found.tokens), (len(found.vectors), length)
    floats = struct.Struct(f"<{found.dimensions}f")
    vectors = memoryview(found.vectors)
    for index in range(len(found.tokens)):
        row = vectors[index * length : (index + 1) * length]
        if encoding == "base64":
            yield b'"%b"' % base64.b64encode(row)
        else:
            yield orjson.dumps(floats.unpack(row))


def rerank_answer(
    found: Reranked, request: RerankRequest, model: str, request_id: str
) -> dict[str, Any]:
    """Return an answer that Cohere's clients and Jina's read, the best document first."""
    order = sorted(range(len(found.scores)), key=lambda index: -found.scores[index])
    results = [_result(found, request, index) for index in order[: request.results_max]]
    return {
        "id": request_id,
        "object": "list",
        "model": model,
        "results": results,
        "usage": {"prompt_tokens": found.tokens, "total_tokens": found.tokens},
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": found.tokens, "output_tokens": 0},
        },
    }


def _result(found: Reranked, request: RerankRequest, index: int) -> dict[str, Any]:
    row: dict[str, Any] = {"index": index, "relevance_score": found.scores[index]}
    if request.return_documents:
        row["document"] = {"text": request.documents[index]}
    return row


EMBED: Final = "/api/embed"
EMBED_ONE: Final = "/api/embeddings"
OLLAMA_PATHS: Final = (EMBED, EMBED_ONE)


def read_ollama(path: str, body: Body) -> EmbeddingRequest:
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


def ollama_json(path: str, found: Embedded, model: str, seconds: float) -> list[bytes]:
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
