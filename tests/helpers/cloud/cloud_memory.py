"""Remembers what a mock cloud gave out, so that it takes back only that, and only as it was.

Owner: the event loop of the mock.
"""

import base64
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

BYTES_PER_TOKEN: Final = 4


@dataclass(frozen=True)
class CloudUsage:
    """The tokens of one answer."""

    prompt: int
    cached: int
    completion: int
    reasoning: int = 0


@dataclass(frozen=True)
class StoredItem:
    """An item of Responses that the mock made."""

    item: dict[str, Any]
    is_stored: bool
    needs: str | None = None  # id of the reasoning without which it is refused


@dataclass
class CloudMemory:
    """What one account has been given."""

    key: bytes = field(default_factory=lambda: os.urandom(32))
    items: dict[str, StoredItem] = field(default_factory=dict)
    responses: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # input and output
    prefixes: set[bytes] = field(default_factory=set)

    # ------------------------------------------------------------ seals

    def sealed(self, text: str) -> str:
        """Return `text` in a shell that only this account opens, and only unchanged."""
        mac = hmac.digest(self.key, text.encode(), "sha256")
        return base64.b64encode(mac + text.encode()).decode()

    def opened(self, blob: object) -> str | None:
        """Return what `sealed` was given, or None for a foreign or changed blob."""
        try:
            raw = base64.b64decode(str(blob), validate=True)
        except ValueError:
            return None
        expected = hmac.digest(self.key, raw[32:], "sha256")
        return raw[32:].decode() if hmac.compare_digest(raw[:32], expected) else None

    def signature(self, thinking: str) -> str:
        return self.sealed(hashlib.sha256(thinking.encode()).hexdigest())

    def is_signed(self, thinking: object, signature: object) -> bool:
        digest = hashlib.sha256(str(thinking).encode()).hexdigest()
        return self.opened(signature) == digest

    # ------------------------------------------------------------ usage

    def usage(self, model: str, units: Iterable[Any], written: str, thinking: str) -> CloudUsage:
        """Count a request of `units` (tools, system, each message) and remember its prefixes.

        The cached tokens are those of the longest beginning that `model` has read before.
        """
        digest = hashlib.sha256(model.encode())
        prompt = cached = 0
        is_known = True
        for unit in units:
            text = json.dumps(_without_marks(unit), sort_keys=True)
            digest.update(text.encode() + b"\n")
            prompt += tokens(text)
            is_known = is_known and digest.digest() in self.prefixes
            cached = prompt if is_known else cached
            self.prefixes.add(digest.digest())
        reasoning = tokens(thinking) if thinking else 0
        return CloudUsage(prompt, cached, tokens(written) + reasoning, reasoning)


def tokens(text: str) -> int:
    return 1 + len(text.encode()) // BYTES_PER_TOKEN


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def _without_marks(value: Any) -> Any:
    """Return `value` without the marks that say what is cached: they are no part of a prompt."""
    if isinstance(value, dict):
        return {k: _without_marks(each) for k, each in value.items() if k != "cache_control"}
    if isinstance(value, list):
        return [_without_marks(each) for each in value]
    return value
