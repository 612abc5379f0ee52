"""Replays captured agent sessions against servers of one rank and of several, and counts tokens."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from hearth.commands.replay.player import Row, Target, replay
from hearth.commands.replay.shortened_sessions import shortened
from hearth.commands.replay.traces import Captured, load_trace
from scripts.chaos.rank_server import rank_server, url_of
from scripts.fixtures.rank_fixtures import rank_fixture_dir

ANSWER_TOKENS: Final = 8
TEXT_CHARS: Final = 600  # of each text of a session: whole ones take an hour on two cores


async def _replayed(model: Path, ranks: int, rows: Sequence[Captured]) -> tuple[list[Row], int]:
    """Return how each request went, and the bytes of all KV that rank 0 held at the end."""
    async with rank_server(model, ranks) as server:
        target = Target(url_of(server), tokens_max=ANSWER_TOKENS, is_live=True, is_serial=True)
        told, _ = await replay(rows, target)
        cache = (await server.cache())["workers"][0]
        return told, cache["bytes"] + cache["slots_bytes"]


def prefilled_of(rows: Sequence[Row]) -> list[int | None]:
    return [row.tokens.prefilled if row.tokens is not None else None for row in rows]


def trace_rows(
    paths: Sequence[Path], name: str, sizes: Sequence[int], limit: int
) -> list[dict[str, Any]]:
    """Return for each trace and number of ranks what was prefilled, beside one rank's."""
    model = rank_fixture_dir(name)
    found = []
    for path in paths:
        captured = shortened(load_trace(path), TEXT_CHARS)[:limit]
        lone, lone_bytes = asyncio.run(_replayed(model, 1, captured))
        for size in sizes:
            ranked, ranked_bytes = asyncio.run(_replayed(model, size, captured))
            pairs = list(zip(prefilled_of(lone), prefilled_of(ranked), strict=True))
            found.append(
                {
                    "trace": path.name.partition(".")[0],
                    "fixture": name,
                    "ranks": size,
                    "requests": len(pairs),
                    "answered": sum(row.outcome.is_answered for row in ranked),
                    "prefilled_lone": sum(one or 0 for one, _ in pairs),
                    "prefilled": sum(other or 0 for _, other in pairs),
                    "requests_equal": sum(one == other for one, other in pairs),
                    "kv_bytes_lone": lone_bytes,
                    "kv_bytes_of_rank": ranked_bytes,
                }
            )
    return found
