"""Measures what a session's next turn reads once the worker that held it was killed."""

from collections.abc import Sequence
from typing import Any

from scripts.replay.traces import Captured


async def killed_lines(
    captured: Sequence[Sequence[Captured]], tokens_max: int
) -> list[dict[str, Any]]:
    return []


def killed_table(lines: Sequence[dict[str, Any]]) -> str:
    return ""
