"""Plays requests of a workload on a visited server, and tells what they were worth.

What it tells is what the client and the server say; what was really read, the meter says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Final

import aiohttp

from hearth.commands.bench.workload import Visit
from hearth.commands.replay.ideal_cache import ideal_cached, percentile
from hearth.commands.replay.player import Row, replay_together
from hearth.commands.replay.traces import Captured
from hearth.commands.stream_client import Outcome
from hearth.shared.paths import without_home

ERRORS_MAX: Final = 3  # told of one workload
ERROR_CHARS_MAX: Final = 200


async def ask(
    visit: Visit,
    rows: Sequence[Captured],
    *,
    tokens_max: int = 1,
    is_live: bool = False,
    is_serial: bool = False,
) -> list[Row]:
    """Send `rows` as they were captured; return how each went, in the order of sending."""
    return await ask_together(
        visit, [rows], tokens_max=tokens_max, is_live=is_live, is_serial=is_serial
    )


async def ask_together(
    visit: Visit,
    sessions: Sequence[Sequence[Captured]],
    *,
    tokens_max: int = 1,
    is_live: bool = False,
    is_serial: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> list[Row]:
    """Send several sessions at once; return how each request went, in the order of sending.

    A server that no longer answers is no error here: each request has failed then. One that does
    not know the dialect is asked in chat completions. `extra` goes into all bodies beside what the
    server always gets.
    """
    target = visit.running.target
    target = replace(
        target,
        tokens_max=tokens_max,
        is_live=is_live,
        is_serial=is_serial,
        extra={**target.extra, **(extra or {})},
    )
    try:
        done, _ = await replay_together(sessions, target)
        if not target.is_chat_only and done and all(map(_is_unknown_dialect, done)):
            done, _ = await replay_together(sessions, replace(target, is_chat_only=True))
    except (aiohttp.ClientError, TimeoutError, LookupError, ValueError) as error:  # no model listed
        lost = Outcome.refused(0, f"{type(error).__name__} {error}")
        rows = [row for session in sessions for row in session]
        done = [Row(at, row.trace, row.dialect, lost, None) for at, row in enumerate(rows)]
    return done


def _is_unknown_dialect(row: Row) -> bool:
    return row.dialect != "chat" and row.outcome.status == HTTPStatus.NOT_FOUND


def request_values(rows: Sequence[Row], before: Sequence[Row] = ()) -> dict[str, float]:
    """Return what MEASURES can tell of requests: counts, times, and the ideal where ids are told.

    The ideal has seen the prompts of `before` too, which the same server was asked earlier.
    """
    answered = [(row, row.tokens) for row in rows if row.tokens is not None]
    values: dict[str, float] = {
        "requests": len(answered),
        "failed": len(rows) - len(answered),
        "prompt_tokens": sum(tokens.prompt for _, tokens in answered),
        "claimed_tokens": sum(tokens.prefilled for _, tokens in answered),
    }
    waits_s = [row.outcome.ttft_s for row, _ in answered if row.outcome.ttft_s is not None]
    told = {
        "ideal_tokens": _ideal_tokens(rows, before),
        "ttft_p50_s": percentile(waits_s, 0.5),
        "ttft_p95_s": percentile(waits_s, 0.95),
    }
    return values | {name: value for name, value in told.items() if value is not None}


def _ideal_tokens(rows: Sequence[Row], before: Sequence[Row]) -> int | None:
    """Return what a perfect cache had to read; None where an answered prompt's ids are unknown.

    A prompt whose stream broke off is known to the later ones, but is not counted itself.
    """
    counted = [row for row in rows if row.tokens is not None]
    if not counted or any(not row.ids for row in counted):
        return None
    cached = ideal_cached([row.ids or None for row in (*before, *rows)])[len(before) :]
    return sum(
        len(row.ids) - hit
        for row, hit in zip(rows, cached, strict=True)
        if row.tokens is not None and row.ids and hit is not None
    )


def errors_of(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return what failed, once each and with how often."""
    counts: dict[str, int] = {}
    for row in rows:
        if row.outcome.error:
            error = without_home(" ".join(row.outcome.error.split()))[:ERROR_CHARS_MAX]
            counts[error] = counts.get(error, 0) + 1
    told = [f"{count}x {error}" if count > 1 else error for error, count in counts.items()]
    return tuple(told[:ERRORS_MAX])
