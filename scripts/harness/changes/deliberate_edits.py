"""Makes the changes that a person makes on purpose: in what an assistant said, messages and tools.

Each has a kind; a change that a client is known to make of itself names the rule that explains it.
Only messages of `wire.Prompt` are changed: what parsing takes away is not there any more.
"""

import copy
import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from hearth.shared.wire_messages import Prompt

STRANGER: Final = "quxzwimbel"  # in no session
TWINS: Final = str.maketrans("aeocpxyi-", "\u0430\u0435\u043e\u0441\u0440\u0445\u0443\u0456\u2010")
ELSEWHERE: Final = "/srv/prod"
# Kinds that a template may leave out, cold as warm: it trims both ends of a text, and takes a block
# that thinks nothing for none.
TRIMMED: Final = frozenset(("white space before", "white space behind", "empty think block"))
# Kinds that a template may leave out which writes a string as it is, without quotes.
UNTYPED: Final = frozenset(("string for a number", "number for a string"))
# Kinds in which a message or a tool comes or goes: no template leaves such a change out.
COMING_AND_GOING: Final = frozenset(
    ("message twice", "question put before", "emptied", "results deleted", "tool gone", "tool last")
)
_PATH: Final = re.compile(r"(?:/[\w.-]+)+|[\w-]+\.(?:py|md|txt|toml|js|ts)\b")
_FLAG: Final = re.compile(r" -\w+")
_NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?")
_INDENTED: Final = re.compile(r"(?m)(?<=\n)[ \t]+(?=\S)")

Message = dict[str, Any]
Spot = tuple[Any, Any]  # a list or object, and the index or key in it


@dataclass(frozen=True)
class Edit:
    """One change of one request. `text` is what stands there now, where that is words."""

    request: int
    kind: str
    prompt: Prompt
    text: str | None = None
    rule: str = ""  # that explains it, where a client makes this very change of itself

    def __str__(self) -> str:
        return f"request {self.request}: {self.kind}: {(self.text or '')[:60]!r}"


Change = tuple[str, Prompt, str | None, str]  # kind, the changed prompt, text, rule


def edits(prompts: Sequence[Prompt], count: int, seed: int, home: str) -> list[Edit]:
    """Return `count` edits (0 = all) of a session's requests, of all kinds that fit alike.

    At random places. `home` is the directory that the session's commands run in.
    """
    chance = random.Random(seed)
    made: dict[str, list[Edit]] = defaultdict(list)
    for part, request, at in _last_places(prompts):
        changes = _tool_changes if part == "tools" else _changes
        for kind, changed, text, rule in changes(prompts[request], at, home, chance):
            made[kind].append(Edit(request, kind, changed, text, rule))
    found: list[Edit] = []
    while made and (not count or len(found) < count):
        for kind in sorted(made):
            rows = made[kind]
            found.append(rows.pop(chance.randrange(len(rows))))
            if not rows:
                del made[kind]
    return found[:count] if count else found


def _last_places(prompts: Sequence[Prompt]) -> list[tuple[str, int, int]]:
    """Return (part, request, index) of each message and tool, once, in the last request with it."""
    last: dict[str, tuple[str, int, int]] = {}
    for request, prompt in enumerate(prompts):
        for part in ("messages", "tools"):
            for at, row in enumerate(getattr(prompt, part)):
                last[json.dumps(row, sort_keys=True)] = part, request, at
    return list(last.values())


def _tool_changes(prompt: Prompt, at: int, home: str, chance: random.Random) -> Iterator[Change]:
    rest = [*prompt.tools[:at], *prompt.tools[at + 1 :]]
    yield "tool gone", replace(prompt, tools=rest), None, ""
    if at < len(rest):
        yield "tool last", replace(prompt, tools=[*rest, prompt.tools[at]]), None, ""


