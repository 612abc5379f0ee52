"""Checks what the specification's checklist names of streams and of clients that leave.

.context/SPECIFICATION.md has each line with the test that holds it.
"""

import json
import time

import httpx
import pytest

from hearth.worker.stream.answer_parts import AnswerParts
from tests.helpers.clients.run_clients import MODEL
from tests.helpers.clients.sdk_conversations import OSLO, UTC, dictation
from tests.helpers.servers.audited_server import GENERATE, body_of
from tests.helpers.servers.scripted_server import ScriptedServer

CHAT = "/v1/chat/completions"
ANSWER = AnswerParts("They ask.", "Warm.", (OSLO, UTC))
WORDS = 1_500  # of an answer whose client leaves it


@pytest.mark.parametrize("path", GENERATE)
def test_sse_json_is_valid_and_parseable_by_standard_clients(
    scripted: ScriptedServer, path: str
) -> None:
    body = body_of(path, dictation(ANSWER), 4_000, model=MODEL, stream=True)
    answer = httpx.post(scripted.url + path, json=body, timeout=60).raise_for_status()
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n")
    assert lines[-2:] == ["", ""], "the last event is ended too"
    kinds = {line.partition(": ")[0] for line in lines if line}
    assert kinds <= {"event", "data"}, "no comments, no ids, nothing folded"
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    if is_openai := path.endswith("completions"):
        assert data.pop() == "[DONE]"
    rows = [json.loads(row) for row in data]
    assert names == ([] if is_openai else [row["type"] for row in rows])


@pytest.mark.parametrize("path", [path for path in GENERATE if path != "/v1/completions"])
def test_a_client_that_leaves_mid_stream_ends_its_answer_whose_kv_is_kept(
    scripted: ScriptedServer, path: str
) -> None:
    said = f"{path}: {dictation('partial ' * WORDS)}"
    body = body_of(path, said, 4_000, model=MODEL, stream=True)
    with httpx.stream("POST", scripted.url + path, json=body, timeout=60) as answer:
        next(line for line in answer.iter_lines() if "partial" in line)
    scripted.wait_until_idle()
    finished = [row for row in scripted.log.read_text().splitlines() if "finished request=" in row]
    assert f"request={scripted.asked()[-1].id} reason=cancelled" in finished[-1]
    httpx.post(scripted.url + path, json=body | {"stream": False}, timeout=60).raise_for_status()
    again = scripted.asked()[-1]
    assert again.cached >= len(again.ids) - 16 > 300


@pytest.mark.night
def test_client_disconnects_mid_stream_generation_stops_within_200_ms(
    scripted: ScriptedServer,
) -> None:
    """One of the tries at least is undisturbed by what else the machine does."""

    def drawn_for_s() -> float:
        """Return how long after its client had left an answer got its last token."""
        body = body_of(CHAT, dictation("word " * WORDS), 4_000, model=MODEL, stream=True)
        with httpx.stream("POST", scripted.url + CHAT, json=body, timeout=60) as answer:
            next(line for line in answer.iter_lines() if "word" in line)
        left = time.time()
        scripted.wait_until_idle()
        return scripted.drawn_at() - left

    assert any(-0.2 < drawn_for_s() < 0.2 for _ in range(8)), "it was amid it"
