"""Texts are embedded and ranked as OpenAI, Cohere and Ollama do it, or refused with a remedy."""

from typing import Any

import orjson
import pytest
from hypothesis import given, strategies as st

from hearth.proxy.app import ProxyApp
from hearth.proxy.embeddings.encoder_bodies import OLLAMA_PATHS, read_ollama
from hearth.shared.errors import RequestError, StartError
from tests.helpers.proxy.fake_encoders import FakeEncoders, vector
from tests.helpers.proxy.proxy_app import Reply, app_of, ask

BOTH = {"EMBEDDING_MODEL": "org/House-Embed", "RERANK_MODEL": "org/House-Rank"}


@pytest.fixture
def encoders() -> FakeEncoders:
    return FakeEncoders()


@pytest.fixture
def edge(tmp_path: Any, encoders: FakeEncoders) -> ProxyApp:
    return app_of(tmp_path, encoders=encoders, PROXY_MODEL_ID="chatty", **BOTH)


def post(edge: ProxyApp, path: str, **body: Any) -> Reply:
    return ask(edge, "POST", path, body=orjson.dumps(body))


def embed(edge: ProxyApp, given: Any, **more: Any) -> Reply:
    return post(edge, "/v1/embeddings", input=given, **more)


# ---------------------------------------------------------------- embeddings


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("one two", ["one two"]),
        (["one", "two three"], ["one", "two three"]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (["one", [7]], ["one", [7]]),
    ],
)
def test_texts_and_token_ids_are_embedded_in_their_order_and_counted(
    edge: ProxyApp, encoders: FakeEncoders, given: Any, texts: list[Any]
) -> None:
    told = embed(edge, given, user="me").json
    assert encoders.asked == [(texts, None, False)]
    assert [row["index"] for row in told["data"]] == list(range(len(texts)))
    assert [row["embedding"] for row in told["data"]] == [vector(text, 8) for text in texts]
    assert {row["object"] for row in told["data"]} == {"embedding"}
    tokens = sum(len(text.split() if isinstance(text, str) else text) for text in texts)
    assert told["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (told["object"], told["model"]) == ("list", "org/House-Embed")


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/embeddings", {"input": "a" * 9_000}), ("/v1/rerank", {"documents": ["a" * 9_000]})],
)
def test_what_the_process_is_sent_counts_beside_the_body_until_it_has_answered(
    edge: ProxyApp, encoders: FakeEncoders, path: str, body: dict[str, Any]
) -> None:
    held: list[int] = []
    encoders.watch = lambda: held.append(edge.body_budget.bytes_held)
    assert post(edge, path, query="q", **body).status == 200
    assert held and held[0] > 2 * 9_000 and edge.body_budget.bytes_held == 0


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "input", "allowed is a string, or a list of strings"),
        ({"input": []}, "input", "input has 0 texts and this server accepts 1 to 2,048"),
        ({"input": ["x"] * 2_049}, "input", "input has 2,049 texts"),
        ({"input": ""}, "input", "a string that is not empty"),
        ({"input": ["x", ""]}, "input[1]", "a string that is not empty"),
        ({"input": [[1], []]}, "input[1]", "list of token ids"),
        ({"input": [1, True]}, "input", "list of token ids"),
        ({"input": [[-1]]}, "input[0]", "list of token ids"),
        ({"input": [[2**31]]}, "input[0]", "list of token ids"),
        ({"input": {"text": "x"}}, "input", "allowed is a string, or"),
        ({"input": "x", "encoding_format": "ubinary"}, "encoding_format", "float or base64"),
        ({"input": "x", "dimensions": 0}, "dimensions", "a whole number from 1 to 65536"),
        ({"input": "x", "truncate": "END"}, "truncate", "true or false"),
    ],
)
def test_a_body_that_cannot_be_embedded_is_a_400_that_says_what_can(
    edge: ProxyApp, encoders: FakeEncoders, body: dict[str, Any], param: str, said: str
) -> None:
    reply = post(edge, "/v1/embeddings", **body)
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert said in reply.json["error"]["message"]
    assert not encoders.asked


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    "name",
    [
        *(None, "", "org/House-Embed", "house-embed", "House-Embed:latest", "hearth/House-Embed"),
        *("text-embedding-3-small", "text-embedding-ada-002", "gpt-anything"),
    ],
)
def test_the_models_own_names_and_those_of_openais_embedders_are_answered(
    edge: ProxyApp, name: str | None
) -> None:
    reply = embed(edge, "x", model=name)
    assert reply.status == 200
    assert reply.json["model"] == "org/House-Embed"
    assert reply.headers["x-hearth-served-by"] == "hearth/org/House-Embed"


@pytest.mark.parametrize("name", ["nomic-embed-text", "chatty", "org/House-Rank"])
def test_another_name_is_a_404_that_names_the_model_and_the_setting(
    edge: ProxyApp, name: str
) -> None:
    reply = embed(edge, "x", model=name)
    assert (reply.status, reply.json["error"]["code"]) == (404, "model_not_found")
    assert "EMBEDDING_MODEL answers: 'org/House-Embed'" in reply.json["error"]["message"]
    assert embed(edge, "x", model=5).status == 400


