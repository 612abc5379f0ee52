"""Checks that `prediction` and `speculate` leave what is asked as it is."""

import asyncio
from dataclasses import replace
from typing import Any

from hypothesis import given, strategies as st

from hearth.proxy.api.body.sampling_params import TOKENS_MAX
from hearth.proxy.api.parse_any_dialect import BodyParser
from hearth.proxy.api.responses.response_store import ResponseStore
from hearth.proxy.pool.worker_pool import affinity_keys_of
from hearth.proxy.request.parsed_request import Dialect, ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.settings import load_settings
from hearth.shared.wire_messages import Submit, decode, encode
from tests.helpers.proxy.request_bodies import BODIES

PARSER = BodyParser(load_settings({"PROXY_API_KEYS": "a,b"}, None), ResponseStore())
TEXT = st.text(max_size=40)
PREDICTIONS = st.builds(
    lambda content: {"type": "content", "content": content},
    TEXT | st.lists(st.builds(lambda text: {"type": "text", "text": text}, TEXT), max_size=4),
)
OTHERS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 2),
        "max_tokens": st.integers(1, TOKENS_MAX),
        "seed": st.integers(0, 2**63),
        "session_id": TEXT,
        "tools": st.just([]),
        "use_kv_cache": st.booleans(),
        "stream": st.booleans(),
    },
)
DIALECTS = st.sampled_from(list(BODIES))  # Ollama has none of these fields


def asked(dialect: Dialect, words: list[str], fields: dict[str, Any]) -> ParsedRequest:
    said = "\n".join(words)
    place = {"completions": "prompt", "responses": "input"}.get(dialect, "messages")
    value: Any = [{"role": "user", "content": said}] if place == "messages" else said
    body = BODIES[dialect] | {place: value} | fields
    return asyncio.run(PARSER.complete(PARSER.parse(dialect, body, {"x-api-key": "a"})))


def text_of(prediction: dict[str, Any]) -> str:
    content = prediction["content"]
    return content if type(content) is str else "".join(part["text"] for part in content)


@given(
    DIALECTS,
    st.lists(st.sampled_from(("a date: 2026-11-25", "def f(x):", "hello", "7")), min_size=1),
    OTHERS,
    st.sampled_from((None, True, False)),
    st.none() | PREDICTIONS,
)
def test_prediction_and_speculate_never_alter_what_is_asked(
    dialect: Dialect,
    words: list[str],
    others: dict[str, Any],
    speculate: bool | None,
    prediction: dict[str, Any] | None,
) -> None:
    drafting = {"speculate": speculate, "prediction": prediction}
    plain, told = asked(dialect, words, others), asked(dialect, words, others | drafting)
    assert told.prompt == plain.prompt, "the text, the names of its messages, and its session"
    assert affinity_keys_of(told.prompt, "") == affinity_keys_of(plain.prompt, ""), (
        "where its cache is looked for"
    )
    assert told.sampling.speculate is speculate
    is_read = dialect == "chat" and prediction is not None
    assert told.prediction == (text_of(prediction or {}) if is_read else "")
    undrafted = replace(told, body=plain.body, prediction="", sampling=plain.sampling)
    assert undrafted == plain and replace(told.sampling, speculate=None) == plain.sampling
    submit = Submit("r", told.prompt, told.sampling, prediction=told.prediction)
    assert decode(encode(submit)) == submit


@given(
    DIALECTS,
    st.integers() | st.text(max_size=5) | st.lists(st.booleans(), max_size=2) | st.floats(),
)
def test_a_speculate_that_is_no_boolean_is_refused_in_each_dialect(
    dialect: Dialect, value: Any
) -> None:
    try:
        asked(dialect, ["x"], {"speculate": value})
    except RequestError as error:
        assert (error.status, error.param) == (400, "speculate")
        assert str(error).endswith("allowed is true or false.")
    else:
        raise AssertionError(f"{value!r} was taken")
