"""Turns texts into vectors and scores documents by a query, with models as mlx-vlm loads them.

A model that ranks is a classifier, which is given a query and a document as a pair, or
Qwen3-Reranker, which is asked whether the document answers the query, and its "yes" weighed against
its "no". Source of that one's prompt: mlx_vlm.server.reranking, and Qwen's model card.
Owner: the inference thread of the worker that embeds.
"""

import logging
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_vlm.embedding_loader import load_embedding_model
from mlx_vlm.reranker import RerankerKind, reranker_kind
from mlx_vlm.reranker_loader import load_reranker
from numpy.typing import NDArray
from transformers import AutoTokenizer

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import EncoderFacts
from hearth.worker.embeddings.checkpoint import (
    cannot_load,
    check_activation,
    check_modules,
    check_pooling,
    checkpoint_directory,
    compute_in_float32,
    default_prompt,
    padding_id,
    pooling_name,
    pooling_of,
    tokens_max,
    weights_nbytes,
)
from hearth.worker.engine.vision.vlm_loader import only_known_code, read_json
from hearth.worker.prompt import bounded_templates  # noqa: F401  before any template is compiled

log = logging.getLogger(__name__)

# Of one text: tokenised whole, a longer one takes gigabytes and holds up all others for minutes.
# At the most tokens that a model is given these are 64 characters a token.
CHARS_MAX: Final = 1 << 19
REST_S_MAX: Final = 1.0
EMBEDDING_SETTING: Final = "EMBEDDING_MODEL"
RERANK_SETTING: Final = "RERANK_MODEL"
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
    types: Sequence[int] | None = None  # which of the two each token is of; None = one text

    def packed(self) -> "TokenRow":
        """Return the same in four bytes a token, where a list takes some forty."""
        types = None if self.types is None else array("i", self.types)
        return TokenRow(array("i", self.ids), types)


class LayerRests:
    """Rests as long as was computed, where that is wanted: while answers stream.

    A long text's forward holds the GPU for as long as all its layers take, and each token that a
    chat decodes would wait for that. Between two layers the chat gets as much time as the layer
    took. Owner: the main thread.
    """

    def __init__(self) -> None:
        self.are_wanted = False
        self.rested_s = 0.0  # since the start

    def clock(self) -> float:
        """Return a time in seconds that stands still while it rests."""
        return time.perf_counter() - self.rested_s

    def pace(self, layers: list[Any]) -> None:
        """Have each layer of a model's list of layers followed by a rest, where it is wanted."""
        layers[:] = [_PacedLayer(layer, self) for layer in layers]

    def rest(self, computed_s: float) -> None:
        if self.are_wanted and computed_s > 0:
            began = time.perf_counter()
            time.sleep(min(computed_s, REST_S_MAX))
            self.rested_s += time.perf_counter() - began


class _HeldLayer:
    """A layer that is called otherwise than its model has it called."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)  # models ask their layers what kind they are


class _PacedLayer(_HeldLayer):
    """One layer, whose result is computed at once, with a rest behind it, where that is wanted."""

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


class _WindowedLayer(_HeldLayer):
    """A layer in which a token attends to those that are less than a window away, both ways.

    Mlx-vlm leaves that out of EmbeddingGemma: a text longer than the window, 257 tokens, would get
    another vector than the model was trained to give. Source: transformers' Gemma3TextConfig and
    _bidirectional_window_overlay.
    """

    def __init__(self, layer: Any, window: int) -> None:
        super().__init__(layer)
        self._window = window

    def __call__(self, hidden: mx.array, mask: mx.array, cache: Any = None) -> Any:
        length = mask.shape[-1]
        if length > self._window:
            at = mx.arange(length)
            is_far = mx.abs(at[:, None] - at[None, :]) >= self._window
            # Finite, since padding with nothing near would be no number, and spread.
            mask = mx.where(is_far, mx.array(mx.finfo(mask.dtype).min, mask.dtype), mask)
        return self._layer(hidden, mask, cache)


class EncoderModel:
    """What a model that embeds and one that ranks have alike: rows of tokens, within limits."""

    facts: EncoderFacts
    _pad_id: int
    _vocabulary: int

    def _check_row(self, row: TokenRow, name: str, param: str) -> None:
        """Raise RequestError where the model cannot be given this row, which `name` calls.

        MLX checks no index: a token beyond the vocabulary would end the process.
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
        """Return the ids of some rows, a mask (1 = a token, 0 = padding), and types if all have.

        All are (rows, tokens). The shorter rows are padded at their end.
        """
        length = max(len(row.ids) for row in rows)
        ids = [[*row.ids, *[self._pad_id] * (length - len(row.ids))] for row in rows]
        mask = [[1] * len(row.ids) + [0] * (length - len(row.ids)) for row in rows]
        types = None
        if all(row.types is not None for row in rows):
            types = mx.array([[*(row.types or ()), *[0] * (length - len(row.ids))] for row in rows])
        return mx.array(ids), mx.array(mask), types