def test_token_ids_under_a_name_of_openais_are_refused_as_those_of_its_tokenizer(
    edge: ProxyApp, encoders: FakeEncoders
) -> None:
    """As LangChain sends them by default."""
    reply = embed(edge, [[1, 2]], model="text-embedding-ada-002", encoding_format="base64")
    assert (reply.status, reply.json["error"]["param"]) == (400, "input")
    assert "check_embedding_ctx_length=False" in reply.json["error"]["message"]
    assert embed(edge, [[1, 2]], model="house-embed").status == 200
    assert encoders.asked == [([[1, 2]], None, False)]


@pytest.mark.parametrize(
    ("path", "setting"), [("/v1/embeddings", "EMBEDDING_MODEL"), ("/rerank", "RERANK_MODEL")]
)
def test_what_is_not_set_is_a_404_that_names_the_setting(
    tmp_path: Any, path: str, setting: str
) -> None:
    reply = post(app_of(tmp_path), path, input="x", query="x", documents=["y"])
    assert reply.status == 404
    assert f"{setting} is empty" in reply.json["error"]["message"]
    assert ask(app_of(tmp_path), "GET", path).status == 405


def test_models_that_embed_and_rank_are_listed_last_and_say_what_they_do(edge: ProxyApp) -> None:
    rows = ask(edge).json["data"]
    assert [row["id"] for row in rows] == ["chatty", "org/House-Embed", "org/House-Rank"]
    assert "architecture" not in rows[0]
    assert rows[1]["architecture"]["output_modalities"] == ["embeddings"]
    assert (rows[1]["context_length"], rows[1]["meta"]["n_embd"]) == (512, 8)
    assert rows[2]["architecture"]["output_modalities"] == ["rerank"]
    assert ask(edge, "GET", "/v1/models/org/house-embed:latest").json == rows[1]


@pytest.mark.parametrize("setting", ["builtin:minilm", "minilm"])
@pytest.mark.parametrize(
    "name",
    [
        *("minilm", "builtin:minilm", "MiniLM:latest", "all-MiniLM-L6-v2"),
        *("sentence-transformers/all-MiniLM-L6-v2", "text-embedding-3-small", None),
    ],
)
def test_the_builtin_model_answers_to_its_names_at_the_hub_too(
    tmp_path: Any, encoders: FakeEncoders, setting: str, name: str | None
) -> None:
    edge = app_of(tmp_path, encoders=encoders, EMBEDDING_MODEL=setting)
    assert embed(edge, "one", model=name).json["model"] == "minilm"
    listed = ask(edge, "GET", "/v1/models").json["data"]
    assert [row["id"] for row in listed][1:] == ["minilm"]


def test_a_pattern_of_the_users_has_its_names_answered(tmp_path: Any) -> None:
    edge = app_of(tmp_path, encoders=FakeEncoders(), CATCH_ALL_MODELS="nomic-*", **BOTH)
    assert embed(edge, "x", model="nomic-embed-text").status == 200
    assert embed(edge, "x", model="gpt-anything").status == 404


def test_anthropics_list_has_models_of_text_only(edge: ProxyApp) -> None:
    listed = ask(edge, "GET", "/v1/models", (b"anthropic-version", b"2023-06-01")).json
    assert [row["id"] for row in listed["data"]] == ["chatty"]


def test_a_model_that_embeds_is_not_asked_for_text(edge: ProxyApp) -> None:
    said = [{"role": "user", "content": "x"}]
    reply = post(edge, "/v1/chat/completions", model="house-embed", messages=said)
    assert reply.status == 400
    assert "answers at /v1/embeddings only" in reply.json["error"]["message"]


def test_a_name_that_a_model_of_text_has_refuses_to_start(tmp_path: Any) -> None:
    settings = {"EMBEDDING_MODEL": "org/twice", "PROXY_MODEL_ID": "org/twice"}
    with pytest.raises(StartError, match="EMBEDDING_MODEL is 'org/twice', and 'org/twice' is"):
        app_of(tmp_path, encoders=FakeEncoders(), **settings)


# ---------------------------------------------------------------- rerank


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_come_back_by_their_scores_the_best_first(
    edge: ProxyApp, encoders: FakeEncoders, path: str
) -> None:
    documents = ["of cats", {"text": "the blue sea"}, "blue"]
    told = post(edge, path, model="rerank-v3.5", query="blue sea", documents=documents).json
    assert encoders.asked == [("blue sea", ["of cats", "the blue sea", "blue"])]
    assert [row["index"] for row in told["results"]] == [1, 2, 0]
    assert [row["relevance_score"] for row in told["results"]] == [2 / 3, 1 / 3, 0.0]
    assert all("document" not in row for row in told["results"])
    assert told["model"] == "org/House-Rank"
    assert told["usage"]["total_tokens"] == told["meta"]["tokens"]["input_tokens"] == 6


