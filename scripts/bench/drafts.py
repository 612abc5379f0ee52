"""Replays recorded answers through Hearth's drafter: forwards and rows a token, and its own cost.

No model runs. Speed-ups are estimates: tokens over the cost of all forwards on two Macs' curves.
tests/data/recorded_answers/README.md says where the answers are from.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from hearth.commands.replay.traces import TRACES_DIR
from hearth.worker.draft.answer_drafter import AnswerSources
from hearth.worker.draft.draft import Drafter
from hearth.worker.draft.draft_length import ROWS_MAX, TextKind
from hearth.worker.draft.draft_memory import DraftMemory
from scripts.bench import drafts_answers
from scripts.bench.drafts_forced import AllWrong, Lies, compiler, forced_by_schema
from scripts.bench.drafts_replay import CURVES, DraftCounts, KindCounts, TokenAnswer, replay
from scripts.harness import recorded_answers

ABOUT: Final = "forwards a token that drafting leaves, on recorded answers; no model runs"
HEADER: Final = (
    "set                kind      tokens  forwards  rows/t"
    "   m4   m5  us p50   p95  right of drafted, by source"
)
Sessions = dict[str, list[TokenAnswer]]  # by name
DrafterOf = Callable[[str, TokenAnswer], tuple[Drafter, Callable[[], None]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sets", help="of those below, by name; default all")
    parser.add_argument("--traces", type=Path, default=TRACES_DIR, help="captured sessions")
    parser.add_argument("--states", action="store_true", help="as on a model with states")
    parser.add_argument("--rows-max", type=int, default=ROWS_MAX)


def run(options: argparse.Namespace) -> dict[str, Any]:
    sets = all_sets(options.traces)
    names = options.sets.split(",") if options.sets else list(sets)
    told: list[dict[str, Any]] = []
    print(HEADER)
    for name in names:
        sessions = sets[name]()
        counts = replay_sessions(sessions, way(name), options.rows_max, options.states)
        for kind, count in sorted(counts.items()):
            told.append({"set": name, "kind": kind, **figures(count)})
            print(line_of(told[-1]), flush=True)
    return {
        "rows_max": options.rows_max,
        "has_states": options.states,
        "call_drafts_ended": compiler().report()["call_drafts_ended"],  # 0, or counts are too low
        "rows": told,
    }


# ---------------------------------------------------------------- sets


def all_sets(traces: Path) -> dict[str, Callable[[], Sessions]]:
    """Return how each set of answers is made."""
    return {
        "swe-agent": lambda: recorded("swe-agent"),
        "aider": lambda: recorded("aider"),
        "calls-each-once": lambda: captured(traces),
        "fresh-prose": lambda: {"prose": list(drafts_answers.fresh_prose())},
        "random-tokens": lambda: {"random": list(drafts_answers.random_tokens())},
        "all-wrong": lambda: recorded("aider"),
        "lying-grammar": lambda: {"lies": list(drafts_answers.fresh_prose())},
    }


def recorded(name: str) -> Sessions:
    sessions = recorded_answers.load()[name]
    return {session.name: list(drafts_answers.token_answers(session)) for session in sessions}


def captured(traces: Path) -> Sessions:
    return {
        path.name: list(drafts_answers.captured_calls(path))
        for path in sorted(traces.glob("*.jsonl.xz"))
    }


# ---------------------------------------------------------------- drafting


def way(name: str) -> DrafterOf:
    """Return how a set is drafted: as the server does, where each session has a key of its own."""
    memory = DraftMemory()
    forced_of = Lies if name == "lying-grammar" else forced_by_schema

    def drafter_of(session: str, answer: TokenAnswer) -> tuple[Drafter, Callable[[], None]]:
        kind: TextKind = "call" if answer.tools else "text"
        sources = AnswerSources(answer.prompt, forced=forced_of(answer))
        drafter = memory.begin(session, sources, lambda: kind)

        def end() -> None:
            memory.keep(session, drafter.answer)
            memory.end(drafter)

        return AllWrong(drafter) if name == "all-wrong" else drafter, end

    return drafter_of


def replay_sessions(
    sessions: Sessions, drafter_of: DrafterOf, rows_max: int, has_states: bool
) -> KindCounts:
    """Replay all answers, a session's in order."""
    counts: KindCounts = {}
    for session, answers in sessions.items():
        for answer in answers:
            drafter, end = drafter_of(session, answer)
            for kind, one in replay(drafter, answer, rows_max, has_states).items():
                counts.setdefault(kind, DraftCounts()).add(one)
            end()
    return counts


# ---------------------------------------------------------------- figures


def figures(count: DraftCounts) -> dict[str, Any]:
    """Return what is told of the forwards of one kind of text."""
    median, p95 = np.percentile(count.token_us, [50, 95])
    return {
        "tokens": count.tokens,
        "forwards_per_token": round(count.forwards / count.tokens, 4),
        "rows_per_token": round(count.rows / count.tokens, 4),
        "drafted": dict(count.drafted),
        "accepted": dict(count.accepted),
        "speedup": {name: round(count.tokens / count.costs[name], 3) for name in CURVES},
        "drafter_us_per_token": {"median": round(median, 1), "p95": round(p95, 1)},
    }


def line_of(row: dict[str, Any]) -> str:
    sources = (
        f"{source} {row['accepted'].get(source, 0)}/{drafted}"
        for source, drafted in row["drafted"].items()
    )
    return (
        f"{row['set']:18s} {row['kind']:8s} {row['tokens']:7d}"
        f"  {row['forwards_per_token']:8.3f}  {row['rows_per_token']:6.3f}"
        f" {row['speedup']['m4']:4.2f} {row['speedup']['m5']:4.2f}"
        f" {row['drafter_us_per_token']['median']:7.1f}"
        f" {row['drafter_us_per_token']['p95']:5.0f}  {', '.join(sources)}"
    )
