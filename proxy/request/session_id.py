"""Finds the session, the API key's digest, the program and the title of a request.

A client may name the session in a header or in the body. A request without such a name is grouped
by its first question or by its first messages. Nothing here is trusted: a forged name only groups
the forger's own requests. A title is for people, and only the session's own API key sees it.
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
USER_ID_CHARS_MAX: Final = 4_096  # longest metadata.user_id, which holds more than the session

# (session's header, agent's header, parent's headers, of which the first present one counts)
_HEADERS: Final = (
    (CLAUDE_CODE_HEADER, "x-claude-code-agent-id", ()),
    ("x-session-id", "", ("x-parent-session-id",)),
    # Codex: each sub-agent has its own thread id, and all share the session id of the main thread.
    ("thread-id", "", ("x-codex-parent-thread-id", "session-id")),
    ("session-id", "", ("x-codex-parent-thread-id",)),
    ("session_id", "", ("x-codex-parent-thread-id",)),
)
_FIELDS: Final = ("prompt_cache_key", "session_id", "conversation_id", "thread_id", "chat_id")
_USER_SESSION: Final = "_session_"  # stands before the UUID in older user ids of Claude Code
_UUID: Final = re.compile("[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def api_key_digest(headers: Mapping[str, str]) -> str:
    """Return the digest of a request's API key; "" for a request without an API key.

    Header names are in lower case in this whole module. `ProxyApp` has copied the API key to
    `x-api-key`.
    """
    api_key = headers.get("x-api-key", "")
    return sha256(api_key.encode()).hexdigest()[:KEY_DIGITS] if api_key else ""


def session_of(headers: Mapping[str, str], body: Mapping[str, Any], api_key: str) -> Speaker:
    """Return the sender of a request; `api_key` is a digest. Never raises."""
    client, client_name = client_of(headers)
    names = {"client": client, "client_name": client_name}
    for session_header, agent_header, parent_headers in _HEADERS:
        if session := _name(headers.get(session_header)):
            parents = [_name(headers.get(header)) for header in parent_headers]
            parent = next((name for name in parents if name), "")
            agent = _name(headers.get(agent_header))
            return Speaker(api_key, session, agent, parent if parent != session else "", **names)
    # A user id with a session comes first, as it is the most specific.
    nested_objects = [
        row for row in (body.get("metadata"), body.get("extra_body")) if type(row) is dict
    ]
    user_sessions = [_user_session(row.get("user_id")) for row in nested_objects]
    names_in_body = [
        _name(holder.get(field)) for field in _FIELDS for holder in (body, *nested_objects)
    ]
    return Speaker(api_key, next(filter(None, user_sessions + names_in_body), ""), **names)


def _user_session(user_id: Any) -> str:
    """Return the session in Messages' metadata.user_id; "" if the id names only the user."""
    if type(user_id) is not str or len(user_id) > USER_ID_CHARS_MAX:
        return ""
    user = parse_argument(user_id)
    if user is not None:
        return _name(user.get("session_id"))
    _, found, last = user_id.rpartition(_USER_SESSION)
    return _name(last) if found and _UUID.fullmatch(last) else ""


def _name(value: Any) -> str:
    """Return `value` if it is a short printable text or an integer; else ""."""
    if type(value) is int and value.bit_length() <= 64:
        return str(value)
    if type(value) is not str or not 0 < len(value) <= VALUE_CHARS_MAX:
        return ""
    return value if value.isprintable() and not value.isspace() else ""


# ---------------------------------------------------------------- the program

PAGE_HEADER: Final = "x-hearth-page"  # sent by Hearth's own page
AGENT_CHARS_MAX: Final = 512  # characters of a User-Agent that are read
NAME_CHARS_MAX: Final = 32

# First product of a User-Agent, in lower case -> the program's name for people.
# Source: captured requests of each agent, and the sources of the SDKs.
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
_SDKS: Final = ("python", "js", "java", "go", "ruby")  # no versions: "OpenAI/Python 2.3.0"
# Products that browsers name as their ancestors; such a product identifies no program.
_ANCESTORS: Final = frozenset(
    ("mozilla", "applewebkit", "khtml", "gecko", "safari", "version", "mobile", "electron")
)
_BROWSERS: Final = frozenset(("chrome", "headlesschrome", "chromium"))
_PRODUCT: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~/@-]+")
_VERSION: Final = re.compile(r"v?(\d{1,6})(?:\.(\d{1,6}))?")
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9 ._+-]+")
_NO_WORD: Final = re.compile(r"[^a-z0-9]+")


