"""Examines a pocket model with names and values that no training conversation contains."""

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx_lm import load, stream_generate

from scripts.pocket import vocabulary as words
from scripts.pocket.conversation_tokens import messages_of
from scripts.pocket.conversations import Talk, Turn, today
from scripts.pocket.facts import Fact, document, fact
from scripts.pocket.openings import OPENINGS, Opening
from scripts.pocket.tools import Use, tools, use

SEED: Final = 1_000_003  # apart from the seeds of the training
TOKENS_MAX: Final = 160
SENTENCE_TOKENS: Final = 17  # about
Z: Final = 1.96  # a 95 % interval


@dataclass(slots=True)
class Rate:
    """How many of how many, with its Wilson interval of 95 %; `missed` holds some failures."""

    good: int = 0
    count: int = 0
    missed: list[str] = field(default_factory=list)

    def add(self, is_good: bool, what: str) -> None:
        self.good += is_good
        self.count += 1
        if not is_good:
            self.missed.append(what)

    @property
    def share(self) -> float:
        return self.good / max(1, self.count)

    @property
    def interval(self) -> tuple[float, float]:
        count = max(1, self.count)
        middle = self.share + Z**2 / (2 * count)
        spread = Z * math.sqrt(self.share * (1 - self.share) / count + Z**2 / (4 * count**2))
        whole = 1 + Z**2 / count
        return max(0.0, (middle - spread) / whole), min(1.0, (middle + spread) / whole)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.good} of {self.count} = {self.share:.3f} ({low:.3f} to {high:.3f})"


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation that waits for an answer, and what that must be."""

    talk: Talk
    is_right: Callable[[str], bool]
    wanted: str


class Examinee:
    """A loaded model that answers greedily. On a CPU it computes in float32: faster there."""

    def __init__(self, directory: Path) -> None:
        self._model, self._tokenizer = load(str(directory))[:2]
        if mx.default_device() == mx.cpu:
            self._model.set_dtype(mx.float32)

    def prompt(self, talk: Talk, thinks: bool) -> list[int]:
        messages, offered = messages_of(talk)
        ids: list[int] = self._tokenizer.apply_chat_template(
            messages,
            tools=offered or None,
            add_generation_prompt=True,
            enable_thinking=thinks,
            return_dict=False,
        )
        return ids

    def answer(self, prompt: list[int]) -> tuple[str, bool]:
        """Return what the model writes, and whether it ended by itself."""
        rows = list(stream_generate(self._model, self._tokenizer, prompt, TOKENS_MAX))
        return "".join(row.text for row in rows), rows[-1].finish_reason == "stop"


def evaluate(directory: Path, short: int, long: int) -> dict[str, Rate]:
    """Return the rates of every skill: `short` questions each, `long` at 4,000 tokens."""
    examinee = Examinee(directory)
    rates = {name: Rate() for name in (*SKILLS, "ends its turn", "thinks if and only if asked")}
    rates[NEWCOMER] = Rate()
    for opening in OPENINGS:
        said = answer_to(examinee, opening)
        rates[NEWCOMER].add(opening.is_right(said), f"{opening.said} <- {said!r}")
    for skill, make in SKILLS.items():
        for number in range(long if skill == RECALL_4K else short):
            rng = random.Random(f"{SEED} {skill} {number}")
            question, thinks = make(rng), number % 2 == 1
            text, has_ended = examinee.answer(examinee.prompt(question.talk, thinks))
            thought, _, said = text.rpartition("</think>")
            told = f"{question.wanted!r} <- {text!r}"
            rates[skill].add(question.is_right(said.strip()), told)
            rates["ends its turn"].add(has_ended, told)
            has_thought = text.startswith("<think>") and thought.strip() != "<think>"
            is_as_asked = has_thought if thinks else "<think>" not in text and not thought
            rates["thinks if and only if asked"].add(is_as_asked, told)
    return rates


def answer_to(examinee: Examinee, opening: Opening) -> str:
    """Return the last answer of a chat that begins so. It thinks first, as a newcomer finds it."""
    talk = Talk()
    for said in opening.said:
        talk.turns.append(Turn("user", said))
        text, _ = examinee.answer(examinee.prompt(talk, thinks=True))
        talk.turns.append(Turn("assistant", text.rpartition("</think>")[2].strip()))
    return talk.turns[-1].text


# ---------------------------------------------------------------- questions


def _recall(rng: random.Random, tokens: int) -> Question:
    """Ask for one of several facts in a conversation of about `tokens` tokens."""
    talk = Talk([Turn("system", f"You are Pocket. {today(words.date(rng), rng).statement}")])
    told: dict[str, Fact] = {}
    while len(told) < rng.choice((2, 5, 8, 12)):
        one = fact(rng, held_out=True)
        told.setdefault(one.key, one)
    facts = list(told.values())
    sentences = max(1, (tokens - 160 - 16 * len(facts)) // SENTENCE_TOKENS)
    text = document(rng, sentences, facts, lined=rng.random() < 0.6)
    talk.say(f"Some notes:\n{text}", "I have read it. What do you want to know?", "A text to read.")
    for one in rng.sample(facts, min(len(facts) - 1, rng.randrange(3))):
        talk.say(one.question, one.answer, "")
    one = rng.choice(facts)
    talk.turns.append(Turn("user", one.question))
    return Question(talk, lambda said: one.value in said, one.value)


def _with_tools(rng: random.Random) -> tuple[Talk, Use]:
    talk = Talk([Turn("system", "You are a helpful assistant.")])
    talk.tools = tools(rng, rng.randrange(1, 9), held_out=True)
    one = use(rng, rng.choice(talk.tools), held_out=True)
    talk.turns.append(Turn("user", one.request))
    return talk, one


def _call(rng: random.Random) -> Question:
    talk, one = _with_tools(rng)
    wanted = {"name": one.tool.name, "arguments": one.arguments}
    return Question(talk, lambda said: list(_calls(said)) == [wanted], json.dumps(wanted))


def _calls(said: str) -> Iterator[Any]:
    for piece in said.split("<tool_call>")[1:]:
        try:
            yield json.loads(piece.split("</tool_call>")[0])
        except ValueError:
            yield piece


def _result(rng: random.Random) -> Question:
    """Ask for what a result says; one that says "ok" and no more has nothing to repeat."""
    talk, one = _with_tools(rng)
    while one.result == "ok":
        one = use(rng, one.tool, held_out=True)
    talk.turns[-1] = Turn("user", one.request)
    talk.turns.append(Turn("assistant", "", "", [(one.tool.name, one.arguments)]))
    talk.turns.append(Turn("tool", one.result))
    return Question(talk, lambda said: one.wanted in said, one.wanted)


RECALL_4K: Final = "copies a fact at 4k tokens"
NEWCOMER: Final = "answers a newcomer's opening"
SKILLS: Final[dict[str, Callable[[random.Random], Question]]] = {
    "copies a fact at 1k tokens": lambda rng: _recall(rng, 1_000),
    RECALL_4K: lambda rng: _recall(rng, 4_000),
    "right tool, right arguments": _call,
    "uses the tool's result": _result,
}
