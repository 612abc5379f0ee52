"""Whatever JSON comes in: our request, or a RequestError; and what passes can be sent."""

import copy
import dataclasses
from typing import Any

from hypothesis import given, settings, strategies as st

from hearth.proxy.api import chat_completions, legacy_completions
from hearth.proxy.api.messages import messages_request
from hearth.proxy.api.responses import responses_request
from hearth.proxy.request.message_digests import MessageDigester
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Prompt, Submit, decode, encode

WORDS = (
    "role content type text messages input system tools tool_calls function name arguments "
    "parameters input_schema user assistant tool tool_result tool_use_id tool_call_id thinking "
    "function_call function_call_output call_id output reasoning summary stop stop_sequences "
    "temperature max_tokens top_p top_k seed logprobs top_logprobs logit_bias stream n "
    "stream_options response_format tool_choice auto none instructions custom is_error "
    "json_schema schema json_object strict parallel_tool_calls functions enable_thinking "
    "chat_template_kwargs output_config effort budget_tokens metadata prompt echo best_of "
    "defer_loading tool_reference tool_name signature redacted_thinking data encrypted_content"
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(WORDS.split())
    | st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=8)
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(WORDS.split()), inner, max_size=6)
    ),
    max_leaves=20,
)
BODIES = st.dictionaries(st.sampled_from(WORDS.split()), JSON, max_size=8)
ROW = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": JSON},
    optional={"tool_calls": JSON, "tool_call_id": JSON, "type": JSON, "name": JSON},
)
PARSERS = (
    chat_completions.parse,
    legacy_completions.parse,
    messages_request.parse,
    responses_request.parse,
)


def check(body: dict[str, Any]) -> None:
    for parse in PARSERS:
        try:
            request = parse(body)
        except RequestError as error:
            assert 400 <= error.status < 500
            continue
        assert isinstance(request, ParsedRequest)
        submit = Submit("r", named(request.prompt), request.sampling, request.constraints)
        assert decode(encode(submit)) == submit


def named(prompt: Prompt) -> Prompt:
    """Return `prompt` with the names of its messages, which leave them as they are."""
    before = copy.deepcopy(prompt.messages)
    names, delta_chars = MessageDigester(True, True).names(prompt.messages)
    assert prompt.messages == before
    assert len(names) == len(before)
    assert 0 <= delta_chars <= sum(len(row["content"]) for row in before)
    return dataclasses.replace(prompt, names=names, delta_chars=delta_chars)


@settings(max_examples=150)
@given(BODIES)
def test_any_body_is_parsed_or_refused(body: dict[str, Any]) -> None:
    check(body)


@settings(max_examples=150)
@given(st.lists(ROW, max_size=3), BODIES)
def test_any_conversation_is_parsed_or_refused(rows: list[Any], body: dict[str, Any]) -> None:
    check(body | {"messages": rows, "input": rows})
