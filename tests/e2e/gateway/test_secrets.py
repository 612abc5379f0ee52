"""No key of LITELLM_CONFIG is told anywhere: not in a page, a header, an error or a log."""

from pathlib import Path
from typing import Final

import httpx
import pytest
import yaml

from hearth.shared.paths import PROJECT_DIR
from tests.helpers.cloud.cloud_answers import ERRORS, CloudAnswer, CloudError
from tests.helpers.cloud.dialect_requests import DIALECTS, ask, body_of, in_each_way
from tests.helpers.cloud.gateway_server import WRONG_KEYS, GatewayServer
from tests.helpers.servers.mock_cloud import KEY

PAGES: Final = yaml.safe_load((PROJECT_DIR / "tests/data/litellm_attacks.yaml").read_text())[
    "pages"
]


def held(text: object, place: object) -> None:
    for secret in (KEY, *WRONG_KEYS.values()):
        at = str(text).find(secret)
        assert at < 0, (place, str(text)[max(0, at - 200) : at + 80])


@pytest.mark.parametrize("model", WRONG_KEYS)
@in_each_way
def test_a_key_that_the_cloud_repeats_in_its_error_is_not_told(
    gateway: GatewayServer, dialect: str, model: str, stream: bool
) -> None:
    answer = ask(gateway.url, dialect, body_of(dialect, model, "Hi", stream=stream))
    (request,) = gateway.cloud.generations()
    assert request.headers["authorization"] == f"Bearer {WRONG_KEYS[model]}"
    assert answer.status >= 400 and "Incorrect API key provided" in answer.error, answer.raw
    held(f"{answer.headers} {answer.raw}", dialect)


def test_a_key_is_told_by_no_stream_that_breaks_off(gateway: GatewayServer) -> None:
    error = CloudError(500, f"Upstream said: key {KEY} is odd.", kind="server_error")
    for dialect in DIALECTS[:3]:
        for model in ("cloud", "claude-cloud"):
            gateway.cloud.say(CloudAnswer("a b c d", error=error, error_place="amid the text"))
            answer = ask(gateway.url, dialect, body_of(dialect, model, "Hi", stream=True))
            assert answer.error
            held(answer.raw, dialect)


def test_no_page_and_no_log_tells_a_key(gateway: GatewayServer) -> None:
    """After failures of every kind: what libraries print of them is in the log too."""
    gateway.cloud.answers["flaky"] = CloudAnswer(error=ERRORS["server error"])
    for dialect in DIALECTS:
        for number, model in enumerate((*WRONG_KEYS, "cloud-first", "refused-first", "cloud")):
            ask(gateway.url, dialect, body_of(dialect, model, "n=1", stream=bool(number % 2)))
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        for page in PAGES["ours"]:
            with client.stream("GET", page) as told:
                pieces = told.iter_text()
                is_endless = "event-stream" in told.headers.get("content-type", "")
                held(f"{told.headers} {next(pieces) if is_endless else list(pieces)}", page)
    assert "denied" in gateway.log.read_text(), "the failures are in the log"
    kept = [*(gateway.run_dir / "logs").rglob("*"), *(gateway.run_dir / "run").rglob("*")]
    for path in filter(Path.is_file, [gateway.log, *kept]):
        held(path.read_bytes().decode("utf-8", "replace"), path)


def test_none_of_litellms_pages_is_served(gateway: GatewayServer) -> None:
    """Nor can anybody change its config: the app is for generations alone."""
    ask(gateway.url, "chat", body_of("chat", "cloud", "Hi"))  # it is there now
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        for page in PAGES["LiteLLM's"]:
            for method in ("GET", "POST"):
                assert client.request(method, page, json={}).status_code in (404, 405), page
