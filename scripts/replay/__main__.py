#!/usr/bin/env python
"""Replays captured agent sessions against a server and compares its cache with the ideal cache.

    python -m scripts.replay TRACE... --base-url http://127.0.0.1:4000 [--key K] [--live]

Each request goes to the path it was captured on, in captured order; those that overlapped in the
capture overlap here unless --serial. Sessions follow each other, or run at once with --together,
and are then held to one ideal of them all. The ideal needs the prompts' token ids, which Hearth
tells with LOG_PROMPTS=true and a PROXY_API_KEY. A 4xx is a refusal, left out of all sums. Any other
error is exit status 1.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import aiohttp

from hearth.commands.bench.workloads.ask import request_values
from hearth.commands.replay.ideal_cache import ideal_cached, percentile
from hearth.commands.replay.player import Row, Target, replay_together
from hearth.commands.replay.traces import load_trace

WORST_MAX: Final = 5  # requests that the report names
FLAG: Final = {"action": "store_true"}
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "traces": {"nargs": "+", "type": Path, "metavar": "TRACE"},
    "--base-url": {"default": "http://127.0.0.1:4000"},
    "--key": {"default": "local"},
    "--model": {"default": "", "help": "default the first that the server lists"},
    "--max-tokens": {"type": int, "default": 8},
    "--limit": {"type": int, "default": 0, "help": "requests of each trace; 0 = all"},
    "--live": FLAG | {"help": "send back what this server answered"},
    "--together": FLAG | {"help": "all sessions at once"},
    "--serial": FLAG | {"help": "one request at a time"},
    "--as-chat": FLAG | {"help": "send all as chat completions"},
    "--timeout": {"type": float, "default": 600.0, "help": "seconds for one request"},
    "--json": {"type": Path, "metavar": "FILE"},
    "--quiet": FLAG | {"help": "the summary only"},
}


# ---------------------------------------------------------------- reckoning


def excesses(rows: Sequence[Row]) -> list[int | None]:
    """Return for each request what it prefilled beyond what it had to; None where not known."""
    ideal = ideal_cached([row.ids for row in rows])
    return [
        row.tokens.prefilled - (len(row.ids) - cached)
        if row.tokens is not None and row.ids is not None and cached is not None
        else None
        for row, cached in zip(rows, ideal, strict=True)
    ]


def summary(rows: Sequence[Row], wall_s: float) -> SimpleNamespace:
    """Return what a replay cost: `rows` are all that were sent, in their order.

    Sums are over answered requests; what cannot be known is None, such as `ideal`, the tokens that
    had to be prefilled. An excess is what one request prefilled beyond that; it is below 0 where
    the server knew more than this replay had sent. The figure that counts is `ratio`.
    """
    values = request_values(rows)
    ideal, prompt, prefilled = map(values.get, ("ideal_tokens", "prompt_tokens", "claimed_tokens"))
    known = [each for each in excesses(rows) if each is not None and ideal is not None]
    cached = sum(row.tokens.cached for row in rows if row.tokens is not None)
    refused = sum(row.outcome.is_refused for row in rows)  # with a 4xx
    return SimpleNamespace(
        requests=len(rows),
        refused=refused,
        failed=int(values["failed"]) - refused,
        prompt=prompt,
        cached=cached,
        prefilled=prefilled,
        ideal=ideal,
        excess_p50=percentile(known, 0.5),
        excess_max=max(known, default=None),
        excess_min=min(known, default=None),
        ttft_p50_s=values.get("ttft_p50_s"),
        ttft_p95_s=values.get("ttft_p95_s"),
        wall_s=wall_s,
        hit=cached / prompt if prompt else None,
        ratio=prefilled / ideal if prefilled is not None and ideal else None,
    )


# ---------------------------------------------------------------- telling


def row_line(row: Row) -> str:
    head, tokens, outcome = f"{row.number:3d} {row.dialect:9} ", row.tokens, row.outcome
    if tokens is None:
        return f"{head} {'refused' if outcome.is_refused else 'FAILED'} {outcome.error}"
    return (
        f"{head} prompt {tokens.prompt:7,} cached {tokens.cached:7,} "
        f"prefilled {tokens.prefilled:7,} {tokens.source:5} ttft {shown(outcome.ttft_s, '.3f')} s"
    )


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def summary_lines(told: SimpleNamespace) -> list[str]:
    lines = [
        f"requests {told.requests}, refused (4xx, left out) {told.refused}, failed {told.failed}",
        f"prompt {told.prompt:,}, cached {told.cached:,}, prefilled {told.prefilled:,}, "
        f"hit {shown(told.hit, '.4f')}",
        f"ttft p50 {shown(told.ttft_p50_s, '.3f')} s, p95 {shown(told.ttft_p95_s, '.3f')} s, "
        f"wall {told.wall_s:.1f} s",
    ]
    if told.ratio is None:
        return [*lines, "ideal: not known (the server does not tell its prompts' ids)"]
    lines += [
        f"ideal prefilled {told.ideal:,}: prefilled / ideal = {told.ratio:.4f}",
        f"excess over ideal per request: p50 {told.excess_p50:,}, max {told.excess_max:,}",
    ]
    if told.excess_min < 0:
        lines.append("note: some prompts were known before this replay sent them: a warm server")
    return lines


def worst_lines(rows: Sequence[Row]) -> list[str]:
    """Name the requests that prefilled most beyond the ideal."""
    known = [(each, row) for each, row in zip(excesses(rows), rows, strict=True) if each]
    known.sort(key=lambda pair: -pair[0])
    return [f"  excess {each:6,}: {row_line(row)}" for each, row in known[:WORST_MAX]]


def report(rows: Sequence[Row], told: SimpleNamespace) -> dict[str, Any]:
    """Return what --json writes."""
    ideal = ideal_cached([row.ids for row in rows])
    return {
        "summary": vars(told),
        "rows": [
            {
                "number": row.number,
                "trace": row.trace,
                "dialect": row.dialect,
                "status": row.outcome.status,
                "error": row.outcome.error,
                "tokens": asdict(row.tokens) if row.tokens is not None else None,
                "ideal_cached": cached,
                "excess": excess,
                "ttft_s": row.outcome.ttft_s,
                "total_s": row.outcome.total_s,
            }
            for row, cached, excess in zip(rows, ideal, excesses(rows), strict=True)
        ],
    }


# ---------------------------------------------------------------- command line


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, how in OPTIONS.items():
        parser.add_argument(name, **how)
    options = parser.parse_args()
    sessions = [load_trace(path, options.limit) for path in options.traces]
    if not options.together:
        sessions = [[row for session in sessions for row in session]]
    target = Target(
        base_url=options.base_url,
        key=options.key,
        model=options.model,
        tokens_max=options.max_tokens,
        timeout_s=options.timeout,
        is_live=options.live,
        is_serial=options.serial,
        is_chat_only=options.as_chat,
    )

    def tell(row: Row) -> None:
        if not options.quiet:
            print(row_line(row), flush=True)

    try:
        rows, wall_s = asyncio.run(replay_together(sessions, target, tell))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise SystemExit(f"{options.base_url}/v1/models does not answer: {error}") from None
    told = summary(rows, wall_s)
    if not options.quiet:
        print(*worst_lines(rows), sep="\n")
    print(*summary_lines(told), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(report(rows, told), indent=1) + "\n")
    return 1 if told.failed else 0


if __name__ == "__main__":
    sys.exit(main())
