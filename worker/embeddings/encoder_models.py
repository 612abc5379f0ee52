"""Turns texts into vectors and scores documents for a query, with models that mlx-vlm loads.

A checkpoint describes itself in files of sentence-transformers: modules.json,
1_Pooling/config.json, prompts. A model is refused if mlx-vlm would leave out something that the
model needs: wrong vectors look like right ones.

There are two kinds of rerankers. A classifier takes a query and a document as a pair.
Qwen3-Reranker is asked whether the document answers the query, and the score is the probability of
"yes" against "no". Source of its prompt: mlx_vlm.server.reranking, and Qwen's model card.
Owner: the inference thread of the embedding worker.
"""

import json
import logging
import math
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from huggingface_hub import snapshot_download
from mlx.utils import tree_flatten, tree_unflatten
from mlx_vlm.embedding_loader import load_embedding_model
from mlx_vlm.reranker import RerankerKind, reranker_kind
from mlx_vlm.reranker_loader import load_reranker
from numpy.typing import NDArray
from transformers import AutoTokenizer

from hearth.shared.errors import RequestError, StartError
from hearth.shared.models.model_path import named_model
from hearth.shared.wire_messages import EncoderFacts
from hearth.worker.embeddings.length_batches import TEXT_TOKENS_MAX
from hearth.worker.engine.model_loader import present
from hearth.worker.engine.vision.vlm_loader import only_known_code, read_json
from hearth.worker.prompt import bounded_templates  # noqa: F401  before any template is compiled

log = logging.getLogger(__name__)

# Characters of one text. A text is tokenised as a whole: a longer one would take gigabytes, and
# stop all other requests for minutes. The limit is 64 characters for each of TEXT_TOKENS_MAX.
CHARS_MAX: Final = 1 << 19
REST_S_MAX: Final = 1.0
DENSE_FILES: Final = "*_Dense/*.safetensors"  # not among the files of a language model
_KNOWN_MODULES: Final = ("Transformer", "Pooling", "Normalize", "Dense")
_KNOWN_PACKAGE: Final = "sentence_transformers."
_HAS_DENSE: Final = ("gemma3_text",)  # kinds whose Dense layers mlx-vlm computes
_GELU_ALONE: Final = ("bert", "xlm-roberta")  # kinds that mlx-vlm always computes with gelu
# Kinds that mlx-vlm always pools by mean.
_MEAN_ALONE: Final = ("llama_bidirec", "llama_nemotron_vl_embedding", "embedding_gemma2")
_POOLING_FLAGS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
SLIDING_KIND: Final = "gemma3_text"
INSTRUCTION: Final = "Given a search query, retrieve relevant candidates that answer the query."
SYSTEM_PROMPT: Final = (
    "Judge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".'
)
ANSWER_BEGIN: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class TokenRow:
    """The tokens of one text, or of a query and a document."""

    ids: Sequence[int]
    types: Sequence[int] | None = None  # 0 or 1, for the first or second text; None = one text

    def packed(self) -> "TokenRow":
        """Return a copy with four bytes per token; a list takes about forty."""
        types = None if self.types is None else array("i", self.types)
        return TokenRow(array("i", self.ids), types)


class LayerRests:
    """Sleeps between layers while answers stream, for as long as each layer took.

    A long text's forward occupies the GPU during all its layers, and each decoded token of a chat
    would wait for that. Between two layers the chat gets as much time as the layer took.
    Owner: the inference thread.
    """

    def __init__(self) -> None:
        self.are_wanted = False
        self.rested_s = 0.0  # all rests since the start

    def clock(self) -> float:
        """Return a time in seconds that stops during rests."""
        return time.perf_counter() - self.rested_s

    def rest(self, computed_s: float) -> None:
        if self.are_wanted and computed_s > 0:
            began = time.perf_counter()
            time.sleep(min(computed_s, REST_S_MAX))
            self.rested_s += time.perf_counter() - began


