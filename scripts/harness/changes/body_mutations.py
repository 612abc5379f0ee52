"""Makes copies of a client's request body in which one meaningful part is changed.

What a client sends beside them (ids, signatures, cache marks, lengths) is left alone.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_letters, digits
from typing import Any, Final

from hearth.commands.replay.shortened_sessions import ROOTS
from hearth.commands.replay.traces import Body
from hearth.proxy.request.volatile_fields import canonical_text

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

LETTER, DIGIT = "[a-zA-Z]", "[0-9]"
OTHERS: Final = str.maketrans(ascii_letters + digits, ascii_letters[1:] + "a" + digits[1:] + "0")
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
        changed: Body = put(body, self.where, self.now)
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
        "letter": _other_character(text, LETTER),
        "digit": _other_character(text, DIGIT),
        "word": f"{text} {WORD}",
        "path": _other_path(text),
    }
    yield from ((kind, now) for kind, now in made.items() if now is not None)
    yield from (("volatile", now) for now in _volatile(text))


def _other_character(text: str, kind: str) -> str | None:
    """Return `text` with another letter or digit in the place of the middle one of `kind`."""
    found = [each.start() for each in re.finditer(kind, text)]
    if not found:
        return None
    at = found[len(found) // 2]
    return text[:at] + text[at].translate(OTHERS) + text[at + 1 :]


def _other_path(text: str) -> str | None:
    """Return `text` with another last name in its last path."""
    paths = list(_PATH.finditer(text))
    if not paths:
        return None
    start, end = paths[-1].span()
    return text[:start] + paths[-1][0].rpartition("/")[0] + "/" + WORD + text[end:]


def _other_directory(command: str) -> str:
    """Return `command` without the `cd` that it begins with, or with one that it does not have."""
    rest = without_cd(command)
    return f"cd /{WORD} && {command}" if rest is None else rest


def without_cd(command: str) -> str | None:
    """Return what follows the `cd` that a command begins with; None where there is none."""
    before, found, rest = command.partition(" && ")
    return rest if found and before.startswith("cd ") else None


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
        for kind in (LETTER, DIGIT):
            changed = _other_character(line, kind)
            if changed is not None:
                yield "\n".join([*lines[:number], changed, *lines[number + 1 :]])


# ---------------------------------------------------------------- places in JSON


def places(value: Any, where: Where = ()) -> Iterator[tuple[Where, Any]]:
    """Yield where all that `value` holds stands, at any depth, and what it is."""
    steps = value if isinstance(value, dict) else range(len(value) if type(value) is list else 0)
    for step in steps:
        yield (*where, step), value[step]
        yield from places(value[step], (*where, step))


def put(value: Any, where: Where, now: Any) -> Any:
    """Return `value` with `now` at `where`."""
    if not where:
        return now
    step, rest = where[0], where[1:]
    if isinstance(step, Inside):
        return json.dumps(put(json.loads(value), rest, now), ensure_ascii=False)
    if isinstance(step, Key):
        return {now if key == step.name else key: inner for key, inner in value.items()}
    copied = value.copy()
    copied[step] = put(value[step], rest, now)
    return copied
