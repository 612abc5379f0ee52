"""Finds who sends a request: the session that it belongs to, its key, its program and its title.

A session has the name that its client gives it in headers or body; one without is known by its
first question, or by how it opens. Nothing here is trusted: it groups what a client asks, and
whoever forges it groups its own. A title is for people, and is shown to the session's own key.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b, sha256
from typing import Any, Final

import orjson

from hearth.proxy.http.strict_json import parse_argument
from hearth.proxy.request.content_pieces import text_of
from hearth.shared.wire_messages import MessageName, Speaker

CLAUDE_CODE_HEADER: Final = "x-claude-code-session-id"
VALUE_CHARS_MAX: Final = 256
KEY_DIGITS: Final = 16
USER_ID_CHARS_MAX: Final = 4_096  # of a metadata.user_id, which holds more than the session

# A session's header, its agent's, and its parent's, of which the first that is there counts.
_HEADERS: Final = (
    (CLAUDE_CODE_HEADER, "x-claude-code-agent-id", ()),
    ("x-session-id", "", ("x-parent-session-id",)),
    # Codex: the thread is a sub-agent's own, the session is its main thread's in all of them.
    ("thread-id", "", ("x-codex-parent-thread-id", "session-id")),
    ("session-id", "", ("x-codex-parent-thread-id",)),
    ("session_id", "", ("x-codex-parent-thread-id",)),
)
_FIELDS: Final = ("prompt_cache_key", "session_id", "conversation_id", "thread_id", "chat_id")
_USER_SESSION: Final = "_session_"  # in Claude Code's older user ids, before a UUID
_UUID: Final = re.compile("[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def key_digest(headers: Mapping[str, str]) -> str:
    """Return what the API key of a request is known by, "" = it is everybody's.

    `headers`, in lower case here and below, are those that `HearthApp` has put the key into.
    """
    key = headers.get("x-api-key", "")
    return sha256(key.encode()).hexdigest()[:KEY_DIGITS] if key else ""


def session_of(headers: Mapping[str, str], body: Mapping[str, Any], key: str) -> Speaker:
    """Return who sent a request, as far as it tells. Never raises; `key` is `key_digest`'s."""
    client, client_name = client_of(headers)
    names = {"client": client, "client_name": client_name}
    for session_header, agent_header, parent_headers in _HEADERS:
        if session := _name(headers.get(session_header)):
            parents = [_name(headers.get(header)) for header in parent_headers]
            parent = next((name for name in parents if name), "")
            agent = _name(headers.get(agent_header))
            return Speaker(key, session, agent, parent if parent != session else "", **names)
    # The session's names in `body`, the most telling first.
    nested = [row for row in (body.get("metadata"), body.get("extra_body")) if type(row) is dict]
    users = [_user_session(row.get("user_id")) for row in nested]
    told = [_name(place.get(field)) for field in _FIELDS for place in (body, *nested)]
    return Speaker(key, next(filter(None, users + told), ""), **names)


def _user_session(user_id: Any) -> str:
    """Return the session in Messages' metadata.user_id; a user's id alone is none."""
    if type(user_id) is not str or len(user_id) > USER_ID_CHARS_MAX:
        return ""
    row = parse_argument(user_id)
    if row is not None:
        return _name(row.get("session_id"))
    _, found, last = user_id.rpartition(_USER_SESSION)
    return _name(last) if found and _UUID.fullmatch(last) else ""


def _name(value: Any) -> str:
    """Return `value` where it can name something: a short text that can be printed, a number."""
    if type(value) is int and value.bit_length() <= 64:
        return str(value)
    if type(value) is not str or not 0 < len(value) <= VALUE_CHARS_MAX:
        return ""
    return value if value.isprintable() and not value.isspace() else ""


# ---------------------------------------------------------------- the program

PAGE_HEADER: Final = "x-hearth-page"  # of this server's own page, whose browser has its own name
AGENT_CHARS_MAX: Final = 512  # of a User-Agent, which are looked at
NAME_CHARS_MAX: Final = 32

