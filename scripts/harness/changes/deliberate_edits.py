"""Makes the changes that a person makes on purpose: in what an assistant said, messages and tools.

Each has a kind; a change that a client is known to make of itself names the rule that explains it.
Only messages of `wire.Prompt` are changed: what parsing takes away is not there any more.
"""

import itertools
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Any, Final

from hearth.shared.wire_messages import Prompt
from scripts.harness.changes.body_mutations import Put, Where, places, put, swapped, without_cd
from scripts.harness.changes.echo_differences import is_claude, properties_of

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
_NUMBER: Final = r"-?\d+(?:\.\d+)?"
_BLANK: Final = r"(?<=\S) (?=\S)"
_INDENT: Final = r"(?m)(?<=\n)[ \t]+(?=\S)"
# What a change of one place in a text puts in the place of what.
_SWAPS: Final[dict[str, tuple[str, Put]]] = {
    "word": (r"\w{3,}", lambda _: STRANGER),
    "case": ("[A-Za-z]", str.swapcase),
    "look-alike": ("[aeocpxyi-]", methodcaller("translate", TWINS)),
    "number in words": (_NUMBER, "{}0".format),
    "path": (r"(?:/[\w.-]+)+|[\w-]+\.(?:py|md|txt|toml|js|ts)\b", "{}.old".format),
    "flag": (r" -\w+", "{}f".format),
    "white space doubled": (_BLANK, lambda _: "  "),
    "tab for a blank": (_BLANK, lambda _: "\t"),
    "no-break space": (_BLANK, lambda _: "\u00a0"),
    "newline for a blank": (_BLANK, lambda _: "\n"),
    "indent added": (r"(?<=\n)(?=\S)", lambda _: "    "),
    "indent removed": (_INDENT, lambda _: ""),
    "indent changed": (_INDENT, lambda _: "\t"),
}

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


Change = tuple[str, Any, str | None, str]  # kind, the part as changed, text, rule


def edits(prompts: Sequence[Prompt], count: int, seed: int, home: str) -> list[Edit]:
    """Return `count` edits (0 = all) of a session's requests, of all kinds that fit alike.

    At random places. `home` is the directory that the session's commands run in.
    """
    chance = random.Random(seed)
    made: dict[str, list[Edit]] = defaultdict(list)
    last = {  # each message and tool, once, in the last request that has it
        json.dumps(row, sort_keys=True): (part, request, at)
        for request, prompt in enumerate(prompts)
        for part in ("messages", "tools")
        for at, row in enumerate(getattr(prompt, part))
    }
    for part, request, at in last.values():
        prompt = prompts[request]
        for kind, changed, text, rule in (
            _tool_changes(prompt.tools, at)
            if part == "tools"
            else _changes(prompt, at, home, chance)
        ):
            made[kind].append(Edit(request, kind, replace(prompt, **{part: changed}), text, rule))
    for rows in made.values():
        chance.shuffle(rows)
    rounds = itertools.zip_longest(*(made[kind] for kind in sorted(made)))
    return [edit for edit in itertools.chain(*rounds) if edit is not None][: count or None]


def _tool_changes(tools: list[Any], at: int) -> Iterator[Change]:
    before, tool, rest = tools[:at], tools[at], tools[at + 1 :]
    yield "tool gone", [*before, *rest], None, ""
    if rest:
        yield "tool last", [*before, *rest, tool], None, ""


def _changes(prompt: Prompt, at: int, home: str, chance: random.Random) -> Iterator[Change]:
    """Yield one change of each kind that fits the message `at`."""
    for kind, changed in _other_messages(prompt.messages, at).items():
        yield kind, changed, STRANGER if kind == "question put before" else None, ""
    if prompt.messages[at]["role"] == "assistant":
        yield from _turn_changes(prompt, at, home, chance)


def _turn_changes(prompt: Prompt, at: int, home: str, chance: random.Random) -> Iterator[Change]:
    """Yield for each kind one change of the turn `at`, at one of the places that it fits."""
    message, own = prompt.messages[at], home if is_claude(prompt) else None
    found: list[tuple[str, Where, Any, str | None, str]] = [
        *(
            (kind, (), turn, None, "thinking-stripped" if kind == "thinking deleted" else "")
            for kind, turn in _other_turns(message)
        ),
        *_argument_changes(prompt, message, chance),
        *(
            (kind, where, now, now, "cd-stripped" if text == f"cd {own} && {now}" else "")
            for where, text in places(message)
            if _is_words(where, text)
            for kind, now in _other_words(text, where[-1] == "command", home, chance).items()
            if now is not None
        ),
    ]
    chance.shuffle(found)
    for kind, where, now, said, rule in {row[0]: row for row in found}.values():
        yield kind, put(prompt.messages, (at, *where), now), said, rule


# ---------------------------------------------------------------- words


def _is_words(where: Where, value: Any) -> bool:
    """Whether there stands what was said or thought, or a string that was given to a tool."""
    is_said = where[0] == "content" and where[-1] in ("content", "text")
    is_given = where[3:4] == ("arguments",) and len(where) > len(("tool_calls", 0, "function", ""))
    return (is_said or is_given or where == (THINKING,)) and type(value) is str and value != ""


