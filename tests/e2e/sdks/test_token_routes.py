"""/tokenize, /detokenize and /apply-template tell what the model is really fed."""

from typing import Any

import httpx
import pytest

from hearth.worker.stream.answer_parts import AnswerParts
from tests.helpers.clients.run_clients import MODEL
from tests.helpers.clients.sdk_conversations import OSLO, TOOLS, ChatTalk, Sdks, dictation

SHOWN: Any = [{"type": "function", "function": tool} for tool in TOOLS]
USER = {"role": "user", "content": dictation("Hello.")}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "system", "content": "Be brief."}, USER], "tools": SHOWN},
    "chat without thinking": {
        "messages": [USER],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "messages": {"system": "Be brief.", "messages": [USER]},
    "responses": {"input": USER["content"], "instructions": "Be brief."},
}
PATHS = {"messages": "/v1/messages", "responses": "/v1/responses"}


def post(sdks: Sdks, path: str, **body: Any) -> Any:
    reply = httpx.post(f"{sdks.server.url}{path}", json={"model": MODEL} | body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("name", BODIES)
def test_the_tokens_of_messages_are_those_that_the_model_is_fed(sdks: Sdks, name: str) -> None:
    body = BODIES[name]
    tokens = post(sdks, "/tokenize", **body)
    text = post(sdks, "/apply-template", **body)["prompt"]
    answer = post(sdks, PATHS.get(name, "/v1/chat/completions"), **body, max_tokens=1)
    fed = sdks.server.asked()[-1]
    assert answer["usage"] and tokens["tokens"] == fed.ids and tokens["count"] == len(fed.ids)
    assert text == sdks.server.prompts()[-1]
    assert post(sdks, "/detokenize", tokens=fed.ids) == {"content": text, "prompt": text}
    assert post(sdks, "/tokenize", content=text)["tokens"] == fed.ids


def test_a_sampled_turn_stands_there_as_it_was_sampled(sdks: Sdks) -> None:
    talk = ChatTalk(sdks)
    turns = (AnswerParts("Let me see.", "", (OSLO,)), AnswerParts("It is warm.", "Warm."))
    first = talk.user(dictation(*turns)).ask(tools=TOOLS)
    talk.result(first.call_ids[0], "warm")
    history = [
        row if isinstance(row, dict) else row.model_dump(exclude_none=True) for row in talk.history
    ]
    told = post(sdks, "/tokenize", messages=history, tools=SHOWN, return_token_strs=True)
    talk.ask(tools=TOOLS)
    assert told["tokens"] == sdks.server.asked()[-1].ids
    assert "".join(told["token_strs"]) == sdks.server.prompts()[-1]
    bare = post(sdks, "/tokenize", messages=history, tools=SHOWN, add_generation_prompt=False)
    assert told["tokens"][: bare["count"]] == bare["tokens"] and bare["count"] < told["count"]


def test_a_text_beyond_the_context_is_counted_and_a_wrong_body_says_what_is_wrong(
    sdks: Sdks,
) -> None:
    context = sdks.gpt.models.retrieve(MODEL).model_dump()["context_length"]
    told = post(sdks, "/tokenize", content="word " * context)
    assert told["count"] > context == told["max_model_len"]
    for path, body in (
        ("/tokenize", {}),
        ("/detokenize", {"tokens": "x"}),
        ("/tokenize", {"content": "x", "model": "none"}),
    ):
        reply = httpx.post(f"{sdks.server.url}{path}", json=body)
        assert reply.status_code in (400, 404) and reply.json()["error"]["message"]
