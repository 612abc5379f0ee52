"""Makes a dashboard feed over a stand-in for the pool and reads its events."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

import orjson

from hearth.proxy.api.dialects import DIALECTS
from hearth.proxy.monitoring.dashboard import DashboardFeed
from hearth.proxy.monitoring.metrics import RequestMetrics
from hearth.proxy.monitoring.recent_requests import RecentRequests
from hearth.proxy.pool.worker_link import AnswerStream
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import Overloaded, RequestError
from hearth.shared.wire_messages import Admitted, Finished, Progress, Speaker, Usage

LOSS = {
    "token": 9,
    "message": 2,
    "role": "user",
    "cause": "message edited",
    "rule": None,
    "lost": 70,
    "remedy": "Leave it.",
    "was": "what the prompt said",
    "now": "what it says",
}
USAGE = Usage(100, 0, 100, 7, source="none", ttft_ms=250, queue_ms=50, finish_ms=400)
DRAFTS = {"mode": "auto", "state": "off", "reason": "exact mode"}
SESSION = {
    **{"session": "s", "agent": "", "title": "Mend it", "client": "Pi 1.2", "model": "m"},
    **{"lines": 1, "turns": 1, "lost": 0, "decode_speed": None, "begun_at": 1.5, "idle_s": 0.5},
}


class Workers:
    """Stands for the pool: one worker, which counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str]] = []
        self.sessions = [dict(SESSION)]
        self.failure: RequestError | None = None
        self.is_listing = True

    async def ask(self, what: str, about: str = "", api_key: str = "") -> dict[int, Any]:
        self.asked.append((what, about, api_key))
        if what == "cache":
            entry = {"line": 1, "tokens": 90, "bytes": 5, "idle_s": 1.0}
            told: Any = {"bytes": 5, "budget_bytes": 10, "entries": [entry], "pins": ["no"]}
            told |= {"depths": {"0-1023": 240, "1024-4095": 5}, "memory_limit_bytes": 99}
            told |= {"speculation": DRAFTS}
            return {0: told | {"slots": [{"busy": True}, {"busy": False}]}}
        if what == "sessions" and not self.is_listing:
            return {0: Overloaded("It is busy.")}
        if what == "sessions":
            return {0: {"sessions": self.sessions}}
        if self.failure is not None:
            return {0: self.failure}
        turns = [{"turn": 1, "prompt": 100, "cached": 0, "divergence": LOSS, "rules": ["x"]}]
        return {0: {"lines": [{"line": 1, "parent": None, "requests": turns * 99}]}}

    def prefills(self, api_key: str) -> list[dict[str, Any]]:
        return [{"request_id": "p", "whose": api_key}]

    def queue(self, api_key: str) -> list[dict[str, Any]]:
        return [{"request_id": "q", "whose": api_key}]

    def with_requesters(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row | {"title": "Mend it"} for row in rows]

    def count(self, what: str) -> int:
        return sum(row[0] == what for row in self.asked)


def health() -> dict[str, Any]:
    return {"status": "ok", "workers": [{"id": 0, "state": "ready"}]}


def feed_of(workers: Workers | None = None) -> DashboardFeed:
    pool: Any = workers or Workers()
    return DashboardFeed(pool, health, RecentRequests(RequestMetrics("0", "m")))


def request_of(session: str = "s", key: str = "", **fields: Any) -> ParsedRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "the words"}], **fields}
    parsed = DIALECTS["chat"].parse(body)
    prompt = dataclasses.replace(parsed.prompt, speaker=Speaker(key, session))
    return dataclasses.replace(parsed, prompt=prompt)


def ended(usage: Usage | None = USAGE, key: str = "") -> AnswerStream:
    """Return an answer at its end; without `usage` its client left amid the prefill."""
    answer = AnswerStream("r", lambda _: None, Speaker(key))
    answer.receive(Admitted("r", 100))
    answer.receive(Progress("r", 30, 100))
    answer.receive(Progress("r", 40, 100))
    if usage is None:
        answer.close()
    else:
        answer.receive(Finished("r", "stop", None, usage))
    return answer


async def read(events: AsyncGenerator[bytes, None]) -> dict[str, Any]:
    """Return the next event."""
    async with asyncio.timeout(60):
        frame = await anext(events)
    head, _, data = frame.decode().partition("\ndata: ")
    told: dict[str, Any] = orjson.loads(data)
    assert head == f"event: {told['type']}"
    return told


async def read_until(events: AsyncGenerator[bytes, None], kind: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while (told := await read(events))["type"] != kind:
            pass
    return told


async def snapshot_of(feed: DashboardFeed, key: str = "") -> dict[str, Any]:
    with feed.listening(key) as events:
        told = await read(events)
        await events.aclose()
    return told
