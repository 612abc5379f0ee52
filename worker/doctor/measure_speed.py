"""Measures how fast the model reads and decodes, and which chunk of a prefill is the fastest."""

import time
from collections.abc import Generator, Mapping, Sequence
from typing import Final

from hearth.worker.doctor.check_context import (
    DEPTH_MIN,
    CheckContext,
    LeftOut,
    Steps,
    make_canary,
)
from hearth.worker.doctor.findings import Figure
from hearth.worker.doctor.kept_conversation import bytes_needed
from hearth.worker.doctor.upstream_forwards import UpstreamSequence

SPEED, CHUNK = "speed", "chunk"
PROBE_TOKENS: Final = 256
CHUNKS: Final = (256, 512, 1024, 2048)
CHUNK_GAIN_MIN: Final = 0.10  # another chunk makes what is kept fast: it has to be worth it
READ_ROUNDS: Final = 3  # of all sizes in turn; the first warms kernels up and is not counted
# What the checks of the canary read and decode altogether, in lengths of its last prompt and in
# answers: cold, exact, default, forks, drafts. Of rows that a draft is verified in
# it counts what they cost on a GPU, some one and a half tokens each four.
PROMPTS_READ: Final = 9
ANSWERS_DECODED: Final = 30
CANARY_SHARE: Final = 0.6  # of the time; the rest is for batches, chunks and SSD
ANSWER_TOKENS_MIN: Final = 4


def measure_speed(context: CheckContext) -> Steps:
    """Measure reading and decoding, and make the canary as long as time and memory allow."""
    context.begin(SPEED)
    tokens = min(context.rule.chunk, PROBE_TOKENS)
    ids = _ids(context, 2 * tokens)
    sequence = UpstreamSequence(context.model)
    began = 0.0
    for _ in sequence.read(ids, [tokens, 2 * tokens]):
        now = time.perf_counter()
        context.prefill_tokens_per_s = tokens / (now - began) if began else 0.0
        began = time.perf_counter()
        yield
    times = []
    began = time.perf_counter()
    for _ in sequence.answer(ids[:1], 4):
        times.append(time.perf_counter() - began)
        yield
        began = time.perf_counter()
    context.decode_s = min(times)
    depth, answer_tokens, reason = _canary_size(context)
    context.canary = make_canary(context.loaded.tokenizer, context.rule.marks, depth, answer_tokens)
    figures: dict[str, Figure] = {
        "prefill_tokens_per_s": context.prefill_tokens_per_s,
        "decode_tokens_per_s": 1 / max(context.decode_s, 1e-9),
        "canary_depth": context.canary.depth,
        "canary_answer_tokens": answer_tokens,
    }
    context.tell("ok", figures, reason)


def _canary_size(context: CheckContext) -> tuple[int, int, str]:
    """Return the canary's depth, its answers' length, and why it is shorter than it could be."""
    answer_tokens, wanted = context.rules.answer_tokens, context.rules.depth_max
    seconds = context.left_s * CANARY_SHARE
    while (
        answer_tokens > ANSWER_TOKENS_MIN
        and ANSWERS_DECODED * answer_tokens * context.decode_s > seconds / 2
    ):
        answer_tokens //= 2
    seconds -= ANSWERS_DECODED * answer_tokens * context.decode_s
    affordable = int(seconds * context.prefill_tokens_per_s / PROMPTS_READ)
    depth = max(min(DEPTH_MIN, wanted), min(wanted, affordable))
    reason = "" if depth == wanted else f"{depth} tokens deep, not {wanted}: time"
    try:
        layers = context.layers()
    except LeftOut:
        return depth, answer_tokens, reason
    while depth > DEPTH_MIN and bytes_needed(layers, depth, context.rule.chunk) > context.room():
        depth = max(DEPTH_MIN, depth // 2)
        reason = f"{depth} tokens deep, not {wanted}: memory"
    return depth, answer_tokens, reason


def measure_chunk(context: CheckContext) -> Steps:
    """Read the same tokens in chunks of several sizes, as far as time and memory allow."""
    context.begin(CHUNK)
    default, rate = context.rules.default_chunk, context.prefill_tokens_per_s
    sizes = sorted({*CHUNKS, default})
    budget_s = context.left_s * CANARY_SHARE
    affordable = int(budget_s * rate / (READ_ROUNDS * len(sizes)))
    tokens = min(max(CHUNKS), affordable)
    largest = min(tokens, max(context.forward_tokens_max, default))
    sizes = [size for size in sizes if size <= largest]
    if default not in sizes or len(sizes) < 2:
        raise LeftOut(f"{tokens} tokens can be read in the time that is left")
    context.needs(context.layers().slot_bytes(tokens, None), f"the KV of {tokens} tokens")
    ids = _ids(context, tokens)
    rounds: list[dict[int, float]] = []
    for _ in range(READ_ROUNDS):
        rounds.append({})
        for size in sizes:
            rounds[-1][size] = yield from _tokens_per_s(context, ids, size)
    best = best_chunk(rounds[1:], default)
    figures: dict[str, Figure] = {
        f"tokens_per_s_{size}": max(each[size] for each in rounds[1:]) for size in sizes
    }
    figures |= {"tokens": tokens, "default": default, "best": best or default}
    left_out = [size for size in CHUNKS if size not in sizes]
    reason = f"no time for {', '.join(map(str, left_out))}" if left_out else ""
    context.tell("ok", figures, reason)


def best_chunk(rounds: Sequence[Mapping[int, float]], default: int) -> int | None:
    """Return the chunk that was faster than the default by CHUNK_GAIN_MIN in every round.

    Of several the fastest; None where the default may as well stay. One round alone would take
    what else the machine did meanwhile for a gain.
    """
    gains = {size: min(each[size] / each[default] for each in rounds) - 1 for size in rounds[0]}
    best = max(gains, key=lambda size: gains[size])
    return best if gains[best] >= CHUNK_GAIN_MIN else None


def _tokens_per_s(context: CheckContext, ids: list[int], size: int) -> Generator[None, None, float]:
    cache, seconds = context.engine.new_cache(), 0.0
    for start in range(0, len(ids), size):
        began = time.perf_counter()
        context.engine.prefill(cache, ids[start : start + size])
        seconds += time.perf_counter() - began
        yield
    return len(ids) / seconds


def _ids(context: CheckContext, count: int) -> list[int]:
    """Return tokens of the canary's text."""
    made = make_canary(context.loaded.tokenizer, context.rule.marks, 2 * count, 0)
    return [token for turn in made.turns for token in turn][:count]
