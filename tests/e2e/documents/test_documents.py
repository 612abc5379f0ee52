"""PDFs through the real proxy to a real model: warm as cold."""

import base64
from typing import Any

import httpx
import pytest

from tests.helpers.pdf_files import text_pdf
from tests.helpers.servers.counted_talk import ASK, FACT, NOTES
from tests.helpers.servers.server import Server

PDF = base64.b64encode(text_pdf(NOTES, FACT.format("7731"))).decode()
FILE = {"filename": "gates.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}
ASKED = {
    "role": "user",
    "content": [{"type": "file", "file": FILE}, {"type": "text", "text": ASK}],
}


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
    server.forget()
    first = chat(server, ASKED)
    own = {"role": "assistant", "content": "I have read it."}  # cold, none of ours is as sampled
    turns = [ASKED, own, {"role": "user", "content": ASK}]
    warm = chat(server, *turns)
    details = warm["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] > first["usage"]["prompt_tokens"] * 0.9, "its text is the same"
    cold = chat(server, *turns, use_kv_cache=False)
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert said(warm)[0] == said(cold)[0]
    assert said(warm)[1] == pytest.approx(said(cold)[1], abs=0.001), "cut elsewhere"
