"""Compares answers of a warm cache with those of no cache, by digests of what was said.

`answers` asks the linear session again once it has been read, so that nearly all comes from the
cache. `answers-cold` asks the same of the server with its cache switched off.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

from hearth.commands.bench.measuring import measuring
from hearth.commands.bench.workload import Measured, Start, Visit, Workload
from hearth.commands.bench.workloads.ask import ask, errors_of, request_values
from hearth.commands.bench.workloads.counted_tokens.captured_sessions import CHAT, LINEAR
from hearth.commands.bench.workloads.sessions import session
from hearth.commands.replay.player import Row
from hearth.commands.replay.traces import Captured

READ_ROWS: Final = "linear rows"  # of `Visit.kept`: how the session went, for a restart
NAME: Final = "answers"
COLD_NAME: Final = "answers-cold"
ANSWER_TOKENS: Final = 16
DIGEST_CHARS: Final = 16
NO_DIGEST: Final = ""  # of an answer that did not come, or that proves nothing
WHOLE_SHARE: Final = 0.98  # of a prompt: a token or two that are read alone are not counted
NOT_COLD: Final = "its cache could not be switched off: a prompt was not read whole"
# What a prompt costs is told by other workloads: verified drafts would be counted as read here.
TOLD: Final = ("requests", "failed", "prompt_tokens", "ttft_p50_s", "ttft_p95_s", "wall_s")


def linear_session(visit: Visit) -> list[Captured]:
    return session(CHAT, visit, LINEAR)


async def run_warm(visit: Visit) -> Measured:
    """Ask a session that `linear` has read; it is read first where nobody did."""
    rows = linear_session(visit)
    errors: tuple[str, ...] = ()
    if LINEAR not in visit.kept:
        errors = errors_of(await ask(visit, rows, is_serial=True))
    done = await ask(visit, rows, tokens_max=ANSWER_TOKENS, is_serial=True)
    visit.kept[READ_ROWS] = done
    digests = tuple(digest(row) for row in done)
    return Measured(told(request_values(done)), digests, (*errors, *errors_of(done)))


async def run_cold(visit: Visit) -> Measured:
    async with measuring(visit) as taken:
        done = await ask(visit, linear_session(visit), tokens_max=ANSWER_TOKENS, is_serial=True)
    values = {**request_values(done), **taken.values()}
    read = values.get("read_tokens") if visit.running.is_metered else None
    digests = cold_digests(done, read)
    answered = sum(row.tokens is not None for row in done)
    is_cold = answered == sum(each != NO_DIGEST for each in digests)
    return Measured(told(values), digests, (*errors_of(done), *(() if is_cold else (NOT_COLD,))))


def cold_digests(rows: Sequence[Row], read_tokens: float | None) -> tuple[str, ...]:
    """Return a digest of each answer whose prompt was read whole, by the server's own usage.

    None is returned of any where the meter has seen less than all prompts.
    """
    prompts = [row.tokens.prompt for row in rows if row.tokens is not None]
    if read_tokens is not None and read_tokens < sum(prompts) * WHOLE_SHARE:
        return (NO_DIGEST,) * len(rows)
    return tuple(digest(row) if _is_whole(row) else NO_DIGEST for row in rows)


def _is_whole(row: Row) -> bool:
    return row.tokens is not None and row.tokens.prefilled >= row.tokens.prompt * WHOLE_SHARE


def digest(row: Row) -> str:
    """Return the digest of an answer, what was thought before it, and how many tokens it took.

    A server that shows no text of a broken answer still tells its length.
    """
    if row.tokens is None:
        return NO_DIGEST
    reading = row.outcome.reading
    parts = ("".join(reading.reasoning), "".join(reading.text), str(row.tokens.completion))
    said = "\0".join(parts)
    return hashlib.sha256(said.encode()).hexdigest()[:DIGEST_CHARS]


def told(values: Mapping[str, float]) -> dict[str, float]:
    return {name: values[name] for name in TOLD if name in values}


WORKLOADS: Final = (
    Workload(
        NAME,
        f"The linear session once more, {ANSWER_TOKENS} tokens an answer, from the cache.",
        Start.FRESH,
        run_warm,
    ),
    Workload(
        COLD_NAME,
        "The same with the cache switched off: the answers that a cache must not change.",
        Start.COLD,
        run_cold,
    ),
)
