"""Vectors and scores are those of mlx-vlm called directly, and no neighbour moves them."""

import importlib
import json
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any, Final
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st
from mlx_vlm.embedding_loader import load_embedding_model
from mlx_vlm.models.pooling import read_pooling_config
from mlx_vlm.reranker_loader import load_reranker
from mlx_vlm.utils import load_processor
from numpy.typing import NDArray

from hearth.shared.errors import RequestError, StartError
from hearth.worker.embeddings import encoder_models
from hearth.worker.embeddings.encoder_models import (
    CHARS_MAX,
    EmbeddingModel,
    LayerRests,
    RerankModel,
    check_dimensions,
    check_numbers,
    check_pooling,
    cut_vectors,
)
from hearth.worker.embeddings.job_queue import Job
from hearth.worker.embeddings.length_batches import ForwardPace
from hearth.worker.schedule.client_lease import ClientLease
from scripts.fixtures.embedding_checkpoints import embedding_checkpoint
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.by_day import by_day

EMBEDDERS: Final = ("bert", "xlm_roberta", "modernbert", "qwen3", "gemma3")
RANKERS: Final = ("bert_ranker", "xlm_roberta_ranker", "modernbert_ranker", "qwen3_ranker")
COSINE_MIN: Final = 1 - 1e-6
WORDS: Final = [
    *("import", "abc", "class", "self", "return", "12", "é", "语"),
    *("🙂", "def", "value", "None", "test", "of", "the"),
]
LENGTHS: Final = st.lists(st.integers(1, 60), min_size=1, max_size=12)


@cache
def embedder(name: str, dtype: str = "float32") -> tuple[EmbeddingModel, LayerRests]:
    rests = LayerRests()
    return EmbeddingModel(str(embedding_checkpoint(name, dtype)), rests), rests


@cache
def ranker(name: str) -> RerankModel:
    return RerankModel(str(embedding_checkpoint(name)), LayerRests())


@cache
def library(name: str, dtype: str = "float32") -> tuple[Any, Any]:
    """Return model and tokenizer as mlx-vlm's server loads them, in float32."""
    directory = embedding_checkpoint(name, dtype)
    model = load_embedding_model(directory)
    model.pooling_config = read_pooling_config(directory)
    model.set_dtype(mx.float32)
    return model, load_processor(directory, add_detokenizer=False)


