"""Asks one question as a chat completion and tells what comes while it comes."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from hearth.commands.server.find_or_start import RunningServer
from hearth.commands.stream_client import (
    ODD_FORM,
    Reading,
    SseReader,
    body_of,
    chunks_of,
    read_chat,
)
from hearth.shared.version import VERSION

PATH: Final = "/v1/chat/completions"
CONNECT_S_MAX: Final = 10.0
# Without a word: a stream says something every 5 s; before it, another model may be loaded.
SILENCE_S_MAX: Final = 1800.0
CUT_SHORT: Final = "The answer ended where the context does."  # finish_reason "length"
_ERROR_CHARS_MAX: Final = 2_000

Row = dict[str, Any]


@dataclass(slots=True)
class Turn:
    """One answer, as far as it has come, and what it cost."""

    reading: Reading = field(default_factory=Reading)
    done_tokens: int = 0  # of the prompt, while it is read
    prompt_tokens: int = 0
    finish_reason: str = ""
    error: str = ""
    began_at: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    total_s: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.reading.text)

    @property
    def thinking(self) -> str:
        return "".join(self.reading.reasoning)

    def take(self, event: Row) -> None:
        if error := event.get("error"):
            self.error = error_text(json.dumps({"error": error}), 0)
        if progress := event.get("prefill"):
            self.done_tokens = int(progress["done_tokens"])
            self.prompt_tokens = int(progress["prompt_tokens"])
        for choice in event.get("choices") or ():
            self.finish_reason = str(choice.get("finish_reason") or self.finish_reason)
        if read_chat(self.reading, event) and self.first_s is None:
            self.first_s = time.monotonic() - self.began_at


async def ask(
    server: RunningServer,
    body: Row,
    session: str,
    turn: Turn,
    on_news: Callable[[], None] = lambda: None,
) -> None:
    """Have the server answer `body` into `turn`, and call `on_news` after each part of it.

    Whatever goes wrong is `turn.error`. Cancelled, it closes the connection, which has the server
    stop too.
    """
    headers = {"x-session-id": session, "user-agent": f"hearth-run/{VERSION}"}
    if server.key:
        headers["authorization"] = f"Bearer {server.key}"
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    timeout = aiohttp.ClientTimeout(None, sock_connect=CONNECT_S_MAX, sock_read=SILENCE_S_MAX)
    try:
        async with (
            aiohttp.ClientSession(server.base_url, headers=headers, timeout=timeout) as client,
            client.post(PATH, json=body, allow_redirects=False) as response,
        ):
            if response.status != 200:
                turn.error = error_text(
                    (await body_of(response)).decode(errors="replace"), response.status
                )
            else:
                await _read(response, turn, on_news)
    except (aiohttp.ClientError, TimeoutError, *ODD_FORM) as error:
        turn.error = f"The server does not answer any more: {type(error).__name__} {error}"
    finally:
        turn.total_s = time.monotonic() - turn.began_at


async def _read(response: aiohttp.ClientResponse, turn: Turn, on_news: Callable[[], None]) -> None:
    events = SseReader()
    async for chunk in chunks_of(response):
        for data in events.feed(chunk):
            if data.strip() != "[DONE]":
                turn.take(json.loads(data))
        on_news()
    if not turn.error and not turn.reading.is_complete:
        turn.error = "The answer broke off."


def error_text(told: str, status: int) -> str:
    """Return an error's message, where it is in an API's shape; else all of it."""
    try:
        error = json.loads(told)
        error = error.get("error", error)
        told = error["message"]
    except ODD_FORM:
        told = f"{status} {told}" if status else told
    return str(told)[:_ERROR_CHARS_MAX]
