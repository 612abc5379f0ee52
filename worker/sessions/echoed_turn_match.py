"""Decides whether an assistant turn that a client sends back still says what the model said.

Clients re-serialise, trim and strip. Each habit that leaves the meaning alone is a rule of RULES,
with its evidence; a difference that no rule explains is a change by the client or its user, and
then the client's version is what the model must be shown. Most rules have a direction: what the
record has and the echo lost, never the reverse. What parsing takes away (white space between JSON
tokens, key order, unicode escapes) and what is not in a `TurnContent` (call ids, signatures) needs
none.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final, NoReturn

CONTENT_TRIMMED: Final = "content-trimmed"
THINKING_STRIPPED: Final = "thinking-stripped"
THINKING_TRIMMED: Final = "thinking-trimmed"
THINKING_MOVED: Final = "thinking-moved"
NUMBER_PRINTED: Final = "number-printed"
VALUE_COERCED: Final = "value-coerced"
CD_STRIPPED: Final = "cd-stripped"
REPLACE_ALL_ADDED: Final = "replace-all-added"
UNEXPLAINED: Final = "unexplained"

# Rule -> what it allows, and who does it. Requests of a trace count from 0; "facts" is the
# project's study of what agent clients send, section 3.
RULES: Final[Mapping[str, str]] = {
    CONTENT_TRIMMED: "content lost white space at its ends, or was nothing else: Claude Code and "
    "PI drop a blank text (facts)",
    THINKING_STRIPPED: "thinking is not sent back: OpenClaw over Responses after a reload (facts)",
    THINKING_TRIMMED: "thinking lost white space at its ends: qwen-code-session-1, request 4",
    THINKING_MOVED: "thinking stands in the content as a leading <think> block, on either side",
    NUMBER_PRINTED: "a number as JavaScript prints it, 5000.0 as 5000: all but Codex (facts)",
    VALUE_COERCED: 'a string became the number or boolean that the tool declares: Claude Code, "3" '
    "as Read's offset (facts)",
    CD_STRIPPED: "a command lost `cd X && ` before it, X the session's working directory: "
    "claude-code-session-1, request 7; claude-code-session-9, request 6",
    REPLACE_ALL_ADDED: "Edit gained replace_all: false: claude-code-session-1, request 10",
}

HEAD_MESSAGES_MAX: Final = 6  # Claude Code's sub-agents are told their directory in the fifth
_HEAD_CHARS_MAX: Final = 65_536
_BLANK: Final = (  # what JavaScript's trim() takes
    "\t\n\v\f\r \u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000\ufeff"
)
_EXPONENT_FROM: Final = 1e21  # JavaScript prints whole numbers below it digit by digit
_DECIMAL: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,20})(\.[0-9]{1,20})?")
_BOOLEANS: Final = {"true": True, "false": False}

_PATH: Final = r"((?:/|~/|[A-Za-z]:[\\/])[^\n\"'`<>]{0,1000})"
_TAGGED: Final = re.compile(r"<cwd>[ \t]{0,8}\n?[ \t]{0,8}" + _PATH + r"\n?[ \t]{0,8}</cwd>")
_NAMED: Final = re.compile(
    r"(?i)\b(?:working[ _]directory|working in the directory|cwd|workdir)"
    r"[\"'`*]{0,3}[ \t]{0,4}[:=][ \t*]{0,4}[\"'`]?" + _PATH
)
_LABELLED: Final = re.compile(
    r"(?m)^[ \t]*(?:[-*] |[0-9]{1,2}\. )?[^\W\d_][^\n:/]{0,40}:[ \t]{1,4}(/[^\s\"'`<>]*)[ \t]*$"
)


@dataclass(frozen=True, slots=True)
class TurnContent:
    """The words and calls of an assistant turn. Immutable."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, Any], ...]  # (name, arguments: an object, or text that holds none)


@dataclass(frozen=True, slots=True)
class Known:
    """The facts about the session that sends an echo. Immutable."""

    directories: frozenset[str]  # that its commands run in
    schemas: Mapping[str, dict[str, Any]]  # tool name -> JSON schema of its parameters


