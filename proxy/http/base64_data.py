"""Decodes base64 of megabytes in slices, between which the event loop can have the interpreter."""

import binascii
from typing import Final

_SLICE_CHARS: Final = 1024 * 1024  # some 2 ms. A multiple of 4


def decode_base64(text: str, start: int = 0) -> bytes:
    """Return what `text` holds from `start` on. Any thread.

    Raises:
        ValueError: it is not base64 in its strict form.
    """
    chars = len(text) - start
    if chars % 4 or text.endswith("==="):  # binascii lets more padding pass
        raise ValueError(f"{chars:,} characters, not whole groups of four")
    parts = []
    starts = range(start, len(text), _SLICE_CHARS)
    for at in starts:
        part = text[at : at + _SLICE_CHARS]
        if part.endswith("=") and at != starts[-1]:
            raise ValueError("padding amid the data")
        parts.append(binascii.a2b_base64(part, strict_mode=True))
    return b"".join(parts)
