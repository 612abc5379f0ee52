"""Gives a model's logits with the hidden states that they are made of, for a draft model.

Owner: the inference thread.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.gemma4_text import logit_softcap


def with_hidden(
    model: Any, ids: mx.array, cache: list[Any] | None = None, **arguments: Any
) -> tuple[mx.array, mx.array]:
    """Return logits (rows, n, vocabulary) and hidden states (rows, n, hidden) of `ids` (rows, n).

    `model` is called as usual but for that, with the same `arguments`.
    """
    if hasattr(model, "with_hidden"):
        logits, hidden = model.with_hidden(ids, cache, **arguments)
    else:
        logits, hidden = _text_with_hidden(model, ids, cache, **arguments)
    return logits, hidden


def _text_with_hidden(model: Any, ids: mx.array, cache: list[Any] | None) -> tuple[Any, Any]:
    """Do what mlx-lm's model does, in its two parts: its own call returns the logits alone."""
    spoken = getattr(model, "language_model", model)
    hidden = spoken.model(ids, cache=cache)
    is_tied = spoken.args.tie_word_embeddings
    logits = (spoken.model.embed_tokens.as_linear if is_tied else spoken.lm_head)(hidden)
    cap = getattr(spoken, "final_logit_softcapping", None)
    return logits if cap is None else logit_softcap(cap, logits), hidden


def is_like_alone(model: Any) -> bool:
    """Whether a model that is asked for its hidden states too has the same logits, to the bit."""
    ids = mx.array([[1, 2, 3, 4]])
    return bool(mx.array_equal(model(ids), with_hidden(model, ids)[0]).item())
