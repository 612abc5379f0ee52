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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from hearth.commands.replay.ideal_cache import ideal_cached, percentile
from hearth.commands.replay.player import Row, Target, replay_together
from hearth.commands.replay.traces import load_trace

WORST_MAX = 5  # requests that the report names


@dataclass(frozen=True, slots=True)
class Summary:
    """What a replay cost. Sums are over answered requests; `ideal` is None where not known."""

    requests: int
    refused: int  # with a 4xx
    failed: int  # otherwise
    prompt: int
    cached: int
    prefilled: int
    ideal: int | None  # tokens that had to be prefilled
    excess_p50: float | None  # of one request: prefilled - what of it had to be
    excess_max: float | None
    excess_min: float | None  # below 0 where the server knew more than this replay had sent
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    wall_s: float

    @property
    def hit(self) -> float | None:
        return self.cached / self.prompt if self.prompt else None

    @property
    def ratio(self) -> float | None:
        """Prefilled over ideal: the figure that counts."""
        return self.prefilled / self.ideal if self.ideal else None

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"hit": self.hit, "ratio": self.ratio}


# ---------------------------------------------------------------- reckoning


def excesses(rows: Sequence[Row]) -> list[int | None]:
    """Return for each request what it prefilled beyond what it had to; None where not known."""
    found: list[int | None] = []
    for row, cached in zip(rows, ideal_cached([row.ids for row in rows]), strict=True):
        if row.tokens is None or row.ids is None or cached is None:
            found.append(None)
        else:
            found.append(row.tokens.prefilled - (len(row.ids) - cached))
    return found


def summary(rows: Sequence[Row], wall_s: float) -> Summary:
    """Return the sums over `rows`, all that were sent, in their order."""
    told = [row.tokens for row in rows if row.tokens is not None]
    answered = [
        each for row, each in zip(rows, excesses(rows), strict=True) if row.tokens is not None
    ]
    known = [each for each in answered if each is not None]
    prefilled = sum(tokens.prefilled for tokens in told)
    is_known = bool(told) and len(known) == len(answered)
    first = [row.outcome.ttft_s for row in rows if row.tokens is not None]
    first_s = [each for each in first if each is not None]
    refused = sum(row.outcome.is_refused for row in rows)
    return Summary(
        requests=len(rows),
        refused=refused,
        failed=len(rows) - len(told) - refused,
        prompt=sum(tokens.prompt for tokens in told),
        cached=sum(tokens.cached for tokens in told),
        prefilled=prefilled,
        ideal=prefilled - sum(known) if is_known else None,
        excess_p50=percentile(known, 0.5) if is_known else None,
        excess_max=max(known) if is_known else None,
        excess_min=min(known) if is_known else None,
        ttft_p50_s=percentile(first_s, 0.5),
        ttft_p95_s=percentile(first_s, 0.95),
        wall_s=wall_s,
    )


# ---------------------------------------------------------------- telling


def row_line(row: Row) -> str:
    outcome, tokens = row.outcome, row.tokens
    head = f"{row.number:3d} {row.dialect:9} "
    if tokens is None:
        return f"{head} {'refused' if outcome.is_refused else 'FAILED'} {outcome.error}"
    ttft = f"{outcome.ttft_s:.3f}" if outcome.ttft_s is not None else "-"
    return (
        f"{head} prompt {tokens.prompt:7,} cached {tokens.cached:7,} "
        f"prefilled {tokens.prefilled:7,} {tokens.source:5} ttft {ttft} s"
    )


def summary_lines(told: Summary) -> list[str]:
    seconds = [f"{s:.3f}" if s is not None else "-" for s in (told.ttft_p50_s, told.ttft_p95_s)]
    hit = f"{told.hit:.4f}" if told.hit is not None else "-"
    lines = [
        f"requests {told.requests}, refused (4xx, left out) {told.refused}, failed {told.failed}",
        f"prompt {told.prompt:,}, cached {told.cached:,}, prefilled {told.prefilled:,}, hit {hit}",
        f"ttft p50 {seconds[0]} s, p95 {seconds[1]} s, wall {told.wall_s:.1f} s",
    ]
    if told.ideal is None or told.ratio is None:
        return [*lines, "ideal: not known (the server does not tell its prompts' ids)"]
    lines += [
        f"ideal prefilled {told.ideal:,}: prefilled / ideal = {told.ratio:.4f}",
        f"excess over ideal per request: p50 {told.excess_p50:,}, max {told.excess_max:,}",
    ]
    if told.excess_min is not None and told.excess_min < 0:
        lines.append("note: some prompts were known before this replay sent them: a warm server")
    return lines


def worst_lines(rows: Sequence[Row]) -> list[str]:
    """Name the requests that prefilled most beyond the ideal."""
    known = [(each, row) for each, row in zip(excesses(rows), rows, strict=True) if each]
    known.sort(key=lambda pair: -pair[0])
    return [f"  excess {each:6,}: {row_line(row)}" for each, row in known[:WORST_MAX]]


def report(rows: Sequence[Row], told: Summary) -> dict[str, Any]:
    """Return what --json writes."""
    listed = []
    ideal = ideal_cached([row.ids for row in rows])
    for row, cached, excess in zip(rows, ideal, excesses(rows), strict=True):
        outcome = row.outcome
        listed.append(
            {
                "number": row.number,
                "trace": row.trace,
                "dialect": row.dialect,
                "status": outcome.status,
                "error": outcome.error,
                "tokens": asdict(row.tokens) if row.tokens is not None else None,
                "ideal_cached": cached,
                "excess": excess,
                "ttft_s": outcome.ttft_s,
                "total_s": outcome.total_s,
            }
        )
    return {"summary": told.as_json(), "rows": listed}


# ---------------------------------------------------------------- command line


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--base-url", default="http://127.0.0.1:4000")
    parser.add_argument("--key", default="local")
    parser.add_argument("--model", default="", help="default the first that the server lists")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--limit", type=int, default=0, help="requests of each trace; 0 = all")
    parser.add_argument("--live", action="store_true", help="send back what this server answered")
    parser.add_argument("--together", action="store_true", help="all sessions at once")
    parser.add_argument("--serial", action="store_true", help="one request at a time")
    parser.add_argument("--as-chat", action="store_true", help="send all as chat completions")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one request")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quiet", action="store_true", help="the summary only")
    return parser.parse_args(arguments)


def main() -> int:
    options = options_of()
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
