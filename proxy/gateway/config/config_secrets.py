"""Finds the secrets of a LiteLLM config, so that no log, page or error of ours tells one.

LiteLLM passes Anthropic's streams on as they are, and a provider may repeat in an error what it
was sent: the error events of a stream that flows by lose them too. The text of an answer is never
changed: an agent may write down a key that it was shown.
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Final

from hearth.proxy.gateway.config.config_file import ConfigFile, leaves, variable_of

SECRET_CHARS_MIN: Final = 8  # what is shorter would blank out ordinary words
MASK: Final = "***"
# Names of entries whose values are secret. A "max_tokens" counts, and is none.
_SECRET_NAME: Final = re.compile(
    r"(^|_)(api_key|keys?|secrets?|token|password|passwd|credentials?|auth|authorization|cookie"
    r"|dsn|webhook_url|database_url|redis_url|direct_url|license)$|api[-_]?key"
    r"|^aws_(?!.*(region|profile|config|execution_env))",
    re.IGNORECASE,
)
# Their values are names of things, or numbers.
_OPEN_NAME: Final = re.compile(r"(_name|_id|_region|_per_token|_tokens|cache_key)$", re.IGNORECASE)
_LIKE_A_KEY: Final = re.compile(r"^(sk|pk|rk|gsk|xai|hf|key|ghp|AKIA)[-_][\w-]{12,}$|^Bearer ")
_IN_URL: Final = re.compile(r"^[a-z][a-z0-9+.-]*://[^/@\s]*:([^/@\s]+)@", re.IGNORECASE)


class Secrets:
    """The secret texts of a config and of the variables it names. A value that nobody changes."""

    def __init__(self, texts: frozenset[str]) -> None:
        self.texts = frozenset(text for text in texts if len(text) >= SECRET_CHARS_MIN)
        found = sorted(self.texts, key=len, reverse=True)  # one may be part of another
        self._any = re.compile("|".join(map(re.escape, found)) or r"(?!)")

    def redacted(self, text: str) -> str:
        """Return `text` with each secret replaced."""
        return self._any.sub(MASK, text)

    def redacted_bytes(self, data: bytes) -> bytes:
        text = data.decode("utf-8", "surrogateescape")
        return self.redacted(text).encode("utf-8", "surrogateescape")


def secrets_of(config: ConfigFile, given: Mapping[str, str]) -> Secrets:
    """Return the secrets that `config` holds or names, and those of the environment `given`.

    LiteLLM takes a provider's key, or a callback's, from there where the config names none.
    """
    texts: set[str] = set()
    headers = [row.get("litellm_params", {}).get("extra_headers") for row in config.models]
    sent = [("auth", value) for _, value in leaves(headers)]  # a provider may quote any of them
    for name, value in (*given.items(), *leaves(config.values), *sent):
        meant = config.resolved(value)
        if not isinstance(meant, str):
            continue
        if any(map(_names_a_secret, (name, variable_of(value)))) or _LIKE_A_KEY.search(meant):
            texts |= {meant, meant.removeprefix("Bearer ")}
        if inside := _IN_URL.match(meant):
            texts |= {meant, inside[1]}
    return Secrets(frozenset(texts))


def _names_a_secret(name: str) -> bool:
    return bool(_SECRET_NAME.search(name)) and not _OPEN_NAME.search(name)


HELD_BYTES_MAX: Final = 64 * 1024  # of an event that is not whole yet
_ERROR: Final = re.compile(rb'event: ?error|data: ?\{("type": ?"error"|"error")')
_EVENT_END: Final = re.compile(rb"\n\r?\n")


class ErrorEventRedactor:
    """Reads one stream in pieces cut anywhere. Owner: the task that sends it on.

    Invariant: at most HELD_BYTES_MAX are held, all of an event that is not whole.
    """

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self.has_errors = False  # an error has gone by
        self._held = b""

    def feed(self, part: bytes) -> bytes:
        """Return what may be sent on now."""
        data = self._held + part
        ends = [0, *(found.end() for found in _EVENT_END.finditer(data))]
        if len(data) - ends[-1] > HELD_BYTES_MAX:
            ends.append(len(data))
        self._held = data[ends[-1] :]
        return b"".join(self._passed(data[begin:end]) for begin, end in pairwise(ends))

    def rest(self) -> bytes:
        """Return what is held at the stream's end."""
        held, self._held = self._held, b""
        return self._passed(held)

    def _passed(self, event: bytes) -> bytes:
        if not _ERROR.match(event):
            return event
        self.has_errors = True
        return self._secrets.redacted_bytes(event)