class EmbeddingModel(EncoderModel):
    """A model of EMBEDDING_MODEL, which gives a vector for a text."""

    def __init__(self, source: str, rests: LayerRests, runs_code: bool = False) -> None:
        """Load what EMBEDDING_MODEL names. Raises StartError: it cannot be."""
        directory = checkpoint_directory(source, EMBEDDING_SETTING, runs_code)
        config = read_json(directory / "config.json")
        try:
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
            told = read_json(directory / "sentence_bert_config.json")
            self._lowers_case = told.get("do_lower_case") is True
            self.facts = EncoderFacts(
                architecture=str(config.get("model_type", "unknown")),
                tokens_max=tokens_max(directory, config, self._tokenizer),
                weight_bytes=weights_nbytes(self._model),
                dimensions=self._try(),
                pooling=pooling_name(pooling),
            )
            self.rows(["text"], 0, truncate=True)
            rests.pace(self._model.layers)
        except Exception as error:  # whatever files, an architecture or the device can raise
            raise cannot_load(EMBEDDING_SETTING, source, error) from error
        if pooling is None:
            log.warning("the checkpoint does not tell its pooling (1_Pooling); mlx-vlm's is taken")

    def _try(self) -> int:
        """Return how many dimensions a vector has. Raises ValueError: none comes of a text."""
        found = getattr(self._model(mx.array([[0]])), "text_embeds", None)
        if found is None or found.ndim != 2:
            raise ValueError("it is no model that gives one vector for a text")
        if found.dtype != mx.float32:
            raise ValueError(f"it computes in {found.dtype}, and vectors are float32")
        return int(found.shape[1])

    def chars(self, item: str | list[int]) -> int:
        """Return how much there is to tokenise for an item: characters, or token ids."""
        return len(item)

    def rows(self, items: Sequence[str | list[int]], first: int, truncate: bool) -> list[TokenRow]:
        """Return the tokens of items, the first of which is number `first` of the request.

        Raises RequestError: the model cannot be given one of them.
        """
        texts = [
            self._prompt + checked_text(item, f"Input {index}", "input", truncate)
            for index, item in enumerate(items, first)
            if isinstance(item, str)
        ]
        if self._lowers_case:
            texts = [text.lower() for text in texts]
        limits = {"truncation": True, "max_length": self.facts.tokens_max} if truncate else {}
        told = iter(self._tokenizer(texts, **limits)["input_ids"] if texts else ())
        cut = self.facts.tokens_max if truncate else None
        rows = [TokenRow(next(told) if isinstance(item, str) else item[:cut]) for item in items]
        for index, row in enumerate(rows, first):
            self._check_row(row, f"Input {index}", "input")
        return rows

    def values(self, rows: Sequence[TokenRow]) -> NDArray[np.float32]:
        """Return the vector of each row, (rows, dimensions)."""
        ids, mask, _ = self._padded(rows)
        return np.array(self._model(ids, attention_mask=mask).text_embeds)


