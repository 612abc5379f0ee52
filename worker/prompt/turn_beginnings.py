"""Names what a turn was sampled behind, so that a later prompt shows where it begins.

Where a prompt is, token for token, what a turn was sampled behind, that turn begins: whatever its
header is, tokens, plain text or none at all. Touches no MLX.
"""

import hashlib
import json
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

from hearth.worker.cache.block_hash import HASH_BYTES, Tokens, pack
from hearth.worker.cache.image_keys import ImageRun
from hearth.worker.prompt.chat_template import parts_of, text_of
from hearth.worker.prompt.tokenise import TextPiece


class Beginning(NamedTuple):
    """Names the first `tokens` of a prompt, images included, by their digest. Immutable.

    `chars` counts the characters of the text that they end with, 0 behind an added token or a turn.
    """

    tokens: int
    chars: int
    digest: bytes


class PromptIds:
    """A prompt's ids while they are put one behind the other, and the images among them.

    Owner: the prompt thread that builds the prompt.
    """

    def __init__(self, ids: list[int]) -> None:
        self.ids: list[int] = []
        self.images: list[ImageRun] = []
        self._chars = 0
        self._digest = hashlib.blake2b(digest_size=HASH_BYTES)
        self.extend(ids)

    @property
    def beginning(self) -> Beginning:
        """What a turn is sampled behind that begins at this place."""
        return Beginning(len(self.ids), self._chars, self._digest.digest())

    def extend(self, ids: Sequence[int]) -> None:
        """Add ids that are of no text of the template's: a turn, or what begins the prompt."""
        self.ids.extend(ids)
        self._chars = 0
        self._digest.update(pack(ids).tobytes())

    def add(self, piece: TextPiece) -> None:
        """Add a piece of what was rendered, or an image."""
        start = len(self.ids)
        self.extend(piece.ids)
        if piece.picture is not None:
            self.images.append(ImageRun(start, len(self.ids), piece.picture))
            self._digest.update(piece.picture.identity)
        elif not piece.is_added:
            self._chars = len(piece.text)

    def are(self, begins: Beginning, more: Sequence[int]) -> bool:
        """Whether the ids with `more` behind them are what `begins` names."""
        if len(self.ids) + len(more) != begins.tokens:
            return False
        digest = self._digest.copy()
        digest.update(pack(more).tobytes())
        return digest.digest() == begins.digest


def words_of(message: dict[str, Any]) -> list[str]:
    """Return the words of an assistant message of which a template shows one at least."""
    names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    words = (*(part["text"].strip() for part in parts_of(message)), *names)
    return [word for word in words if word]


def shows_all(message: dict[str, Any], text: str) -> bool:
    """Whether `text` shows all that an assistant's message says, in the order of writing.

    Its thinking comes first and may be missing. The search goes on behind it, since it may name
    what is called.
    """
    thinking = (message.get("reasoning_content") or "").strip()
    place = text.find(thinking) + len(thinking) if thinking in text else 0
    for word in words_of(message):
        place = text.find(word, place)
        if place < 0:
            return False
        place += len(word)
    return True


def shows_other(message: dict[str, Any], other: dict[str, Any], text: str) -> bool:
    """Whether `text` shows the `other` message, and not because `message` says the same."""
    said = text_of(other).strip()
    return bool(said) and said in text and json.dumps(said)[1:-1] not in json.dumps(message)


def ends_in(ids: Tokens, ends: Set[int]) -> int:
    """Return how many of a turn's tokens, behind the first, are `ends`."""
    return sum(token in ends for token in ids[1:].tolist())


def end_of_own(
    pieces: list[TextPiece], message: dict[str, Any], ends: Set[int], ids: Tokens
) -> int | None:
    """Return the piece that ends the turn of `message`, which begins with the first; None of none.

    The first by which all is shown that it says, behind the ends that its own `ids` have: Apertus
    puts results behind one end, and another behind them.
    """
    text, inner = pieces[0].text, ends_in(ids, ends)
    for at, piece in enumerate(pieces[1:], 1):
        if piece.is_added and piece.ids[0] in ends:
            if inner <= 0 and shows_all(message, text):
                return at
            inner -= 1
        text += piece.text
    return None


def stands_at(pieces: list[TextPiece], at: int, texts: tuple[str, ...]) -> bool:
    """Whether one of the texts begins with piece `at`; none is empty, and so no piece."""
    length = max(map(len, texts), default=0)
    return "".join(piece.text[:length] for piece in pieces[at : at + length]).startswith(texts)


def paired(
    headers: list[tuple[int, int]], messages: list[int]
) -> list[tuple[tuple[int, int], int]]:
    """Return which headers each message has: all where it is alone, else one each, else none."""
    if len(messages) == 1:
        return [((headers[0][0], headers[-1][1]), messages[0])]
    return list(zip(headers, messages, strict=True)) if len(headers) == len(messages) else []
