"""The proxy before a scripted worker: what clients see, and what they cause.

Usage, cancellation, pings, errors, keys, and no outbound connection.
"""

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.helpers.servers.fake_server import FakeServer
from tests.helpers.servers.leaving_clients import BODIES, KEY, Leaving, chat_body, user


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    settings = {
        "PROXY_API_KEY": KEY,
        "PROXY_MODEL_ID": "org/some-model",
        "MODEL_ALIASES": "mine",
        "CORS_ORIGINS": "http://app.example",
        "OPENAI_API_KEY": "must-not-matter",
        "DATABASE_URL": "postgresql://db.invalid/x",
        "REDIS_HOST": "redis.invalid",
        "LITELLM_MASTER_KEY": "sk-other",
    }
    with FakeServer(**settings) as running:
        yield running


@pytest.fixture(scope="module")
def gpt(fake: FakeServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fake.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(fake: FakeServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=fake.url, api_key=KEY, max_retries=0) as client:
        yield client


PATHS = list(BODIES)
HEADERS = {"Authorization": f"Bearer {KEY}"}


def post(fake: FakeServer, path: str, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(fake.url + path, content=content, headers=HEADERS | headers, timeout=30)


# ---------------------------------------------------------------- counts and models


def test_a_count_is_the_workers(claude: anthropic.Anthropic) -> None:
    count = claude.messages.count_tokens(model="claude-x", messages=user("a b c"))
    assert count.input_tokens == 6


def test_a_count_of_responses_is_the_workers_too(gpt: openai.OpenAI) -> None:
    count = gpt.responses.input_tokens.count(model="mine", input="a b c")
    assert (count.object, count.input_tokens) == ("response.input_tokens", 6)


def test_the_list_of_models_names_the_context(
    gpt: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    assert [row.display_name for row in claude.models.list()] == ["org/some-model", "mine"]
    rows = list(gpt.models.list())
    assert [row.id for row in rows] == ["org/some-model", "mine"]
    assert rows[0].context_length == 32_768  # type: ignore[attr-defined]
    assert gpt.models.retrieve("org/some-model").id == "org/some-model"


# ---------------------------------------------------------------- what the worker gets


def test_the_worker_gets_what_the_client_sent(fake: FakeServer, gpt: openai.OpenAI) -> None:
    before = time.time()
    history = [
        {"role": "system", "content": "é \U0001f600"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "functions.Bash:0",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"x": 1}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "functions.Bash:0", "content": ""},
        {"role": "user", "content": "n=1"},
    ]
    gpt.chat.completions.create(
        model="gpt-x", messages=history, temperature=0, seed=7, stop=["x"], extra_body={"top_k": 3}
    )
    (row,) = fake.events("Submit", before)
    assert row["prompt"]["messages"][:2] == history[:2]
    call = row["prompt"]["messages"][2]["tool_calls"][0]
    assert (call["id"], call["function"]["arguments"]) == ("functions.Bash:0", {"x": 1})
    sampling = row["sampling"]
    assert [sampling[k] for k in ("temperature", "seed", "stop", "top_k")] == [0.0, 7, ["x"], 3]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_no_field_of_a_client_sends_its_request_elsewhere_or_changes_its_answer(
    fake: FakeServer, path: str, stream: bool
) -> None:
    body = BODIES[path](
        "n=2",
        stream=stream,
        mock_response="mocked",
        api_base="http://elsewhere.invalid",
        api_key="x",
        custom_llm_provider="openai",
        fallbacks=["gpt-y"],
        timeout=0.0001,
        num_retries=5,
        metadata={"tags": ["a"]},
        tags=["b"],
        cache={"no-cache": True},
        guardrails=["g"],
        litellm_metadata={"x": 1},
        user_config={"model_list": []},
    )
    answer = post(fake, path, body, **{"x-litellm-timeout": "0.001", "x-litellm-tags": "t"})
    assert answer.status_code == 200
    assert "tok1" in answer.text
    assert "mocked" not in answer.text
    assert not any(name.startswith(("x-litellm", "access-control")) for name in answer.headers)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("key", ["", "wrong"])
def test_a_missing_or_wrong_key_is_401_in_every_dialect(fake: FakeServer, key: str) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for path in PATHS:
        answer = httpx.post(fake.url + path, json=BODIES[path]("n=1"), headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_has_its_real_status_in_every_dialect(fake: FakeServer, stream: bool) -> None:
    for path in PATHS:
        body = BODIES[path]("refuse=400:context_length_exceeded", stream=stream)
        answer = post(fake, path, body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        if path == "/v1/messages":
            assert error["type"] == "invalid_request_error"
            assert error["message"].startswith("prompt is too long")
        else:
            assert error["code"] == "context_length_exceeded"
        busy = post(fake, path, BODIES[path]("refuse=503:overloaded", stream=stream))
        assert (busy.status_code, busy.headers["retry-after"]) == (503, "5")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("died", ["die=1", "die=3"])
def test_a_worker_that_dies_mid_stream_ends_the_stream_with_an_error_and_no_replay(
    fake: FakeServer, path: str, died: str
) -> None:
    answer = post(fake, path, BODIES[path](f"n=9 delay=0.05 {died}", stream=True))
    assert answer.status_code == 200
    assert answer.text.count("tok0 ") <= (5 if path == "/v1/responses" else 1)
    assert "tok5" not in answer.text
    assert "worker that held this request died (SIGKILL)" in answer.text
    last = answer.text.strip().split("\n\n")[-1]
    marks = {"/v1/messages": "event: error", "/v1/responses": "event: response.failed"}
    assert last.startswith(marks.get(path, 'data: {"error"'))
    if path == "/v1/chat/completions":
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "worker_unavailable"
        assert error["message"].startswith("The worker that held")
    fake.wait_until_ready()


@pytest.mark.parametrize("path", PATHS)
def test_a_worker_that_dies_is_a_503_where_nothing_was_streamed(
    fake: FakeServer, path: str
) -> None:
    answer = post(fake, path, BODIES[path]("n=9 die=2"))
    assert answer.status_code == 503
    assert "SIGKILL" in answer.json()["error"]["message"]
    fake.wait_until_ready()
    assert fake.worker()["restarts"] > 0


def test_the_sdks_raise_their_own_errors(gpt: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        gpt.chat.completions.create(model="nothing", messages=user("x"))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        gpt.responses.create(model="mine", input="x", previous_response_id="resp_1")
    with (
        pytest.raises(openai.APIError),
        contextlib.closing(
            gpt.chat.completions.create(**chat_body("n=3 fail=2 delay=0.02"), stream=True)
        ) as chunks,
    ):
        list(chunks)
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(model="claude-x", max_tokens=-3, messages=user("x"))
    with (
        pytest.raises(anthropic.APIStatusError),
        claude.messages.stream(
            model="claude-x", max_tokens=9, messages=user("n=3 fail=2 delay=0.02")
        ) as stream,
    ):
        list(stream)


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("script", "stream"),
    [("n=1000 delay=0.02", True), ("n=5 prefill=9", True), ("n=5 prefill=9", False)],
    ids=["mid-stream", "in prefill", "not streamed"],
)
def test_a_client_that_leaves_is_cancelled_at_once(
    fake: FakeServer, path: str, script: str, stream: bool
) -> None:
    before = time.time()
    client = Leaving(fake, path, BODIES[path](script, stream=stream))
    (row,) = fake.until(lambda: fake.events("Submit", before))
    if stream:
        client.read_some()
    else:
        time.sleep(0.1)
    left_at = client.leave()
    (cancel,) = fake.until(lambda: fake.events("Cancel", before))
    assert cancel["request_id"] == row["request_id"]
    assert cancel["at"] - left_at < 1.0, "its lease alone would run out after 5 s"


# ---------------------------------------------------------------- browsers and the network


def test_a_page_from_elsewhere_is_refused_and_a_listed_one_is_let_in(fake: FakeServer) -> None:
    answer = post(fake, "/v1/chat/completions", chat_body("n=1"), Origin="http://evil.example")
    # Under another name a page is refused where no key is asked for; it has none.
    rebound = httpx.get(f"{fake.url}/health", headers={"Host": "evil.example"})
    for refused in (answer, rebound):
        assert refused.status_code == 403
        assert "access-control-allow-origin" not in refused.headers
    listed = post(fake, "/v1/messages", chat_body("n=1"), Origin="http://app.example")
    assert listed.headers.get_list("access-control-allow-origin") == ["http://app.example"]


def test_nothing_outside_this_machine_was_contacted(fake: FakeServer) -> None:
    assert not fake.audit_log.exists(), fake.audit_log.read_text()


def test_the_log_holds_no_prompt_and_no_key(fake: FakeServer) -> None:
    post(fake, "/v1/chat/completions", chat_body("n=1 a-secret-prompt"))
    text = fake.log.read_text()
    assert "ready: http://127.0.0.1" in text
    assert "a-secret-prompt" not in text
    assert KEY not in text
    assert "Traceback" not in text