def test_the_best_alone_come_with_their_texts_where_that_is_wished(edge: ProxyApp) -> None:
    body = {"query": "b", "documents": ["a", "b", "b"], "return_documents": True}
    results = post(edge, "/rerank", top_n=2, **body).json["results"]
    assert [(row["index"], row["document"]) for row in results] == [
        (1, {"text": "b"}),
        (2, {"text": "b"}),
    ]
    assert len(post(edge, "/rerank", top_n=9, **body).json["results"]) == 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["x"]}, "query"),
        ({"query": "", "documents": ["x"]}, "query"),
        ({"query": "x"}, "documents"),
        ({"query": "x", "documents": []}, "documents"),
        ({"query": "x", "documents": [""]}, "documents[0]"),
        ({"query": "x", "documents": ["y", {"title": "z"}]}, "documents[1]"),
        ({"query": "x", "documents": ["y"], "top_n": 0}, "top_n"),
    ],
)
def test_a_body_that_cannot_be_ranked_is_a_400(
    edge: ProxyApp, encoders: FakeEncoders, body: dict[str, Any], param: str
) -> None:
    reply = post(edge, "/v1/rerank", **body)
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert not encoders.asked


# ---------------------------------------------------------------- keys, figures, clients


def test_replies_are_in_the_metrics_and_among_the_requests(edge: ProxyApp) -> None:
    embed(edge, ["one two", "three"])
    embed(edge, "")
    post(edge, "/rerank", query="x", documents=["y z"])
    text = ask(edge, path="/metrics").content.decode()
    for line in (
        'hearth_requests_total{dialect="embeddings",outcome="answered"} 1.0',
        'hearth_requests_total{dialect="embeddings",outcome="refused_4xx"} 1.0',
        'hearth_requests_total{dialect="rerank",outcome="answered"} 1.0',
        'hearth_served_requests_total{outcome="answered",served_by="hearth/org/House-Embed"} 1.0',
        'hearth_encoder_texts_total{dialect="embeddings"} 2.0',
        'hearth_encoder_tokens_total{dialect="embeddings"} 3.0',
        'hearth_encoder_tokens_total{dialect="rerank"} 2.0',
        'hearth_encoder_process{state="ready"} 1.0',
        "hearth_encoder_process_starts_total 3.0",
        "hearth_encoder_process_deaths_total 2.0",
    ):
        assert line in text.splitlines(), line
    last, first = ask(edge, path="/v1/sessions").json["recent"]
    assert (first["dialect"], first["prompt"], first["ended"]) == ("embeddings", 3, "answered")
    assert (last["dialect"], last["served_by"]) == ("rerank", "hearth/org/House-Rank")
    totals = ask(edge, path="/v1/cache").json["totals"]
    assert (totals["requests"], totals["prompt_tokens"]) == (2, 0)


# ---------------------------------------------------------------- Ollama


def ollama(edge: ProxyApp, path: str = "/api/embed", **body: Any) -> Reply:
    return post(edge, path, **({"model": "house-embed:latest"} | body))


def test_one_text_or_many_have_one_vector_each(edge: ProxyApp, encoders: FakeEncoders) -> None:
    for texts in ("one two", ["one", "two three"]):
        told = ollama(edge, input=texts).json
        wanted = [texts] if isinstance(texts, str) else texts
        assert told["embeddings"] == [vector(text, 8) for text in wanted]
        assert told["prompt_eval_count"] == sum(len(text.split()) for text in wanted)
        assert told["model"] == "house-embed:latest", "as the client named it"
        assert told["total_duration"] >= 0
    assert encoders.asked[-1] == (["one", "two three"], None, True), "too long is cut, unless not"
    ollama(edge, input="x", truncate=False, dimensions=3)
    assert encoders.asked[-1] == (["x"], 3, False)


def test_the_older_route_has_one_vector(edge: ProxyApp) -> None:
    assert ollama(edge, "/api/embeddings", prompt="one").json == {"embedding": vector("one", 8)}


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
    reply = ollama(edge, path, **body)
    assert reply.status == 200
    assert told.items() <= reply.json.items()
    assert not encoders.asked


def test_a_refusal_is_in_ollamas_words(edge: ProxyApp, tmp_path: Any) -> None:
    assert ollama(edge, input=[1]).status == ollama(edge, input={"a": 1}).status == 400
    assert ollama(edge, input="x", model="llama3.2").status == 404
    reply = ollama(app_of(tmp_path), input="x")
    assert reply.status == 404
    assert "EMBEDDING_MODEL is empty" in reply.json["error"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)


@given(st.sampled_from(OLLAMA_PATHS), JSON, JSON, JSON)
def test_any_body_is_read_or_refused(path: str, given: Any, dimensions: Any, cut: Any) -> None:
    body = {"input": given, "prompt": given, "dimensions": dimensions, "truncate": cut}
    try:
        request = read_ollama(path, body)
    except RequestError as error:
        assert error.status == 400
        return
    assert all(type(text) is str and text for text in request.texts)