class _WrappedLayer:
    """Wraps a layer to change how it is called."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)  # models read attributes of their layers


class _PacedLayer(_WrappedLayer):
    """Evaluates a layer's result at once and rests afterwards, if rests are wanted."""

    def __init__(self, layer: Any, rests: LayerRests) -> None:
        super().__init__(layer)
        self._rests = rests

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        outputs = self._layer(*inputs, **options)
        if self._rests.are_wanted:
            began = time.perf_counter()
            mx.eval(outputs)
            self._rests.rest(time.perf_counter() - began)
        return outputs


class _WindowedLayer(_WrappedLayer):
    """A layer in which a token attends only to tokens less than a window away, in both directions.

    Mlx-vlm leaves out EmbeddingGemma's window of 257 tokens. A longer text would get another vector
    than the model was trained to give.
    Source: transformers' Gemma3TextConfig and _bidirectional_window_overlay.
    """

    def __init__(self, layer: Any, window: int) -> None:
        super().__init__(layer)
        self._window = window

    def __call__(self, hidden: mx.array, mask: mx.array, cache: Any = None) -> Any:
        length = mask.shape[-1]
        if length > self._window:
            at = mx.arange(length)
            is_far = mx.abs(at[:, None] - at[None, :]) >= self._window
            # A finite number: padding among padding alone would become NaN, and NaN spreads.
            mask = mx.where(is_far, mx.array(mx.finfo(mask.dtype).min, mask.dtype), mask)
        return self._layer(hidden, mask, cache)


class EncoderModel:
    """The common part of embedding models and rerankers: loading, limits and padding."""

    setting: str  # name of the setting that names the model
    facts: EncoderFacts
    _pad_id: int
    _vocabulary: int

    def __init__(self, source: str, rests: LayerRests, runs_code: bool = False) -> None:
        """Load the model `source`, a directory or a hub id, with `rests` between its layers.

        Raises:
            StartError: the model cannot be loaded, or has code that `runs_code` does not allow.
        """
        named = named_model(source, self.setting)
        try:
            directory = present(str(named), runs_code, self.setting)
            if not isinstance(named, Path):
                snapshot_download(str(named), allow_patterns=[DENSE_FILES])
            layers = self._load(directory, read_json(directory / "config.json"), runs_code)
            layers[:] = [_PacedLayer(layer, rests) for layer in layers]
        except StartError:
            raise
        except Exception as error:  # any error of a hub, files, an architecture or the device
            reason = " ".join(str(error).split()) or type(error).__name__
            text = f"{self.setting} is {source!r}, which cannot be loaded: {reason}"
            raise StartError(text) from error

    def _load(self, directory: Path, config: dict[str, Any], runs_code: bool) -> list[Any]:
        """Load and try a model of this kind; return its list of layers, which may be changed."""
        raise NotImplementedError

    def _check_row(self, row: TokenRow, name: str, param: str) -> None:
        """Raise RequestError if the model cannot take this row, called `name` in the error.

        MLX checks no index: a token beyond the vocabulary would crash the process.
        """
        count, limit = len(row.ids), self.facts.tokens_max
        if not count:
            text = f"{name} is empty: there is nothing to embed. Leave it out."
            raise RequestError(text, param=param)
        if count > limit:
            raise RequestError(
                f"{name} is {count:,} tokens and the model takes {limit:,}. Split it, or "
                f"remove at least {count - limit:,} tokens.",
                code="context_length_exceeded",
                param=param,
            )
        if min(row.ids) < 0 or max(row.ids) >= self._vocabulary:
            raise RequestError(
                f"{name} has a token id that is not one of this model's, from 0 to "
                f"{self._vocabulary - 1:,}. Send texts, or the ids of this model's own tokenizer.",
                param=param,
            )

    def _padded(self, rows: Sequence[TokenRow]) -> tuple[mx.array, mx.array, mx.array | None]:
        """Return the ids, a mask (1 = token, 0 = padding), and the types, if all rows have types.

        All arrays are (rows, tokens). Shorter rows are padded at the end.
        """
        length = max(len(row.ids) for row in rows)
        ids = [[*row.ids, *[self._pad_id] * (length - len(row.ids))] for row in rows]
        mask = [[1] * len(row.ids) + [0] * (length - len(row.ids)) for row in rows]
        types = None
        if all(row.types is not None for row in rows):
            types = mx.array([[*(row.types or ()), *[0] * (length - len(row.ids))] for row in rows])
        return mx.array(ids), mx.array(mask), types


