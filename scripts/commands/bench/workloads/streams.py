"""Times answers that are written at once: 1, 4, 8 and 16 of them."""

from collections.abc import Sequence
from functools import partial
from typing import Final

from hearth.commands.bench.workload import Measured, Start, Visit, Workload
from hearth.commands.bench.workloads.decode_cost import Decoded, decoded, warm_up
from hearth.commands.bench.workloads.timed_stream import TimedAnswer, salt_of, timed_client

COUNTS: Final = (1, 4, 8, 16)
TRIES_MAX: Final = 4  # of all new questions: no model must end an answer of any
# Measures that compare only answers of full length: after one has ended, fewer are written at once.
OF_FULL_ONES: Final = ("tokens_s", "forwards_per_token", "gap_p50_s", "gap_p99_s")
OF_WORK: Final = ("cpu_s", "wall_s", "written_bytes")
SUBJECTS: Final = (
    "a lighthouse is built and kept",
    "a compiler turns text into machine code",
    "bread rises and is baked",
    "a river changes its bed",
    "a database keeps what was committed",
    "an orchestra tunes and rehearses",
    "a bridge carries its load",
    "a parser recovers from an error",
)


def questions(salt: str, count: int, attempt: int) -> list[str]:
    """Return as many different questions that ask for long answers; new ones for each attempt."""
    numbers = range(attempt * count, (attempt + 1) * count)
    return [
        f"[{salt}, task {number + 1}] Explain in at least three thousand words how"
        f" {SUBJECTS[number % len(SUBJECTS)]}. Begin at once and leave nothing out."
        for number in numbers
    ]


async def run_streams(count: int, visit: Visit) -> Measured:
    """Have `count` answers written at once; see `decode_cost` for what is counted."""
    tokens = visit.scale.answer_tokens
    salt = salt_of(visit, f"streams-{count}")
    async with timed_client(visit) as client:
        await warm_up(visit, client)
        for attempt in range(TRIES_MAX):
            found = await decoded(visit, client, questions(salt, count, attempt), tokens, {})
            short = short_count(found.whole.answers, tokens)
            if not short or found.errors():
                break
    return measured_of(found, short)


def short_count(answers: Sequence[TimedAnswer], tokens: int) -> int:
    """Return how many answers are shorter than was asked for."""
    return sum(1 for each in answers if not each.is_full(tokens))


def measured_of(found: Decoded, short: int) -> Measured:
    values, errors = found.values(), found.errors()
    if short:
        left_out = (*OF_FULL_ONES, *OF_WORK)
        values = {name: value for name, value in values.items() if name not in left_out}
    if short and not errors:
        answers = len(found.whole.answers)
        errors = (f"{short} of {answers} answers ended early, in {TRIES_MAX} tries",)
    return Measured(values, errors=errors)


def _about(count: int) -> str:
    many = "One answer is" if count == 1 else f"{count} different answers are"
    return (
        f"{many} written{' at once' if count > 1 else ''}, at full length, to questions that were"
        " asked for one token before: tokens by the server's usage, and their seconds and forwards"
        " (calls of attention over its layers) beyond those up to the first token. Gaps are between"
        " events with text, and some servers put several tokens in one event. A server that does"
        " much when a request ends is so subtracted more than it should be, and looks faster; its"
        " wall time has all of it."
    )


WORKLOADS: Final = tuple(
    Workload(
        name=f"streams-{count}",
        about=_about(count),
        start=Start.RESTARTED,
        run=partial(run_streams, count),
        is_quick=count in (1, 4),
    )
    for count in COUNTS
)
