"""Hands local answers to LiteLLM's callbacks after their end, and defines what a cloud's one cost.

Nothing of LiteLLM is imported here: `litellm_events` has the part that runs on its event loop.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from hearth.proxy.gateway.litellm_thread import LiteLLMThread
from hearth.proxy.request.encoder_names import EncoderKind
from hearth.proxy.request.parsed_request import AnswerEvents, CrossedDialect
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Delta, Finished, Usage

log = logging.getLogger(__name__)

T = TypeVar("T")

AccountDialect = CrossedDialect | EncoderKind  # what a local answer is an answer to

REQUEST_HEADER: Final = "x-hearth-request"  # of a cloud call, to LiteLLM's app only: our request id
LOGS_MAX: Final = 1_024  # answers that wait to be told or are being told
LOG_BYTES_MAX: Final = 64 * 1024 * 1024  # of their requests and answers together
AT_ONCE_MAX: Final = 16  # answers that callbacks are told of at the same time
LOG_S_MAX: Final = 60.0  # for all callbacks to take one
CLIENT_LEFT: Final = 499  # the status of an answer whose client left


@dataclass(frozen=True, slots=True)
class KeyedCall:
    """A local request that LiteLLM's own keys let in: what its limits and its spend are booked on.

    `context` holds LiteLLM's notes of what it reserved; they are given back where the answer's log
    runs in it. Every KeyedCall ends in one LocalAnswerLog.
    """

    auth: Any  # LiteLLM's UserAPIKeyAuth
    data: dict[str, Any]  # the request as LiteLLM's hooks left it; no text of it
    context: Any  # a contextvars.Context of LiteLLM's thread


@dataclass(frozen=True, slots=True)
class LocalAnswerLog:
    """One local answer at its end, whatever came of it. Times are seconds since the epoch.

    `body` is what the client sent, headers and keys not among it; `text`, `thinking` and `calls`
    are empty where no callback wants texts.
    """

    request_id: str
    deployment_id: str  # LiteLLM's model_info.id
    group: str  # the model_name that the request meant
    model: str  # the public name of the local model, as in hearth/NAME
    dialect: AccountDialect
    body: Mapping[str, Any]
    stream: bool
    asked_at: float
    first_token_at: float | None
    ended_at: float
    usage: Usage | None  # None = it broke off before its worker told
    finish_reason: str = "stop"
    text: str = ""
    thinking: str = ""
    calls: Sequence[dict[str, str]] = ()  # {"id", "name", "arguments"}
    error: RequestError | None = None
    session: str = ""
    body_bytes: int = 0  # about how much memory `body` takes
    call: KeyedCall | None = None

    @property
    def bytes_kept(self) -> int:
        """Return about how much memory it takes until it is told."""
        calls = sum(len(call["arguments"]) for call in self.calls)
        return self.body_bytes + len(self.text) + len(self.thinking) + calls


@dataclass(frozen=True, slots=True)
class CloudUsage:
    """What LiteLLM's log of one cloud call says that it cost; `cost` is in US dollars."""

    request_id: str  # of REQUEST_HEADER
    deployment_id: str
    prompt_tokens: int
    cached_tokens: int  # of prompt_tokens, read from the provider's cache
    completion_tokens: int
    cost: float


class RecordedAnswer:
    """An answer whose text is kept as it is read, for LiteLLM's callbacks. Owner: its HTTP task."""

    def __init__(self, answer: AnswerEvents) -> None:
        self._answer = answer
        self._texts: dict[str, list[str]] = {"content": [], "reasoning": []}
        self.calls: list[dict[str, str]] = []
        self._arguments: list[list[str]] = []
        self.finish_reason = "stop"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._answer, name)  # what else is told of an answer is the answer's own

    async def next_event(self, wait_s: float | None = None) -> Delta | Finished | None:
        event = await self._answer.next_event(wait_s)
        if isinstance(event, Delta):
            self._keep(event)
        elif isinstance(event, Finished):
            self.finish_reason = event.reason
        return event

    def _keep(self, delta: Delta) -> None:
        if delta.call is not None:
            self.calls.append({"id": delta.call.id, "name": delta.call.name, "arguments": ""})
            self._arguments.append([])
        if delta.channel == "tool_call":
            if self._arguments:
                self._arguments[-1].append(delta.text)
        else:
            self._texts[delta.channel].append(delta.text)

    @property
    def text(self) -> str:
        return "".join(self._texts["content"])

    @property
    def thinking(self) -> str:
        return "".join(self._texts["reasoning"])

    def whole_calls(self) -> list[dict[str, str]]:
        """Return the calls with the arguments that came."""
        rows = zip(self.calls, self._arguments, strict=True)
        return [call | {"arguments": "".join(parts)} for call, parts in rows]


