"""Real agent clients with models on both sides, and every socket of every process watched."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import anthropic
import httpx
import pytest

from tests.helpers.clients.agent_projects import WORDS, installed, made_place
from tests.helpers.clients.run_clients import AGENTS, Agent, Place
from tests.helpers.clients.scraped_metrics import families_of, series_of
from tests.helpers.cloud.agent_mission import on_a_mission
from tests.helpers.cloud.dialect_requests import ask, body_of
from tests.helpers.cloud.two_sided_server import BIG, SMALL, TwoSidedServer
from tests.helpers.servers.watched_server import WatchedServer
from tests.helpers.worker_processes.scripted_worker import MISSION

TEMPLATE_TOKENS: Final = 8  # with which each prompt begins
# Claude Code's model for the work and for small things, and who answers each.
TIERS: Final = {
    "both local": ("claude-opus-4-8", f"hearth/{BIG}", "claude-haiku-4-9", f"hearth/{SMALL}"),
    "the big one is the cloud's": (
        *("claude-sonnet-4-8", "anthropic/claude-mock"),
        *("claude-haiku-4-9", f"hearth/{SMALL}"),
    ),
    "the small one is the cloud's": (
        *("claude-opus-4-8", f"hearth/{BIG}"),
        *("claude-3-5-haiku-20241022", "anthropic/claude-small-mock"),
    ),
}
OVER_CLOUD: Final = ("Claude Code", "Codex", "opencode", "PI", "PI over Responses")


def with_tiers(agent: Agent, big: str, small: str) -> Agent:
    """Return Claude Code set up for two models, as a user does it by environment."""

    def environment(place: Place) -> dict[str, str]:
        told = {"ANTHROPIC_MODEL": big, "ANTHROPIC_SMALL_FAST_MODEL": small}
        return agent.environment(place) | told | {"ANTHROPIC_DEFAULT_HAIKU_MODEL": small}

    return dataclasses.replace(agent, environment=environment)


def served(server: TwoSidedServer) -> Callable[[], dict[str, float]]:
    """Return what tells how many requests each has answered since now."""

    def counts() -> dict[str, float]:
        told = httpx.get(f"{server.url}/metrics", timeout=30).raise_for_status().text
        found: dict[str, float] = defaultdict(float)
        for (name, labels), value in series_of(families_of(told).values()).items():
            if name == "hearth_served_requests_total":
                found[dict(labels)["served_by"]] += value
        return found

    before = counts()
    return lambda: {
        name: count - before[name] for name, count in counts().items() if count > before[name]
    }


@pytest.mark.parametrize("tier", TIERS)
def test_claude_code_works_with_a_big_and_a_small_model_on_either_side(
    two_sided: TwoSidedServer, tmp_path: Path, tier: str
) -> None:
    big, big_is, small, small_is = TIERS[tier]
    two_sided.cloud.rule = on_a_mission
    agent = with_tiers(installed(AGENTS["Claude Code"]), big, small)
    place = made_place(tmp_path, agent, two_sided.url)
    since = served(two_sided)
    run = agent.run(place, f"{MISSION}{place.project}/start.txt")
    assert run.code == 0, (run.out, run.err)
    assert agent.said(run) == f"The words: {', '.join(WORDS)}."
    assert set(since()) <= {big_is, small_is}
    assert since()[big_is] >= 3
    models = {request.model for request in two_sided.cloud.generations()}
    assert {f"anthropic/{name}" for name in models} == {big_is, small_is} & {
        f"anthropic/{name}" for name in models
    }


@pytest.mark.parametrize("tier", TIERS)
def test_two_models_keep_caches_apart(two_sided: TwoSidedServer, tier: str) -> None:
    """One session by turns on both: each finds its own turns in its cache, none of the other's."""
    big, big_is, small, small_is = TIERS[tier]
    system: Any = [{"type": "text", "text": f"{tier}, be brief. " * 40}]
    system[0]["cache_control"] = {"type": "ephemeral"}
    cached: dict[str, list[int]] = {big: [], small: []}
    rows: list[Any] = [{"role": "user", "content": "First question?"}]
    for number in range(2):
        for model, served_by in ((big, big_is), (small, small_is)):
            more = {"system": system, "messages": rows}
            body = body_of("messages", model, "") | more
            answer = ask(two_sided.url, "messages", body, headers={"x-session-id": f"s-{tier}"})
            assert answer.served_by == served_by, answer.raw
            cached[model].append(answer.usage[1])
        rows += [{"role": "assistant", "content": "So."}, {"role": "user", "content": f"{number}?"}]
    for model, (first, second) in cached.items():
        assert first <= TEMPLATE_TOKENS, (model, cached)
        assert second > 100, (model, cached)
    loaded = {f"hearth/{row['model']}" for row in two_sided.health()["workers"]}
    assert {name for name in (big_is, small_is) if name.startswith("hearth/")} <= loaded
    assert all(row["restarts"] == 0 for row in two_sided.health()["workers"])


