"""Reads a LiteLLM config.yaml with the files it includes, as LiteLLM does, and finds its secrets.

LiteLLM would find mistakes only after seconds of importing. Here each mistake is a StartError at
the server's start, which names the file, the entry and the remedy.

No log, page or error of ours shows a secret. LiteLLM forwards Anthropic's streams unchanged, and a
provider's error may repeat the key that it got, so secrets are removed from the error events of a
stream too. The text of an answer never changes: an agent may write a key that it was shown.
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NoReturn

import yaml

from hearth.shared.errors import StartError

log = logging.getLogger(__name__)

FROM_ENVIRONMENT: Final = "os.environ/"
SECTIONS: Final = (
    *("general_settings", "litellm_settings", "router_settings", "environment_variables"),
)


class ConfigFile:
    """The values of a LiteLLM config.yaml and its included files, as written. Immutable.

    `given` has the variables that os.environ/NAME may name.
    """

    def __init__(self, path: Path, given: Mapping[str, str]) -> None:
        """Raises: StartError: a file cannot be read, or is no LiteLLM config."""
        self.path = path
        self.given = given
        self.values = _with_includes(path)
        for name in SECTIONS:
            self.section(name)
        models = enumerate(self.list_of("model_list", self.values.get("model_list")), 1)
        self.models = [
            self.mapping(f"model_list entry {number}", model) for number, model in models
        ]

    def section(self, name: str) -> dict[str, Any]:
        return self.mapping(name, self.values.get(name))

    def mapping(self, entry: str, value: Any) -> dict[str, Any]:
        """Return `value`, or {} for None. Raises: StartError: it is no mapping."""
        if not isinstance(value or {}, dict):
            self.refuse(entry, "is no mapping", "Write it as `name: value` lines.")
        return value or {}

    def list_of(self, entry: str, value: Any) -> list[Any]:
        """Return `value`, or [] for None. Raises: StartError: it is no list."""
        if not isinstance(value or [], list):
            self.refuse(entry, "is no list", "Begin each entry with a dash.")
        return value or []

    def resolved(self, value: Any) -> Any:
        """Return the variable's text if `value` is os.environ/NAME, None if unset; else `value`."""
        name = variable_of(value)
        return self.given.get(name) if name else value

    def refuse(self, entry: str, what: str, remedy: str) -> NoReturn:
        raise StartError(f"LITELLM_CONFIG {self.path}: {entry} {what}. {remedy}")

    def warn(self, entry: str, what: str) -> None:
        log.warning("LITELLM_CONFIG %s: %s %s.", self.path, entry, what)


def variable_of(value: Any) -> str:
    """Return NAME if `value` is os.environ/NAME; else ""."""
    is_name = isinstance(value, str) and value.startswith(FROM_ENVIRONMENT)
    return value.removeprefix(FROM_ENVIRONMENT) if is_name else ""


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each scalar value with its key, or with the key of the list around it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, name)
    else:
        yield name, value


def _with_includes(path: Path) -> dict[str, Any]:
    """Return the mapping in `path` merged with its included files, as LiteLLM does.

    Lists are appended, other values replaced. An included file lies beside the file that names it,
    or else beside `path`. Each file is read once, in breadth-first order.
    """
    merged: dict[str, Any] = {}
    seen: set[str] = set()
    waiting = [(path.name, path, "LITELLM_CONFIG")]
    while waiting:
        name, by, named_by = waiting.pop(0)
        beside, root = (os.path.abspath(file.parent / name) for file in (by, path))
        found = root if os.path.exists(root) and not os.path.exists(beside) else beside
        if found in seen:
            continue
        seen.add(found)
        part = _mapping_in(Path(found), named_by)
        names = part.pop("include", [])
        if not isinstance(names, list) or not all(isinstance(below, str) for below in names):
            raise StartError(
                f"LITELLM_CONFIG {found}: include is no list of files. Name each by a dash."
            )
        waiting += [(below, Path(found), f"LITELLM_CONFIG {found}: include") for below in names]
        for key, value in part.items():
            both = isinstance(value, list) and isinstance(merged.get(key), list)
            merged[key] = [*merged[key], *value] if both else value
    return merged


