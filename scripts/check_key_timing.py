#!/usr/bin/env python
"""Checks that one API key's client cannot tell by time what another's has said.

    python -m scripts.check_key_timing [--probes 400] [--only count_tokens] [--shared] [--out FILE]

For each route A says a text, and B asks, in random order, with that text and with one that nobody
has said. The figure is the share of pairs in which B's answer for what A said came sooner (the area
under the ROC curve), each time being held against those around it: 0.5 tells nothing, 1 tells all.
Exit status 0: each is between 0.4 and 0.6; with `--shared`, above 0.9; 1: one is not.
"""

import argparse
import asyncio
import http.client
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from scripts.chaos.draft_tally import DraftTally, drafts_line
from scripts.chaos.own_server import OwnServer
from scripts.fixtures.fixture_cache import fixture_dir

KEYS: Final = ("sk-of-a", "sk-of-b")
ANSWER_S_MAX: Final = 60.0
COUNTED_WORDS: Final = 2_000  # each new, of a text that is counted
CHAT_WORDS: Final = 150  # and of one that the model reads
ANSWER_TOKENS: Final = 32  # of one that drafts may shorten
WARM_UP: Final = 5  # texts of each route before it is measured
NEARBY: Final = 8  # rounds before and after, by whose median a time is judged
SHARING_WORKER: Final = "scripts.harness.faulty_workers.sharing_worker"
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
TELLS_NOTHING: Final = (0.4, 0.6)
TELLS_MIN: Final = 0.9

Body = dict[str, Any]


@dataclass
class Route:
    """One way to ask. `said` and `new` are B's times, of texts that A said and that nobody did."""

    name: str
    path: str
    body: Callable[[random.Random], Body]
    said: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)

    @property
    def auc(self) -> float:
        """As an attacker reckons it, to whom it is no matter how busy the machine is otherwise."""
        usual = [_median_around(number, self.said, self.new) for number in range(len(self.said))]
        said, new = (
            [took / each for took, each in zip(times, usual, strict=True)]
            for times in (self.said, self.new)
        )
        return auc(said, new)

    def row(self) -> dict[str, Any]:
        medians = [round(1000 * statistics.median(each), 2) for each in (self.said, self.new)]
        return {
            "route": self.name,
            "probes": len(self.said) + len(self.new),
            "said_ms": medians[0],
            "new_ms": medians[1],
            "auc": round(self.auc, 3),
        }


def _median_around(number: int, *times: Sequence[float]) -> float:
    start, end = max(0, number - NEARBY), number + NEARBY + 1
    return statistics.median([took for each in times for took in each[start:end]])


def auc(said: Sequence[float], new: Sequence[float]) -> float:
    """Return the share of pairs in which what was said took less time than what was not."""
    less = sum((a < b) + (a == b) / 2 for a in said for b in new)
    return less / (len(said) * len(new))


# ---------------------------------------------------------------- what is asked


def _word(chance: random.Random, letters: int = 9) -> str:
    return "".join(chance.choices(LETTERS, k=letters))


def _messages(chance: random.Random, words: int) -> list[Body]:
    return [{"role": "user", "content": " ".join(_word(chance) for _ in range(words))}]


def _schema(chance: random.Random) -> Body:
    properties = {
        _word(chance): {"type": "string", "enum": [_word(chance) for _ in range(5)]}
        for _ in range(6)
    }
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def _counted(chance: random.Random) -> Body:
    return {"model": "local", "messages": _messages(chance, COUNTED_WORDS)}


def _chat(chance: random.Random, words: int = CHAT_WORDS) -> Body:
    return {
        "model": "local",
        "messages": _messages(chance, words),
        "max_tokens": 1,
        "chat_template_kwargs": {"enable_thinking": False},
    }


def _with_tools(chance: random.Random) -> Body:
    tool = {"name": _word(chance), "parameters": _schema(chance)}
    tools = [{"type": "function", "function": tool}]
    return _chat(chance, words=5) | {"tools": tools, "tool_choice": "required"}


