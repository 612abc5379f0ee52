"""A stock LiteLLM proxy with Redis, two Hearths and a cloud, with the files of scripts/fleet as they are."""

import json
import lzma
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from hearth.shared.settings_from_env import PROJECT_DIR
from tests.helpers.servers.fleet import Fleet, cached_tokens, served_by

TURNS = 8
CAPTURED = lzma.decompress((PROJECT_DIR / "tests/data/agent_turns.jsonl.xz").read_bytes())
AGENTS: dict[str, list[dict[str, Any]]] = {}
for line in CAPTURED.splitlines():
    row = json.loads(line)
    AGENTS.setdefault(row["trace"], []).append(row)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet() as running:
        yield running


def body_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a captured body that asks for a short answer, whole."""
    body = {**row["body"], "model": "local", "stream": False}
    body.pop("stream_options", None)
    field = "max_output_tokens" if "input" in body else "max_tokens"
    body.pop("max_completion_tokens", None)
    if (body.get("thinking") or {}).get("type") == "enabled":
        del body["thinking"]
    return body | {field: 4}


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agents_turns_meet_one_hearth(fleet: Fleet, agent: str) -> None:
    rows = AGENTS[agent]
    assert len(rows) == TURNS
    replies = [fleet.ask(row["path"], body_of(row), row["headers"]) for row in rows]
    who = Counter(map(served_by, replies))
    print(agent, who, [cached_tokens(reply) for reply in replies])
    assert len(who) == 1
