"""Makes copies of a client's request body in which one meaningful part is changed.

What a client sends beside them (ids, signatures, cache marks, lengths) is left alone.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from hearth.commands.replay.shortened_sessions import ROOTS
from hearth.commands.replay.traces import Body
from hearth.proxy.request.volatile_fields import canonical_text
from hearth.shared.wire_messages import Prompt

# Not content: names of things, marks for a cache, and what a block is.
SILENT: Final = frozenset(
    (
        *("type", "role", "id", "call_id", "tool_call_id", "tool_use_id", "status", "strict"),
        *("signature", "encrypted_content", "cache_control", "defer_loading"),
        *("eager_input_streaming", "external_web_access"),
    )
)
SCHEMAS: Final = frozenset(("parameters", "input_schema"))
ARGUMENTS: Final = frozenset(("arguments", "input"))  # below both, every name is the client's own
WORD: Final = "zwyrbelquoxt"  # in no trace
VOLATILE_MAX: Final = 40  # lines of one text that are changed for its canonical form's sake

_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d|\d\d?:\d\d")
_PATH: Final = re.compile(r"(?<![\w<])[\w.~-]*(?:/[\w.-]+)+")


@dataclass(frozen=True, slots=True)
class Inside:
    """A step of a path: into the JSON that a string holds."""


@dataclass(frozen=True, slots=True)
class Key:
    """The last step of a path: a key itself, not what it holds."""

    name: str


Step = str | int | Inside | Key
Where = tuple[Step, ...]
INSIDE: Final = Inside()


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of one captured request."""

    request: int
    where: Where
    kind: str
    was: Any
    now: Any

    def body_of(self, body: Body) -> Body:
        """Return `body` with the change; what does not change is shared, nothing is modified."""
        changed: Body = _put(body, self.where, self.now)
        return changed

    def __str__(self) -> str:
        steps = (f"<{s.name}>" if isinstance(s, Key) else str(s) for s in self.where if s != INSIDE)
        return f"request {self.request} {'.'.join(steps)} {self.kind}"


# ---------------------------------------------------------------- what can be changed


def leaves(body: Body) -> Iterator[tuple[Where, Any]]:
    """Yield every string, number and boolean of `body` that means something, and where it is."""
    for root in ROOTS:
        if root in body:
            yield from _leaves(body[root], (root,), is_free=False)


def _leaves(value: Any, where: Where, is_free: bool) -> Iterator[tuple[Where, Any]]:
    """Yield the leaves of `value`; where it `is_free`, keys mean something too."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if is_free:
                yield (*where, Key(key)), key
            if is_free or key not in SILENT:
                yield from _leaves(inner, (*where, key), is_free or _frees(key, where))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*where, index), is_free)
    elif where[-1] == "arguments" and isinstance(value, str) and value.startswith("{"):
        yield from _leaves(json.loads(value), (*where, INSIDE), is_free=True)
    elif value is not None and value != "":
        yield where, value


def _frees(key: str, where: Where) -> bool:
    return key in SCHEMAS or (key in ARGUMENTS and where[0] != "tools")


def last_leaves(bodies: Sequence[Body]) -> dict[tuple[Any, ...], tuple[int, Where, Any]]:
    """Return each distinct leaf, as (request, where, value) of the last request that has it."""
    found: dict[tuple[Any, ...], tuple[int, Where, Any]] = {}
    for request, body in enumerate(bodies):
        for where, value in leaves(body):
            shape = tuple("*" if isinstance(step, int) else step for step in where)
            key = (shape, type(value), value)
            found.pop(key, None)
            found[key] = (request, where, value)
    return found


def mutations(bodies: Sequence[Body]) -> Iterator[Mutation]:
    """Yield every change of every distinct leaf, once, in the last request that has it."""
    for request, where, value in last_leaves(bodies).values():
        for kind, changed in changes(value):
            yield Mutation(request, where, kind, value, changed)
        if where[-1] == "command" and isinstance(value, str):
            yield Mutation(request, where, "cd", value, _other_directory(value))


# ---------------------------------------------------------------- how it is changed


def changes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (kind, `value` with one change): each kind that fits it."""
    if isinstance(value, bool):
        yield "flipped", not value
    elif isinstance(value, int | float):
        yield "number", value + 1
    else:
        yield from _text_changes(value)


def _text_changes(text: str) -> Iterator[tuple[str, str]]:
    made = {
        "letter": _at(text, _nearest(text, str.isalpha)),
        "digit": _at(text, _digit(text)),
        "word": f"{text} {WORD}",
        "path": _other_path(text),
    }
    yield from ((kind, now) for kind, now in made.items() if now is not None)
    yield from (("volatile", now) for now in _volatile(text))


def _nearest(text: str, fits: Any, start: int = 0) -> int | None:
    """Return the character nearest to the middle of what follows `start` that `fits`."""
    middle = (start + len(text)) // 2
    order = sorted(range(start, len(text)), key=lambda at: abs(at - middle))
    return next((at for at in order if text[at].isascii() and fits(text[at])), None)


def _digit(text: str) -> int | None:
    """Return the last digit of the last date or time, else a digit near the middle."""
    dates = list(_DATE.finditer(text))
    return dates[-1].end() - 1 if dates else _nearest(text, str.isdigit)