def _changes(prompt: Prompt, at: int, home: str, chance: random.Random) -> Iterator[Change]:
    """Yield one change of each kind that fits the message `at`."""
    messages = prompt.messages
    before, message, rest = messages[:at], messages[at], messages[at + 1 :]
    yield "message twice", replace(prompt, messages=[*before, message, message, *rest]), None, ""
    if message["role"] != "tool":  # a result with no call is refused by some templates
        question = {"role": "user", "content": STRANGER}
        yield (
            "question put before",
            replace(prompt, messages=[*before, question, message, *rest]),
            STRANGER,
            "",
        )
    if message["role"] == "assistant":
        for kind, text, changed, rule in _turn_changes(prompt, at, home, chance):
            yield kind, replace(prompt, messages=[*before, changed, *rest]), text, rule
        for kind, others in _order_changes(messages, at):
            yield kind, replace(prompt, messages=others), None, ""
    elif message["content"]:
        emptied = message | {"content": ""}
        yield "emptied", replace(prompt, messages=[*before, emptied, *rest]), None, ""


def _turn_changes(
    prompt: Prompt, at: int, home: str, chance: random.Random
) -> Iterator[tuple[str, str | None, Message, str]]:
    message = prompt.messages[at]
    for kind, changed in _missing_parts(message):
        yield kind, None, changed, "thinking-stripped" if kind == "thinking deleted" else ""
    for kind, changed in _other_calls(message):
        yield kind, None, changed, ""
    for kind, put in _word_changes(home).items():
        changed = copy.deepcopy(message)
        spots = [spot for spot in _texts(changed) if put(spot[0][spot[1]], chance) is not None]
        if kind.startswith("cd "):
            spots = [spot for spot in spots if spot[1] == "command"]
        if not spots:
            continue
        where, key = chance.choice(spots)
        before, where[key] = where[key], put(where[key], chance)
        is_own = prompt.speaker.client == "claude-code" and before == f"cd {home} && {where[key]}"
        yield kind, where[key], changed, "cd-stripped" if is_own else ""
    yield from _value_changes(prompt, message, chance)


# ---------------------------------------------------------------- words


def _texts(message: Message) -> list[Spot]:
    """Return where `message` holds words: what was said, thought, and given to tools."""
    found: list[Spot] = [(message, key) for key in ("content", "reasoning_content")]
    parts = message.get("content") or ""
    found += [(part, "text") for part in parts if type(part) is dict]
    found = [(where, key) for where, key in found if type(where.get(key)) is str and where[key]]
    inside = [spot for call in _arguments(message) for spot in _spots(call)]
    return found + [(where, key) for where, key in inside if type(where[key]) is str and where[key]]


def _arguments(message: Message) -> list[dict[str, Any]]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [each["arguments"] for each in functions if type(each["arguments"]) is dict]


def _spots(value: Any) -> list[Spot]:
    found: list[Spot] = []
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        found.append((value, key))
        if isinstance(value[key], dict | list):
            found += _spots(value[key])
    return found