def turn_content(message: dict[str, Any]) -> TurnContent:
    """Return what `message` says, an assistant's of `wire.Prompt`."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return TurnContent(
        reasoning=message.get("reasoning_content") or "",
        content=message.get("content") or "",
        calls=tuple((each["name"], _parsed(each["arguments"])) for each in functions),
    )


def _parsed(arguments: Any) -> Any:
    """Return the object that `arguments` is the text of; no text at all is an empty one."""
    if type(arguments) is not str:
        return arguments
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return arguments
    return value if type(value) is dict else arguments


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def says_the_same(record: TurnContent, echo: TurnContent, known: Known) -> bool:
    """Return whether `echo` is `record` but for what RULES allow."""
    return UNEXPLAINED not in changes(record, echo, known)


def changes(record: TurnContent, echo: TurnContent, known: Known) -> list[str]:
    """Return the rules that it takes to make `echo` of `record`, in the order of RULES.

    [] where they are equal as they are, [UNEXPLAINED] where they do not say the same.
    """
    spoken = _spoken_changes(record, echo)
    if spoken is None or len(record.calls) != len(echo.calls):
        return [UNEXPLAINED]
    needed = set(spoken)
    for ours, theirs in zip(record.calls, echo.calls, strict=True):
        if not _is_same_call(ours, theirs, known, needed):
            return [UNEXPLAINED]
    return [rule for rule in RULES if rule in needed] if needed else []


# ---------------------------------------------------------------- words


def _spoken_changes(record: TurnContent, echo: TurnContent) -> list[str] | None:
    ours, theirs = (record.reasoning, record.content), (echo.reasoning, echo.content)
    rules = _text_changes(ours, theirs)
    if rules is not None:
        return rules
    # Only now: an answer that is about <think> tags says the same when it is the same.
    opened = _unfolded(ours), _unfolded(theirs)
    if opened == (ours, theirs):
        return None
    rules = _text_changes(*opened)
    return None if rules is None else [*rules, THINKING_MOVED]


def _text_changes(ours: tuple[str, str], theirs: tuple[str, str]) -> list[str] | None:
    """Compare (reasoning, content): the rules it takes, None where none explains it."""
    rules = []
    if ours[1] != theirs[1]:
        if ours[1].strip(_BLANK) != theirs[1].strip(_BLANK):
            return None
        rules.append(CONTENT_TRIMMED)
    if ours[0] != theirs[0]:
        sent = theirs[0].strip(_BLANK)
        if ours[0].strip(_BLANK) == sent:
            rules.append(THINKING_TRIMMED)
        elif not sent:
            rules.append(THINKING_STRIPPED)
        else:
            return None
    return rules


def _unfolded(spoken: tuple[str, str]) -> tuple[str, str]:
    """Take the <think> block that a content begins with for its reasoning, if there is none."""
    reasoning, content = spoken
    start = content.lstrip(_BLANK)
    if reasoning.strip(_BLANK) or not start.startswith("<think>"):
        return spoken
    block, closed, rest = start.removeprefix("<think>").partition("</think>")
    return (block, rest) if closed else spoken


# ---------------------------------------------------------------- calls


def _is_same_call(
    ours: tuple[str, Any], theirs: tuple[str, Any], known: Known, needed: set[str]
) -> bool:
    """Compare two calls; the rules that it took are added to `needed`."""
    name, arguments = ours
    echoed = theirs[1]
    if name != theirs[0]:
        return False
    if type(arguments) is not dict or type(echoed) is not dict:
        return _is_same_value(arguments, echoed, needed)
    if arguments.keys() != echoed.keys():
        if not _is_replace_all_added(name, arguments, echoed):
            return False
        needed.add(REPLACE_ALL_ADDED)
    for key, value in arguments.items():
        if _is_same_value(value, echoed[key], needed):
            continue
        if _is_coerced(value, echoed[key], known.schemas.get(name), key):
            needed.add(VALUE_COERCED)
        elif key == "command" and _is_cd_stripped(value, echoed[key], known.directories):
            needed.add(CD_STRIPPED)
        else:
            return False
    return True


def _is_same_value(ours: Any, theirs: Any, needed: set[str]) -> bool:
    """Compare JSON of any depth: true, 1 and "1" are three values, 1 and 1.0 are one."""
    pairs = [(ours, theirs)]
    while pairs:
        left, right = pairs.pop()
        kind = type(left)
        if kind is int or kind is float:
            if not _is_same_number(left, right, needed):
                return False
        elif kind is not type(right):
            return False
        elif kind is dict:
            if left.keys() != right.keys():
                return False
            pairs += [(value, right[key]) for key, value in left.items()]
        elif kind is list:
            if len(left) != len(right):
                return False
            pairs += zip(left, right, strict=True)
        elif left != right:
            return False
    return True


def _is_same_number(ours: int | float, theirs: Any, needed: set[str]) -> bool:
    if type(theirs) is not int and type(theirs) is not float:
        return False
    if ours == theirs and type(ours) is type(theirs):
        return True
    if ours != ours:  # NaN
        return bool(theirs != theirs)
    if ours != theirs and _as_javascript(ours) != theirs:
        return False
    needed.add(NUMBER_PRINTED)
    return True


def _as_javascript(number: int | float) -> int | float | None:
    """Return what reading the JSON that JavaScript prints for `number` gives.

    Digits past a double's are lost, and whole numbers are printed from the shortest digits that
    name the double: 12345678901234567891 as 12345678901234567000. None where it has no such JSON.
    """
    try:
        double = float(number)
    except OverflowError:
        return None
    if abs(double) < _EXPONENT_FROM and double.is_integer():
        return int(Decimal(repr(double)))
    return double


def _is_coerced(ours: Any, theirs: Any, schema: Any, key: str) -> bool:
    """Was a string made the number or boolean that `schema` declares for `key`?"""
    if type(ours) is not str or type(theirs) is str:
        return False
    kinds = _declared(schema, key)
    if type(theirs) is bool:
        return "boolean" in kinds and _BOOLEANS.get(ours) is theirs
    match = _DECIMAL.fullmatch(ours)
    if match is None or not kinds & {"integer", "number"}:
        return False
    number = float(ours) if match[1] else int(ours)
    if "number" not in kinds and number != int(number):
        return False
    return _is_same_number(number, theirs, set())


def _declared(schema: Any, key: str) -> set[str]:
    """Return the types that `schema` declares for `key`; none where a string is one of them."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    declared = properties.get(key) if isinstance(properties, dict) else None
    kind = declared.get("type") if isinstance(declared, dict) else None
    kinds = {each for each in (kind if isinstance(kind, list) else [kind]) if type(each) is str}
    return set() if "string" in kinds else kinds


