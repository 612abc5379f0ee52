"""Bodies of /tokenize, /detokenize and /apply-template, and answers that both clients read."""

import struct
from typing import Any

import orjson
import pytest
from hypothesis import given, strategies as st

from hearth.proxy.api import tokenize_endpoints as routes
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Counted, TokenQuery

HALVES = Counted("r", 3, struct.pack("<3I", 5, 6, 7), "a🦊".encode(), struct.pack("<3I", 1, 3, 5))


def told(body: dict[str, Any], counted: Counted, path: str = routes.TOKENIZE) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(routes.answer(path, body, counted, 100))
    return found


@pytest.mark.parametrize(
    ("body", "query"),
    [
        ({"content": "x"}, TokenQuery("ids", adds_beginning=False)),
        (
            {"content": "x", "add_special": True, "parse_special": False},
            TokenQuery("ids", reads_controls=False),
        ),
        ({"content": "x", "with_pieces": True}, TokenQuery("pieces", adds_beginning=False)),
        ({"prompt": "x"}, TokenQuery("ids")),
        ({"prompt": "x", "add_special_tokens": False}, TokenQuery("ids", adds_beginning=False)),
        ({"prompt": "x", "return_token_strs": True}, TokenQuery("pieces")),
    ],
)
def test_a_text_is_read_as_the_server_whose_field_it_is_in(
    body: dict[str, Any], query: TokenQuery
) -> None:
    found = routes.raw_prompt(routes.TOKENIZE, body)
    assert found is not None
    assert (found[0].text, found[1]) == ("x", query)
    assert routes.raw_prompt(routes.APPLY_TEMPLATE, body) is None
    assert routes.raw_prompt(routes.TOKENIZE, body | {"messages": []}) is None


def test_tokens_are_told_with_the_fields_of_both_servers() -> None:
    plain = told({}, HALVES)
    assert plain == {"count": 3, "max_model_len": 100, "tokens": [5, 6, 7], "token_strs": None}
    pieces = told({"with_pieces": True, "return_token_strs": True}, HALVES)
    assert pieces["tokens"] == [
        {"id": 5, "piece": "a"},
        {"id": 6, "piece": [0xF0, 0x9F]},
        {"id": 7, "piece": [0xA6, 0x8A]},
    ]
    assert pieces["token_strs"] == ["a", "\ufffd", "\ufffd\ufffd"]
    assert told({"with_pieces": True}, Counted("r", 0))["tokens"] == []
    text = Counted("r", 1, text="hi")
    assert told({}, text, routes.DETOKENIZE) == {"content": "hi", "prompt": "hi"}
    assert told({}, text, routes.APPLY_TEMPLATE) == {"prompt": "hi"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (routes.DETOKENIZE, {}, "tokens"),
        (routes.DETOKENIZE, {"tokens": [1, -1]}, "tokens[1]"),
        (routes.DETOKENIZE, {"tokens": [2**31]}, "tokens[0]"),
        (routes.TOKENIZE, {"content": 3}, "content"),
        (routes.TOKENIZE, {"content": "x", "with_pieces": 1}, "with_pieces"),
        (routes.TOKENIZE, {"prompt": "é" * (routes.TEXT_BYTES_MAX // 2 + 1)}, "prompt"),
        (routes.APPLY_TEMPLATE, {"prompt": "x"}, "messages"),
        (routes.APPLY_TEMPLATE, {"messages": [], "chat_template": "{{ x }}"}, "chat_template"),
        (
            routes.APPLY_TEMPLATE,
            {"messages": [], "add_generation_prompt": "no"},
            "add_generation_prompt",
        ),
    ],
)
def test_what_is_no_text_no_token_and_no_rendering_of_a_request_is_refused_by_its_name(
    path: str, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        routes.raw_prompt(path, body) or routes.template_query(path, body)
    assert caught.value.param == param


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
NAMES = st.sampled_from(
    ["content", "prompt", "messages", "tokens", "add_special", "with_pieces", "parse_special"]
)


@given(st.sampled_from(routes.PATHS), st.dictionaries(NAMES, VALUES))
def test_any_body_is_a_question_or_is_refused(path: str, body: dict[str, Any]) -> None:
    try:
        found = routes.raw_prompt(path, body)
        query = found[1] if found else routes.template_query(path, body)
    except RequestError as error:
        assert 400 <= error.status < 500
    else:
        assert query.tells in ("ids", "pieces", "text")
