"""Makes facts that a conversation states, corrects and asks for, in many wordings."""

import random
from dataclasses import dataclass
from typing import Final

from scripts.pocket import vocabulary as words
from scripts.pocket.vocabulary import invented, value


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that was said. `statement` says it, `question` asks for it, `answer` tells it."""

    key: str  # what identifies it: a later fact of the same key replaces it
    value: str
    statement: str
    question: str
    answer: str


def fact(rng: random.Random, held_out: bool = False) -> Fact:
    """Return a random fact; where `held_out`, of words that no training conversation has."""
    draw = rng.random()
    if draw < 0.5:
        return noun_fact(rng, phrase(rng, held_out), value(rng, held_out))
    if draw < 0.7:
        return person_fact(rng, held_out)
    if draw < 0.85:
        return setting_fact(rng, setting_name(rng, held_out), value(rng, held_out))
    return place_fact(rng, held_out)


def corrected(rng: random.Random, old: Fact) -> Fact:
    """Return another value for what `old` says, in the words of a correction."""
    value_of_it = value(rng)
    if value_of_it == old.value:
        value_of_it += "x"
    new = Fact(
        old.key,
        value_of_it,
        old.statement.replace(old.value, value_of_it),
        old.question,
        old.answer.replace(old.value, value_of_it),
    )
    lead = rng.choice(("Correction: ", "I was wrong. ", "Update: ", "That changed. ", "No, wait. "))
    return Fact(new.key, new.value, lead + new.statement, new.question, new.answer)


# ---------------------------------------------------------------- nouns

PERSONAL: Final = (
    "name", "dog", "cat", "hometown", "job", "favorite color", "favorite food", "favorite animal",
    "favorite city", "phone number", "badge number", "locker code", "birthday", "office", "desk",
    "team", "manager", "flight", "hotel", "seat", "room number", "password", "project", "car",
    "boat", "address", "nickname", "lucky number", "favorite book", "teacher", "neighbor",
)  # fmt: skip


def phrase(rng: random.Random, held_out: bool = False) -> str:
    """Return what has a value, as in "the code of the north gate" or "my badge number"."""
    draw = rng.random()
    noun, attribute = (
        rng.choice(words.NOUNS),
        rng.choice(words.ATTRIBUTES).replace("_", " "),
    )
    if draw < 0.2 and not held_out:
        return "my " + rng.choice(PERSONAL)
    if draw < 0.32:
        return f"my {invented(rng, held_out) if held_out else rng.choice(words.ADJECTIVES)} {noun}"
    if draw < 0.44:
        return f"{rng.choice(words.FIRST_NAMES)}'s {rng.choice((noun, attribute))}"
    if draw < 0.6:
        return f"the {attribute} of the {rng.choice(words.ADJECTIVES)} {noun}".replace("_", " ")
    if draw < 0.72:
        return f"the {attribute} of the {noun}"
    if draw < 0.84:
        return f"the {attribute} of {invented(rng, held_out).capitalize()}"
    if draw < 0.92:
        return f"the {noun} {attribute}"
    return f"the {invented(rng, held_out)} {rng.choice((noun, attribute))}"


def noun_fact(rng: random.Random, what: str, it: str) -> Fact:
    start = what[0].upper() + what[1:]
    yours = what.replace("my ", "your ") if what.startswith("my ") else what
    statement = rng.choice(
        (
            f"{start} is {it}.",
            f"{start} is {it}.",
            f"{start} is {it}.",
            f"{start}: {it}",
            f"{start} is now {it}.",
            f"Remember that {what} is {it}.",
            f"Note that {what} is {it}.",
            f"For {what} we have {it}.",
            f"By the way, {what} is {it}.",
            f"They told me that {what} is {it}.",
        )
    )
    question = rng.choice(
        (
            f"What is {what}?",
            f"What is {what}?",
            f"What's {what}?",
            f"Tell me {what}.",
            f"Do you know {what}?",
            f"Can you tell me {what}?",
            f"Remind me: what is {what}?",
            f"I forgot {what}. What is it?",
            f"{start}?",
            f"What did I say is {what}?",
        )
    )
    return Fact(what, it, statement, question, f"{yours[0].upper()}{yours[1:]} is {it}.")


# ---------------------------------------------------------------- people, places, settings

_PEOPLE: Final = (
    ("{n} lives in {v}.", "Where does {n} live?", "{n} lives in {v}.", words.CITIES),
    ("{n} comes from {v}.", "Where does {n} come from?", "{n} comes from {v}.", words.CITIES),
    ("{n} works as a {v}.", "What is {n}'s job?", "{n} works as a {v}.", words.JOBS),
    ("{n} likes {v}.", "What does {n} like?", "{n} likes {v}.", words.FOODS),
    ("{n} does not like {v}.", "What does {n} not like?", "{n} does not like {v}.", words.FOODS),
    ("{n} is afraid of the {v}.", "What is {n} afraid of?", "{n} is afraid of the {v}.",
     words.ANIMALS),
    ("{n} has a {v}.", "Which animal does {n} have?", "{n} has a {v}.", words.ANIMALS),
    ("{n} wears {v}.", "Which color does {n} wear?", "{n} wears {v}.", words.COLORS),
    ("{n} is {v} years old.", "How old is {n}?", "{n} is {v} years old.", ()),
    ("{n} arrives at {v}.", "When does {n} arrive?", "{n} arrives at {v}.", ()),
)  # fmt: skip


def person_fact(rng: random.Random, held_out: bool = False) -> Fact:
    statement, question, answer, choices = rng.choice(_PEOPLE)
    name = rng.choice(words.FIRST_NAMES)
    if held_out or rng.random() < 0.3:
        name = invented(rng, held_out).capitalize()
    if "years" in statement:
        it = str(rng.randrange(5, 99))
    elif "arrives" in statement:
        it = f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    else:
        it = rng.choice(choices) if rng.random() < 0.5 else invented(rng, held_out)
        it = it.capitalize() if choices is words.CITIES else it
    told = [text.format(n=name, v=it) for text in (statement, question, answer)]
    return Fact(f"{name} {statement}", it, *told)


def place_fact(rng: random.Random, held_out: bool = False) -> Fact:
    thing = rng.choice(words.NOUNS)
    if rng.random() < 0.6:
        thing = f"{rng.choice(words.ADJECTIVES).replace('_', ' ')} {thing}"
    place = rng.choice((rng.choice(words.CITIES), f"the {rng.choice(words.NOUNS)}"))
    if held_out or rng.random() < 0.4:
        place = invented(rng, held_out).capitalize()
    near = rng.choice(("in", "near", "behind", "next to", "under", "in"))
    said = f"The {thing} is {near} {place}."
    question = rng.choice((f"Where is the {thing}?", f"Where can I find the {thing}?"))
    return Fact(f"where {thing}", f"{near} {place}", said, question, said)


def setting_name(rng: random.Random, held_out: bool = False) -> str:
    first = rng.choice((rng.choice(words.NOUNS), invented(rng, held_out)))
    first = invented(rng, held_out) if held_out else first
    second = rng.choice((*words.ATTRIBUTES, *words.PARAMETERS))
    draw = rng.random()
    if draw < 0.5:
        return f"{first}_{second}"
    if draw < 0.7:
        return f"{first}.{second}"
    if draw < 0.85:
        return f"{first}_{second}".upper()
    return first


def setting_fact(rng: random.Random, name: str, it: str) -> Fact:
    statement = rng.choice(
        (
            f"{name} = {it}",
            f"{name}: {it}",
            f'"{name}": "{it}",',
            f"{name}={it}",
            f"{name} is {it}.",
        )
    )
    question = rng.choice(
        (
            f"What is {name}?",
            f"What is {name} set to?",
            f"Which value does {name} have?",
            f"What is the value of {name}?",
            f"Tell me the value of {name}.",
            f"What does it say for {name}?",
        )
    )
    return Fact(name, it, statement, question, f"{name} is {it}.")


# ---------------------------------------------------------------- what stands between facts


def filler(rng: random.Random) -> str:
    """Return a sentence or line that nobody asks about."""
    noun, other = rng.choice(words.NOUNS), rng.choice(words.NOUNS)
    adjective, verb = (
        rng.choice(words.ADJECTIVES).replace("_", " "),
        rng.choice(words.VERBS),
    )
    name, number = rng.choice(words.FIRST_NAMES), rng.randrange(1000)
    return rng.choice(
        (
            f"The {adjective} {noun} stands beside the {other}.",
            f"Nobody wanted to {verb} the {noun} that day.",
            f"{name} went to the {noun} and came back with a {other}.",
            f"It was a {adjective} morning in {rng.choice(words.CITIES)}.",
            f"After {number} days the {noun} was {adjective} again.",
            f"First {verb} the {noun}, then {rng.choice(words.VERBS)} the {adjective} {other}.",
            f"def {verb}_{noun}({other}): return {other}.{verb}({number})",
            f"[{rng.randrange(24):02}:{rng.randrange(60):02}] INFO {noun}: {verb} {number} done",
            f"import {noun}",
            f"- {verb} the {noun} when the {other} is {adjective}",
            f"We talked about {rng.choice(words.FOODS)} and about the {noun}.",
            f"In {rng.choice(words.MONTHS)} the {other} was {adjective}, as {name} said.",
            f"# {verb} {noun}",
            f"{invented(rng).capitalize()} {invented(rng)} {invented(rng)} {invented(rng)}.",
            f'{{"{noun}": {number}, "{other}": "{adjective}"}}',
            "",
        )
    )


def document(rng: random.Random, sentences: int, told: list[Fact], lined: bool) -> str:
    """Return a text of `sentences` fillers with `told` in between, in that order."""
    places = sorted(rng.randrange(sentences + 1) for _ in told)
    rows: list[str] = []
    for index in range(sentences + 1):
        rows.extend(
            fact.statement for fact, place in zip(told, places, strict=True) if place == index
        )
        if index < sentences:
            rows.append(filler(rng))
    return ("\n" if lined else " ").join(rows)
