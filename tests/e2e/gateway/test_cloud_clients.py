"""Real agent clients with models on both sides, and every socket of every process watched."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from hearth.shared.wire_messages import Prompt
from tests.helpers.clients.agent_projects import WORDS, installed, made_place
from tests.helpers.clients.run_clients import AGENTS, Agent
from tests.helpers.clients.scraped_metrics import families_of, series_of
from tests.helpers.cloud.cloud_answers import CloudAnswer, CloudCall
from tests.helpers.cloud.dialect_requests import ask, body_of
from tests.helpers.cloud.gateway_server import BIG, TwoSidedServer
from tests.helpers.servers.mock_cloud import CloudRequest
from tests.helpers.servers.watched_server import WatchedServer
from tests.helpers.worker_processes.scripted_worker import MISSION, answer

# One of each dialect, and one that sends a response's items back.
OVER_CLOUD: Final = ("Claude Code", "Codex", "opencode", "PI over Responses")


def on_a_mission(request: CloudRequest) -> CloudAnswer:
    """Return what the scripted local model says: files are read, then words told."""
    body = request.json
    rows = json.dumps(body.get("messages") or body["input"])
    tools = [tool.get("function", tool) for tool in body.get("tools") or ()]
    steps = min(2, len(set(re.findall(r"The (first|second|third) secret word is \w", rows))))
    messages = [{"role": "user", "content": rows}, *[{"role": "assistant", "content": ""}] * steps]
    functions = [
        {"function": tool | {"parameters": tool.get("parameters") or tool.get("input_schema")}}
        for tool in tools
        if "name" in tool
    ]
    parts = answer(Prompt(messages=messages, tools=functions))
    calls = tuple(CloudCall(call.name, dict(call.arguments)) for call in parts.calls)
    return CloudAnswer(parts.content, parts.reasoning, calls=calls)


def served(server: TwoSidedServer) -> Counter[str]:
    """Return how many requests each has answered."""
    found: Counter[str] = Counter()
    told = httpx.get(f"{server.url}/metrics", timeout=30).raise_for_status().text
    for (name, labels), value in series_of(families_of(told).values()).items():
        if name == "hearth_served_requests_total":
            found[dict(labels)["served_by"]] += int(value)
    return found


def on_its_way(agent: Agent, server: WatchedServer, directory: Path) -> Any:
    """Have the agent find the words, and return of what it warned."""
    place = made_place(directory, agent, server.url)
    run = agent.run(place, f"{MISSION}{place.project}/start.txt")
    assert run.code == 0, (run.out, run.err)
    assert agent.said(run) == f"The words: {', '.join(WORDS)}."
    return agent.warnings(place, run)


@pytest.mark.parametrize("name", OVER_CLOUD)
def test_an_agent_client_reads_files_as_the_cloud_asks(
    two_sided: TwoSidedServer, tmp_path: Path, name: str
) -> None:
    """One call, then two at once, then the answer: all of it by a model that is not here."""
    two_sided.cloud.rule = on_a_mission
    before = served(two_sided)
    assert not on_its_way(installed(AGENTS[name]), two_sided, tmp_path)
    assert [each.status for each in two_sided.cloud.generations() if each.status >= 400] == []
    assert set(served(two_sided) - before) == {"openai/agent-mock"}


def test_with_a_config_only_its_hosts_are_reached(two_sided: TwoSidedServer) -> None:
    for dialect in ("chat", "messages", "responses"):
        for model in (BIG, "cloud", "claude-cloud"):
            told = ask(two_sided.url, dialect, body_of(dialect, model, "Hello"))
            assert told.status == 200, told.raw
    for path in ("/v1/messages/count_tokens", "/v1/responses/input_tokens"):
        for model in ("cloud", "claude-cloud"):  # nor any for the words of a tokenizer
            body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "input": "Hi"}
            del body["input" if "messages" in path else "messages"]
            httpx.post(two_sided.url + path, json=body, timeout=60)
    assert two_sided.looks > 3
    assert two_sided.strangers() == set()
    assert two_sided.ports_reached() <= {two_sided.port, two_sided.cloud.port}
    assert two_sided.cloud.port in two_sided.ports_reached()


# ---------------------------------------------------------------- without a config


@pytest.fixture(scope="module")
def alone() -> Iterator[WatchedServer]:
    with WatchedServer() as running:
        yield running


@pytest.mark.parametrize("name", ["Claude Code", "Codex", "a client that names others"])
def test_without_a_config_no_process_reaches_anything_but_loopback(
    alone: WatchedServer, tmp_path: Path, name: str
) -> None:
    """Not one that is named in a body; and LiteLLM is not even loaded."""
    if name in AGENTS:
        on_its_way(installed(AGENTS[name]), alone, tmp_path)
    else:
        for dialect in ("chat", "messages", "responses", "completions"):
            for model in ("local-model", "openai/gpt-4o", "claude-opus-4-8", "anthropic/claude-x"):
                more = {"api_base": "http://203.0.113.9/v1", "base_url": "http://203.0.113.9"}
                ask(alone.url, dialect, body_of(dialect, model, "Hello", **more))
    looks = alone.looks
    while alone.looks < looks + 2:
        assert alone.process is not None and alone.process.poll() is None
    assert alone.seen, "the listening socket is seen"
    assert alone.strangers() == set()
    assert alone.ports_reached() <= {alone.port}
    maps = Path(f"/proc/{alone.process.pid}/maps")
    assert not maps.exists() or "tiktoken" not in maps.read_text()
