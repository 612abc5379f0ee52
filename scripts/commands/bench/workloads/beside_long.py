"""Times a long prompt that is read beside three streams, and what the streams lose meanwhile.

A stream is one answer after another, so that it lasts as long as the prompt is read. Its last
answer is hung up on, and its usage never told: what counts is when text arrived. The wait for the
first text of a next answer is a gap as any other.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Final

from hearth.commands.bench.measuring import measuring
from hearth.commands.bench.workload import Measured, Start, Visit, Workload
from hearth.commands.bench.workloads.decode_cost import percentiles, warm_up
from hearth.commands.bench.workloads.streams import questions
from hearth.commands.bench.workloads.timed_stream import (
    TOGETHER_S,
    TimedAnswer,
    TimedClient,
    errors_of_answers,
    gaps,
    salt_of,
    timed_client,
)

STREAMS: Final = 3
# Of each answer, in `answer_tokens`: a server that answers one after another comes to the prompt.
ANSWER_TIMES: Final = 8
ALONE_TIMES: Final = 0.5  # in `answer_tokens`: arrivals of each stream before the prompt is sent
ANSWERS_MAX: Final = 64  # of each stream
AFTER_S_MAX: Final = 10.0  # for a stream's next text once the prompt is read
LOOK_S: Final = 0.005
PROBE_WORDS: Final = (100, 300)  # of two prompts that tell what a word costs


class StreamBeside:
    """One answer after another, and when their text came. Owner: the event loop."""

    def __init__(self) -> None:
        self.arrivals_s: list[float] = []
        self.error = ""
        self.is_over = False  # it failed, or has no more to ask

    def note(self, now_s: float) -> None:
        if not self.arrivals_s or now_s - self.arrivals_s[-1] >= TOGETHER_S:
            self.arrivals_s.append(now_s)

    async def write(self, client: TimedClient, asked: Sequence[str], tokens_max: int) -> None:
        """Have answers written until this is cancelled."""
        for question in asked:
            arrived = len(self.arrivals_s)
            answer = await client.ask(question, tokens_max, {}, self.note)
            if not answer.error and len(self.arrivals_s) == arrived:
                # All of it was taken out, as some servers do with thoughts: there is no stream.
                self.error = "an answer had no text"
            self.error = answer.error or self.error
            if self.error:
                break
        self.is_over = True


def gaps_within(arrivals_s: Sequence[float], began_s: float, ended_s: float) -> list[float]:
    """Return the gaps that lie in the span, those that reach into it from either side whole."""
    return [
        later - earlier
        for earlier, later in pairwise(arrivals_s)
        if later > began_s and earlier < ended_s
    ]


def gap_values(
    streams: Sequence[Sequence[float]], sent_s: float, first_s: float
) -> dict[str, float]:
    """Return the gaps while the prompt was read, and how they compare with those before it."""
    alone = [gap for each in streams for gap in gaps([at for at in each if at <= sent_s])]
    beside = [gap for each in streams for gap in gaps_within(each, sent_s, first_s)]
    values = percentiles("gap", beside, {"p50": 0.5, "p99": 0.99})
    if beside and alone:
        values["gap_over_alone"] = fmean(beside) / fmean(alone)
    return values


# ---------------------------------------------------------------- the long prompt


def words(count: int) -> str:
    """Return pseudo-words, no two of one hundred alike."""
    return " ".join(f"item{number % 97}-{number * 7919 % 1000}" for number in range(count))


async def words_of(client: TimedClient, salt: str, tokens: int) -> int | None:
    """Return how many words are about as many tokens, by two prompts; None without usage.

    By their difference: templates of servers differ in what stands around a prompt.
    """
    few, many = PROBE_WORDS
    asked = [f"[{salt}, probe {count}] {words(count)}" for count in PROBE_WORDS]
    short, long = [await client.ask(each, 1, {}) for each in asked]
    if short.error or long.error or long.prompt <= short.prompt:
        return None
    return round(tokens * (many - few) / (long.prompt - short.prompt))


# ---------------------------------------------------------------- the workload


async def run_beside_long(visit: Visit) -> Measured:
    """Send the long prompt once all streams are being written."""
    salt = salt_of(visit, "beside-long")
    async with timed_client(visit) as client:
        await warm_up(visit, client)
        count = await words_of(client, salt, visit.scale.long_tokens)
        if count is None:
            return Measured({"failed": 1}, errors=("the server told no usage",))
        asked = f"[{salt}, long] {words(count)} What is said here?"
        async with measuring(visit) as taken:
            streams, long = await _beside(client, salt, asked, visit.scale.answer_tokens)
    return measured_of(streams, long, taken.values())


async def _beside(
    client: TimedClient, salt: str, asked: str, answer_tokens: int
) -> tuple[list[StreamBeside], TimedAnswer]:
    streams = [StreamBeside() for _ in range(STREAMS)]
    candidates = questions(salt, STREAMS * ANSWERS_MAX, 0)
    tokens_max = answer_tokens * ANSWER_TIMES
    tasks = [
        asyncio.create_task(each.write(client, candidates[number::STREAMS], tokens_max))
        for number, each in enumerate(streams)
    ]
    try:
        begun = max(2, int(answer_tokens * ALONE_TIMES))
        await _until(lambda: all(len(each.arrivals_s) >= begun or each.is_over for each in streams))
        long = await client.ask(asked, 1, {})
        behind = [len(each.arrivals_s) for each in streams]
        await _until(
            lambda: all(
                each.is_over or len(each.arrivals_s) > count
                for each, count in zip(streams, behind, strict=True)
            ),
            AFTER_S_MAX,
        )
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return streams, long


async def _until(is_so: Callable[[], bool], wait_s_max: float = 0.0) -> None:
    """Wait for something; at most so long, where a limit is given."""
    began_s = time.perf_counter()
    while not is_so() and not 0 < wait_s_max < time.perf_counter() - began_s:
        await asyncio.sleep(LOOK_S)


def measured_of(
    streams: Sequence[StreamBeside], long: TimedAnswer, taken: Mapping[str, float]
) -> Measured:
    failed = bool(long.error) + sum(1 for each in streams if each.error)
    errors = errors_of_answers([long]) + tuple(each.error for each in streams if each.error)
    values: dict[str, float] = {"failed": failed, "requests": 1 + STREAMS - failed}
    if "memory_bytes" in taken:
        values["memory_bytes"] = taken["memory_bytes"]
    if long.ttft_s is None:
        return Measured(values, errors=errors)
    values |= {"ttft_p50_s": long.ttft_s, "prompt_tokens": long.prompt}
    values |= gap_values([each.arrivals_s for each in streams], long.sent_s, long.first_s)
    if ended := sum(1 for each in streams if each.is_over and not each.error):
        errors += (f"{ended} of {STREAMS} streams ended before the prompt was read",)
    return Measured(values, errors=errors)


WORKLOADS: Final = (
    Workload(
        name="beside-long",
        about=(
            "A new long prompt is read beside three streams, each one answer after another: the"
            " time to its first token, the gaps in the text of the streams meanwhile, and how much"
            " longer they are than before, on average. Gaps are between events, which may hold"
            " several tokens."
        ),
        start=Start.RESTARTED,
        run=run_beside_long,
    ),
)
