"""Decides whether an assistant turn that a client sends back still says what the model said.

Clients re-serialise, trim and strip. Each habit that leaves the meaning alone is a rule of RULES,
with its evidence; a difference that no rule explains is a change by the client or its user, and
then the client's version is what the model must be shown. A rule takes as equal only what is equal
to the tool that reads it; where a person could make the same change and mean it, the rule holds for
the client alone that makes it of itself. Rules have a direction: what the record has and the echo
lost, never the reverse. What parsing takes away (white space between JSON tokens, key order,
unicode escapes) and what is not in a `TurnContent` (call ids, signatures) needs none.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from hearth.worker.prompt.chat_template import text_of

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
    CONTENT_TRIMMED: "content lost all blank lines before it or all white space behind it, or was "
    "nothing else: Claude Code and PI drop a blank text (facts); an indent is never lost",
    THINKING_STRIPPED: "thinking is not sent back: OpenClaw over Responses after a reload (facts)",
    THINKING_TRIMMED: "thinking lost white space at its ends: qwen-code-session-1, request 4",
    THINKING_MOVED: "thinking stands in the content as a leading <think> block, in one of the two",
    NUMBER_PRINTED: "the same number, as JavaScript prints it: 5000.0 as 5000, all but Codex "
    "(facts)",
    VALUE_COERCED: 'a string became the number or boolean that the tool declares: Claude Code, "3" '
    "as Read's offset (facts)",
    CD_STRIPPED: "Bash's command lost `cd X && ` before it, X the directory that Claude Code says "
    "it runs in and that no command left: claude-code-session-1, request 7; claude-code-session-9, "
    "request 6",
    REPLACE_ALL_ADDED: "Edit gained replace_all: false, which its schema declares as the default: "
    "claude-code-session-1, request 10",
}

CLAUDE_CODE: Final = "claude-code"  # a `Speaker.client`
HEAD_MESSAGES_MAX: Final = 6  # Claude Code's sub-agents are told their directory in the fifth
_HEAD_CHARS_MAX: Final = 65_536
_BLANK: Final = (  # what JavaScript's trim() takes
    "\t\n\v\f\r \u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000\ufeff"
)
_EXPONENT_FROM: Final = 1e21  # JavaScript prints whole numbers below it digit by digit
_DECIMAL: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,20})(\.[0-9]{1,20})?")
_BOOLEANS: Final = {"true": True, "false": False}

# The list that Claude Code tells its environment in: where it runs, then whether that is a
# repository. Labels are in the words of the client's version.
_ENVIRONMENT: Final = re.compile(
    r":[ ]?\n - [^\n:]{1,60}: (/[^\n]{0,1000}|[A-Za-z]:[\\/][^\n]{0,1000})"
    r"\n - Is a git [^\n:]{1,40}: (?:true|false)\n"
)
_HEADING: Final = re.compile(r"\s*# [^\n]{1,80}\n[^\n]{0,200}")  # all that stands before it
_REMINDER: Final = re.compile(r"(?s)\s*<system-reminder>(.*?)</system-reminder>")
_BASH: Final = "Bash"
_MOVES: Final = re.compile(r"\b(?:cd|chdir|pushd|popd)\b")  # what leaves a shell elsewhere
_MOVING_TOOL: Final = "worktree"  # in the names of tools that take the whole session elsewhere
_TYPED: Final = re.compile(r"(?s)<bash-input>(.*?)</bash-input>")  # into the session's shell
_READ_IN: Final = {'"': '"`$!\n', "'": "'\n"}  # quotes -> what a shell reads inside them
_SHELLS: Final = frozenset(" \t\n\"'`$&|;<>()[]{}*?!#~")  # what a shell takes for more than a name


@dataclass(frozen=True, slots=True)
class TurnContent:
    """The words and calls of an assistant turn. Immutable."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, Any], ...]  # (name, arguments: an object, or text that holds none)


@dataclass(frozen=True, slots=True)
class Known:
    """The facts about the session that sends an echo. Immutable."""

    schemas: Mapping[str, dict[str, Any]]  # tool name -> JSON schema of its parameters
    client: str = ""  # `Speaker.client`
    directory: str = ""  # that Claude Code's next command runs in; "" where that is not known


