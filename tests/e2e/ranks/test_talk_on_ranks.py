"""A server of two ranks answers as one of one rank does, also behind the end of a rank.

tests/property/ranks/ plays talks warm and cold.
"""

from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from scripts.faults.own_server import FOLLOWER
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.servers.server import Server

RULES = [f"Rule {i}: value {i * 37 % 101} belongs to item {i}." for i in range(40)]
SYSTEM = {"role": "system", "content": " ".join(RULES)}


def server_of(ranks: int, **more: str) -> Server:
    """Return a server of `ranks` that decodes greedily."""
    model, plain = str(fixture_dir("qwen3_5", ranked=True)), {"DEFAULT_TEMPERATURE": "0"}
    plain |= {"PROXY_MODEL_ID": "m", "DEFAULT_REPETITION_PENALTY": "1", "RANKS": str(ranks)}
    return Server(**{"MODEL_PATH": model, **plain, **more})


def ask(server: Server, question: str) -> tuple[int, Any]:
    """Return the cached tokens, and what was said."""
    messages: Any = [SYSTEM, {"role": "user", "content": question}]
    with server.openai() as client:
        told = client.chat.completions.create(model="m", messages=messages, max_tokens=24)
    assert told.usage is not None and told.usage.prompt_tokens_details is not None
    said = told.choices[0].message.model_dump(include={"content", "reasoning_content"})
    return told.usage.prompt_tokens_details.cached_tokens or 0, said


def followers(server: Server) -> list[psutil.Process]:
    assert server.process is not None
    family = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in family if FOLLOWER in " ".join(child.cmdline())]


@pytest.fixture
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server_of(2, KV_CACHE_DIR=str(tmp_path_factory.mktemp("kv"))) as server:
        yield server


@pytest.mark.night
def test_two_ranks_say_what_one_does_and_a_killed_one_costs_a_restart_from_the_files(
    ranked: Server,
) -> None:
    questions = ("Name the last rule.", "Name the first rule.")
    before = [ask(ranked, question) for question in questions]
    assert before[1][0] > 0
    with server_of(1) as lone:
        assert [ask(lone, question) for question in questions] == before
    ranked.wait_until_idle()
    (follower,) = followers(ranked)
    worker = ranked.worker()["pid"]
    follower.kill()
    psutil.Process(worker).wait()
    ranked.wait_until_ready()
    (another,) = followers(ranked)
    cached, said = ask(ranked, questions[0])
    assert another.pid != follower.pid
    assert said == before[0][1] and cached > before[1][0] / 2
