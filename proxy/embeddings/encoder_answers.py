"""Writes the answers of /v1/embeddings and /v1/rerank as JSON.

A large answer is written row by row, in a thread: between two rows the event loop gets its turn.
It is sent in parts, since to copy all of it at once would hold the loop up.
"""

import base64
import struct
from collections.abc import Iterator
from typing import Any, Final

import orjson

from hearth.proxy.embeddings.encoder_bodies import Encoding, RerankRequest
from hearth.shared.wire_messages import Embedded, Reranked

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
