#!/usr/bin/env python
"""Checks on random conversations that no request is told a loss that it does not have.

    python -m scripts.check_told_losses [--count 10000] [--seed 0] [--examples 2]

Each conversation is played against a worker without sockets (random_conversations.py) and each of
its reports judged (loss_oracle.py). What is found is printed by rule and step, with the smallest
conversation that shows it. Exit status 0: nothing is told falsely or left out; 1: something is.
"""

import argparse
import dataclasses
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from scripts.harness.chat_client import Asked
from scripts.harness.loss_oracle import Finding, Judge
from scripts.harness.random_conversations import (
    NUMBER_MAX,
    STEPS,
    VARIANTS,
    Plan,
    Player,
    Step,
)

STEPS_MAX: Final = 7
ROUNDS: Final = (1, 1, 3, 6, 10, 24)
TRIES_MAX: Final = 400  # to make one example smaller
PROGRESS_S: Final = 20.0

Found = list[tuple[Asked, Finding]]


def random_plan(seed: int) -> Plan:
    """Return the plan that belongs to a seed."""
    chance = random.Random(seed)
    kinds = [*STEPS, *("append",) * 6, *("edit", "cut") * 2]

    def number() -> int:
        return chance.randrange(NUMBER_MAX + 1)

    return Plan(
        variant=chance.choice(VARIANTS),
        steps=tuple(
            Step(chance.choice(kinds), chance.choice((0, 0, number())), number(), number())
            for _ in range(chance.randrange(1, STEPS_MAX + 1))
        ),
        is_named=chance.random() < 0.75,
        rounds=chance.choice(ROUNDS),
        tools=chance.choice((0, 2, 3)),
    )


def played(plan: Plan, logs: Path) -> tuple[list[Asked], Found]:
    """Play a plan; return its requests, and what is false about what they were told."""
    player = Player(plan, logs)
    asked = player.play()
    return asked, Judge(plan, player.family.tokenizer).findings(asked)


# ---------------------------------------------------------------- examples


def smaller(plan: Plan) -> Iterator[Plan]:
    """Yield plans that are a little simpler."""
    for at in range(len(plan.steps)):
        yield dataclasses.replace(plan, steps=plan.steps[:at] + plan.steps[at + 1 :])
    if plan.variant != VARIANTS[0]:
        yield dataclasses.replace(plan, variant=VARIANTS[0])
    if not plan.is_named:
        yield dataclasses.replace(plan, is_named=True)
    for rounds in ROUNDS:
        if rounds < plan.rounds:
            yield dataclasses.replace(plan, rounds=rounds)
    if plan.tools:
        yield dataclasses.replace(plan, tools=0)
    for at, step in enumerate(plan.steps):
        for name in ("chat", "place", "other"):
            value = getattr(step, name)
            for less in {0, 1, value // 2, value - 1}:
                if 0 <= less < value:
                    other = dataclasses.replace(step, **{name: less})
                    steps = (*plan.steps[:at], other, *plan.steps[at + 1 :])
                    yield dataclasses.replace(plan, steps=steps)


def smallest(plan: Plan, key: tuple[str, str], logs: Path) -> Plan:
    """Return the smallest plan found that shows a finding of the same rule at the same step."""
    tries = 0
    while True:
        for other in smaller(plan):
            tries += 1
            if key in {key_of(*row) for row in played(other, logs)[1]}:
                plan = other
                break
            if tries > TRIES_MAX:
                return plan
        else:
            return plan


def key_of(asked: Asked, finding: Finding) -> tuple[str, str]:
    return finding.rule, asked.kind


def shown(plan: Plan, asked: Sequence[Asked], found: Found) -> str:
    """Return a played plan for people: each request, and what is false about it."""
    variant, lines = plan.variant, []
    name = "named session" if plan.is_named else "no session id"
    lines.append(f"  {variant}, {name}, tools={plan.tools}, rounds={plan.rounds}")
    lines += [f"  step {step}" for step in plan.steps]
    for each in asked:
        roles = "".join(message["role"][0] for message in each.messages)
        told = each.told
        loss = (
            f"{told['cause']} message={told['message']} token={told['token']} lost={told['lost']}"
            f" remedy={told['remedy'][:50]!r}"
            if told
            else "nothing"
        )
        lines.append(
            f"    {each.kind:10} {'/'.join(each.session):6} {roles:16} prompt={len(each.ids)} "
            f"cached={each.answer.cached} prefilled={each.answer.prefilled} told: {loss}"
        )
        lines += [f"      !! {finding}" for other, finding in found if other is each]
    return "\n".join(lines)


# ---------------------------------------------------------------- the command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first conversation")
    parser.add_argument("--examples", type=int, default=1, help="of each rule and step")
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as logs:
        return check(options.seed, options.count, options.examples, Path(logs))


def check(seed: int, count: int, examples: int, logs: Path) -> int:
    """Play `count` conversations and print what is found; return the exit status."""
    counts: Counter[tuple[str, str]] = Counter()
    seeds: dict[tuple[str, str], list[int]] = {}
    requests, told, false, short = Counter[str](), Counter[str](), 0, 0
    began = shown_at = time.monotonic()
    for number in range(seed, seed + count):
        asked, found = played(random_plan(number), logs)
        requests.update(each.kind for each in asked)
        told.update(each.told["cause"] for each in asked if each.told)
        is_false = any(not finding.is_short for _, finding in found)
        false += is_false
        short += bool(found) and not is_false
        for each, finding in found:
            print(f"seed {number}: {each.kind}: {finding}", file=sys.stderr, flush=True)
        for key in {key_of(*row) for row in found}:
            counts[key] += 1
            seeds.setdefault(key, []).append(number)
        if time.monotonic() - shown_at > PROGRESS_S:
            shown_at = time.monotonic()
            print(f"{number - seed + 1:,} of {count:,}: {false:,}", file=sys.stderr, flush=True)
    seconds = time.monotonic() - began
    print(
        f"{count:,} conversations, {requests.total():,} requests in {seconds:.0f} s: "
        f"{told.total():,} losses told, {false:,} conversations with a falsehood, {short:,} in "
        "which one of two lines alike was told"
    )
    print("requests:", ", ".join(f"{kind} {n:,}" for kind, n in requests.most_common()))
    print("told:", ", ".join(f"{cause} {n:,}" for cause, n in told.most_common()))
    for key, times in counts.most_common():
        print(f"\n{key[0]} at {key[1]}: {times:,} conversations")
        for number in seeds[key][:examples]:
            plan = smallest(random_plan(number), key, logs)
            print(f"  seed {number}\n{shown(plan, *played(plan, logs))}", flush=True)
    return 1 if false else 0


if __name__ == "__main__":
    sys.exit(main())
