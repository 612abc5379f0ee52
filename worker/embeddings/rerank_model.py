"""Scores documents by a query, with a model of RERANK_MODEL as mlx-vlm loads it.

Two kinds: classifiers, which are given a query and a document as a pair, and Qwen3-Reranker, which
is asked whether the document answers the query, and its "yes" weighed against its "no".
Source of the second's prompt: mlx_vlm.server.reranking, and Qwen's model card.
Owner: the inference thread of the worker that embeds.
"""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_vlm.reranker import RerankerKind, reranker_kind
from mlx_vlm.reranker_loader import load_reranker
from numpy.typing import NDArray
from transformers import AutoTokenizer

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import EncoderFacts
from hearth.worker.embeddings.checkpoint import (
    cannot_load,
    check_activation,
    checkpoint_directory,
    compute_in_float32,
    padding_id,
    tokens_max,
    weights_nbytes,
)
from hearth.worker.embeddings.layer_rests import LayerRests
from hearth.worker.embeddings.token_rows import TokenRow, check_row, checked_text, pad
from hearth.worker.engine.vision.vlm_loader import only_known_code, read_json
from hearth.worker.prompt import bounded_templates  # noqa: F401  before any template is compiled

SETTING: Final = "RERANK_MODEL"
INSTRUCTION: Final = "Given a search query, retrieve relevant candidates that answer the query."
SYSTEM_PROMPT: Final = (
    "Judge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".'
)
ANSWER_BEGIN: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class RerankModel:
    """A model that gives a score from 0 to 1 for a document."""

    def __init__(self, source: str, rests: LayerRests, runs_code: bool = False) -> None:
        """Load what RERANK_MODEL names. Raises StartError: it cannot be."""
        directory = checkpoint_directory(source, SETTING, runs_code)
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
                words = [self._only_token(word) for word in ("yes", "no")]
                self._yes, self._no = _rows_of(table, words)
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
            model = self._model if self._is_classifier else self._model.language_model.model
            rests.pace(model.layers)
        except Exception as error:  # whatever files, an architecture or the device can raise
            raise cannot_load(SETTING, source, error) from error

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _only_token(self, word: str) -> int:
        found = self._tokens(word)
        if len(found) != 1:
            raise ValueError(f"its tokenizer has no token {word!r}")
        return found[0]

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
        make = self._classifier_rows if self._is_classifier else self._chat_rows
        rows = make(query, documents)
        for index, row in enumerate(rows, first):
            name = f"Document {index} with the query"
            check_row(row, name, "documents", self.facts.tokens_max, self._vocabulary)
        return rows

    def _classifier_rows(self, query: str, documents: list[str]) -> list[TokenRow]:
        queries, limit = [query] * len(documents), self.facts.tokens_max
        told = self._tokenizer(queries, documents, truncation=True, max_length=limit)
        types = told.get("token_type_ids") or [None] * len(documents)
        return [TokenRow(*row) for row in zip(told["input_ids"], types, strict=True)]

    def _chat_rows(self, query: str, documents: list[str]) -> list[TokenRow]:
        rows = []
        for document in documents:
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
            rows.append(TokenRow([*kept, *self._answer_begin]))
        return rows

    def values(self, rows: Sequence[TokenRow]) -> NDArray[np.float32]:
        """Return the score of each row, (rows, 1)."""
        ids, mask, types = pad(rows, self._pad_id)
        if self._is_classifier:
            told = {} if types is None else {"token_type_ids": types}
            logits = self._model(ids, attention_mask=mask, **told).logits[:, 0]
        else:
            logits = self._yes_over_no(ids, mask.sum(axis=1) - 1)
        return np.array(mx.sigmoid(logits).astype(mx.float32))[:, None]

    def _yes_over_no(self, ids: mx.array, last: mx.array) -> mx.array:
        """Return how much likelier "yes" is than "no" behind the tokens at `last`.

        What is padded stands behind them, where nothing that is read looks. No other word of the
        vocabulary is computed: in float32 all of it can take gigabytes.
        """
        inner = self._model.language_model.model
        hidden = inner.embed_tokens(ids)
        for layer in inner.layers:
            hidden = layer(hidden, "causal", None)
        hidden = inner.norm(hidden)[mx.arange(ids.shape[0]), last]
        return hidden @ (self._yes - self._no)


def _rows_of(table: Any, rows: list[int]) -> mx.array:
    """Return some rows of a matrix as it is kept, in float32."""
    at = mx.array(rows)
    found = table.weight[at]
    if hasattr(table, "scales"):
        biases = table.biases[at] if "biases" in table else None
        kept = (table.group_size, table.bits, table.mode)
        found = mx.dequantize(found, table.scales[at], biases, *kept)
    return found.astype(mx.float32)
