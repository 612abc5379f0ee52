"""Whatever comes in any dialect: a request that can be sent and answered, or a RequestError."""

import copy
import itertools
from typing import Any, Final

import orjson
import pytest
from hypothesis import given, strategies as st

from hearth.proxy.api.dialects import DIALECTS
from hearth.proxy.api.ollama.parse import asks_to_unload, context_of, messages_of
from hearth.proxy.api.responses.response_store import ResponseStore
from hearth.proxy.request.message_digests import MessageDigester
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Submit, decode, encode
from tests.helpers.clients.api_events import called, done, events_of, more, said, thought, whole_of

FIELDS: Final = (
    "role content type text name id input output arguments call_id tool_use_id namespace tools "
    "tool tool_choice mode allowed_tools format schema definition syntax description parameters "
    "input_schema execution defer_loading display budget_tokens thinking reasoning summary "
    "encrypted_content signature source title data is_error tool_name output_config "
    "output_format stop_sequences metadata include store previous_response_id "
    "parallel_tool_calls status disable_parallel_tool_use max_tool_calls truncation "
    "instructions url image_url media_type file_id tool_calls tool_call_id function functions "
    "images prompt suffix system template context raw options stream think keep_alive logprobs "
    "top_logprobs logit_bias temperature top_p top_k min_p seed stop n best_of echo max_tokens "
    "num_predict stream_options response_format json_schema strict enable_thinking "
    "chat_template_kwargs effort custom"
)
KINDS: Final = (
    "text image document search_result tool_use tool_result tool_reference tool_addition "
    "tool_removal tool_definition server_tool_use web_search_tool_result mcp_tool_result "
    "compaction container_upload message reasoning function_call function_call_output "
    "custom_tool_call custom_tool_call_output tool_search_call tool_search_output "
    "additional_tools item_reference agent_message input_text output_text input_image "
    "input_file refusal function custom namespace tool_search web_search bash_20250124 "
    "json_schema json_object grammar enabled adaptive any auto none required client omitted "
    "image_url base64 url thinking redacted_thinking 5m 0 low max"
)
ROLES: Final = ("user", "assistant", "system", "developer", "tool")
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 2**40)
    | st.sampled_from((-(2**63), 2**64 - 1))
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(f"{KINDS} {FIELDS}".split())
    | st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=4)
)