def _is_cd_stripped(ours: Any, theirs: Any, directories: frozenset[str]) -> bool:
    if type(ours) is not str or type(theirs) is not str or not theirs.strip():
        return False
    return any(
        ours == f"cd {quote}{directory}{quote} && {theirs}"
        for directory in directories
        for quote in ("", '"', "'")
    )


def _is_replace_all_added(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return (
        name == "Edit"
        and theirs.get("replace_all") is False
        and theirs.keys() - ours.keys() == {"replace_all"}
        and ours.keys() <= theirs.keys()
    )


# ---------------------------------------------------------------- the session's directory


def working_directories(messages: list[dict[str, Any]]) -> frozenset[str]:
    """Return the directories that the first messages name as those that the session works in.

    Where no wording that we know does, a line "label: /path" counts, if all such lines name one
    path: prompts come in any language.
    """
    named: set[str] = set()
    labelled: set[str] = set()
    for message in messages[:HEAD_MESSAGES_MAX]:
        if message.get("role") in ("system", "user"):
            found = _directories_in(_text_of(message.get("content"))[:_HEAD_CHARS_MAX])
            named |= found[0]
            labelled |= found[1]
    if named or len(labelled) != 1:
        return frozenset(named)
    return frozenset(labelled)


def _text_of(content: Any) -> str:
    """Return the words of a content, which may show images too."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if part["type"] == "text")
    return content if isinstance(content, str) else ""


@lru_cache(maxsize=64)  # each request repeats its head; at most 64 x _HEAD_CHARS_MAX characters
def _directories_in(text: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the paths that `text` calls a working directory, and those behind any label."""
    named = [*_TAGGED.findall(text), *_NAMED.findall(text)]
    return _paths(named), _paths(_LABELLED.findall(text))


def _paths(found: list[str]) -> frozenset[str]:
    return frozenset(path.strip().rstrip("/") or "/" for path in found)
