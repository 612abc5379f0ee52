"""A talk of fifteen requests with real servers: of two ranks and of one."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from scripts.faults.own_server import FOLLOWER
from scripts.fixtures.rank_fixtures import rank_fixture_dir
from scripts.harness.ranks.rank_talk import (
    TalkRow,
    ask,
    is_twin_equal,
    led_talk,
    system_message,
    talk_differences,
    user_message,
)
from tests.helpers.servers.server import Server

RULES = 40
PROMPT = [system_message(RULES), user_message("Name the last rule.")]


def rank_settings(ranks: int, **more: str) -> dict[str, str]:
    """Return the settings of a server of `ranks` that decodes greedily."""
    model, plain = str(rank_fixture_dir("qwen3_5")), {"DEFAULT_TEMPERATURE": "0"}
    plain |= {"PROXY_MODEL_ID": "m", "DEFAULT_REPETITION_PENALTY": "1", "RANKS": str(ranks)}
    return {"MODEL_PATH": model, **plain, **more}


@pytest.fixture(scope="module")
def kv_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def ranked(kv_dir: Path) -> Iterator[Server]:
    settings = rank_settings(2, KV_CACHE_DIR=str(kv_dir))
    with Server(**settings) as server:
        yield server


@pytest.fixture(scope="module")
def talk(ranked: Server) -> list[TalkRow]:
    return led_talk(ranked.url, RULES)


def followers(server: Server) -> list[psutil.Process]:
    assert server.process is not None
    family = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in family if FOLLOWER in " ".join(child.cmdline())]


def test_two_ranks_say_and_keep_what_one_does(talk: list[TalkRow]) -> None:
    with Server(**rank_settings(1)) as lone:
        assert talk_differences(led_talk(lone.url, RULES), talk) == []


def test_the_cold_twin_is_answered_as_the_warm_one(talk: list[TalkRow]) -> None:
    assert is_twin_equal(talk)
    cached = {row.name: row.cached_tokens for row in talk}
    assert cached["return"] > 1_000 and cached["cold twin"] == 0


def test_a_killed_rank_costs_a_restart_and_the_talk_goes_on_from_the_files(
    ranked: Server, talk: list[TalkRow]
) -> None:
    before = ask(ranked.url, PROMPT)
    ranked.wait_until_idle()
    (follower,) = followers(ranked)
    worker = ranked.worker()["pid"]
    follower.kill()
    psutil.Process(worker).wait()
    ranked.wait_until_ready()
    (another,) = followers(ranked)
    after = ask(ranked.url, PROMPT)
    assert another.pid != follower.pid
    assert after.text == before.text
    assert after.cached_tokens > after.prompt_tokens / 2
