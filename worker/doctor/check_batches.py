"""Checks that a sequence decodes in a batch as it does alone, and measures what rows cost."""

import statistics
import time
from collections.abc import Generator, Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream

from hearth.worker.doctor.check_context import CheckContext, LeftOut, Steps
from hearth.worker.doctor.difference import difference, rounding_limit, together
from hearth.worker.doctor.findings import Figure
from hearth.worker.doctor.upstream_forwards import (
    Answer,
    UpstreamSequence,
    as_numbers,
    cold_answer,
    forced_choice,
)
from hearth.worker.engine.decode.decoder import Decoder, Sequence as DecodedSequence
from hearth.worker.engine.decode.sampler import TokenChoice, greedy

BATCHES, ROWS = "batches", "decode rows"
LENGTHS: Final = (40, 47, 55, 61)  # tokens of the sequences that share a batch: it pads to one
STEPS: Final = 6  # tokens that each of them says
ROW_COUNTS: Final = (1, 2, 4, 8, 16)
PROMPT_TOKENS: Final = 33  # of each timed row
WARM_UP_STEPS: Final = 3  # joining, and the first forward of a shape
TIMED_STEPS: Final = 5
TIMED_FORWARDS: Final = WARM_UP_STEPS + TIMED_STEPS


def check_batches(context: CheckContext) -> Steps:
    """Decode four sequences alone, then in one batch: what each says may not depend on that."""
    context.begin(BATCHES)
    if not context.engine.decoder.is_mergeable:
        raise LeftOut("this model's sequences do not share forwards")
    context.needs(len(LENGTHS) * 2 * _row_bytes(context), "a batch of four")
    prompts = _prompts(context)
    alone = []
    for ids in prompts:
        alone.append((yield from cold_answer(context.model, ids, [len(ids) - 1], STEPS)))
    batched = yield from _batched(context, prompts, alone)
    found = together([difference(one, other) for one, other in zip(batched, alone, strict=True)])
    limit = rounding_limit(context.dtype, context.noise)
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
        choice = forced_choice(alone[number].tokens, seen[number])
        yield from _add(context, decoder, str(number), ids, choice)
    while min(map(len, seen)) < STEPS:
        decoder.step()
        yield
    shared = max(map(len, decoder.batch_keys), default=0)
    for number in range(len(prompts)):
        decoder.remove(str(number))
    if shared < len(prompts):
        raise LeftOut(f"only {shared} of {len(prompts)} sequences shared a forward")
    return [Answer(np.stack([as_numbers(row) for row in rows[:STEPS]])) for rows in seen]


def _add(
    context: CheckContext, decoder: Decoder, key: str, ids: Sequence[int], sampler: Any
) -> Steps:
    """Prefill a sequence and hand it to the decoder."""
    cache = context.engine.new_cache()
    context.engine.prefill(cache, list(ids[:-1]))
    yield
    decoder.add(
        DecodedSequence(
            key=key,
            cache=cache,
            tokens=list(ids[:-1]),
            tail=list(ids[-1:]),
            choice=TokenChoice(sampler, (), None),
            tokens_max=1 << 20,
        )
    )
    yield


def measure_rows(context: CheckContext) -> Steps:
    """Time a decode step of 1, 2, 4, 8 and 16 rows: in a batch, or tokens where there is none."""
    context.begin(ROWS)
    is_batch = context.engine.decoder.is_mergeable
    row_bytes = 2 * _row_bytes(context) if is_batch else 0
    fitting = [count for count in ROW_COUNTS if count * row_bytes <= context.room()]
    times: dict[int, float] = {}
    for count in fitting:
        timed = _time_batch(context, count) if is_batch else _time_tokens(context, count)
        times[count] = yield from timed
    if not times:
        raise LeftOut(f"one row takes {row_bytes / 1e6:,.0f} MB, which are not free")
    figures: dict[str, Figure] = {"rows_are": "sequences" if is_batch else "tokens of one"}
    figures["step_ms"] = times[1] * 1e3
    figures |= {f"cost_{count}": seconds / times[1] for count, seconds in times.items()}
    left_out = [count for count in ROW_COUNTS if count not in times]
    reason = f"no memory for {', '.join(map(str, left_out))} rows" if left_out else ""
    context.tell("ok", figures, reason)


def _time_batch(context: CheckContext, count: int) -> Generator[None, None, float]:
    """Return the seconds of one step of `count` sequences."""
    decoder = Decoder(context.model, generation_stream, True)
    token = _prompts(context)[0]
    for number in range(count):
        yield from _add(context, decoder, str(number), token[:PROMPT_TOKENS], greedy)
    times = []
    for number in range(TIMED_FORWARDS):
        began = time.perf_counter()
        decoder.step()
        mx.synchronize()
        if number >= WARM_UP_STEPS:
            times.append(time.perf_counter() - began)
        yield
    for number in range(count):
        decoder.remove(str(number))
    return statistics.median(times)


def _time_tokens(context: CheckContext, count: int) -> Generator[None, None, float]:
    """Return the seconds of one forward of `count` tokens."""
    sequence = UpstreamSequence(context.model)
    ids = _prompts(context)[0]
    yield from sequence.read(ids, [PROMPT_TOKENS])
    times = []
    for _ in range(TIMED_FORWARDS):
        times.append((yield from timed_forward(sequence, ids[:count])))
    return statistics.median(times[WARM_UP_STEPS:])


def timed_forward(sequence: UpstreamSequence, ids: Sequence[int]) -> Generator[None, None, float]:
    """Return the seconds of one forward of the tokens `ids`, behind what the sequence holds."""
    seconds, began = 0.0, time.perf_counter()
    for _ in sequence.answer(ids, 1):
        seconds = time.perf_counter() - began
        yield
    return seconds


def _row_bytes(context: CheckContext) -> int:
    return context.layers().slot_bytes(max(LENGTHS) + STEPS, None)
