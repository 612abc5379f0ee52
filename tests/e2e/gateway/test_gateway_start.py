"""The port answers, and local models do, before LiteLLM is there; cloud requests wait for it."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import httpx
import pytest

from tests.helpers.cloud.cloud_answers import HELLO
from tests.helpers.cloud.dialect_requests import DIALECTS, ask, body_of
from tests.helpers.cloud.gateway_config import cloud_entry, local, write_config
from tests.helpers.servers.fake_server import FakeServer
from tests.helpers.servers.mock_cloud import MockCloud

HELD_IMPORT: Final = """
import importlib.abc, os, sys, time

class Held(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "litellm":
            sys.meta_path.remove(self)
            while not os.path.exists({go!r}):
                time.sleep(0.02)
        return None

sys.meta_path.insert(0, Held())
"""


@pytest.fixture(scope="module")
def cloud() -> Iterator[MockCloud]:
    with MockCloud() as made:
        yield made


def config_of(cloud: MockCloud, directory: Path) -> str:
    entries = [
        local("claude-haiku-*", "local"),
        local("local-first", "local"),
        cloud_entry(cloud, "cloud", "openai/gpt-mock"),
    ]
    rest = {"fallbacks": [{"local-first": ["cloud"]}], "num_retries": 0}
    return write_config(directory, {"model_list": entries, "litellm_settings": rest})


def holding_the_import(directory: Path, go: Path) -> str:
    """Return a PYTHONPATH with which the import of LiteLLM waits until the file `go` is there."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(HELD_IMPORT.format(go=str(go)))
    rest = os.environ.get("PYTHONPATH", "")
    return f"{directory}:{rest}" if rest else str(directory)


def test_local_requests_are_answered_while_litellm_imports(
    cloud: MockCloud, tmp_path: Path
) -> None:
    config, go = config_of(cloud, tmp_path), tmp_path / "go"
    path = holding_the_import(tmp_path / "site", go)
    server = FakeServer(LITELLM_CONFIG=config, PYTHONPATH=path)
    with server:
        for dialect in DIALECTS:
            for model in ("local", "claude-haiku-4-9", "local-first", "gpt-x"):
                for stream in (False, True):
                    answer = ask(server.url, dialect, body_of(dialect, model, "n=2", stream=stream))
                    assert answer.text.strip() == "tok0 tok1", answer.raw
                    assert answer.served_by == "hearth/local"
        assert "LiteLLM is ready" not in server.log.read_text()
        with ThreadPoolExecutor(1) as pool:  # a request for the cloud waits for it
            waiting = pool.submit(ask, server.url, "chat", body_of("chat", "cloud", "Hi"))
            time.sleep(0.3)
            assert cloud.generations() == []
            go.touch()
            assert waiting.result().text == HELLO.text, waiting.result().raw


def test_the_port_tells_its_health_long_before_litellm_is_there(
    cloud: MockCloud, tmp_path: Path
) -> None:
    config, go = config_of(cloud, tmp_path), tmp_path / "go"
    path = holding_the_import(tmp_path / "site", go)
    server = FakeServer(LITELLM_CONFIG=config, PYTHONPATH=path)
    with server:  # it is ready, and LiteLLM's import does not end
        names = {row["id"] for row in server.get("/v1/models")["data"]}
        assert {"local", "cloud", "local-first"} <= names
        assert "LiteLLM is ready" not in server.log.read_text()
        server.stop()  # which waits for no import: it would not end


def test_a_config_that_cannot_be_used_is_told_at_the_start(tmp_path: Path) -> None:
    """Exit 78, with the file, its line and a remedy; nothing of a key in it."""
    path = tmp_path / "litellm.yaml"
    for text, match in (
        ("model_list:\n  - model_name: a\n   bad: [", "line 3"),
        ("model_list:\n  - model_name: a\n", "litellm_params"),
        (
            "model_list:\n  - model_name: a\n    litellm_params: {model: hearth/unknown}\n",
            "hearth/unknown",
        ),
    ):
        path.write_text(text)
        path.chmod(0o600)
        server = FakeServer(LITELLM_CONFIG=str(path))
        server.start()
        assert server.process is not None
        assert server.process.wait(30) == 78, server.log.read_text()
        told = server.log.read_text()
        assert match in told
        assert str(path) in told or path.name in told


def test_two_kinds_of_keys_at_once_are_refused_at_the_start(
    cloud: MockCloud, tmp_path: Path
) -> None:
    entries = [cloud_entry(cloud, "cloud", "openai/gpt-mock")]
    general = {"master_key": "sk-master-4713-canary"}
    config = write_config(tmp_path, {"model_list": entries, "general_settings": general})
    server = FakeServer(LITELLM_CONFIG=config, PROXY_API_KEY="a-key-of-our-own")
    server.start()
    assert server.process is not None
    assert server.process.wait(30) == 78
    told = server.log.read_text()
    assert "PROXY_API_KEY" in told and "master_key" in told
    assert "4713-canary" not in told


def test_a_master_key_guards_local_and_cloud_models(cloud: MockCloud, tmp_path: Path) -> None:
    master = "sk-master-4714-canary"
    entries = [cloud_entry(cloud, "cloud", "openai/gpt-mock")]
    general = {"master_key": master}
    config = write_config(tmp_path, {"model_list": entries, "general_settings": general})
    cloud.forget()
    with FakeServer(LITELLM_CONFIG=config) as server:
        for dialect in ("chat", "messages", "responses"):
            for model in ("local", "cloud"):
                for headers, statuses in (
                    ({"authorization": f"Bearer {master}"}, (200,)),
                    ({"x-api-key": master}, (200,)),
                    ({"authorization": "Bearer sk-wrong"}, (400, 401, 403)),
                    ({}, (401,)),
                ):
                    body = body_of(dialect, model, "n=1")
                    answer = ask(server.url, dialect, body, headers=headers)
                    assert answer.status in statuses, (dialect, model, headers, answer.raw)
                    assert master not in answer.raw
        sent = [request.headers["authorization"] for request in cloud.requests]
        assert master not in " ".join(sent)
        assert master not in server.log.read_text()
        assert httpx.get(f"{server.url}/metrics").status_code in (401, 403)