def _at(text: str, at: int | None) -> str | None:
    """Return `text` with another character of the same kind at `at`."""
    if at is None:
        return None
    character = text[at]
    first = "0" if character.isdigit() else "a" if character.islower() else "A"
    size = 10 if character.isdigit() else 26
    other = chr(ord(first) + (ord(character) - ord(first) + 1) % size)
    return text[:at] + other + text[at + 1 :]


def _other_path(text: str) -> str | None:
    """Return `text` with another last name in its last path."""
    paths = list(_PATH.finditer(text))
    if not paths:
        return None
    start, end = paths[-1].span()
    return text[:start] + paths[-1][0].rpartition("/")[0] + "/" + WORD + text[end:]


def _other_directory(command: str) -> str:
    """Return `command` without the `cd` that it begins with, or with one that it does not have."""
    before, found, rest = command.partition(" && ")
    return rest if found and before.startswith("cd ") else f"cd /{WORD} && {command}"


def _volatile(text: str) -> Iterator[str]:
    """Yield `text` with one change each that its canonical form does not show."""
    found: dict[str, None] = {}
    for role in ("system", "user", "tool"):
        canonical, rules = canonical_text(role, text)
        if rules:
            for changed in _line_changes(text):
                if canonical_text(role, changed)[0] == canonical:
                    found[changed] = None
    yield from list(found)[:VOLATILE_MAX]


def _line_changes(text: str) -> Iterator[str]:
    lines = text.split("\n")
    for number, line in enumerate(lines):
        for fits in (str.isalpha, str.isdigit):
            changed = _at(line, _nearest(line, fits))
            if changed is not None:
                yield "\n".join([*lines[:number], changed, *lines[number + 1 :]])


def _put(value: Any, where: Where, now: Any) -> Any:
    """Return `value` with `now` at `where`."""
    if not where:
        return now
    step, rest = where[0], where[1:]
    if isinstance(step, Inside):
        return json.dumps(_put(json.loads(value), rest, now), ensure_ascii=False)
    if isinstance(step, Key):
        return {now if key == step.name else key: inner for key, inner in value.items()}
    copied = value.copy()
    copied[step] = _put(value[step], rest, now)
    return copied


# ---------------------------------------------------------------- messages added, gone or reordered


def reshaped(prompt: Prompt) -> Iterator[tuple[int, str, Prompt]]:
    """Yield (number, kind, `prompt` with one message or tool more, less, or in part).

    `number` counts the messages, then the tools.
    """
    count = len(prompt.messages)
    for at, message in enumerate(prompt.messages):
        for kind, changed in _other_messages(message):
            messages = [*prompt.messages[:at], *changed, *prompt.messages[at + 1 :]]
            yield at, f"message {at}: {kind}", replace(prompt, messages=messages)
        following = _next_turn(prompt.messages, at)
        if following > at + 1:
            messages = [*prompt.messages[: at + 1], *prompt.messages[following:]]
            yield at, f"message {at}: results gone", replace(prompt, messages=messages)
    for at, tool in enumerate(prompt.tools):
        rest = [*prompt.tools[:at], *prompt.tools[at + 1 :]]
        yield count + at, f"tool {at}: gone", replace(prompt, tools=rest)
        if at < len(rest):
            yield count + at, f"tool {at}: last", replace(prompt, tools=[*rest, tool])


def _next_turn(messages: list[dict[str, Any]], at: int) -> int:
    """Return where the turn behind `at` stands, if only results stand between; else 0."""
    if messages[at]["role"] != "assistant":
        return 0
    for number in range(at + 1, len(messages)):
        if messages[number]["role"] != "tool":
            return number if messages[number]["role"] == "assistant" else 0
    return 0


def _other_messages(message: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    yield "twice", [message, message]
    if message["role"] != "tool":  # a result with no call is refused by some templates
        yield "one before", [{"role": "user", "content": WORD}, message]
    if message["role"] != "assistant":
        if message["content"]:
            yield "emptied", [message | {"content": ""}]
        return
    yield "thinking put in its place", [message | {"reasoning_content": WORD}]
    yield "content put in its place", [message | {"content": WORD}]
    if message["content"] and (message.get("tool_calls") or message.get("reasoning_content")):
        yield "content gone", [message | {"content": ""}]
    if message.get("reasoning_content"):
        yield "thinking gone", [_without(message, "reasoning_content")]
    yield from _other_calls(message)


def _other_calls(message: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    calls = message.get("tool_calls") or []
    for at, call in enumerate(calls):
        yield (f"call {at} twice", [message | {"tool_calls": [*calls[: at + 1], *calls[at:]]}])
        if len(calls) > 1:
            yield (f"call {at} gone", [message | {"tool_calls": [*calls[:at], *calls[at + 1 :]]}])
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, dict):
            continue
        others = [(f"without {name}", _without(arguments, name)) for name in arguments]
        for kind, other in [*others, ("with one more", arguments | {WORD: WORD})]:
            changed = call | {"function": call["function"] | {"arguments": other}}
            some = [*calls[:at], changed, *calls[at + 1 :]]
            yield f"call {at} {kind}", [message | {"tool_calls": some}]


def _without(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}
