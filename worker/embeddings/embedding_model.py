"""Turns texts into vectors, with a model of EMBEDDING_MODEL as mlx-vlm loads it.

Owner: the inference thread of the worker that embeds.
"""

import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.embedding_loader import load_embedding_model
from numpy.typing import NDArray
from transformers import AutoTokenizer

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import EncoderFacts
from hearth.worker.embeddings.checkpoint import (
    cannot_load,
    check_modules,
    check_pooling,
    checkpoint_directory,
    compute_in_float32,
    default_prompt,
    lowers_case,
    padding_id,
    pooling_name,
    pooling_of,
    tokens_max,
    weights_nbytes,
)
from hearth.worker.embeddings.layer_rests import LayerRests
from hearth.worker.embeddings.sliding_windows import hold_windows
from hearth.worker.embeddings.token_rows import (
    TokenRow,
    check_numbers,
    check_row,
    checked_text,
    pad,
)
from hearth.worker.engine.vision.vlm_loader import read_json

log = logging.getLogger(__name__)

SETTING = "EMBEDDING_MODEL"


class EmbeddingModel:
    """A model that gives a vector for a text."""

    def __init__(self, source: str, rests: LayerRests, runs_code: bool = False) -> None:
        """Load what EMBEDDING_MODEL names. Raises StartError: it cannot be."""
        directory = checkpoint_directory(source, SETTING, runs_code)
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
            hold_windows(self._model, config.get("model_type"))
            self._prompt = default_prompt(directory)
            self._pad_id = padding_id(config, self._tokenizer)
            self._vocabulary = int(config["vocab_size"])
            self._lowers_case = lowers_case(directory)
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
            raise cannot_load(SETTING, source, error) from error
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
            name = f"Input {index}"
            check_row(row, name, "input", self.facts.tokens_max, self._vocabulary)
        return rows

    def values(self, rows: Sequence[TokenRow]) -> NDArray[np.float32]:
        """Return the vector of each row, (rows, dimensions)."""
        ids, mask, _ = pad(rows, self._pad_id)
        return np.array(self._model(ids, attention_mask=mask).text_embeds)


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
