"""Plays a server in miniature for the probes' verdicts: a token is a word; flaws are planted."""

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from hearth.commands import probe_cache
from hearth.commands.server_client import COUNTERS, run

Row = dict[str, Any]
Probe = Callable[[argparse.Namespace], Coroutine[Any, Any, int]]

DRIFTING = re.compile(
    "|".join(
        re.escape(text).replace(r"\{v\}", r"\d").replace("\\\n", r"\s")
        for text in probe_cache.VOLATILE.values()
    )
)
HEADER = re.compile(r"x-anthropic-billing-header: [^\n]*\n")


def words(text: str) -> list[str]:
    return re.findall(r"\S+", text)


@dataclass(frozen=True)
class Flaws:
    """What a server may get wrong."""

    forgets: bool = False  # finds nothing
    hides: bool = False  # answers from KV of other tokens
    forgets_answers: bool = False  # what it generated is prefilled again
    reads_telemetry: bool = False
    rejects: bool = False  # counts drift as what no rule explains
    drifts_counted: int = 1  # for each that there was
    splits_lines: bool = False  # drift opens a line
    breaks_off: bool = False
    reads_text_only: bool = False
    forgets_images: bool = False  # a prompt with one finds nothing


@dataclass
class FakeServer:
    """Speaks two dialects; a token is a word. Keeps every prompt with its answer."""

    flaws: Flaws = field(default_factory=Flaws)
    calls_tools: bool = False
    kept: list[list[str]] = field(default_factory=list)
    lines: dict[str, list[Row]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    asked: list[tuple[Row, dict[str, str]]] = field(default_factory=list)
    workers: list[Row] = field(default_factory=list)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/messages", self.messages)
        app.router.add_post("/v1/messages/count_tokens", self.count)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/cache", self.cache)
        app.router.add_get("/v1/sessions", self.sessions)
        app.router.add_get("/v1/sessions/{session}", self.session)
        return app

    async def models(self, _: web.Request) -> web.Response:
        modalities = ["text"] if self.flaws.reads_text_only else ["text", "image"]
        row = {"id": "tiny", "architecture": {"input_modalities": modalities}}
        return web.json_response({"data": [row]})

    async def cache(self, _: web.Request) -> web.Response:
        halves = [{name: self.counts[name] // 2} for name in COUNTERS]
        rest = {name: self.counts[name] - self.counts[name] // 2 for name in COUNTERS}
        told = {name: value for half in halves for name, value in half.items()}
        workers = [{"worker": 0, "counts": told}, {"worker": 1, "sessions": rest}]
        return web.json_response({"workers": self.workers or workers})

    async def sessions(self, _: web.Request) -> web.Response:
        rows = [
            {"session": name, "agent": "", "lines": len(found), "turns": 2, "idle_s": 1.5}
            for name, found in self.lines.items()
        ]
        return web.json_response({"sessions": rows})

    async def session(self, request: web.Request) -> web.Response:
        lines = self.lines.get(request.match_info["session"])
        if lines is None:
            return web.Response(status=404, text="no such session")
        return web.json_response({"lines": lines})

    async def count(self, request: web.Request) -> web.Response:
        return web.json_response({"input_tokens": len(self.rendered(await request.json()))})

    def rendered(self, body: Row) -> list[str]:
        system = "\n".join(block["text"] for block in body.get("system") or [])
        if not self.flaws.reads_telemetry:
            system = HEADER.sub("", system)
        tokens = words(system)
        for message in body["messages"]:
            content = message["content"]
            text = content if isinstance(content, str) else json.dumps(content)
            calls = message.get("tool_calls") or ()
            text += "".join(f" {call['function']['arguments']}" for call in calls)
            tokens += [f"<{message['role']}>", *words(text), "<end>"]
        return [*tokens, "<assistant>"]

    def cost(self, body: Row, headers: dict[str, str]) -> tuple[Row, list[str]]:
        """Return the usage of a request, and the words of its answer."""
        self.asked.append((body, headers))
        prompt = self.rendered(body)
        cached = max((common(prompt, each) for each in self.kept), default=0)
        if self.flaws.hides and self.kept:
            cached = len(prompt) - 1
        cached = 0 if self.flaws.forgets else min(cached, len(prompt) - 1)
        if self.flaws.forgets_images and "image" in json.dumps(body["messages"]):
            cached = 0
        self.note(headers.get("x-session-id", ""), body, prompt)
        answer = [f"word{len(self.asked)}", "and", "so", "on"] * 12
        self.kept.append(prompt if self.flaws.forgets_answers else [*prompt, *answer, "<end>"])
        usage = {"prompt": len(prompt), "cached": cached, "completion": len(answer) + 1}
        return usage, answer

    def note(self, session: str, body: Row, prompt: list[str]) -> None:
        """Group the request into its line, and count what drifted."""
        lines = self.lines.setdefault(session, [])
        name = words(DRIFTING.sub("", HEADER.sub("", " ".join(prompt[:-1]))))
        for line in lines:
            if name[: len(line["name"])] == line["name"] and not self.flaws.splits_lines:
                has_drifted = prompt[: len(line["prompt"])] != line["prompt"]
                counter = COUNTERS[0] if self.flaws.rejects else COUNTERS[1]
                self.counts[counter] += has_drifted * self.flaws.drifts_counted
                line |= {"name": name, "prompt": prompt[:-1]}
                return
        lines.append({"line": len(lines), "name": name, "prompt": prompt[:-1], "requests": []})

    async def messages(self, request: web.Request) -> web.StreamResponse:
        usage, answer = self.cost(await request.json(), dict(request.headers))
        fresh = usage["prompt"] - usage["cached"]
        told = {"input_tokens": fresh, "cache_read_input_tokens": usage["cached"]}
        end = {"output_tokens": usage["completion"], "kv_cache": {"prefilled": fresh}}
        delta = {"type": "text_delta", "text": " ".join(answer)}
        events: list[Row] = [
            {"type": "message_start", "message": {"usage": told}},
            {"type": "content_block_delta", "delta": delta},
            {"type": "message_delta", "usage": end},
            {"type": "message_stop"},
        ]
        return self.stream(events)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        usage, answer = self.cost(await request.json(), dict(request.headers))
        deltas: list[Row] = [{"content": " ".join(answer)}]
        if self.calls_tools:
            deltas += call_deltas("c1", '{"path": "a", ', '"limit": 5000.0}')
        told = {
            "prompt_tokens": usage["prompt"],
            "completion_tokens": usage["completion"],
            "prompt_tokens_details": {"cached_tokens": usage["cached"]},
        }
        events: list[Row] = [{"choices": [{"delta": delta}]} for delta in deltas]
        events.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        events.append({"choices": [], "usage": told})
        return self.stream(events)

    def stream(self, events: list[Row]) -> web.StreamResponse:
        if self.flaws.breaks_off:
            events = events[:1]
        raw = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
        return web.Response(body=raw + b"data: [DONE]\n\n", content_type="text/event-stream")


def call_deltas(call_id: str, *arguments: str) -> list[Row]:
    first = {"index": 0, "id": call_id, "function": {"name": "read", "arguments": arguments[0]}}
    rest = [{"index": 0, "function": {"arguments": each}} for each in arguments[1:]]
    return [{"tool_calls": [each]} for each in (first, *rest)]


def common(one: list[str], other: list[str]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def played(
    probe: Probe,
    options_of: Callable[[list[str]], argparse.Namespace],
    fake: FakeServer,
    *arguments: str,
) -> int:
    """Return the exit status of a probe of `fake`."""

    async def play() -> int:
        async with TestServer(fake.app()) as server:
            options = options_of([*arguments, "--base-url", str(server.make_url(""))])
            return await probe(options)

    return run(play())