def _mapping_in(path: Path, named_by: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise StartError(
            f"{named_by} names {path}, which cannot be read ({error.strerror}). Name a LiteLLM "
            "config.yaml that you can read."
        ) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)  # the place alone: the text at it may be a key
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise StartError(
            f"{named_by} names {path}, which is no YAML in UTF-8{place}. Correct that line."
        ) from None
    if not isinstance(values, dict):
        raise StartError(
            f"{named_by} names {path}, which holds no mapping. A LiteLLM config.yaml has "
            "`model_list:` and its entries."
        )
    return values


SECRET_CHARS_MIN: Final = 8  # a shorter secret would mask ordinary words
MASK: Final = "***"
# Names of entries whose values are secret; max_tokens is none of them.
_SECRET_NAME: Final = re.compile(
    r"(^|_)(api_key|keys?|secrets?|token|password|passwd|credentials?|auth|authorization|cookie"
    r"|dsn|webhook_url|database_url|redis_url|direct_url|license)$|api[-_]?key"
    r"|^aws_(?!.*(region|profile|config|execution_env))",
    re.IGNORECASE,
)
# Exceptions: values under these names are identifiers or numbers.
_OPEN_NAME: Final = re.compile(r"(_name|_id|_region|_per_token|_tokens|cache_key)$", re.IGNORECASE)
_LIKE_A_KEY: Final = re.compile(r"^(sk|pk|rk|gsk|xai|hf|key|ghp|AKIA)[-_][\w-]{12,}$|^Bearer ")
_IN_URL: Final = re.compile(r"^[a-z][a-z0-9+.-]*://[^/@\s]*:([^/@\s]+)@", re.IGNORECASE)


class Secrets:
    """The secret texts of a config and of the variables that it names. Immutable."""

    def __init__(self, texts: frozenset[str]) -> None:
        self.texts = frozenset(text for text in texts if len(text) >= SECRET_CHARS_MIN)
        found = sorted(self.texts, key=len, reverse=True)  # a secret may be part of a longer one
        self._any = re.compile("|".join(map(re.escape, found)) or r"(?!)")

    def redacted(self, text: str) -> str:
        """Return `text` with each secret replaced."""
        return self._any.sub(MASK, text)

    def redacted_bytes(self, data: bytes) -> bytes:
        text = data.decode("utf-8", "surrogateescape")
        return self.redacted(text).encode("utf-8", "surrogateescape")


def secrets_of(config: ConfigFile, given: Mapping[str, str]) -> Secrets:
    """Return the secrets that `config` holds or names, and those of the environment `given`.

    LiteLLM takes the keys of providers and callbacks from the environment if the config has none.
    """
    texts: set[str] = set()
    headers = [model.get("litellm_params", {}).get("extra_headers") for model in config.models]
    sent = [("auth", value) for _, value in leaves(headers)]  # a provider may quote any header
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


HELD_BYTES_MAX: Final = 64 * 1024  # bytes of an incomplete event
_ERROR: Final = re.compile(rb'event: ?error|data: ?\{("type": ?"error"|"error")')
_EVENT_END: Final = re.compile(rb"\n\r?\n")


class ErrorEventRedactor:
    """Masks secrets in the error events of one stream. Owner: the task that forwards the stream.

    The stream comes in parts cut anywhere. Invariant: at most HELD_BYTES_MAX of an incomplete event
    are buffered.
    """

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self.has_errors = False  # the stream had an error event
        self._buffered = b""

    def feed(self, part: bytes) -> bytes:
        """Take in the next part, and return the bytes that can be forwarded now."""
        data = self._buffered + part
        ends = [0, *(found.end() for found in _EVENT_END.finditer(data))]
        if len(data) - ends[-1] > HELD_BYTES_MAX:
            ends.append(len(data))
        self._buffered = data[ends[-1] :]
        return b"".join(self._passed(data[begin:end]) for begin, end in pairwise(ends))

    def rest(self) -> bytes:
        """Return the buffered bytes at the stream's end."""
        buffered, self._buffered = self._buffered, b""
        return self._passed(buffered)

    def _passed(self, event: bytes) -> bytes:
        if not _ERROR.match(event):
            return event
        self.has_errors = True
        return self._secrets.redacted_bytes(event)
