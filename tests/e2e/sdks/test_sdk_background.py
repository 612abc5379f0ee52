"""OpenAI's SDK and responses in background: polled, followed, cancelled, and after a restart."""

import time
from typing import Any

import openai
import pytest

from hearth.worker.stream.answer_parts import AnswerParts
from tests.helpers.clients.run_clients import MODEL
from tests.helpers.clients.sdk_conversations import OSLO, TOOLS, Sdks, dictation

OFFERED: Any = [{"type": "function", **tool} for tool in TOOLS]
ANSWER = AnswerParts("They ask.", "I look it up.", (OSLO,))
ENDLESS = dictation(AnswerParts("", "and on " * 20_000))


def ended(gpt: openai.OpenAI, response: Any) -> Any:
    deadline = time.monotonic() + 60
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() < deadline, response.status
        time.sleep(0.05)
        response = gpt.responses.retrieve(response.id)
    return response


def test_a_response_in_background_is_that_of_one_who_waits(sdks: Sdks) -> None:
    said = dictation(ANSWER, AnswerParts("", "Warm."))
    body: Any = {"model": MODEL, "input": said, "tools": OFFERED}
    waited = sdks.gpt.responses.create(**body)
    begun = sdks.gpt.responses.create(**body, background=True)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    polled = ended(sdks.gpt, begun)
    assert polled.status == "completed" and polled.id == begun.id
    shapes = [
        [(item.type, getattr(item, "arguments", None)) for item in each.output]
        for each in (waited, polled)
    ]
    assert shapes[0] == shapes[1] and len(shapes[0]) == 3
    assert polled.usage.output_tokens == waited.usage.output_tokens
    row = {"type": "function_call_output", "call_id": polled.output[2].call_id, "output": "20"}
    following = sdks.gpt.responses.create(
        model=MODEL, input=[row], previous_response_id=polled.id, tools=OFFERED
    )
    cached = following.usage.input_tokens_details.cached_tokens
    assert cached >= polled.usage.total_tokens - 16, "the cache goes on from it"


def test_a_stream_of_one_in_background_is_taken_up_where_it_was_left(sdks: Sdks) -> None:
    body: Any = {"model": MODEL, "input": dictation(ANSWER), "tools": OFFERED}
    with sdks.gpt.responses.create(**body, background=True, stream=True) as stream:
        events = iter(stream)
        first: list[Any] = [next(events) for _ in range(4)]
    assert [event.type for event in first[:2]] == ["response.created", "response.queued"]
    response_id = first[0].response.id
    rest = list(
        sdks.gpt.responses.retrieve(
            response_id, stream=True, starting_after=first[-1].sequence_number
        )
    )
    numbers = [event.sequence_number for event in [*first, *rest]]
    assert numbers == list(range(len(numbers)))
    assert rest[-1].type == "response.completed"
    kept = sdks.gpt.responses.retrieve(response_id)
    assert rest[-1].response.output_text == kept.output_text == "I look it up."


def test_one_that_goes_on_and_on_is_cancelled(sdks: Sdks) -> None:
    begun = sdks.gpt.responses.create(model=MODEL, input=ENDLESS, background=True)
    deadline = time.monotonic() + 60
    while sdks.gpt.responses.retrieve(begun.id).status == "queued":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    cancelled = sdks.gpt.responses.cancel(begun.id)
    assert (cancelled.status, cancelled.usage) == ("cancelled", None)
    assert sdks.gpt.responses.cancel(begun.id) == cancelled
    stranger = sdks.gpt.with_options(api_key="another")
    with pytest.raises(openai.NotFoundError):
        stranger.responses.cancel(begun.id)
    with sdks.gpt.responses.create(model=MODEL, input=ENDLESS, stream=True) as stream:
        opened: Any = next(iter(stream))
        assert sdks.gpt.responses.cancel(opened.response.id).status == "cancelled"
        last: Any = list(stream)[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    sdks.server.wait_until_idle()
