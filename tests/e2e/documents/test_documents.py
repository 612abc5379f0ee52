"""PDFs through the real proxy to a real model: warm as cold, and no bomb is anybody else's harm."""

import base64
import concurrent.futures
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.helpers.pdf_files import pages_pdf, text_pdf
from tests.helpers.servers.counted_talk import ASK, FACT, NOTES
from tests.helpers.servers.server import Server

PDF = text_pdf(NOTES, FACT.format("7731"))
MB = 1_000_000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as started:
        yield started


def code(data: bytes) -> str:
    return base64.b64encode(data).decode()


def file_part(data: bytes, name: str = "gates.pdf") -> dict[str, Any]:
    url = f"data:application/pdf;base64,{code(data)}"
    return {"type": "file", "file": {"filename": name, "file_data": url}}


def asked(data: bytes, question: str = ASK) -> dict[str, Any]:
    content = [file_part(data), {"type": "text", "text": question}]
    return {"role": "user", "content": content}


def chat(server: Server, *messages: Any, **fields: Any) -> dict[str, Any]:
    body = {"messages": list(messages), "temperature": 0, "max_tokens": 24, "logprobs": True}
    body |= {"enable_thinking": False}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body | fields, timeout=60)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def said(answer: dict[str, Any]) -> tuple[str, list[float]]:
    choice = answer["choices"][0]
    return choice["message"]["content"], [row["logprob"] for row in choice["logprobs"]["content"]]


def test_a_pdf_is_read_warm_as_cold(server: Server) -> None:
    first = chat(server, asked(PDF))
    own = {"role": "assistant", "content": "I have read it."}  # cold, none of ours is as sampled
    turns = [asked(PDF), own, {"role": "user", "content": ASK}]
    warm = chat(server, *turns)
    details = warm["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] > first["usage"]["prompt_tokens"] * 0.9, "its text is the same"
    cold = chat(server, *turns, use_kv_cache=False)
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert said(warm)[0] == said(cold)[0]
    assert said(warm)[1] == pytest.approx(said(cold)[1], abs=0.001), "cut elsewhere"


def test_every_dialect_shows_the_same_prompt_and_counts_it(server: Server) -> None:
    wanted = chat(server, asked(PDF))["usage"]["prompt_tokens"]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        part: Any = {"type": "input_file", "filename": "gates.pdf", "file_data": code(PDF)}
        content: Any = [part, {"type": "input_text", "text": ASK}]
        response = client.responses.create(
            model="local",
            input=[{"role": "user", "content": content}],
            max_output_tokens=20,
            extra_body={"enable_thinking": False},
        )
        assert response.usage is not None and response.usage.input_tokens == wanted
    with anthropic.Anthropic(base_url=server.url, api_key="none") as claude:
        source: Any = {"type": "base64", "media_type": "application/pdf", "data": code(PDF)}
        block: Any = {"type": "document", "title": "gates.pdf", "source": source}
        rows: Any = [{"role": "user", "content": [block, {"type": "text", "text": ASK}]}]
        thinking: Any = {"type": "disabled"}
        counted = claude.messages.count_tokens(model="local", messages=rows, thinking=thinking)
        assert counted.input_tokens == wanted
        told = claude.messages.create(
            model="local",
            messages=rows,
            thinking=thinking,
            max_tokens=2,
            extra_body={"temperature": 0},
        )
        cached = told.usage.cache_read_input_tokens or 0
        assert cached >= wanted - 16 and told.usage.input_tokens + cached == wanted


def resident_mb(pid: int) -> float:
    """Return the memory that a process has had at most."""
    status = Path(f"/proc/{pid}/status").read_text()
    row = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(row.split()[1]) / 1024


def test_bombs_are_400s_and_nobody_else_waits_for_them(server: Server) -> None:
    assert server.process is not None
    chat(server, {"role": "user", "content": "Hello!"})
    before = resident_mb(server.process.pid)
    bombs = [
        pages_pdf([b"BT " + b"(a) Tj " * (8 * MB)]),
        pages_pdf([b"BT (" + b"A" * 70 * MB + b") Tj ET"]),
    ]
    waits = []

    def send(bomb: bytes) -> httpx.Response:
        body = {"messages": [asked(bomb)]}
        return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)

    with concurrent.futures.ThreadPoolExecutor(2) as threads, httpx.Client() as client:
        sent = [threads.submit(send, bomb) for bomb in bombs]
        while not all(each.done() for each in sent):
            began = time.monotonic()
            assert client.get(f"{server.url}/health").status_code == 200
            waits.append(time.monotonic() - began)
            time.sleep(0.02)
        replies = [each.result() for each in sent]
    assert [reply.status_code for reply in replies] == [400, 400], replies[0].text
    assert {reply.json()["error"]["code"] for reply in replies} <= {"pdf_invalid", "pdf_too_large"}
    assert len(waits) > 20
    assert sorted(waits)[len(waits) // 2] < 0.2, "the loop is free"
    assert resident_mb(server.process.pid) - before < 60, "what is unpacked is not unpacked here"
    assert chat(server, asked(PDF))["usage"]["completion_tokens"]