def client_of(headers: Mapping[str, str]) -> tuple[str, str]:
    """Return the program that sent a request, as a word for ids and as a name for people.

    Examples are "claude-code", the same for every version, and "Claude Code 2.1". Both are empty if
    the program is unknown. Never raises.
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
    match = _VERSION.match(version)
    version_text = ".".join(part for part in match.groups() if part) if match else ""
    return word, f"{name} {version_text}".strip()


def _products(agent: str) -> list[tuple[str, str]]:
    """Return the (name, version) of each product in a User-Agent, without its comments."""
    words = _PRODUCT.findall(re.sub(r"\([^()]*\)", " ", agent))
    products: list[tuple[str, str]] = []
    for word in words:
        name, _, version = word.partition("/")
        if version.lower() in _SDKS:
            products.append((word, ""))
        elif (
            not version
            and products
            and products[-1][0].lower().endswith(_SDKS)
            and not products[-1][1]
        ):
            products[-1] = (products[-1][0], word)
        elif name:
            products.append((name, version.rpartition("/")[2]))
    return products


def _chosen(products: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Return the product that names the program: the first product, or the browser's own."""
    if not products:
        return "", ""
    first = products[0][0].lower()
    if first == "python" and len(products) > 1:  # "Python/3.12 aiohttp/3.9.5"
        return products[1]
    if first != "mozilla":
        return products[0]
    own = [product for product in products if product[0].lower() not in _ANCESTORS]
    named = [product for product in own if product[0].lower() not in _BROWSERS]
    return next(iter(named or own), ("Safari" if len(products) > 1 else "browser", ""))


# ---------------------------------------------------------------- the conversation

CONVERSATION_DIGITS: Final = 8
OPENING_MESSAGES_MAX: Final = 8  # most messages up to the first question


def conversation_of(
    speaker: Speaker, messages: Sequence[Mapping[str, Any]], names: Sequence[MessageName]
) -> str:
    """Return an id for a conversation without a session, made from its client and first question.

    All requests of the conversation have the same id, also after a restart. The id is "" if the
    client names the session, or if the question has only volatile text.
    """
    if speaker.session:
        return ""
    user_names = (
        name for message, name in zip(messages, names, strict=False) if message["role"] == "user"
    )
    first = next((name.canonical for name in user_names if name.canonical), b"")
    digits = first.hex()[:CONVERSATION_DIGITS]
    return f"{speaker.client or 'client'}-{digits}" if digits else ""


def session_digest(
    api_key: str, group: str, headers: Mapping[str, str], body: dict[str, Any]
) -> bytes:
    """Return the digest of a request's session within `group`; `api_key` is a digest."""
    speaker = session_of(headers, body, api_key)
    name: Any = [speaker.session, speaker.agent] if speaker.session else _opening(body)
    return blake2b(orjson.dumps([api_key, group, name]), digest_size=16).digest()


def _opening(body: dict[str, Any]) -> list[Any]:
    """Return the texts up to the first question, which all later requests repeat.

    A text may be a string in one request and a part with a `cache_control` mark in the next.
    """
    messages = body.get("messages", body.get("input", body.get("prompt")))
    opening = [_texts(body.get("system")), _texts(body.get("instructions"))]
    if not isinstance(messages, list):
        messages = [{"role": "user", "content": messages}]
    for message in messages[:OPENING_MESSAGES_MAX]:
        role = message.get("role") if isinstance(message, dict) else None
        opening.append([message] if role is None else [role, *_texts(message.get("content"))])
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


# ---------------------------------------------------------------- the title

TITLE_CHARS_MAX: Final = 72
TEXT_CHARS_MAX: Final = 131_072  # characters searched in all messages together
MESSAGES_MAX: Final = 8  # user messages that are searched

# Tags around a person's own words, and Claude Code's tags around a command such as "/init". The
# client wrote the blocks in any other tags.
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
    """Return the first words that a person wrote in `messages`; "" if there are none."""
    user_messages = (message for message in messages if message.get("role") == "user")
    chars_left = TEXT_CHARS_MAX
    for _, message in zip(range(MESSAGES_MAX), user_messages, strict=False):
        text = text_of(message.get("content") or "")[:chars_left]
        if title := _title(text):
            return title
        chars_left -= len(text)
    return ""


def _title(text: str) -> str:
    """Return the first line of words in `text`, cut to TITLE_CHARS_MAX."""
    for line in _STAMP.sub(" ", _own_words(text)).splitlines():
        if any(map(str.isalnum, line)):
            words = " ".join(line.split()).strip(_QUOTES)
            words = "".join(char for char in words if char.isprintable())
            if len(words) <= TITLE_CHARS_MAX:
                return words
            head = words[: TITLE_CHARS_MAX - 1]
            at_word, _, _ = head.rpartition(" ")  # a single long word is cut in its middle
            return (at_word if len(at_word) > TITLE_CHARS_MAX // 2 else head).rstrip(",.;: ") + "…"
    return ""


def _own_words(text: str) -> str:
    """Return `text` without the blocks that clients add to a person's words.

    The search moves forward only and ends at the first unclosed tag, so its time is linear.
    """
    for begin, end in _FENCES:
        before, found, rest = text.partition(begin)
        if found and end in rest:
            text = before + rest.partition(end)[2]
    outside: list[str] = []
    inside: list[str] = []  # texts in tags around a person's own words
    position = 0
    while (tag := _TAG.search(text, position)) is not None:
        close = text.find(f"</{tag.group(1)}>", tag.end())
        if close < 0:
            break
        outside.append(text[position : tag.start()])
        if tag.group(1) in _WORDS_TAGS:
            inside.append(text[tag.end() : close].strip())
        position = text.index(">", close) + 1
    return " ".join(inside) if any(inside) else "".join((*outside, text[position:]))
