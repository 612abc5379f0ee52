"""A real Hearth is stopped, killed, short of memory and without a cache, and measured in each life.

The hybrid model is the one whose states can be lost beside its keys and values.
"""

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from hearth.commands.bench.results import ModelFacts
from hearth.commands.bench.server import Memory
from hearth.commands.bench.servers.known_servers import SERVERS
from hearth.commands.bench.servers.started_server import started
from hearth.commands.bench.workload import SCALES, Measured, Start, Visit
from hearth.commands.bench.workloads.server_lives import answers, day_of_sessions, restarts
from hearth.commands.replay.player import Target
from scripts.fixtures.fixture_cache import fixture_dir

MEMORY = {Start.KILLED: Memory.ONE_SESSION, Start.COLD: Memory.NONE}
BLOCK_TOKENS = 16  # what a turn may read again behind the last whole block
SCALE = SCALES["quick"]


@dataclass
class Lives:
    """What was measured, by workload, and what Hearth told of its memory after the day."""

    found: dict[str, Measured] = field(default_factory=dict)
    memory_mb: int = 0
    cache: dict[str, Any] = field(default_factory=dict)


async def _lives(directory: Path) -> Lives:
    model = fixture_dir("qwen3_5", tiny=True)
    lives = Lives(memory_mb=day_of_sessions.memory_mb(model, SCALE))
    every = [
        *answers.WORKLOADS,
        *restarts.WORKLOADS,
        *restarts.KILL_WORKLOADS,
        *day_of_sessions.WORKLOADS,
    ]
    kept: dict[str, object] = {}
    for start in Start:
        home = directory / ("cold" if start == Start.COLD else "home")
        home.mkdir(exist_ok=True)
        memory = MEMORY.get(start, Memory.DEFAULT)
        async with started(SERVERS["hearth"], model, home, memory, lives.memory_mb) as running:
            facts = ModelFacts("tiny", "hybrid", "qwen3_5", 1)
            visit = Visit(SERVERS["hearth"], running, facts, SCALE, 0, kept)
            for workload in (each for each in every if each.start == start):
                lives.found[workload.name] = await workload.run(visit)
            if start == Start.RESTARTED:
                await running.kill()
            elif start == Start.KILLED:
                lives.cache = await _cache(running.target)
    return lives


async def _cache(target: Target) -> dict[str, Any]:
    key = {"authorization": f"Bearer {target.key}"}
    async with (
        aiohttp.ClientSession(target.base_url) as session,
        session.get("/v1/cache", headers=key) as response,
    ):
        (worker,) = (await response.json())["workers"]
        told: dict[str, Any] = worker
        return told


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    """Play one visit; its directory has a short name, as sockets are in it."""
    with tempfile.TemporaryDirectory(prefix="hearth-bench-") as directory:
        yield asyncio.run(_lives(Path(directory)))


def test_every_workload_is_measured_without_an_error(lives: Lives) -> None:
    assert [(name, each.errors) for name, each in lives.found.items() if each.errors] == []
    assert list(lives.found) == ["answers", "restart", "before-kill", "kill", "day", "answers-cold"]
    assert all(
        each.values["failed"] == 0 < each.values["requests"] for each in lives.found.values()
    )


@pytest.mark.parametrize("name", ["restart", "kill"])
def test_a_next_turn_after_a_restart_reads_what_is_new(lives: Lives, name: str) -> None:
    values = lives.found[name].values
    assert 0 < values["ideal_tokens"] <= 150 < 1_000 < values["prompt_tokens"]
    assert values["ideal_tokens"] - 1 <= values["read_tokens"]
    assert values["read_tokens"] <= values["ideal_tokens"] + BLOCK_TOKENS
    assert values["start_s"] > 0


def test_ten_sessions_in_the_memory_of_one_are_read_once(lives: Lives) -> None:
    values = lives.found["day"].values
    turns = day_of_sessions.SESSIONS * day_of_sessions.TURNS
    assert values["requests"] == turns and values["ideal_tokens"] < values["prompt_tokens"] / 2
    assert abs(values["read_tokens"] - values["claimed_tokens"]) <= turns
    assert values["read_tokens"] <= values["ideal_tokens"] + turns * BLOCK_TOKENS
    # So most turns came from the disk: no more than one session is kept, beside the one at work.
    assert lives.cache["slots_max"] == 1
    assert lives.cache["bytes"] <= lives.cache["budget_bytes"] == lives.memory_mb << 20


def test_answers_from_the_cache_are_those_of_no_cache(lives: Lives) -> None:
    warm, cold = lives.found["answers"], lives.found["answers-cold"]
    assert warm.digests == cold.digests and all(warm.digests)
    assert warm.values["prompt_tokens"] == cold.values["prompt_tokens"] > 10_000
