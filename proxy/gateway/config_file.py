"""Reads a LiteLLM config.yaml with the files it includes, as LiteLLM does, and finds its secrets.

What LiteLLM would find out after seconds of importing, this finds at the start: each mistake is a
StartError that names the file, the entry and the remedy. No log, page or error of ours tells a
secret. LiteLLM passes Anthropic's streams on as they are, and a provider may repeat in an error
what it was sent: the error events of a stream that flows by lose secrets too. The text of an answer
is never changed: an agent may write down a key that it was shown.
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
    """The mapping that a LiteLLM config.yaml and what it includes make, its values as written.

    A value that nobody changes. `given` has the variables that os.environ/NAME may name.
    """

    def __init__(self, path: Path, given: Mapping[str, str]) -> None:
        """Raises: StartError: a file cannot be read, or is no config of LiteLLM's."""
        self.path = path
        self.given = given
        self.values = _with_includes(path)
        for name in SECTIONS:
            self.section(name)
        rows = enumerate(self.list_of("model_list", self.values.get("model_list")), 1)
        self.models = [self.mapping(f"model_list entry {number}", row) for number, row in rows]

    def section(self, name: str) -> dict[str, Any]:
        return self.mapping(name, self.values.get(name))

    def mapping(self, entry: str, value: Any) -> dict[str, Any]:
        """Return `value`, or an empty mapping of nothing. Raises: StartError."""
        if not isinstance(value or {}, dict):
            self.refuse(entry, "is no mapping", "Write it as `name: value` lines.")
        return value or {}

    def list_of(self, entry: str, value: Any) -> list[Any]:
        """Return `value`, or an empty list of nothing. Raises: StartError."""
        if not isinstance(value or [], list):
            self.refuse(entry, "is no list", "Begin each entry with a dash.")
        return value or []

    def resolved(self, value: Any) -> Any:
        """Return what an os.environ/NAME stands for, None where NAME is not set; else `value`."""
        name = variable_of(value)
        return self.given.get(name) if name else value

    def refuse(self, entry: str, what: str, remedy: str) -> NoReturn:
        raise StartError(f"LITELLM_CONFIG {self.path}: {entry} {what}. {remedy}")

    def warn(self, entry: str, what: str) -> None:
        log.warning("LITELLM_CONFIG %s: %s %s.", self.path, entry, what)


def variable_of(value: Any) -> str:
    """Return the variable that `value` names as os.environ/NAME; else ""."""
    is_name = isinstance(value, str) and value.startswith(FROM_ENVIRONMENT)
    return value.removeprefix(FROM_ENVIRONMENT) if is_name else ""


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each single value with the name that it, or the list around it, stands under."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, name)
    else:
        yield name, value


def _with_includes(path: Path) -> dict[str, Any]:
    """Return the mapping in `path` and in what it includes: lists are appended, others replaced.

    As in LiteLLM: an entry lies beside the file that names it, or else beside `path`; each file
    is read once, the includes of an included file after those of the file that names it.
    """
    merged: dict[str, Any] = {}
    seen: set[str] = set()
    waiting = [(path.name, path, "LITELLM_CONFIG")]
    while waiting:
        name, by, named_by = waiting.pop(0)
        beside, root = (os.path.abspath(each.parent / name) for each in (by, path))
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
        mark = getattr(error, "problem_mark", None)  # what stands there may be a key
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
        self._buffered = b""

    def feed(self, part: bytes) -> bytes:
        """Return what may be sent on now."""
        data = self._buffered + part
        ends = [0, *(found.end() for found in _EVENT_END.finditer(data))]
        if len(data) - ends[-1] > HELD_BYTES_MAX:
            ends.append(len(data))
        self._buffered = data[ends[-1] :]
        return b"".join(self._passed(data[begin:end]) for begin, end in pairwise(ends))

    def rest(self) -> bytes:
        """Return what is held at the stream's end."""
        held, self._buffered = self._buffered, b""
        return self._passed(held)

    def _passed(self, event: bytes) -> bytes:
        if not _ERROR.match(event):
            return event
        self.has_errors = True
        return self._secrets.redacted_bytes(event)