class EmbeddingModel(EncoderModel):
    """The model of EMBEDDING_MODEL, which gives a vector for each text."""

    setting = "EMBEDDING_MODEL"

    def _load(self, directory: Path, config: dict[str, Any], runs_code: bool) -> list[Any]:
        check_modules(directory, config)
        self._model: Any = load_embedding_model(directory)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=runs_code
        )
        self._model.pooling_config = pooling = pooling_of(directory)
        check_pooling(pooling, config.get("model_type"))
        compute_in_float32(self._model)
        if config.get("model_type") == SLIDING_KIND:
            window = int(self._model.config.sliding_window) // 2 + 1
            for at, layer in enumerate(self._model.layers):
                if layer.self_attn.is_sliding:
                    self._model.layers[at] = _WindowedLayer(layer, window)
        self._prompt = default_prompt(directory)
        self._pad_id = padding_id(config, self._tokenizer)
        self._vocabulary = int(config["vocab_size"])
        text_config = read_json(directory / "sentence_bert_config.json")
        self._lowers_case = text_config.get("do_lower_case") is True
        self.facts = EncoderFacts(
            architecture=str(config.get("model_type", "unknown")),
            tokens_max=tokens_max(directory, config, self._tokenizer),
            weight_bytes=weights_nbytes(self._model),
            dimensions=self._try(),
            pooling=pooling_name(pooling),
        )
        self.rows(["text"], 0, truncate=True)
        if pooling is None:
            log.warning("the checkpoint does not tell its pooling (1_Pooling); mlx-vlm's is taken")
        return cast(list[Any], self._model.layers)

    def _try(self) -> int:
        """Return the dimensions of a vector. Raises ValueError if a text gives no vector."""
        vector = getattr(self._model(mx.array([[0]])), "text_embeds", None)
        if vector is None or vector.ndim != 2:
            raise ValueError("it is no model that gives one vector for a text")
        if vector.dtype != mx.float32:
            raise ValueError(f"it computes in {vector.dtype}, and vectors are float32")
        return int(vector.shape[1])

    def chars(self, item: str | list[int]) -> int:
        """Return the length of an item: characters of a text, or token ids."""
        return len(item)

    def rows(self, items: Sequence[str | list[int]], first: int, truncate: bool) -> list[TokenRow]:
        """Return the token rows of items. `first` is the first item's number in the request.

        Raises RequestError if the model cannot take one of them.
        """
        texts = [
            self._prompt + checked_text(item, f"Input {index}", "input", truncate)
            for index, item in enumerate(items, first)
            if isinstance(item, str)
        ]
        if self._lowers_case:
            texts = [text.lower() for text in texts]
        limits = {"truncation": True, "max_length": self.facts.tokens_max} if truncate else {}
        text_ids = iter(self._tokenizer(texts, **limits)["input_ids"] if texts else ())
        cut = self.facts.tokens_max if truncate else None
        rows = [TokenRow(next(text_ids) if isinstance(item, str) else item[:cut]) for item in items]
        for index, row in enumerate(rows, first):
            self._check_row(row, f"Input {index}", "input")
        return rows

    def values(self, rows: Sequence[TokenRow]) -> NDArray[np.float32]:
        """Return the vector of each row, (rows, dimensions)."""
        ids, mask, _ = self._padded(rows)
        return np.array(self._model(ids, attention_mask=mask).text_embeds)


