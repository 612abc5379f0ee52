"""Plays a server in miniature for the probes' verdicts: a token is a word; flaws are planted."""

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock
from urllib.parse import quote

from hearth.commands import probe_cache
from hearth.commands.server_client import COUNTERS, Answer, Refused, Server, run
from hearth.commands.stream_client import Tokens

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


@dataclass
class FakeServer:
    """Answers in the place of a server; a token is a word. Keeps every prompt with its answer."""

    flaws: Flaws = field(default_factory=Flaws)
    kept: list[list[str]] = field(default_factory=list)
    lines: dict[str, list[Row]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    asked: list[tuple[Row, Mapping[str, str]]] = field(default_factory=list)
    workers: list[Row] = field(default_factory=list)

    async def told(self, _server: Server, _method: str, path: str, body: Row | None, _: Any) -> Row:
        """Stand in for what asks the server for JSON."""
        if body is not None:
            return {"input_tokens": len(self.rendered(body))}
        sessions = [
            {"session": name, "agent": "", "lines": len(found), "turns": 2, "idle_s": 1.5}
            for name, found in self.lines.items()
        ]
        answers: dict[str, Row] = {
            "/v1/models": {"data": [{"id": "tiny"}]},
            "/v1/cache": {"workers": self.workers or self.halves()},
            "/v1/sessions": {"sessions": sessions},
        }
        for name, found in self.lines.items():
            answers[f"/v1/sessions/{quote(name, safe='')}"] = {"lines": found}
        if path not in answers:
            raise Refused(404, path)
        return answers[path]

    def halves(self) -> list[Row]:
        """Return two workers that have counted half each, in both places where counters stand."""
        half = {name: self.counts[name] // 2 for name in COUNTERS}
        rest = {name: self.counts[name] - half[name] for name in COUNTERS}
        return [{"worker": 0, "counts": half}, {"worker": 1, "sessions": rest}]

    async def answer(
        self, _server: Server, _path: str, body: Row, headers: Mapping[str, str]
    ) -> Answer:
        """Stand in for what asks for an answer: tell what a request costs, and some words."""
        self.asked.append((body, headers))
        prompt = self.rendered(body)
        cached = max((common(prompt, each) for each in self.kept), default=0)
        if self.flaws.hides and self.kept:
            cached = len(prompt) - 1
        cached = 0 if self.flaws.forgets else min(cached, len(prompt) - 1)
        self.note(headers.get("x-session-id", ""), body, prompt)
        said = [f"word{len(self.asked)}", "and", "so", "on"] * 12
        self.kept.append(prompt if self.flaws.forgets_answers else [*prompt, *said, "<end>"])
        tokens = Tokens(len(prompt), cached, len(prompt) - cached, len(said) + 1, "")
        return Answer(tokens, " ".join(said), "", [])

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
    with (
        mock.patch.object(Server, "_json", lambda *request: fake.told(*request)),
        mock.patch.object(Server, "ask", lambda *request: fake.answer(*request)),
    ):
        return run(probe(options_of([*arguments])))
