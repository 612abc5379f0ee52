"""Decides whether an assistant turn that a client sends back still says what the model said.

Clients re-serialise, trim and strip. Each harmless habit is a rule in RULES, with evidence. If no
rule explains a difference, the client or the user made a change, and the model is shown the
client's version. A rule treats two values as equal only if the tool that reads the values does.
If a person could make a change on purpose, the rule applies only to the client that makes this
change by itself. Rules have a direction: the echo may lack content of the record, never the
reverse. Differences that parsing removes (white space between JSON tokens, key order, unicode
escapes) need no rule. Call ids and signatures, which a `TurnContent` does not hold, need none.
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

# Rule -> the allowed change, and the clients that make it. Requests of a trace count from 0.
# "facts" is section 3 of the project's study of agent clients.
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
HEAD_MESSAGES_MAX: Final = 6  # Claude Code's sub-agents get their directory in the fifth message
_HEAD_CHARS_MAX: Final = 65_536
_BLANK: Final = (  # white space that JavaScript's trim() removes
    "\t\n\v\f\r \u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000\ufeff"
)
_EXPONENT_FROM: Final = 1e21  # least whole number that JavaScript prints with an exponent
_DECIMAL: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,20})(\.[0-9]{1,20})?")
_BOOLEANS: Final = {"true": True, "false": False}

# Claude Code's list about its environment: the directory, then whether the directory is a git
# repository. The labels differ between versions of the client.
_ENVIRONMENT: Final = re.compile(
    r":[ ]?\n - [^\n:]{1,60}: (/[^\n]{0,1000}|[A-Za-z]:[\\/][^\n]{0,1000})"
    r"\n - Is a git [^\n:]{1,40}: (?:true|false)\n"
)
_HEADING: Final = re.compile(r"\s*# [^\n]{1,80}\n[^\n]{0,200}")  # the text before the list
_REMINDER: Final = re.compile(r"(?s)\s*<system-reminder>(.*?)</system-reminder>")
_BASH: Final = "Bash"
_DIRECTORY_COMMAND: Final = re.compile(
    r"\b(?:cd|chdir|pushd|popd)\b"
)  # commands that change the directory
_MOVING_TOOL: Final = "worktree"  # part of the names of tools that move the whole session
_TYPED: Final = re.compile(r"(?s)<bash-input>(.*?)</bash-input>")  # the user's shell commands
_SPECIAL_IN_QUOTES: Final = {'"': '"`$!\n', "'": "'\n"}  # quote -> special characters in quotes
_SHELL_SPECIAL: Final = frozenset(" \t\n\"'`$&|;<>()[]{}*?!#~")  # characters special to a shell


@dataclass(frozen=True, slots=True)
class TurnContent:
    """The thinking, text and tool calls of an assistant turn. Immutable."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, Any], ...]  # (name, parsed arguments; text if unreadable)


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """The facts about the session that sends an echo. Immutable."""

    schemas: Mapping[str, dict[str, Any]]  # tool name -> JSON schema of its parameters
    client: str = ""  # `Speaker.client`
    directory: str = ""  # directory of Claude Code's next command; "" = unknown


