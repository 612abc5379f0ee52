"""Replays recorded answers through Hearth's drafter: forwards and rows a token, and its own cost.

No model runs. Speed-ups are estimates: tokens over the cost of all forwards on two Macs' curves.
What others draft is told beside it; docs/measuring.md says how the answers were recorded.
"""

import argparse
import json
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from hearth.commands.replay.traces import TRACES_DIR
from hearth.worker.draft.answer_drafter import AnswerSources
from hearth.worker.draft.draft import Drafter
from hearth.worker.draft.draft_length import ROWS_MAX, TextKind
from hearth.worker.draft.draft_memory import DraftMemory
from hearth.worker.draft.forced_tokens import ForcedTokens
from scripts.bench import drafts_answers
from scripts.bench.drafts_baselines import BASELINES, AllWrong, Lies
from scripts.bench.drafts_forced import SchemaForced, compiler
from scripts.bench.drafts_replay import CURVES, DraftCounts, KindCounts, TokenAnswer, replay
from scripts.harness import recorded_answers

ABOUT: Final = "forwards a token that drafting leaves, on recorded answers; no model runs"
HEADER: Final = (
    "set                drafter                     kind      tokens  forwards  rows/t"
    "   m4   m5  us p50   p95 later  right of drafted, by source"
)
Sessions = dict[str, list[TokenAnswer]]  # by name
DrafterOf = Callable[[str, TokenAnswer], tuple[Drafter, Callable[[], None]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sets", help="of those below, by name; default all")
    parser.add_argument("--traces", type=Path, default=TRACES_DIR, help="captured sessions")
    parser.add_argument("--states", action="store_true", help="as on a model with states")
    parser.add_argument("--others", action="store_true", help="what others draft, too")
    parser.add_argument("--rows-max", type=int, default=ROWS_MAX)
    parser.add_argument("--out", type=Path)


def run(options: argparse.Namespace) -> None:
    sets = all_sets(options.traces)
    names = options.sets.split(",") if options.sets else list(sets)
    told: list[dict[str, Any]] = []
    print(HEADER)
    for name in names:
        sessions = sets[name]()
        for way, drafter_of in ways(name, options.others).items():
            counts = replay_sessions(sessions, drafter_of, options.rows_max, options.states)
            for kind, count in sorted(counts.items()):
                row = {"set": name, "drafter": way, "kind": kind, **figures(count)}
                told.append(row)
                print(line_of(row), flush=True)
    found = {
        "rows_max": options.rows_max,
        "has_states": options.states,
        "bytes_per_token": round(bytes_per_token(), 1),
        "call_drafts_ended": compiler().report()["call_drafts_ended"],  # 0, or counts are too low
        "rows": told,
    }
    print(f"a conversation's history: {found['bytes_per_token']} bytes a token")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


# ---------------------------------------------------------------- sets


def all_sets(traces: Path) -> dict[str, Callable[[], Sessions]]:
    """Return how each set of answers is made."""
    return {
        "swe-agent": lambda: recorded("swe-agent"),
        "aider": lambda: recorded("aider"),
        "aider-one-chat": lambda: {"log": drafts_answers.one_chat(recorded("aider").values())},
        "calls": lambda: captured(traces, is_each_once=False),
        "calls-each-once": lambda: captured(traces, is_each_once=True),
        "calls-shuffled": lambda: captured(traces, is_each_once=False, is_shuffled=True),
        "fresh-prose": lambda: {"prose": list(drafts_answers.fresh_prose())},
        "random-tokens": lambda: {"random": list(drafts_answers.random_tokens())},
        "all-wrong": lambda: recorded("aider"),
        "lying-grammar": lambda: {"lies": list(drafts_answers.fresh_prose())},
    }


def recorded(name: str) -> Sessions:
    sessions = recorded_answers.load()[name]
    return {session.name: list(drafts_answers.token_answers(session)) for session in sessions}


def captured(traces: Path, is_each_once: bool, is_shuffled: bool = False) -> Sessions:
    return {
        path.name: list(drafts_answers.captured_calls(path, is_each_once, is_shuffled))
        for path in sorted(traces.glob("*.jsonl.xz"))
    }


# ---------------------------------------------------------------- ways to draft


def ways(name: str, with_others: bool) -> dict[str, DrafterOf]:
    """Return the ways in which a set is drafted, each with a memory of its own."""
    forced_of: Callable[[TokenAnswer], ForcedTokens | None] = forced_by_schema
    if name == "lying-grammar":
        forced_of = Lies
    found = {"hearth": hearth_way(forced_of, is_one_key=False, is_wrong=name == "all-wrong")}
    if name in ("swe-agent", "aider") or name.startswith("calls"):
        found["hearth, one key"] = hearth_way(forced_of, is_one_key=True)
    if name.startswith("calls"):
        found["hearth, no grammar"] = hearth_way(lambda _: None, is_one_key=False)
    if with_others:
        found |= {way: baseline_way(made) for way, made in BASELINES.items()}
    return found


def forced_by_schema(answer: TokenAnswer) -> ForcedTokens | None:
    return SchemaForced(answer) if answer.tools else None


def hearth_way(
    forced_of: Callable[[TokenAnswer], ForcedTokens | None],
    is_one_key: bool,
    is_wrong: bool = False,
) -> DrafterOf:
    """Draft as the server does, where each session has a key of its own or all have one."""
    memory = DraftMemory()

    def drafter_of(session: str, answer: TokenAnswer) -> tuple[Drafter, Callable[[], None]]:
        owner = "key" if is_one_key else session
        kind: TextKind = "call" if answer.tools else "text"
        sources = AnswerSources(answer.prompt, forced=forced_of(answer))
        drafter = memory.begin(owner, sources, lambda: kind)

        def end() -> None:
            memory.keep(owner, drafter.answer)
            memory.end(drafter)

        return AllWrong(drafter) if is_wrong else drafter, end

    return drafter_of


def baseline_way(made: Callable[[TokenAnswer], Drafter]) -> DrafterOf:
    return lambda _, answer: (made(answer), lambda: None)


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
    later_p95 = np.percentile(count.later_us or count.token_us, 95)
    return {
        "tokens": count.tokens,
        "forwards_per_token": round(count.forwards / count.tokens, 4),
        "rows_per_token": round(count.rows / count.tokens, 4),
        "drafted": dict(count.drafted),
        "accepted": dict(count.accepted),
        "speedup": {name: round(count.tokens / count.costs[name], 3) for name in CURVES},
        "drafter_us_per_token": {
            "median": round(median, 1),
            "p95": round(p95, 1),
            "later_p95": round(later_p95, 1),  # without each answer's first, which indexes
        },
    }


def line_of(row: dict[str, Any]) -> str:
    sources = (
        f"{source} {row['accepted'].get(source, 0)}/{drafted}"
        for source, drafted in row["drafted"].items()
    )
    return (
        f"{row['set']:18s} {row['drafter']:27s} {row['kind']:8s} {row['tokens']:7d}"
        f"  {row['forwards_per_token']:8.3f}  {row['rows_per_token']:6.3f}"
        f" {row['speedup']['m4']:4.2f} {row['speedup']['m5']:4.2f}"
        f" {row['drafter_us_per_token']['median']:7.1f}"
        f" {row['drafter_us_per_token']['p95']:5.0f}"
        f" {row['drafter_us_per_token']['later_p95']:5.0f}  {', '.join(sources)}"
    )


def bytes_per_token(tokens: int = 50_000) -> float:
    """Return what a drafter holds for each token of its conversation."""
    prompt: Sequence[int] = np.random.default_rng(1).integers(0, 100_000, tokens).tolist()
    memory = DraftMemory()
    tracemalloc.start()
    drafter = memory.begin("key", AnswerSources(prompt), lambda: "text")
    drafter.take(prompt[:1])
    drafter.propose(1, 1)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / tokens
