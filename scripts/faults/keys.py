"""Checks that one API key's client cannot tell by time what another's has said.

For each route A says a text, and B asks, in random order, with that text and with one that nobody
has said. The figure is the share of pairs in which B's answer for what A said came sooner (the area
under the ROC curve), each time being held against those around it: 0.5 tells nothing, 1 tells all.
Each must be between 0.4 and 0.6; with --shared, where workers do not keep keys apart, above 0.9.
"""

import argparse
import random
import statistics
import string
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from scripts.faults.load import KEYS, PATHS, Asked, Body, Load, body_of, loaded_server
from scripts.faults.own_server import drafts_line

WARM_UP: Final = 5  # texts of each route before it is measured
NEARBY: Final = 8  # rounds before and after, by whose median a time is judged


def auc(said: Sequence[float], new: Sequence[float]) -> float:
    """Return the share of pairs in which what was said took less time than what was not.

    As an attacker reckons it, to whom it is no matter how busy the machine is otherwise.
    """
    around = [slice(max(0, at - NEARBY), at + NEARBY + 1) for at in range(len(said))]
    usual = [statistics.median([*said[each], *new[each]]) for each in around]
    ours, theirs = np.divide(said, usual)[:, None], np.divide(new, usual)
    return float(np.mean((ours < theirs) + (ours == theirs) / 2))


# ---------------------------------------------------------------- what is asked


def _word(chance: random.Random) -> str:
    return "".join(chance.choices(string.ascii_lowercase, k=9))


def _chat(chance: random.Random, words: int = 150, tokens: int = 1) -> Body:
    body = body_of("chat", " ".join(_word(chance) for _ in range(words)), tokens)
    return body | {"chat_template_kwargs": {"enable_thinking": False}}


def _schema(chance: random.Random) -> Body:
    fields = {
        _word(chance): {"type": "string", "enum": [_word(chance) for _ in range(5)]}
        for _ in range(6)
    }
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


def _with_tools(chance: random.Random) -> Body:
    tool = {"type": "function", "function": {"name": _word(chance), "parameters": _schema(chance)}}
    return _chat(chance, words=5) | {"tools": [tool], "tool_choice": "required"}


def _with_format(chance: random.Random) -> Body:
    told = {"name": _word(chance), "strict": True, "schema": _schema(chance)}
    return _chat(chance, words=5) | {
        "response_format": {"type": "json_schema", "json_schema": told}
    }


ROUTES: Final[dict[str, Callable[[random.Random], Body]]] = {
    "count_tokens": lambda chance: _chat(chance, words=2_000),
    "chat prompt": _chat,
    "answer": lambda chance: _chat(
        chance, words=5, tokens=32
    ),  # drafted from another's: hardly read
    "tools": _with_tools,
    "response_format": _with_format,
}

# ---------------------------------------------------------------- asking


async def measured(route: str, load: Load, rounds: int, seed: int) -> dict[str, Any]:
    """Have A say `rounds` texts, and B ask with each and with as many others."""
    chance, times = random.Random(f"{seed} {route}"), (list[float](), list[float]())
    is_counted = route == "count_tokens"
    path = "/v1/messages/count_tokens" if is_counted else PATHS["chat"]

    async def seconds(body: Body, key: str) -> float:
        asked = Asked(route, "" if is_counted else "chat", load.post(path, body, key))
        began = time.perf_counter()
        await load.send(asked)
        return time.perf_counter() - began

    for number in range(WARM_UP + rounds):
        said, new = ROUTES[route](chance), ROUTES[route](chance)
        await seconds(said, KEYS[0])
        for body, found in chance.sample([(said, times[0]), (new, times[1])], 2):
            took = await seconds(body, KEYS[1])
            found += [took] * (number >= WARM_UP)
    said_ms, new_ms = (round(1000 * statistics.median(each), 2) for each in times)
    return {"route": route, "said_ms": said_ms, "new_ms": new_ms, "auc": round(auc(*times), 3)}


async def keys(options: argparse.Namespace) -> dict[str, Any]:
    """Measure each route; return the figures, with the misses.

    Raises:
        ServerError: the server does not start.
    """
    rows, worker, low, high = list[dict[str, Any]](), "", 0.4, 0.6
    if options.shared:
        worker, low, high = "scripts.harness.faulty_workers.sharing_worker", 0.9, 1.0
    async with loaded_server(options.seed, {}, worker) as (server, load):
        for route in options.only or ROUTES:
            row = await measured(route, load, options.probes // 2, options.seed)
            rows.append(row)
            print(*(f"{name} {value}" for name, value in row.items()), flush=True)
            load.ledger.demand(
                low <= row["auc"] <= high, f"{route}: {row['auc']} is not within {low} to {high}"
            )
        print(drafts_line((await server.told("/v1/cache")).get("workers", [])))
    return load.ledger.told() | {"routes": rows}
