"""A talk of fifteen requests with real servers: of two ranks and of one."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from scripts.faults.own_server import FOLLOWER
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.servers.server import Server

TURNS, FORKS, AT_ONCE = 4, 5, 4
RULES = 40  # sentences of the system prompt, of some 17 tokens each
WORDS = ("open", "close", "read", "write", "move", "count", "sort", "find", "drop", "keep")


def rank_settings(ranks: int, **more: str) -> dict[str, str]:
    """Return the settings of a server of `ranks` that decodes greedily."""
    model, plain = str(fixture_dir("qwen3_5", ranked=True)), {"DEFAULT_TEMPERATURE": "0"}
    plain |= {"PROXY_MODEL_ID": "m", "DEFAULT_REPETITION_PENALTY": "1", "RANKS": str(ranks)}
    return {"MODEL_PATH": model, **plain, **more}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


SYSTEM = {
    "role": "system",
    "content": "You are a careful agent. "
    + " ".join(f"Rule {i}: value {i * 37 % 101} belongs to item {i}." for i in range(RULES)),
}
PROMPT = [SYSTEM, user("Name the last rule.")]


class Row(NamedTuple):
    """What one request was answered."""

    prompt_tokens: int
    cached_tokens: int
    thinking: str
    content: str


def ask(server: Server, messages: list[Any], **fields: Any) -> Row:
    with server.openai() as client:
        told = client.chat.completions.create(
            model="m", messages=messages, max_tokens=24, temperature=0, extra_body=fields
        )
    assert told.usage is not None and told.usage.prompt_tokens_details is not None
    said = told.choices[0].message
    cached = told.usage.prompt_tokens_details.cached_tokens or 0
    thinking = getattr(said, "reasoning_content", None) or ""
    return Row(told.usage.prompt_tokens, cached, thinking, said.content or "")


def errand(number: int) -> dict[str, str]:
    """Return a task whose words no other has: random weights barely notice a changed digit."""
    return user(f"Task {number}: {' '.join(random.Random(number).choices(WORDS, k=30))}")


def led_talk(server: Server) -> dict[str, Row]:
    """Lead one talk: four turns, forks of its head, a return to it, four at once, a cold twin."""
    talk: list[Any] = [SYSTEM, user("Read the first file.")]
    rows = {}
    for turn in range(TURNS):
        row = rows[f"turn {turn}"] = ask(server, talk)
        result = " ".join(f"line {line}" for line in range(60))
        said = {"role": "assistant", "content": row.content or "ok"}
        talk += [said, user(f"Result {turn}: {result}")]
    for fork in range(FORKS):
        rows[f"fork {fork}"] = ask(server, [SYSTEM, errand(fork)])
    rows["return"] = ask(server, talk)
    with ThreadPoolExecutor(AT_ONCE) as pool:  # a worker decodes them in one batch
        tasks = [[SYSTEM, errand(FORKS + number)] for number in range(AT_ONCE)]
        rows |= {
            f"parallel {n}": row for n, row in enumerate(pool.map(lambda t: ask(server, t), tasks))
        }
    rows["cold twin"] = ask(server, talk, use_kv_cache=False)
    return rows


@pytest.fixture(scope="module")
def kv_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def ranked(kv_dir: Path) -> Iterator[Server]:
    settings = rank_settings(2, KV_CACHE_DIR=str(kv_dir))
    with Server(**settings) as server:
        yield server


@pytest.fixture(scope="module")
def talk(ranked: Server) -> dict[str, Row]:
    return led_talk(ranked)


def followers(server: Server) -> list[psutil.Process]:
    assert server.process is not None
    family = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in family if FOLLOWER in " ".join(child.cmdline())]


def test_two_ranks_say_and_keep_what_one_does(talk: dict[str, Row]) -> None:
    with Server(**rank_settings(1)) as lone:
        assert led_talk(lone) == talk


def test_the_cold_twin_is_answered_as_the_warm_one(talk: dict[str, Row]) -> None:
    warm, cold = talk["return"], talk["cold twin"]
    assert (warm.thinking, warm.content) == (cold.thinking, cold.content)
    assert warm.cached_tokens > 1_000 and cold.cached_tokens == 0


def test_a_killed_rank_costs_a_restart_and_the_talk_goes_on_from_the_files(
    ranked: Server, talk: dict[str, Row]
) -> None:
    before = ask(ranked, PROMPT)
    ranked.wait_until_idle()
    (follower,) = followers(ranked)
    worker = ranked.worker()["pid"]
    follower.kill()
    psutil.Process(worker).wait()
    ranked.wait_until_ready()
    (another,) = followers(ranked)
    after = ask(ranked, PROMPT)
    assert another.pid != follower.pid
    assert after[2:] == before[2:]
    assert after.cached_tokens > after.prompt_tokens / 2