@pytest.mark.parametrize("name", OVER_CLOUD)
def test_an_agent_client_reads_files_as_the_cloud_asks(
    two_sided: TwoSidedServer, tmp_path: Path, name: str
) -> None:
    """One call, then two at once, then the answer: all of it by a model that is not here."""
    two_sided.cloud.rule = on_a_mission
    agent = installed(AGENTS[name])
    place = made_place(tmp_path, agent, two_sided.url)
    since = served(two_sided)
    run = agent.run(place, f"{MISSION}{place.project}/start.txt")
    refused = [request.status for request in two_sided.cloud.generations() if request.status >= 400]
    assert (run.code, refused) == (0, []), (run.out, run.err)
    assert agent.said(run) == f"The words: {', '.join(WORDS)}."
    assert set(since()) == {"openai/agent-mock"}
    assert not agent.warnings(place, run)


def test_with_a_config_only_its_hosts_are_reached(two_sided: TwoSidedServer) -> None:
    for dialect in ("chat", "messages", "responses"):
        for model in (BIG, "cloud", "claude-cloud"):
            answer = ask(two_sided.url, dialect, body_of(dialect, model, "Hello"))
            assert answer.status == 200, answer.raw
    assert two_sided.looks > 3
    assert two_sided.strangers() == set()
    assert two_sided.ports_reached() <= {two_sided.port, two_sided.cloud.port}
    assert two_sided.cloud.port in two_sided.ports_reached()


# ---------------------------------------------------------------- without a config


@pytest.fixture(scope="module")
def alone() -> Iterator[WatchedServer]:
    with WatchedServer() as running:
        yield running


@pytest.mark.parametrize("name", ["Claude Code", "Codex", "opencode"])
def test_without_a_config_no_process_reaches_anything_but_loopback(
    alone: WatchedServer, tmp_path: Path, name: str
) -> None:
    agent = installed(AGENTS[name])
    place = made_place(tmp_path, agent, alone.url)
    run = agent.run(place, f"{MISSION}{place.project}/start.txt")
    assert agent.said(run) == f"The words: {', '.join(WORDS)}."
    held_to_loopback(alone)


def test_without_a_config_a_clients_address_is_reached_by_nobody(alone: WatchedServer) -> None:
    """Not one that is named in a body, nor an image's; and LiteLLM is not even imported."""
    with anthropic.Anthropic(base_url=alone.url, api_key="none", max_retries=0) as claude:
        rows: Any = [{"role": "user", "content": "Hello"}]
        claude.messages.create(model="local-model", messages=rows, max_tokens=9)
    for dialect in ("chat", "messages", "responses", "completions"):
        for model in ("local-model", "openai/gpt-4o", "claude-opus-4-8", "anthropic/claude-x"):
            more = {"api_base": "http://203.0.113.9/v1", "base_url": "http://203.0.113.9"}
            ask(alone.url, dialect, body_of(dialect, model, "Hello", **more))
    held_to_loopback(alone)
    assert alone.process is not None
    maps = Path(f"/proc/{alone.process.pid}/maps")
    assert not maps.exists() or "tiktoken" not in maps.read_text()


def held_to_loopback(server: WatchedServer) -> None:
    looks = server.looks
    while server.looks < looks + 2:
        assert server.process is not None and server.process.poll() is None
    assert server.seen, "the listening socket is seen"
    assert server.strangers() == set()
    assert server.ports_reached() <= {server.port}
