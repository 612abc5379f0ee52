"""One server for all tests that leave it as they found it."""

from collections.abc import Iterator

import anthropic
import pytest

from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.clients.sdk_conversations import Sdks
from tests.helpers.servers.scripted_server import ScriptedServer
from tests.helpers.servers.server import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Serves the qwen3 fixture under the public name `local`."""
    made = Server(MODEL_PATH=str(fixture_dir("qwen3")), PROXY_MODEL_ID="local")
    with made.forked() as running:
        yield running


@pytest.fixture(scope="session")
def scripted() -> Iterator[ScriptedServer]:
    """Serves a model that says what it is told to, under the name that clients are set up for."""
    with ScriptedServer().forked() as running:
        yield running


@pytest.fixture(scope="session")
def sdks(scripted: ScriptedServer) -> Iterator[Sdks]:
    claude = anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0, timeout=60)
    with scripted.openai() as gpt, claude:
        yield Sdks(scripted, gpt, claude)
