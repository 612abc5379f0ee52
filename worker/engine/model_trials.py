"""Tries whether a model computes alike: in a batch, in trees, on a trunk, several tokens at once.

A trial computes a few tokens that nobody asked for, together and one by one, and compares logits.
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

# Errors are 1 less the correlation of logits. A batch rounds anew, and so does a sequence alone
# that is cut otherwise: the one may err by some of what the other does. In fp32 that is nothing.
# A position that is off by one errs by 3e-4 or more, padding that is not masked by 5e-3 or more,
# so no more than half of that is ever taken for rounding. The routers of a model with experts may
# choose others where two are nearly tied, which no text has always: hence several texts.
ERROR_MAX: Final = 1e-4
CUT_ERRORS_MAX: Final = 10
CUT_ERROR_MAX: Final = 2e-4  # what is counted of it
TEXTS: Final = 3
LENGTHS: Final = (3, 64)  # of a batch's two rows: most of the first is padding
SHIFTS: Final = (40, 0, 7)  # of rows' positions, as behind images
STEPS: Final = 2

# The fewer tokens, the more each counts in the others' logits: a fault of positions or masks errs
# by 1e-3 or more in the models of the tests. A convolution keeps three tokens: the rows are more.
DRAFT_TOKENS: Final = 8
DRAFT_ROWS: Final = 4

# Two branches of unlike length behind some text, their nodes mixed.
TREE_TOKENS: Final = 12
TREE_PARENTS: Final = (-1, -1, 0, 1, 2)
TREE_PATHS: Final = ((0, 2, 4), (1, 3))

# The fewer tokens a row has, the more a fault of its trunk or position counts, and padding counts
# by its share of the row. In the models of the tests these few show what 40 and (3, 64) show:
# padding that is seen errs by 2.8e-3, a position off by one by 9e-4. With (3, 20) padding hides.
TRUNK_LENGTH: Final = 8  # of the rows that share one, before their own; a third row has none
TAILS: Final = (2, 28)  # their own
# Errors are the largest difference of a call's outputs, as a part of the largest output.
# In float32, on the CPU, whatever the model's numbers: only sums are in another order.
FLOAT32_ERROR_MAX: Final = 1e-4
# In the model's own numbers, on its device: so many units in the last place of the largest output,
# or what upstream's own attention errs by. GPUs may multiply float32 with ten bits: no less than
# `ROUNDING`.
UNITS_MAX: Final = 4
USUAL_ERRORS_MAX: Final = 2
ROUNDING: Final = 1e-3

Call = Callable[..., mx.array]
NewCache = Callable[[], list[Any]]
Attend = Callable[..., mx.array]


class Tried(NamedTuple):
    """How unlike logits are to those alone, and a text whose last logits were had `alone`."""

    errors: Sequence[float]
    whole: list[int]
    alone: NDArray[Any]


def batches_like_alone(model: Call, new_cache: NewCache) -> bool:
    """Whether a batch gives each row the logits that it gets alone. Tries it; warns where not.

    Takes eight forwards of at most 64 tokens; up to three times as many, and one of 66 for each,
    where the first fails.
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
    """Whether a forward of several tokens, as verifies drafts, gives each the logits of its own.

    A model that attends both ways within a forward (PaliGemma's prefix) does not, and one whose
    layers hold other rows than the text's (Mllama's, of an image) cannot leave out a draft's.
    Takes seven forwards of at most eight tokens; up to three times as many, and one of twelve for
    each, where the first fails. Tells where not.
    """

    def tried(text: int) -> Tried:
        prompt = [7 + 11 * text + (5 + 3 * text) * n % 97 for n in range(DRAFT_TOKENS)]
        ids = [13 + 17 * text + (3 + text) * n for n in range(DRAFT_ROWS)]
        caches = [_filled_cache(model, new_cache, prompt) for _ in range(2)]
        together = as_floats(model(mx.array([ids]), cache=caches[0])[0])
        for layer in caches[0]:
            for part in getattr(layer, "caches", (layer,)):
                held = int(getattr(part, "offset", len(prompt) + len(ids)))
                if held != len(prompt) + len(ids):
                    raise ValueError(
                        f"a {type(part).__name__} holds {held} rows of "
                        f"{len(prompt) + len(ids)} tokens"
                    )
        alone = [as_floats(model(mx.array([[each]]), cache=caches[1])[0, -1]) for each in ids]
        return Tried([*map(logits_error, together, alone)], [*prompt, *ids], alone[-1])

    reason = _why_not_alike(model, new_cache, tried)
    if reason is not None:
        log.info(
            "nothing is drafted, as the model cannot verify several tokens at once: %s", reason
        )
    return reason is None


