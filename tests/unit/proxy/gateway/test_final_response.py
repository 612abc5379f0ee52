"""The response that a cloud's reply ends with is told from all else that goes by."""

from typing import Any

import orjson
import pytest

from hearth.proxy.gateway.gateway import final_response


def response(text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text}
    item = {"id": "msg_1", "type": "message", "role": "assistant", "content": [part]}
    return {"id": "resp_1", "status": status, "output": [item]}


def event(kind: str, **fields: Any) -> bytes:
    data = orjson.dumps({"type": kind} | fields)
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


@pytest.mark.parametrize("status", ["completed", "incomplete"])
@pytest.mark.parametrize("text", ["", '"completed"', "data: {\n\ndata:", "é😀"])
def test_an_event_or_a_whole_reply_gives_its_response(text: str, status: str) -> None:
    told = response(text, status)
    ended = event(f"response.{status}", response=told)
    for part in (ended, ended.partition(b"\n")[2], orjson.dumps(told)):
        assert final_response(part) == told


LOST = response("", "failed")


@pytest.mark.parametrize(
    "part",
    [
        b': a sign of life, "completed"\n\n',
        b"data: [DONE]\n\n",
        event("response.created", response=response('"completed"', "in_progress")),
        event("response.output_text.delta", delta='"completed"'),
        event("response.output_item.done", item={"status": "completed"}),
        event("response.failed", response=LOST),
        event("response.completed", response=LOST),
        event("response.completed", response=["completed"]),
        event("response.completed", response=response(""))[:-4],
        b'event: response.completed\ndata: {"completed"\n\n',
        b'data: ["completed"]\n\n',
        b'{"error": {"message": "completed"}}',
        b'["completed"]',
        orjson.dumps(response("x"))[:-1],
        orjson.dumps(LOST),
        b"",
    ],
)
def test_what_is_no_final_response_gives_none(part: bytes) -> None:
    assert final_response(part) is None