@cache
def library_ranking() -> Any:
    """Return mlx-vlm's module, whose import reads settings of its own by names that ours have."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    with mock.patch.dict(os.environ, kept, clear=True):
        return importlib.import_module("mlx_vlm.server.reranking")


def alone(name: str, text: str, dtype: str = "float32") -> NDArray[np.float32]:
    """Return the vector of one text as mlx-vlm gives it, with nothing beside it."""
    model, tokenizer = library(name, dtype)
    told = tokenizer([text], return_tensors="np")
    ids, mask = mx.array(told["input_ids"]), mx.array(told["attention_mask"])
    return np.array(model(ids, attention_mask=mask).text_embeds)[0]


def text_of(count: int, seed: int = 0) -> str:
    return " ".join(WORDS[(seed + 7 * number) % len(WORDS)] for number in range(count))


def computed(
    model: Any, items: list[Any], rests: LayerRests, tokens: int = 128
) -> NDArray[np.float32]:
    """Return the values of items as the process computes them: by length, in batches."""
    found: list[NDArray[np.float32]] = []
    lease, cuts = ClientLease("1", b""), isinstance(model, RerankModel)
    job = Job(lease, model, items, cuts, lambda values, _: found.append(values))  # type: ignore
    while not job.is_tokenised:
        job.tokenise()
    while not job.is_computed:
        job.compute(ForwardPace(10, tokens), rests.clock)
    job.answer()
    return found[0]


@pytest.mark.parametrize("name", by_day(EMBEDDERS, ["bert", "gemma3"]))
@given(lengths=LENGTHS, tokens=st.integers(16, 512))
@hypothesis_settings(max_examples=8)
def test_vectors_of_a_mixed_batch_are_mlx_vlms_of_each_text_alone(
    name: str, lengths: list[int], tokens: int
) -> None:
    model, rests = embedder(name)
    texts = [text_of(count, seed) for seed, count in enumerate(lengths)]
    vectors = cut_vectors(computed(model, list(texts), rests, tokens), None)
    for text, vector in zip(texts, vectors, strict=True):
        assert float(vector @ alone(name, text)) >= COSINE_MIN, text


@pytest.mark.parametrize("name", by_day(RANKERS, ["bert_ranker", "qwen3_ranker"]))
def test_scores_are_mlx_vlms(name: str) -> None:
    documents = [text_of(count, count) for count in (1, 3, 12, 4, 1, 7)]
    query = "what is abc"
    pairs = [(query, document) for document in documents]
    scores = computed(ranker(name), pairs, LayerRests())[:, 0]
    model, processor = load_reranker(embedding_checkpoint(name))
    ranking = library_ranking()
    asked = ranking.RerankItem(text=query)
    for document, score in zip(documents, scores, strict=True):
        told, _ = ranking.score_documents(
            model,
            processor,
            model.config,
            asked,
            [ranking.RerankItem(text=document)],
            None,
        )
        assert abs(told[0] - float(score)) < 1e-5, (document, told, score)
    assert np.ptp(scores) > 1e-3, "equal scores would say nothing"


@pytest.mark.parametrize("name", by_day(EMBEDDERS, ["modernbert"]))
def test_a_model_of_16_bits_is_computed_in_float32_and_no_neighbour_moves_a_vector(
    name: str,
) -> None:
    model, rests = embedder(name, "bfloat16")
    texts = [text_of(count, count) for count in (30, 2, 11, 25, 1)]
    together = cut_vectors(computed(model, list(texts), rests, 512), None)
    for text, vector in zip(texts, together, strict=True):
        own = cut_vectors(computed(model, [text], rests), None)[0]
        assert float(vector @ own) >= COSINE_MIN
        assert float(vector @ alone(name, text, "bfloat16")) >= COSINE_MIN
    assert model.facts.weight_bytes < embedder(name)[0].facts.weight_bytes * 0.6


def test_rests_between_layers_change_no_vector_and_are_as_long_as_the_layers_took() -> None:
    model, rests = embedder("bert")
    plain = computed(model, [text_of(40)], rests)
    before = rests.rested_s
    rests.are_wanted = True
    try:
        assert np.array_equal(computed(model, [text_of(40)], rests), plain)
    finally:
        rests.are_wanted = False
    assert rests.rested_s > before
    rested = rests.rested_s
    computed(model, [text_of(40)], rests)
    assert rests.rested_s == rested, "nobody streams"


def test_a_rest_is_as_long_as_what_was_computed_and_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(encoder_models.time, "sleep", slept.append)
    rests = LayerRests()
    rests.rest(0.3)
    rests.are_wanted = True
    for computed_s in (0.3, 5.0, 0.0, -0.1):
        rests.rest(computed_s)
    assert slept == [0.3, encoder_models.REST_S_MAX]


@pytest.mark.parametrize("item", [[-1], [800], [2**40], [], "", text_of(400)])
def test_what_a_model_cannot_be_given_is_refused_with_its_number(item: Any) -> None:
    model, _ = embedder("qwen3")
    with pytest.raises(RequestError, match="Input 4 ") as refused:
        model.rows(["good", item] if item != "" else ["good", []], 3, False)
    assert (refused.value.status, refused.value.param) == (400, "input")


def test_a_text_that_is_too_long_is_told_its_length_or_cut_where_that_is_asked() -> None:
    model, _ = embedder("xlm_roberta")
    assert model.facts.tokens_max == 254, "256 positions, of which two are never used"
    with pytest.raises(RequestError, match=r"and the model takes 254\. .*remove at least [1-9]"):
        model.rows([text_of(400)], 0, False)
    row = model.rows([text_of(400)], 0, True)[0]
    assert len(row.ids) == 254 and row.ids[-1] == 2, "its end token stays"
    assert len(model.rows([[5] * 400], 0, True)[0].ids) == 254


def test_a_long_document_is_cut_behind_the_query_and_before_the_answer() -> None:
    model = ranker("qwen3_ranker")
    row, short = model.rows([("what", text_of(400)), ("what", "x")], 0)
    assert len(row.ids) == model.facts.tokens_max and list(row.ids[-8:]) == list(short.ids[-8:])


def test_a_text_of_megabytes_is_refused_or_cut_before_it_is_tokenised() -> None:
    model, _ = embedder("bert")
    text = "word " * (CHARS_MAX // 5 + 1)
    with pytest.raises(RequestError, match=r"Input 1 is 524,290 characters and .* 524,288") as told:
        model.rows(["good", text], 0, False)
    assert (told.value.status, told.value.param) == (400, "input")
    cut = [list(model.rows([given], 0, True)[0].ids) for given in (text, text[:9_000])]
    assert cut[0] == cut[1]
    judge = ranker("bert_ranker")
    cut = [list(judge.rows([("what", given)], 0)[0].ids) for given in (text, text[:9_000])]
    assert cut[0] == cut[1]


@pytest.mark.parametrize("name", ["bert_ranker", "qwen3_ranker"])
def test_a_query_that_leaves_no_document_room_is_refused_before_it_stands_by_each(
    name: str,
) -> None:
    for query, why in (
        ("abc " * 300, "The query is [0-9,]+ tokens and the model takes 256 with a document"),
        ("x" * (CHARS_MAX + 1), "The query is 524,289 characters"),
    ):
        with pytest.raises(RequestError, match=why) as told:
            ranker(name).check_query(query)
        assert (told.value.status, told.value.param) == (400, "query")
    assert ranker(name).chars(("abc", "12")) == 5


@given(st.integers(1, 32), st.integers(0, 2**32 - 1))
def test_cut_vectors_have_length_1_and_the_first_values_in_proportion(
    dimensions: int, seed: int
) -> None:
    values = np.random.default_rng(seed).normal(size=(3, 32)).astype(np.float32)
    cut = cut_vectors(values, dimensions)
    assert cut.shape == (3, dimensions) and cut.dtype == np.dtype("<f4")
    assert np.allclose(np.linalg.norm(cut, axis=1), 1, atol=1e-6)
    scale = np.linalg.norm(values[:, :dimensions], axis=1, keepdims=True)
    assert np.allclose(cut * scale, values[:, :dimensions], atol=1e-5)


@pytest.mark.parametrize("dimensions", [0, -1, 33])
def test_dimensions_that_a_model_has_not_are_refused(dimensions: int) -> None:
    with pytest.raises(RequestError, match="from 1 to 32") as refused:
        check_dimensions(dimensions, 32)
    assert refused.value.param == "dimensions"


def test_what_is_no_number_is_never_answered() -> None:
    with pytest.raises(RequestError, match="no number") as refused:
        cut_vectors(np.array([[np.nan, 1]], np.float32), None)
    assert refused.value.status == 500
    with pytest.raises(RequestError, match="no number"):
        check_numbers(np.array([[0.5], [np.nan]], np.float32))


# ---------------------------------------------------------------- checkpoints


def write_json(path: Path, more: Any) -> None:
    """Write a file, or add to the object that it holds."""
    told = json.loads(path.read_text()) if path.exists() and isinstance(more, dict) else None
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(more if told is None else told | more))


def changed(tmp_path: Path, name: str, files: dict[str, Any]) -> str:
    directory = tmp_path / "model"
    shutil.copytree(embedding_checkpoint(name), directory)
    for file, content in files.items():
        if isinstance(content, str):
            (directory / file).write_text(content)
        else:
            write_json(directory / file, content)
    return str(directory)


def module(kind: str, path: str = "") -> dict[str, str]:
    return {"type": kind, "path": path}


ST: Final = "sentence_transformers.models."


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"run.py": "print()"}, "code of its own"),
        ({"config.json": {"auto_map": {"AutoModel": "x.Y"}}}, "code of its own"),
        ({"config.json": {"hidden_act": "relu"}}, "hidden_act"),
        ({"config.json": {"model_type": "nomic_bert"}}, "nomic_bert not supported"),
        ({"modules.json": [module(ST + "Transformer"), module(ST + "Dense", "2_Dense")]}, "Dense"),
        ({"modules.json": [module("custom_st.Transformer")]}, "custom_st"),
        ({"1_Pooling/config.json": {"pooling_mode": "weightedmean"}}, "weightedmean"),
        ({"1_Pooling/config.json": {"include_prompt": False}}, "INSTRUCTOR"),
        ({"1_Pooling/config.json": "{"}, "its pooling, 1_Pooling/config.json"),
        ({"modules.json": [module(ST + "Pooling", "gone")]}, "its pooling, gone/config.json"),
        ({"modules.json": "{"}, "modules.json cannot be read"),
        ({"modules.json": ["Dense"]}, "no list of objects"),
        ({"config.json": {"pad_token_id": 10**9}}, "pad_token_id 1,000,000,000 is none of 800"),
        ({"model.safetensors": "torn"}, "cannot be loaded"),
    ],
)
def test_a_checkpoint_that_would_be_computed_wrongly_is_refused(
    tmp_path: Path, files: dict[str, Any], why: str
) -> None:
    with pytest.raises(StartError, match=why) as refused:
        EmbeddingModel(changed(tmp_path, "bert", files), LayerRests())
    assert str(refused.value).startswith("EMBEDDING_MODEL is ")


@pytest.mark.parametrize(
    ("name", "files", "why"),
    [
        ("bert_ranker", {"config.json": {"hidden_act": "relu"}}, "hidden_act"),
        ("qwen3_ranker", {"tokenizer_config.json": {"chat_template": None}}, "chat_template"),
        ("qwen3_ranker", {"tokenizer_config.json": {"chat_template": "{{ 1 / 0 }}"}}, "zero"),
    ],
)
def test_a_judge_that_no_request_could_be_asked_of_is_refused_at_its_start(
    tmp_path: Path, name: str, files: dict[str, Any], why: str
) -> None:
    with pytest.raises(StartError, match=why) as refused:
        RerankModel(changed(tmp_path, name, files), LayerRests())
    assert str(refused.value).startswith("RERANK_MODEL is ")


def test_texts_are_lowered_where_the_checkpoint_says_so(tmp_path: Path) -> None:
    files = {"sentence_bert_config.json": {"do_lower_case": True}}
    lowering = EmbeddingModel(changed(tmp_path, "xlm_roberta", files), LayerRests())
    plain, _ = embedder("xlm_roberta")
    lower = plain.rows(["import abc"], 0, False)
    assert lowering.rows(["IMPORT Abc"], 0, False) == lower
    assert plain.rows(["IMPORT Abc"], 0, False) != lower


def test_a_checkpoint_with_code_is_loaded_where_the_user_allowed_its_code(tmp_path: Path) -> None:
    source = changed(tmp_path, "bert", {"run.py": "raise SystemExit"})
    assert EmbeddingModel(source, LayerRests(), runs_code=True).facts.dimensions == 32


def test_a_chat_model_is_no_embedding_model_and_an_embedding_model_ranks_nothing() -> None:
    with pytest.raises(StartError, match=r"RERANK_MODEL is .* cannot be loaded"):
        RerankModel(str(embedding_checkpoint("bert")), LayerRests())
    with pytest.raises(StartError, match="EMBEDDING_MODEL is "):
        EmbeddingModel(str(fixture_dir("llama")), LayerRests())


def test_embedding_gemmas_sliding_layers_look_as_far_as_their_window(tmp_path: Path) -> None:
    source = changed(tmp_path, "gemma3", {"config.json": {"sliding_window": 16}})
    model, (plain, rests) = EmbeddingModel(source, LayerRests()), embedder("gemma3")
    ids = [[3 + number % 700 for number in range(count)] for count in (9, 10, 60)]
    together, unbound = computed(model, list(ids), rests, 512), computed(plain, list(ids), rests)
    near = (together * unbound).sum(axis=1)
    assert near[0] >= COSINE_MIN > near[1], "9 tokens are within the window of 16 // 2 + 1"
    for row, vector in zip(ids, together, strict=True):
        assert float(vector @ windowed(source, row)) >= COSINE_MIN, "and none hears its padding"


def windowed(source: str, ids: list[int]) -> NDArray[np.float32]:
    """Return the vector of tokens, each layer given its own mask, with mlx-vlm's parts."""
    model: Any = load_embedding_model(Path(source))
    inner, at = model.model, mx.arange(len(ids))
    far = mx.where(mx.abs(at[:, None] - at[None, :]) > 8, -mx.inf, 0.0)[None, None]
    hidden = inner.embed_tokens(mx.array([ids])) * inner.config.hidden_size**0.5
    for number, layer in enumerate(inner.layers):
        hidden = layer(hidden, far if number % 2 == 0 else mx.zeros_like(far), None)
    pooled = inner.norm(hidden).mean(axis=1)
    for dense in model.dense:
        pooled = dense(pooled)
    return np.array(pooled / mx.linalg.norm(pooled))[0]


