"""Tells what the tokens of answers cost beyond the reading of their prompts.

New questions are asked for one token, then again for one token, then for a whole answer. The first
asking gives the time to the first token. What the last one took more than the second, in seconds
and in forwards, is decoding alone: a prompt's forwards are those before its first token, and both
find the same of it in the cache. So neither short answers nor servers that send late count wrong.

Forwards a token are (F - F1) / (T - T1). F are the calls of attention in the whole asking, over the
layers that attend, up to the end of the last answer; T are the tokens of all its answers, by usage;
F1 and T1 are those of the second asking. One answer without drafts has 1, four in one batch 0.25.
Streams that do not begin together share fewer forwards, and have more. A server whose
answers of one token take more forwards than the beginning of a whole one is subtracted too many:
vllm-mlx was measured at 0.23 for four answers, below the 0.25 that one batch allows. The same holds
of seconds: what a server does at the end of each request delays the others of the second asking,
and is subtracted. On models that answer in milliseconds that is much: Rapid-MLX was measured at
7,263 tokens a second in 16 streams, whose tokens over their wall time were 2,369.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hearth.commands.bench.measuring import measuring
from hearth.commands.bench.workload import Visit
from hearth.commands.bench.workloads.timed_stream import TimedAnswer, TimedClient, errors_of_answers
from hearth.commands.replay.ideal_cache import percentile

MORE_TOKENS_MIN: Final = 8  # of all answers, above one each: fewer say nothing of a speed
# Of what the machine did: rows of several tokens are drafts here, not reading.
TAKEN: Final = ("cpu_s", "memory_bytes", "written_bytes")
WARM_TOKENS: Final = 24
WARM_KEPT: Final = "timed answers warmed"


@dataclass(frozen=True, slots=True)
class Asking:
    """All questions asked once. `forwards` is None where the server has no meter."""

    answers: Sequence[TimedAnswer]
    wall_s: float  # in which answers were awaited
    forwards: float | None
    taken: Mapping[str, float] = field(default_factory=dict)  # what the machine did meanwhile

    @property
    def tokens(self) -> int:
        return sum(each.completion for each in self.answers)


@dataclass(frozen=True, slots=True)
class Decoded:
    """The three askings of the same questions."""

    new: Asking
    again: Asking
    whole: Asking

    @property
    def answers(self) -> list[TimedAnswer]:
        return [*self.new.answers, *self.again.answers, *self.whole.answers]

    def values(self) -> dict[str, float]:
        """Return all that can be said, by names of MEASURES."""
        failed = sum(1 for each in self.answers if each.error)
        values: dict[str, float] = {**self.whole.taken, "failed": failed}
        values |= {"requests": len(self.answers) - failed, "wall_s": self.whole.wall_s}
        ttfts = [each.ttft_s for each in self.new.answers if each.ttft_s is not None]
        values |= percentiles("ttft", ttfts, {"p50": 0.5, "p95": 0.95})
        if not failed:
            gaps = [gap for each in self.whole.answers for gap in each.gaps_s]
            values |= percentiles("gap", gaps, {"p50": 0.5, "p99": 0.99})
            values |= decode_values(self.again, self.whole)
        return values

    def errors(self) -> tuple[str, ...]:
        return errors_of_answers(self.answers)


def decode_values(again: Asking, whole: Asking) -> dict[str, float]:
    """Return tokens a second and forwards a token, of what `whole` has more than `again`."""
    values: dict[str, float] = {}
    tokens, spent_s = whole.tokens - again.tokens, whole.wall_s - again.wall_s
    if tokens >= MORE_TOKENS_MIN:
        if spent_s > 0:
            values["tokens_s"] = tokens / spent_s
        if whole.forwards is not None and again.forwards is not None:
            values["forwards_per_token"] = (whole.forwards - again.forwards) / tokens
    return values


def percentiles(
    name: str, values_s: Sequence[float], shares: Mapping[str, float]
) -> dict[str, float]:
    """Return `NAME_p50_s` and the like; nothing of nothing."""
    found = {f"{name}_{label}_s": percentile(values_s, share) for label, share in shares.items()}
    return {label: value for label, value in found.items() if value is not None}


# ---------------------------------------------------------------- asking


async def decoded(
    visit: Visit,
    client: TimedClient,
    questions: Sequence[str],
    tokens_max: int,
    more: Mapping[str, Any],
    *,
    is_serial: bool = False,
) -> Decoded:
    """Ask the questions three times; all at once, or one after another where `is_serial`."""

    async def asking(tokens: int) -> Asking:
        async with measuring(visit) as taken:
            began_s = time.perf_counter()
            if is_serial:
                answers = [await client.ask(each, tokens, more) for each in questions]
                wall_s = sum(each.ended_s - each.sent_s for each in answers)
            else:
                answers = await client.ask_all(questions, tokens, more)
                wall_s = max(each.ended_s for each in answers) - began_s
        values = taken.values()
        kept: dict[str, float] = {name: values[name] for name in TAKEN if name in values}
        # Of the block alone: what idle time reads behind it is no answer's.
        return Asking(answers, wall_s, taken.forwards, kept)

    # Each begins when the server rests after the one before.
    return Decoded(await asking(1), await asking(1), await asking(tokens_max))


async def warm_up(visit: Visit, client: TimedClient) -> None:
    """Have the same answer twice, once in the life of a server.

    The first one compiles kernels. The second one is drafted where a server drafts what it has
    said before, and one that tries the model before its first draft does it here.
    """
    if visit.kept.get(WARM_KEPT) is not visit.running:
        for _ in range(2):
            await client.ask("Count as far as you can.", WARM_TOKENS, {})
        visit.kept[WARM_KEPT] = visit.running
