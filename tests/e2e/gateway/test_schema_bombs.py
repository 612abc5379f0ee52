"""A schema whose definitions name one another is a 400 in each dialect, and holds nobody up."""

from typing import Any, Final

import psutil
import pytest

from tests.helpers.cloud.dialect_requests import ask, body_of
from tests.helpers.cloud.gateway_server import GatewayServer

CPU_S_MAX: Final = 10.0
GROWN_BYTES_MAX: Final = 256 * 1024 * 1024


def doubled(depth: int) -> dict[str, Any]:
    """Return definitions of which each names the next one twice."""
    references = [{"$ref": f"#/$defs/d{number + 1}"} for number in range(depth)]
    parts = {f"d{n}": {"type": "object", "anyOf": [row, row]} for n, row in enumerate(references)}
    return {"type": "object", "anyOf": [{"$ref": "#/$defs/d0"}], "$defs": parts | {f"d{depth}": {}}}


def knotted(count: int) -> dict[str, Any]:
    """Return definitions of which each names all."""
    rows = [{"$ref": f"#/$defs/d{number}"} for number in range(count)]
    parts = {f"d{number}": {"type": "object", "anyOf": rows} for number in range(count)}
    return {"type": "object", "anyOf": rows, "$defs": parts}


BOMBS: Final = {
    "doubled": doubled(30),
    "knotted within": {"type": "object", "properties": {"p": knotted(3)}},
}


def tools_of(dialect: str, schema: dict[str, Any]) -> list[dict[str, Any]]:
    function = {"name": "f", "description": "x", "parameters": schema}
    if dialect == "messages":
        return [{"name": "f", "description": "x", "input_schema": schema}]
    return [{"type": "function"} | ({"function": function} if dialect == "chat" else function)]


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_a_schema_bomb_is_a_400_and_the_next_is_answered(
    gateway: GatewayServer, dialect: str, bomb: str
) -> None:
    assert gateway.process is not None
    ask(gateway.url, dialect, body_of(dialect, "cloud", "Hi"))  # LiteLLM is there now
    proxy = psutil.Process(gateway.process.pid)
    before, began_s = proxy.memory_info().rss, cpu_s(proxy)
    tools = tools_of(dialect, BOMBS[bomb])
    answer = ask(gateway.url, dialect, body_of(dialect, "gemini-cloud", "Hi", tools=tools))
    assert answer.status == 400 and "schema" in answer.error, answer.raw
    assert ask(gateway.url, dialect, body_of(dialect, "cloud", "Hi")).status == 200
    assert cpu_s(proxy) - began_s < CPU_S_MAX
    assert proxy.memory_info().rss - before < GROWN_BYTES_MAX