# What a User-Agent begins with, in lower case -> the name for people. Seen in captured requests of
# each agent, and in the sources of the SDKs.
_NAMES: Final = {
    "claude-cli": "Claude Code",
    "codex_exec": "Codex",
    "codex_cli_rs": "Codex",
    "codex-tui": "Codex",
    "qwencode": "Qwen Code",
    "pi": "Pi",
    "openclaw": "OpenClaw",
    "ai-sdk": "AI SDK",
    "openai/python": "python openai",
    "asyncopenai/python": "python openai",
    "openai/js": "js openai",
    "anthropic/python": "python anthropic",
    "asyncanthropic/python": "python anthropic",
    "anthropic/js": "js anthropic",
    "ollama-python": "python ollama",
    "ollama-js": "js ollama",
    "ollama": "Ollama",
    "python-requests": "python requests",
    "python-httpx": "python httpx",
    "python-urllib": "python urllib",
    "code": "VS Code",
    "edg": "Edge",
}
_SDKS: Final = ("python", "js", "java", "go", "ruby")  # "OpenAI/Python 2.3.0": no version of it
# A browser says that it is all of its ancestors; these name no program of anyone's.
_ANCESTORS: Final = frozenset(
    ("mozilla", "applewebkit", "khtml", "gecko", "safari", "version", "mobile", "electron")
)
_BROWSERS: Final = frozenset(("chrome", "headlesschrome", "chromium"))
_PRODUCT: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~/@-]+")
_VERSION: Final = re.compile(r"v?(\d{1,6})(?:\.(\d{1,6}))?")
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9 ._+-]+")
_NO_WORD: Final = re.compile(r"[^a-z0-9]+")


def client_of(headers: Mapping[str, str]) -> tuple[str, str]:
    """Return which program sends: a word for ids, the same for every version, a name for people.

    They are as "claude-code" and "Claude Code 2.1"; empty where it does not say. Never raises.
    """
    if PAGE_HEADER in headers:
        return "hearth-page", "Hearth's page"
    products = _products(headers.get("user-agent", "")[:AGENT_CHARS_MAX])
    name, version = _chosen(products)
    if CLAUDE_CODE_HEADER in headers and name.lower() != "claude-cli":
        name, version = "claude-cli", ""
    name = _NAMES.get(name.lower(), name)
    name = _NO_NAME.sub(" ", name)[:NAME_CHARS_MAX].strip()
    word = _NO_WORD.sub("-", name.lower()).strip("-")
    if not word:
        return "", ""
    found = _VERSION.match(version)
    told = ".".join(part for part in found.groups() if part) if found else ""
    return word, f"{name} {told}".strip()


def _products(agent: str) -> list[tuple[str, str]]:
    """Return the products of a User-Agent with their versions, its comments left out."""
    words = _PRODUCT.findall(re.sub(r"\([^()]*\)", " ", agent))
    found: list[tuple[str, str]] = []
    for word in words:
        name, _, version = word.partition("/")
        if version.lower() in _SDKS:
            found.append((word, ""))
        elif not version and found and found[-1][0].lower().endswith(_SDKS) and not found[-1][1]:
            found[-1] = (found[-1][0], word)
        elif name:
            found.append((name, version.rpartition("/")[2]))
    return found


