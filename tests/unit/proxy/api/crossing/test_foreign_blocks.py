"""A session that comes from a cloud model is answered: what is readable stands in the prompt."""

from typing import Any

import pytest

from hearth.proxy.api import chat_completions
from hearth.proxy.api.messages import messages_request
from hearth.proxy.api.responses import responses_request
from hearth.proxy.request.content_pieces import join
from hearth.shared.our_ids import SIGNATURE_BEGIN, new_id

SEALED = "EqoBCkgIARABGAIi" + "x" * 100
USER = {"role": "user", "content": "go on"}


def from_messages(*blocks: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    rows = [USER, {"role": "assistant", "content": list(blocks)}, USER]
    request = messages_request.parse({"messages": rows, "max_tokens": 9})
    return request.prompt.messages[1], request.left_out


def from_chat(**turn: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    rows = [USER, {"role": "assistant"} | turn, USER]
    request = chat_completions.parse({"messages": rows})
    return request.prompt.messages[1], request.left_out


def from_responses(*items: Any) -> tuple[list[Any], tuple[str, ...]]:
    request = responses_request.parse({"input": [*items, USER]})
    return request.prompt.messages[:-1], request.left_out


# ---------------------------------------------------------------- Messages


def test_thinking_of_a_cloud_model_stands_in_the_history_as_reasoning() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": SEALED}
    turn, left_out = from_messages(thought, {"type": "text", "text": "yo"})
    assert (turn["reasoning_content"], turn["content"], left_out) == ("hm", "yo", ())


def test_redacted_thinking_is_left_out() -> None:
    turn, left_out = from_messages(
        {"type": "redacted_thinking", "data": SEALED}, {"type": "text", "text": "yo"}
    )
    assert "reasoning_content" not in turn
    assert left_out == ("redacted_thinking",)


@pytest.mark.parametrize(
    ("block", "shown"),
    [
        ({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"q": "x"}}, ""),
        (
            {
                "type": "web_search_tool_result",
                "tool_use_id": "s",
                "content": [
                    {
                        "type": "web_search_result",
                        "title": "T",
                        "url": "https://e.com",
                        "encrypted_content": SEALED,
                        "page_age": None,
                    }
                ],
            },
            "T\nhttps://e.com",
        ),
        (
            {
                "type": "web_search_tool_result",
                "tool_use_id": "s",
                "content": {"type": "web_search_tool_result_error", "error_code": "x"},
            },
            "",
        ),
        (
            {
                "type": "code_execution_tool_result",
                "tool_use_id": "s",
                "content": {"type": "code_execution_result", "stdout": "out", "return_code": 0},
            },
            "out",
        ),
        ({"type": "mcp_tool_use", "id": "m", "name": "f", "server_name": "s", "input": {}}, ""),
        (
            {
                "type": "mcp_tool_result",
                "tool_use_id": "m",
                "content": [{"type": "text", "text": "found"}],
            },
            "found",
        ),
        ({"type": "compaction", "content": "summary", "encrypted_content": SEALED}, "summary"),
        ({"type": "compaction", "content": None, "encrypted_content": SEALED}, ""),
        ({"type": "container_upload", "file_id": "file_1"}, ""),
        ({"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}}, ""),
        ({"type": "hologram", "payload": SEALED}, ""),
    ],
)
def test_blocks_that_a_provider_ran_leave_their_text(block: dict[str, Any], shown: str) -> None:
    turn, left_out = from_messages(block, {"type": "text", "text": "yo", "citations": [{}]})
    assert turn["content"] == join([*filter(None, (shown, "yo"))])
    assert left_out == (block["type"],)
    assert SEALED not in str(turn["content"])


# ---------------------------------------------------------------- chat


def test_a_cloud_models_thinking_in_chat_is_read_once() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": SEALED},
        {"type": "redacted_thinking", "data": SEALED},
    ]
    turn, left_out = from_chat(content="yo", thinking_blocks=blocks)
    assert (turn["reasoning_content"], turn["content"]) == ("hm", "yo")
    assert left_out == ("redacted_thinking",)
    turn, _ = from_chat(content="yo", thinking_blocks=blocks, reasoning_content="the same")
    assert turn["reasoning_content"] == "the same"
    assert from_chat(content="yo", thinking_blocks=None)[1] == ()


def test_other_fields_of_a_cloud_models_turn_are_passed_over() -> None:
    turn, left_out = from_chat(
        content=None,
        refusal=None,
        annotations=[{"type": "url_citation", "url_citation": {"url": "u"}}],
        audio={"id": "audio_1"},
        provider_specific_fields={"citations": None, "compaction_blocks": [{}]},
        reasoning_items=[{"type": "reasoning", "encrypted_content": SEALED}],
        images=[],
        function_call=None,
        tool_calls=[
            {
                "id": f"call_1__thought__{SEALED}",
                "type": "function",
                "index": 0,
                "function": {"name": "f", "arguments": "{}"},
                "provider_specific_fields": {"thought_signature": SEALED},
            }
        ],
    )
    assert turn["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert turn["content"] == "" and left_out == ()


# ---------------------------------------------------------------- Responses


def test_reasoning_that_is_only_sealed_is_left_out_and_counted() -> None:
    sealed = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": SEALED}
    said = {"type": "message", "id": "msg_1", "role": "assistant", "content": "yo"}
    rows, left_out = from_responses(sealed, said)
    assert "reasoning_content" not in rows[0] and rows[0]["content"] == "yo"
    assert left_out == ("reasoning",)
    ours = sealed | {"encrypted_content": SIGNATURE_BEGIN + new_id()}
    assert from_responses(ours, said)[1] == ()  # its turn is found by it


def test_a_summary_of_sealed_reasoning_stands_in_the_history() -> None:
    summary = [{"type": "summary_text", "text": "hm"}]
    sealed = {"type": "reasoning", "id": "rs_1", "summary": summary, "encrypted_content": SEALED}
    rows, left_out = from_responses(sealed, {"role": "assistant", "content": "yo"})
    assert (rows[0]["reasoning_content"], left_out) == ("hm", ())


def test_a_message_of_another_server_may_have_any_parts() -> None:
    parts = [
        {"type": "output_text", "text": "yo", "annotations": [], "logprobs": None},
        {"type": "reasoning_text", "text": "hm"},
        {"type": "refusal", "refusal": "no"},
        {"type": "hologram", "payload": SEALED},
        {"type": "output_image", "image_url": "https://e.com/a.png"},
    ]
    rows, left_out = from_responses({"role": "assistant", "content": parts, "phase": "x"})
    assert (rows[0]["content"], rows[0]["reasoning_content"]) == (join(["yo", "no"]), "hm")
    assert left_out == ("hologram", "output_image")


@pytest.mark.parametrize(
    "item",
    [
        {"type": "compaction", "id": "cmp_1", "encrypted_content": SEALED},
        {"type": "web_search_call", "id": "ws_1", "action": {"type": "search", "query": "q"}},
        {"type": "file_search_call", "id": "fs_1", "queries": ["q"], "results": None},
        {"type": "code_interpreter_call", "id": "ci_1", "code": "1", "container_id": "c"},
        {"type": "image_generation_call", "id": "ig_1", "result": SEALED},
        {"type": "computer_call", "id": "cu_1", "call_id": "c", "action": {"type": "click"}},
        {"type": "computer_call_output", "call_id": "c", "output": {"image_url": SEALED}},
        {"type": "mcp_list_tools", "id": "m_1", "server_label": "s", "tools": []},
        {"type": "mcp_approval_request", "id": "m_2", "name": "f", "arguments": "{}"},
        {"type": "mcp_approval_response", "approval_request_id": "m_2", "approve": True},
        {"type": "tool_search_call", "id": "t_1", "execution": "server", "arguments": {}},
        {"type": "local_shell_call", "id": "l_1", "call_id": "c", "action": {"type": "exec"}},
        {"type": "program", "id": "p_1", "call_id": "c", "code": "1", "fingerprint": SEALED},
        {"type": "hologram", "payload": SEALED},
    ],
)
def test_items_that_a_provider_ran_are_left_out(item: dict[str, Any]) -> None:
    rows, left_out = from_responses(item, {"role": "assistant", "content": "yo"})
    assert rows[-1]["content"] == "yo"
    assert SEALED not in str(rows)
    assert left_out == (item["type"],)
