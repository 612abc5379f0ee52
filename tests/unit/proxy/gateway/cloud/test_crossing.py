"""A conversation that goes to the cloud loses what only this server made, and nothing else."""

import copy
import uuid
from typing import Any

import pytest

from hearth.proxy.gateway.cloud.crossing import for_cloud
from hearth.shared.our_ids import SIGNATURE_BEGIN, new_id

OURS = SIGNATURE_BEGIN + new_id()
OLD = new_id()  # of a session that began before signatures had a beginning
THEIRS = "EqoBCkgIARABGAIiQL2UoU0b1OHYi+" + "x" * 100
HEX = uuid.uuid4().hex
ENABLED = {"type": "enabled", "budget_tokens": 1_024}


def thinking(signature: Any) -> dict[str, Any]:
    return {"type": "thinking", "thinking": "hm", "signature": signature}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def call(call_id: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "f", "input": {}}


def user(value: Any = "hi") -> dict[str, Any]:
    return {"role": "user", "content": value}


def assistant(*blocks: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)} | fields


def crossed(*rows: Any, **fields: Any) -> dict[str, Any]:
    body = {"messages": list(rows)} | fields
    before = copy.deepcopy(body)
    found = for_cloud("messages", body)
    assert body == before
    return found


# ---------------------------------------------------------------- Messages


@pytest.mark.parametrize("signature", [OURS, OLD, "", None], ids=["ours", "old", "", "none"])
def test_thinking_that_no_provider_verifies_goes(signature: str | None) -> None:
    rows = [user(), assistant(thinking(signature), text("yo")), user()]
    assert crossed(*rows)["messages"] == [user(), assistant(text("yo")), user()]


def test_thinking_of_providers_stays() -> None:
    redacted = {"type": "redacted_thinking", "data": THEIRS}
    rows = [user(), assistant(thinking(THEIRS), redacted, text("yo")), user()]
    assert crossed(*rows)["messages"] == rows


def test_a_turn_of_which_nothing_is_left_goes() -> None:
    for turn in (assistant(thinking(OURS)), assistant(thinking(OURS), text(" ")), assistant()):
        assert crossed(user(), turn, user("and?"))["messages"] == [user(), user("and?")]
    nothing = {"role": "assistant", "content": ""}
    assert crossed(user(), nothing, user("and?"))["messages"] == [user(), user("and?")]


def test_an_unfinished_turn_without_thinking_goes_on_without() -> None:
    """Anthropic refuses thinking where the turn that it is part of began without."""
    result = user([{"type": "tool_result", "tool_use_id": OLD, "content": "x"}])
    rows = [user(), assistant(thinking(OURS), call(OLD)), result]
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    sent = crossed(*rows, thinking=ENABLED, context_management={"edits": edits})
    assert sent == {"messages": [user(), assistant(call(OLD)), result]}
    edits.append({"type": "clear_tool_uses_20250919"})
    sent = crossed(*rows, thinking=ENABLED, context_management={"edits": edits})
    assert sent["context_management"] == {"edits": edits[1:]}
    adaptive = {"type": "adaptive"}  # which may leave thinking out
    assert crossed(*rows, thinking=adaptive)["thinking"] == adaptive


def test_thinking_stays_asked_for_where_the_turn_began_with_it_or_called_nothing() -> None:
    result = user([{"type": "tool_result", "tool_use_id": "toolu_1", "content": "x"}])
    theirs = [user(), assistant(thinking(THEIRS), call("toolu_1")), result]
    assert crossed(*theirs, thinking=ENABLED)["thinking"] == ENABLED
    said = [user(), assistant(thinking(OURS), text("yo")), user()]
    assert crossed(*said, thinking=ENABLED)["thinking"] == ENABLED
    assert crossed(user(), thinking=ENABLED)["thinking"] == ENABLED


# ---------------------------------------------------------------- chat


def chat(**turn: Any) -> dict[str, Any]:
    rows = [user(), {"role": "assistant"} | turn]
    found: dict[str, Any] = for_cloud("chat", {"messages": rows})["messages"][1]
    return {name: value for name, value in found.items() if name != "role"}


def called(call_id: str) -> list[Any]:
    return [{"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}]


def test_reasoning_of_chat_goes_but_amid_a_providers_calls() -> None:
    assert chat(content="yo", reasoning_content="hm", reasoning="hm") == {"content": "yo"}
    ours = called(new_id())
    assert chat(content=None, reasoning_content="hm", tool_calls=ours) == {
        "content": None,
        "tool_calls": ours,
    }
    theirs = {"content": None, "reasoning_content": "hm", "tool_calls": called("call_00_x")}
    assert chat(**theirs) == theirs


def test_signed_thinking_of_chat_is_judged_by_its_signature() -> None:
    blocks = [thinking(OURS), thinking(THEIRS), {"type": "redacted_thinking", "data": THEIRS}]
    assert chat(content="yo", thinking_blocks=blocks) == {
        "content": "yo",
        "thinking_blocks": blocks[1:],
    }
    assert chat(content="yo", thinking_blocks=[thinking(OURS)]) == {"content": "yo"}
    assert chat(content=[thinking(OURS), text("yo")]) == {"content": [text("yo")]}


def test_a_turn_of_chat_that_only_thought_says_nothing() -> None:
    assert chat(content=None, reasoning_content="hm") == {"content": ""}
    assert chat(content=[thinking(OURS)]) == {"content": ""}
    assert chat(content=None, refusal="no") == {"content": None, "refusal": "no"}


# ---------------------------------------------------------------- Responses


def items(*given: Any, **fields: Any) -> Any:
    return for_cloud("responses", {"input": list(given)} | fields)["input"]


def test_our_reasoning_and_our_ids_go_and_calls_keep_theirs() -> None:
    said = {"type": "message", "role": "assistant", "content": []}
    calls = {"type": "function_call", "call_id": OLD, "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": OLD, "output": "x"}
    assert items(
        {"type": "reasoning", "id": f"rs_{HEX}_0", "summary": [], "encrypted_content": OURS},
        {"type": "reasoning", "id": f"rs_{HEX}_0", "summary": []},
        {"type": "reasoning", "summary": [], "encrypted_content": OLD},
        {"type": "reasoning", "summary": []},
        said | {"id": f"msg_{HEX}_1"},
        calls | {"id": f"fc_{HEX}_2"},
        output,
    ) == [said, calls, output]


def test_items_of_providers_stay() -> None:
    rows = [
        {"type": "reasoning", "id": "rs_68af", "summary": [], "encrypted_content": THEIRS},
        {"type": "reasoning", "id": "rs_68af", "summary": []},
        {"type": "message", "id": "msg_68af", "role": "assistant", "content": []},
        {"type": "compaction", "id": "cmp_1", "encrypted_content": THEIRS},
        "odd",
    ]
    assert items(*rows) == rows


def test_a_response_of_ours_is_nothing_to_go_on_from() -> None:
    body = {"input": "x", "previous_response_id": f"resp_{HEX}"}
    assert for_cloud("responses", body) == {"input": "x"}
    theirs = {"input": "x", "previous_response_id": "resp_bGl0ZWxsbQ=="}
    assert for_cloud("responses", theirs) == theirs


def test_other_bodies_stay_as_they_are() -> None:
    for dialect in ("completions", "embeddings"):
        body = {"input": ["a"], "prompt": "b"}
        assert for_cloud(dialect, body) == body
    assert for_cloud("messages", {"messages": "odd"}) == {"messages": "odd"}
