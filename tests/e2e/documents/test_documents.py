"""PDFs through the real proxy to a real model: warm as cold, and no bomb is anybody else's harm."""

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.helpers.pdf_files import text_pdf
from tests.helpers.servers.counted_talk import ASK, FACT, NOTES
from tests.helpers.servers.server import Server

PDF = text_pdf(NOTES, FACT.format("7731"))


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
