"""The real process embeds and ranks, takes turns, and ends with whoever started it."""

import asyncio
import os
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from hearth.proxy.embeddings.embedding_process import (
    COMMAND,
    EmbeddingProcess,
    Embeddings,
    EmbeddingSettings,
)
from hearth.shared.embedding_messages import (
    LENGTH_BYTES,
    Computing,
    Embed,
    body_length,
    decode,
    encode,
)
from hearth.shared.errors import RequestError
from hearth.shared.settings_from_env import PROJECT_DIR
from scripts.fixtures.embedding_checkpoints import embedding_checkpoint
from scripts.fixtures.fixture_cache import mlx_environment

WAIT_S_MAX: Final = 60.0
SECRET: Final = "wombat-4711"
LONG: Final = [f"{SECRET} text number {number} " * (1 + number % 12) for number in range(500)]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def process(runner: asyncio.Runner) -> Iterator[EmbeddingProcess]:
    """One process for all tests here, and those that take its place."""
    models = (str(embedding_checkpoint("bert")), str(embedding_checkpoint("bert_ranker")))

    async def make() -> EmbeddingProcess:
        return EmbeddingProcess(EmbeddingSettings(*models, environ=mlx_environment()))

    process = runner.run(make())
    yield process
    runner.run(process.close())
    assert process.pid is None and process.deaths == 1, "the one that a test killed"


async def until(is_true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while not is_true():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.005)


def floats(found: Embeddings) -> list[tuple[float, ...]]:
    shape = f"<{found.dimensions}f"
    return list(struct.iter_unpack(shape, found.vectors))


def test_vectors_and_scores_come_in_the_order_of_what_was_asked(
    runner: asyncio.Runner, process: EmbeddingProcess
) -> None:
    async def talk() -> None:
        texts = ["import abc", "a longer one " * 9, "x"]
        found = await process.embed(texts)
        assert (found.dimensions, len(found.tokens)) == (32, 3)
        assert found.tokens[1] > found.tokens[0] > found.tokens[2] > 0
        for text, vector in zip(texts, floats(found), strict=True):
            alone = floats(await process.embed([text]))[0]
            assert sum(a * b for a, b in zip(vector, alone, strict=True)) > 1 - 1e-6
            assert abs(sum(value * value for value in vector) - 1) < 1e-5
        short = await process.embed(texts, dimensions=4)
        assert (short.dimensions, len(short.vectors)) == (4, 3 * 4 * 4)
        ranking = await process.rerank("what is abc", ["import abc", "x" * 30])
        assert len({*ranking.scores}) == 2 and ranking.tokens > 10
        facts = process.facts()
        assert (facts["embedding"].dimensions, facts["rerank"].dimensions) == (32, 0)

    runner.run(talk())


def test_what_cannot_be_computed_is_refused_and_the_process_goes_on(
    runner: asyncio.Runner, process: EmbeddingProcess
) -> None:
    async def talk() -> None:
        for texts, dimensions, why in (
            ([SECRET, "word " * 400], None, "Input 1 is [0-9,]+ tokens and the model takes 256"),
            ([[1, 999_999_999]], None, "token id"),
            ([[]], None, "empty"),
            (["a"], 33, "dimensions is 33"),
        ):
            with pytest.raises(RequestError, match=why) as refused:
                await process.embed(texts, dimensions)
            assert refused.value.status == 400
        cut = await process.embed(["word " * 400], truncate=True)
        assert cut.tokens == [256] and process.starts == 1

    runner.run(talk())


def test_a_short_request_is_answered_between_the_batches_of_a_long_one(
    runner: asyncio.Runner, process: EmbeddingProcess
) -> None:
    async def talk() -> None:
        long = asyncio.create_task(process.embed(LONG))
        await asyncio.sleep(0)
        for _ in range(3):
            await process.embed(["short"])
        assert not long.done()
        assert len((await long).tokens) == len(LONG)

    runner.run(talk())


def test_kill_9_amid_a_request_leaves_it_one_answer_and_the_next_finds_a_process(
    runner: asyncio.Runner, process: EmbeddingProcess
) -> None:
    async def talk() -> None:
        long = asyncio.create_task(process.embed(LONG))
        await process.embed(["short"])
        assert process.pid is not None and not long.done()
        os.kill(process.pid, signal.SIGKILL)
        try:
            assert len((await long).tokens) == len(LONG), "asked again: it was not in its forward"
        except RequestError as died:
            assert (died.status, died.code) == (503, "embedding_process_died")
        assert len((await process.embed(["short"])).tokens) == 1
        assert process.starts == 2

    runner.run(talk())


def test_the_process_ends_with_the_proxy_amid_its_work_and_logs_no_text() -> None:
    command = [*COMMAND, "--embedding-model", str(embedding_checkpoint("bert"))]
    running = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=PROJECT_DIR,
        env={**mlx_environment(), "LOG_LEVEL": "debug"},
    )
    assert running.stdin is not None and running.stdout is not None
    with running:
        running.stdin.write(encode(Embed(1, [*LONG, *LONG, *LONG], None, False)))
        running.stdin.flush()
        while True:
            head = running.stdout.read(LENGTH_BYTES)
            if isinstance(decode(running.stdout.read(body_length(head))), Computing):
                break
        running.stdin.close()  # as the system does where the proxy dies
        assert running.wait(WAIT_S_MAX) == 0
        assert running.stderr is not None
        assert SECRET.encode() not in running.stderr.read()
