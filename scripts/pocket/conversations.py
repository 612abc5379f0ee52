"""Makes the conversations that pocket is trained on and examined with."""

import random
from dataclasses import dataclass, field
from typing import Any, Final

from scripts.pocket import vocabulary as words
from scripts.pocket.arithmetic import calculation, counting
from scripts.pocket.facts import Fact, corrected, document, fact
from scripts.pocket.personal_facts import personal_fact
from scripts.pocket.small_talk import small_talk
from scripts.pocket.tools import Tool, Use, file_use, reader, tools, use

Json = dict[str, Any]


@dataclass(slots=True)
class Turn:
    """One message. `thought` is what an assistant thinks first where it is asked to think."""

    role: str  # system, user, assistant or tool
    text: str = ""
    thought: str = ""
    calls: list[tuple[str, Json]] = field(default_factory=list)


@dataclass(slots=True)
class Talk:
    """A conversation and the tools offered in it."""

    turns: list[Turn] = field(default_factory=list)
    tools: list[Tool] = field(default_factory=list)
    known: dict[str, Fact] = field(default_factory=dict)  # what was told so far, by key

    def say(self, text: str, answer: str, thought: str) -> None:
        self.turns += [Turn("user", text), Turn("assistant", answer, thought)]

    def learn(self, *facts: Fact) -> None:
        for one in facts:
            self.known.pop(one.key, None)
            self.known[one.key] = one


def talk(rng: random.Random, moves: int, sentences: int, tools_max: int) -> Talk:
    """Return a conversation of some `moves`, a document of `sentences` before them."""
    made = Talk()
    if tools_max:
        made.tools = tools(rng, rng.randrange(1, tools_max + 1))
    _open(rng, made)
    if sentences:
        _document(rng, made, sentences)
    choices = [
        _hello,
        _hello,
        _state,
        _state,
        _ask,
        _ask,
        _ask,
        _unknown,
        _correct,
        _repeat,
        _sum,
        _count,
    ]
    choices += [_use, _use, _use, _use, _use, _read, _both] if made.tools else [_ask, _ask]
    if made.tools and rng.random() < 0.6:
        choices = [_use, _use, _use, _both, _ask]
    for _ in range(moves):
        rng.choice(choices)(rng, made)
    if made.turns[-1].role != "assistant":
        _ask(rng, made)
    return made


def chat(rng: random.Random, moves: int) -> Talk:
    """Return a newcomer's first chat: small talk, and facts of his own that are asked for."""
    made = Talk()
    if rng.random() < 0.3:
        made.turns.append(Turn("system", rng.choice(_SYSTEMS)))
    choices = [_hello] * 9 + [_tell, _tell, _tell_and_ask, _tell_and_ask, _unknown, _repeat]
    choices += [_sum, _sum, _count, _count, _recap]
    for _ in range(moves):
        rng.choice([*choices, _ask, _ask, _ask, _correct] if made.known else choices)(rng, made)
    if not made.turns or made.turns[-1].role != "assistant":
        _hello(rng, made)
    return made


# ---------------------------------------------------------------- the beginning

_SYSTEMS: Final = (
    "You are a helpful assistant.", "You are Pocket.", "You are a coding agent.", "Be brief.",
    "You are an interactive agent that helps users.", "Answer in one sentence.",
    "You are a helpful assistant. Use the tools where they help.", "Help the user.",
)  # fmt: skip


def _open(rng: random.Random, made: Talk) -> None:
    """Begin with a system prompt, in most conversations one that states facts."""
    if rng.random() < 0.25:
        return
    rows = [rng.choice(_SYSTEMS)]
    told: list[Fact] = []
    if rng.random() < 0.6:
        told.append(today(words.date(rng), rng))
    told += [fact(rng) for _ in range(rng.choice((0, 0, 1, 2, 4)))]
    rng.shuffle(told)
    rows += [one.statement for one in told]
    made.turns.append(Turn("system", rng.choice(("\n", " ", "\n\n")).join(rows)))
    made.learn(*told)


