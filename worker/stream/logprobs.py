"""Describes the log probabilities of one sampled token for a client that asked for them."""

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from hearth.shared.wire_messages import TokenLogprob
from hearth.worker.stream.detokenise import Vocabulary


def describe(token_id: int, logprobs: mx.array, top: int, vocabulary: Vocabulary) -> TokenLogprob:
    """Return the token with its `top` likeliest alternatives; `logprobs` is (vocabulary,)."""
    assert logprobs.ndim == 1 and 0 <= token_id < logprobs.shape[0], (token_id, logprobs.shape)
    values, alone = np.array(logprobs.astype(mx.float32)), vocabulary.token_bytes
    likeliest = _likeliest(values, min(top, len(values))) if top else []
    return TokenLogprob(
        token_id=token_id,
        token=_text(alone(token_id)),
        token_bytes=alone(token_id),
        logprob=float(values[token_id]),
        top=[[at, _text(alone(at)), alone(at), float(values[at])] for at in likeliest],
    )


def _likeliest(values: NDArray[np.float32], count: int) -> list[int]:
    """Return the places of the `count` highest, the highest first, of equals the first place.

    Sorting a whole vocabulary would take longer than many a forward.
    """
    least = np.partition(values, -count)[-count]
    above = np.flatnonzero(values > least)
    places = np.concatenate([above, np.flatnonzero(values == least)[: count - len(above)]])
    likeliest: list[int] = places[np.argsort(-values[places], kind="stable")].tolist()
    return likeliest


def _text(alone: bytes) -> str:
    return alone.decode("utf-8", "replace")
