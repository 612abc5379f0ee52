"""A client that waits for a long prefill hears of it, by what its own parser reads as life."""

import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import httpx
import pytest

from hearth.proxy.api.server_sent_events import PING_S
from tests.helpers.clients.run_clients import MODEL
from tests.helpers.servers.scripted_server import ScriptedServer
from tests.helpers.worker_processes.scripted_worker import SMALL_TALK

FIRST_S_MAX: Final = 1.0  # from the request to the first event
SILENCE_S_MAX: Final = 10.0
CHUNK: Final = 256  # tokens of a prefill on a CPU
OPENING_S: Final = 0.2  # before the first text, in which an item may be opened for it
LONG_S: Final = PING_S + FIRST_S_MAX + 2 * OPENING_S  # a wait in which a stream says something
PREFILL_S: Final = 12.0
LONG_PREFILL_S: Final = 60.0
TEXT: Final = "What are words? " * 150  # a few chunks, in each dialect apart from the others'

BODIES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": f"A: {TEXT}"}]}),
    "completions": ("/v1/completions", {"prompt": f"B: {TEXT}"}),
    "messages": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": f"C: {TEXT}"}], "max_tokens": 99},
    ),
    "responses": ("/v1/responses", {"input": f"D: {TEXT}"}),
}

asks_more = pytest.mark.skipif(
    "HEARTH_EXAMPLES" not in os.environ, reason="minutes: HEARTH_EXAMPLES asks for it"
)


@dataclass
class Heard:
    """One stream: its events and when each came, in seconds since the request."""

    at: list[float] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @property
    def silence_s(self) -> float:
        return max(late - early for early, late in pairwise([0.0, *self.at]))

    @property
    def waited_s(self) -> float:
        """How long it took to the first text."""
        rows = zip(self.at, self.events, strict=True)
        return next(at for at, event in rows if text_of(event))

    @property
    def text(self) -> str:
        return "".join(map(text_of, self.events))

    @property
    def progress(self) -> list[dict[str, int]]:
        return [event["prefill"] for event in self.events if event.get("prefill")]


def hear(server: ScriptedServer, dialect: str) -> Heard:
    """Read one stream to its end."""
    path, fields = BODIES[dialect]
    body, heard, began = {"model": MODEL, "stream": True, **fields}, Heard(), time.monotonic()
    with httpx.stream("POST", server.url + path, json=body, timeout=SILENCE_S_MAX * 9) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            heard.lines.append(line)
            if line.startswith("data: {"):
                heard.at.append(time.monotonic() - began)
                heard.events.append(json.loads(line.removeprefix("data: ")))
    return heard


def text_of(event: dict[str, Any]) -> str:
    """Return what an event of any dialect appends to the answer."""
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    if event.get("type") == "content_block_delta":
        return str(event["delta"]["text"])
    return "".join(
        row.get("text") or row.get("delta", {}).get("content") or ""
        for row in event.get("choices", [])
    )


def is_life(dialect: str, event: dict[str, Any]) -> bool:
    """Tell whether an event is one that says nothing and that this dialect's clients know."""
    if dialect == "messages":
        return bool(event["type"] == "ping")
    if dialect == "responses":
        return bool(event["type"] == "response.in_progress")
    (choice,) = event["choices"]
    return choice.get("finish_reason") is None and not text_of(event)


def is_alive(dialect: str, heard: Heard) -> None:
    assert heard.at[0] < 3 * FIRST_S_MAX, "not behind others' chunks; a busy machine has its share"
    assert heard.silence_s < SILENCE_S_MAX
    assert not [line for line in heard.lines if line.startswith(":")], "a comment is no event"
    assert heard.text == SMALL_TALK
    waited = [
        event
        for at, event in zip(heard.at, heard.events, strict=True)
        if FIRST_S_MAX < at < heard.waited_s - OPENING_S
    ]
    assert waited or heard.waited_s < LONG_S, "it was told of in between"
    assert all(is_life(dialect, event) for event in waited)


def tells_progress(heard: Heard) -> None:
    rows = heard.progress
    assert rows
    assert all(0 <= row["done_tokens"] <= row["prompt_tokens"] for row in rows)
    assert all(early["done_tokens"] <= late["done_tokens"] for early, late in pairwise(rows))


def test_every_dialect_stays_alive_while_prompts_are_prefilled(scripted: ScriptedServer) -> None:
    """All at once: each waits for the others' chunks too."""
    chunks = sum(chunk_count(scripted, dialect) for dialect in BODIES)
    scripted.forget()
    scripted.pause(PREFILL_S / chunks)
    try:
        with ThreadPoolExecutor() as pool:
            asked = {dialect: pool.submit(hear, scripted, dialect) for dialect in BODIES}
            heard = {dialect: each.result() for dialect, each in asked.items()}
    finally:
        scripted.pause(0)
    for dialect, each in heard.items():
        print(f"{dialect}: {each.at[-1]:.1f} s, longest silence {each.silence_s:.2f} s")
    assert max(each.at[-1] for each in heard.values()) > PREFILL_S - 1
    assert sum(each.waited_s > LONG_S for each in heard.values()) >= 2
    for dialect, each in heard.items():
        is_alive(dialect, each)
        if dialect != "completions" and each.waited_s > LONG_S:  # the old API has no place for it
            tells_progress(each)


def test_one_chunk_that_takes_long_is_no_silence(scripted: ScriptedServer) -> None:
    """Nothing comes from the worker in all that time."""
    scripted.forget()
    scripted.pause(PREFILL_S)
    try:
        answer = httpx.stream(
            "POST",
            f"{scripted.url}/v1/messages",
            json={
                "model": MODEL,
                "stream": True,
                "max_tokens": 9,
                "messages": [{"role": "user", "content": "Hi."}],
            },
            timeout=SILENCE_S_MAX,
        )
        with answer as stream:
            lines = [line for line in stream.iter_lines() if line.startswith("event: ")]
    finally:
        scripted.pause(0)
    assert lines.count("event: ping") >= 1 + int(PREFILL_S // 5)


@asks_more
@pytest.mark.parametrize("dialect", BODIES)
def test_every_dialect_lives_through_a_prefill_of_a_minute(
    scripted: ScriptedServer, dialect: str
) -> None:
    chunks = chunk_count(scripted, dialect)
    scripted.forget()
    scripted.pause(LONG_PREFILL_S / chunks)
    try:
        heard = hear(scripted, dialect)
    finally:
        scripted.pause(0)
    print(f"{dialect}: {heard.at[-1]:.0f} s, longest silence {heard.silence_s:.2f} s")
    assert heard.at[-1] > LONG_PREFILL_S - 1
    is_alive(dialect, heard)
    if dialect != "completions":
        tells_progress(heard)
        assert heard.progress[-1]["done_tokens"] > 0


def chunk_count(server: ScriptedServer, dialect: str) -> int:
    """Return in how many chunks the dialect's prompt is prefilled."""
    hear(server, dialect)
    return math.ceil(len(server.asked()[-1].ids) / CHUNK)
