"""Names what a turn was sampled behind, so that a later prompt shows where it begins.

Where a prompt is, token for token, what a turn was sampled behind, that turn begins: whatever its
header is, tokens, plain text or none at all. Touches no MLX.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from hearth.worker.cache.block_hash import HASH_BYTES, pack
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
