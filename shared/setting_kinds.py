"""What the text of a setting may be, each kind with what it becomes.

A kind raises ValueError(what is allowed) for any other text.
"""

import ipaddress
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

Parser = Callable[[str], Any]  # raises ValueError(what is allowed)


def integer(low: int, high: int) -> Parser:
    def parse(text: str) -> int:
        allowed = f"a whole number from {low:,} to {high:,}"
        try:
            value = int(text)
        except ValueError:
            raise ValueError(allowed) from None
        if not low <= value <= high:
            raise ValueError(allowed)
        return value

    return parse


def number(low: float, high: float) -> Parser:
    def parse(text: str) -> float:
        allowed = f"a number from {low:g} to {high:g}"
        try:
            value = float(text)
        except ValueError:
            raise ValueError(allowed) from None
        if not math.isfinite(value) or not low <= value <= high:
            raise ValueError(allowed)
        return value

    return parse


def boolean(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "on": True}
    words |= {"false": False, "0": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError("true or false")
    return words[text.lower()]


def always_true(reason: str) -> Parser:
    """A promise that has a name and cannot be switched off; `reason` says what else would be."""

    def parse(text: str) -> bool:
        if not boolean(text):
            raise ValueError(f"true: {reason}")
        return True

    return parse


def one_of(*allowed: str) -> Parser:
    def parse(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError("one of " + ", ".join(allowed))
        return text.lower()

    return parse


def bits(text: str) -> int:
    """Bits of a quantised value; 0 = off."""
    if text.lower() not in ("off", "4", "8"):
        raise ValueError("off, 4 or 8")
    return 0 if text.lower() == "off" else int(text)


def group_size(text: str) -> int:
    if text not in ("32", "64", "128"):
        raise ValueError("32, 64 or 128")
    return int(text)


def any_text(text: str) -> str:
    return text


def required_text(text: str) -> str:
    if not text:
        raise ValueError("not empty")
    return text


def words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def path(text: str) -> Path:
    if not text:
        raise ValueError("a directory")
    return Path(text).expanduser().absolute()


def address(text: str) -> str:
    if text != "localhost":
        try:
            ipaddress.ip_address(text)
        except ValueError:
            raise ValueError("an IP address or localhost") from None
    return text
