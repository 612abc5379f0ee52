"""The callback that names sessions for a LiteLLM proxy, on agents' requests and on any JSON."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.request.session_id import session_of
from scripts.fleet.hearth_sessions import first_question, handler, session_name
from tests.helpers.fleet.agent_turns import AGENTS, TURNS

UUID = "0bdebb2e-1b25-40c6-9a98-c1d63379751b"
CLAUDE_USER = f'{{"device_id":"d","account_uuid":"","session_id":"{UUID}"}}'
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
fields = st.sampled_from(
    ["messages", "input", "prompt", "metadata", "prompt_cache_key", "thread_id"]
)
rows = st.fixed_dictionaries({"role": st.just("user"), "content": json_values})


def ask(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in texts]}


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agents_turns_have_one_name_with_its_ids_and_without(agent: str) -> None:
    turns = AGENTS[agent]
    assert len(turns) == TURNS
    assert len({session_name(turn.headers, turn.body) for turn in turns}) == 1
    questions = {first_question(turn.body) for turn in turns}
    assert len(questions) == 1 and "" not in questions


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"Session_Id": UUID}, {}),  # Pi, by the Responses API
        ({"x-session-id": "short"}, {}),  # LiteLLM takes none below eight characters
        ({"thread-id": UUID}, {}),
        ({}, {"prompt_cache_key": UUID}),
        ({}, {"conversation_id": UUID}),
        ({}, {"metadata": {"user_id": CLAUDE_USER}}),
    ],
)
def test_a_session_that_a_client_names_is_the_one_that_hearth_reads(
    headers: dict[str, str], body: dict[str, Any]
) -> None:
    lower = {name.lower(): value for name, value in headers.items()}
    told = session_of(lower, body, "").session
    assert told
    named = session_name(headers, ask("One.") | body)
    assert named == session_name(headers, ask("Two.") | body) != session_name({}, ask("One."))
    assert named == session_name({"x-session-id": told}, {}) and told not in named
    assert named != session_name({"x-session-id": f"{told}2"}, {})


@given(body=st.dictionaries(fields, json_values | st.lists(rows | json_values, max_size=3)))
def test_any_body_is_passed_on_unchanged_but_for_a_name(body: dict[str, Any]) -> None:
    data = body | {"litellm_metadata": {}, "proxy_server_request": {"headers": {"a": "b"}}}
    passed = asyncio.run(handler.async_pre_call_hook(None, None, data, "completion"))
    name = session_name({}, body)
    assert passed is data and passed["litellm_metadata"] == ({"session_id": name} if name else {})
    assert {key: passed[key] for key in body} == body