def _with_format(chance: random.Random) -> Body:
    asked = {"name": _word(chance), "strict": True, "schema": _schema(chance)}
    return _chat(chance, words=5) | {
        "response_format": {"type": "json_schema", "json_schema": asked}
    }


def _answered(chance: random.Random) -> Body:
    """Ask for an answer that would be drafted from another's: the prompt is hardly read."""
    return _chat(chance, words=5) | {"max_tokens": ANSWER_TOKENS, "temperature": 0}


def routes() -> list[Route]:
    chat = "/v1/chat/completions"
    return [
        Route("count_tokens", "/v1/messages/count_tokens", _counted),
        Route("chat prompt", chat, _chat),
        Route("answer", chat, _answered),
        Route("tools", chat, _with_tools),
        Route("response_format", chat, _with_format),
    ]


# ---------------------------------------------------------------- asking


class Client:
    """One key's connection."""

    def __init__(self, port: int, key: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S_MAX)
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def seconds(self, path: str, body: Body) -> float:
        """Ask, and return how long the answer took."""
        octets = json.dumps(body).encode()
        started = time.perf_counter()
        self._connection.request("POST", path, octets, self._headers)
        reply = self._connection.getresponse()
        text = reply.read()
        took = time.perf_counter() - started
        if reply.status != 200:
            raise SystemExit(f"{path} answered with {reply.status}: {text[:300]!r}")
        return took


def measure(route: Route, port: int, rounds: int, chance: random.Random) -> None:
    """Have A say `rounds` texts, and B ask with each and with as many others."""
    a, b = (Client(port, key) for key in KEYS)
    for number in range(WARM_UP + rounds):
        said, new = route.body(chance), route.body(chance)
        a.seconds(route.path, said)
        probes = [(said, route.said), (new, route.new)]
        chance.shuffle(probes)
        for body, times in probes:
            took = b.seconds(route.path, body)
            if number >= WARM_UP:
                times.append(took)


def main() -> None:
    """Print a row for each route; exit with 1 where one is not as it has to be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--probes", type=int, default=400, help="of B on each route")
    parser.add_argument("--only", default="", help="the one route to measure")
    parser.add_argument("--fixture", default="qwen3")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--shared", action="store_true", help="with workers that do not keep keys apart"
    )
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    options = parser.parse_args()
    rows = asyncio.run(_run(options))
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    low, high = (TELLS_MIN, 1.0) if options.shared else TELLS_NOTHING
    print(f"{'route':16} {'probes':>6} {'said ms':>8} {'new ms':>8} {'AUC':>6}")
    for row in rows:
        print("{route:16} {probes:6} {said_ms:8.2f} {new_ms:8.2f} {auc:6.3f}".format(**row))
    if wrong := [row["route"] for row in rows if not low <= row["auc"] <= high]:
        raise SystemExit(f"not within {low} to {high}: {', '.join(wrong)}")


async def _run(options: argparse.Namespace) -> list[dict[str, Any]]:
    settings = {
        "MODEL_PATH": str(fixture_dir(options.fixture, tiny=True)),
        "PROXY_MODEL_ID": "local",
        "PROXY_API_KEY": KEYS[0],
        "PROXY_API_KEYS": ",".join(KEYS[1:]),
    }
    server = OwnServer(settings, worker=SHARING_WORKER if options.shared else "")
    drafts = DraftTally()
    measured = [each for each in routes() if options.only in ("", each.name)]
    try:
        await server.started()
        for route in measured:
            chance = random.Random(f"{options.seed} {route.name}")
            measure(route, server.port, options.probes // 2, chance)
        drafts.take((await server.cache()).get("workers", []))
        server.stop()
    finally:
        server.close()
    print(drafts_line(drafts.total))
    return [route.row() for route in measured]


if __name__ == "__main__":
    main()
