"""Times a long prompt that is read beside three answers, and what the answers lose meanwhile.

The answers are hung up on when the long prompt has its first token, so their usage is never told:
what counts of them is when text arrived.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from hearth.commands.bench.measuring import measuring
from hearth.commands.bench.workload import Measured, Scale, Start, Visit, Workload
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
# Of each answer, in `answer_tokens`: it lasts as long as the prompt is read, and yet has an end,
# for a server that answers one after another.
ANSWER_TIMES: Final = 16
ALONE_TIMES: Final = 0.5  # in `answer_tokens`: arrivals of each stream before the prompt is sent
TRIES_MAX: Final = 4  # of a stream, to have an answer that does not end at once
AFTER_S_MAX: Final = 10.0  # for an answer's next text once the prompt is read
LOOK_S: Final = 0.005
PROBE_WORDS: Final = (100, 300)  # of two prompts that tell what a word costs


class AnswerBeside:
    """One answer that is being written, and when its text came. Owner: the event loop."""

    def __init__(self) -> None:
        self.arrivals_s: list[float] = []
        self.error = ""
        self.is_over = False  # it ended by itself

    def note(self, now_s: float) -> None:
        if not self.arrivals_s or now_s - self.arrivals_s[-1] >= TOGETHER_S:
            self.arrivals_s.append(now_s)

    async def write(self, client: TimedClient, asked: Sequence[str], tokens_max: int) -> None:
        """Have an answer written; another one where it ends before the long prompt is sent."""
        for question in asked:
            self.arrivals_s.clear()
            answer = await client.ask(question, tokens_max, {}, self.note)
            if answer.error or answer.is_full(tokens_max):
                self.error = answer.error
                break
        self.is_over = True


def gaps_within(arrivals_s: Sequence[float], began_s: float, ended_s: float) -> list[float]:
    """Return the gaps that lie in the span, those that reach into it from either side whole."""
    return [
        later - earlier
        for earlier, later in zip(arrivals_s, arrivals_s[1:], strict=False)
        if later > began_s and earlier < ended_s
    ]


def gap_values(
    streams: Sequence[Sequence[float]], sent_s: float, first_s: float
) -> dict[str, float]:
    """Return the gaps while the prompt was read, and how they compare with those before it."""
    alone = [gap for each in streams for gap in gaps([at for at in each if at <= sent_s])]
    beside = [gap for each in streams for gap in gaps_within(each, sent_s, first_s)]
    values = percentiles("gap", beside, {"p50": 0.5, "p99": 0.99})
    before = percentiles("gap", alone, {"p50": 0.5})
    if values and before.get("gap_p50_s"):
        mean_s = sum(beside) / len(beside)
        values["gap_over_alone"] = mean_s / (sum(alone) / len(alone))
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
    """Send the long prompt once three answers are being written."""
    salt = salt_of(visit, "beside-long")
    async with timed_client(visit) as client:
        await warm_up(visit, client)
        count = await words_of(client, salt, visit.scale.long_tokens)
        if count is None:
            return Measured({"failed": 1}, errors=("the server told no usage",))
        asked = f"[{salt}, long] {words(count)} What is said here?"
        async with measuring(visit) as taken:
            streams, long = await _beside(client, salt, asked, visit.scale.answer_tokens)
    return _measured(streams, long, taken.values())


async def _beside(
    client: TimedClient, salt: str, asked: str, answer_tokens: int
) -> tuple[list[AnswerBeside], TimedAnswer]:
    streams = [AnswerBeside() for _ in range(STREAMS)]
    candidates = questions(salt, STREAMS * TRIES_MAX, 0)
    tokens_max = answer_tokens * ANSWER_TIMES
    tasks = [
        asyncio.create_task(each.write(client, candidates[number::STREAMS], tokens_max))
        for number, each in enumerate(streams)
    ]
    try:
        # Those that wait behind others for their turn have no text for as long as those write.
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


def _measured(
    streams: Sequence[AnswerBeside], long: TimedAnswer, taken: Mapping[str, float]
) -> Measured:
    failed = bool(long.error) + sum(1 for each in streams if each.error)
    errors = errors_of_answers([long]) + tuple(each.error for each in streams if each.error)
    values: dict[str, float] = {"failed": failed, "requests": 1 + STREAMS - failed}
    if "memory_bytes" in taken:
        values["memory_bytes"] = taken["memory_bytes"]
    if long.ttft_s is None or long.first_s is None:
        return Measured(values, errors=errors)
    values["ttft_p50_s"] = long.ttft_s
    beside = [each.arrivals_s for each in streams if _was_written(each, long.sent_s)]
    values |= gap_values(beside, long.sent_s, long.first_s)
    if len(beside) < STREAMS:
        errors += (f"{len(beside)} of {STREAMS} answers were written when the prompt was sent",)
    elif ended := sum(1 for each in streams if each.arrivals_s[-1] < long.first_s):
        errors += (f"{ended} of {STREAMS} answers ended while the prompt was read",)
    return Measured(values, errors=errors)


def _was_written(stream: AnswerBeside, sent_s: float) -> bool:
    return bool(stream.arrivals_s) and stream.arrivals_s[0] <= sent_s < stream.arrivals_s[-1]


def _read(scale: Scale) -> int:
    return scale.long_tokens + sum(PROBE_WORDS) * 4


WORKLOADS: Final = (
    Workload(
        name="beside-long",
        about=(
            "A new long prompt is read while three answers are written: the time to its first"
            " token, the gaps between the text of the answers meanwhile, and how much longer they"
            " are than before, on average. Gaps are between events, which may hold several tokens."
        ),
        start=Start.RESTARTED,
        run=run_beside_long,
        read_tokens=_read,
    ),
)
