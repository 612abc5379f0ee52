"""No key of LITELLM_CONFIG is told anywhere: not in a page, a header, an error or a log."""

from typing import Any, Final

import httpx
import pytest

from tests.helpers.cloud.cloud_answers import SERVER_ERROR, CloudAnswer, CloudError
from tests.helpers.cloud.dialect_requests import DIALECTS, ask, body_of
from tests.helpers.cloud.gateway_server import (
    IMPLICIT_KEY,
    WRONG_KEY,
    WRONG_KEY_OF_ENVIRONMENT,
    GatewayServer,
    texts_below,
)
from tests.helpers.servers.mock_cloud import KEY

SECRETS: Final = (KEY, WRONG_KEY, WRONG_KEY_OF_ENVIRONMENT, IMPLICIT_KEY)
DENIED: Final = {
    "denied": WRONG_KEY,
    "denied-env": WRONG_KEY_OF_ENVIRONMENT,
    "denied-implicit": IMPLICIT_KEY,
}
PAGES: Final = (
    *("/", "/health", "/v1/models", "/v1/models/cloud", "/metrics", "/dashboard", "/v1/cache"),
    *("/v1/sessions", "/v1/requests", "/dashboard/events", "/openapi.json", "/docs", "/ui"),
    *("/model/info", "/v1/model/info", "/config/yaml", "/get/config/callbacks", "/routes"),
    *("/health/readiness", "/health/liveliness", "/settings", "/spend/logs"),
    *("/model_group/info", "/credentials", "/key/info", "/debug/asyncio-tasks"),
    *(
        "/litellm/.well-known/litellm-ui-config",
        "/key/info",
        "/credentials",
        "/debug/asyncio-tasks",
    ),
)


def held(text: str, place: Any) -> None:
    for secret in SECRETS:
        at = text.find(secret)
        assert at < 0, (place, text[max(0, at - 200) : at + 80])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", DENIED)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_key_that_the_cloud_repeats_in_its_error_is_not_told(
    gateway: GatewayServer, dialect: str, model: str, stream: bool
) -> None:
    answer = ask(gateway.url, dialect, body_of(dialect, model, "Hi", stream=stream))
    (request,) = gateway.cloud.generations()
    sent = request.headers["authorization"].removeprefix("Bearer ")
    assert sent == DENIED[model]
    assert answer.status >= 400
    assert "Incorrect API key provided" in answer.error, answer.raw
    held(answer.raw, dialect)
    held(str(answer.headers), dialect)


def test_a_key_is_told_by_no_stream_that_breaks_off(gateway: GatewayServer) -> None:
    streams = [("chat", "cloud"), ("messages", "cloud"), ("responses", "cloud")]
    for dialect, model in (*streams, ("chat", "claude-cloud"), ("messages", "claude-cloud")):
        error = CloudError(500, f"Upstream said: key {KEY} is odd.", "server_error")
        gateway.cloud.say(CloudAnswer("a b c d", error=error, error_place="amid the text"))
        answer = ask(gateway.url, dialect, body_of(dialect, model, "Hi", stream=True))
        assert answer.error
        held(answer.raw, dialect)


def test_no_page_tells_a_key(gateway: GatewayServer) -> None:
    ask(gateway.url, "chat", body_of("chat", "denied", "Hi"))
    ask(gateway.url, "chat", body_of("chat", "cloud-first", "n=1"))
    with httpx.Client(base_url=gateway.url, timeout=5) as client:
        for page in PAGES:
            raw = ""
            try:
                with client.stream("GET", page) as told:
                    held(str(told.headers), page)
                    for piece in told.iter_text():
                        raw += piece
                        if told.headers.get("content-type", "").startswith("text/event-stream"):
                            break
            except httpx.ReadTimeout:
                assert "events" in page
            held(raw, page)


def test_none_of_litellms_pages_is_served(gateway: GatewayServer) -> None:
    """Nor can anybody change its config: the app is for generations alone."""
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        for page in PAGES[PAGES.index("/openapi.json") :]:
            assert client.get(page).status_code in (404, 405), page
        for page in ("/model/new", "/config/update", "/key/generate", "/user/new", "/mcp"):
            assert client.post(page, json={}).status_code in (404, 405), page


def test_no_log_tells_a_key(gateway: GatewayServer) -> None:
    """After failures of every kind: what libraries print of them is in the log too."""
    gateway.cloud.answers["flaky"] = CloudAnswer(error=SERVER_ERROR)
    for dialect in DIALECTS:
        for model in (*DENIED, "cloud-first", "refused-first", "cloud"):
            for stream in (False, True):
                body = body_of(dialect, model, "n=1", stream=stream)
                ask(gateway.url, dialect, body)
    log = gateway.log.read_text()
    assert "denied" in log, "the failures are in the log"
    held(log, "log")
    held(texts_below(gateway.run_dir / "logs", gateway.run_dir / "run"), "files")