def turn_content(message: dict[str, Any]) -> TurnContent:
    """Return the content of `message`, an assistant's message of `wire.Prompt`."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return TurnContent(
        reasoning=message.get("reasoning_content") or "",
        content=text_of(message),
        calls=tuple((function["name"], _parsed(function["arguments"])) for function in functions),
    )


def _parsed(arguments: Any) -> Any:
    """Return the object that `arguments` has as text; an empty text is an empty object."""
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


def says_the_same(record: TurnContent, echo: TurnContent, facts: SessionFacts) -> bool:
    """Return whether `echo` equals `record` up to changes that RULES allow."""
    return UNEXPLAINED not in changes(record, echo, facts)


def changes(record: TurnContent, echo: TurnContent, facts: SessionFacts) -> list[str]:
    """Return the rules that turn `record` into `echo`, in the order of RULES.

    The result is [] if both are equal, and [UNEXPLAINED] if they do not say the same.
    """
    text_rules = _text_rules(record, echo)
    if text_rules is None or len(record.calls) != len(echo.calls):
        return [UNEXPLAINED]
    needed = set(text_rules)
    for recorded_call, echoed_call in zip(record.calls, echo.calls, strict=True):
        if not _is_same_call(recorded_call, echoed_call, facts, needed):
            return [UNEXPLAINED]
    return [rule for rule in RULES if rule in needed] if needed else []


# ---------------------------------------------------------------- words


def _text_rules(record: TurnContent, echo: TurnContent) -> list[str] | None:
    recorded, echoed = (record.reasoning, record.content), (echo.reasoning, echo.content)
    rules = _rules_of_texts(recorded, echoed)
    if rules is not None:
        return rules
    # <think> blocks are split off only after the texts differed: equal answers may be about <think>
    # tags. Only one of the two texts may have a block: a block in both is part of the answer.
    split = _with_split_thinking(recorded), _with_split_thinking(echoed)
    if (split[0] == recorded) is (split[1] == echoed):
        return None
    rules = _rules_of_texts(*split)
    # A client that removes a block from the content changes the answer.
    is_cut = rules is not None and THINKING_STRIPPED in rules
    return None if rules is None or is_cut else [*rules, THINKING_MOVED]


def _rules_of_texts(recorded: tuple[str, str], echoed: tuple[str, str]) -> list[str] | None:
    """Return the rules that explain how two (reasoning, content) differ; None if unexplained."""
    rules = []
    if recorded[1] != echoed[1]:
        if not is_trimmed(recorded[1], echoed[1]):
            return None
        rules.append(CONTENT_TRIMMED)
    if recorded[0] != echoed[0]:
        if is_trimmed(recorded[0], echoed[0]):
            rules.append(THINKING_TRIMMED)
        elif not echoed[0]:
            rules.append(THINKING_STRIPPED)
        else:
            return None
    return rules


def is_trimmed(text: str, echo: str) -> bool:
    """Return whether `echo` is `text`, or `text` without the white space at one end or both.

    The indent of the first line must stay, because the lines below share it. An end is trimmed as a
    whole, and nothing is added.
    """
    ended = text.rstrip(_BLANK)
    if not ended:
        return echo in (text, "")
    first = text.rfind("\n", 0, len(text) - len(text.lstrip(_BLANK))) + 1
    return echo in (text, ended, text[first:], ended[first:])


def _with_split_thinking(texts: tuple[str, str]) -> tuple[str, str]:
    """Move a leading <think> block from the content to the reasoning, if there is no reasoning.

    Line breaks around the block's text, and after the block, belong to the block. An empty block is
    not thinking but a change of the answer.
    """
    reasoning, content = texts
    start = content.lstrip("\n")
    if reasoning.strip(_BLANK) or not start.startswith("<think>"):
        return texts
    block, closed, rest = start.removeprefix("<think>").partition("</think>")
    is_thinking = closed and block.strip(_BLANK)
    return (block.strip("\n"), rest.lstrip("\n")) if is_thinking else texts


# ---------------------------------------------------------------- calls


def _is_same_call(
    recorded: tuple[str, Any], echoed_call: tuple[str, Any], facts: SessionFacts, needed: set[str]
) -> bool:
    """Return whether two calls are the same; add the rules that this takes to `needed`."""
    name, arguments = recorded
    echoed = echoed_call[1]
    if name != echoed_call[0]:
        return False
    if type(arguments) is not dict or type(echoed) is not dict:
        return _is_same_value(arguments, echoed, needed)
    if arguments.keys() != echoed.keys():
        if not _is_replace_all_added(name, arguments, echoed, facts.schemas.get(name)):
            return False
        needed.add(REPLACE_ALL_ADDED)
    for argument, value in arguments.items():
        if _is_same_value(value, echoed[argument], needed):
            continue
        if facts.client != CLAUDE_CODE:
            return False
        if _is_coerced(value, echoed[argument], facts.schemas.get(name), argument):
            needed.add(VALUE_COERCED)
        elif (name, argument) == (_BASH, "command") and _is_cd_stripped(
            value, echoed[argument], facts.directory
        ):
            needed.add(CD_STRIPPED)
        else:
            return False
    return True


def _is_same_value(recorded: Any, echoed: Any, needed: set[str]) -> bool:
    """Return whether two JSON values are equal: true, 1 and "1" differ, 1 and 1.0 do not."""
    pairs = [(recorded, echoed)]
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


def _is_same_number(recorded: int | float, echoed: Any, needed: set[str]) -> bool:
    if type(echoed) is not int and type(echoed) is not float:
        return False
    if recorded == echoed and type(recorded) is type(echoed):
        return True
    if recorded != recorded:  # NaN
        return bool(echoed != echoed)
    if recorded != echoed or type(_as_javascript(recorded)) is not type(echoed):
        return False
    needed.add(NUMBER_PRINTED)
    return True


def _as_javascript(number: int | float) -> int | float:
    """Return the number as it is after JavaScript has printed it as JSON.

    JavaScript prints whole numbers below 1e21 digit by digit, larger numbers with an exponent.
    """
    if abs(number) >= _EXPONENT_FROM:
        return float(number)
    return int(number) if number == int(number) else number


def _is_coerced(recorded: Any, echoed: Any, schema: Any, key: str) -> bool:
    """Return whether a string became the number or boolean that `schema` declares for `key`."""
    if type(recorded) is not str or type(echoed) is str:
        return False
    declared = _property(schema, key).get("type")
    type_names = declared if isinstance(declared, list) else [declared]
    kinds = {type_name for type_name in type_names if type(type_name) is str}
    if "string" in kinds:
        return False
    if type(echoed) is bool:
        return "boolean" in kinds and _BOOLEANS.get(recorded) is echoed
    match = _DECIMAL.fullmatch(recorded)
    if match is None or not kinds & {"integer", "number"}:
        return False
    number = float(recorded) if match[1] else int(recorded)
    if "number" not in kinds and number != int(number):
        return False
    return _is_same_number(number, echoed, set())


def _property(schema: Any, key: str) -> dict[str, Any]:
    """Return the declaration of `key` in `schema`; {} if there is none."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    declared = properties.get(key) if isinstance(properties, dict) else None
    return declared if isinstance(declared, dict) else {}


