"""A local model that makes no step, or whose queue is really full, is fallen back from."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers.clients.run_clients import MODEL
from tests.helpers.cloud.cloud_answers import HELLO
from tests.helpers.cloud.dialect_requests import DIALECTS, ask, body_of
from tests.helpers.cloud.gateway_config import cloud_entry, local, write_config
from tests.helpers.servers.fake_server import FakeServer
from tests.helpers.servers.mock_cloud import MockCloud
from tests.helpers.servers.scripted_server import ScriptedServer
from tests.helpers.servers.server import Server

STALL_S = 1
SLOW_CHUNK_S = 2.0


def config_of(cloud: MockCloud, directory: Path, model: str) -> str:
    entries = [local("local-first", model), cloud_entry(cloud, "cloud", "openai/gpt-mock")]
    rest = {"fallbacks": [{"local-first": ["cloud"]}], "num_retries": 0}
    return write_config(directory, {"model_list": entries, "litellm_settings": rest})


@pytest.fixture(scope="module")
def cloud() -> Iterator[MockCloud]:
    with MockCloud() as made:
        yield made


def test_a_stalled_worker_is_fallen_back_from_for_whole_answers_alone(
    cloud: MockCloud, tmp_path: Path
) -> None:
    cloud.forget()
    config = config_of(cloud, tmp_path, "local")
    with FakeServer(STALL_SECONDS=str(STALL_S), LITELLM_CONFIG=config) as server:
        for stream in (False, True):
            body = body_of("chat", "local-first", f"n=9 delay=9 hang=1 {stream}", stream=stream)
            answer = ask(server.url, "chat", body)
            if stream:
                assert answer.error
                assert not answer.text
            else:
                assert answer.text == HELLO.text
                assert answer.fallback == "hearth/local worker_lost"
            server.wait_until_ready()
    assert len(cloud.generations()) == 1


def test_a_queue_that_is_really_full_is_fallen_back_from(cloud: MockCloud, tmp_path: Path) -> None:
    """One slow prompt runs, one waits, and the next is the cloud's in every dialect."""
    cloud.forget()
    config = config_of(cloud, tmp_path, MODEL)
    narrow = ScriptedServer(LIVE_SLOTS_MAX="1", QUEUE_MAX="1", LITELLM_CONFIG=config)
    with narrow as server, ThreadPoolExecutor() as pool:
        assert ask(server.url, "chat", body_of("chat", "cloud", "Hi")).text == HELLO.text
        cloud.forget()
        server.pause(SLOW_CHUNK_S)
        body = body_of("chat", MODEL, "Tell me the rest of the story of the harbor. " * 60)
        busy = [pool.submit(ask, server.url, "chat", body) for _ in range(2)]
        wait_until_taken(server, 2)
        for dialect in DIALECTS:
            for stream in (False, True):
                answer = ask(
                    server.url, dialect, body_of(dialect, "local-first", "Hi", stream=stream)
                )
                assert answer.text == HELLO.text, answer.raw
                assert answer.served_by == "openai/gpt-mock"
                assert answer.fallback == f"hearth/{MODEL} overloaded"
        server.pause(0)
        assert {each.result().served_by for each in busy} == {f"hearth/{MODEL}"}
    assert len(cloud.generations()) == 2 * len(DIALECTS)


def wait_until_taken(server: Server, count: int) -> None:
    deadline = time.monotonic() + 30
    while (row := server.worker())["running"] + row["waiting"] < count:
        assert time.monotonic() < deadline, row
        time.sleep(0.02)
