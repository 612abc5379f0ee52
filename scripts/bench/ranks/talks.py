"""Leads the same talk with servers of one, two and three ranks, and tells what differs."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scripts.fixtures.rank_fixtures import rank_fixture_dir
from scripts.harness.ranks.rank_server import rank_server, url_of
from scripts.harness.ranks.rank_talk import TalkRow, is_twin_equal, led_talk, talk_differences


@dataclass(frozen=True, slots=True)
class Weights:
    """What a fixture's weights are kept as."""

    dtype: str
    bits: int | None = None

    def __str__(self) -> str:
        return self.dtype if self.bits is None else f"{self.dtype}, {self.bits} bits"


ALL_WEIGHTS = (Weights("float32"), Weights("bfloat16"), Weights("float32", 4))


async def _talk(name: str, weights: Weights, ranks: int) -> list[TalkRow]:
    model = rank_fixture_dir(name, weights.dtype, weights.bits)
    async with rank_server(model, ranks) as server:
        return await asyncio.to_thread(led_talk, url_of(server))


def talk_rows(
    names: Sequence[str], kinds: Sequence[Weights], sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """Return for each fixture, kind of weights and number of ranks how the talk went."""
    found = []
    for name in names:
        for weights in kinds:
            if name == "gpt_oss" and weights.dtype == "bfloat16":
                continue  # MLX multiplies experts on a CPU in float32 or packed only
            lone = asyncio.run(_talk(name, weights, 1))
            for size in sizes:
                ranked = asyncio.run(_talk(name, weights, size))
                found.append(told(name, weights, size) | talk_row(lone, ranked))
                print(found[-1], flush=True)
    return found


def told(name: str, weights: Weights, size: int) -> dict[str, Any]:
    return {"fixture": name, "weights": str(weights), "ranks": size}


def talk_row(lone: Sequence[TalkRow], ranked: Sequence[TalkRow]) -> dict[str, Any]:
    """Return what a talk on ranks had in common with one rank's."""
    pairs = list(zip(lone, ranked, strict=True))
    return {
        "requests": len(pairs),
        "answers_equal": sum(one.text == other.text for one, other in pairs),
        "cached_equal": sum(one.cached_tokens == other.cached_tokens for one, other in pairs),
        "is_warm_cold": is_twin_equal(ranked),
        "is_lone_warm_cold": is_twin_equal(lone),
        "differences": talk_differences(lone, ranked),
    }
