"""Finds how many bytes of text a token stands for at most, so that too long a text goes unread."""

import json
from typing import Any, Final

NFC_FACTOR: Final = 3  # bytes that normalising to NFC makes one of, at most
_UNIGRAM_SPACE: Final = "▁"


def longest_token_bytes(tokenizer: Any) -> int | None:
    """Return the most bytes of text, in UTF-8, that a token of `tokenizer` can stand for.

    None where there is no such limit: an added token may take all white space beside it, one
    unknown token any run of characters, what comes before the vocabulary may drop text, and of a
    slow tokenizer nothing is known.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    splits = _parts(backend.pre_tokenizer, "pretokenizers")
    is_byte_level = any(part["type"] == "ByteLevel" for part in splits)
    added = tokenizer.added_tokens_decoder.values()
    if any(token.lstrip or token.rstrip for token in added) or any(map(_drops_text, splits)):
        return None
    if not (is_byte_level or getattr(backend.model, "byte_fallback", False)):
        return None
    factor = _shrink_factor(_parts(backend.normalizer, "normalizers"))
    if factor is None:
        return None
    literal = {token.content for token in added}
    longest = max(
        len(text) if is_byte_level and text not in literal else len(text.encode())
        for text in tokenizer.get_vocab()
    )
    return factor * longest


def _drops_text(split: dict[str, Any]) -> bool:
    """Whether a pre-tokeniser may leave out what it splits at."""
    if split["type"] == "Split":
        return bool(split["behavior"] == "Removed")
    return split["type"] not in ("ByteLevel", "Digits", "Metaspace")


def _shrink_factor(normalizers: list[dict[str, Any]]) -> int | None:
    """Return how many times shorter normalising makes a text at most; None = any number."""
    factor = 1
    for part in normalizers:
        if part["type"] == "NFC":
            factor *= NFC_FACTOR
        elif part["type"] == "Replace":
            if part["pattern"] != {"String": " "} or part["content"] != _UNIGRAM_SPACE:
                return None
        elif part["type"] != "Prepend":
            return None
    return factor


def _parts(stage: Any, inner: str) -> list[dict[str, Any]]:
    """Return what a normaliser or a pre-tokeniser is made of, as its JSON has it."""
    if stage is None:
        return []
    shape: dict[str, Any] = json.loads(stage.__getstate__())
    parts: list[dict[str, Any]] = shape[inner] if shape["type"] == "Sequence" else [shape]
    return parts
