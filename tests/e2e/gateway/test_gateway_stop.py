"""A stop tells whoever waits for another server, in the client's API, and waits for no other."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from tests.helpers.cloud.cloud_answers import CloudAnswer
from tests.helpers.cloud.dialect_requests import DIALECTS, ask, body_of
from tests.helpers.cloud.gateway_config import cloud_entry, write_config
from tests.helpers.servers.fake_server import FakeServer
from tests.helpers.servers.mock_cloud import MockCloud

STOP_S_MAX: Final = 30.0  # what they wait for takes longer
SLOW_CALLBACK: Final = """
import time
time.sleep(60)
"""


@pytest.fixture
def cloud() -> Iterator[MockCloud]:
    with MockCloud() as made:
        yield made


def test_a_stop_while_litellm_loads_tells_who_waits_for_it(
    cloud: MockCloud, tmp_path: Path
) -> None:
    (tmp_path / "slow_callback.py").write_text(SLOW_CALLBACK)
    entries = [cloud_entry(cloud, "cloud", "openai/gpt-mock")]
    settings = {"callbacks": ["slow_callback.handler"]}
    config = write_config(tmp_path, {"model_list": entries, "litellm_settings": settings})
    with FakeServer(LITELLM_CONFIG=config) as server, ThreadPoolExecutor() as pool:
        bodies = {name: body_of(name, "cloud", "Hi", stream=True) for name in DIALECTS}
        asked = [pool.submit(ask, server.url, name, body) for name, body in bodies.items()]
        time.sleep(1.0)
        assert not any(each.done() for each in asked)
        assert server.stop() < STOP_S_MAX
        for each in asked:
            answer = each.result()
            assert answer.status == 503, answer.raw
            assert answer.error == "The server is shutting down."
    assert cloud.requests == []


def test_a_stop_ends_streams_of_other_servers_in_the_clients_api(
    cloud: MockCloud, tmp_path: Path
) -> None:
    entries = [cloud_entry(cloud, "cloud", "openai/gpt-mock")]
    config = write_config(tmp_path, {"model_list": entries})
    cloud.rule = lambda request: CloudAnswer("One two three four.", hangs="amid the text")
    with FakeServer(LITELLM_CONFIG=config) as server, ThreadPoolExecutor() as pool:
        read: dict[str, str] = {}
        asked = [
            pool.submit(
                ask,
                server.url,
                name,
                body_of(name, "cloud", "Hi", stream=True),
                on_read=partial(read.__setitem__, name),
            )
            for name in DIALECTS
        ]
        cloud.until(lambda: sum("One" in text for text in read.values()) == len(DIALECTS), 60)
        assert server.stop() < STOP_S_MAX
        for each in asked:
            answer = each.result()
            assert (answer.status, answer.served_by) == (200, "openai/gpt-mock")
            assert answer.text.startswith("One"), answer.raw
            assert answer.error == "The server is shutting down.", answer.raw
            assert "broken off" not in answer.raw
        assert "Traceback" not in server.log.read_text()
