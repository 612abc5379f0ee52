"""`hearth eval` against a server in miniature: its verdicts, and what it sends."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from hearth.commands import eval_answers
from hearth.commands.server_client import run

pytestmark = pytest.mark.process

Row = dict[str, Any]
PROMPT_TOKENS = 100


@dataclass
class Miniature:
    """Answers "B" to everything; from the second time on its prompt is cached."""

    warm_answer: str = "B"
    warm_logprob: float = -0.5
    warm_prompt_tokens: int = PROMPT_TOKENS
    keeps: bool = True
    forgets: str = ""  # the question of which nothing is kept
    obeys: bool = True  # use_kv_cache: false
    tells: bool = True  # usage.kv_cache
    refusals: dict[str, int] = field(default_factory=dict)  # question -> status
    asked: list[Row] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    times: Counter[str] = field(default_factory=Counter)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/v1/models", self.models)
        return app

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        self.sessions.append(request.headers["x-session-id"])
        text = body["messages"][-1]["content"]
        if text in self.refusals:
            return web.Response(status=self.refusals[text], text="not so")
        return web.json_response(self.answer(text, body["use_kv_cache"] or not self.obeys))

    def answer(self, text: str, reads_cache: bool) -> Row:
        self.times[text] += reads_cache
        is_kept = self.keeps and text != self.forgets
        is_hit = reads_cache and is_kept and self.times[text] > self.obeys
        usage: Row = {"prompt_tokens": self.warm_prompt_tokens if is_hit else PROMPT_TOKENS}
        if self.tells:
            source = "ram" if is_hit else "none"
            usage["kv_cache"] = {"prefix_length": 96 if is_hit else 0, "source": source}
        score = {"token": "B", "logprob": self.warm_logprob if is_hit else -0.5}
        message = {"content": self.warm_answer if is_hit else "B"}
        choice = {"message": message, "logprobs": {"content": [score]}}
        return {"usage": usage, "choices": [choice]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three questions, of which the last has no right answer."""
    path = tmp_path / "questions.jsonl"
    rows = [{"id": "q1", "input": "one", "ideal": "B"}, {"id": "q2", "input": "two", "ideal": "C"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"input": "three"}]))
    return path


def status_of(miniature: Miniature, *arguments: str) -> int:
    async def play() -> int:
        async with TestServer(miniature.app()) as server:
            options = ["--base-url", str(server.make_url("")), *arguments]
            return await eval_answers.eval_answers(eval_answers.options_of(options))

    return run(play())


def test_equal_answers_are_good(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(Miniature(), str(file)) == 0
    out = capsys.readouterr().out
    assert "verdict: good: none of 3 answers changed\n" in out
    assert "cold and warm: 0 of 3 answers changed\nlog probabilities are the same\n" in out
    rows = [line.split("  ") for line in out.splitlines() if "1 of 2 (50.0%)" in line]
    found = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert [row[:-1] for row in found] == [
        ["cold", "3", "1 of 2 (50.0%)", "0", "0.0%", "none 3", "0"],
        ["first", "3", "1 of 2 (50.0%)", "0", "0.0%", "none 3", "0"],
        ["warm", "3", "1 of 2 (50.0%)", "3", "96.0%", "ram 3", "0"],
    ]


def test_changed_answers_are_named_with_what_that_means(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(Miniature(warm_answer="Bee"), str(file), "--count", "2") == 1
    out = capsys.readouterr().out
    assert "verdict: CHANGED: 2 of 2 answers: q1, q2. With CACHE_EXACT=true this is a bug" in out
    assert "cold and first: 0 of 2" in out and "cold and warm: 2 of 2 answers changed" in out
    assert ["q1", "1", "B", "Bee"] in [line.split() for line in out.splitlines()]


@pytest.mark.parametrize(
    ("miniature", "said"),
    [
        (Miniature(keeps=False), "of 3 prompts that were asked before none was kept"),
        (Miniature(obeys=False), "q1 was to be asked cold, and 96 of its tokens were cached"),
        (Miniature(tells=False), "no usage.kv_cache: this is no Hearth"),
        (Miniature(refusals={"two": 400}), "1 of 3 refused: q2"),
        (Miniature(refusals={"two": 401}), "is answered with 401: not so"),
        (
            Miniature(warm_answer="other", warm_prompt_tokens=104),
            "3 not compared, since their prompts were other tokens",
        ),
    ],
)
def test_without_a_cold_and_a_warm_answer_to_each_there_is_no_verdict(
    miniature: Miniature, said: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(miniature, str(file)) == 2
    shown = capsys.readouterr()
    assert said in shown.out + shown.err and "verdict: none: " in shown.out + shown.err


def test_each_question_is_asked_greedily_apart_from_the_cache_and_then_twice_with_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "batch.jsonl"
    messages = [{"role": "user", "content": "one"}]
    given = {"messages": messages, "temperature": 1, "n": 4, "stream": True, "model": "gpt"}
    rows = [{"body": given | {"max_completion_tokens": 7, "reasoning_effort": "low"}}]
    rows.append({"body": {"messages": messages, "repetition_penalty": 1.1}})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    miniature = Miniature()
    assert status_of(miniature, str(path)) == 0
    assert [body.pop("use_kv_cache") for body in miniature.asked] == [False] * 2 + [True] * 4
    same = {"messages": messages, "model": "tiny", "temperature": 0, "seed": 0, "logprobs": True}
    first = same | {"max_tokens": 7, "reasoning_effort": "low", "repetition_penalty": 1.0}
    second = same | {"max_tokens": 32, "enable_thinking": False, "repetition_penalty": 1.1}
    assert miniature.asked == [first, second] * 3
    assert len(set(miniature.sessions)) == 1, "one line of the lists that a user reads"
