"""Remembers the thinking of turns, so that it comes back where a client stripped it.

It serves turns whose tokens are not known; it is text only, and so outlives the turn store. Keyed
by API key, line, content and tool calls: "Let me check." never brings another conversation's
thinking.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from hearth.worker.sessions.echoed_turn_match import TurnContent

ENTRIES_MAX = 2_000
CHARS_MAX = 32 * 1024 * 1024


def thinking_key(key: str, place: bytes, said: TurnContent) -> bytes:
    """Return the digest by which a turn is known without its thinking."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (key.encode(), place, *_written([said.content.strip(), said.calls])):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _written(value: Any) -> Iterator[bytes]:
    """Yield JSON of any depth, keys in order: each list and object by its length, then its items.

    Whole numbers are written as integers, as a client of JavaScript sends them.
    """
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield b"{%d" % len(value)
            waiting += (part for name in sorted(value) for part in (value[name], name))
        elif isinstance(value, list | tuple):
            yield b"[%d" % len(value)
            waiting += reversed(value)
        else:
            is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
            yield json.dumps(int(value) if is_whole else value).encode()


class ThinkingStore:
    """Thinking by `thinking_key`; the least recently used goes first.

    Invariant: at most `entries_max` texts of `chars_max` characters together.
    Owner: the SessionManager, under its lock.
    """

    def __init__(self, entries_max: int = ENTRIES_MAX, chars_max: int = CHARS_MAX) -> None:
        self._entries_max = entries_max
        self._chars_max = chars_max
        # Kept for one key: thinking, 32 M characters
        self._thinking: OrderedDict[bytes, str] = OrderedDict()
        self._chars = 0

    def __len__(self) -> int:
        return len(self._thinking)

    def items(self) -> list[tuple[bytes, str]]:
        """Return what is remembered, the least recently used first."""
        return list(self._thinking.items())

    def put(self, name: bytes, reasoning: str) -> None:
        """Remember `reasoning`. Where two turns differ in it alone, the later one is remembered."""
        if not reasoning:
            return
        self._chars += len(reasoning) - len(self._thinking.pop(name, ""))
        self._thinking[name] = reasoning
        while len(self._thinking) > self._entries_max or self._chars > self._chars_max:
            _, dropped = self._thinking.popitem(last=False)
            self._chars -= len(dropped)
        assert bool(self._chars) == bool(self._thinking), (self._chars, len(self._thinking))

    def get(self, name: bytes) -> str:
        """Return what was put; "" where nothing was."""
        if name not in self._thinking:
            return ""
        self._thinking.move_to_end(name)
        return self._thinking[name]
