"""Several models on one worker, one that is unloaded, and a worker that hangs: all of it real."""

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.models.draft_heads import save_head
from tests.helpers.servers.fake_server import FakeServer
from tests.helpers.servers.server import Server
from tests.helpers.worker_processes.fake_worker import MISSING

LONG = "Tell me the rest of the story that begins with a harbor. " * 40
HANGING = """
import sys
from hearth.proxy.main import end, main
end(main([sys.executable, "-m", "tests.helpers.worker_processes.hanging_worker"]))
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


def kept(completion: Any) -> tuple[int, str]:
    usage = completion.usage
    return usage.prompt_tokens_details.cached_tokens, usage.kv_cache["source"]


def test_models_change_places_and_answer_as_if_each_were_alone() -> None:
    paths = {"first": str(fixture_dir("qwen3")), "second": str(fixture_dir("qwen3_5"))}
    alone = {}
    for name, path in paths.items():
        with Server(MODEL_PATH=path, PROXY_MODEL_ID=name) as server:
            alone[name] = tokens(ask(server, name))
    assert alone["first"] != alone["second"]
    settings = {"MODEL_PATH": paths["first"], "PROXY_MODEL_ID": "first"}
    with Server(**settings, MODELS=f"second={paths['second']}") as server:
        for round_number, name in itertools.product(range(2), paths):
            asked = paths[name] if round_number and name == "second" else name
            answer = ask(server, asked)
            assert answer.model == name
            assert tokens(answer) == alone[name]
            cached, source = kept(answer)
            if round_number == 0:
                assert (cached, source) == (0, "none"), "nothing is taken from the other model"
            else:
                assert cached > answer.usage.prompt_tokens * 0.9
                assert source == "ssd"
            worker = server.worker()
            assert (worker["model"], worker["state"], worker["restarts"]) == (name, "ready", 0)


def test_a_draft_model_drafts_for_the_model_that_it_was_made_for_and_for_no_other(
    tmp_path: Path,
) -> None:
    path = fixture_dir("qwen3_5_vl")
    head = save_head(tmp_path / "head", json.loads((path / "config.json").read_text()))
    names = {"PROXY_MODEL_ID": "first", "MODELS": f"second={fixture_dir('qwen3')}"}
    drafting = {"MODEL_PATH": str(path), "DRAFT_MODEL": str(head), "SPECULATE": "lookup"}
    with Server(**drafting, **names) as server:
        answer = ask(server, "first", max_tokens=80)  # a costly head is tried now and then
        (told,) = server.get("/v1/cache")["workers"]
        assert told["speculation"]["by_source"]["model"]["drafted"] > 0
        plain = ask(server, "first", max_tokens=80, extra_body={"speculate": False})
        assert tokens(answer) == tokens(plain)
        assert len(tokens(ask(server, "second"))) == 12


def test_an_unused_model_is_unloaded_and_its_cache_comes_back_with_it() -> None:
    with Server(MODEL_IDLE_UNLOAD_SECONDS="2") as server:
        first = ask(server, "local")
        deadline = time.monotonic() + 60
        while server.worker()["state"] != "unloaded":
            assert time.monotonic() < deadline, server.worker()
            time.sleep(0.1)
        health = server.health()
        assert (health["status"], health["workers"][0]["pid"]) == ("ok", None)
        assert server.get("/v1/models")["data"][0]["context_length"] > 0
        again = ask(server, "local")
        assert tokens(again) == tokens(first)
        cached, source = kept(again)
        assert cached > again.usage.prompt_tokens * 0.9
        assert source == "ssd"
        assert server.worker()["restarts"] == 0


def test_a_worker_that_hangs_is_killed_and_its_successor_finds_what_it_kept() -> None:
    server = Server(STALL_SECONDS="5")
    obstacle = server.run_dir / "hang"
    server.environment["HANG_WHILE"] = str(obstacle)
    server.start("-c", HANGING)
    try:
        server.wait_until_ready()
        first = ask(server, "local")
        pid = server.worker()["pid"]
        obstacle.touch()
        began = time.monotonic()
        with pytest.raises(openai.InternalServerError, match="made no step for"):
            ask(server, "local", LONG + "And then?")
        waited_s = time.monotonic() - began
        obstacle.unlink()
        server.wait_until_ready()
        assert server.worker()["pid"] != pid
        again = ask(server, "local")
        assert tokens(again) == tokens(first)
        cached, source = kept(again)
        assert cached > again.usage.prompt_tokens * 0.9
        assert source == "ssd"
        print(f"told after {waited_s:.1f} s without a step")
    finally:
        server.__exit__()


# ---------------------------------------------------------------- in each dialect


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    with FakeServer(MODELS=f"second=/b, broken={MISSING}") as running:
        yield running


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "n=2"}]},
    "/v1/completions": {"prompt": "n=2"},
    "/v1/messages": {"messages": [{"role": "user", "content": "n=2"}], "max_tokens": 9},
    "/v1/responses": {"input": "n=2"},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", list(BODIES))
def test_an_answer_carries_the_name_of_its_model(fake: FakeServer, path: str, stream: bool) -> None:
    answer = post(fake, path, model="local/second", stream=stream, **BODIES[path])
    assert answer.status_code == 200, answer.text
    assert "tok1" in answer.text
    if stream:
        lines = [row.removeprefix("data: ") for row in answer.text.splitlines()]
        rows = [json.loads(row) for row in lines if row.startswith("{")]
    else:
        rows = [answer.json()]
    rows += [row[part] for row in rows for part in ("message", "response") if part in row]
    assert {row["model"] for row in rows if "model" in row} == {"second"}
    assert fake.worker()["model"] == "second"


def test_every_model_is_listed(fake: FakeServer) -> None:
    names = [row["id"] for row in fake.get("/v1/models")["data"]]
    assert names == ["local", "second", "broken"]
    assert fake.get("/v1/models/second")["id"] == "second"


def test_tokens_are_counted_by_the_model_that_is_asked(fake: FakeServer) -> None:
    body = BODIES["/v1/messages"] | {"model": "claude-x"}
    assert post(fake, "/v1/messages/count_tokens", **body).json()["input_tokens"] > 0
    assert fake.worker()["model"] == "local"


@pytest.mark.parametrize("path", list(BODIES))
def test_a_model_that_cannot_be_loaded_is_an_error_with_its_reason(
    fake: FakeServer, path: str
) -> None:
    answer = post(fake, path, model="broken", stream=True, **BODIES[path])
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    error = answer.json()["error"]
    assert "'broken' cannot be loaded" in error["message"]
    assert f"{MISSING!r}, which is no model" in error["message"]
    assert error["type"] == ("api_error" if path == "/v1/messages" else "server_error")
