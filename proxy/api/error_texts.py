"""Writes the parts of an error that all dialects share: its text and its headers."""

from typing import Final

from hearth.shared.errors import Overloaded, RequestError

TOO_LONG: Final = "context_length_exceeded"
# llama.cpp's words. A LiteLLM in front of this server recognises an overlong prompt by these words,
# and so do agents in front of LiteLLM, which receive no error code.
TOO_LONG_WORDS: Final = "exceeds the available context size"


def error_text(error: RequestError) -> str:
    """Return the text of `error` for people and programs."""
    text = str(error)
    if error.code != TOO_LONG or TOO_LONG_WORDS in text:
        return text
    return f"{text} The prompt {TOO_LONG_WORDS} here."


def error_headers(error: RequestError) -> list[tuple[bytes, bytes]]:
    after_s = error.retry_after_s or (Overloaded.RETRY_AFTER_S if error.status == 503 else 0)
    if error.status in (429, 503) and after_s:
        return [(b"retry-after", b"%d" % after_s)]
    return [(b"www-authenticate", b"Bearer")] if error.status == 401 else []
