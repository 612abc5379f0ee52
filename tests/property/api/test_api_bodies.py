"""Whatever comes as Messages or Responses: a request that can be answered, or a RequestError."""

import asyncio
import itertools
from typing import Any

from hypothesis import given, settings, strategies as st

from hearth.proxy.api.answer_frames import frames
from hearth.proxy.api.messages import messages_request
from hearth.proxy.api.multi_choice_stream import AdmittedRequest
from hearth.proxy.api.responses import responses_request
from hearth.proxy.api.responses.response_store import ResponseStore
from hearth.proxy.local_answers import ANSWERS
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Submit, decode, encode
from tests.helpers.clients.api_events import Scripted, called, done, said, thought

FIELDS = (
    "role content type text name id input output arguments call_id tool_use_id namespace tools "
    "tool tool_choice mode allowed_tools format schema definition syntax description parameters "
    "input_schema execution defer_loading display budget_tokens thinking reasoning summary "
    "encrypted_content signature source title data is_error tool_name output_config output_format "
    "stop_sequences metadata include store previous_response_id parallel_tool_calls status "
    "disable_parallel_tool_use max_tool_calls truncation instructions url image_url media_type "
    "file_id"
)
KINDS = (
    "text image document search_result tool_use tool_result tool_reference tool_addition "
    "tool_removal tool_definition server_tool_use web_search_tool_result mcp_tool_result "
    "compaction container_upload message reasoning function_call function_call_output "
    "custom_tool_call custom_tool_call_output tool_search_call tool_search_output "
    "additional_tools item_reference agent_message input_text output_text input_image input_file "
    "refusal function custom namespace tool_search web_search bash_20250124 json_schema "
    "json_object grammar enabled adaptive any auto none required client omitted image_url base64 "
    "url"
)
ROLES = ("user", "assistant", "system", "developer")
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 2**40)
    | st.sampled_from(KINDS.split())
    | st.text(max_size=4)
)


def kinded(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return objects of a known type with some of the fields that are known."""
    rest = st.dictionaries(st.sampled_from(FIELDS.split()), inner, max_size=6)
    return st.builds(lambda kind, row: row | {"type": kind}, st.sampled_from(KINDS.split()), rest)


URL = "data:image/png;base64,iVBORw0KGgo="
IMAGES: tuple[dict[str, Any], ...] = (
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}},
    {"type": "image", "source": {"type": "url", "url": URL}},
    {"type": "input_image", "image_url": URL},
    {"type": "image_url", "image_url": {"url": URL}},
)
TEXTS: tuple[dict[str, Any], ...] = (
    {"type": "text", "text": "t"},
    {"type": "input_text", "text": "t"},
    {"type": "text", "text": ""},
)
JSON = st.recursive(
    SCALARS | st.sampled_from(IMAGES + TEXTS) | st.lists(st.sampled_from(IMAGES + TEXTS)),
    lambda inner: st.lists(inner, max_size=4) | kinded(inner),
    max_leaves=25,
)
ROWS = st.lists(
    kinded(JSON) | st.fixed_dictionaries({"role": st.sampled_from(ROLES), "content": JSON}),
    max_size=4,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS.split()), JSON, max_size=5)
ANSWER = (thought("t"), called("c", "a__b", '{"input": "x"}'), said("s"), done("tool_calls"))


def check_parts(message: dict[str, Any]) -> None:
    """Texts and images in turn, of who may show them."""
    assert message["role"] in ("user", "tool")
    parts = message["content"]
    assert any(part["type"] == "image" for part in parts)
    assert all(part["url"] if part["type"] == "image" else part["text"] for part in parts)
    kinds = [part["type"] for part in parts]
    assert ("text", "text") not in itertools.pairwise(kinds)


def check(parse: Any, body: dict[str, Any]) -> None:
    try:
        request = parse(body)
    except RequestError as error:
        assert 400 <= error.status < 500
        return
    submit = Submit("r", request.prompt, request.sampling, request.constraints)
    assert decode(encode(submit)) == submit
    for message in request.prompt.messages:
        if type(message["content"]) is not str:
            check_parts(message)
    names = [tool["function"]["name"] for tool in request.prompt.tools]
    assert len(set(names)) == len(names) or parse is messages_request.parse

    async def answer() -> None:
        whole, writer = ANSWERS[request.dialect]
        made = await whole(AdmittedRequest(request, "m", Scripted(*ANSWER)))
        admitted = AdmittedRequest(request, "m", Scripted(*ANSWER))
        assert [frame async for frame in frames(admitted, writer(admitted))]
        ResponseStore().keep("k", request.body, made) if request.dialect == "responses" else None

    asyncio.run(answer())


@settings(max_examples=120)
@given(ROWS, BODIES)
def test_any_messages_are_answered_or_refused(rows: list[Any], body: dict[str, Any]) -> None:
    check(messages_request.parse, body | {"messages": rows})


@settings(max_examples=120)
@given(ROWS, BODIES)
def test_any_input_is_answered_or_refused(rows: list[Any], body: dict[str, Any]) -> None:
    store = ResponseStore()
    store.keep("k", {"input": "hi"}, {"id": "resp_r", "output": []})
    body = body | {"input": rows}

    def parse(given_body: dict[str, Any]) -> Any:
        return responses_request.parse(store.expanded("k", given_body))

    check(parse, body)
    check(parse, body | {"previous_response_id": "resp_r"})
