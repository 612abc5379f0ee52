"""Serving before the default model is on this disk: it is told, and loaded once it is there."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hearth.shared.models.model_path import MODELS_DIR_VARIABLE, SMOLLM2
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.servers.server import WAIT_S_MAX, Server

HELLO = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/api/chat": {"messages": HELLO},
    "/api/generate": {"prompt": "Hello"},
}
TOLD = "hearth pull smollm2"


@pytest.fixture
def absent(tmp_path: Path) -> Iterator[Server]:
    """A server whose default model is nowhere, and that serves another one beside it."""
    with Server(
        MODEL_PATH="builtin:pocket",
        MODELS=f"beside={fixture_dir('qwen3')}",
        HF_HOME=str(tmp_path / "hub"),
        **{MODELS_DIR_VARIABLE: str(tmp_path / "models")},
    ) as server:
        yield server


def post(server: Server, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Return the status and the JSON that `path` answers `body` with, which streams nothing."""
    answer = httpx.post(server.url + path, json={"stream": False, **body}, timeout=WAIT_S_MAX)
    return answer.status_code, answer.json()


def test_without_its_default_model_a_server_tells_the_remedy_and_loads_it_once_it_is_there(
    absent: Server,
) -> None:
    health = absent.health()
    assert (health["status"], health["ready"]) == ("ok", True), "another model is served"
    assert TOLD in health["missing"]
    assert (health["workers"][0]["state"], health["workers"][0]["pid"]) == ("unloaded", None)
    for path, body in BODIES.items():
        status, answer = post(absent, path, {"model": "smollm2", **body})
        error = answer["error"]
        text = error if path.startswith("/api/") else error["message"]
        assert (status, TOLD in text) == (503, True), path
        if not path.startswith(("/api/", "/v1/messages")):
            assert error["code"] == "model_unavailable"

    status, answer = post(absent, "/v1/chat/completions", {"model": "beside", **chat(4)})
    assert (status, answer["model"]) == (200, "beside")

    directory = Path(absent.environment[MODELS_DIR_VARIABLE]) / SMOLLM2.directory.name
    shutil.copytree(fixture_dir("qwen3"), directory)
    greedy = {"temperature": 0.0}  # as its makers would have it
    (directory / "generation_config.json").write_text(json.dumps(greedy))
    answers = []
    for name in ("Pocket:latest", "smollm2", "pocket"):
        status, answer = post(absent, "/v1/chat/completions", {"model": name, **chat(24)})
        assert (status, answer["model"]) == (200, "smollm2")
        answers.append(answer["choices"][0]["message"])
    assert answers[0] == answers[1] == answers[2], "nobody sent a temperature"
    assert "missing" not in absent.health()
    rows = {row["id"]: row for row in absent.get("/v1/models")["data"]}
    assert list(rows) == ["smollm2", "beside"]
    assert rows["smollm2"]["description"].startswith("SmolLM2-135M: a real language model, tiny")
    assert "description" not in rows["beside"]
    assert absent.get("/v1/models/pocket")["context_length"] == rows["smollm2"]["context_length"]


def chat(tokens_max: int) -> dict[str, Any]:
    return {"messages": HELLO, "max_tokens": tokens_max}
