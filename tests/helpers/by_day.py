"""Chooses on which of many models a test runs by day: one of each kind. The night runs all."""

from collections.abc import Iterable
from typing import Any, Final

import pytest

# Full attention; windows with sinks, and experts; states; positions of images, with states.
KINDS: Final = ("qwen3", "gpt_oss", "qwen3_5", "qwen3_5_vl")


def by_day(names: Iterable[Any], kinds: Iterable[Any] = KINDS) -> list[Any]:
    """Return the names as parameters, all but those of `kinds` marked for the night."""
    chosen = set(kinds)
    return [
        name if name in chosen else pytest.param(name, marks=pytest.mark.night) for name in names
    ]
