"""Makes request bodies of every dialect."""

from collections.abc import Callable
from typing import Any

import orjson

from hearth.proxy.api import prefill_endpoint
from tests.helpers.proxy.app_over_workers import Front
from tests.helpers.proxy.proxy_app import Reply, asked

OTHER_KEY = (b"x-api-key", b"other")
PATHS: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/responses": lambda text: {"input": text},
    "/v1/messages": lambda text: {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 9,
    },
}


def body_of(path: str, text: str, **fields: Any) -> bytes:
    return orjson.dumps({"model": "claude-x", **PATHS[path](text), **fields})


SAID = [{"role": "user", "content": "a b c"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"model": "smollm2", "messages": SAID},
    "completions": {"model": "smollm2", "prompt": "a b c"},
    "messages": {"model": "smollm2", "messages": SAID, "system": "Be brief.", "max_tokens": 5},
    "responses": {"model": "smollm2", "input": "a b c"},
}


async def post(
    made: Front, body: Any, path: str = prefill_endpoint.PATH, query: bytes = b""
) -> Reply:
    raw = orjson.dumps(body)
    return await asked(made.app, "POST", path, (b"x-api-key", b"k"), body=raw, query=query)