class RerankModel(EncoderModel):
    """The model of RERANK_MODEL, which gives a score from 0 to 1 for each document."""

    setting = "RERANK_MODEL"

    def _load(self, directory: Path, config: dict[str, Any], runs_code: bool) -> list[Any]:
        kind = reranker_kind(config)
        if kind == RerankerKind.GENERATIVE_VL:
            raise ValueError("it ranks images too, and only texts are ranked here")
        check_activation(config)
        self._is_classifier = kind == RerankerKind.SEQUENCE_CLASSIFIER
        with only_known_code(runs_code):
            self._model: Any = load_reranker(directory, trust_remote_code=runs_code)[0]
        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=runs_code
        )
        if not self._is_classifier:
            language = self._model.language_model
            table = getattr(language, "lm_head", None) or language.model.embed_tokens
            words = {word: self._tokens(word) for word in ("yes", "no")}
            for word, tokens in words.items():
                if len(tokens) != 1:
                    raise ValueError(f"its tokenizer has no token {word!r}")
            self._yes, self._no = _rows_of(table, [*words["yes"], *words["no"]])
            self._answer_begin = self._tokens(ANSWER_BEGIN)
        compute_in_float32(self._model)
        self._pad_id = padding_id(config, self._tokenizer)
        self._vocabulary = int(config["vocab_size"])
        self.values([TokenRow([0])])
        self.facts = EncoderFacts(
            architecture=str(config.get("model_type", "unknown")),
            tokens_max=tokens_max(directory, config, self._tokenizer),
            weight_bytes=weights_nbytes(self._model),
        )
        self.rows([("query", "document")], 0)  # tries the template
        model = self._model if self._is_classifier else self._model.language_model.model
        return cast(list[Any], model.layers)

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def check_query(self, query: str) -> None:
        """Raise RequestError if a query leaves no room for a document. Queries are never cut."""
        count = len(self._tokens(checked_text(query, "The query", "query", truncate=False)))
        if count >= self.facts.tokens_max:
            raise RequestError(
                f"The query is {count:,} tokens and the model takes {self.facts.tokens_max:,} with "
                "a document. Shorten it.",
                code="context_length_exceeded",
                param="query",
            )

    def chars(self, item: tuple[str, str]) -> int:
        return len(item[0]) + len(item[1])  # the query is tokenised with each document

    def rows(
        self, items: Sequence[tuple[str, str]], first: int, truncate: bool = True
    ) -> list[TokenRow]:
        """Return the token rows of one query with each document. Long documents are cut.

        An item is the query and a document. `first` is the first item's number in the request.
        Raises RequestError if the model cannot take one of them.
        """
        assert truncate, "documents are always cut, never refused"
        query = items[0][0]
        documents = [checked_text(document, "", "", truncate) for _, document in items]
        if self._is_classifier:
            rows = self._classifier_rows(query, documents)
        else:
            rows = [self._chat_row(query, document) for document in documents]
        for index, row in enumerate(rows, first):
            self._check_row(row, f"Document {index} with the query", "documents")
        return rows

    def _classifier_rows(self, query: str, documents: list[str]) -> list[TokenRow]:
        queries, limit = [query] * len(documents), self.facts.tokens_max
        encoded = self._tokenizer(queries, documents, truncation=True, max_length=limit)
        types = encoded.get("token_type_ids") or [None] * len(documents)
        return [TokenRow(*row) for row in zip(encoded["input_ids"], types, strict=True)]

    def _chat_row(self, query: str, document: str) -> TokenRow:
        question = f"<Instruct>: {INSTRUCTION}\n\n<Query>: {query}\n\n<Document>: {document}"
        ids = self._tokenizer.apply_chat_template(
            [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": question},
            ],
            add_generation_prompt=False,
            enable_thinking=False,
            return_dict=False,
        )
        kept = ids[: self.facts.tokens_max - len(self._answer_begin)]
        return TokenRow([*kept, *self._answer_begin])

    def values(self, rows: Sequence[TokenRow]) -> NDArray[np.float32]:
        """Return the score of each row, (rows, 1)."""
        ids, mask, types = self._padded(rows)
        if self._is_classifier:
            type_ids = {} if types is None else {"token_type_ids": types}
            logits = self._model(ids, attention_mask=mask, **type_ids).logits[:, 0]
        else:
            # The log odds of "yes" against "no" after the last token of each row. Padding does not
            # matter: it comes later, and attention is causal. Only two logits are computed, as the
            # logits of the whole vocabulary in float32 can take gigabytes.
            inner = self._model.language_model.model
            hidden = inner.embed_tokens(ids)
            for layer in inner.layers:
                hidden = layer(hidden, "causal", None)
            last = inner.norm(hidden)[mx.arange(ids.shape[0]), mask.sum(axis=1) - 1]
            logits = last @ (self._yes - self._no)
        return np.array(mx.sigmoid(logits).astype(mx.float32))[:, None]