@pytest.mark.parametrize("kind", ["llama_bidirec", "embedding_gemma2"])
def test_a_pooling_that_mlx_vlm_would_not_heed_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="its pooling is cls"):
        check_pooling({"pooling_mode": "cls"}, kind)
    check_pooling({"pooling_mode": "cls"}, "bert")
    check_pooling(None, kind)


def test_pooling_limit_and_prompt_are_those_that_the_checkpoint_names(tmp_path: Path) -> None:
    files = {
        "modules.json": [module(ST + "Transformer"), module(ST + "Pooling", "pool")],
        "pool/config.json": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
        "sentence_bert_config.json": {"max_seq_length": 20},
        "config_sentence_transformers.json": {
            "prompts": {"query": "test of ", "document": ""},
            "default_prompt_name": "query",
        },
    }
    model = EmbeddingModel(changed(tmp_path, "bert", files), LayerRests())
    assert (model.facts.pooling, model.facts.tokens_max) == ("cls", 20)
    plain, _ = embedder("bert")
    assert list(model.rows(["abc"], 0, False)[0].ids) == list(
        plain.rows(["test of abc"], 0, False)[0].ids
    )
    first = np.array(library("bert")[0](mx.array([[2, 9, 3]])).last_hidden_state)[0, 0]
    vector = computed(model, [[2, 9, 3]], LayerRests())[0]
    assert float(vector @ (first / np.linalg.norm(first))) >= COSINE_MIN
