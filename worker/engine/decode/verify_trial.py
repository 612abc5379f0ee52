"""Tries whether a forward of several tokens gives each the logits that it gets by itself.

A model that attends both ways within a forward (PaliGemma's prefix) does not, and one whose layers
hold other rows than the text's (Mllama's, of an image) cannot leave out a draft's.
Owner: the inference thread.
"""

import logging
from collections.abc import Callable
from typing import Any, Final

import mlx.core as mx
import numpy as np

from hearth.worker.engine.decode.batch_caches import (
    Call,
    Unlike,
    as_floats,
    cut_error,
    filled_cache,
    logits_error,
    why_not_alike,
)

log = logging.getLogger(__name__)

# The fewer tokens, the more each counts in the others' logits: a fault of positions or masks errs
# by 1e-3 or more in the models of the tests. A convolution keeps three tokens: the rows are more.
TRIED_TOKENS: Final = 8
TRIED_ROWS: Final = 4


def verifies_like_alone(model: Call, new_cache: Callable[[], list[Any]]) -> bool:
    """Whether drafts can be verified: tries it, tells where not.

    Takes seven forwards of at most eight tokens; up to three times as many, and one of twelve for
    each, where the first fails.
    """
    reason = why_not_alike(lambda text: _errors(model, new_cache, text))
    if reason is not None:
        log.info(
            "nothing is drafted, as the model cannot verify several tokens at once: %s", reason
        )
    return reason is None


def _errors(model: Call, new_cache: Callable[[], list[Any]], text: int) -> Unlike:
    prompt = [7 + 11 * text + (5 + 3 * text) * n % 97 for n in range(TRIED_TOKENS)]
    ids = [13 + 17 * text + (3 + text) * n for n in range(TRIED_ROWS)]
    caches = [filled_cache(model, new_cache, prompt) for _ in range(2)]
    together = as_floats(model(mx.array([ids]), cache=caches[0])[0])
    _check_rows(caches[0], len(prompt) + len(ids))
    alone = [as_floats(model(mx.array([[each]]), cache=caches[1])[0, -1]) for each in ids]
    errors = [logits_error(one, other) for one, other in zip(together, alone, strict=True)]
    whole = [*prompt, *ids]
    return float(np.max(errors)), lambda: cut_error(model, new_cache, whole, alone[-1])


def _check_rows(cache: list[Any], tokens: int) -> None:
    """Raise where a layer that counts tokens has not counted these."""
    for layer in cache:
        for part in getattr(layer, "caches", (layer,)):
            held = getattr(part, "offset", tokens)
            if int(held) != tokens:
                name = type(part).__name__
                raise ValueError(f"a {name} holds {int(held)} rows of {tokens} tokens")