@dataclass(slots=True)
class LocalAnswerLogs:
    """Tells LiteLLM of local answers, each once, beside everything else. Owner: our event loop.

    Invariant: at most LOGS_MAX answers and LOG_BYTES_MAX of their text wait; what is more is
    dropped, counted and warned of. Those of LiteLLM's keys are told without their texts instead:
    as many can wait as LiteLLM has let in. `tell` never waits and never raises.
    """

    loop: LiteLLMThread
    ready: Callable[[], Awaitable[None]]  # returns once LiteLLM serves; raises where it never will
    write: Callable[[LocalAnswerLog], Coroutine[Any, Any, None]]  # runs on LiteLLM's loop
    dropped: int = 0  # there was no room
    failed: int = 0  # LiteLLM did not take it
    told: int = 0
    on_lost: Callable[[str], None] = lambda why: None  # is told "dropped" or "failed"
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _bytes: int = 0
    _at_once: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE_MAX))

    def tell(self, answer: LocalAnswerLog) -> None:
        """Have LiteLLM's callbacks, budgets and spend take `answer`, soon."""
        if len(self._tasks) >= LOGS_MAX or self._bytes + answer.bytes_kept > LOG_BYTES_MAX:
            if not answer.call:
                self._drop(answer)
                return
            answer = _without_texts(answer)  # what its key has reserved is given back all the same
        self._bytes += answer.bytes_kept
        task = asyncio.create_task(self._tell(answer), name="litellm-log")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _drop(self, answer: LocalAnswerLog) -> None:
        self.dropped += 1
        self.on_lost("dropped")
        if self.dropped & (self.dropped - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
            log.warning(
                "LiteLLM's callbacks are told of answers more slowly than they end: %d answers of "
                "%d bytes wait, limits %d and %d; %d were dropped. See to a faster callback.",
                *(len(self._tasks), self._bytes, LOGS_MAX, LOG_BYTES_MAX, self.dropped),
            )

    async def _tell(self, answer: LocalAnswerLog) -> None:
        try:
            async with self._at_once:
                await self.ready()
                async with asyncio.timeout(LOG_S_MAX):
                    await self.loop.run(lambda: self.write(answer))
            self.told += 1
        except Exception as error:
            self.failed += 1
            self.on_lost("failed")
            log.warning(
                "LiteLLM's callbacks did not take the answer id=%s: %s",
                *(answer.request_id, type(error).__name__),
            )
        finally:
            self._bytes -= answer.bytes_kept

    async def close(self, wait_s: float) -> None:
        """Tell what waits within `wait_s`; what is left is dropped and counted."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=wait_s)
        for task in late:
            task.cancel()
        self.dropped += len(late)
        await asyncio.gather(*late, return_exceptions=True)


def _without_texts(answer: LocalAnswerLog) -> LocalAnswerLog:
    return replace(answer, body={}, text="", thinking="", calls=(), body_bytes=0)


# What in a LiteLLM config needs to know of every answer. Where none is there, and keys are not
# LiteLLM's, none is told.
_CALLBACKS: Final = ("callbacks", "success_callback", "failure_callback")
_ROUTER: Final = ("provider_budget_config", "tag_budget_config", "optional_pre_call_checks")
_STRATEGIES: Final = ("simple-shuffle", "")  # that look at no answer
_OF_DEPLOYMENT: Final = ("max_budget", "budget_duration", "tpm", "rpm", "max_parallel_requests")


def wants_answers(config: Mapping[str, Any]) -> bool:
    """Return whether anything in `config`, keys aside, has a use for local answers."""
    strategy = section(config, "router_settings").get("routing_strategy") or ""
    return (
        any(_rows(config, "litellm_settings", (*_CALLBACKS, "max_budget")))
        or any(_rows(config, "router_settings", _ROUTER))
        or strategy not in _STRATEGIES
        or any(_limits(config))
    )


def wants_texts(config: Mapping[str, Any]) -> bool:
    """Return whether a callback may see what was asked and answered; counts need no text."""
    settings = section(config, "litellm_settings")
    return settings.get("turn_off_message_logging") is not True and any(
        _rows(config, "litellm_settings", _CALLBACKS)
    )


def _limits(config: Mapping[str, Any]) -> Iterator[Any]:
    rows = config.get("model_list")
    for row in rows if isinstance(rows, list) else ():
        for place in (row, section(row, "litellm_params"), section(row, "model_info")):
            yield from (place.get(name) for name in _OF_DEPLOYMENT)


def _rows(config: Mapping[str, Any], place: str, names: Sequence[str]) -> Iterator[Any]:
    found = section(config, place)
    return (found.get(name) for name in names)


def section(config: Any, name: str) -> Mapping[str, Any]:
    section = config.get(name) if isinstance(config, Mapping) else None
    return section if isinstance(section, Mapping) else {}