def _is_cd_stripped(recorded: Any, echoed: Any, directory: str) -> bool:
    are_texts = type(recorded) is str and type(echoed) is str and echoed.strip() and directory
    return bool(are_texts) and any(
        recorded == f"{start}{echoed}" for start in _cd_prefixes(directory)
    )


def _cd_prefixes(directory: str) -> list[str]:
    """Return the prefixes by which a shell command enters `directory`."""
    special = _SHELL_SPECIAL.intersection(directory)
    quotes = ["", '"', "'"]
    if special:
        quotes = [
            quote for quote in ('"', "'") if not special.intersection(_SPECIAL_IN_QUOTES[quote])
        ]
    return [f"cd {quote}{directory}{quote} && " for quote in quotes]


def _is_replace_all_added(
    name: str, recorded: dict[str, Any], echoed: dict[str, Any], schema: Any
) -> bool:
    return (
        name == "Edit"
        and echoed.get("replace_all") is False
        and echoed.keys() - recorded.keys() == {"replace_all"}
        and recorded.keys() <= echoed.keys()
        and _property(schema, "replace_all").get("default") is False
    )


# ---------------------------------------------------------------- the session's directory


def working_directory(messages: list[dict[str, Any]]) -> str:
    """Return the directory that Claude Code states at the head of a conversation, or "".

    The directory is in a system message, or in the reminder that begins the first user message. In
    the reminder, only the list at the beginning counts, since text of files may follow. The user's
    own text does not count. If two different directories are found, the result is "".
    """
    stated: set[str] = set()
    named: set[str] = set()
    is_first = True
    for message in messages[:HEAD_MESSAGES_MAX]:
        role, text = message.get("role"), text_of(message)[:_HEAD_CHARS_MAX]
        if role == "system":
            stated |= _directories_in(text)
        elif role == "user" and is_first:
            is_first = False
            at, reminders = 0, []
            while match := _REMINDER.match(text, at):
                reminders.append(match[1])
                at = match.end()
            first = _ENVIRONMENT.search(reminders[0]) if reminders else None
            if first and _HEADING.fullmatch(reminders[0], 0, first.start()):
                stated.add(_path(first[1]))
            named = named.union(*map(_directories_in, reminders))
    named |= stated
    return stated.pop() if stated and len(named) == 1 else ""


def _directories_in(text: str) -> set[str]:
    return {_path(path) for path in _ENVIRONMENT.findall(text)}


def _path(text: str) -> str:
    return text.rstrip(" /") or "/"


# ---------------------------------------------------------------- the directory of commands


def directories_of_turns(
    home: str, messages: list[dict[str, Any]], contents: Mapping[int, TurnContent]
) -> dict[int, str]:
    """Return the directory in which each assistant message's commands run; "" = unknown.

    Commands run in `home` (from `working_directory`) until a command leaves that directory: a shell
    stays in its last directory. `contents` holds the assistant messages by index.
    """
    found: dict[int, str] = {}
    now = home
    for at, message in enumerate(messages if home else ()):
        if at not in contents:
            typed = _TYPED.findall(text_of(message))
            now = "" if any(map(_DIRECTORY_COMMAND.search, typed)) else now
            continue
        found[at], now = now, _directory_after(contents[at], now, home)
        if not now and len(contents[at].calls) > 1:
            found[at] = ""  # some calls ran after the call that left the directory
    return found


def _directory_after(content: TurnContent, now: str, home: str) -> str:
    """Return the shell's directory after the commands of a turn that began in directory `now`."""
    for name, arguments in content.calls:
        command = arguments.get("command") if type(arguments) is dict else None
        if _MOVING_TOOL in name.lower():
            now = ""
        elif name == _BASH and type(command) is str:
            begun = [start for start in _cd_prefixes(home) if command.startswith(start)]
            rest = command.removeprefix(begun[0]) if begun else command
            now = "" if _DIRECTORY_COMMAND.search(rest) else home if begun else now
    return now
