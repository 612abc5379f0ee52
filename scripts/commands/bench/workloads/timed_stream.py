"""Streams chat completions and notes when their text arrives, for the workloads that are timed.

Tokens are counted by the server's usage, never by its events: one event may hold several tokens.
What arrives within TOGETHER_S is one arrival, so that a server that sends two tokens in two events
at once is not measured as quicker than one that sends them in one event.
"""

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import aiohttp

from hearth.commands.bench.workload import Visit
from hearth.commands.replay.player import BUFFER_BYTES, SEND_GAP_S
from hearth.commands.replay.traces import CHAT_PATH
from hearth.commands.stream_client import ODD_FORM, Event, first_model, send

TOGETHER_S: Final = 0.0005  # gaps that differ by less are no different (measures.py)
FULL_SHARE: Final = 0.9  # of the tokens asked for: some servers count one less
ERRORS_MAX: Final = 3
_TEXTS: Final = ("content", "reasoning_content", "reasoning", "refusal")


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """How one answer came. Times are of `time.perf_counter`."""

    sent_s: float
    ended_s: float  # its last event
    arrivals_s: tuple[float, ...]  # of text, each TOGETHER_S or more behind the one before
    prompt: int  # tokens, as the server counts
    completion: int
    text: str  # without reasoning
    error: str

    @property
    def gaps_s(self) -> list[float]:
        return gaps(self.arrivals_s)

    @property
    def first_s(self) -> float:
        """Return when its first text came, or its end where that is all that it has."""
        return self.arrivals_s[0] if self.arrivals_s else self.ended_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.error else self.first_s - self.sent_s

    def is_full(self, tokens: int) -> bool:
        """Say whether it is as long as was asked for: a model may end earlier."""
        return not self.error and self.completion >= FULL_SHARE * tokens


def gaps(arrivals_s: Sequence[float]) -> list[float]:
    """Return the seconds between arrivals."""
    return [later - earlier for earlier, later in pairwise(arrivals_s)]


class TextClock:
    """Takes the events of one answer and notes when text came. Owner: the task that reads it."""

    def __init__(self, on_text: Callable[[float], None]) -> None:
        self.arrivals_s: list[float] = []
        self.last_s: float | None = None  # of any event
        self._on_text = on_text

    def take(self, data: str, now_s: float) -> None:
        """Take the data of an event that came at `now_s`; what is no chunk is `send`'s to tell."""
        with contextlib.suppress(*ODD_FORM):
            is_text = has_text(json.loads(data))
            self.last_s = now_s
            if is_text:
                if not self.arrivals_s or now_s - self.arrivals_s[-1] >= TOGETHER_S:
                    self.arrivals_s.append(now_s)
                self._on_text(now_s)


def has_text(event: Event) -> bool:
    """Say whether a chat completion chunk brings text: of an answer, a thought, or a tool call."""
    deltas = [choice.get("delta") or {} for choice in event.get("choices") or ()]
    return any(
        any(delta.get(kind) for kind in _TEXTS)
        or any((call.get("function") or {}).values() for call in delta.get("tool_calls") or ())
        for delta in deltas
    )


# ---------------------------------------------------------------- asking


class TimedClient:
    """Asks one server. Owner: the event loop."""

    def __init__(self, session: aiohttp.ClientSession, fixed: Mapping[str, Any]) -> None:
        self._session = session
        self._fixed = fixed  # of every body

    async def ask(
        self,
        question: str,
        tokens_max: int,
        more: Mapping[str, Any],
        on_text: Callable[[float], None] = lambda now_s: None,
    ) -> TimedAnswer:
        """Stream one answer to its end. Whatever a server does wrong is its error."""
        said = [{"role": "user", "content": question}]
        body = {**self._fixed, "messages": said, "max_tokens": tokens_max, **more}
        clock, sent_s = TextClock(on_text), time.perf_counter()
        outcome = await send(self._session, CHAT_PATH, "chat", body, {}, on_event=clock.take)
        tokens = outcome.tokens
        is_counted = tokens is not None and tokens.completion > 0
        return TimedAnswer(
            sent_s=sent_s,
            ended_s=clock.last_s or sent_s,
            arrivals_s=tuple(clock.arrivals_s),
            prompt=tokens.prompt if tokens else 0,
            completion=tokens.completion if tokens else 0,
            text="".join(outcome.reading.text),
            error=outcome.error or ("" if is_counted else "the stream told no usage"),
        )

    async def ask_all(
        self, questions: Sequence[str], tokens_max: int, more: Mapping[str, Any]
    ) -> list[TimedAnswer]:
        """Ask all at once, in their order."""
        tasks = []
        for question in questions:
            tasks.append(asyncio.create_task(self.ask(question, tokens_max, more)))
            await asyncio.sleep(SEND_GAP_S)
        return await asyncio.gather(*tasks)


@contextlib.asynccontextmanager
async def timed_client(visit: Visit) -> AsyncIterator[TimedClient]:
    """Return a client of the visit's server, for the length of the block."""
    target = visit.running.target
    key = {"authorization": f"Bearer {target.key}"}
    async with aiohttp.ClientSession(
        target.base_url.rstrip("/"),
        headers=key,
        timeout=aiohttp.ClientTimeout(total=target.timeout_s),
        read_bufsize=BUFFER_BYTES,
        connector=aiohttp.TCPConnector(limit=0),
    ) as session:
        model = target.model or await first_model(session, {})
        fixed = {
            **target.extra,
            "model": model,
            "temperature": 0,
            "repetition_penalty": 1.0,  # servers differ in its default
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        yield TimedClient(session, fixed)


def salt_of(visit: Visit, workload: str) -> str:
    """Return words for the front of a workload's prompts, so that no other's begin alike.

    They are the same in all rounds, but for a server that nobody restarts: it would know them.
    """
    return f"{workload} {secrets.token_hex(8)}" if visit.server.url else workload


def errors_of_answers(answers: Sequence[TimedAnswer]) -> tuple[str, ...]:
    """Return the errors, each once."""
    return tuple(dict.fromkeys(each.error for each in answers if each.error))[:ERRORS_MAX]
