"""The counted workloads, played on a real Hearth and a real mlx_lm.server, count what was read."""

import asyncio
from pathlib import Path

import pytest

from hearth.commands.bench.results import HEARTH, ModelFacts
from hearth.commands.bench.server import Memory
from hearth.commands.bench.servers.known_servers import SERVERS
from hearth.commands.bench.servers.started_server import started
from hearth.commands.bench.workload import SCALES, Measured, Visit, Workload
from hearth.commands.bench.workloads.counted_tokens import (
    cancelled,
    captured_sessions,
    forks_and_edits,
    shared_trunk,
)
from scripts.fixtures.fixture_cache import fixture_dir

ALL = {
    workload.name: workload
    for workload in (
        *captured_sessions.ALONE,
        *captured_sessions.SUB_AGENTS,
        *captured_sessions.LIVE,
        *shared_trunk.WORKLOADS,
        *forks_and_edits.WORKLOADS,
        *cancelled.WORKLOADS,
    )
}
# Those that wait three seconds, or read twice as much, are left out for time.
PLAYED = ("linear", "sub-agents", "shared-trunk", "forks-and-edits", "cancel-0s", "live")
LATE = "were answered before they were cancelled"  # as on a busy machine; it is read all the same
UNSEEN = 40  # tokens of a request that Hearth may read again: two that overlap share them


def played(name: str, home: Path, workloads: list[Workload]) -> dict[str, Measured]:
    model = fixture_dir("qwen3", tiny=True)

    async def play() -> dict[str, Measured]:
        server = SERVERS[name]
        async with started(server, model, home, Memory.DEFAULT, 1000) as running:
            facts = ModelFacts("tiny", "text", "qwen3", 1)
            visit = Visit(server, running, facts, SCALES["quick"], 0)
            return {each.name: await each.run(visit) for each in workloads}

    return asyncio.run(play())


def is_measured(found: Measured) -> bool:
    return found.values["failed"] == 0 and all(told.endswith(LATE) for told in found.errors)


@pytest.fixture(scope="module")
def hearth(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Measured]:
    home = tmp_path_factory.mktemp("hearth")
    return played(HEARTH, home, [ALL[name] for name in PLAYED])


@pytest.mark.parametrize("name", PLAYED)
def test_hearth_reads_the_ideal_of_each_workload(hearth: dict[str, Measured], name: str) -> None:
    found = hearth[name]
    values = found.values
    assert is_measured(found) and values["requests"] >= 2
    assert values["prompt_tokens"] >= values["ideal_tokens"] > 1_000
    spare = UNSEEN * values["requests"]
    # `live` has in its prompts what the server said itself: that need not be read.
    assert values["read_tokens"] <= values["ideal_tokens"] + spare
    assert values["read_tokens"] >= values["ideal_tokens"] * 0.9


@pytest.mark.parametrize("name", [name for name in PLAYED if name != "cancel-0s"])
def test_the_meter_counts_what_hearth_says(hearth: dict[str, Measured], name: str) -> None:
    values = hearth[name].values
    # A token that is read alone is no reading to the meter: one a request at most.
    assert abs(values["claimed_tokens"] - values["read_tokens"]) <= values["requests"]
