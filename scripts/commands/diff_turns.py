"""Shows a session's requests beside the ones before them: what was kept, and what was lost.

    hearth diff-turns ~/.hearth/logs/2026-11-21/cache-session-ID.log
    hearth diff-turns --session ID --base-url http://127.0.0.1:4000 [--key K]

`stable` counts the messages that are what they were, `delta` the characters that the canonical
form leaves out, `could` the tokens that the request before left, with its answer.
Exit status 0: every loss is explained; 1: one is not; 2: there is nothing to show.
"""

import argparse
import sys
from collections.abc import Sequence

from hearth.commands.server_client import (
    SLACK_TOKENS,
    Line,
    Step,
    lines_of,
    parser_of,
    run,
    steps,
    table,
    verdict,
)

HEAD = (
    *("time", "turn", "messages", "stable", "delta", "prompt", "could", "cached", "prefilled"),
    *("lost", "cause"),
)


def step_row(step: Step) -> tuple[object, ...]:
    row = step.row
    told = row.get("divergence") or {}
    cause = told.get("cause") or ("not told" if step.unexplained else "")
    return (
        str(row.get("at", "-"))[11:19],
        *(row.get(name, "-") for name in ("turn", "messages", "stable_prefix_msg_count")),
        *(row.get(name, "-") for name in ("cache_key_delta_chars", "prompt")),
        "-" if step.reusable is None else step.reusable,
        *(row.get(name, "-") for name in ("cached", "prefilled")),
        step.lost,
        f"{cause} ({told['rule']})" if told.get("rule") else cause,
    )


def judge(lines: Sequence[Line], slack: int) -> int:
    """Print each line's requests; return the exit status."""
    misses = []
    for line in lines:
        found = steps(line)
        print(f"session {line.session or 'anonymous'}, line {line.name} {line.kind}")
        print(table(HEAD, [step_row(step) for step in found]), end="\n\n")
        misses += [
            f"line {line.name} turn {step.row.get('turn', '-')} lost {step.unexplained:,} tokens"
            for step in found
            if step.unexplained > slack
        ]
    return verdict([f"unexplained: {miss}" for miss in misses], "every loss is explained")


async def diff_turns(options: argparse.Namespace) -> int:
    return judge(await lines_of(options, options.session or options.log), options.slack)


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("diff-turns", __doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("log", nargs="?", metavar="SESSION_LOG", help="a file of the cache trace")
    source.add_argument("--session", metavar="ID", help="as the server remembers it")
    parser.add_argument("--slack", type=int, default=SLACK_TOKENS, help="tokens that are no loss")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    return run(diff_turns(options_of(arguments)))


if __name__ == "__main__":
    sys.exit(main())