def turn_content(message: dict[str, Any]) -> TurnContent:
    """Return what `message` says, an assistant's of `wire.Prompt`."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return TurnContent(
        reasoning=message.get("reasoning_content") or "",
        content=text_of(message),
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
    # Only now: an answer that is about <think> tags says the same when it is the same. And in one
    # of the two only: in both, the block is part of an answer.
    opened = _unfolded(ours), _unfolded(theirs)
    if (opened[0] == ours) is (opened[1] == theirs):
        return None
    rules = _text_changes(*opened)
    # What stood in the content was part of the answer: a client that cuts it out changes that.
    is_cut = rules is not None and THINKING_STRIPPED in rules
    return None if rules is None or is_cut else [*rules, THINKING_MOVED]


def _text_changes(ours: tuple[str, str], theirs: tuple[str, str]) -> list[str] | None:
    """Compare (reasoning, content): the rules it takes, None where none explains it."""
    rules = []
    if ours[1] != theirs[1]:
        if not is_trimmed(ours[1], theirs[1]):
            return None
        rules.append(CONTENT_TRIMMED)
    if ours[0] != theirs[0]:
        if is_trimmed(ours[0], theirs[0]):
            rules.append(THINKING_TRIMMED)
        elif not theirs[0]:
            rules.append(THINKING_STRIPPED)
        else:
            return None
    return rules


def is_trimmed(text: str, echo: str) -> bool:
    """Return whether `echo` is `text`, as it is or without the white space at one end or both.

    The indent of the first line is none: the lines below are indented with it. An end is trimmed
    as a whole, and nothing is added.
    """
    ended = text.rstrip(_BLANK)
    if not ended:
        return echo in (text, "")
    first = text.rfind("\n", 0, len(text) - len(text.lstrip(_BLANK))) + 1
    return echo in (text, ended, text[first:], ended[first:])


def _unfolded(spoken: tuple[str, str]) -> tuple[str, str]:
    """Take the <think> block that a content begins with for its reasoning, if there is none.

    The line breaks around what it holds, and behind it, are how a block is written. An empty one
    is no thinking, but a change of the answer.
    """
    reasoning, content = spoken
    start = content.lstrip("\n")
    if reasoning.strip(_BLANK) or not start.startswith("<think>"):
        return spoken
    block, closed, rest = start.removeprefix("<think>").partition("</think>")
    is_thinking = closed and block.strip(_BLANK)
    return (block.strip("\n"), rest.lstrip("\n")) if is_thinking else spoken


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
        if not _is_replace_all_added(name, arguments, echoed, known.schemas.get(name)):
            return False
        needed.add(REPLACE_ALL_ADDED)
    for key, value in arguments.items():
        if _is_same_value(value, echoed[key], needed):
            continue
        if known.client != CLAUDE_CODE:
            return False
        if _is_coerced(value, echoed[key], known.schemas.get(name), key):
            needed.add(VALUE_COERCED)
        elif (name, key) == (_BASH, "command") and _is_cd_stripped(
            value, echoed[key], known.directory
        ):
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
    if ours != theirs or type(_as_javascript(ours)) is not type(theirs):
        return False
    needed.add(NUMBER_PRINTED)
    return True


def _as_javascript(number: int | float) -> int | float:
    """Return what reading the JSON that JavaScript prints for a double gives.

    Whole numbers are printed digit by digit, larger ones with an exponent.
    """
    if abs(number) >= _EXPONENT_FROM:
        return float(number)
    return int(number) if number == int(number) else number


def _is_coerced(ours: Any, theirs: Any, schema: Any, key: str) -> bool:
    """Was a string made the number or boolean that `schema` declares for `key`?"""
    if type(ours) is not str or type(theirs) is str:
        return False
    declared = _property(schema, key).get("type")
    listed = declared if isinstance(declared, list) else [declared]
    kinds = {each for each in listed if type(each) is str}
    if "string" in kinds:
        return False
    if type(theirs) is bool:
        return "boolean" in kinds and _BOOLEANS.get(ours) is theirs
    match = _DECIMAL.fullmatch(ours)
    if match is None or not kinds & {"integer", "number"}:
        return False
    number = float(ours) if match[1] else int(ours)
    if "number" not in kinds and number != int(number):
        return False
    return _is_same_number(number, theirs, set())


def _property(schema: Any, key: str) -> dict[str, Any]:
    """Return what `schema` declares for `key`; {} where it declares nothing."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    declared = properties.get(key) if isinstance(properties, dict) else None
    return declared if isinstance(declared, dict) else {}


