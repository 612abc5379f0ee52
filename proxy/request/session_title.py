"""Makes a conversation's title of the first words that a person asked in it.

Agents put blocks of their own before these words: reminders, the environment, who wrote and when.
A title is held in memory only, and told to nobody but the conversation's own key.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from hearth.proxy.request.content_pieces import text_of

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
