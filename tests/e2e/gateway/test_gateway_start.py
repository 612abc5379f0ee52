"""A server with a config starts, waits for LiteLLM and stops, and tells its clients.

The port answers, and local models do, before LiteLLM is there; requests for others wait for it. A
stop tells them so in the client's API, and waits for no other server.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.helpers.cloud.cloud_answers import ERRORS, HELLO, CloudAnswer
from tests.helpers.cloud.dialect_requests import DIALECTS, DialectAnswer, ask, body_of
from tests.helpers.cloud.gateway_server import cloud_entry, local, write_config
from tests.helpers.servers.fake_server import FakeServer
from tests.helpers.servers.mock_cloud import MockCloud

STOP_S_MAX: Final = 30.0  # what they wait for takes longer
# The import of LiteLLM waits until the file named by GO is there.
HELD_IMPORT: Final = """
import importlib.abc, os, sys, time
class Held(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "litellm":
            sys.meta_path.remove(self)
            while not os.path.exists(os.environ["GO"]):
                time.sleep(0.02)
sys.meta_path.insert(0, Held())
"""


@pytest.fixture
def cloud() -> Iterator[MockCloud]:
    with MockCloud() as made:
        yield made


def server_of(cloud: MockCloud, directory: Path, more: Any = (), **environ: str) -> FakeServer:
    """Return a server of local models and the cloud; `more` is of the config."""
    entries = [
        local("claude-haiku-*", "local"),
        local("local-first", "local"),
        *(cloud_entry(cloud, name, f"openai/{name}") for name in ("cloud", "500", "429")),
    ]
    fallbacks = [{name: ["cloud"]} for name in ("local-first", "500", "429")]
    config = {"model_list": entries, "litellm_settings": {"fallbacks": fallbacks}} | dict(more)
    return FakeServer(LITELLM_CONFIG=write_config(directory, config), **environ)


@pytest.fixture
def held(cloud: MockCloud, tmp_path: Path) -> Iterator[FakeServer]:
    """Start a server whose LiteLLM is not there until the file `go` is."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HELD_IMPORT)
    path = ":".join(filter(None, (str(tmp_path / "site"), os.environ.get("PYTHONPATH"))))
    with server_of(cloud, tmp_path, PYTHONPATH=path, GO=str(tmp_path / "go")) as server:
        yield server


def test_local_requests_are_answered_while_litellm_imports(
    held: FakeServer, cloud: MockCloud, tmp_path: Path
) -> None:
    for dialect in DIALECTS:
        for model in ("local", "claude-haiku-4-9", "local-first", "gpt-x"):
            answer = ask(held.url, dialect, body_of(dialect, model, "n=2", stream=model == "local"))
            assert (answer.text, answer.served_by) == ("tok0 tok1", "hearth/local"), answer.raw
    names = {row["id"] for row in held.get("/v1/models")["data"]}
    assert {"local", "cloud", "local-first"} <= names
    assert "LiteLLM is ready" not in held.log.read_text()
    with ThreadPoolExecutor(1) as pool:  # a request for the cloud waits for it
        waiting = pool.submit(ask, held.url, "chat", body_of("chat", "cloud", "Hi"))
        time.sleep(0.3)
        assert cloud.generations() == []
        (tmp_path / "go").touch()
        assert waiting.result().text == HELLO.text, waiting.result().raw


def streams_of(
    server: FakeServer, pool: ThreadPoolExecutor, read: dict[str, str]
) -> list[Future[DialectAnswer]]:
    """Ask the cloud for a stream in each dialect; what came of each is in `read`."""
    return [
        pool.submit(ask, server.url, name, body, on_read=partial(read.__setitem__, name))
        for name in DIALECTS
        for body in [body_of(name, "cloud", "Hi", stream=True)]
    ]


def held_to_the_stop(answer: DialectAnswer) -> None:
    assert answer.error == "The server is shutting down.", answer.raw
    assert "broken off" not in answer.raw


@pytest.mark.night
def test_a_failed_call_is_tried_twice_more_and_a_stop_ends_streams_in_the_clients_api(
    cloud: MockCloud, tmp_path: Path
) -> None:
    """But a 429 falls back at once."""
    with server_of(cloud, tmp_path) as server, ThreadPoolExecutor() as pool:
        for name, error, count in (("500", "server error", 3), ("429", "rate limit", 1)):
            cloud.forget()
            cloud.answers[name] = CloudAnswer(error=ERRORS[error])
            answer = ask(server.url, "chat", body_of("chat", name, "Hi"))
            assert (answer.text, answer.served_by) == (HELLO.text, "openai/cloud"), answer.raw
            assert [row.model for row in cloud.generations()] == [name] * count + ["cloud"]
        cloud.answers["cloud"] = CloudAnswer("One two three four.", hangs="amid the text")
        read: dict[str, str] = {}
        asked = streams_of(server, pool, read)
        cloud.until(lambda: sum("One" in text for text in read.values()) == len(DIALECTS), 60)
        assert server.stop() < STOP_S_MAX
        for each in asked:
            answer = each.result()
            assert (answer.status, answer.served_by) == (200, "openai/cloud")
            assert answer.text.startswith("One"), answer.raw
            held_to_the_stop(answer)
        assert "Traceback" not in server.log.read_text()


def test_where_litellm_cannot_start_its_requests_get_a_503_and_local_ones_answers(
    cloud: MockCloud, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('a word ' * 100_000)")
    broken = {"litellm_settings": {"callbacks": ["broken.handler"]}}
    with server_of(cloud, tmp_path, broken) as server:
        for dialect in DIALECTS:
            answer = ask(server.url, dialect, body_of(dialect, "cloud", "Hi"))
            assert answer.status == 503 and "RuntimeError: a word" in answer.error, answer.raw
            assert len(answer.error) < 700, "its reason is told in short"
            assert ask(server.url, dialect, body_of(dialect, "local", "n=2")).text == "tok0 tok1"


def test_a_config_that_cannot_be_used_is_told_at_the_start(tmp_path: Path) -> None:
    """Exit 78, with the file and a remedy; nothing of a key in it: here two kinds of keys at once.

    What else is refused is in unit/proxy/gateway/config.
    """
    path = write_config(tmp_path, {"general_settings": {"master_key": "sk-4713-canary"}})
    server = FakeServer(LITELLM_CONFIG=path, PROXY_API_KEY="a-key-of-our-own")
    server.start()
    assert server.process is not None
    assert server.process.wait(60) == 78, server.log.read_text()
    told = server.log.read_text()
    assert "PROXY_API_KEY" in told and "litellm.yaml" in told
    assert "canary" not in told and "our-own" not in told


def test_a_master_key_guards_local_and_cloud_models(cloud: MockCloud, tmp_path: Path) -> None:
    master = "sk-master-4714-canary"
    with server_of(cloud, tmp_path, {"general_settings": {"master_key": master}}) as server:
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
        assert httpx.get(f"{server.url}/metrics").status_code in (401, 403)
        assert master not in f"{[row.headers for row in cloud.requests]} {server.log.read_text()}"
