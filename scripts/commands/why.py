"""Says why requests of a session lost what was kept: which message, what changed, what it cost.

    hearth why [SESSION] --base-url http://127.0.0.1:4000 [--key K]

SESSION is a session's id, as the list without it has them, or a file of its cache trace (LOG_ROOT).
Exit status 0: nothing was lost, or all is explained; 1: something unexplained was; 2: the session
is not known, or the server does not answer.
"""

import argparse
import sys
import time
from collections.abc import Sequence

from hearth.commands.server_client import (
    SLACK_TOKENS,
    Line,
    Row,
    Step,
    lines_of,
    parser_of,
    run,
    server_of,
    steps,
    table,
    verdict,
)

TITLE_CHARS = 40  # of a title in the list
SESSION_HEAD = (
    *("session", "first words", "client", "model", "begun"),
    *("turns", "lost", "tok/s", "idle s"),
)
HEAD = -1  # the "message" that tools and template options are part of


def loss_rows(found: Sequence[Step]) -> list[tuple[object, ...]]:
    """Return a row of the table for each of `found`."""
    rows: list[tuple[object, ...]] = []
    for step in found:
        told = step.row.get("divergence") or {}
        message = told.get("message", "-")
        rows.append(
            (
                step.line.name,
                step.row.get("turn", "-"),
                step.row.get("request_id", "-"),
                "head" if message == HEAD else message,
                told.get("role") or "-",
                told.get("cause") or "not told",
                told.get("rule") or "-",
                step.lost,
            )
        )
    return rows


def remedies(found: Sequence[Step]) -> list[str]:
    """Return what would help against each cause, once."""
    known: dict[str, str] = {}
    for step in found:
        told = step.row.get("divergence") or {}
        if told.get("remedy"):
            known.setdefault(told.get("cause") or "not told", told["remedy"])
    return [f"{cause}: {remedy}" for cause, remedy in known.items()]


def snippets(found: Sequence[Step]) -> list[str]:
    """Return both sides of each difference, where the server shows them."""
    shown = []
    for step in found:
        told = step.row.get("divergence") or {}
        if told.get("was") or told.get("now"):
            where = f"line {step.line.name}, turn {step.row.get('turn', '-')}"
            shown.append(f"{where}: was {told.get('was')!r}, now {told.get('now')!r}")
    return shown


def judge(lines: Sequence[Line], slack: int) -> int:
    """Print what was lost and why; return the exit status."""
    everything = [step for line in lines for step in steps(line)]
    found = [step for step in everything if step.lost > slack]
    if not found:
        return verdict([], f"nothing was lost in {len(everything):,} requests")
    head = ("line", "turn", "request", "message", "role", "cause", "rule", "lost")
    print(table(head, loss_rows(found)), *remedies(found), *snippets(found), sep="\n")
    unexplained = [step for step in found if step.unexplained > slack]
    lost = sum(step.unexplained for step in unexplained)
    misses = [f"{lost:,} tokens in {len(unexplained)} requests are unexplained"] if lost else []
    return verdict(misses, f"{sum(step.lost for step in found):,} tokens lost, all explained")


def session_rows(told: Row) -> list[tuple[object, ...]]:
    """Return a row of the table for each session of `GET /v1/sessions`, as it lists them."""
    return [
        (
            row["session"] or "-",
            (row.get("title") or "-")[:TITLE_CHARS],
            row.get("client") or "-",
            row.get("model") or "-",
            _clock(row.get("begun_at")),
            row["turns"],
            row.get("lost") or 0,
            row.get("decode_speed") or "-",
            row["idle_s"],
        )
        for row in told["sessions"]
    ]


def _clock(at: float | None) -> str:
    """Return a time of day, with the date where that is not today's."""
    if not at:
        return "-"
    then = time.localtime(at)
    is_today = then[:3] == time.localtime()[:3]
    return time.strftime("%H:%M" if is_today else "%Y-%m-%d %H:%M", then)


async def list_sessions(options: argparse.Namespace) -> int:
    """Print the sessions that the server knows; return the exit status."""
    async with server_of(options) as server:
        rows = session_rows(await server.get("/v1/sessions"))
    if not rows:
        return verdict([], "no session yet: ask the server something first")
    print(table(SESSION_HEAD, rows))
    return verdict([], f"{len(rows):,} sessions; `hearth why SESSION` says what one of them lost")


async def why(options: argparse.Namespace) -> int:
    if not options.session:
        return await list_sessions(options)
    return judge(await lines_of(options, options.session), options.slack)


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("why", __doc__)
    parser.add_argument(
        "session",
        metavar="SESSION",
        nargs="?",
        help="an id, or a file of the cache trace; all are listed without it",
    )
    parser.add_argument("--slack", type=int, default=SLACK_TOKENS, help="tokens that are no loss")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    return run(why(options_of(arguments)))


if __name__ == "__main__":
    sys.exit(main())
