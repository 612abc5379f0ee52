"""Keeps each assistant turn as the tokens that were sampled, and finds it by what a client echoes.

A client echoes the ids of its tool calls, the signature of its thinking, or its place behind the
same messages. Finding is not enough: the session manager compares what the echo says
(`hearth.worker.sessions.echoed_turn_match`) before the tokens are used.

Thinking is kept beside the turns, as text, so that it comes back where a client stripped it from a
turn whose tokens are not known any more. It is keyed by API key, line, content and tool calls: "Let
me check." never brings another conversation's thinking.
"""

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hearth.worker.cache.block_hash import Tokens
from hearth.worker.prompt.prompt_with_sampled_turns import Beginning
from hearth.worker.sessions.echoed_turn_match import TurnContent

TURNS_MAX = 20_000
PLACE_MAX = 64  # turns behind the same messages: one prompt asked again and again
BYTES_MAX = 64 * 1024 * 1024
OBJECTS_BYTES = 512  # of a turn: its objects, and its entry in the store
STRING_BYTES = 64  # of a string beside its characters
PLACE_BYTES = 576  # of a place where it is listed

_NOT_PLAIN = re.compile(r"[^A-Za-z0-9]")


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One assistant turn as the model wrote it. Immutable."""

    api_key: str  # digest of the API key
    place: bytes  # chain of the canonical messages before it
    ids: Tokens  # its generation prompt and what was sampled, without the end-of-turn token
    said: TurnContent
    text: str = ""  # as it was generated, markup included
    call_ids: tuple[str, ...] = ()  # as the client was given them
    signature: str = ""  # of its thinking, as the client was given it
    made_at: float = 0.0  # wall clock, in seconds
    begins: Beginning | None = None  # what it was sampled behind; older records do not say

    @property
    def thinking(self) -> str:
        return self.said.reasoning

    @property
    def nbytes(self) -> int:
        """The memory that it takes in the store, its calls as large as its whole text."""
        strings = (self.said.reasoning, self.said.content, self.text, self.text)
        places = 1 + len(self.call_ids) + bool(self.signature)
        objects = OBJECTS_BYTES + PLACE_BYTES * places
        # The most that a string takes; always the same, unlike what Python says of one.
        said = (STRING_BYTES + len(text) * (1 if text.isascii() else 4) for text in strings)
        return 4 * len(self.ids) + sum(said) + objects


def plain_id(call_id: str) -> str:
    """Return a tool-call id as every client sends it back: one strips all but letters, digits."""
    return _NOT_PLAIN.sub("", call_id)


class TurnStore:
    """Turns by each way to find them; the least recently used go first.

    Invariants (see `check`):
      listed    every turn is listed at each of its places, and nothing else is
      counted   `nbytes` is the sum over the turns
      bounded   at most `turns_max` turns of `bytes_max` bytes together
    Owner: the SessionManager, under its lock.
    """

    def __init__(self, turns_max: int = TURNS_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._turns_max = turns_max
        self._bytes_max = bytes_max
        # Kept for one key: turns as they were sampled, 64 MB
        self._turns: OrderedDict[Turn, list[Hashable]] = OrderedDict()  # turn -> where it is listed
        self._listed: dict[Hashable, list[Turn]] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Turn]:
        """Yield all turns, the least recently used first."""
        return iter(self._turns)

    def add(self, turn: Turn) -> None:
        """Remember `turn`; the same tokens at the same place, given by the same ids, are one."""
        given = (turn.call_ids, turn.signature, turn.begins, turn.ids.tobytes())
        for other in self._listed.get(place_behind(turn.api_key, turn.place), ()):
            if (other.call_ids, other.signature, other.begins, other.ids.tobytes()) == given:
                self._turns.move_to_end(other)
                return
        places: list[Hashable] = [place_behind(turn.api_key, turn.place)]
        places += [("call", turn.api_key, plain_id(call_id)) for call_id in turn.call_ids]
        if turn.signature:
            places.append(("signature", turn.api_key, turn.signature))
        self._turns[turn] = places
        for place in places:
            self._listed.setdefault(place, []).append(turn)
        self.nbytes += turn.nbytes
        if len(siblings := self._listed[places[0]]) > PLACE_MAX:
            self._drop(siblings[0])
        while len(self._turns) > self._turns_max or self.nbytes > self._bytes_max:
            self._drop(next(iter(self._turns)))
        assert bool(self.nbytes) == bool(self._turns), (self.nbytes, len(self._turns))

    def check(self) -> None:
        """Assert all invariants. Costs time in proportion to what is kept: for tests."""
        listed = {(place, turn) for place, found in self._listed.items() for turn in found}
        assert listed == {(place, turn) for turn, all_ in self._turns.items() for place in all_}
        assert all(self._listed.values()), "no empty list is left behind"
        assert self.nbytes == sum(turn.nbytes for turn in self._turns), self.nbytes
        assert len(self._turns) <= self._turns_max and self.nbytes <= self._bytes_max

    def _drop(self, turn: Turn) -> None:
        for place in self._turns.pop(turn):
            self._listed[place].remove(turn)
            if not self._listed[place]:
                del self._listed[place]
        self.nbytes -= turn.nbytes
        assert self.nbytes >= 0, self.nbytes

    def find(self, places: Iterable[Hashable]) -> Sequence[Turn]:
        """Return the turns that are listed at any of `places`, each once; they are used now."""
        found = {turn: None for place in places for turn in self._listed.get(place, ())}
        for turn in found:
            self._turns.move_to_end(turn)
        return list(found)


def places_of_ids(key: str, message: dict[str, Any]) -> list[Hashable]:
    """Return where turns are listed whose ids, of calls or of thinking, `message` carries."""
    calls = (plain_id(call.get("id") or "") for call in message.get("tool_calls") or ())
    places: list[Hashable] = [("call", key, call_id) for call_id in calls if call_id]
    return places + [("signature", key, given) for given in message.get("signatures") or ()]


def place_behind(key: str, chain: bytes) -> Hashable:
    """Return where the turns are listed that were given behind exactly these messages."""
    return ("place", key, chain)


# ---------------------------------------------------------------- thinking

THOUGHTS_MAX = 2_000
THINKING_CHARS_MAX = 32 * 1024 * 1024


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

    def __init__(
        self, entries_max: int = THOUGHTS_MAX, chars_max: int = THINKING_CHARS_MAX
    ) -> None:
        self._entries_max = entries_max
        self._chars_max = chars_max
        # Kept for one key: thinking, 32 M characters
        self._thinking: OrderedDict[bytes, str] = OrderedDict()
        self._chars = 0

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
