"""Sends captured requests to a server in the order and overlap in which they were captured."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import aiohttp

from hearth.commands.replay.traces import (
    CHAT_PATH,
    Answers,
    Body,
    Captured,
    Spoken,
    answer_key,
    as_chat,
    request_body,
    waits_for,
    with_live,
)
from hearth.commands.stream_client import Outcome, Tokens, first_model, prompt_ids, send
from hearth.shared.errors import RequestError

SEND_GAP_S: Final = 0.005  # so that what overlaps arrives in the order in which it was sent
BUFFER_BYTES: Final = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Target:
    """The server that is asked, and how."""

    base_url: str
    key: str = "local"
    model: str = ""  # empty = the first that the server lists
    tokens_max: int = 8
    timeout_s: float = 600.0
    is_live: bool = False
    is_serial: bool = False
    is_chat_only: bool = False  # other dialects are sent as chat completions
    extra: Mapping[str, Any] = field(default_factory=dict)  # for bodies that do not say


@dataclass(frozen=True, slots=True)
class Row:
    """How one captured request went."""

    number: int
    trace: str
    dialect: str
    outcome: Outcome
    ids: Sequence[int] | None  # of the prompt, as this server tells them
    sent_s: float = 0.0  # when it was sent, by `time.perf_counter`

    @property
    def tokens(self) -> Tokens | None:
        return self.outcome.tokens if self.outcome.is_answered else None


# ---------------------------------------------------------------- asking


async def replay(
    rows: Sequence[Captured], target: Target, tell: Callable[[Row], None] = lambda row: None
) -> tuple[list[Row], float]:
    """Send all of `rows`; return how each went, in the order of sending, and the wall time."""
    return await replay_together([rows], target, tell)


async def replay_together(
    sessions: Sequence[Sequence[Captured]],
    target: Target,
    tell: Callable[[Row], None] = lambda row: None,
) -> tuple[list[Row], float]:
    """Play `sessions` at once, each in its own order; return as `replay` does.

    Held to the ideal, each request then has what any session has sent before it.
    """
    timeout = aiohttp.ClientTimeout(total=target.timeout_s)
    base = target.base_url.rstrip("/")
    async with aiohttp.ClientSession(
        base, timeout=timeout, read_bufsize=BUFFER_BYTES, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        if not target.model:
            target = replace(target, model=await first_model(session, _key_headers(target)))
        started = time.perf_counter()
        played = await asyncio.gather(
            *(_Player(session, target, tell).play_all(rows) for rows in sessions)
        )
        wall_s = time.perf_counter() - started
    done = sorted((row for rows in played for row in rows), key=lambda row: row.sent_s)
    return [replace(row, number=number) for number, row in enumerate(done)], wall_s


def _key_headers(target: Target) -> dict[str, str]:
    return {"authorization": f"Bearer {target.key}", "x-api-key": target.key}


class _Player:
    """Sends the requests of one session after another and remembers what was answered."""

    def __init__(
        self, session: aiohttp.ClientSession, target: Target, tell: Callable[[Row], None]
    ) -> None:
        self._session = session
        self._target = target
        self._tell = tell
        self._answers: Answers = {}

    async def play_all(self, rows: Sequence[Captured]) -> list[Row]:
        """Send each request as soon as those have ended that it waits for."""
        tasks: list[asyncio.Task[Row]] = []
        for number, waits in enumerate(waits_for(rows, self._target.is_serial)):
            await asyncio.gather(*(tasks[earlier] for earlier in waits))
            tasks.append(asyncio.create_task(self._play(number, rows[number])))
            await asyncio.sleep(SEND_GAP_S)
        return await asyncio.gather(*tasks)

    async def _play(self, number: int, captured: Captured) -> Row:
        target, sent_s = self._target, time.perf_counter()
        key = _key_headers(target)
        body = request_body(captured, target.model, target.tokens_max)
        if target.is_live:
            body = with_live(captured.dialect, body, self._answers)
        asked: list[asyncio.Task[list[int] | None]] = []

        def ask_ids(request_id: str) -> None:
            """Ask while it is read: the server remembers few prompts, and others come meanwhile."""
            asked.append(asyncio.create_task(prompt_ids(self._session, request_id, key)))

        outcome = await self._send(captured, body, {**captured.headers, **key}, ask_ids)
        if (place := answer_key(captured)) is not None and outcome.is_answered:
            told = outcome.reading
            self._answers[place] = Spoken("".join(told.text), "".join(told.reasoning))
        ids = await asked[0] if asked else None  # a stream that broke off was a prompt too
        row = Row(number, captured.trace, captured.dialect, outcome, ids, sent_s)
        self._tell(row)
        return row

    async def _send(
        self,
        captured: Captured,
        body: Body,
        headers: Mapping[str, str],
        on_taken: Callable[[str], None],
    ) -> Outcome:
        path, dialect = captured.path, captured.dialect
        if self._target.is_chat_only and dialect != "chat":
            try:
                path, dialect, body = CHAT_PATH, "chat", as_chat(dialect, body)
            except RequestError as error:
                return Outcome.refused(error.status, str(error))
        body = {**self._target.extra, **body}
        return await send(self._session, path, dialect, body, headers, on_taken)
