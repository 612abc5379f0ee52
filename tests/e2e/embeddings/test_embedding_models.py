"""The real worker embeds and ranks, takes turns, and ends with whoever started it."""

import asyncio
import os
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import openai
import pytest

from hearth.proxy.embeddings.encoders import COMMAND, Encoders
from hearth.shared.errors import RequestError
from hearth.shared.models.model_path import MINILM, MODELS_DIR_VARIABLE
from hearth.shared.paths import PROJECT_DIR
from hearth.shared.settings import load_settings
from hearth.shared.wire_messages import PROTOCOL_VERSION, Embed, Heartbeat, Hello, decode
from hearth.shared.worker_files import forwarded_path
from hearth.shared.zmq_transport import DealerLink
from scripts.fixtures.embedding_checkpoints import embedding_checkpoint
from scripts.fixtures.fixture_cache import fixture_dir, mlx_environment
from tests.helpers.servers.server import Server

WAIT_S_MAX: Final = 60.0
SECRET: Final = "wombat-4711"
LONG: Final = [f"{SECRET} text number {number} " * (1 + number % 12) for number in range(500)]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def encoders(
    runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Encoders]:
    """One worker for all tests here, and those that take its place."""
    models = {
        "EMBEDDING_MODEL": str(embedding_checkpoint("bert")),
        "RERANK_MODEL": str(embedding_checkpoint("bert_ranker")),
        "RUN_DIR": str(tmp_path_factory.mktemp("run")),
    }

    async def make() -> Encoders:
        made = Encoders(load_settings(models, None), mlx_environment(), lambda: False)
        await made.supervisor.start()
        return made

    encoders = runner.run(make())
    yield encoders
    runner.run(encoders.close())
    assert encoders.worker.pid is None
    assert encoders.worker.restarts == 1, "the one that a test killed"


async def until(is_true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while not is_true():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.005)


def test_vectors_and_scores_come_in_the_order_of_what_was_asked(
    runner: asyncio.Runner, encoders: Encoders
) -> None:
    async def talk() -> None:
        texts = ["import abc", "a longer one " * 9, "x"]
        found = await encoders.embed(texts)
        assert (found.dimensions, len(found.tokens)) == (32, 3)
        assert found.tokens[1] > found.tokens[0] > found.tokens[2] > 0
        assert len({*struct.iter_unpack("<32f", found.vectors)}) == 3
        short = await encoders.embed(texts, dimensions=4)
        assert (short.dimensions, len(short.vectors)) == (4, 3 * 4 * 4)
        ranking = await encoders.rerank("what is abc", ["import abc", "x" * 30])
        assert len({*ranking.scores}) == 2 and ranking.tokens > 10
        facts = encoders.facts
        assert (facts["embeddings"].dimensions, facts["rerank"].dimensions) == (32, 0)

    runner.run(talk())


def test_kill_9_amid_a_request_leaves_it_one_answer_and_the_next_finds_a_process(
    runner: asyncio.Runner, encoders: Encoders
) -> None:
    async def talk() -> None:
        long = asyncio.create_task(encoders.embed(LONG))
        await encoders.embed(["short"])
        assert encoders.worker.pid is not None and not long.done()
        os.kill(encoders.worker.pid, signal.SIGKILL)
        try:
            assert len((await long).tokens) == len(LONG), "asked again: it was not in its forward"
        except RequestError as died:
            assert (died.status, died.code) == (503, "embedding_process_died")
        assert len((await encoders.embed(["short"])).tokens) == 1
        assert encoders.worker.starts == 2

    runner.run(talk())


def test_the_process_ends_with_the_proxy_amid_its_work_and_logs_no_text(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/w.sock"
    environ = mlx_environment() | {"LOG_LEVEL": "debug", "RUN_DIR": str(tmp_path / "run")}
    running = subprocess.Popen(
        [*COMMAND, "--worker-id", "0", "--endpoint", endpoint],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=PROJECT_DIR,
        env=environ | {"EMBEDDING_MODEL": str(embedding_checkpoint("bert"))},
    )

    async def ask() -> None:
        heard: list[Any] = []
        link = DealerLink(endpoint, lambda frame: heard.append(decode(frame)))
        link.send(Hello(PROTOCOL_VERSION))
        await until(lambda: any(isinstance(x, Heartbeat) and x.state == "ready" for x in heard))
        link.send(Embed("amid-it", LONG * 9, None, False))
        await until(lambda: forwarded_path(endpoint).read_text() == "amid-it")
        link.close()

    with running:
        assert running.stdin is not None and running.stdout is not None
        asyncio.run(ask())
        running.stdin.close()  # as the system does where the proxy dies
        try:
            assert running.wait(WAIT_S_MAX) == 0
        finally:
            running.kill()
        assert SECRET.encode() not in running.stdout.read()


def server_of(models: Path, hub: Path) -> Server:
    return Server(
        MODEL_PATH=str(fixture_dir("qwen3", tiny=True)),
        EMBEDDING_MODEL=MINILM.source,
        **{MODELS_DIR_VARIABLE: str(models), "HF_HOME": str(hub)},
    )


def test_without_its_files_text_is_served_and_they_are_found_once_they_are_there(
    tmp_path: Path,
) -> None:
    models = tmp_path / "models"
    with server_of(models, tmp_path / "hub") as server, server.openai() as client:
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="hearth pull minilm") as refused:
                client.embeddings.create(model="minilm", input="a")
            assert refused.value.status_code == 503
        text = client.completions.create(model="", prompt="a", max_tokens=2)
        assert text.usage is not None and text.usage.completion_tokens
        assert [row.id for row in client.models.list()][-1] == "minilm"
        models.mkdir()
        (models / MINILM.directory.name).symlink_to(embedding_checkpoint("bert"))
        (row,) = client.embeddings.create(model="minilm", input="a").data
        assert len(row.embedding) == 32
