"""The proxy before a scripted worker: what clients cause, and no outbound connection."""

import time
from collections.abc import Iterator

import httpx
import pytest

from tests.helpers.servers.fake_server import FakeServer
from tests.helpers.servers.leaving_clients import BODIES, KEY, Leaving
from tests.helpers.servers.server import until

PATHS = list(BODIES)
# What LiteLLM's own fields and the environment of other programs might change.
ELSEWHERE = {
    **{"mock_response": "mocked", "api_base": "http://elsewhere.invalid", "api_key": "x"},
    **{"custom_llm_provider": "openai", "fallbacks": ["gpt-y"], "timeout": 0.0001},
    **{"num_retries": 5, "metadata": {"tags": ["a"]}, "tags": ["b"], "cache": {"no-cache": True}},
    **{"guardrails": ["g"], "litellm_metadata": {"x": 1}, "user_config": {"model_list": []}},
}
LAST = {"/v1/messages": "event: error", "/v1/responses": "event: response.failed"}


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    settings = {
        "PROXY_API_KEY": KEY,
        "PROXY_MODEL_ID": "org/some-model",
        "OPENAI_API_KEY": "must-not-matter",
        "DATABASE_URL": "postgresql://db.invalid/x",
        "REDIS_HOST": "redis.invalid",
        "LITELLM_MASTER_KEY": "sk-other",
    }
    with FakeServer(**settings) as running:
        yield running


def post(
    fake: FakeServer, path: str, script: str, *, stream: bool, **more: object
) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEY}", "x-litellm-timeout": "0.001"}
    body = BODIES[path](script, stream=stream, **more)
    return httpx.post(fake.url + path, json=body, headers=headers, timeout=30)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_no_field_of_a_client_sends_its_request_elsewhere_or_changes_its_answer(
    fake: FakeServer, path: str, stream: bool
) -> None:
    answer = post(fake, path, "n=2", stream=stream, **ELSEWHERE)
    assert answer.status_code == 200
    assert "tok1" in answer.text and "mocked" not in answer.text
    assert not any(name.startswith(("x-litellm", "access-control")) for name in answer.headers)


@pytest.mark.parametrize("path", PATHS)
def test_a_worker_that_dies_mid_stream_ends_the_stream_with_an_error_and_no_replay(
    fake: FakeServer, path: str
) -> None:
    answer = post(fake, path, "n=9 delay=0.05 die=3", stream=True)
    assert answer.status_code == 200
    assert answer.text.count("tok0 ") <= (5 if path == "/v1/responses" else 1)
    assert "tok5" not in answer.text
    last = answer.text.strip().split("\n\n")[-1]
    assert last.startswith(LAST.get(path, 'data: {"error"'))
    assert "worker that held this request died (SIGKILL)" in last
    fake.wait_until_ready()


@pytest.mark.parametrize("path", PATHS)
def test_a_worker_that_dies_is_a_503_where_nothing_was_streamed(
    fake: FakeServer, path: str
) -> None:
    answer = post(fake, path, "n=9 die=2", stream=False)
    assert answer.status_code == 503
    assert "SIGKILL" in answer.json()["error"]["message"]
    fake.wait_until_ready()
    assert fake.worker()["restarts"] > 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("script", "stream"),
    [("n=1000 delay=0.02", True), ("n=5 prefill=60", True), ("n=5 prefill=60", False)],
    ids=["mid-stream", "in prefill", "not streamed"],
)
def test_a_client_that_leaves_is_cancelled_at_once(
    fake: FakeServer, path: str, script: str, stream: bool
) -> None:
    """The worker would go on for a minute, and hold the lease for as long as it is renewed."""
    before = time.time()
    client = Leaving(fake, path, BODIES[path](script, stream=stream))
    (row,) = until(lambda: fake.events("Submit", before))
    if stream:
        client.read_some()
    client.leave()
    (cancel,) = until(lambda: fake.events("Cancel", before))
    assert cancel["request_id"] == row["request_id"]


def test_nothing_outside_this_machine_was_contacted(fake: FakeServer) -> None:
    assert not fake.audit_log.exists(), fake.audit_log.read_text()
