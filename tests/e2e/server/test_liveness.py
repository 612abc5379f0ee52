"""A client that waits for a long prefill hears of it, by what its own parser reads as life."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Final

import httpx

from hearth.proxy.api.answer_frames import PING_S
from tests.helpers.clients.run_clients import MODEL
from tests.helpers.servers.audited_server import GENERATE, body_of, text_of
from tests.helpers.servers.scripted_server import ScriptedServer
from tests.helpers.servers.server import WAIT_S_MAX
from tests.helpers.worker_processes.scripted_worker import SMALL_TALK

CHUNK_S: Final = PING_S * 1.2  # in which nothing comes from the worker
TEXT: Final = "What are words? " * 30  # a chunk, and all others wait for it


def heard(server: ScriptedServer, path: str) -> list[dict[str, Any]]:
    """Return the events of one stream."""
    body = body_of(path, f"{path}: {TEXT}", model=MODEL, stream=True)
    answer = httpx.post(server.url + path, json=body, timeout=WAIT_S_MAX * 2).raise_for_status()
    lines = answer.text.splitlines()
    assert not [line for line in lines if line.startswith(":")], "a comment is no event"
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def is_life(path: str, event: dict[str, Any]) -> bool:
    """Tell whether an event is one that says nothing and that this dialect's clients know."""
    known = {"/v1/messages": "ping", "/v1/responses": "response.in_progress"}.get(path)
    if known is not None:
        return bool(event["type"] == known)
    (choice,) = event["choices"]
    return choice.get("finish_reason") is None


def test_every_dialect_stays_alive_while_prompts_are_prefilled(scripted: ScriptedServer) -> None:
    """All at once: each waits for the others' chunks too, longer than between two signs of life."""
    scripted.forget()
    scripted.pause(CHUNK_S)
    try:
        with ThreadPoolExecutor() as pool:
            asked = {path: pool.submit(heard, scripted, path) for path in GENERATE}
            streams = {path: each.result() for path, each in asked.items()}
    finally:
        scripted.pause(0)
    for path, events in streams.items():
        assert "".join(map(text_of, events)).startswith(SMALL_TALK)
        first = next(number for number, event in enumerate(events) if text_of(event))
        alive = [event for event in events[:first] if is_life(path, event)]
        assert len(alive) >= 2, (path, events[:first])
        rows = [event["prefill"] for event in alive if event.get("prefill")]
        assert rows or path == "/v1/completions", "the old API has no place for it"
        assert all(row["done_tokens"] <= row["prompt_tokens"] for row in rows)
        assert all(early["done_tokens"] <= late["done_tokens"] for early, late in pairwise(rows))
