"""Checks that counts say what the model is then fed and its client charged, to the token."""

from typing import Any

import httpx
import pytest

from hearth.worker.stream.answer_parts import AnswerParts
from tests.helpers.cases import cases
from tests.helpers.clients.run_clients import MODEL
from tests.helpers.clients.sdk_conversations import (
    OSLO,
    TOOLS,
    ChatTalk,
    MessagesTalk,
    Sdks,
    dictation,
)

USER = {"role": "user", "content": "What is the weather like?"}
SHOWN: Any = [{"type": "function", "function": tool} for tool in TOOLS]
TURNS = (AnswerParts("Let me see.", "", (OSLO,)), AnswerParts("It is warm.", "Warm."))


def charged(usage: Any) -> int:
    return int(
        usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    )


@pytest.mark.parametrize("case", cases("api/counted_bodies.yaml"))
def test_a_count_is_what_the_request_is_charged(sdks: Sdks, case: dict[str, Any]) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": [USER], **case}
    count = sdks.claude.messages.count_tokens(**body).input_tokens
    assert charged(sdks.claude.messages.create(**body, max_tokens=2).usage) == count
    with sdks.claude.messages.stream(**body, max_tokens=2) as events:
        first, *_, last = (event.message for event in events if hasattr(event, "message"))
    assert charged(first.usage) == charged(last.usage) == count


def post(sdks: Sdks, path: str, **body: Any) -> Any:
    reply = httpx.post(f"{sdks.server.url}{path}", json={"model": MODEL} | body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "system", "content": "Be brief."}, USER], "tools": SHOWN},
        ),
        (
            "/v1/chat/completions",
            {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
        ),
        ("/v1/messages", {"system": "Be brief.", "messages": [USER]}),
        ("/v1/responses", {"input": USER["content"], "instructions": "Be brief."}),
    ],
)
def test_the_tokens_of_a_body_are_those_that_the_model_is_fed(
    path: str, body: dict[str, Any], sdks: Sdks
) -> None:
    tokens = post(sdks, "/tokenize", **body)
    text = post(sdks, "/apply-template", **body)["prompt"]
    post(sdks, path, **body, max_tokens=1)
    fed = sdks.server.asked()[-1]
    assert (tokens["tokens"], tokens["count"]) == (fed.ids, len(fed.ids))
    assert text == sdks.server.prompts()[-1]
    assert post(sdks, "/detokenize", tokens=fed.ids) == {"content": text, "prompt": text}
    assert post(sdks, "/tokenize", content=text)["tokens"] == fed.ids


def test_a_sampled_turn_is_counted_and_told_as_it_was_sampled(sdks: Sdks) -> None:
    talk, messages = ChatTalk(sdks), MessagesTalk(sdks)
    for each in (talk, messages):
        first = each.user(dictation(*TURNS)).ask(tools=TOOLS)
        each.result(first.call_ids[0], "warm")
    history = [{k: v for k, v in row.items() if v is not None} for row in talk.history]
    told = post(sdks, "/tokenize", messages=history, tools=SHOWN, return_token_strs=True)
    talk.ask(tools=TOOLS)
    assert told["tokens"] == sdks.server.asked()[-1].ids
    assert "".join(told["token_strs"]) == sdks.server.prompts()[-1]
    bare = post(sdks, "/tokenize", messages=history, tools=SHOWN, add_generation_prompt=False)
    assert told["tokens"][: bare["count"]] == bare["tokens"] and bare["count"] < told["count"]
    asked: Any = {"messages": messages.history, "tools": messages.tools(TOOLS)}
    count = sdks.claude.messages.count_tokens(model=MODEL, **asked).input_tokens
    assert messages.ask(tools=TOOLS).prompt == count


def test_a_text_beyond_the_context_is_counted(sdks: Sdks) -> None:
    context = sdks.gpt.models.retrieve(MODEL).model_dump()["context_length"]
    told = post(sdks, "/tokenize", content="word " * context)
    assert told["count"] > context == told["max_model_len"]