def _chosen(products: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Return the product that is the program: the first; of a browser's, the one that it is."""
    if not products:
        return "", ""
    first = products[0][0].lower()
    if first == "python" and len(products) > 1:  # "Python/3.12 aiohttp/3.9.5"
        return products[1]
    if first != "mozilla":
        return products[0]
    own = [row for row in products if row[0].lower() not in _ANCESTORS]
    named = [row for row in own if row[0].lower() not in _BROWSERS]
    return next(iter(named or own), ("Safari" if len(products) > 1 else "browser", ""))


# ---------------------------------------------------------------- the conversation

CONVERSATION_DIGITS: Final = 8
OPENING_MESSAGES_MAX: Final = 8  # that stand before the first question, and with it


def conversation_of(
    speaker: Speaker, messages: Sequence[Mapping[str, Any]], names: Sequence[MessageName]
) -> str:
    """Return what a conversation without an id is told by: its client and its first question.

    It is the same for each of its requests and after a restart. "" where the client names the
    session, or nothing of the question is stable.
    """
    if speaker.session:
        return ""
    asked = (name for row, name in zip(messages, names, strict=False) if row["role"] == "user")
    first = next((name.canonical for name in asked if name.canonical), b"")
    digits = first.hex()[:CONVERSATION_DIGITS]
    return f"{speaker.client or 'client'}-{digits}" if digits else ""


def session_digest(key: str, group: str, headers: Mapping[str, str], body: dict[str, Any]) -> bytes:
    """Return what the session of a request is known by; `key` is the digest of its API key."""
    speaker = session_of(headers, body, key)
    name: Any = [speaker.session, speaker.agent] if speaker.session else _opening(body)
    return blake2b(orjson.dumps([key, group, name]), digest_size=16).digest()


def _opening(body: dict[str, Any]) -> list[Any]:
    """Return what every later turn of the conversation has too: all up to its first question.

    A text may be a string in one turn and a part in the next, with a mark for a provider's cache.
    """
    rows = body.get("messages", body.get("input", body.get("prompt")))
    opening = [_texts(body.get("system")), _texts(body.get("instructions"))]
    if not isinstance(rows, list):
        rows = [{"role": "user", "content": rows}]
    for row in rows[:OPENING_MESSAGES_MAX]:
        role = row.get("role") if isinstance(row, dict) else None
        opening.append([row] if role is None else [role, *_texts(row.get("content"))])
        if role == "user":
            break
    return opening


def _texts(content: Any) -> list[Any]:
    parts = content if isinstance(content, list) else [content]
    return [_text(part) for part in parts]


def _text(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    if isinstance(part.get("text"), str):
        return part["text"]
    return {name: value for name, value in part.items() if name != "cache_control"}


# ---------------------------------------------------------------- its title

TITLE_CHARS_MAX: Final = 72
TEXT_CHARS_MAX: Final = 131_072  # of all messages together, in which the words are sought
MESSAGES_MAX: Final = 8  # of a person's, in which they are sought

# Tags around what the person said, and Claude Code's around a command of its own, as "/init";
# all other blocks in tags are the client's.
_WORDS_TAGS: Final = frozenset(
    ("task", "user_message", "user_query", "feedback", "question", "command-name", "command-args")
)
_TAG: Final = re.compile(r"<([A-Za-z][\w-]{0,40})(?:\s[^<>]{0,400})?>")
_FENCES: Final = (
    ("<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>", "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"),
    ("# AGENTS.md instructions", "</INSTRUCTIONS>"),
)
_STAMP: Final = re.compile(r"\[[^\[\]\n]{0,40}\d{4}-\d\d-\d\d[^\[\]\n]{0,40}\]")
_QUOTES: Final = "\"'`“”"


def title_of(messages: Iterable[Mapping[str, Any]]) -> str:
    """Return the first words that a person wrote in `messages`; "" where there are none."""
    asked = (row for row in messages if row.get("role") == "user")
    left = TEXT_CHARS_MAX
    for _, message in zip(range(MESSAGES_MAX), asked, strict=False):
        text = text_of(message.get("content") or "")[:left]
        if title := _title(text):
            return title
        left -= len(text)
    return ""


def _title(text: str) -> str:
    """Return the first line of words in `text`, as far as it fits."""
    for line in _STAMP.sub(" ", _own_words(text)).splitlines():
        if any(map(str.isalnum, line)):
            words = " ".join(line.split()).strip(_QUOTES)
            words = "".join(each for each in words if each.isprintable())
            if len(words) <= TITLE_CHARS_MAX:
                return words
            head = words[: TITLE_CHARS_MAX - 1]
            at_word, _, _ = head.rpartition(" ")  # of one long word what fits
            return (at_word if len(at_word) > TITLE_CHARS_MAX // 2 else head).rstrip(",.;: ") + "…"
    return ""


def _own_words(text: str) -> str:
    """Return `text` without the blocks that clients put around what a person wrote.

    Each step leaves a part of the text behind it, and the first tag that nothing closes ends the
    search: it takes no longer than the text is.
    """
    for begin, end in _FENCES:
        before, found, rest = text.partition(begin)
        if found and end in rest:
            text = before + rest.partition(end)[2]
    outside: list[str] = []
    inside: list[str] = []  # of tags that hold what the person said
    at = 0
    while (tag := _TAG.search(text, at)) is not None:
        close = text.find(f"</{tag.group(1)}>", tag.end())
        if close < 0:
            break
        outside.append(text[at : tag.start()])
        if tag.group(1) in _WORDS_TAGS:
            inside.append(text[tag.end() : close].strip())
        at = text.index(">", close) + 1
    return " ".join(inside) if any(inside) else "".join((*outside, text[at:]))
