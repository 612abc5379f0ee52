"""Keeps the sampled tokens of each assistant turn, and finds a turn by the client's echo.

A client echoes the turn's tool-call ids, the signature of the thinking, or the messages before the
turn. A found turn is only a candidate: before the tokens are used, the session manager compares the
turn with the echo (`hearth.worker.sessions.echoed_turn_match`).

Thinking is also kept as text. If a client stripped the thinking from a turn whose tokens are no
longer known, the text is put back. Its key is made of API key, link, content and tool calls, so
that the text "Let me check." never brings another conversation's thinking.
"""

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hearth.worker.cache.block_hash import Tokens
from hearth.worker.prompt.prompt_with_sampled_turns import PromptPrefix
from hearth.worker.sessions.echoed_turn_match import TurnContent

TURNS_MAX = 20_000
SIBLINGS_MAX = 64  # most turns after the same messages, as after a repeated prompt
BYTES_MAX = 64 * 1024 * 1024
OBJECTS_BYTES = 512  # bytes of a turn's objects, its entry in the store included
STRING_BYTES = 64  # bytes of a string without its characters
LOOKUP_BYTES = 576  # bytes of a lookup key under which a turn is listed

_NOT_PLAIN = re.compile(r"[^A-Za-z0-9]")


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One assistant turn as the model wrote it. Immutable."""

    api_key: str  # digest of the API key
    link: bytes  # link of the messages before the turn
    ids: Tokens  # tokens of the generation prompt and the answer, without the end-of-turn token
    answer: TurnContent
    text: str = ""  # generated text, markup included
    call_ids: tuple[str, ...] = ()  # call ids as sent to the client
    signature: str = ""  # signature of the thinking, as sent to the client
    made_at: float = 0.0  # time in seconds, by wall clock
    prefix: PromptPrefix | None = None  # tokens before the turn; None in older records

    @property
    def thinking(self) -> str:
        return self.answer.reasoning

    @property
    def nbytes(self) -> int:
        """The turn's memory in the store; calls are estimated to take as much as the text."""
        strings = (self.answer.reasoning, self.answer.content, self.text, self.text)
        lookups = 1 + len(self.call_ids) + bool(self.signature)
        objects = OBJECTS_BYTES + LOOKUP_BYTES * lookups
        # An upper bound that never changes, unlike Python's own size of a string.
        text_bytes = (STRING_BYTES + len(text) * (1 if text.isascii() else 4) for text in strings)
        return 4 * len(self.ids) + sum(text_bytes) + objects


def plain_id(call_id: str) -> str:
    """Return the letters and digits of a tool-call id: some clients strip other characters."""
    return _NOT_PLAIN.sub("", call_id)


class TurnStore:
    """Keeps turns, each under several lookup keys; the least recently used go first.

    Invariants (see `check`):
      listed    every turn is listed under each of its lookup keys, and under no other
      counted   `nbytes` is the sum over the turns
      bounded   there are at most `turns_max` turns, of at most `bytes_max` bytes together
    Owner: the SessionManager, under its lock.
    """

    def __init__(self, turns_max: int = TURNS_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._turns_max = turns_max
        self._bytes_max = bytes_max
        # Kept for one key: sampled turns, 64 MB
        self._turns: OrderedDict[Turn, list[Hashable]] = OrderedDict()  # turn -> its lookup keys
        self._listed: dict[Hashable, list[Turn]] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Turn]:
        """Yield all turns, least recently used first."""
        return iter(self._turns)

    def add(self, turn: Turn) -> None:
        """Remember `turn`, unless an equal turn after the same messages is kept.

        Equal turns have the same tokens, prefix, call ids and signature.
        """
        identity = (turn.call_ids, turn.signature, turn.prefix, turn.ids.tobytes())
        for other in self._listed.get(lookup_by_link(turn.api_key, turn.link), ()):
            if (other.call_ids, other.signature, other.prefix, other.ids.tobytes()) == identity:
                self._turns.move_to_end(other)
                return
        lookups: list[Hashable] = [lookup_by_link(turn.api_key, turn.link)]
        lookups += [("call", turn.api_key, plain_id(call_id)) for call_id in turn.call_ids]
        if turn.signature:
            lookups.append(("signature", turn.api_key, turn.signature))
        self._turns[turn] = lookups
        for lookup in lookups:
            self._listed.setdefault(lookup, []).append(turn)
        self.nbytes += turn.nbytes
        if len(siblings := self._listed[lookups[0]]) > SIBLINGS_MAX:
            self._drop(siblings[0])
        while len(self._turns) > self._turns_max or self.nbytes > self._bytes_max:
            self._drop(next(iter(self._turns)))
        assert bool(self.nbytes) == bool(self._turns), (self.nbytes, len(self._turns))

    def check(self) -> None:
        """Assert all invariants. For tests, as the check takes time for every turn."""
        listed = {(lookup, turn) for lookup, found in self._listed.items() for turn in found}
        assert listed == {
            (lookup, turn) for turn, lookups in self._turns.items() for lookup in lookups
        }
        assert all(self._listed.values()), "an empty list was left in the store"
        assert self.nbytes == sum(turn.nbytes for turn in self._turns), self.nbytes
        assert len(self._turns) <= self._turns_max and self.nbytes <= self._bytes_max

    def _drop(self, turn: Turn) -> None:
        for lookup in self._turns.pop(turn):
            self._listed[lookup].remove(turn)
            if not self._listed[lookup]:
                del self._listed[lookup]
        self.nbytes -= turn.nbytes
        assert self.nbytes >= 0, self.nbytes

    def find(self, lookups: Iterable[Hashable]) -> Sequence[Turn]:
        """Return the turns under any of `lookups`, each once, and mark them as used."""
        found = {turn: None for lookup in lookups for turn in self._listed.get(lookup, ())}
        for turn in found:
            self._turns.move_to_end(turn)
        return list(found)


