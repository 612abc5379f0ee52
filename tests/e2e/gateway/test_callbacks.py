"""A user's logging tool is told of local and cloud answers what the clients saw."""

import time
from typing import Any, Final

from tests.helpers.cloud.cloud_answers import ERRORS, CloudAnswer
from tests.helpers.cloud.dialect_requests import DIALECTS, DialectAnswer, ask, body_of, with_usage
from tests.helpers.cloud.gateway_server import GatewayServer
from tests.helpers.servers.mock_cloud import KEY
from tests.helpers.servers.server import READY_S_MAX

ONE_MORE_S: Final = 0.3  # in which a row that is one too many would come
Asked = list[tuple[str, str, str, bool]]  # dialect, model, script, whether it is a stream


def told_of(gateway: GatewayServer, asked: Asked) -> list[tuple[DialectAnswer, dict[str, Any]]]:
    """Return answers that are asked for one after another, each with the one row of it."""
    tool = gateway.tool
    count = -1
    while count < (count := len(tool.rows())):  # of earlier tests
        time.sleep(ONE_MORE_S)
    tool.forget()

    def rows() -> list[dict[str, Any]]:
        return [row for row in tool.rows() if row["status"] == "success"]

    answers: list[DialectAnswer] = []
    for dialect, model, script, stream in asked:
        body = body_of(dialect, model, script, **with_usage(dialect, stream))
        answers.append(answer := ask(gateway.url, dialect, body))
        assert answer.status == 200 and not answer.error, answer.raw
        # The first of all waits for LiteLLM to be loaded.
        tool.until(lambda: len(rows()) >= len(answers), READY_S_MAX)
    time.sleep(ONE_MORE_S)
    assert KEY not in str(rows())
    return list(zip(answers, rows(), strict=True))


def held_to_its_tokens(answer: DialectAnswer, row: dict[str, Any]) -> None:
    usage = (row.get("metadata") or {}).get("usage_object") or {}
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    cached = details.get("cached_tokens") or usage.get("cache_read_input_tokens") or 0
    assert answer.usage == (row["prompt_tokens"], cached, row["completion_tokens"])


def test_every_answer_is_told_once_with_its_tokens(gateway: GatewayServer) -> None:
    """Each dialect, whole and as a stream, by the local model and by the cloud; then a fallback."""
    for model in ("local", "cloud"):
        asked = [
            (dialect, model, f"n={2 + number} {dialect}", stream)
            for number, dialect in enumerate(DIALECTS)
            for stream in (False, True)
        ]
        told = told_of(gateway, asked)
        for answer, row in told:
            held_to_its_tokens(answer, row)
            assert row["model_group"] == model
            assert model == "cloud" or not row["response_cost"]
        assert any(answer.usage[1] for answer, _ in told)
    gateway.cloud.answers["flaky"] = CloudAnswer(error=ERRORS["rate limit"])
    asked = [("chat", "local-first", "n=2 full=0", False), ("chat", "cloud-first", "n=2", False)]
    for answer, row in told_of(gateway, asked):
        assert answer.fallback
        held_to_its_tokens(answer, row)