def checked_text(text: str, name: str, param: str, truncate: bool) -> str:
    """Return a text of at most CHARS_MAX characters, cut if `truncate`.

    Raises RequestError if a longer text may not be cut.
    """
    if len(text) > CHARS_MAX and not truncate:
        raise RequestError(
            f"{name} is {len(text):,} characters and this server takes {CHARS_MAX:,}. Split it.",
            code="context_length_exceeded",
            param=param,
        )
    return text[:CHARS_MAX]


def check_numbers(values: NDArray[np.float32]) -> None:
    """Raise RequestError if the model computed NaN or infinity."""
    if not np.isfinite(values).all():
        raise RequestError("The model computed no number.", status=500, code="not_a_number")


def check_dimensions(dimensions: int | None, dimensions_max: int) -> None:
    """Raise RequestError if the model's vectors do not have so many dimensions."""
    if dimensions is not None and not 1 <= dimensions <= dimensions_max:
        raise RequestError(
            f"dimensions is {dimensions:,} and the model's vectors have {dimensions_max:,}. "
            f"Ask for a number from 1 to {dimensions_max:,}, or leave it out.",
            param="dimensions",
        )


def cut_vectors(vectors: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """Return the first `dimensions` of vectors, scaled to length 1; None = all dimensions.

    Raises RequestError if the model computed NaN or infinity.
    """
    vectors = vectors[:, :dimensions]
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    check_numbers(lengths)
    return (vectors / np.maximum(lengths, 1e-12)).astype("<f4")


def _rows_of(table: Any, rows: list[int]) -> mx.array:
    """Return some rows of a layer's matrix, quantised or not, in float32."""
    indices = mx.array(rows)
    weights = table.weight[indices]
    if hasattr(table, "scales"):
        biases = table.biases[indices] if "biases" in table else None
        format_ = (table.group_size, table.bits, table.mode)
        weights = mx.dequantize(weights, table.scales[indices], biases, *format_)
    return weights.astype(mx.float32)


def check_activation(config: dict[str, Any]) -> None:
    """Raise ValueError if mlx-vlm would compute another activation than the checkpoint names."""
    activation = config.get("hidden_act", "gelu")
    if activation != "gelu" and config.get("model_type") in _GELU_ALONE:
        raise ValueError(f"its hidden_act is {activation!r}, which is computed as gelu here")


def check_modules(directory: Path, config: dict[str, Any]) -> None:
    """Raise ValueError if mlx-vlm would leave out a part of the model."""
    check_activation(config)
    for module in _modules(directory):
        kind = str(module.get("type", ""))
        name = kind.rpartition(".")[2]
        if not kind.startswith(_KNOWN_PACKAGE) or name not in _KNOWN_MODULES:
            raise ValueError(f"modules.json names a module that is not known here: {kind}")
        if name != "Dense":
            continue
        dense = read_json(directory / str(module.get("path", "")) / "config.json")
        activation = str(dense.get("activation_function", "Identity")).rpartition(".")[2]
        if config.get("model_type") not in _HAS_DENSE or activation != "Identity":
            raise ValueError(
                f"modules.json names a Dense layer ({activation}), which is not computed for "
                f"{config.get('model_type')} models"
            )


def _modules(directory: Path) -> list[dict[str, Any]]:
    """Return the entries of modules.json; none without such a file.

    Raises ValueError if it is not a list of objects.
    """
    try:
        modules = json.loads((directory / "modules.json").read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ValueError(f"modules.json cannot be read: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ValueError("modules.json is no list of objects")
    return modules


def pooling_of(directory: Path) -> dict[str, Any] | None:
    """Return the configuration of the Pooling module; None if the checkpoint has none.

    Raises ValueError if the configuration is missing or empty.
    """
    paths = [
        str(module.get("path", "1_Pooling"))
        for module in _modules(directory)
        if str(module.get("type", "")).endswith("Pooling")
    ]
    path = directory / (paths or ["1_Pooling"])[0]
    pooling = read_json(path / "config.json")
    if not pooling and (paths or path.exists()):
        raise ValueError(f"its pooling, {path.name}/config.json, cannot be read")
    return pooling or None


def pooling_name(pooling: dict[str, Any] | None) -> str:
    """Return the pooling that a configuration names; "default" without a configuration."""
    if pooling is None:
        return "default"
    if isinstance(mode := pooling.get("pooling_mode"), str):
        return mode
    return "+".join(name for flag, name in _POOLING_FLAGS.items() if pooling.get(flag)) or "mean"


def check_pooling(pooling: dict[str, Any] | None, model_type: Any) -> None:
    """Raise ValueError if mlx-vlm would pool in another way than the checkpoint says."""
    name = pooling_name(pooling)
    if model_type in _MEAN_ALONE and name not in ("default", "mean"):
        raise ValueError(f"its pooling is {name}, and {model_type} models are pooled by mean here")


def default_prompt(directory: Path) -> str:
    """Return the text that the checkpoint puts before each input; "" mostly."""
    config = read_json(directory / "config_sentence_transformers.json")
    prompts = config.get("prompts") or {}
    prompt = prompts.get(config.get("default_prompt_name")) if isinstance(prompts, dict) else None
    return prompt if isinstance(prompt, str) else ""


def padding_id(config: dict[str, Any], tokenizer: Any) -> int:
    """Return the token that fills a batch's shorter rows.

    Raises ValueError if the vocabulary has no such token. MLX would read beyond the table.
    """
    pad_id = int(config.get("pad_token_id") or tokenizer.pad_token_id or 0)
    if not 0 <= pad_id < int(config["vocab_size"]):
        raise ValueError(f"its pad_token_id {pad_id:,} is none of {config['vocab_size']:,} tokens")
    return pad_id


def tokens_max(directory: Path, config: dict[str, Any], tokenizer: Any) -> int:
    """Return how many tokens a text may have: the least of the checkpoint's own limits."""
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and str(config.get("model_type")).startswith("xlm"):
        positions -= int(config.get("pad_token_id", 1)) + 1  # the first positions are never used
    limits = (
        positions,
        getattr(tokenizer, "model_max_length", None),
        read_json(directory / "sentence_bert_config.json").get("max_seq_length"),
    )
    numbers = (n for n in limits if isinstance(n, int | float) and not isinstance(n, bool))
    return min([TEXT_TOKENS_MAX, *(int(n) for n in numbers if 0 < n < math.inf)])


def compute_in_float32(model: Any) -> None:
    """Make `model` compute in float32, without casting its matrices.

    In 16 bits the shape of a batch would change a text's vector by more than 1e-6. Only norms,
    biases and looked-up embeddings are cast, which are small: MLX computes in the widest dtype of
    its inputs.
    """
    lookups = [
        (name, _Float32Lookup(module))
        for name, module in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
    ]
    model.update_modules(tree_unflatten(lookups))
    small = [
        (name, weight.astype(mx.float32))
        for name, weight in tree_flatten(model.parameters())
        if weight.ndim <= 1 and mx.issubdtype(weight.dtype, mx.floating)
    ]
    model.update(tree_unflatten(small))
    mx.eval(model.parameters())


class _Float32Lookup(nn.Module):
    """A table of embeddings that returns float32."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table

    def __call__(self, ids: mx.array) -> mx.array:
        return self.table(ids).astype(mx.float32)

    def as_linear(self, hidden: mx.array) -> mx.array:
        return self.table.as_linear(hidden)


def weights_nbytes(model: Any) -> int:
    return sum(weight.nbytes for _, weight in tree_flatten(model.parameters()))
