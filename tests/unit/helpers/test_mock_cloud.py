"""The mock cloud refuses what the real services refuse: else no crossing would be tested."""

from typing import Any, Final

import pytest

from tests.helpers.cloud.cloud_answers import CloudMemory
from tests.helpers.cloud.cloud_bodies import RefusedBody, check_body

MEMORY: Final = CloudMemory()
MEMORY.items |= {"rs_mine": (True, None), "msg_mine": (True, "rs_mine"), "rs_apart": (False, None)}
SEALED: Final = MEMORY.sealed("deep")
OTHERS: Final = CloudMemory().sealed("deep")
USER: Final = {"role": "user", "content": "Hi"}
SAID: Final = {"role": "assistant", "content": "So."}
CALLS: Final = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
CALL: Final = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT: Final = {"type": "function_call_output", "call_id": "c", "output": "x"}
THINKING: Final = {"type": "thinking", "thinking": "deep", "signature": SEALED}
USES: Final = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT: Final = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}
BUDGET: Final = {"type": "enabled", "budget_tokens": 1024}


def turn(*blocks: Any) -> list[Any]:
    return [USER, {"role": "assistant", "content": list(blocks)}]


TAKEN: Final = (
    ("chat", {"messages": [USER, CALLS, {"role": "tool", "tool_call_id": "c", "content": "x"}]}),
    ("messages", {"messages": [*turn(THINKING, USES), RESULT], "thinking": BUDGET}),
    ("responses", {"input": [USER, {"type": "reasoning", "summary": [], "id": "rs_mine"}, SAID]}),
    ("responses", {"input": [USER, CALL, OUTPUT]}),
)
REFUSED: Final = (
    ("chat", {"messages": [USER], "api_base": "x"}),
    ("chat", {"messages": [USER | {"x": 1}]}),
    ("chat", {"messages": [USER, SAID | {"reasoning": "hm"}]}),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]}),
    ("chat", {"messages": [USER, CALLS]}),
    ("chat", {"messages": [USER, {"role": "tool", "tool_call_id": "c", "content": "x"}]}),
    ("completions", {"prompt": "x", "x": 1}),
    ("embeddings", {"input": "x", "x": 1}),
    ("messages", {"messages": [USER], "x": 1}),
    ("messages", {"messages": turn(THINKING | {"signature": OTHERS})}),
    ("messages", {"messages": turn(THINKING | {"thinking": "changed"})}),
    ("messages", {"messages": turn({"type": "redacted_thinking", "data": OTHERS})}),
    ("messages", {"messages": [*turn({"type": "text", "text": " "}), USER]}),
    ("messages", {"messages": turn(USES)}),
    ("messages", {"messages": [USER, RESULT]}),
    ("messages", {"messages": [*turn(USES), RESULT], "thinking": BUDGET}),
    ("responses", {"input": [USER], "x": 1}),
    ("responses", {"input": [USER], "previous_response_id": "resp_other"}),
    ("responses", {"input": [USER, SAID | {"type": "message", "id": "msg_other"}]}),
    ("responses", {"input": [USER, SAID | {"type": "message", "id": "msg_mine"}]}),
    ("responses", {"input": [USER, {"type": "reasoning", "summary": [], "id": "rs_apart"}, SAID]}),
    (
        "responses",
        {"input": [USER, {"type": "reasoning", "summary": [], "encrypted_content": OTHERS}, SAID]},
    ),
    ("responses", {"input": [USER, {"type": "reasoning", "summary": [], "id": "rs_mine"}]}),
    ("responses", {"input": [USER, CALL]}),
    ("responses", {"input": [USER, OUTPUT]}),
)


def checked(dialect: str, body: dict[str, Any]) -> None:
    more = {"max_tokens": 2000} if dialect == "messages" else {}
    check_body(dialect, {"model": "m", **more, **body}, MEMORY)


@pytest.mark.parametrize(("dialect", "body"), TAKEN)
def test_its_own_is_taken_back(dialect: str, body: dict[str, Any]) -> None:
    checked(dialect, body)


@pytest.mark.parametrize(("dialect", "body"), REFUSED)
def test_what_it_did_not_make_or_does_not_know_is_refused(
    dialect: str, body: dict[str, Any]
) -> None:
    with pytest.raises(RefusedBody):
        checked(dialect, body)
