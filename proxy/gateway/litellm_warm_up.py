"""Sends LiteLLM a few canned answers, so that no client waits for its late imports."""

import asyncio
import logging
import time
from typing import Final

from hearth.proxy.gateway.litellm_relay import Relay
from hearth.proxy.http.http_exchange import App, RawHeaders
from hearth.proxy.request.parsed_request import AdmittedRequest, Dialect, ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import CallStart, Delta, Finished, Prompt, Sampling, Usage

log = logging.getLogger(__name__)

_DIALECTS: Final[tuple[Dialect, ...]] = ("chat", "messages")


class CannedAnswer:
    """An answer that no worker gives: a delta of each channel and an end."""

    request_id = "warm-up"
    prompt_tokens = 1
    cached_tokens = 0
    done_tokens = 0
    signature = "warmup"

    def __init__(self) -> None:
        self._events: list[Delta | Finished] = [
            Delta(self.request_id, 0, "reasoning", "."),
            Delta(self.request_id, 1, "content", "."),
            Delta(self.request_id, 2, "tool_call", "{}", call=CallStart("warmup", "f")),
            Finished(self.request_id, "tool_calls", None, Usage(1, 0, 1, 3)),
        ]

    async def next_event(self, wait_s: float | None = None) -> Delta | Finished | None:
        return self._events.pop(0)

    def close(self) -> None:
        pass


class _Sink:
    """Takes a reply and keeps nothing of it."""

    async def start(self, status: int, headers: RawHeaders) -> None:
        pass

    async def body(self, chunk: bytes, *, more: bool) -> None:
        pass


async def warm_up(app: App, token: str, model: str) -> None:
    """Send one canned answer through `app` in each dialect, streamed and not.

    Raises:
        RequestError: LiteLLM does not pass our answers on; it must not serve clients.
    """
    started = time.monotonic()
    relay = Relay(app, token)
    for dialect in _DIALECTS:
        for stream in (False, True):
            request = ParsedRequest(
                dialect=dialect,
                model=model,
                prompt=Prompt([]),
                sampling=Sampling(),
                stream=stream,
                body={},
                include_usage=True,
            )
            ticket = AdmittedRequest(request, model, CannedAnswer())
            await relay.serve(ticket, _Sink(), asyncio.Event())
            if ticket.failure is not None:
                raise RequestError(f"warm-up of {dialect} failed: {ticket.failure}", status=500)
    log.info("warmed up wall_ms=%d", (time.monotonic() - started) * 1000)
