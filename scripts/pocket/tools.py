"""Makes tools with invented names, requests that need one of them, and the tools' results."""

import json
import random
from dataclasses import dataclass, field
from typing import Any, Final

from scripts.pocket import vocabulary as words
from scripts.pocket.vocabulary import invented, is_held_out, value

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    kind: str  # of JSON Schema: string, integer or boolean
    is_required: bool = True


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool, and the words in which somebody asks for what it does."""

    name: str
    verb: str
    thing: str
    description: str
    parameters: tuple[Parameter, ...]

    @property
    def schema(self) -> Json:
        properties = {row.name: {"type": row.kind} for row in self.parameters}
        parameters: Json = {"type": "object", "properties": properties}
        if required := [row.name for row in self.parameters if row.is_required]:
            parameters["required"] = required
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Use:
    """A request, the call that serves it, its result and what is to be said of that."""

    request: str
    tool: Tool
    arguments: Json
    result: str
    wanted: str  # the part of the result that the answer must repeat
    answer: str
    doing: str = field(default="")  # "clean the red boat"


def tools(rng: random.Random, count: int, held_out: bool = False) -> list[Tool]:
    """Return `count` tools of different names; some share their verb or their thing."""
    made: list[Tool] = []
    while len(made) < count:
        like = rng.choice(made) if made and rng.random() < 0.25 else None
        one = _tool(rng, held_out, like)
        if all(
            one.name != row.name and (one.verb, one.thing) != (row.verb, row.thing) for row in made
        ):
            made.append(one)
    return made


def _tool(rng: random.Random, held_out: bool, like: Tool | None) -> Tool:
    verb, thing = rng.choice(words.VERBS), rng.choice(words.NOUNS)
    if rng.random() < 0.25:
        thing = f"{rng.choice(words.ADJECTIVES).replace('_', ' ')} {thing}"
    elif rng.random() < 0.2:
        thing = invented(rng, held_out)
    if like and rng.random() < 0.5:
        verb = like.verb
    elif like:
        thing = like.thing
    names = rng.sample(words.PARAMETERS, rng.choice((0, 1, 1, 1, 2, 2, 3)))
    if names and rng.random() < 0.2:
        names[0] = invented(rng, held_out)
    kinds = ("string", "string", "integer", "integer", "boolean")
    parameters = tuple(Parameter(name, rng.choice(kinds), rng.random() < 0.8) for name in names)
    description = rng.choice(
        (
            f"{verb.capitalize()} the {thing}.",
            f"{verb.capitalize()} the {thing}.",
            f"Use this to {verb} the {thing}.",
            f"Can {verb} the {thing} for the user.",
            f"{verb} the {thing}",
        )
    )
    return Tool(_name(rng, held_out, verb, thing), verb, thing, description, parameters)


def _name(rng: random.Random, held_out: bool, verb: str, thing: str) -> str:
    """Return a name that says what the tool does, or one that says nothing."""
    while True:
        draw = rng.random()
        last = thing.split()[-1]
        if draw < 0.3 and not held_out:
            name = f"{verb}_{last}"
        elif draw < 0.4 and not held_out:
            name = verb.capitalize() + last.capitalize()
        elif draw < 0.75:
            name = f"{invented(rng, held_out)}_{rng.choice((last, verb, invented(rng, held_out)))}"
        elif draw < 0.9:
            name = invented(rng, held_out)
        else:
            name = f"mcp__{invented(rng, held_out)}__{rng.choice((verb, last, invented(rng)))}"
        if held_out or not is_held_out(name):
            return name


# ---------------------------------------------------------------- requests and results

_ASKING: Final = (
    "Please {}.", "Please {}.", "{}.", "{}, please.", "Can you {}?", "Could you {}?",
    "I want to {}.", "I need you to {}.", "Now {}.", "Go on and {}.", "Would you {}?", "Let us {}.",
    "You should {}.",
)  # fmt: skip


def use(rng: random.Random, tool: Tool, held_out: bool = False) -> Use:
    """Return a request that only `tool` serves, with what comes of it."""
    arguments: Json = {}
    parts: list[str] = []
    for parameter in tool.parameters:
        if not parameter.is_required and rng.random() < 0.5:
            continue
        given, said = _argument(rng, parameter, held_out)
        arguments[parameter.name] = given
        parts.append(said)
    if len(parts) > 1 and rng.random() < 0.3:
        parts.reverse()
    doing = f"{tool.verb} the {tool.thing}"
    wish = doing
    if parts:
        wish += rng.choice((" with ", " with ", ", ", " using ", " where ")) + " and ".join(parts)
    asked = rng.choice(_ASKING).format(wish)
    asked = asked[0].upper() + asked[1:]
    result, wanted, answer = _result(rng, tool, held_out)
    return Use(asked, tool, arguments, result, wanted, answer, doing)


def _argument(rng: random.Random, parameter: Parameter, held_out: bool) -> tuple[Any, str]:
    """Return a value for `parameter` and the words that give it."""
    name = parameter.name
    if parameter.kind == "integer":
        number = rng.randrange(10 ** rng.choice((1, 2, 3)))
        return number, rng.choice(
            (f"{name} {number}", f"{name} = {number}", f"{name} set to {number}")
        )
    if parameter.kind == "boolean":
        is_on = rng.random() < 0.5
        return is_on, f"{name} {'on' if is_on else 'off'}"
    text = value(rng, held_out)
    said = rng.choice(
        (f"{name} {text}", f'{name} "{text}"', f"{name}: {text}", f"{name} set to {text}")
    )
    return text, said


def _result(rng: random.Random, tool: Tool, held_out: bool) -> tuple[str, str, str]:
    """Return a result's text, the part that matters, and the answer that tells it."""
    it, name = value(rng, held_out), rng.choice(words.ATTRIBUTES).replace("_", " ")
    key = name.replace(" ", "_")
    draw = rng.random()
    if draw < 0.3:
        rows = {key: it}
        while len(rows) < rng.choice((1, 2, 3)):
            rows.setdefault(rng.choice(words.PARAMETERS), value(rng))
        keys = list(rows)
        rng.shuffle(keys)
        told = {row: rows[row] for row in keys}
        first = next(iter(told))
        answer = f"The {first.replace('_', ' ')} is {told[first]}."
        return json.dumps(told), told[first], answer
    if draw < 0.5:
        return f"The {name} is {it}.", it, f"The {name} is {it}."
    if draw < 0.65:
        return it, it, f"The result is {it}."
    if draw < 0.75:
        return f"{key}: {it}", it, f"The {name} is {it}."
    if draw < 0.87:
        return "ok", "done", f"I have done it: {tool.verb} the {tool.thing}."
    fault = f"{rng.choice(words.NOUNS)} {rng.choice(('not found', 'is locked', 'is missing', it))}"
    return f"Error: {fault}", fault, f"That failed: {fault}."


# ---------------------------------------------------------------- reading files

READERS: Final = (
    ("Read", "file_path", "Reads a file."),
    ("read_file", "path", "Read a file."),
    ("read", "filePath", "Reads a file from disk."),
    ("view", "path", "View a file."),
)


def reader(rng: random.Random) -> tuple[Tool, str]:
    """Return a tool that reads files, and its parameter's name."""
    name, parameter, description = rng.choice(READERS)
    if rng.random() < 0.5:
        name = f"{invented(rng)}_{rng.choice(('file', 'read', 'open'))}"
    return Tool(name, "read", "file", description, (Parameter(parameter, "string"),)), parameter


def file_use(rng: random.Random, one: Tool, parameter: str, where: str, text: str) -> Use:
    """Return a use that reads `where` and finds `text` there; the answer is the caller's."""
    asked = rng.choice(
        ("Read {}.", "Please read {}.", "Open {} and look.", "Look into {}.")
    ).format(where)
    return Use(asked, one, {parameter: where}, text, "", "", f"read {where}")
