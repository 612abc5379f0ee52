#!/usr/bin/env python
"""Measures the CPU time for building a prompt in the worker and for naming its messages.

    python -m scripts.bench.prompt [--tokens 30000] [--tools 60] [--rounds 30] [--family qwen3_5]

Turn N+1 of an agent's conversation: all but the newest messages were seen before. Beside it the
same prompt rendered and tokenised anew, and the parts that no cache can take away: the template
engine's own time.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hearth.proxy.request.message_digests import MessageDigester
from hearth.shared.wire_messages import Prompt, Speaker
from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from scripts.harness.agent_worker import Desk
from scripts.harness.model_families import family

WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "xi",
    "omicron",
]


def tool(number: int) -> dict[str, Any]:
    """Return a tool of the size that agents' have: some 500 characters."""
    properties = {
        f"{word}_{number}": {"type": "string", "description": f"The {word} of it."}
        for word in WORDS[:3]
    }
    parameters = {"type": "object", "properties": properties, "required": [WORDS[0]]}
    function = {"name": f"tool_{number}", "description": "Does. " * 10, "parameters": parameters}
    return {"type": "function", "function": function}


def text(chance: random.Random, words: int) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(words))


def conversation(desk: Desk, tokens: int, tools: int) -> tuple[list[Any], list[Any]]:
    """Have the desk hold a tool loop of about so many tokens; return its messages and tools."""
    chance = random.Random(7)
    shown = [tool(number) for number in range(tools)]
    messages: list[Any] = [
        {"role": "system", "content": text(chance, 1500)},
        {"role": "user", "content": text(chance, 200)},
    ]
    while True:
        prompt = desk.named(Prompt(list(messages), shown), Speaker("k", "bench"))
        request = desk.request(prompt)
        if len(request.ids) >= tokens:
            return messages, shown
        parts = AnswerParts(
            "I think.", text(chance, 20), (ToolCall("tool_1", {"alpha_1": text(chance, 9)}),)
        )
        desk.pretend(request, parts)
        visit = request.visit
        assert visit is not None and visit.turn is not None
        messages.append(desk.family.message(parts, visit.turn.call_ids))
        result = {"role": "tool", "tool_call_id": visit.turn.call_ids[0]}
        messages.append(result | {"content": text(chance, 250)})


def median_ms(work: Callable[[int], Any], rounds: int) -> float:
    spent = []
    for number in range(rounds):
        start = time.process_time()
        work(number)
        spent.append((time.process_time() - start) * 1000)
    return statistics.median(spent)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--tools", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--family", default="qwen3_5")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        desk = Desk("qwen3", family(options.family), Path(directory))
        report(desk, options)
    return 0


def report(desk: Desk, options: argparse.Namespace) -> None:
    messages, tools = conversation(desk, options.tokens, options.tools)
    chance, tokenizer = random.Random(9), desk.family.tokenizer

    def prompt(_: int) -> Prompt:
        newest = {"role": "user", "content": text(chance, 100)}
        return desk.named(Prompt([*messages, newest], tools), Speaker("k", "bench"))

    prompts = [prompt(number) for number in range(options.rounds)]
    built = desk.request(prompts[0])
    rendered = desk.family.render(messages, tools)
    names = MessageDigester(True, False)
    rows = {
        "a request at turn N+1, whole": lambda n: desk.request(prompts[n]),
        "of it the template engine": lambda n: desk.family.render(prompts[n].messages, tools),
        "of it finding the turns": lambda n: desk.sessions.arrive(prompts[n]),
        "tokenising the rendered text anew": lambda _: tokenizer.encode(rendered),
        "the proxy's names of all messages": lambda n: names.names(prompts[n].messages),
    }
    print(f"{len(built.ids):,} tokens, {len(messages)} messages, {len(tools)} tools")
    for name, work in rows.items():
        print(f"{name:36} {median_ms(work, options.rounds):8.2f} ms")


if __name__ == "__main__":
    raise SystemExit(main())
