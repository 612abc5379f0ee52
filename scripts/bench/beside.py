"""Measures a long prompt beside answers: how long both wait for each other, without a server."""

import argparse
import json
import statistics
import time
from typing import Any, Final

from hearth.worker.engine.prefill_lengths import default_chunk
from scripts.harness.socketless_worker import Answer, Machine, machine

ABOUT: Final = "a long prompt beside three answers: its first token, and their longest gaps"
STREAMS: Final = 3
STREAM_TOKENS: Final = 200_000  # no answer ends amid the measurement

Figures = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fixture", default="qwen3")
    parser.add_argument("--tokens", type=int, default=16_000, help="of the long prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--goal", type=float, default=0.0, help="seconds of a forward beside them")


def run(options: argparse.Namespace) -> list[Figures]:
    told: list[Figures] = []
    for number in range(options.rounds):
        told.append(_round(options, number))
        print(json.dumps(told[-1]), flush=True)
    ratio = statistics.median(row["ratio"] for row in told)
    print(f"first token beside {STREAMS} answers over alone: {ratio:.2f} (median)")
    return told


def _round(options: argparse.Namespace, number: int) -> Figures:
    """Return what one prompt took alone, and beside answers whose gaps are told too."""
    ids = [300 + (at * 7 + number) % 2_000 for at in range(options.tokens)]
    alone_s, _, _ = _first_token(_machine(options), ids, streams=0)
    beside_s, gaps, steps = _first_token(_machine(options), ids, STREAMS)
    return {
        "tokens": options.tokens,
        "chunk": default_chunk(),
        "alone_s": round(alone_s, 3),
        "beside_s": round(beside_s, 3),
        "ratio": round(beside_s / alone_s, 3),
        "gap_s": {"median": round(statistics.median(gaps), 4), "longest": round(max(gaps), 4)},
        "steps_of_answers": steps,
    }


def _machine(options: argparse.Namespace) -> Machine:
    return machine(
        options.fixture,
        tiny=True,
        chunk=default_chunk(),
        clock=time.perf_counter,
        beside_goal_s=options.goal,
    )


def _first_token(made: Machine, ids: list[int], streams: int) -> tuple[float, list[float], int]:
    """Return the seconds to a prompt's first token, and the answers' gaps and steps meanwhile."""
    beside = [made.submit([500 + n, 501, 502], tokens_max=STREAM_TOKENS) for n in range(streams)]
    made.run(until=lambda: all(_tokens(answer) > 3 for answer in beside))
    asked = made.submit(ids, tokens_max=2)
    began = last = time.perf_counter()
    gaps, before = [0.0], sum(map(_tokens, beside))
    while not _tokens(asked):
        written = sum(map(_tokens, beside))
        made.step()
        if sum(map(_tokens, beside)) > written:
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
    took = time.perf_counter() - began
    return took, gaps, (sum(map(_tokens, beside)) - before) // max(1, streams)


def _tokens(answer: Answer) -> int:
    return answer.request.completion_tokens