class RerankModel(EncoderModel):
    """A model of RERANK_MODEL, which gives a score from 0 to 1 for a document."""

    def __init__(self, source: str, rests: LayerRests, runs_code: bool = False) -> None:
        """Load what RERANK_MODEL names. Raises StartError: it cannot be."""
        directory = checkpoint_directory(source, RERANK_SETTING, runs_code)
        config = read_json(directory / "config.json")
        try:
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
            self.rows([("query", "document")], 0)  # the template is one
            rests.pace(
                (self._model if self._is_classifier else self._model.language_model.model).layers
            )
        except Exception as error:  # whatever files, an architecture or the device can raise
            raise cannot_load(RERANK_SETTING, source, error) from error

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def check_query(self, query: str) -> None:
        """Raise RequestError where a query leaves no room for a document, which none could cut."""
        count = len(self._tokens(checked_text(query, "The query", "query", truncate=False)))
        if count >= self.facts.tokens_max:
            raise RequestError(
                f"The query is {count:,} tokens and the model takes {self.facts.tokens_max:,} with "
                "a document. Shorten it.",
                code="context_length_exceeded",
                param="query",
            )

    def chars(self, item: tuple[str, str]) -> int:
        return len(item[0]) + len(item[1])  # the query is tokenised with each

    def rows(
        self, items: Sequence[tuple[str, str]], first: int, truncate: bool = True
    ) -> list[TokenRow]:
        """Return the tokens of one query with each document, which is cut where it is too long.

        An item is the query and a document, the first number `first` of the request.

        Raises RequestError: the model cannot be given one of them.
        """
        assert truncate, "no route has a document refused for its length"
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
        told = self._tokenizer(queries, documents, truncation=True, max_length=limit)
        types = told.get("token_type_ids") or [None] * len(documents)
        return [TokenRow(*row) for row in zip(told["input_ids"], types, strict=True)]

    def _chat_row(self, query: str, document: str) -> TokenRow:
        asked = f"<Instruct>: {INSTRUCTION}\n\n<Query>: {query}\n\n<Document>: {document}"
        ids = self._tokenizer.apply_chat_template(
            [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": asked},
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
            told = {} if types is None else {"token_type_ids": types}
            logits = self._model(ids, attention_mask=mask, **told).logits[:, 0]
        else:
            # How much likelier "yes" is than "no" behind the last tokens: what is padded stands
            # behind them, where nothing that is read looks. No other word of the vocabulary is
            # computed: in float32 all of it can take gigabytes.
            inner = self._model.language_model.model
            hidden = inner.embed_tokens(ids)
            for layer in inner.layers:
                hidden = layer(hidden, "causal", None)
            last = inner.norm(hidden)[mx.arange(ids.shape[0]), mask.sum(axis=1) - 1]
            logits = last @ (self._yes - self._no)
        return np.array(mx.sigmoid(logits).astype(mx.float32))[:, None]


def checked_text(text: str, name: str, param: str, truncate: bool) -> str:
    """Return a text that can be tokenised, cut where that is asked.

    Raises RequestError: it is longer than CHARS_MAX, and is not to be cut.
    """
    if len(text) > CHARS_MAX and not truncate:
        raise RequestError(
            f"{name} is {len(text):,} characters and this server takes {CHARS_MAX:,}. Split it.",
            code="context_length_exceeded",
            param=param,
        )
    return text[:CHARS_MAX]


def check_numbers(values: NDArray[np.float32]) -> None:
    """Raise RequestError where the model computed no number."""
    if not np.isfinite(values).all():
        raise RequestError("The model computed no number.", status=500, code="not_a_number")


def check_dimensions(dimensions: int | None, dimensions_max: int) -> None:
    """Raise RequestError where the model has not so many dimensions."""
    if dimensions is not None and not 1 <= dimensions <= dimensions_max:
        raise RequestError(
            f"dimensions is {dimensions:,} and the model's vectors have {dimensions_max:,}. "
            f"Ask for a number from 1 to {dimensions_max:,}, or leave it out.",
            param="dimensions",
        )


def cut_vectors(vectors: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """Return the first dimensions of vectors, made length 1 again; None = all.

    Raises RequestError: the model computed no number.
    """
    vectors = vectors[:, :dimensions]
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    check_numbers(lengths)
    return (vectors / np.maximum(lengths, 1e-12)).astype("<f4")


def _rows_of(table: Any, rows: list[int]) -> mx.array:
    """Return some rows of a matrix as it is kept, in float32."""
    at = mx.array(rows)
    found = table.weight[at]
    if hasattr(table, "scales"):
        biases = table.biases[at] if "biases" in table else None
        kept = (table.group_size, table.bits, table.mode)
        found = mx.dequantize(found, table.scales[at], biases, *kept)
    return found.astype(mx.float32)
