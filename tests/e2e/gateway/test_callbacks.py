"""A user's logging tool is told of local and cloud answers what the clients saw."""

import time
from typing import Any, Final

from tests.helpers.cloud.cloud_answers import RATE_LIMIT, CloudAnswer
from tests.helpers.cloud.dialect_requests import DIALECTS, DialectAnswer, ask, body_of
from tests.helpers.cloud.gateway_server import GatewayServer
from tests.helpers.servers.mock_cloud import KEY
from tests.helpers.servers.server import READY_S_MAX

ONE_MORE_S: Final = 0.3  # in which a row that is one too many would come


class Tool:
    """What a tool is told from now on, by answers that are asked for one after another."""

    def __init__(self, gateway: GatewayServer) -> None:
        self.gateway = gateway
        count = -1
        while count < (count := len(gateway.tool.rows())):  # of earlier tests
            time.sleep(ONE_MORE_S)
        gateway.tool.forget()
        self.answers: list[DialectAnswer] = []

    def rows(self) -> list[dict[str, Any]]:
        return [row for row in self.gateway.tool.rows() if row["status"] == "success"]

    def ask(self, dialect: str, model: str, script: str, stream: bool = False) -> DialectAnswer:
        is_asked = stream and dialect in ("chat", "completions")
        more = {"stream_options": {"include_usage": True}} if is_asked else {}
        body = body_of(dialect, model, script, stream=stream, **more)
        answer = ask(self.gateway.url, dialect, body)
        assert answer.status == 200 and not answer.error, answer.raw
        self.answers.append(answer)
        # The first of all waits for LiteLLM to be loaded.
        self.gateway.tool.until(lambda: len(self.rows()) >= len(self.answers), READY_S_MAX)
        return answer

    def held(self) -> list[dict[str, Any]]:
        """Return the rows; there is one of each answer, with the tokens that its client saw."""
        time.sleep(ONE_MORE_S)
        told = []
        for row in self.rows():
            usage = (row.get("metadata") or {}).get("usage_object") or {}
            details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
            cached = details.get("cached_tokens") or usage.get("cache_read_input_tokens") or 0
            told.append((row["prompt_tokens"], cached, row["completion_tokens"]))
        assert sorted(told) == sorted(answer.usage for answer in self.answers)
        assert KEY not in str(self.rows())
        return self.rows()


def test_every_answer_is_told_once_with_its_tokens(gateway: GatewayServer) -> None:
    """Each dialect, whole and as a stream, by the local model and by the cloud."""
    for model in ("local", "cloud"):
        tool = Tool(gateway)
        for number, dialect in enumerate(DIALECTS):
            for stream in (False, True):
                tool.ask(dialect, model, f"n={2 + number} {dialect}", stream)
        rows = tool.held()
        assert {row["model_group"] for row in rows} == {model}
        assert any(answer.usage[1] for answer in tool.answers)
        assert model == "cloud" or not any(row["response_cost"] for row in rows)


def test_an_answer_after_a_fallback_is_told_once_as_answered(gateway: GatewayServer) -> None:
    gateway.cloud.answers["flaky"] = CloudAnswer(error=RATE_LIMIT)
    tool = Tool(gateway)
    for model, script in (("local-first", "n=2 full=0"), ("cloud-first", "n=2")):
        assert tool.ask("chat", model, script).fallback
    tool.held()
