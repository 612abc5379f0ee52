"""Makes the changes that a person makes on purpose: in what an assistant said, messages and tools.

Each has a kind; a change that a client is known to make of itself names the rule that explains it.
Only messages of `wire.Prompt` are changed: what parsing takes away is not there any more.
"""

import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from hearth.shared.wire_messages import Prompt
from scripts.harness.changes.body_mutations import Where, places, put, without_cd

STRANGER: Final = "quxzwimbel"  # in no session
TWINS: Final = str.maketrans("aeocpxyi-", "\u0430\u0435\u043e\u0441\u0440\u0445\u0443\u0456\u2010")
ELSEWHERE: Final = "/srv/prod"
THINKING: Final = "reasoning_content"
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


Change = tuple[str, list[Message], str | None, str]  # kind, the part as changed, text, rule


def edits(prompts: Sequence[Prompt], count: int, seed: int, home: str) -> list[Edit]:
    """Return `count` edits (0 = all) of a session's requests, of all kinds that fit alike.

    At random places. `home` is the directory that the session's commands run in.
    """
    chance = random.Random(seed)
    made: dict[str, list[Edit]] = defaultdict(list)
    for part, request, at in _last_places(prompts):
        prompt = prompts[request]
        changes = (
            _tool_changes(prompt, at) if part == "tools" else _changes(prompt, at, home, chance)
        )
        for kind, changed, text, rule in changes:
            now: dict[str, Any] = {part: changed}
            made[kind].append(Edit(request, kind, replace(prompt, **now), text, rule))
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


def _tool_changes(prompt: Prompt, at: int) -> Iterator[Change]:
    before, tool, rest = prompt.tools[:at], prompt.tools[at], prompt.tools[at + 1 :]
    yield "tool gone", [*before, *rest], None, ""
    if rest:
        yield "tool last", [*before, *rest, tool], None, ""


def _changes(prompt: Prompt, at: int, home: str, chance: random.Random) -> Iterator[Change]:
    """Yield one change of each kind that fits the message `at`."""
    messages = prompt.messages
    before, message, rest = messages[:at], messages[at], messages[at + 1 :]
    yield "message twice", [*before, message, message, *rest], None, ""
    if message["role"] != "tool":  # a result with no call is refused by some templates
        question = {"role": "user", "content": STRANGER}
        yield "question put before", [*before, question, message, *rest], STRANGER, ""
    if message["role"] == "assistant":
        for kind, others in _order_changes(messages, at):
            yield kind, others, None, ""
        for kind, changed in _other_turns(message).items():
            rule = "thinking-stripped" if kind == "thinking deleted" else ""
            yield kind, [*before, changed, *rest], None, rule
        for kind, changed, text, rule in _turn_changes(prompt, message, home, chance):
            yield kind, [*before, changed, *rest], text, rule
    elif message["content"]:
        yield "emptied", [*before, message | {"content": ""}, *rest], None, ""


def _turn_changes(
    prompt: Prompt, message: Message, home: str, chance: random.Random
) -> Iterator[tuple[str, Message, str | None, str]]:
    """Yield for each kind one change of a word or value, at one of the places that it fits."""
    found: dict[str, list[tuple[Where, Any, str | None, str]]] = defaultdict(list)
    words = [(where, value) for where, value in places(message) if _is_words(where, value)]
    for kind, changed in _word_changes(home).items():
        for where, text in words:
            if kind.startswith("cd ") and where[-1] != "command":
                continue
            if (now := changed(text, chance)) is not None:
                is_own = _is_claude(prompt) and text == f"cd {home} && {now}"
                found[kind].append((where, now, now, "cd-stripped" if is_own else ""))
    for kind, where, now, rule in _argument_changes(prompt, message, chance):
        found[kind].append((where, now, None, rule))
    for kind, rows in found.items():
        where, now, said, rule = chance.choice(rows)
        yield kind, put(message, where, now), said, rule


# ---------------------------------------------------------------- words


def _is_words(where: Where, value: Any) -> bool:
    """Whether there stands what was said or thought, or a string that was given to a tool."""
    is_said = where[0] == "content" and where[-1] in ("content", "text")
    is_given = where[3:4] == ("arguments",) and len(where) > len(("tool_calls", 0, "function", ""))
    is_text = is_said or is_given or where == ("reasoning_content",)
    return is_text and type(value) is str and value != ""


def _is_claude(prompt: Prompt) -> bool:
    return prompt.speaker.client == "claude-code"


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
        "cd dropped": lambda text, _: without_cd(text),
        "cd put before": lambda text, _: f"cd {ELSEWHERE} && {text}",
        "cd to the home put before": lambda text, _: f"cd {home} && {text}",
        "cd elsewhere": lambda text, _: (
            f"cd {ELSEWHERE} && {rest}" if (rest := without_cd(text)) else None
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


# ---------------------------------------------------------------- values


def _argument_changes(
    prompt: Prompt, message: Message, chance: random.Random
) -> Iterator[tuple[str, Where, Any, str]]:
    """Yield (kind, where, now, rule): an argument's other values, types, name and presence."""
    for number, call in enumerate(message.get("tool_calls") or ()):
        tool, given = call["function"]["name"], call["function"]["arguments"]
        if type(given) is not dict or not given:
            continue
        root: Where = ("tool_calls", number, "function", "arguments")
        for where, value in places(given):
            for kind, now in _others(value).items():
                rule = _own_rule(prompt, tool, where[-1], value, now)
                is_known = len(where) == 1 or rule == "number-printed"
                yield kind, (*root, *where), now, rule if is_known else ""
        key = chance.choice(list(given))
        rest = {name: value for name, value in given.items() if name != key}
        yield "key dropped", root, rest, ""
        yield "key renamed", root, rest | {f"{key}_{STRANGER}": given[key]}, ""
        yield "key added", root, given | {STRANGER: True}, ""
        if given.get("replace_all") is not True:
            yield "replace_all: true", root, given | {"replace_all": True}, ""


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
    is_own = _is_claude(prompt) and declared.get("type") in ("number", "integer")
    return "value-coerced" if is_number and is_own else ""


# ---------------------------------------------------------------- parts and their order


def _other_turns(message: Message) -> dict[str, Message]:
    """Return by kind the turn with a part that came, went or was put elsewhere."""
    calls, words, thought = message.get("tool_calls"), message.get("content"), message.get(THINKING)
    rest = {key: value for key, value in message.items() if key != THINKING}
    found = {"answer added": message | {"content": STRANGER}}
    if words:
        found = {"empty think block": message | {"content": f"<think>\n\n</think>\n\n{words}"}}
    if words and (calls or thought):
        found["answer deleted"] = message | {"content": ""}
    if thought:
        found |= {
            "thinking deleted": rest,
            "thinking replaced": rest | {THINKING: STRANGER},
            "thinking said": rest | {"content": f"{thought}\n\n{words or ''}"},
        }
    else:
        found["thinking added"] = rest | {THINKING: STRANGER}
    if calls:
        named = calls[0] | {"function": calls[0]["function"] | {"name": STRANGER}}
        others = {"call twice": [calls[0], *calls], "another tool": [named, *calls[1:]]}
        if len(calls) > 1:
            others |= {"call deleted": calls[1:], "calls in another order": calls[::-1]}
        found |= {kind: message | {"tool_calls": other} for kind, other in others.items()}
    return found


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
