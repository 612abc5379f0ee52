"""LiteLLM's virtual keys under attack: what one may ask for, and what it sees of another's."""

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest

from scripts.fixtures.embedding_checkpoints import embedding_checkpoint
from tests.helpers.by_day import by_day
from tests.helpers.cloud.cloud_answers import ERRORS, CloudAnswer
from tests.helpers.servers.audited_server import GENERATE, ask, body_of
from tests.helpers.servers.mock_cloud import MockCloud
from tests.helpers.servers.server import until
from tests.helpers.servers.virtual_key_server import (
    CLOUD_ONLY,
    MASTER,
    MINE,
    SPENT,
    THEIRS,
    VirtualKeyServer,
)

CHAT: Final = "/v1/chat/completions"
COUNTS: Final = ("/v1/messages/count_tokens", "/v1/responses/input_tokens")
PREFILL: Final = "/v1/cache/prefill"
VECTORS: Final = ("/v1/embeddings", "/embeddings", "/v1/rerank", "/v2/rerank")


@pytest.fixture(scope="module")
def server() -> Iterator[VirtualKeyServer]:
    encoders = {
        "EMBEDDING_MODEL": str(embedding_checkpoint("bert")),
        "RERANK_MODEL": str(embedding_checkpoint("bert_ranker")),
    }
    with MockCloud() as cloud, VirtualKeyServer(cloud, **encoders) as server:
        until(lambda: ask(server, "GET", "/v1/models", key=MINE)[0] == 200)
        yield server


def chat(server: VirtualKeyServer, key: str, model: str, **more: Any) -> tuple[int, bytes]:
    return ask(server, "POST", CHAT, body_of(CHAT, "Hi", model=model), key, **more)


@pytest.mark.parametrize("path", by_day([*GENERATE, *COUNTS, PREFILL], [CHAT, PREFILL]))
def test_a_key_of_one_model_has_no_other_answer_count_or_read_a_prompt(
    server: VirtualKeyServer, path: str
) -> None:
    for model in ("local", "by-alias", "other"):
        body = {"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
        body |= {"prompt": "Hi"} if path == "/v1/completions" else {}
        body |= {"input": "Hi"} if path in ("/v1/responses", "/v1/responses/input_tokens") else {}
        status, answer = ask(server, "POST", path, body, key=CLOUD_ONLY)
        if path == PREFILL and model == "other":
            assert status == 400 and b"served elsewhere" in answer
        else:
            assert status == 403 and b"is not available for this API key" in answer
        if model != "other":
            assert ask(server, "POST", path, body, key=MINE)[0] == 200


@pytest.mark.parametrize("path", [*GENERATE, *VECTORS])
def test_a_key_whose_budget_is_spent_gets_nothing_from_any_side(
    server: VirtualKeyServer, path: str
) -> None:
    """Nor has a key of one model anything embedded or ranked by another."""
    if path in VECTORS:
        body = {"input": "Hi", "query": "Hi", "documents": ["Hi"]}
        for key, status in ((CLOUD_ONLY, 403), (SPENT, 422), (MINE, 200)):
            assert ask(server, "POST", path, body, key=key)[0] == status, key
        return
    for model in ("local", "cloud", "by-alias"):
        status, answer = ask(server, "POST", path, body_of(path, "Hi", model=model), key=SPENT)
        assert status == 422 and b"Budget has been exceeded" in answer


def test_a_key_of_one_model_falls_back_to_no_other(server: VirtualKeyServer) -> None:
    for key, status in ((MINE, 200), (CLOUD_ONLY, 403)):
        server.cloud.forget()
        server.cloud.say(CloudAnswer(error=ERRORS["server error"]))
        assert chat(server, key, "cloud")[0] == status
        assert chat(server, key, "cloud")[0] == 200


def test_another_key_sees_nothing_that_this_one_asked(server: VirtualKeyServer) -> None:
    words = " ".join(f"word{number}" for number in range(200))
    body = body_of(CHAT, words, session_id="shared-name")

    def cached(key: str, **more: str) -> int:
        status, answer = ask(server, "POST", CHAT, body, key=key, **more)
        assert status == 200, answer
        return int(json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"])

    def sessions(key: str) -> list[str]:
        told = json.loads(ask(server, "GET", "/v1/sessions", key=key)[1])
        return [row["session"] for row in told["sessions"]]

    assert cached(MINE) == 0 and cached(MINE) > 100
    assert "shared-name" not in sessions(THEIRS) and "shared-name" in sessions(MINE)
    assert ask(server, "GET", "/v1/sessions/shared-name", key=THEIRS)[0] == 404
    assert cached(THEIRS, X_Api_Key=MINE + "x", Api_Key="none") == 0, "a second header changes none"
    assert cached(MASTER) == 0, "not even the admin's key"


@pytest.mark.parametrize("model", ["local", "cloud"])
def test_another_keys_response_is_neither_read_nor_gone_on_from(
    server: VirtualKeyServer, model: str
) -> None:
    server.cloud.forget()
    path = "/v1/responses"
    status, answer = ask(server, "POST", path, body_of(path, "Hi", model=model), key=MINE)
    assert status == 200, answer
    response: dict[str, Any] = json.loads(answer)
    name, item = response["id"], response["output"][0]["id"]
    assert ask(server, "GET", f"{path}/{name}", key=MINE)[0] == 200
    reference = [{"type": "item_reference", "id": item}]
    for target in ("local", "cloud"):
        on = body_of(path, "on", model=target)
        for more in ({"previous_response_id": name}, {"input": reference}):
            asked = len(server.cloud.generations())
            assert ask(server, "POST", path, on | more, key=THEIRS)[0] == 404, (target, more)
            assert len(server.cloud.generations()) == asked
    for method in ("GET", "DELETE"):
        assert ask(server, method, f"{path}/{name}", key=THEIRS)[0] == 404


def test_no_key_leaves_the_machine(server: VirtualKeyServer) -> None:
    server.cloud.forget()
    headers = {"X_LiteLLM_Api_Key": MINE, "Api_Key": MINE, "X_Api_Key": MINE}
    assert chat(server, MINE, "cloud", **headers)[0] == 200
    (request,) = server.cloud.generations()
    seen = f"{request.headers} {request.body!r} {request.query}"
    assert MINE not in seen and MASTER not in seen
    log = server.log.read_text()
    assert [key for key in (MINE, THEIRS, CLOUD_ONLY, SPENT, MASTER) if key in log] == []


def test_a_providers_cookie_is_told_to_no_other_key(server: VirtualKeyServer) -> None:
    server.cloud.forget()
    path = "/v1/chat/completions"
    for key in (MINE, CLOUD_ONLY, MINE):
        assert ask(server, "POST", path, body_of(path, "Hi", model="cloud"), key)[0] == 200
    assert [row.headers.get("cookie") for row in server.cloud.generations()] == [None] * 3
