"""A message is continued by the servers that know the field for it; no other is sent it."""

from typing import Any

import orjson
import pytest

from hearth.proxy.gateway.config.routing_table import Deployment
from hearth.proxy.gateway.gateway import cloud_json

ROWS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
BOTH = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize(
    ("model", "provider", "asked", "sent"),
    [
        ("openai/m", "", BOTH, BOTH),
        ("m", "hosted_vllm", BOTH, BOTH),
        ("anthropic/claude", "", BOTH, {}),
        ("openai/m", "", {"add_generation_prompt": True}, {}),
        ("openai/m", "", {"continue_final_message": {"a": 1}}, {}),
    ],
)
def test_the_fields_for_it_pass_where_they_say_something_and_are_known(
    model: str, provider: str, asked: dict[str, Any], sent: dict[str, Any]
) -> None:
    to = Deployment("id", "g", model, provider=provider)
    body = orjson.loads(cloud_json("chat", {"messages": ROWS} | asked, to))
    assert body == {"model": "g", "messages": ROWS} | sent
