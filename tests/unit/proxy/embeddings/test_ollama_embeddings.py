"""Ollama's /api/embed and /api/embeddings answer as its clients read it."""

from typing import Any

import orjson
import pytest
from hypothesis import given, strategies as st

from hearth.proxy.app import ProxyApp
from hearth.proxy.embeddings import ollama_embeddings
from hearth.shared.errors import RequestError
from tests.helpers.proxy.fake_encoders import FakeEncoders, vector
from tests.helpers.proxy.proxy_app import Reply, app_of, ask

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)


@pytest.fixture
def encoders() -> FakeEncoders:
    return FakeEncoders()


@pytest.fixture
def edge(tmp_path: Any, encoders: FakeEncoders) -> ProxyApp:
    return app_of(tmp_path, encoders=encoders, EMBEDDING_MODEL="org/House-Embed")


def embed(edge: ProxyApp, path: str = "/api/embed", **body: Any) -> Reply:
    return ask(edge, "POST", path, body=orjson.dumps({"model": "house-embed:latest", **body}))


def test_one_text_or_many_have_one_vector_each(edge: ProxyApp, encoders: FakeEncoders) -> None:
    for texts in ("one two", ["one", "two three"]):
        told = embed(edge, input=texts).json
        wanted = [texts] if isinstance(texts, str) else texts
        assert told["embeddings"] == [vector(text, 8) for text in wanted]
        assert told["prompt_eval_count"] == sum(len(text.split()) for text in wanted)
        assert told["model"] == "house-embed:latest", "as the client named it"
        assert told["total_duration"] >= 0
    assert encoders.asked[-1] == (["one", "two three"], None, True), "too long is cut, unless not"
    embed(edge, input="x", truncate=False, dimensions=3)
    assert encoders.asked[-1] == (["x"], 3, False)


def test_the_older_route_has_one_vector(edge: ProxyApp) -> None:
    assert embed(edge, "/api/embeddings", prompt="one").json == {"embedding": vector("one", 8)}


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/api/embed", {}, {"embeddings": []}),
        ("/api/embed", {"input": []}, {"embeddings": []}),
        ("/api/embeddings", {"prompt": ""}, {"embedding": []}),
    ],
)
def test_no_text_has_no_vector(
    edge: ProxyApp, encoders: FakeEncoders, path: str, body: Any, told: Any
) -> None:
    reply = embed(edge, path, **body)
    assert reply.status == 200
    assert told.items() <= reply.json.items()
    assert not encoders.asked


def test_a_refusal_is_in_ollamas_words(edge: ProxyApp, tmp_path: Any) -> None:
    assert embed(edge, input=[1]).status == embed(edge, input={"a": 1}).status == 400
    assert embed(edge, input="x", model="llama3.2").status == 404
    reply = embed(app_of(tmp_path), input="x")
    assert reply.status == 404
    assert "EMBEDDING_MODEL is empty" in reply.json["error"]


@given(st.sampled_from(ollama_embeddings.PATHS), JSON, JSON, JSON)
def test_any_body_is_read_or_refused(path: str, given: Any, dimensions: Any, cut: Any) -> None:
    body = {"input": given, "prompt": given, "dimensions": dimensions, "truncate": cut}
    try:
        request = ollama_embeddings.read(path, body)
    except RequestError as error:
        assert error.status == 400
        return
    assert all(type(text) is str and text for text in request.texts)