def kinded(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return objects of a known type with some of the fields that are known."""
    rest = st.dictionaries(st.sampled_from(FIELDS.split()), inner, max_size=6)
    return st.builds(lambda kind, row: row | {"type": kind}, st.sampled_from(KINDS.split()), rest)


URL: Final = "data:image/png;base64,iVBORw0KGgo="
PARTS: Final[tuple[dict[str, Any], ...]] = (
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}},
    {"type": "image", "source": {"type": "url", "url": URL}},
    {"type": "input_image", "image_url": URL},
    {"type": "image_url", "image_url": {"url": URL}},
    {"type": "text", "text": "t"},
    {"type": "input_text", "text": "t"},
    {"type": "text", "text": ""},
)
JSON = st.recursive(
    SCALARS | st.sampled_from(PARTS) | st.lists(st.sampled_from(PARTS)),
    lambda inner: st.lists(inner, max_size=4) | kinded(inner),
    max_leaves=25,
)
CALLS = st.lists(
    st.builds(lambda given: {"function": {"name": "f", "arguments": given}}, JSON), max_size=2
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(ROLES), "content": st.text(max_size=5) | JSON},
    optional={
        "tool_calls": CALLS | JSON,
        "tool_call_id": JSON,
        "tool_name": st.sampled_from(("f", "g")),
        "name": JSON,
        "images": st.lists(st.sampled_from(("iVBO", "x")), max_size=2) | JSON,
    },
)
ROWS = st.lists(kinded(JSON) | MESSAGES, max_size=4)
BODIES = st.dictionaries(st.sampled_from(FIELDS.split()), JSON, max_size=5)
ANSWER: Final = (
    *(thought("t"), called("c", "a__b", '{"input"'), more(': "x"}'), said("s")),
    done("tool_calls"),
)


def check_message(message: dict[str, Any]) -> None:
    """A text; or texts and images in turn, of who may show them."""
    parts = message["content"]
    if type(parts) is str:
        return
    assert message["role"] in ("user", "tool")
    assert any(part["type"] == "image" for part in parts)
    assert all(part["url"] if part["type"] == "image" else part["text"] for part in parts)
    kinds = [part["type"] for part in parts]
    assert ("text", "text") not in itertools.pairwise(kinds)


def check(request: ParsedRequest) -> None:
    submit = Submit("r", request.prompt, request.sampling, request.constraints)
    assert decode(encode(submit)) == submit
    messages = request.prompt.messages
    before = copy.deepcopy(messages)
    names, delta_chars = MessageDigester(True, True).names(messages)
    assert messages == before and len(names) == len(before)
    assert 0 <= delta_chars <= sum(len(row["content"]) for row in before)
    for message in messages:
        check_message(message)
    whole, events = whole_of(request, ANSWER), events_of(request, ANSWER)
    if request.dialect == "responses":
        tools = [tool["function"]["name"] for tool in request.prompt.tools]
        assert len(set(tools)) == len(tools)
        ResponseStore().keep("k", request.body, whole)
    if request.dialect.startswith("ollama"):
        check_lines(request, whole, events)


def check_lines(request: ParsedRequest, whole: Any, lines: list[Any]) -> None:
    """Check that Ollama's lines add up to the whole answer, as property tests of the others do."""
    assert [row["done"] for row in lines] == [False] * (len(lines) - 1) + [True]
    is_chat = request.dialect == "ollama_chat"
    told, *parts = (row["message"] if is_chat else row for row in (whole, *lines))
    text = "content" if is_chat else "response"
    assert "".join(part[text] for part in parts) == told[text] == "s"
    assert [call for part in parts for call in part.get("tool_calls", ())] == told["tool_calls"]


@pytest.mark.parametrize("dialect", DIALECTS)
@given(rows=ROWS, body=BODIES)
def test_any_body_is_answered_or_refused(
    dialect: str, rows: list[Any], body: dict[str, Any]
) -> None:
    place = {"responses": "input", "completions": "prompt", "ollama_generate": "prompt"}
    prompt = rows if dialect != "ollama_generate" else "x"
    body = body | {place.get(dialect, "messages"): prompt}
    try:
        if dialect.startswith("ollama"):
            asks_to_unload(body)
        check(DIALECTS[dialect].parse(body))
    except RequestError as error:
        assert 400 <= error.status < 500 and str(error)


@given(rows=ROWS, body=BODIES)
def test_any_input_goes_on_from_a_response(rows: list[Any], body: dict[str, Any]) -> None:
    store = ResponseStore()
    store.keep("k", {"input": "hi"}, {"id": "resp_r", "output": []})
    try:
        given_body = body | {"input": rows, "previous_response_id": "resp_r"}
        check(DIALECTS["responses"].parse(store.expand("k", given_body)))
    except RequestError as error:
        assert 400 <= error.status < 500


TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)


@given(st.lists(st.tuples(st.sampled_from(("system", "user", "assistant")), TEXTS)), TEXTS)
def test_a_context_brings_back_what_was_said(rows: list[tuple[str, str]], answer: str) -> None:
    messages = [{"role": role, "content": text} for role, text in rows]
    numbers = orjson.loads(orjson.dumps(context_of(messages, answer)))
    back = messages_of(numbers)
    assert back == [*messages, {"role": "assistant", "content": answer}]


@given(JSON | st.lists(st.integers(-2, 2**25) | st.integers(2**62, 2**64), max_size=30))
def test_any_other_context_is_refused_with_words(context: Any) -> None:
    try:
        assert messages_of(context) == []
        assert not context
    except RequestError as error:
        assert error.param == "context"
