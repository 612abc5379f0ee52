"""Serves the page to talk, and answers its calls with whatever a test has ready.

Unlike Hearth it sends no Content-Security-Policy and no Trusted Types: what a page does with
hostile texts must be right without them, and they are a second wall.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from aiohttp import web
from aiohttp.test_utils import TestServer

PROXY: Final = Path(__file__).parents[3] / "proxy"
PAGES: Final = PROXY / "chat_page" / "pages"
DASHBOARD: Final = PROXY / "monitoring" / "pages"  # the pages share a module
USAGE: Final = {
    **{"prompt_tokens": 3_412, "completion_tokens": 6, "total_tokens": 3_418},
    "prompt_tokens_details": {"cached_tokens": 3_398},
    "kv_cache": {"prefix_length": 3_398, "prefilled": 14, "ttft_ms": 200, "source": "slot"},
}
Delta = Mapping[str, Any]  # of a chat completion's chunk


def tool_call(name: str, arguments: str) -> Delta:
    function = {"name": name, "arguments": arguments}
    call = {"index": 0, "id": "call_1", "type": "function", "function": function}
    return {"tool_calls": [call]}


class HostileServer:
    """Answers each chat with the next of `answers`: deltas, or the text of an error.

    Of deltas the empty one cuts the connection. `bodies` are the requests that it got.
    """

    def __init__(self, *models: dict[str, Any]) -> None:
        self.models = list(models) or [{"id": "model", "object": "model"}]
        self.answers: list[Sequence[Delta] | str] = []
        self.bodies: list[dict[str, Any]] = []
        self.hold = asyncio.Event()  # answers go on to their end only once it is set
        self.hold.set()
        self.url = ""

    async def _chat(self, asked: web.Request) -> web.StreamResponse:
        self.bodies.append(await asked.json())
        answer = self.answers.pop(0) if self.answers else [{"content": "Yes."}]
        if isinstance(answer, str):
            error = {"message": answer, "type": answer, "code": answer}
            return web.json_response({"error": error}, status=400)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(asked)
        for delta in answer:
            if not delta and asked.transport is not None:
                await asyncio.sleep(0.2)  # what was written comes first
                asked.transport.abort()
                return response
            await response.write(_chunk([{"index": 0, "delta": delta, "finish_reason": None}]))
        await self.hold.wait()
        reason = "tool_calls" if any("tool_calls" in delta for delta in answer) else "stop"
        await response.write(_chunk([{"index": 0, "delta": {}, "finish_reason": reason}]))
        await response.write(_chunk([], usage=USAGE) + b"data: [DONE]\n\n")
        return response

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.models})

    def _app(self) -> web.Application:
        async def index(_: web.Request) -> web.FileResponse:
            return web.FileResponse(PAGES / "index.html")

        async def signed_in(_: web.Request) -> web.Response:
            return web.json_response({"needs_key": False, "is_signed_in": False})

        async def healthy(_: web.Request) -> web.Response:
            return web.json_response({"status": "ok"})

        app = web.Application()
        app.add_routes(
            [
                web.get("/", index),
                web.get("/chat/sign-in", signed_in),
                web.get("/chat/api/v1/models", self._models),
                web.post("/chat/api/v1/chat/completions", self._chat),
                web.get("/chat/api/health", healthy),
                web.static("/chat", PAGES),
                web.static("/dashboard", DASHBOARD),
            ]
        )
        return app

    @asynccontextmanager
    async def running(self) -> AsyncIterator["HostileServer"]:
        async with TestServer(self._app()) as server:
            self.url = str(server.make_url("/"))
            yield self


def _chunk(choices: list[dict[str, Any]], **more: Any) -> bytes:
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "model"}
    return f"data: {json.dumps({**chunk, 'choices': choices, **more})}\n\n".encode()
