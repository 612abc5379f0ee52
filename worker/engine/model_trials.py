"""Tries whether a model gives the same logits in a batch, in a tree, on a trunk, or in a draft.

A trial computes a few made-up tokens together and one by one, and compares the logits.
Owner: the inference thread.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from hearth.worker.engine.decode.batch import merge_caches
from hearth.worker.engine.decode.shared_trunk import (
    LayerTrunk,
    Trunk,
    TrunkedKVCache,
    can_stand_on_trunk,
    merge_on_trunks,
)
from hearth.worker.engine.decode.tree_forward import TreeForward, can_hold_trees
from hearth.worker.engine.decode.trunk_attention import Attention, attend_with_trunks, reach_trunks

log = logging.getLogger(__name__)

# An error is 1 minus the correlation of logits. A batch rounds differently, and so does a prompt
# that is cut differently (its cut error), so the error of a batch may be a multiple of the cut
# error. In fp32 both are nearly 0. A position that is off by one gives an error of 3e-4 or more,
# and padding without a mask gives 5e-3 or more. At most half of such an error passes as rounding.
# In a model with experts the router may choose other experts where two are nearly tied. Not every
# text has such ties: hence several texts.
ERROR_MAX: Final = 1e-4
CUT_ERRORS_MAX: Final = 10  # largest error of a batch, as a multiple of the cut error
CUT_ERROR_MAX: Final = 2e-4  # a larger cut error counts as this one
TEXTS: Final = 3
LENGTHS: Final = (3, 64)  # tokens of a batch's two rows: most of the first row is padding
SHIFTS: Final = (40, 0, 7)  # offsets of the rows' positions, as after images
STEPS: Final = 2

# The fewer tokens there are, the more each counts in the logits of the others. A fault of positions
# or masks gives 1e-3 or more in the models of the tests. A convolution looks back three tokens, so
# there are more than three drafted tokens.
DRAFT_TOKENS: Final = 8
DRAFT_ROWS: Final = 4

# The tree has two branches of different length, with interleaved nodes.
TREE_TOKENS: Final = 12
TREE_PARENTS: Final = (-1, -1, 0, 1, 2)
TREE_PATHS: Final = ((0, 2, 4), (1, 3))

# The fewer tokens a row has, the more a fault of its trunk or position counts; padding counts by
# its share of the row. In the models of the tests these lengths find as much as 40 and (3, 64):
# padding without a mask gives 2.8e-3, a position off by one 9e-4. (3, 20) finds no missing mask.
TRUNK_LENGTH: Final = 8  # tokens of the trunk that two rows share; a third row has no trunk
TAILS: Final = (2, 28)  # tokens of these two rows after the trunk
# The error of a call of attention is its outputs' largest difference, divided by the largest
# output. This limit is for float32 on the CPU, where only sums are in another order.
FLOAT32_ERROR_MAX: Final = 1e-4
# In the model's dtype on its device the limit is this many units in the last place of the largest
# output, plus a multiple of the error of upstream's own attention. The units are at least
# `ROUNDING`, as GPUs may multiply float32 with ten bits.
UNITS_MAX: Final = 4
USUAL_ERRORS_MAX: Final = 2
ROUNDING: Final = 1e-3

Call = Callable[..., mx.array]
NewCache = Callable[[], list[Any]]
Attend = Callable[..., mx.array]


class Tried(NamedTuple):
    """The errors of logits against those of single tokens, and a text with its last logits."""

    errors: Sequence[float]
    whole: list[int]
    alone: NDArray[Any]


def batches_like_alone(model: Call, new_cache: NewCache) -> bool:
    """Whether a batch gives each row the logits that it gets alone. Runs a trial; warns if not.

    The trial takes eight forwards of at most 64 tokens per text. If the first text fails, up to
    three texts are tried, each with one more forward of 66 tokens.
    """

    def tried(text: int) -> Tried:
        prompts = [
            [7 + 11 * text + (5 + 3 * n) * n % 97 for n in range(count)] for count in LENGTHS
        ]
        return _tried_batch(model, new_cache, text, prompts, merge_caches)

    reason = _why_not_alike(model, new_cache, tried)
    if reason is not None:
        log.warning("sequences decode in turns, as they cannot share a forward: %s", reason)
    return reason is None


def verifies_like_alone(model: Call, new_cache: NewCache) -> bool:
    """Whether a forward of several tokens, as for a draft, gives the logits of single tokens.

    Some models cannot: they attend in both directions within a forward (PaliGemma's prefix), or
    their layers hold other rows than the tokens', so that a draft's rows cannot be removed.
    Runs a trial; logs the reason if not. The trial takes seven forwards of at most eight tokens per
    text. If the first text fails, up to three texts are tried, each with one more forward of twelve
    tokens.
    """

    def tried(text: int) -> Tried:
        prompt = [7 + 11 * text + (5 + 3 * text) * n % 97 for n in range(DRAFT_TOKENS)]
        ids = [13 + 17 * text + (3 + text) * n for n in range(DRAFT_ROWS)]
        caches = [_filled_cache(model, new_cache, prompt) for _ in range(2)]
        together = as_floats(model(mx.array([ids]), cache=caches[0])[0])
        for layer in caches[0]:
            for part in getattr(layer, "caches", (layer,)):
                if getattr(part, "keys", None) is None:  # a state, pooled rows, or nothing
                    continue
                rows = int(part.offset)
                if rows != len(prompt) + len(ids):
                    raise ValueError(
                        f"a {type(part).__name__} holds {rows} rows of "
                        f"{len(prompt) + len(ids)} tokens"
                    )
        alone = [as_floats(model(mx.array([[token]]), cache=caches[1])[0, -1]) for token in ids]
        return Tried([*map(logits_error, together, alone)], [*prompt, *ids], alone[-1])

    reason = _why_not_alike(model, new_cache, tried)
    if reason is not None:
        log.info(
            "nothing is drafted, as the model cannot verify several tokens at once: %s", reason
        )
    return reason is None


def make_tree_forward(model: Any, new_cache: NewCache) -> TreeForward | None:
    """Return a TreeForward; None if the model gives other logits in trees. Runs a trial.

    The trial takes eleven forwards of at most 16 tokens per text. If the first text fails, up to
    three texts are tried, each with one more forward.
    """
    if not can_hold_trees(new_cache()):
        return None

    def tried(text: int) -> Tried:
        prompt = [7 + 11 * text + (5 + 3 * text) * n % 97 for n in range(TREE_TOKENS)]
        known, tokens = (
            [41 + text],
            [13 + 17 * text + 3 * node for node in range(len(TREE_PARENTS))],
        )
        cache = _filled_cache(model, new_cache, prompt)
        together = TreeForward(model)(known, tokens, TREE_PARENTS, cache)[0]
        errors = []
        for path in TREE_PATHS:
            cache = _filled_cache(model, new_cache, prompt)
            for row in (0, *(len(known) + node for node in path)):
                alone = as_floats(model(mx.array([[[*known, *tokens][row]]]), cache=cache)[0, -1])
                errors.append(logits_error(as_floats(together[row]), alone))
        whole = [*prompt, *known, *(tokens[node] for node in TREE_PATHS[-1])]
        return Tried(errors, whole, alone)

    reason = _why_not_alike(model, new_cache, tried)
    if reason is None:
        return TreeForward(model)
    log.info("drafts have no branches, as the model cannot compute them: %s", reason)
    return None


def trunks_like_alone(
    model: Call, network: nn.Module, new_cache: NewCache, attend: Attend = attend_with_trunks
) -> bool:
    """Whether rows on a trunk get the logits that each gets alone. Runs a trial; logs if not.

    Rounding grows from layer to layer, so in 16 bits logits cannot distinguish rounding from a
    fault. Hence there are two comparisons. First, each row's trunk and tail are joined and passed
    to upstream's own attention. The logits must then be those of the row alone: this proves
    positions and masks, and that all layers are reached. Second, the result of `attend` is compared
    with upstream's in each call.
    The trial takes eleven forwards of at most 36 tokens per text. If the first text fails, up to
    three texts are tried, each with one more forward of 38 tokens.
    """
    trial = _TrunkTrial(attend)

    def tried(text: int) -> Tried:
        trunk = [19 + 5 * text + (7 + 2 * n) * n % 89 for n in range(TRUNK_LENGTH)]
        tails = [[7 + 11 * text + (5 + 3 * n) * n % 97 for n in range(count)] for count in TAILS]
        prompts = [*(trunk + tail for tail in tails), tails[-1][: TAILS[0] + 1]]
        result = _tried_batch(model, new_cache, text, prompts, trial.merge)
        trial.check()
        return result

    restore = reach_trunks(network, trial.attend)
    try:
        reason = _why_not_alike(model, new_cache, tried)
    finally:
        restore()
    if reason is not None:
        log.info("each sequence of a batch keeps all of its KV, as none share a trunk: %s", reason)
    return reason is None


def as_floats(logits: mx.array) -> NDArray[Any]:
    """Return logits in float64, so that comparing them adds no rounding."""
    return np.array(logits.astype(mx.float32)).astype(np.float64)


def logits_error(first: NDArray[Any], second: NDArray[Any]) -> float:
    """Return 1 minus the correlation of logits: 0 if they are equal, NaN if they contain NaN."""
    return 1 - float(np.corrcoef(first.ravel(), second.ravel())[0, 1])


# ------------------------------------------------------------ parts of trials


def _why_not_alike(model: Call, new_cache: NewCache, tried: Callable[[int], Tried]) -> str | None:
    """Return why a trial failed; None if the logits of one text are alike.

    `tried` takes a text's number below `TEXTS`, and computes that text. The cut error, between a
    forward of the whole text and single tokens, is computed only if the first comparison fails.
    """
    reason = ""
    try:
        for text in range(TEXTS):
            errors, whole, alone = tried(text)
            largest = float(np.max(errors))  # NaN if any error is NaN
            if largest <= ERROR_MAX:
                return None
            uncut = as_floats(model(mx.array([whole]), cache=new_cache())[0, -1])
            cut_error = logits_error(uncut, alone)
            if largest <= ERROR_MAX + CUT_ERRORS_MAX * min(cut_error, CUT_ERROR_MAX):
                return None
            reason = f"its logits are off by {largest:.1e}, by {cut_error:.1e} cut otherwise"
    except Exception as error:  # any error of an architecture that was not made for this
        reason = " ".join(str(error).split())[:200] or type(error).__name__
    return reason


def _tried_batch(
    model: Call,
    new_cache: NewCache,
    text: int,
    prompts: Sequence[list[int]],
    merge: Callable[[list[list[Any]]], list[Any]],
) -> Tried:
    """Feed tokens after each prompt, in a batch and alone. The second prompt is the longest."""
    answers = [
        [13 + 18 * row + text * (17 - 10 * row) + n * (1 + row) for row in range(len(prompts))]
        for n in range(STEPS)
    ]
    caches = [_filled_cache(model, new_cache, prompt) for prompt in prompts]
    batch = merge(caches)
    # Text-only models take no `shift`.
    shifts = SHIFTS[: len(prompts)] if getattr(model, "takes_positions", False) else ()
    errors: list[float] = []
    for ids in answers:
        together = _logits(model, ids, batch, shifts)
        alone = [
            _logits(model, [id], cache, shifts[row : row + 1])[0]
            for row, (id, cache) in enumerate(zip(ids, caches, strict=True))
        ]
        errors += map(logits_error, together, alone)
    return Tried(errors, [*prompts[1], *(ids[1] for ids in answers)], alone[1])


def _logits(model: Call, ids: list[int], cache: list[Any], shifts: Sequence[int]) -> NDArray[Any]:
    """Return the logits (rows, vocabulary) after one more token for each row."""
    arguments = {"shift": list(shifts)} if shifts else {}
    return as_floats(model(mx.array(ids)[:, None], cache=cache, **arguments)[:, -1])


def _filled_cache(model: Call, new_cache: NewCache, prompt: list[int]) -> list[Any]:
    """Return a new cache with the KV of a prompt, evaluated."""
    cache = new_cache()
    model(mx.array([prompt]), cache=cache)
    mx.eval([layer.state for layer in cache])
    return cache


class _TrunkTrial:
    """Computes the attention of trunked layers by upstream's function, and compares `attend`."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self._expected = 0  # least number of calls; layers that share KV make one call each
        self._calls = 0
        self._errors: list[tuple[mx.array, mx.array]] = []  # (error, limit)

    def merge(self, caches: list[list[Any]]) -> list[Any]:
        """Reset; return a batch's layers in which all rows except the last share a trunk."""
        trunks = [Trunk(TRUNK_LENGTH)] * (len(caches) - 1) + [None]
        batch = [
            merge_on_trunks(layers, trunks, number)
            if can_stand_on_trunk(layers[0])
            else merge_caches([[layer] for layer in layers])[0]
            for number, layers in enumerate(zip(*caches, strict=True))
        ]
        self._expected = sum(isinstance(layer, TrunkedKVCache) for layer in batch) * STEPS
        self._calls = 0
        self._errors.clear()
        return batch

    def attend(self, stock: Attention, given: dict[str, Any]) -> mx.array:
        self._calls += 1
        own = self._attend(**given)
        joined = _join_trunks(given)
        usual = stock(**joined)
        with mx.stream(mx.cpu):
            exact = stock(**_in_float32(joined))
            largest = mx.abs(exact).max()

            def error(out: mx.array) -> mx.array:
                return mx.abs(out.astype(mx.float32) - exact).max() / largest

            exact_error = error(self._attend(**_in_float32(given)))
            unit = max(ROUNDING, UNITS_MAX * mx.finfo(usual.dtype).eps)
            self._errors += [
                (exact_error, mx.array(FLOAT32_ERROR_MAX)),
                (error(own), unit + USUAL_ERRORS_MAX * error(usual)),
            ]
        return usual

    def check(self) -> None:
        """Raise ValueError if calls of attention are missing, or an error is above its limit."""
        if self._calls < self._expected:
            raise ValueError(
                f"it attends {self._calls} of {self._expected} times where that is seen"
            )
        for error, limit in [(float(error), float(limit)) for error, limit in self._errors]:
            if not error <= limit:  # true for NaN too
                raise ValueError(f"attention on a trunk is off by {error:.1e}, of {limit:.1e}")


def _join_trunks(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of upstream's attention, with each row's trunk and tail joined.

    `cache` is the cache of the tails; upstream's attention reads it for quantised KV only.
    """
    cache, mask = given["cache"], given["mask"]
    rows, _, count, _ = given["queries"].shape
    length = max((trunk.length for trunk in cache.trunks if trunk is not None), default=0)
    lengths = mx.array([trunk.length if trunk is not None else 0 for trunk in cache.trunks])
    seen = mx.arange(length) >= length - lengths[:, None]
    own = given["keys"].shape[2]
    masks = [
        mx.broadcast_to(seen[:, None, None], (rows, 1, count, length)),
        mx.broadcast_to(mx.array(True) if mask is None else mask, (rows, 1, count, own)),
    ]
    joined = {"cache": cache.tails, "mask": mx.concatenate(masks, axis=-1)}
    for name in ("keys", "values"):
        tails = given[name]
        trunks = mx.concatenate([_padded(trunk, name, tails, length) for trunk in cache.trunks])
        joined[name] = mx.concatenate([trunks, tails], axis=2)
    return given | joined


def _padded(trunk: Any, name: str, tails: mx.array, length: int) -> mx.array:
    """Return a trunk's K or V (1, KV heads, length, width), padded on the left."""
    if trunk is None:
        return mx.zeros((1, tails.shape[1], length, tails.shape[3]), tails.dtype)
    rows: mx.array = getattr(trunk, name)
    return mx.pad(rows, [(0, 0), (0, 0), (length - rows.shape[2], 0), (0, 0)])


def _in_float32(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with all arrays in float32, the trunks' arrays too."""
    wide: dict[str, Any] = {
        name: value.astype(mx.float32)
        for name, value in given.items()
        if isinstance(value, mx.array) and value.dtype != mx.bool_
    }
    cache = given["cache"]
    if isinstance(cache, TrunkedKVCache):
        trunks = {
            trunk: LayerTrunk(trunk.keys.astype(mx.float32), trunk.values.astype(mx.float32))
            for trunk, _ in cache.groups
        }
        wide["cache"] = TrunkedKVCache(
            cache.tails, [trunk and trunks[trunk] for trunk in cache.trunks]
        )
    return given | wide