def lookups_by_ids(api_key: str, message: dict[str, Any]) -> list[Hashable]:
    """Return the lookup keys of the call ids and thinking signatures that `message` carries."""
    calls = (plain_id(call.get("id") or "") for call in message.get("tool_calls") or ())
    lookups: list[Hashable] = [("call", api_key, call_id) for call_id in calls if call_id]
    return lookups + [
        ("signature", api_key, signature) for signature in message.get("signatures") or ()
    ]


def lookup_by_link(api_key: str, link: bytes) -> Hashable:
    """Return the lookup key of the turns that follow exactly the messages of `link`."""
    return ("place", api_key, link)


# ---------------------------------------------------------------- thinking

THOUGHTS_MAX = 2_000
THINKING_CHARS_MAX = 32 * 1024 * 1024


def thinking_key(api_key: str, link: bytes, answer: TurnContent) -> bytes:
    """Return the key of a turn's thinking: the digest of the turn without its thinking."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (api_key.encode(), link, *_json_parts([answer.content.strip(), answer.calls])):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _json_parts(value: Any) -> Iterator[bytes]:
    """Yield the bytes of JSON of any depth: for each container its length, then its sorted items.

    Whole numbers are written as integers, as JavaScript clients send them.
    """
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            yield b"{%d" % len(value)
            values += (part for name in sorted(value) for part in (value[name], name))
        elif isinstance(value, list | tuple):
            yield b"[%d" % len(value)
            values += reversed(value)
        else:
            is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
            yield json.dumps(int(value) if is_whole else value).encode()


class ThinkingStore:
    """Keeps thinking by `thinking_key`; the least recently used goes first.

    Invariant: there are at most `entries_max` texts, of at most `chars_max` characters together.
    Owner: the SessionManager, under its lock.
    """

    def __init__(
        self, entries_max: int = THOUGHTS_MAX, chars_max: int = THINKING_CHARS_MAX
    ) -> None:
        self._entries_max = entries_max
        self._chars_max = chars_max
        # Kept for one key: thinking, 32 M characters
        self._thinking: OrderedDict[bytes, str] = OrderedDict()
        self._chars = 0

    def items(self) -> list[tuple[bytes, str]]:
        """Return all (key, thinking), least recently used first."""
        return list(self._thinking.items())

    def put(self, key: bytes, reasoning: str) -> None:
        """Remember `reasoning` under `key`, in place of any earlier thinking."""
        if not reasoning:
            return
        self._chars += len(reasoning) - len(self._thinking.pop(key, ""))
        self._thinking[key] = reasoning
        while len(self._thinking) > self._entries_max or self._chars > self._chars_max:
            _, dropped = self._thinking.popitem(last=False)
            self._chars -= len(dropped)
        assert bool(self._chars) == bool(self._thinking), (self._chars, len(self._thinking))

    def get(self, key: bytes) -> str:
        """Return the thinking under `key`, or ""."""
        if key not in self._thinking:
            return ""
        self._thinking.move_to_end(key)
        return self._thinking[key]
