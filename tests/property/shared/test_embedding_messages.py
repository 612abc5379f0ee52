"""One side of the pipe reads what the other sent, and nothing else."""

import dataclasses
from typing import Any

import msgpack
import pytest
from hypothesis import given, strategies as st

from hearth.shared import embedding_messages as messages
from hearth.shared.embedding_messages import (
    FRAME_BYTES_MAX,
    LENGTH_BYTES,
    CancelJob,
    Embed,
    EmbeddingMessage,
    body_length,
    decode,
    encode,
)
from hearth.shared.errors import WireError

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
IDS = st.integers(0, 2**63 - 1)
TOKENS = st.lists(st.integers(0, 2**31), max_size=5)
FACTS = st.none() | st.fixed_dictionaries({"architecture": TEXTS, "tokens_max": IDS})
MESSAGES = st.one_of(
    st.builds(
        Embed, IDS, st.lists(TEXTS | TOKENS, max_size=5), st.none() | st.integers(), st.booleans()
    ).filter(lambda asked: asked.dimensions is None or abs(asked.dimensions) < 2**63),
    st.builds(messages.Rerank, IDS, TEXTS, st.lists(TEXTS, max_size=5), st.booleans()),
    st.builds(CancelJob, IDS),
    st.builds(messages.ShortTurns, st.booleans()),
    st.builds(messages.Loaded, FACTS, FACTS),
    st.builds(messages.CannotLoad, TEXTS),
    st.builds(messages.Computing, IDS),
    st.builds(messages.Embedded, IDS, st.binary(max_size=50), IDS, TOKENS),
    st.builds(
        messages.Reranked, IDS, st.lists(st.floats(allow_nan=False), max_size=5), st.integers(0, 9)
    ),
    st.builds(messages.Refused, IDS, TEXTS, st.integers(400, 599), TEXTS, st.none() | TEXTS),
)


@given(MESSAGES)
def test_a_message_is_read_as_it_was_sent(message: EmbeddingMessage) -> None:
    frame = encode(message)
    body = frame[LENGTH_BYTES:]
    assert body_length(frame[:LENGTH_BYTES]) == len(body)
    assert decode(body) == message


@given(st.binary(max_size=30))
def test_no_bytes_end_in_another_error_than_a_wire_error(body: bytes) -> None:
    try:
        message: Any = decode(body)
    except WireError:
        return
    assert dataclasses.is_dataclass(message)


@pytest.mark.parametrize("row", [["Embed", 1], ["Told", 1], [], 5, {"kind": "Embed"}, [["x"]]])
def test_a_message_of_another_version_is_refused(row: Any) -> None:
    with pytest.raises(WireError):
        decode(msgpack.packb(row))


@pytest.mark.parametrize("text", ["\ud800", [2**70]])
def test_what_no_frame_can_hold_is_refused_where_it_is_sent(text: Any) -> None:
    with pytest.raises(WireError, match="Embed cannot be sent"):
        encode(Embed(1, [text], None, False))


def test_a_frame_that_is_too_long_is_not_waited_for() -> None:
    with pytest.raises(WireError, match="the limit is"):
        body_length((FRAME_BYTES_MAX + 1).to_bytes(LENGTH_BYTES, "little"))
