"""Watches every socket of every process: what agent clients and bodies reach is told by it."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers.clients.agent_projects import WORDS, installed, made_place
from tests.helpers.clients.run_clients import AGENTS
from tests.helpers.cloud.dialect_requests import ask, body_of
from tests.helpers.cloud.gateway_server import BIG, TwoSidedServer
from tests.helpers.servers.watched_server import WatchedServer
from tests.helpers.worker_processes.scripted_worker import MISSION


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
        agent = installed(AGENTS[name])
        place = made_place(tmp_path, alone.url, agent.files)
        run = agent.run(place, f"{MISSION}{place.project}/start.txt")
        assert run.code == 0, (run.out, run.err)
        assert agent.said(run) == f"The words: {', '.join(WORDS)}."
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
