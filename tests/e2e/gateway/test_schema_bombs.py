"""A schema whose definitions name one another is a 400 in each dialect, and holds nobody up."""

from typing import Any, Final

import psutil
import pytest

from tests.helpers.cloud.dialect_requests import ask, body_of
from tests.helpers.cloud.gateway_server import GatewayServer

CPU_S_MAX: Final = 10.0
GROWN_BYTES_MAX: Final = 256 * 1024 * 1024


def named(links: dict[str, list[str]]) -> dict[str, Any]:
    """Return definitions of which each names those of its row."""
    parts: dict[str, Any] = {
        name: {"type": "object", "anyOf": [{"$ref": f"#/$defs/{other}"} for other in others]}
        for name, others in links.items()
    }
    return {"type": "object", "anyOf": [{"$ref": "#/$defs/0"}], "$defs": parts}


KNOT: Final = named({str(each): ["0", "1", "2"] for each in range(3)})
BOMBS: Final = {
    "doubled": named({str(each): [str(each + 1)] * 2 for each in range(30)} | {"30": []}),
    "knotted within": {"type": "object", "properties": {"p": KNOT}},
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_a_schema_bomb_is_a_400_and_the_next_is_answered(
    gateway: GatewayServer, dialect: str, bomb: str
) -> None:
    assert gateway.process is not None
    ask(gateway.url, dialect, body_of(dialect, "cloud", "Hi"))  # LiteLLM is there now
    proxy = psutil.Process(gateway.process.pid)
    before, began = proxy.memory_info().rss, sum(proxy.cpu_times()[:2])
    function = {"name": "f", "description": "x", "parameters": BOMBS[bomb]}
    tool: dict[str, Any] = {
        "chat": {"type": "function", "function": function},
        "messages": {"name": "f", "description": "x", "input_schema": BOMBS[bomb]},
        "responses": {"type": "function", **function},
    }[dialect]
    answer = ask(gateway.url, dialect, body_of(dialect, "gemini-cloud", "Hi", tools=[tool]))
    assert answer.status == 400 and "schema" in answer.error, answer.raw
    assert ask(gateway.url, dialect, body_of(dialect, "cloud", "Hi")).status == 200
    assert sum(proxy.cpu_times()[:2]) - began < CPU_S_MAX
    assert proxy.memory_info().rss - before < GROWN_BYTES_MAX