def _word_changes(home: str) -> dict[str, Callable[[str, random.Random], str | None]]:
    """Return for each kind what makes the change; it returns None where the kind does not fit."""
    return {
        "word": lambda text, chance: _swapped(r"\w{3,}", text, chance, lambda _: STRANGER),
        "case": lambda text, chance: _swapped(r"[A-Za-z]", text, chance, str.swapcase),
        "look-alike": lambda text, chance: _swapped(
            r"[aeocpxyi-]", text, chance, lambda letter: letter.translate(TWINS)
        ),
        "number in words": lambda text, chance: _swapped(
            _NUMBER, text, chance, lambda digits: digits + "0"
        ),
        "path": lambda text, chance: _swapped(_PATH, text, chance, lambda path: f"{path}.old"),
        "flag": lambda text, chance: _swapped(_FLAG, text, chance, lambda flag: f"{flag}f"),
        "white space doubled": lambda text, chance: _swapped(
            r"(?<=\S) (?=\S)", text, chance, lambda _: "  "
        ),
        "tab for a blank": lambda text, chance: _swapped(
            r"(?<=\S) (?=\S)", text, chance, lambda _: "\t"
        ),
        "no-break space": lambda text, chance: _swapped(
            r"(?<=\S) (?=\S)", text, chance, lambda _: "\u00a0"
        ),
        "newline for a blank": lambda text, chance: _swapped(
            r"(?<=\S) (?=\S)", text, chance, lambda _: "\n"
        ),
        "indent added": lambda text, chance: _swapped(
            r"(?<=\n)(?=\S)", text, chance, lambda _: "    "
        ),
        "indent removed": lambda text, chance: _swapped(_INDENTED, text, chance, lambda _: ""),
        "indent changed": lambda text, chance: _swapped(_INDENTED, text, chance, lambda _: "\t"),
        "white space before": lambda text, chance: chance.choice(("  ", "\n", "\ufeff")) + text,
        "white space behind": lambda text, chance: text + chance.choice((" ", "\n", "\u00a0")),
        "cut": lambda text, chance: text[: len(text) // 2].rstrip() or None,
        "cd dropped": lambda text, _: _without_cd(text),
        "cd put before": lambda text, _: f"cd {ELSEWHERE} && {text}",
        "cd to the home put before": lambda text, _: f"cd {home} && {text}",
        "cd elsewhere": lambda text, _: (
            f"cd {ELSEWHERE} && {rest}" if (rest := _without_cd(text)) else None
        ),
    }


def _swapped(
    pattern: str | re.Pattern[str], text: str, chance: random.Random, put: Callable[[str], str]
) -> str | None:
    """Return `text` with another text in the place of one match; None where there is none."""
    found = [each for each in re.finditer(pattern, text) if put(each[0]) != each[0]]
    if not found:
        return None
    start, end = chance.choice(found).span()
    return text[:start] + put(text[start:end]) + text[end:]


def _without_cd(text: str) -> str | None:
    before, found, rest = text.partition(" && ")
    return rest if found and before.startswith("cd ") else None


# ---------------------------------------------------------------- values


def _value_changes(
    prompt: Prompt, message: Message, chance: random.Random
) -> Iterator[tuple[str, str | None, Message, str]]:
    """Yield changes of one argument: its value, its type, its name, its presence."""
    for number, call in enumerate(message.get("tool_calls") or ()):
        arguments = call["function"]["arguments"]
        if type(arguments) is not dict or not arguments:
            continue
        kinds = [kind for where, key in _spots(arguments) for kind in _others(where[key])]
        for kind in dict.fromkeys(kinds):
            changed = copy.deepcopy(message)
            given = changed["tool_calls"][number]["function"]["arguments"]
            spots = [spot for spot in _spots(given) if kind in _others(spot[0][spot[1]])]
            where, key = chance.choice(spots)
            before, where[key] = where[key], _others(where[key])[kind]
            rule = _own_rule(prompt, call["function"]["name"], key, before, where[key])
            yield kind, None, changed, rule if where is given or rule == "number-printed" else ""
        yield from _key_changes(message, number, chance)


def _others(value: Any) -> dict[str, Any]:
    """Return other values, by kind, each of another meaning or type than `value`."""
    found: dict[str, Any] = {"null": None, "in a list": [value]}
    if type(value) is bool:
        return found | {"flipped": not value, "number for a boolean": int(value)}
    if type(value) in (int, float):
        found |= {"number": value + 1, "sign": -value or 1, "string for a number": str(value)}
        if type(value) is int:
            return found | {"float for an integer": float(value)}
        whole = int(value)
        return found | ({"integer for a float": whole} if whole == value else {"rounded": whole})
    if type(value) is str:
        numeric = _NUMBER.fullmatch(value)
        found |= {"emptied": ""} if value else {}
        return found | ({"number for a string": float(value)} if numeric else {})
    if type(value) is list:
        found |= {"item dropped": value[:-1], "item twice": [*value, value[-1]]} if value else {}
        return found | ({"items in another order": value[::-1]} if value[::-1] != value else {})
    return {} if value is None else found


def _own_rule(prompt: Prompt, tool: str, key: Any, before: Any, now: Any) -> str:
    """Return the rule of a client that makes `now` of `before` itself."""
    if type(before) is float and type(now) is int and before == now:
        return "number-printed"
    schemas = {row["function"]["name"]: row["function"].get("parameters") for row in prompt.tools}
    declared = ((schemas.get(tool) or {}).get("properties") or {}).get(key) or {}
    is_number = type(before) is str and type(now) is float
    is_own = prompt.speaker.client == "claude-code" and declared.get("type") in (
        *("number", "integer"),
    )
    return "value-coerced" if is_number and is_own else ""


def _key_changes(
    message: Message, number: int, chance: random.Random
) -> Iterator[tuple[str, str | None, Message, str]]:
    for kind in ("key dropped", "key renamed", "key added", "replace_all: true"):
        changed = copy.deepcopy(message)
        given = changed["tool_calls"][number]["function"]["arguments"]
        key = chance.choice(list(given))
        if kind == "key added":
            given[STRANGER] = True
        elif kind == "replace_all: true":
            if given.get("replace_all") is True:
                continue
            given["replace_all"] = True
        else:
            value = given.pop(key)
            if kind == "key renamed":
                given[f"{key}_{STRANGER}"] = value
        yield kind, None, changed, ""


# ---------------------------------------------------------------- parts and their order


def _missing_parts(message: Message) -> Iterator[tuple[str, Message]]:
    calls, words = message.get("tool_calls"), message.get("content")
    thought = message.get("reasoning_content")
    if thought:
        rest = {key: value for key, value in message.items() if key != "reasoning_content"}
        yield "thinking deleted", rest
        yield "thinking replaced", message | {"reasoning_content": STRANGER}
        yield "thinking said", rest | {"content": f"{thought}\n\n{words or ''}"}
    else:
        yield "thinking added", message | {"reasoning_content": STRANGER}
    if words and (calls or thought):
        yield "answer deleted", message | {"content": ""}
    if words:
        yield "empty think block", message | {"content": f"<think>\n\n</think>\n\n{words}"}
    else:
        yield "answer added", message | {"content": STRANGER}


def _other_calls(message: Message) -> Iterator[tuple[str, Message]]:
    calls = message.get("tool_calls") or []
    if not calls:
        return
    first = calls[0]
    yield "call twice", message | {"tool_calls": [first, *calls]}
    named = first | {"function": first["function"] | {"name": STRANGER}}
    yield "another tool", message | {"tool_calls": [named, *calls[1:]]}
    if len(calls) > 1:
        yield "call deleted", message | {"tool_calls": calls[1:]}
        yield "calls in another order", message | {"tool_calls": calls[::-1]}


def _order_changes(messages: list[Message], at: int) -> Iterator[tuple[str, list[Message]]]:
    """Yield changes of turns, each with the results of its calls."""
    end = _turn_end(messages, at)
    before, turn, rest = messages[:at], messages[at:end], messages[end:]
    if rest and rest[0]["role"] == "assistant":
        yield "turn deleted", [*before, *rest]
        if len(turn) > 1:
            yield "results deleted", [*before, turn[0], *rest]
        following = _turn_end(messages, end)
        other = messages[end:following]
        if other != turn:
            yield "turns swapped", [*before, *other, *turn, *messages[following:]]
    if turn[0].get("tool_calls") and turn[0].get("content"):
        silent = {key: value for key, value in turn[0].items() if key != "tool_calls"}
        yield "all calls deleted", [*before, silent, *rest]


def _turn_end(messages: list[Message], at: int) -> int:
    """Return where the results of the turn `at` end."""
    end = at + 1
    while end < len(messages) and messages[end]["role"] == "tool":
        end += 1
    return end
