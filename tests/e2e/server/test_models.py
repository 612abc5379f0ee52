"""Several models on one worker, one that is unloaded, and a worker that hangs: all of it real."""

import itertools
from typing import Any

import openai
import pytest

from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.servers.server import Server, until

LONG = "Tell me the rest of the story that begins with a harbor. " * 40
HANGING = """
import sys
from hearth.proxy.main import end, main
end(main([sys.executable, "-m", "tests.helpers.worker_processes.slow_worker"]))
"""


def ask(server: Server, model: str, text: str = LONG, **fields: Any) -> Any:
    """Return a greedy completion, of a session that is the same for every model.

    It does not think: thinking has no log probabilities.
    """
    extra = {"enable_thinking": False} | fields.pop("extra_body", {})
    with server.openai() as client:
        return client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": text}],
            **{"temperature": 0, "max_tokens": 12, "logprobs": True} | fields,
            extra_headers={"x-session-id": "one"},
            extra_body=extra,
        )


def tokens(completion: Any) -> list[bytes]:
    return [bytes(row.bytes) for row in completion.choices[0].logprobs.content]


def assert_as_before_from_disk(again: Any, before: list[bytes]) -> None:
    assert tokens(again) == before
    assert again.usage.kv_cache["source"] == "ssd"
    assert again.usage.prompt_tokens_details.cached_tokens > again.usage.prompt_tokens * 0.9


def test_models_change_places_and_answer_as_if_each_were_alone(server: Server) -> None:
    """The shared server has the first one alone."""
    paths = {"first": str(fixture_dir("qwen3")), "second": str(fixture_dir("qwen3_5"))}
    answers = {"first": tokens(ask(server, "local"))}
    settings = {"MODEL_PATH": paths["first"], "PROXY_MODEL_ID": "first"}
    with Server(**settings, MODELS=f"second={paths['second']}") as swapping:
        for round_number, name in itertools.product(range(2), paths):
            asked = paths[name] if round_number and name == "second" else name
            answer = ask(swapping, asked)
            assert answer.model == name
            assert tokens(answer) == answers.setdefault(name, tokens(answer))
            if round_number == 0:
                assert answer.usage.kv_cache["source"] == "none", "nothing of the other model's"
            else:
                assert_as_before_from_disk(answer, answers[name])
            worker = swapping.worker()
            assert (worker["model"], worker["state"], worker["restarts"]) == (name, "ready", 0)
    assert answers["first"] != answers["second"]


def test_an_unused_model_is_unloaded_and_its_cache_comes_back_with_it() -> None:
    with Server(MODEL_IDLE_UNLOAD_SECONDS="2") as server:
        first = tokens(ask(server, "local"))
        until(lambda: server.worker()["state"] == "unloaded")
        health = server.health()
        assert (health["status"], health["workers"][0]["pid"]) == ("ok", None)
        assert server.get("/v1/models")["data"][0]["context_length"] > 0
        assert_as_before_from_disk(ask(server, "local"), first)
        assert server.worker()["restarts"] == 0


def test_a_worker_that_hangs_is_killed_and_its_successor_finds_what_it_kept() -> None:
    server = Server(STALL_SECONDS="5")
    obstacle = server.run_dir / "hang"
    noted = {"SLOW_CHUNK_S": "0", "SLOW_LOG": str(server.run_dir / "events")}
    server.environment |= {"HANG_WHILE": str(obstacle), **noted}
    server.start("-c", HANGING)
    with server.ready():
        first, pid = tokens(ask(server, "local")), server.worker()["pid"]
        obstacle.touch()
        with pytest.raises(openai.InternalServerError, match="made no step for"):
            ask(server, "local", LONG + "And then?")
        obstacle.unlink()
        server.wait_until_ready()
        assert server.worker()["pid"] != pid
        assert_as_before_from_disk(ask(server, "local"), first)
