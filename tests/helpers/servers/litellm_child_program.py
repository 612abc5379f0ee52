"""Runs LiteLLM's proxy app with a config and does on its loop what lines on standard input ask.

Each line is JSON: what to do, and its fields. Each answer is a line of JSON on standard output.
"""

import asyncio
import contextlib
import importlib
import io
import json
import sys
from typing import Any

from hearth.proxy.gateway.accounts.litellm_keys import KeyCaller
from hearth.proxy.gateway.accounts.litellm_usage import CloudUsage, KeyedCall, LocalAnswerLog
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Usage


class Child:
    """Does what is asked. Owner: the one loop of this process."""

    def __init__(self) -> None:
        self.server: Any = importlib.import_module("litellm.proxy.proxy_server")
        self.events: Any = importlib.import_module("hearth.proxy.gateway.accounts.litellm_events")
        self.auth: Any = importlib.import_module("hearth.proxy.gateway.accounts.litellm_auth")
        self.calls: dict[str, KeyedCall] = {}
        self.usages: list[CloudUsage] = []
        self.is_watching = False

    async def log(self, call: str = "", **fields: Any) -> None:
        usage, error = fields.pop("usage"), fields.pop("error", None)
        answer = LocalAnswerLog(
            usage=Usage(**usage) if usage else None,
            error=RequestError(error["text"], status=error["status"]) if error else None,
            call=self.calls.pop(call) if call else None,
            **fields,
        )
        await self.events.log_answer(answer)

    async def owner(self, caller: dict[str, Any], group: str = "") -> dict[str, Any]:
        found = await self.auth.owner(_caller(caller), group)
        return {"digest": found.digest}

    async def begin(self, name: str, caller: dict[str, Any], group: str) -> dict[str, Any]:
        found, call = await self.auth.begin(_caller(caller), group, "chat", name)
        self.calls[name] = call
        return {"digest": found.digest}

    async def key(self, key: str, **fields: Any) -> None:
        """Let LiteLLM know a virtual key, as if its database had just told it."""
        types: Any = importlib.import_module("litellm.proxy._types")
        known = types.UserAPIKeyAuth(api_key=key, **fields)
        if self.server.prisma_client is None:
            self.server.prisma_client = Database()
            self.server.cost_tracking()  # as at its start, where it has a database
        await self.server.user_api_key_cache.async_set_cache(key=known.token, value=known)

    async def cloud(self, model: str, request_id: str, stream: bool) -> Any:
        """Ask a deployment through LiteLLM's Router, as its app does for a client."""
        if not self.is_watching:
            self.is_watching = True
            self.events.watch_clouds(self.usages.append)
        headers = {"x-hearth-request": request_id}
        request = {"url": "", "method": "POST", "headers": headers, "body": {}}
        reply = await self.server.llm_router.acompletion(
            model=model,
            messages=[{"role": "user", "content": "hi"}],
            stream=stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
            proxy_server_request=request,
        )
        if stream:
            return [chunk.model_dump() async for chunk in reply][-1].get("usage")
        return reply.model_dump()["usage"]

    async def told(self, count: int) -> list[dict[str, Any]]:
        """Return the cloud usages that we were told, once there are so many."""
        async with asyncio.timeout(20):
            while len(self.usages) < count:
                await asyncio.sleep(0.02)
        return [{name: getattr(usage, name) for name in usage.__slots__} for usage in self.usages]

    async def budget(self, provider: str) -> Any:
        """Return what a provider's budget says is spent."""
        for callback in importlib.import_module("litellm").callbacks:
            if type(callback).__name__ == "RouterBudgetLimiting":
                return await callback.dual_cache.async_get_cache(f"provider_spend:{provider}:1d")
        return None

    async def spend(self, key: str) -> Any:
        """Return what a key has spent, by LiteLLM's counter."""
        token = self.server.hash_token(key)
        spend, _ = await self.server.spend_counter_store.read(f"spend:key:{token}")
        return spend


class Database:
    """Stands for LiteLLM's prisma client: there, and asked nothing that is not in its cache."""

    async def disconnect(self) -> None:
        """There is nothing to end."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the stub of a database was asked for {name}")


def _caller(fields: dict[str, Any]) -> KeyCaller:
    headers = [(name.encode(), value.encode()) for name, value in fields["headers"].items()]
    path = fields.get("path", "/v1/chat/completions")
    return KeyCaller("POST", path, headers, tokens_max=fields.get("tokens_max"))


async def _serve() -> None:
    child = Child()
    out = sys.stdout
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        with contextlib.redirect_stdout(io.StringIO()):
            await stack.enter_async_context(
                child.server.app.router.lifespan_context(child.server.app)
            )
        print(json.dumps({"ready": True}), file=out, flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            asked = json.loads(line)
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    work = getattr(child, asked.pop("do"))(**asked)
                    result = await asyncio.create_task(work)  # each with a context of its own
                reply = {"result": result}
            except RequestError as error:
                reply = {"refused": [error.status, error.code, str(error)]}
            except Exception as error:
                reply = {"failed": f"{type(error).__name__}: {error}"}
            print(json.dumps(reply, default=str), file=out, flush=True)


if __name__ == "__main__":
    asyncio.run(_serve())