def today(date: str, rng: random.Random) -> Fact:
    """Return the fact of the day, as agents write it."""
    said = rng.choice(
        (
            f"Today's date is {date}.",
            f"Today's date: {date}",
            f"The date is {date}.",
            f"Current date: {date}",
            f"<env>\nWorking directory: /{rng.choice(words.NOUNS)}\nToday's date: {date}\n</env>",
            f"<current_date>{date}</current_date>",
        )
    )
    asked = rng.choice(
        (
            "What is today's date?", "Which day is it today?", "What is the date?",
            "What date is it today?", "What day is it?", "Tell me today's date.",
        )
    )  # fmt: skip
    return Fact("today", date, said, asked, f"Today's date is {date}.")


def _document(rng: random.Random, made: Talk, sentences: int) -> None:
    """Let the user paste a text with facts in it, and ask for some."""
    told = _different(rng, max(2, min(14, sentences // 4)))
    text = document(rng, sentences, told, lined=rng.random() < 0.6)
    made.learn(*told)
    lead = rng.choice(("Here is a text:\n", "Read this:\n", "", "Some notes:\n", "<file>\n"))
    end = "\n</file>" if lead == "<file>\n" else ""
    if rng.random() < 0.5:
        made.say(lead + text + end, "I have read it. What do you want to know?", "A text to read.")
    else:
        one = rng.choice(told)
        made.say(f"{lead}{text}{end}\n\n{one.question}", one.answer, _recall(one))
    for one in rng.sample(told, min(len(told), rng.choice((2, 3, 5)))):
        made.say(one.question, one.answer, _recall(one))


def _different(rng: random.Random, count: int) -> list[Fact]:
    """Return facts of different keys."""
    found: dict[str, Fact] = {}
    while len(found) < count:
        one = fact(rng)
        found[one.key] = one
    return list(found.values())


# ---------------------------------------------------------------- moves without tools


def _recall(one: Fact) -> str:
    return f"The question is: {one.question} I was told: {one.answer}"


def _hello(rng: random.Random, made: Talk) -> None:
    made.say(*small_talk(rng))


def _tell(rng: random.Random, made: Talk) -> None:
    """Tell something of oneself."""
    one = personal_fact(rng)
    made.learn(one)
    made.say(one.statement, _noted(one), "The user tells me a fact.")


def _tell_and_ask(rng: random.Random, made: Talk) -> None:
    """Tell something and ask for it in one turn."""
    one = personal_fact(rng) if rng.random() < 0.5 else fact(rng)
    made.learn(one)
    joint = rng.choice((" ", " ", "\n"))
    made.say(f"{one.statement}{joint}{one.question}", one.answer, _recall(one))


def _noted(one: Fact) -> str:
    greeting = "Nice to meet you! " if one.key == "my name" else ""
    return f"{greeting}I will remember: {one.answer}"


def _recap(rng: random.Random, made: Talk) -> None:
    """Ask for everything that was told, where that is little."""
    facts = list(made.known.values())
    if len(facts) > RECAP_MAX:
        return _hello(rng, made)
    asked = rng.choice(_RECAPS)
    if not facts:
        return made.say(asked, "Nobody told me anything yet.", "I was told nothing.")
    told = " ".join(one.answer for one in facts)
    return made.say(asked, f"You told me: {told}", f"I was told: {told}")


RECAP_MAX: Final = 3
_RECAPS: Final = (
    "What did I tell you?", "What do you know about me?", "What do you remember?",
    "What did I say?", "Tell me what you know about me.", "What have I told you so far?",
    "Repeat what I told you.", "What do you know so far?", "Do you know anything about me?",
    "what did i tell you", "Tell me what I told you.", "What was it that I told you?",
)  # fmt: skip


def _state(rng: random.Random, made: Talk) -> None:
    if rng.random() < 0.2:
        return _tell(rng, made)
    told = _different(rng, rng.choice((1, 1, 2, 3, 5)))
    made.learn(*told)
    lead = rng.choice(("", "", "", "Remember this: ", "Please note: ", "Some facts. "))
    text = lead + rng.choice((" ", " ", "\n")).join(one.statement for one in told)
    if len(told) == 1:
        return made.say(text, _noted(told[0]), "The user tells me a fact.")
    return made.say(text, "I will remember that.", "The user tells me something.")


def _ask(rng: random.Random, made: Talk) -> None:
    if not made.known:
        _state(rng, made)
    one = rng.choice(list(made.known.values()))
    made.say(one.question, one.answer, _recall(one))


def _unknown(rng: random.Random, made: Talk) -> None:
    one = personal_fact(rng) if rng.random() < 0.4 else fact(rng)
    if one.key not in made.known:
        made.say(one.question, "Nobody told me that.", f"I was not told. {one.question}")


def _correct(rng: random.Random, made: Talk) -> None:
    changeable = [
        one for key, one in made.known.items() if key != "today" and one.value in one.statement
    ]
    if not changeable:
        return _state(rng, made)
    new = corrected(rng, rng.choice(changeable))
    made.learn(new)
    made.say(new.statement, f"I will remember: {new.answer}", "The user corrects a fact.")
    if rng.random() < 0.7:
        made.say(new.question, new.answer, _recall(new))


def _repeat(rng: random.Random, made: Talk) -> None:
    pieces = [
        words.value(rng) if rng.random() < 0.6 else rng.choice(words.NOUNS)
        for _ in range(rng.choice((1, 2, 3, 5, 8, 12)))
    ]
    text = " ".join(pieces)
    asked = rng.choice(
        (
            "Repeat: {}",
            "Say {}",
            'Repeat "{}"',
            "Say exactly: {}",
            "Echo {}",
            "Please say: {}",
            "Repeat after me: {}",
            'Please repeat "{}"',
            'Can you say "{}"?',
            'Say the word "{}"',
            "Repeat these words: {}",
            "Please repeat after me: {}",
            'Please say "{}"',
            "repeat {}",
        )
    )
    made.say(asked.format(text), text, "I repeat the text.")


def _sum(rng: random.Random, made: Talk) -> None:
    made.say(*calculation(rng))


def _count(rng: random.Random, made: Talk) -> None:
    made.say(*counting(rng))


# ---------------------------------------------------------------- moves with tools


def _plan(one: Use) -> str:
    return f"The user wants me to {one.doing}. The tool for that is {one.tool.name}."


def _use(rng: random.Random, made: Talk) -> None:
    one = use(rng, rng.choice(made.tools))
    made.turns += [
        Turn("user", one.request),
        Turn("assistant", "", _plan(one), [(one.tool.name, one.arguments)]),
        Turn("tool", one.result),
        Turn("assistant", one.answer, f"The tool said: {one.result}"),
    ]


def _both(rng: random.Random, made: Talk) -> None:
    """Ask for two things at once: two calls in one turn, two results, one answer."""
    if len(made.tools) < 2:
        return _use(rng, made)
    first, second = (use(rng, one) for one in rng.sample(made.tools, 2))
    joint = rng.choice((" ", " Then: ", " Also: ", "\n"))
    made.turns += [
        Turn("user", first.request + joint + second.request),
        Turn(
            "assistant",
            "",
            f"Two things: {first.doing} with {first.tool.name}, "
            f"{second.doing} with {second.tool.name}.",
            [(one.tool.name, one.arguments) for one in (first, second)],
        ),
        Turn("tool", first.result),
        Turn("tool", second.result),
        Turn("assistant", f"{first.answer} {second.answer}", "I have two results."),
    ]
    return None


def _read(rng: random.Random, made: Talk) -> None:
    """Read a file with a tool and ask for facts that stand in it."""
    one, parameter = reader(rng)
    if any(row.name == one.name for row in made.tools):
        one = next(row for row in made.tools if row.name == one.name)
        if len(one.parameters) != 1:
            return
        parameter = one.parameters[0].name
    else:
        made.tools.insert(rng.randrange(len(made.tools) + 1), one)
    told = _different(rng, rng.choice((1, 2, 3, 5)))
    text = document(rng, rng.choice((0, 2, 5, 10)), told, lined=True)
    reading = file_use(rng, one, parameter, words.path(rng), text)
    made.learn(*told)
    asked = rng.choice(told)
    answer = asked.answer if rng.random() < 0.7 else "I have read it. What do you want to know?"
    request = f"{reading.request} {asked.question}" if answer == asked.answer else reading.request
    made.turns += [
        Turn("user", request),
        Turn("assistant", "", _plan(reading), [(one.name, reading.arguments)]),
        Turn("tool", reading.result),
        Turn("assistant", answer, _recall(asked) if answer == asked.answer else "A text to read."),
    ]
    for other in rng.sample(told, min(len(told), 2)):
        made.say(other.question, other.answer, _recall(other))
