"""Ollama's routes through the proxy's app: who may ask, what is refused, what a worker gets."""

import base64
from hashlib import blake2b
from typing import Any

import orjson
import pytest

from hearth.proxy.api.ollama.routes import tagged
from hearth.proxy.request.model_names import ListedGroup
from tests.helpers.proxy.app_over_workers import front
from tests.helpers.proxy.metric_values import value
from tests.helpers.proxy.proxy_app import Reply, app_of, ask

PNG = b"\x89PNG\r\n\x1a\n" + bytes(64)
CHANGES = (
    *(("POST", f"/api/{name}") for name in ("pull", "push", "create", "copy")),
    *(("DELETE", "/api/delete"), ("POST", "/api/blobs/sha256:00")),
)


def body(**fields: Any) -> bytes:
    return orjson.dumps(fields)


def chat(script: str, **fields: Any) -> bytes:
    return body(messages=[{"role": "user", "content": script}], **fields)


def lines(reply: Reply) -> list[Any]:
    return [orjson.loads(row) for row in reply.content.splitlines()]


@pytest.mark.parametrize(("method", "path"), CHANGES)
def test_what_would_change_the_models_is_refused_with_words(
    tmp_path: Any, method: str, path: str
) -> None:
    reply = ask(app_of(tmp_path), method, path, (b"content-type", b"application/json"), body=b"{}")
    assert reply.status == 400
    assert set(reply.json) == {"error"}
    assert "no request changes what models this server has" in reply.json["error"]


def test_every_refusal_is_in_ollamas_words(tmp_path: Any) -> None:
    app = app_of(tmp_path, PROXY_API_KEY="k")
    key = (b"authorization", b"Bearer k")
    for status, request in (
        (401, ("GET", "/api/tags")),
        (404, ("GET", "/api/nothing", key)),
        (405, ("GET", "/api/chat", key)),
        (405, ("POST", "/api/tags", key)),
        (403, ("GET", "/api/tags", key, (b"origin", b"https://evil.example"))),
    ):
        reply = ask(app, *request)
        assert reply.status == status, request
        assert list(reply.json) == ["error"] and type(reply.json["error"]) is str
    wrong = ask(app, "POST", "/api/chat", key, body=b"[]")
    assert (wrong.status, list(wrong.json)) == (400, ["error"])
    other = ask(app, "POST", "/api/show", key, body=body(model="llama3.2"))
    assert other.status == 404 and "not served here" in other.json["error"]


def test_before_a_model_is_loaded_its_name_is_listed_without_figures(tmp_path: Any) -> None:
    app = app_of(tmp_path, MODEL_ALIASES="mine,org/it")
    rows = ask(app, "GET", "/api/tags").json["models"]
    assert [row["name"] for row in rows] == ["smollm2:latest", "mine:latest", "org/it:latest"]
    assert {row["details"]["family"] for row in rows} == {""}
    assert len({row["digest"] for row in rows}) == 3
    assert ask(app, "GET", "/api/ps").json == {"models": []}
    shown = ask(app, "POST", "/api/show", body=body(name="mine")).json
    assert shown["model_info"] == {"general.basename": "mine"}
    for path in ("/", "/api/tags", "/api/version"):
        head = ask(app, "HEAD", path)
        assert (head.status, head.content) == (200, b""), "clients look so whether it is there"


def test_a_model_that_embeds_is_listed_as_one_and_one_that_ranks_is_not(tmp_path: Any) -> None:
    app = app_of(tmp_path)
    meta = {"architecture": "bert", "size": 90, "n_embd": 384}

    def told(kind: str) -> ListedGroup:
        shape = {"output_modalities": [kind]}
        about = {"architecture": shape, "context_length": 512, "meta": meta}
        return ListedGroup("hearth", None, about)

    app.routes.encoders = lambda: {"minilm": told("embeddings"), "ranker": told("rerank")}
    _, row = ask(app, "GET", "/api/tags").json["models"]
    assert (row["name"], row["capabilities"], row["size"]) == ("minilm:latest", ["embedding"], 90)
    for name in ("minilm", "minilm:latest"):
        info = ask(app, "POST", "/api/show", body=body(model=name)).json["model_info"]
        assert info["general.architecture"] == "bert"
        assert (info["bert.context_length"], info["bert.embedding_length"]) == (512, 384)
    refused = ask(app, "POST", "/api/show", body=body(model="ranker"))
    assert refused.status == 404 and "by the other APIs only" in refused.json["error"]


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("smollm2", "smollm2:latest"),
        ("qwen3:8b", "qwen3:8b"),
        ("org/Qwen3-8B", "org/Qwen3-8B:latest"),
        ("host:80/it", "host:80/it:latest"),
    ],
)
def test_a_name_without_a_tag_is_listed_with_ollamas(name: str, listed: str) -> None:
    assert tagged(name) == listed


@pytest.mark.process
async def test_a_worker_gets_what_a_client_shows_and_each_end_is_counted_once() -> None:
    async with front(1) as made:
        image = base64.b64encode(PNG).decode()
        row = {"role": "user", "content": "n=2 reason=1", "images": [image]}
        seen = await made.ask("POST", "/api/chat", body=body(messages=[row], stream=False))
        assert seen.json["message"]["thinking"] and seen.json["done"]
        (submit,) = made.made.events("Submit")
        assert blake2b(PNG, digest_size=16).hexdigest() in orjson.dumps(submit).decode()
        wrong = {**row, "images": ["!"]}
        refused = await made.ask("POST", "/api/chat", body=body(messages=[wrong]))
        assert refused.status == 400
        assert refused.json["error"].startswith("messages[0].images[0]: ")

        streamed = await made.ask("POST", "/api/chat", body=chat("n=3 calls=1", tools=[TOOL]))
        assert streamed.headers["content-type"] == "application/x-ndjson"
        assert lines(streamed)[-1]["done"]
        (told,) = [r for r in lines(streamed) if r.get("message", {}).get("tool_calls")]
        assert told["message"]["tool_calls"][0]["function"]["name"] == "f"
        early = await made.ask("POST", "/api/generate", body=body(prompt="refuse=400:no"))
        assert (early.status, list(early.json)) == (400, ["error"])
        broken = await made.ask("POST", "/api/chat", body=chat("n=5 die=2 delay=0.2"))
        assert broken.status == 200
        assert list(lines(broken)[-1]) == ["error"]

        metrics = made.app.metrics
        for dialect, outcome, count in (
            ("ollama_chat", "stop", 1),
            ("ollama_chat", "tool_calls", 1),
            ("ollama_chat", "failed", 1),
            ("ollama_chat", "refused_4xx", 1),
            ("ollama_generate", "refused_4xx", 1),
        ):
            got = value(metrics, "requests_total", dialect=dialect, outcome=outcome)
            assert got == count, (dialect, outcome)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
