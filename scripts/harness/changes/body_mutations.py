"""Makes copies of a client's request body in which one meaningful part is changed.

What a client sends beside them (ids, signatures, cache marks, lengths) is left alone.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import methodcaller
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

OTHERS: Final = str.maketrans(ascii_letters + digits, ascii_letters[1:] + "a" + digits[1:] + "0")

Put = Callable[[str], str]
# What a change of one place in a text puts in the place of what.
SWAPS: Final[dict[str, tuple[str, Put]]] = {
    "letter": ("[a-zA-Z]", methodcaller("translate", OTHERS)),
    "digit": ("[0-9]", methodcaller("translate", OTHERS)),
    "path": (r"(?<![\w<])[\w.~-]*(?:/[\w.-]+)+", lambda path: f"{path.rpartition('/')[0]}/{WORD}"),
}


@dataclass(frozen=True, slots=True)
class Key:
    """The last step of a path: a key itself, not what it holds."""

    name: str


Where = tuple[str | int | Key, ...]  # a path; it goes on into the JSON that a string holds


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
        return dict(put(body, self.where, self.now))

    def __str__(self) -> str:
        steps = (f"<{step.name}>" if isinstance(step, Key) else str(step) for step in self.where)
        return f"request {self.request} {'.'.join(steps)} {self.kind}"


# ---------------------------------------------------------------- what can be changed


def leaves(body: Body) -> Iterator[tuple[Where, Any]]:
    """Yield every string, number and boolean of `body` that means something, and where it is."""
    return _leaves({root: body[root] for root in ROOTS if root in body}, (), is_free=False)


def _leaves(value: Any, where: Where, is_free: bool) -> Iterator[tuple[Where, Any]]:
    """Yield the leaves of `value`; where it `is_free`, keys mean something too."""
    if where[-1:] == ("arguments",) and isinstance(value, str) and value.startswith("{"):
        value, is_free = json.loads(value), True
    for step, inner in items_of(value):
        if is_free and isinstance(step, str):
            yield (*where, Key(step)), step
        if is_free or step not in SILENT:
            frees = step in SCHEMAS or (step in ARGUMENTS and where[:1] not in ((), ("tools",)))
            yield from _leaves(inner, (*where, step), is_free or frees)
    if not isinstance(value, dict | list) and value not in (None, ""):
        yield where, value


def mutations(bodies: Sequence[Body]) -> Iterator[Mutation]:
    """Yield every change of every distinct leaf, once, in the last request that has it."""
    last = {  # by its path, in whatever item of a list, and by what it is
        (tuple("*" if isinstance(step, int) else step for step in where), type(value), value): (
            request,
            where,
            value,
        )
        for request, body in enumerate(bodies)
        for where, value in leaves(body)
    }
    for request, where, value in last.values():
        for kind, changed in _changes(value, where[-1] == "command"):
            yield Mutation(request, where, kind, value, changed)


# ---------------------------------------------------------------- how it is changed


def _changes(value: Any, is_command: bool) -> Iterator[tuple[str, Any]]:
    """Yield (kind, `value` with one change): each kind that fits it."""
    if isinstance(value, bool):
        yield "flipped", not value
    elif isinstance(value, int | float):
        yield "number", value + 1
    else:
        yield from (
            (kind, now)
            for kind, swap in SWAPS.items()
            if (now := swapped(*swap, value)) is not None
        )
        yield "word", f"{value} {WORD}"
        yield from (("volatile", now) for now in _volatile(value))
        if is_command:  # without the `cd` that it begins with, or with one that it does not have
            yield "cd", without_cd(value) or f"cd /{WORD} && {value}"


def swapped(
    pattern: str,
    put: Put,
    text: str,
    choose: Callable[[Sequence[re.Match[str]]], re.Match[str]] | None = None,
) -> str | None:
    """Return `text` with another text in the place of one match; None where there is none.

    The match is the one in the middle, or the one that is chosen.
    """
    found = [each for each in re.finditer(pattern, text) if put(each[0]) != each[0]]
    if not found:
        return None
    start, end = (choose(found) if choose else found[len(found) // 2]).span()
    return text[:start] + put(text[start:end]) + text[end:]


def without_cd(command: str) -> str | None:
    """Return what follows the `cd` that a command begins with; None where there is none."""
    before, found, rest = command.partition(" && ")
    return rest if found and before.startswith("cd ") else None


def _volatile(text: str) -> list[str]:
    """Return `text` with one change each that its canonical form does not show."""
    found: dict[str, None] = {}
    for role in ("system", "user", "tool"):
        canonical, rules = canonical_text(role, text)
        changed = _with_other_lines(text) if rules else ()
        found |= {now: None for now in changed if canonical_text(role, now)[0] == canonical}
    return list(found)[:VOLATILE_MAX]


def _with_other_lines(text: str) -> Iterator[str]:
    lines = text.split("\n")
    for number, line in enumerate(lines):
        for kind in ("letter", "digit"):
            if (changed := swapped(*SWAPS[kind], line)) is not None:
                yield "\n".join([*lines[:number], changed, *lines[number + 1 :]])


# ---------------------------------------------------------------- places in JSON


def items_of(value: Any) -> Iterable[tuple[str | int, Any]]:
    """Return the steps into `value`, and what stands there; of a text, none."""
    return (
        value.items()
        if isinstance(value, dict)
        else enumerate(value if isinstance(value, list) else ())
    )


def places(value: Any, where: Where = ()) -> Iterator[tuple[Where, Any]]:
    """Yield where all that `value` holds stands, at any depth, and what it is."""
    for step, inner in items_of(value):
        yield (*where, step), inner
        yield from places(inner, (*where, step))


def put(value: Any, where: Where, now: Any) -> Any:
    """Return `value` with `now` at `where`."""
    if not where:
        return now
    if isinstance(value, str):
        return json.dumps(put(json.loads(value), where, now), ensure_ascii=False)
    step, rest = where[0], where[1:]
    if isinstance(step, Key):
        return {now if key == step.name else key: inner for key, inner in value.items()}
    copied = value.copy()
    copied[step] = put(value[step], rest, now)
    return copied
