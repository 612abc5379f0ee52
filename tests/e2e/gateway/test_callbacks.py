"""A user's logging tool is told once of each answer, local and of the cloud, with its tokens.

What a row says is tested in unit/proxy/gateway.
"""

import time
from typing import Any, Final

from tests.helpers.cloud.dialect_requests import DIALECTS, ask, body_of, with_usage
from tests.helpers.cloud.gateway_server import GatewayServer
from tests.helpers.servers.mock_cloud import KEY
from tests.helpers.servers.server import READY_S_MAX

ONE_MORE_S: Final = 0.3  # in which a row that is one too many would come


def test_every_answer_is_told_once_with_its_tokens(gateway: GatewayServer) -> None:
    def rows() -> list[dict[str, Any]]:
        return [row for row in gateway.tool.rows() if row["status"] == "success"]

    count = -1
    while count < (count := len(gateway.tool.rows())):  # of earlier tests
        time.sleep(ONE_MORE_S)
    gateway.tool.forget()
    asked = [(dialect, model) for dialect in DIALECTS for model in ("local", "cloud")]
    for number, (dialect, model) in enumerate(asked):
        fields = with_usage(dialect, stream=number % 3 == 0)
        answer = ask(gateway.url, dialect, body_of(dialect, model, f"n=2 {dialect}", **fields))
        # The first of all waits for LiteLLM to be loaded.
        gateway.tool.until(lambda number=number: len(rows()) > number, READY_S_MAX)
        row = rows()[number]
        told = (row["model_group"], row["prompt_tokens"], row["completion_tokens"])
        assert told == (model, answer.usage[0], answer.usage[2])
        assert model == "cloud" or not row["response_cost"]
    time.sleep(ONE_MORE_S)
    assert len(rows()) == len(asked) and KEY not in str(rows())
