"""Whatever JSON a client sends is read as texts to embed or rank, or is its own mistake."""

import base64
import struct
from typing import Any

import orjson
from hypothesis import given, strategies as st

from hearth.proxy.embeddings.encoder_bodies import (
    TEXTS_MAX,
    Encoding,
    embeddings_json,
    json_bytes_max,
    read_embedding,
    read_rerank,
)
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Embedded

VALUES = st.recursive(
    (st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.just("text"), inner, max_size=1),
    max_leaves=8,
)
NAMES = ("input", "dimensions", "encoding_format", "truncate", "query", "documents", "top_n")
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(body=st.dictionaries(st.sampled_from((*NAMES, "return_documents")), VALUES))
def test_a_body_is_read_or_refused_with_the_field(body: dict[str, Any]) -> None:
    try:
        request = read_embedding(body)
        assert 1 <= len(request.texts) <= TEXTS_MAX and all(request.texts)
    except RequestError as error:
        assert (error.status, bool(error.param)) == (400, True)
    try:
        ranked = read_rerank(body)
        assert ranked.query and all(ranked.documents)
        assert 1 <= ranked.results_max <= len(ranked.documents)
    except RequestError as error:
        assert (error.status, bool(error.param)) == (400, True)


@given(
    rows=st.integers(1, 5).flatmap(
        lambda width: st.lists(
            st.lists(FLOATS, min_size=width, max_size=width), min_size=1, max_size=6
        )
    ),
    encoding=st.sampled_from(("float", "base64")),
)
def test_what_is_written_is_what_was_computed(rows: list[list[float]], encoding: Encoding) -> None:
    width = len(rows[0])
    packed = b"".join(struct.pack(f"<{width}f", *row) for row in rows)
    found = Embedded("id", packed, width, [3] * len(rows))
    content = b"".join(embeddings_json(found, encoding, "it"))
    assert len(content) <= json_bytes_max(found, encoding)
    told = orjson.loads(content)
    values = [row["embedding"] for row in told["data"]]
    if encoding == "base64":
        values = [list(struct.unpack(f"<{width}f", base64.b64decode(row))) for row in values]
    assert values == rows
    assert told["usage"]["total_tokens"] == 3 * len(rows)
