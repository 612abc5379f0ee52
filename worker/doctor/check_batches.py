"""Checks that a sequence decodes in a batch as it does alone."""

from collections.abc import Generator
from typing import Any, Final

import numpy as np
from mlx_lm.generate import generation_stream

from hearth.worker.doctor.check_context import CheckContext, LeftOut, Steps
from hearth.worker.doctor.findings import Figure
from hearth.worker.doctor.upstream_forwards import (
    Answer,
    as_numbers,
    cold_answer,
    difference,
    forced_choice,
    rounding_limit,
    together,
)
from hearth.worker.engine.decode.decoder import Decoder, Sequence as DecodedSequence
from hearth.worker.engine.decode.sampler import TokenChoice

NAME: Final = "batches"
LENGTHS: Final = (40, 47, 55, 61)  # tokens of the sequences that share a batch: it pads to one
STEPS: Final = 6  # tokens that each of them says


def check_batches(context: CheckContext) -> Steps:
    """Decode four sequences alone, then in one batch: what each says may not depend on that.

    Each is also read in two forwards instead of one: a batch may change no more than that rounds.
    """
    context.begin(NAME)
    if not context.engine.decoder.is_mergeable:
        raise LeftOut("this model's sequences do not share forwards")
    row_bytes = context.layers().slot_bytes(max(LENGTHS) + STEPS, None)
    context.needs(len(LENGTHS) * 2 * row_bytes, "a batch of four")
    prompts = _prompts(context)
    alone, apart = [], []
    for ids in prompts:
        end = len(ids) - 1
        one = yield from cold_answer(context.model, ids, [end], STEPS)
        two = yield from cold_answer(context.model, ids, [end // 2, end], STEPS, one.tokens)
        alone.append(one)
        apart.append(difference(two, one))
    batched = yield from _batched(context, prompts, alone)
    found = together([difference(one, other) for one, other in zip(batched, alone, strict=True)])
    limit = rounding_limit(context.dtype, together(apart).relative)
    is_fault = not found.relative <= limit
    figures: dict[str, Figure] = {
        "rows": len(prompts),
        "rounding_limit": limit,
        **found.figures(),
    }
    reason = f"{len(prompts)} rows in a batch and each alone: {found}" if is_fault else ""
    context.tell("fault" if is_fault else "ok", figures, reason)


def _prompts(context: CheckContext) -> list[list[int]]:
    assert context.canary is not None
    ids = [token for turn in context.canary.turns for token in turn]
    ids = (ids * (1 + (max(LENGTHS) + len(LENGTHS)) // len(ids)))[: max(LENGTHS) + len(LENGTHS)]
    return [ids[number : number + length] for number, length in enumerate(LENGTHS)]


def _batched(
    context: CheckContext, prompts: list[list[int]], alone: list[Answer]
) -> Generator[None, None, list[Answer]]:
    """Return what each sequence says in one batch, given the tokens that it said alone."""
    decoder = Decoder(context.model, generation_stream, True)
    seen: list[list[Any]] = [[] for _ in prompts]
    for number, ids in enumerate(prompts):
        cache = context.engine.new_cache()
        context.engine.prefill(cache, list(ids[:-1]))
        yield
        sampler = forced_choice(alone[number].tokens, seen[number])
        decoder.add(
            DecodedSequence(
                key=str(number),
                cache=cache,
                tokens=list(ids[:-1]),
                tail=list(ids[-1:]),
                choice=TokenChoice(sampler, (), None),
                tokens_max=1 << 20,
            )
        )
        yield
    while min(map(len, seen)) < STEPS:
        decoder.step()
        yield
    shared = max(map(len, decoder.batch_keys), default=0)
    for number in range(len(prompts)):
        decoder.remove(str(number))
    if shared < len(prompts):
        raise LeftOut(f"only {shared} of {len(prompts)} sequences shared a forward")
    return [Answer(np.stack([as_numbers(row) for row in rows[:STEPS]])) for rows in seen]
