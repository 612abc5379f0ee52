"""Defines what a mock cloud is told to answer, and remembers what it gave out."""

import base64
import json
import os
import secrets
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import yaml

from hearth.shared.paths import PROJECT_DIR

BYTES_PER_TOKEN: Final = 4
# Where an answer breaks off or stays: before its head, behind the head, or amid its text.
Place = Literal["before the head", "behind the head", "amid the text"]
Row = dict[str, Any]


@dataclass(frozen=True)
class CloudError:
    """An error in the shape of either provider."""

    status: int
    message: str
    code: str | None = None
    kind: str = "invalid_request_error"  # Anthropic's `type`
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self, dialect: str) -> Row:
        if dialect == "messages":
            told = {"type": self.kind, "message": self.message}
            return {"type": "error", "error": told, "request_id": "req_mock"}
        return {"error": {"message": self.message, "type": self.kind, "code": self.code}}


_TOLD: Final = yaml.safe_load((PROJECT_DIR / "tests/data/cloud_errors.yaml").read_text())
ERRORS: Final = {name: CloudError(**fields) for name, fields in _TOLD.items()}


class CloudCall(NamedTuple):
    """One call of a tool that the model writes."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class CloudAnswer:
    """What the mock says to one request."""

    text: str = "Hello from the cloud."
    thinking: str = ""
    redacted: str = ""  # thinking that Anthropic shows to nobody
    calls: tuple[CloudCall, ...] = ()
    error: CloudError | None = None
    error_place: Place = "before the head"
    drops: Place | None = None  # the connection is closed there
    hangs: Place | None = None  # nothing comes from there on, until the client leaves


HELLO: Final = CloudAnswer()


class CloudUsage(NamedTuple):
    """The tokens of one answer, as DialectAnswer.usage has them."""

    prompt: int
    cached: int
    completion: int


@dataclass
class CloudMemory:
    """What one account has been given. Owner: the mock's event loop."""

    seals: dict[str, str] = field(default_factory=dict)  # what each blob hides
    items: dict[str, tuple[bool, str | None]] = field(default_factory=dict)  # is stored; needs
    responses: dict[str, list[Row]] = field(default_factory=dict)  # input and output
    prefixes: set[str] = field(default_factory=set)

    def sealed(self, text: str) -> str:
        """Return a blob that stands for `text`, for this account alone."""
        blob = base64.b64encode(os.urandom(60)).decode()
        self.seals[blob] = text
        return blob

    def usage(self, model: str, units: Iterable[Any], answer: CloudAnswer) -> CloudUsage:
        """Count a request of `units` (tools, system, each message) and remember its prefixes.

        The cached tokens are those of the longest beginning that `model` has read before.
        """
        read, prompt, cached = model, 0, 0
        for unit in units:
            text = json.dumps(without(unit, {"cache_control"}), sort_keys=True)  # no part of it
            read += f"\n{text}"
            is_known = cached == prompt and read in self.prefixes
            prompt += tokens(text)
            cached = prompt if is_known else cached
            self.prefixes.add(read)
        written = answer.text + "".join(json.dumps(call.arguments) for call in answer.calls)
        return CloudUsage(prompt, cached, tokens(written) + tokens(answer.thinking))


def tokens(text: str) -> int:
    return 1 + len(text.encode()) // BYTES_PER_TOKEN


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def without(value: Any, names: Set[str]) -> Any:
    """Return `value` without fields that are null or have one of these names, at any depth."""
    if isinstance(value, dict):
        kept = ((k, each) for k, each in value.items() if k not in names and each is not None)
        return {k: without(each, names) for k, each in kept}
    return [without(each, names) for each in value] if isinstance(value, list) else value
