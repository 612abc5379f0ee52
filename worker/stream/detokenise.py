"""Turns token ids into text one at a time, with the same bytes as decoding all ids at once.

A character with bytes in several tokens appears with its last byte. An unfinished character at the
end of a generation is dropped, and no U+FFFD stands for it.
"""

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from transformers.convert_slow_tokenizer import bytes_to_unicode

CONTEXT_TOKENS_MAX: Final = 8  # no character is spread over more tokens


class Detokeniser(Protocol):
    """Decodes the tokens of one generation. Owner: the inference thread."""

    def add(self, token_id: int) -> str:
        """Return the text that this token completes; "" if it completes none."""


class Vocabulary:
    """Maps each token id to its bytes, and makes a Detokeniser for each request.

    Immutable, made once for a model: any thread may use it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._table, self._strips_first_space = _byte_table(tokenizer)
        added = tokenizer.added_tokens_decoder.items()
        self._special = {token_id for token_id, token in added if token.special}

    def detokeniser(self, context_ids: Sequence[int] = ()) -> Detokeniser:
        """Return a new detokeniser; `context_ids` are the tokens before its text.

        Special tokens in the context have no text: after special tokens alone, a text begins.
        """
        if self._table is None:
            detokeniser: Detokeniser = _ByDecoding(self._tokenizer.decode)
        else:
            detokeniser = _FromBytes(self._table, self._strips_first_space)
        for token_id in [i for i in context_ids if i not in self._special][-CONTEXT_TOKENS_MAX:]:
            detokeniser.add(token_id)
        return detokeniser

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token by itself; b"" for an id without text."""
        assert token_id >= 0, token_id
        if self._table is None:
            once: str = self._tokenizer.decode([token_id])
            twice: str = self._tokenizer.decode([token_id, token_id])  # the second keeps its blank
            return twice[len(once) :].encode("utf-8", "replace")
        return self._table[token_id] if token_id < len(self._table) else b""


class _FromBytes:
    """Decodes the bytes of each token. Owner: the inference thread."""

    def __init__(self, table: list[bytes], strips_first_space: bool) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_next = strips_first_space

    def add(self, token_id: int) -> str:
        assert token_id >= 0, token_id
        piece = self._table[token_id] if token_id < len(self._table) else b""
        text = self._decoder.decode(piece)
        if self._strip_next and text:
            self._strip_next = False
            text = text.removeprefix(" ")
        return text


class _ByDecoding:
    """Decodes with a tokenizer whose decoder is neither byte-level nor byte-fallback.

    Each text is what the new tokens add to the text of the tokens before them, because a decoder
    may treat the first token differently. Owner: the inference thread.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._before: list[int] = []  # the tokens of the last text
        self._new: list[int] = []  # tokens that have completed no text yet

    def add(self, token_id: int) -> str:
        self._new.append(token_id)
        whole = self._decode(self._before + self._new)
        text = whole[len(self._decode(self._before)) :]
        if not text or text.endswith("\ufffd"):
            return ""
        self._before, self._new = self._new, []
        return text


def _byte_table(tokenizer: Any) -> tuple[list[bytes] | None, bool]:
    """Return each id's bytes (None: unknown kind) and whether a first space is dropped."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return None, False
    decoder = json.loads(backend.to_str())["decoder"]
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    words = [word or "" for word in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))]
    if kinds == ["ByteLevel"]:
        to_byte = {character: byte for byte, character in bytes_to_unicode().items()}
        byte_characters = to_byte.keys()
        return [
            bytes(to_byte[character] for character in word)
            if byte_characters >= {*word}
            else word.encode()
            for word in words
        ], False
    if "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        byte_word = re.compile(r"<0x[0-9A-F]{2}>")
        return [
            bytes.fromhex(word[3:5])
            if byte_word.fullmatch(word)
            else word.replace("\u2581", " ").encode()
            for word in words
        ], "Strip" in kinds
    return None, False
