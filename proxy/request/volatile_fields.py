"""Removes volatile fields from messages: the parts that clients change in each request.

One table of rules serves all dialects. The rules are for the names of messages, never for prompts:
the model gets what the client sent, and the model's tokens alone decide which KV is valid. Only
telemetry is removed from the prompt too (`without_telemetry`), as it means nothing to a model.

A rule never matches in part, nor across messages. A `Field` is searched line by line. A `Block` is
whole lines of one message, from a begin marker to an end marker; both must be present.
"""

import re
from dataclasses import dataclass
from typing import Final

_BILLING: Final = re.compile(
    r"x-anthropic-billing-header:"
    r"(?: (?:cc_version|cc_entrypoint|cch|cc_is_subagent|cc_workload)=[\w.+-]{1,64};)+ ?(?:\n|\Z)"
)


def without_telemetry(text: str) -> str:
    """Return the first system block of Messages without the billing header at its beginning.

    A header with unknown pairs or further down stays, as a person may have written it.
    """
    found = _BILLING.match(text)
    return text if found is None else text[found.end() :]


# ---------------------------------------------------------------- the rules


@dataclass(frozen=True, slots=True)
class Field:
    """A volatile part of a line, and the `sentinel` that replaces it, a template for re.sub.

    An empty sentinel removes the line. A sentinel is never longer than the text that it replaces.
    """

    name: str
    roles: frozenset[str]  # roles of the messages that are searched
    needles: tuple[str, ...]  # a matching line has one of these; a text without any is skipped
    pattern: re.Pattern[str]
    sentinel: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines that come and go, from one that begins with `begin` to one that ends with `end`.

    With `fence_lines` the first line is a heading, and fenced JSON follows within that many lines.
    With `marks` the JSON has to contain one of them.
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
ASKING_ROLES: Final = frozenset(("system", "user"))  # a date in a tool's result is content
_ALL: Final = frozenset(("system", "user", "tool"))  # an assistant's text is never volatile
_DAY: Final = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6}"
_MONTH: Final = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}"
_ZONE: Final = r"(?:UTC|GMT[+-]?\d{0,2}|[ECMP][SD]T|CES?T|BST|IST|JST|KST|\([A-Z][\w/+-]{1,30}\))"
# A dash counts only before a time that ends a clause: "2026-11-21 - 10:30 we meet" is no field.
_DASH: Final = (
    r"[-–](?= {1,2}\d{1,2}:\d\d(?::\d\d)?(?: ?[AaPp][Mm]\b)?"
    rf"(?: {_ZONE})? {{0,4}}(?:[.,;/)<\]]|$))"
)
# A date, a time or both. It begins like a date, and goes on over digits, days, months and zones.
_WHEN: Final = (
    rf"(?=(?:{_DAY},? )?(?:{_MONTH} \d|\d{{1,4}}[-/:.]\d|\d{{1,2}} {_MONTH}))"
    rf"(?>(?:(?:{_DAY}|{_MONTH}|{_ZONE}|\d[\d:./T+-]*+(?:st|nd|rd|th|Z)?|[AaPp][Mm]\b|at\b|—|/"
    rf"|{_DASH})[ ,]*)+)"  # atomic: in Python 3.11.2 a possessive group passes over lookaheads
)
_FENCE: Final = "```json"
# Each sentinel has a NUL, so that no client's text looks like a sentinel.

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


TEXT_CHARS_MAX: Final = 4_000_000  # longest text that is searched; this takes up to 0.5 s


def canonical_text(role: str, text: str) -> tuple[str, list[str]]:
    """Return `text` of a message of `role` without volatile fields, and the rules that fired.

    A text longer than TEXT_CHARS_MAX is probably a file, and is returned unchanged.
    """
    if len(text) > TEXT_CHARS_MAX:
        return text, []
    blocks = [block for block in BLOCKS if role in block.roles and block.begin in text]
    rules = [
        rule
        for rule in FIELDS
        if role in rule.roles and any(needle in text for needle in rule.needles)
    ]
    if not blocks and not rules:
        return text, []
    lines = text.split("\n")
    fired: dict[str, None] = {}  # in the table's order
    for block in blocks:
        removed = _lines_of(block, lines)
        if any(removed):
            fired[block.name] = None
            lines = _without_lines(lines, removed)
    for rule in rules:
        replaced = [
            rule.pattern.sub(rule.sentinel, line)
            if any(needle in line for needle in rule.needles)
            else line
            for line in lines
        ]
        if replaced != lines:
            fired[rule.name] = None
            pairs = zip(lines, replaced, strict=True)
            lines = _without_lines(
                replaced, [bool(line) and not new_line for line, new_line in pairs]
            )
    return "\n".join(lines), list(fired)


def _without_lines(lines: list[str], removed: list[bool]) -> list[str]:
    """Return `lines` without the lines marked in `removed` and the blank lines after them.

    If the text ends with removed lines, the blank lines before them are removed too.
    """
    kept: list[str] = []
    follows = False
    for line, is_removed in zip(lines, removed, strict=True):
        follows = is_removed or (follows and not line.strip())
        if not follows:
            kept.append(line)
    while follows and kept and not kept[-1].strip():
        kept.pop()
    return kept


def _lines_of(block: Block, lines: list[str]) -> list[bool]:
    """Return for each of `lines` whether the line is part of a `block`."""
    belongs = [False] * len(lines)
    index = 0
    while index < len(lines):
        end = _end_of(block, lines, index)
        if end is not None:
            belongs[index : end + 1] = [True] * (end + 1 - index)
            index = end
        index += 1
    return belongs


def _end_of(block: Block, lines: list[str], start: int) -> int | None:
    """Return the index of the last line of the `block` that begins at `start`, or else None.

    A block that is not closed before the next begin marker is ordinary text.
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
            is_meant = not block.marks or any(
                mark in inner for inner in inside for mark in block.marks
            )
            return index if is_meant else None
    return None
