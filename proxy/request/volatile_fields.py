"""Takes volatile fields out of messages: what clients change of a conversation that stays the same.

One table of rules serves all dialects. It serves names, never prompts: the model is fed what the
client sent, and the model's tokens alone decide which KV is valid. Only telemetry leaves the
model's input too (`without_telemetry`): it says nothing to a model.

Rules are atomic and line-scoped: a `Field` is sought in one line at a time, and a `Block` is whole
lines of one message, from its begin marker to its end marker, only where both stand.
"""

import re
from dataclasses import dataclass
from typing import Final

_BILLING: Final = re.compile(
    r"x-anthropic-billing-header:"
    r"(?: (?:cc_version|cc_entrypoint|cch|cc_is_subagent|cc_workload)=[\w.+-]{1,64};)+ ?(?:\n|\Z)"
)


def without_telemetry(text: str) -> str:
    """Return Messages' first system block without the billing header that it begins with.

    Only there is it telemetry, and only where every pair is one that is known: with anything else
    in it, or anywhere else, it is something that somebody wrote.
    """
    found = _BILLING.match(text)
    return text if found is None else text[found.end() :]


# ---------------------------------------------------------------- the rules


@dataclass(frozen=True, slots=True)
class Field:
    """A volatile part of a line, which `sentinel` (as re.sub takes it) stands for.

    An empty sentinel takes the line away. No sentinel is longer than what it stands for.
    """

    name: str
    roles: frozenset[str]  # of the messages that it is sought in
    needles: tuple[str, ...]  # one of them is in each line that matches: texts without are skipped
    pattern: re.Pattern[str]
    sentinel: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines that come and go: from one that begins with `begin` to one that ends with `end`.

    With `fence_lines` the first is a heading, which JSON in a fence follows within so many lines;
    with `marks` too, one of them is in that JSON.
    """

    name: str
    roles: frozenset[str]
    begin: str
    end: str
    evidence: str
    fence_lines: int = 0
    marks: tuple[str, ...] = ()


_SYSTEM: Final = frozenset(("system",))
_USER: Final = frozenset(("user",))
ASKING_ROLES: Final = frozenset(("system", "user"))  # a date in a tool's result is its result
_ALL: Final = frozenset(("system", "user", "tool"))  # what the model said is not volatile
_DAY: Final = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6}"
_MONTH: Final = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}"
_ZONE: Final = r"(?:UTC|GMT[+-]?\d{0,2}|[ECMP][SD]T|CES?T|BST|IST|JST|KST|\([A-Z][\w/+-]{1,30}\))"
# A dash leads on to a time that ends there: "2026-11-21 - 10:30 we meet" is what somebody wrote.
_DASH: Final = (
    r"[-–](?= {1,2}\d{1,2}:\d\d(?::\d\d)?(?: ?[AaPp][Mm]\b)?"
    rf"(?: {_ZONE})? {{0,4}}(?:[.,;/)<\]]|$))"
)
# A date, a time or both: it begins like one and goes on while digits, names and zones do.
_WHEN: Final = (
    rf"(?=(?:{_DAY},? )?(?:{_MONTH} \d|\d{{1,4}}[-/:.]\d|\d{{1,2}} {_MONTH}))"
    rf"(?>(?:(?:{_DAY}|{_MONTH}|{_ZONE}|\d[\d:./T+-]*+(?:st|nd|rd|th|Z)?|[AaPp][Mm]\b|at\b|—|/"
    rf"|{_DASH})[ ,]*)+)"  # atomic: in Python 3.11.2 a possessive group passes over lookaheads
)
_FENCE: Final = "```json"
# A NUL starts each sentinel, so that no client's text is mistaken for one.

FIELDS: Final = (
    Field(
        "billing_header",
        _SYSTEM,
        ("x-anthropic-billing-header: ",),
        re.compile(r"^x-anthropic-billing-header:(?: (?:cc_[a-z_]+|cch)=[\w.+-]{1,64};)+ ?$"),
        "",
        "Claude Code (claude-code-session-1, system[0]), where a gateway made it chat completions",
    ),
    Field(
        "cch",
        ASKING_ROLES,
        ("cch=",),
        re.compile(r"\bcch=[0-9a-zA-Z]{3,64};"),
        "\0cch",
        "Claude Code to Anthropic's own address: `cch=56445;` differs in every request",
    ),
    Field(
        "message_id",
        _USER,
        ("[message_id: ",),
        re.compile(r"^\[message_id: [^\]]{1,128}\]$"),
        "",
        "OpenClaw on a messenger: the line `[message_id: om_x100b53d7]` before what was said",
    ),
    Field(
        "message_id",
        ASKING_ROLES,
        ('"message_id"',),
        re.compile(
            r'^([ \t]{0,16}\{?[ \t]{0,4}"message_id" ?: ?)"[\w.:@+=/~-]{1,128}"'
            r"(?=[ \t]{0,4}(?:[,}\r]|$))"
        ),
        "\\1\0m",
        "OpenClaw on Telegram and Discord, where no heading is before its JSON: the line "
        '`"message_id": "4542",`, or an object on one line that begins with it',
    ),
    Field(
        "message_time",
        _USER,
        tuple(f"[{day} " for day in ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")),
        re.compile(rf"^\[{_DAY} \d{{4}}-\d\d-\d\d \d\d:\d\d(?::\d\d)?(?: [\w+:/-]{{1,32}})?\]"),
        "\0when",
        "OpenClaw (openclaw-session-1, messages[1]): the prefix `[Sat 2026-11-21 10:03 UTC]`",
    ),
    Field(
        "current_time",
        ASKING_ROLES,
        ("oday's date", "urrent date", "urrent time", "<current_date>"),
        re.compile(
            r"((?:\b[Tt]oday's date(?: is(?: now)?)?:? |<current_date>"
            r"|\b[Cc]urrent (?:date|time)(?: and time| & time)?(?: is)?:? ))" + _WHEN
        ),
        "\\1\0t",
        "Claude Code, messages[1]: `Today's date is 2026-11-21.`; opencode, the system prompt: "
        "`Today's date: Sat Nov 21 2026`; OpenClaw, the system prompt: `Current date: 2026-11-21`; "
        "Codex, input[2]: `<current_date>2026-11-21</current_date>`; Qwen Code, messages[1]: "
        "`The current date is: Saturday, November 21, 2026.` (their session-1 each)",
    ),
    Field(
        "current_time",
        _SYSTEM,
        (". Date: ",),
        re.compile(rf"^(\d+\. Date: ){_WHEN}$"),
        "\\1\0t",
        "Cline (cline-session-1, the system prompt): `2. Date: 11/21/2026`",
    ),
    Field(
        "total_tokens",
        _ALL,
        ("<total_tokens>",),
        re.compile(r"^\s*<total_tokens>\s*\d[\d,]*\s*tokens left\s*</total_tokens>\s*$"),
        "",
        "Claude Code with a model it knows: appended at each turn, from the usage that this server "
        "reported",
    ),
    Field(
        "run_statistics",
        _ALL,
        ("Stats: runtime ",),
        re.compile(r"^Stats: runtime (?:n/a|\d[\d.hms ]*)(?: ?• .*)?$"),
        "",
        "OpenClaw, where a sub-agent has finished: `Stats: runtime 12s • tokens 8.2k (in 8k / ...`",
    ),
)

BLOCKS: Final = (
    Block(
        "system_reminder",
        _ALL,
        "<system-reminder>",
        "</system-reminder>",
        "Claude Code (claude-code-session-1, messages[0]) and Qwen Code (qwen-code-session-1, "
        "messages[1]: the reminder of the date is only in the newest prompt)",
    ),
    Block(
        "inbound_context",
        _USER,
        "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>",
        "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>",
        "OpenClaw (openclaw-session-1, the last message of each request, gone in the next)",
    ),
    *(
        Block(
            "inbound_context",
            roles,
            heading,
            "```",
            "OpenClaw on a messenger: who wrote, where and when, as JSON below this heading",
            fence_lines=6,
        )
        for roles, heading in (
            (ASKING_ROLES, "## Inbound Context (trusted metadata)"),
            (_USER, "Conversation info (untrusted metadata):"),
            (_USER, "Sender (untrusted metadata):"),
        )
    ),
    Block(
        "inbound_context",
        ASKING_ROLES,
        "## Inbound Context",
        "```",
        "OpenClaw, where a gateway or a plugin shortens the heading: the same JSON, and its keys "
        "tell it from a chapter of that name",
        fence_lines=6,
        marks=("openclaw.inbound_meta.", '"chat_type":', '"message_id":'),
    ),
    *(
        Block(
            "run_statistics",
            _ALL,
            begin,
            "</usage>",
            "Claude Code, where a sub-agent has finished (claude-code-session-1, messages[27], a "
            "tool's result; claude-code-session-9, messages[11], a notification)",
        )
        for begin in ("<usage>subagent_tokens: ", "<usage><subagent_tokens>")
    ),
)


TEXT_CHARS_MAX: Final = 4_000_000  # that fields are sought in: it takes up to half a second


def canonical_text(role: str, text: str) -> tuple[str, list[str]]:
    """Return `text`, of a message of `role`, less its volatile fields, and the rules that fired.

    A text of millions of characters is somebody's file: it is known as it is.
    """
    if len(text) > TEXT_CHARS_MAX:
        return text, []
    blocks = [row for row in BLOCKS if role in row.roles and row.begin in text]
    rules = [row for row in FIELDS if role in row.roles and any(n in text for n in row.needles)]
    if not blocks and not rules:
        return text, []
    lines = text.split("\n")
    fired: dict[str, None] = {}  # in the table's order
    for block in blocks:
        gone = _lines_of(block, lines)
        if any(gone):
            fired[block.name] = None
            lines = _without(lines, gone)
    for rule in rules:
        replaced = [
            rule.pattern.sub(rule.sentinel, line)
            if any(needle in line for needle in rule.needles)
            else line
            for line in lines
        ]
        if replaced != lines:
            fired[rule.name] = None
            whole = zip(lines, replaced, strict=True)
            lines = _without(replaced, [bool(line) and not left for line, left in whole])
    return "\n".join(lines), list(fired)


def _without(lines: list[str], gone: list[bool]) -> list[str]:
    """Return `lines` less those that are `gone`, and less the blank ones that set those apart.

    The blank ones after go with them, and at the end of the text those before.
    """
    kept: list[str] = []
    follows = False
    for line, is_gone in zip(lines, gone, strict=True):
        follows = is_gone or (follows and not line.strip())
        if not follows:
            kept.append(line)
    while follows and kept and not kept[-1].strip():
        kept.pop()
    return kept


def _lines_of(block: Block, lines: list[str]) -> list[bool]:
    """Return for each of `lines` whether it belongs to a `block`."""
    gone = [False] * len(lines)
    index = 0
    while index < len(lines):
        end = _end_of(block, lines, index)
        if end is not None:
            gone[index : end + 1] = [True] * (end + 1 - index)
            index = end
        index += 1
    return gone


def _end_of(block: Block, lines: list[str], start: int) -> int | None:
    """Return the last line of the `block` that begins at `start`; None where none does.

    One that is not closed before the next begins is text.
    """
    first = lines[start].strip()
    if not first.startswith(block.begin):
        return None
    body = start + 1
    if block.fence_lines:
        fenced = lines[body : body + block.fence_lines]
        opened = next((at for at, line in enumerate(fenced) if line.startswith("```")), None)
        if first != block.begin or opened is None or fenced[opened].rstrip() != _FENCE:
            return None
        body += opened + 1
    elif block.end in first:
        is_alone = first.endswith(block.end) and first.count(block.end) == 1
        return start if is_alone else None
    for index in range(body, len(lines)):
        line = lines[index].strip()
        if line.startswith(block.begin):
            return None
        if line.endswith(block.end):
            inside = lines[body:index]
            is_meant = not block.marks or any(mark in row for row in inside for mark in block.marks)
            return index if is_meant else None
    return None