def _other_words(
    text: str, is_command: bool, home: str, chance: random.Random
) -> dict[str, str | None]:
    """Return by kind the text with one change; None where the kind does not fit."""
    found = {kind: swapped(*swap, text, chance.choice) for kind, swap in _SWAPS.items()} | {
        "white space before": chance.choice(("  ", "\n", "\ufeff")) + text,
        "white space behind": text + chance.choice((" ", "\n", "\u00a0")),
        "cut": text[: len(text) // 2].rstrip() or None,
    }
    if is_command:
        rest = without_cd(text)
        found |= {
            "cd dropped": rest,
            "cd put before": f"cd {ELSEWHERE} && {text}",
            "cd to the home put before": f"cd {home} && {text}",
            "cd elsewhere": rest and f"cd {ELSEWHERE} && {rest}",
        }
    return found


# ---------------------------------------------------------------- values


def _argument_changes(
    prompt: Prompt, message: Message, chance: random.Random
) -> Iterator[tuple[str, Where, Any, None, str]]:
    """Yield (kind, where, now, None, rule): other values, types, names and presence."""
    for number, call in enumerate(message.get("tool_calls") or ()):
        tool, given = call["function"]["name"], call["function"]["arguments"]
        if type(given) is not dict or not given:
            continue
        root: Where = ("tool_calls", number, "function", "arguments")
        for where, value in places(given):
            for kind, now in _others(value).items():
                yield kind, (*root, *where), now, None, _own_rule(prompt, tool, where, value, now)
        key = chance.choice(list(given))
        rest = {name: value for name, value in given.items() if name != key}
        made = {
            "key dropped": rest,
            "key renamed": rest | {f"{key}_{STRANGER}": given[key]},
            "key added": given | {STRANGER: True},
            "replace_all: true": given | {"replace_all": True},
        }
        yield from ((kind, root, now, None, "") for kind, now in made.items() if now != given)


def _others(value: Any) -> dict[str, Any]:
    """Return other values, by kind, each of another meaning or type than `value`."""
    found: dict[str, Any] = {"null": None, "in a list": [value]}
    match value:
        case None:
            return {}
        case bool():
            found |= {"flipped": not value, "number for a boolean": int(value)}
        case int() | float():
            found |= {
                "number": value + 1,
                "sign": -value or 1,
                "string for a number": str(value),
                "float for an integer": float(value),
                "integer for a float" if value == int(value) else "rounded": int(value),
            }
        case str():
            is_number = re.fullmatch(_NUMBER, value)
            found |= {"emptied": "", "number for a string": float(value) if is_number else value}
        case list():
            found |= {
                "item dropped": value[:-1],
                "item twice": [*value, *value[-1:]],
                "items in another order": value[::-1],
            }
    return {kind: now for kind, now in found.items() if (type(now), now) != (type(value), value)}


def _own_rule(prompt: Prompt, tool: str, where: Where, before: Any, now: Any) -> str:
    """Return the rule of a client that makes `now` of `before`, an argument's, itself."""
    if type(before) is float and type(now) is int and before == now:
        return "number-printed"
    if len(where) > 1 or type(before) is not str or type(now) is not float:
        return ""
    declared = properties_of(prompt, tool).get(str(where[0])) or {}
    is_own = is_claude(prompt) and declared.get("type") in ("number", "integer")
    return "value-coerced" if is_own else ""


# ---------------------------------------------------------------- parts and their order


def _other_turns(message: Message) -> Iterator[tuple[str, Message]]:
    """Yield (kind, the turn with a part that came, went or was put elsewhere)."""
    words, thought = message.get("content"), message.get(THINKING)
    calls = message.get("tool_calls") or []
    rest = {key: value for key, value in message.items() if key != THINKING}
    called = {
        "call twice": calls[:1] + calls,
        "another tool": [
            call if number else call | {"function": call["function"] | {"name": STRANGER}}
            for number, call in enumerate(calls)
        ],
        "call deleted": calls[1:],
        "calls in another order": calls[::-1],
    }
    found = {
        "answer added": not words and message | {"content": STRANGER},
        "empty think block": words and message | {"content": f"<think>\n\n</think>\n\n{words}"},
        "answer deleted": words and (calls or thought) and message | {"content": ""},
        "thinking deleted": thought and rest,
        "thinking replaced": thought and rest | {THINKING: STRANGER},
        "thinking said": thought and rest | {"content": f"{thought}\n\n{words or ''}"},
        "thinking added": not thought and rest | {THINKING: STRANGER},
        **{kind: now and message | {"tool_calls": now} for kind, now in called.items()},
    }
    yield from ((kind, turn) for kind, turn in found.items() if turn and turn != message)


def _other_messages(messages: list[Message], at: int) -> dict[str, list[Message]]:
    """Return by kind the messages with the one `at`, and results of its calls, come and gone."""
    message, end = messages[at], _turn_end(messages, at)
    is_turn = message["role"] == "assistant"
    is_next = is_turn and end < len(messages) and messages[end]["role"] == "assistant"
    other = messages[end : _turn_end(messages, end)] if is_next else []
    silent = {key: value for key, value in message.items() if key != "tool_calls"}
    rest = {
        "message twice": [message, *messages[at:]],
        # A result with no call is refused by some templates.
        "question put before": message["role"] != "tool"
        and [{"role": "user", "content": STRANGER}, *messages[at:]],
        "emptied": not is_turn and [message | {"content": ""}, *messages[at + 1 :]],
        "turn deleted": other and messages[end:],
        "results deleted": other and [message, *messages[end:]],
        "turns swapped": other and [*other, *messages[at:end], *messages[end + len(other) :]],
        "all calls deleted": message.get("content") and is_turn and [silent, *messages[end:]],
    }
    return {
        kind: [*messages[:at], *now] for kind, now in rest.items() if now and now != messages[at:]
    }


def _turn_end(messages: list[Message], at: int) -> int:
    """Return where the results of the turn `at` end."""
    others = (n for n in range(at + 1, len(messages)) if messages[n]["role"] != "tool")
    return next(others, len(messages))
