"""Describes the log probabilities of one sampled token for a client that asked for them."""

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from hearth.shared.wire_messages import TokenLogprob
from hearth.worker.stream.detokenise import Vocabulary


def describe(token_id: int, logprobs: mx.array, top: int, vocabulary: Vocabulary) -> TokenLogprob:
    """Return the token and its `top` likeliest alternatives; `logprobs` has shape (vocabulary,)."""
    assert logprobs.ndim == 1 and 0 <= token_id < logprobs.shape[0], (token_id, logprobs.shape)
    values, bytes_of = np.array(logprobs.astype(mx.float32)), vocabulary.token_bytes
    likeliest = _likeliest(values, min(top, len(values))) if top else []
    return TokenLogprob(
        token_id=token_id,
        token=_text(bytes_of(token_id)),
        token_bytes=bytes_of(token_id),
        logprob=float(values[token_id]),
        top=[[id_, _text(bytes_of(id_)), bytes_of(id_), float(values[id_])] for id_ in likeliest],
    )


def _likeliest(values: NDArray[np.float32], count: int) -> list[int]:
    """Return the token ids of the `count` highest values, the highest first.

    Of equal values, the lower token id comes first. Sorting a whole vocabulary would take longer
    than some forwards.
    """
    least = np.partition(values, -count)[-count]
    above = np.flatnonzero(values > least)
    ids = np.concatenate([above, np.flatnonzero(values == least)[: count - len(above)]])
    likeliest: list[int] = ids[np.argsort(-values[ids], kind="stable")].tolist()
    return likeliest


def _text(token_bytes: bytes) -> str:
    return token_bytes.decode("utf-8", "replace")
