"""The codec over all messages, and over all bytes."""

from typing import Any

import msgpack
import pytest
from hypothesis import given, strategies as st

from hearth.shared import wire_messages
from hearth.shared.errors import WireError

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
PROMPTS = st.builds(
    wire_messages.Prompt,
    messages=st.lists(JSON, max_size=3),
    tools=st.lists(JSON, max_size=2),
    template_kwargs=st.dictionaries(st.text(), JSON, max_size=2),
    deferred=st.lists(JSON, max_size=2),
)
CONSTRAINTS = st.builds(
    wire_messages.Constraints, schema=st.none() | st.dictionaries(st.text(), JSON, max_size=3)
)
DIVERGENCES = st.none() | st.dictionaries(st.text(), JSON, max_size=3)
USAGES = st.builds(wire_messages.Usage, divergence=DIVERGENCES)
LOGPROBS = st.builds(
    wire_messages.TokenLogprob, top=st.lists(st.lists(JSON, max_size=2), max_size=2)
)
CARRIED = {
    wire_messages.Submit: {"prompt": PROMPTS, "constraints": CONSTRAINTS},
    wire_messages.Count: {"prompt": PROMPTS},
}
CARRIED[wire_messages.Told] = {"body": st.dictionaries(st.text(), JSON, max_size=3)}
CARRIED[wire_messages.Embed] = {
    "texts": st.lists(st.text() | st.lists(st.integers(0, 2**31), max_size=3), max_size=3)
}
CARRIED[wire_messages.Finished] = {"usage": USAGES}
CARRIED[wire_messages.Delta] = {"logprobs": st.lists(LOGPROBS, max_size=2)}
MESSAGES = st.one_of(*(st.builds(k, **CARRIED.get(k, {})) for k in wire_messages.KINDS.values()))


@given(MESSAGES)
def test_a_message_survives_the_wire_or_is_refused_before_it(
    message: wire_messages.Message,
) -> None:
    try:
        frame = wire_messages.encode(message)
    except WireError:
        return
    assert repr(wire_messages.decode(frame)) == repr(message)  # repr, because NaN != NaN


@pytest.mark.parametrize("value", [2**64, "\ud800", {1, 2}], ids=["int", "surrogate", "type"])
def test_what_msgpack_cannot_carry_is_refused(value: Any) -> None:
    message = wire_messages.Submit("r", wire_messages.Prompt([value]), wire_messages.Sampling())
    with pytest.raises(WireError, match="Submit cannot be sent"):
        wire_messages.encode(message)


def test_nesting_past_the_limit_is_refused_and_not_a_crash() -> None:
    deep: Any = "x"
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(WireError, match="cannot be sent"):
        wire_messages.encode(
            wire_messages.Submit("r", wire_messages.Prompt([deep]), wire_messages.Sampling())
        )


KINDS = st.sampled_from(sorted(wire_messages.KINDS)) | st.text(max_size=5)


@given(
    st.binary()
    | JSON.map(msgpack.packb)
    | st.tuples(KINDS, st.dictionaries(st.text(max_size=8), JSON, max_size=5)).map(
        lambda pair: msgpack.packb({**pair[1], "kind": pair[0]})
    )
)
def test_any_bytes_are_a_message_or_a_wire_error(frame: bytes) -> None:
    try:
        message = wire_messages.decode(frame)
    except WireError:
        return
    assert type(message) in wire_messages.KINDS.values()


def test_a_field_of_the_wrong_type_names_itself() -> None:
    frame = msgpack.packb({"kind": "Cancel", "request_id": 7})
    with pytest.raises(WireError, match=r"Cancel\.request_id is int, declared str"):
        wire_messages.decode(frame)
    with pytest.raises(WireError, match="lacks, or has beyond its fields: 'request_id'"):
        wire_messages.decode(msgpack.packb({"kind": "Cancel"}))
