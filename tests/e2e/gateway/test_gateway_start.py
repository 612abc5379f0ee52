"""The port answers, and local models do, before LiteLLM is there; cloud requests wait for it."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import pytest

from tests.helpers.cloud.cloud_answers import HELLO
from tests.helpers.cloud.dialect_requests import DIALECTS, ask, body_of
from tests.helpers.cloud.gateway_config import cloud_entry, local, write_config
from tests.helpers.servers.fake_server import FakeServer
from tests.helpers.servers.mock_cloud import MockCloud

IMPORT_S: Final = 6.0  # what the import takes longer here
LOCAL_S_MAX: Final = 5.0  # until a worker without a model is ready, on a loaded machine
SLOW_IMPORT: Final = """
import importlib.abc, sys, time

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "litellm":
            sys.meta_path.remove(self)
            time.sleep({import_s})
        return None

sys.meta_path.insert(0, Slow())
"""


@pytest.fixture(scope="module")
def cloud() -> Iterator[MockCloud]:
    with MockCloud() as made:
        yield made


def config_of(cloud: MockCloud, directory: Path) -> str:
    entries = [
        local("claude-haiku-*", "pocket"),
        local("local-first", "pocket"),
        cloud_entry(cloud, "cloud", "openai/gpt-mock"),
    ]
    rest = {"fallbacks": [{"local-first": ["cloud"]}], "num_retries": 0}
    return write_config(directory, {"model_list": entries, "litellm_settings": rest})


def slowly_importing(directory: Path) -> str:
    """Return a PYTHONPATH with which the import of LiteLLM takes long."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(SLOW_IMPORT.format(import_s=IMPORT_S))
    rest = os.environ.get("PYTHONPATH", "")
    return f"{directory}:{rest}" if rest else str(directory)


def test_local_requests_are_answered_while_litellm_imports(
    cloud: MockCloud, tmp_path: Path
) -> None:
    config = config_of(cloud, tmp_path)
    path = slowly_importing(tmp_path / "site")
    server = FakeServer(LITELLM_CONFIG=config, PYTHONPATH=path)
    with server:
        began = time.monotonic()
        for dialect in DIALECTS:
            for model in ("pocket", "claude-haiku-4-9", "local-first", "gpt-x"):
                for stream in (False, True):
                    answer = ask(server.url, dialect, body_of(dialect, model, "n=2", stream=stream))
                    assert answer.text.strip() == "tok0 tok1", answer.raw
                    assert answer.served_by == "hearth/pocket"
        assert time.monotonic() - began < LOCAL_S_MAX
        assert cloud.generations() == []
        waited = ask(server.url, "chat", body_of("chat", "cloud", "Hi"))
        if waited.status == 503:
            assert int(waited.headers["retry-after"]) > 0
            assert "LiteLLM" in waited.error
        else:
            assert waited.text == HELLO.text, waited.raw
        held_within(server, "cloud", 30.0)


def held_within(server: FakeServer, model: str, wait_s: float) -> None:
    """The cloud answers, once LiteLLM is there."""
    deadline = time.monotonic() + wait_s
    while (answer := ask(server.url, "chat", body_of("chat", model, "Hi"))).status == 503:
        assert time.monotonic() < deadline, answer.raw
        assert int(answer.headers["retry-after"]) > 0
        time.sleep(0.3)
    assert answer.text == HELLO.text, answer.raw


def test_the_port_tells_its_health_long_before_litellm_is_there(
    cloud: MockCloud, tmp_path: Path
) -> None:
    config = config_of(cloud, tmp_path)
    path = slowly_importing(tmp_path / "site")
    server = FakeServer(LITELLM_CONFIG=config, PYTHONPATH=path)
    began = time.monotonic()
    server.start()
    try:
        while not server.health():
            assert time.monotonic() - began < IMPORT_S, server.log.read_text()
            time.sleep(0.02)
        assert time.monotonic() - began < IMPORT_S
        names = {row["id"] for row in server.get("/v1/models")["data"]}
        assert {"pocket", "cloud", "local-first"} <= names
    finally:
        assert server.stop() < IMPORT_S, "a stop does not wait for an import"


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
            for model in ("pocket", "cloud"):
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