def make_tree_forward(model: Any, new_cache: NewCache) -> TreeForward | None:
    """Return what runs forwards of trees, None where the model computes others in them.

    Takes eleven forwards of at most 16 tokens; up to three times as many, and one for each, where
    the first fails.
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
    """Whether rows on one trunk get the logits that each gets alone. Tries it; tells where not.

    A model's last bits grow from layer to layer, so that logits cannot tell rounding from a fault
    where numbers are coarse. Hence two comparisons. Each row's trunk and tail are joined and
    attended by upstream's own function: logits must then be those alone, which proves positions,
    masks, and that all layers are reached. Meanwhile each call is attended as it will be, and
    compared with that one.
    Takes eleven forwards of at most 36 tokens; up to three times as many, and one of 38 for each,
    where the first fails.
    """
    trial = _TrunkTrial(attend)

    def tried(text: int) -> Tried:
        trunk = [19 + 5 * text + (7 + 2 * n) * n % 89 for n in range(TRUNK_LENGTH)]
        tails = [[7 + 11 * text + (5 + 3 * n) * n % 97 for n in range(count)] for count in TAILS]
        prompts = [*(trunk + tail for tail in tails), tails[-1][: TAILS[0] + 1]]
        found = _tried_batch(model, new_cache, text, prompts, trial.merge)
        trial.check()
        return found

    take_back = reach_trunks(network, trial.attend)
    try:
        reason = _why_not_alike(model, new_cache, tried)
    finally:
        take_back()
    if reason is not None:
        log.info("each sequence of a batch keeps all of its KV, as none share a trunk: %s", reason)
    return reason is None


def as_floats(logits: mx.array) -> NDArray[Any]:
    """Return logits as numbers whose errors are not of their type."""
    return np.array(logits.astype(mx.float32)).astype(np.float64)


def logits_error(one: NDArray[Any], other: NDArray[Any]) -> float:
    """Return how unlike logits are: 0 where equal. Not a number where any of them is."""
    return 1 - float(np.corrcoef(one.ravel(), other.ravel())[0, 1])


# ------------------------------------------------------------ parts of trials


def _why_not_alike(model: Call, new_cache: NewCache, tried: Callable[[int], Tried]) -> str | None:
    """Return why a model does not compute together what it computes alone; None where it does.

    `tried` computes one of `TEXTS`. How unlike logits alone are in a forward of the whole text is
    computed where that decides.
    """
    reason = ""
    try:
        for text in range(TEXTS):
            errors, whole, alone = tried(text)
            together = float(np.max(errors))  # not a number where any of them is
            if together <= ERROR_MAX:
                return None
            otherwise = as_floats(model(mx.array([whole]), cache=new_cache())[0, -1])
            of_cut = logits_error(otherwise, alone)
            if together <= ERROR_MAX + CUT_ERRORS_MAX * min(of_cut, CUT_ERROR_MAX):
                return None
            reason = f"its logits are off by {together:.1e}, by {of_cut:.1e} cut otherwise"
    except Exception as error:  # whatever an architecture raises on what it was not made for
        reason = " ".join(str(error).split())[:200] or type(error).__name__
    return reason


def _tried_batch(
    model: Call,
    new_cache: NewCache,
    text: int,
    prompts: Sequence[list[int]],
    merge: Callable[[list[list[Any]]], list[Any]],
) -> Tried:
    """Feed tokens behind prompts, of which the second is the longest, in a batch and alone."""
    answers = [
        [13 + 18 * row + text * (17 - 10 * row) + n * (1 + row) for row in range(len(prompts))]
        for n in range(STEPS)
    ]
    caches = [_filled_cache(model, new_cache, prompt) for prompt in prompts]
    batch = merge(caches)
    # Models of text alone take no such argument.
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
    """Return the logits (rows, vocabulary) behind one more token for each row."""
    arguments = {"shift": list(shifts)} if shifts else {}
    return as_floats(model(mx.array(ids)[:, None], cache=cache, **arguments)[:, -1])


def _filled_cache(model: Call, new_cache: NewCache, prompt: list[int]) -> list[Any]:
    """Return a cache that holds a prompt, evaluated."""
    cache = new_cache()
    model(mx.array([prompt]), cache=cache)
    mx.eval([layer.state for layer in cache])
    return cache


class _TrunkTrial:
    """Attends layers that have trunks by upstream's function, and compares `attend` with it."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self._expected = 0  # calls, at least: layers that share KV are attended each
        self._calls = 0
        self._errors: list[tuple[mx.array, mx.array]] = []  # of each call, and what it may be

    def merge(self, caches: list[list[Any]]) -> list[Any]:
        """Begin anew; return a batch's layers in which all rows but the last share a trunk."""
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
        """Raise where attention was not seen, or not alike, however alike the logits are."""
        if self._calls < self._expected:
            raise ValueError(
                f"it attends {self._calls} of {self._expected} times where that is seen"
            )
        for error, most in [(float(error), float(most)) for error, most in self._errors]:
            if not error <= most:  # also where it is not a number
                raise ValueError(f"attention on a trunk is off by {error:.1e}, of {most:.1e}")


def _join_trunks(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of upstream's attention for rows that hold their trunks themselves.

    `cache` is the tails' then, which no attention but of packed rows asks for anything.
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
    """Return a trunk's K or V (1, KV heads, length, width), which ends with it."""
    if trunk is None:
        return mx.zeros((1, tails.shape[1], length, tails.shape[3]), tails.dtype)
    rows: mx.array = getattr(trunk, name)
    return mx.pad(rows, [(0, 0), (0, 0), (length - rows.shape[2], 0), (0, 0)])


def _in_float32(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with all numbers in float32, those of the trunks too."""
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