def _is_cd_stripped(ours: Any, theirs: Any, directory: str) -> bool:
    are_texts = type(ours) is str and type(theirs) is str and theirs.strip() and directory
    return bool(are_texts) and any(ours == f"{start}{theirs}" for start in _ways_into(directory))


def _ways_into(directory: str) -> list[str]:
    """Return how a command may begin that goes into `directory`, to the shell that reads it."""
    special = _SHELLS.intersection(directory)
    quotes = ["", '"', "'"]
    if special:
        quotes = [each for each in ('"', "'") if not special.intersection(_READ_IN[each])]
    return [f"cd {quote}{directory}{quote} && " for quote in quotes]


def _is_replace_all_added(
    name: str, ours: dict[str, Any], theirs: dict[str, Any], schema: Any
) -> bool:
    return (
        name == "Edit"
        and theirs.get("replace_all") is False
        and theirs.keys() - ours.keys() == {"replace_all"}
        and ours.keys() <= theirs.keys()
        and _property(schema, "replace_all").get("default") is False
    )


# ---------------------------------------------------------------- the session's directory


def working_directory(messages: list[dict[str, Any]]) -> str:
    """Return the directory that Claude Code states in the head of a conversation; "" of none.

    It stands in a system message that the client sends, or begins the reminder that the first user
    message begins with, as the list that this one begins with: what stands behind may be words of
    files. What a user writes names none,
    and two that differ, wherever such words stand, are none.
    """
    stated: set[str] = set()
    named: set[str] = set()
    is_first = True
    for message in messages[:HEAD_MESSAGES_MAX]:
        role, text = message.get("role"), text_of(message)[:_HEAD_CHARS_MAX]
        if role == "system":
            stated |= _named_in(text)
        elif role == "user" and is_first:
            is_first = False
            at, reminders = 0, []
            while match := _REMINDER.match(text, at):
                reminders.append(match[1])
                at = match.end()
            first = _ENVIRONMENT.search(reminders[0]) if reminders else None
            if first and _HEADING.fullmatch(reminders[0], 0, first.start()):
                stated.add(_path(first[1]))
            named = named.union(*map(_named_in, reminders))
    named |= stated
    return stated.pop() if stated and len(named) == 1 else ""


def _named_in(text: str) -> set[str]:
    return {_path(path) for path in _ENVIRONMENT.findall(text)}


def _path(text: str) -> str:
    return text.rstrip(" /") or "/"


# ---------------------------------------------------------------- where its commands run


def directories(
    home: str, messages: list[dict[str, Any]], said: Mapping[int, TurnContent]
) -> dict[int, str]:
    """Return for each assistant message the directory that its commands run in; "" of unknown.

    They run in `home`, what `working_directory` found, until one of them leaves it: a shell stays
    where a command went. `said` holds the assistant messages, by their place.
    """
    found: dict[int, str] = {}
    now = home
    for at, message in enumerate(messages if home else ()):
        if at not in said:
            typed = _TYPED.findall(text_of(message))
            now = "" if any(map(_MOVES.search, typed)) else now
            continue
        found[at], now = now, _left_in(said[at], now, home)
        if not now and len(said[at].calls) > 1:
            found[at] = ""  # some of them ran after the one that left
    return found


def _left_in(said: TurnContent, now: str, home: str) -> str:
    """Return where the commands of a turn leave the shell that was in `now`."""
    for name, arguments in said.calls:
        command = arguments.get("command") if type(arguments) is dict else None
        if _MOVING_TOOL in name.lower():
            now = ""
        elif name == _BASH and type(command) is str:
            begun = [start for start in _ways_into(home) if command.startswith(start)]
            rest = command.removeprefix(begun[0]) if begun else command
            now = "" if _MOVES.search(rest) else home if begun else now
    return now
