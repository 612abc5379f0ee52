"""Sends one streamed request of a replay and reads its token counts, in any of three dialects."""

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

Event = dict[str, Any]

ERROR_CHARS_MAX = 300
# A server that never ends an answer must not fill the memory of who asks.
STREAM_BYTES_MAX: Final = 64 << 20
BODY_BYTES_MAX: Final = 1 << 20
COUNT_MAX: Final = 10**9  # tokens: more are no count
# What reading an answer raises whose parts are of other types, or not there.
ODD_FORM: Final = (
    *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError),
)


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a server says that a prompt cost it."""

    prompt: int
    cached: int
    prefilled: int
    completion: int
    source: str  # where the cached part came from; "" where the server does not tell


@dataclass(slots=True)
class Reading:
    """What a stream has told so far."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    kv_cache: dict[str, Any] = field(default_factory=dict)
    calls: dict[int, Event] = field(default_factory=dict)  # of a chat, by their index
    error: str = ""
    is_complete: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request went. `status` is 0 where no answer came."""

    status: int
    tokens: Tokens | None
    ttft_s: float | None  # to the first output
    total_s: float
    error: str
    reading: Reading
    request_id: str = ""  # as the server calls it; "" where it does not

    @classmethod
    def refused(cls, status: int, error: str) -> "Outcome":
        """Return that of a request which was not even sent."""
        return cls(status, None, None, 0.0, error, Reading())

    @property
    def is_refused(self) -> bool:
        """Whether the server would not have it: a 4xx."""
        return 400 <= self.status < 500

    @property
    def is_answered(self) -> bool:
        return not self.error


# ---------------------------------------------------------------- server-sent events


class SseReader:
    """Cuts a byte stream into the data of its events. A line may be of any length."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[str]:
        """Yield the data of each event that `chunk` completes."""
        searched = len(self._rest)
        self._rest += chunk
        start = 0
        while (end := self._rest.find(b"\n", max(start, searched))) >= 0:
            yield from self._line(bytes(self._rest[start:end]))
            start = end + 1
        del self._rest[:start]

    def close(self) -> Iterator[str]:
        """Yield what an end without a blank line leaves."""
        yield from self._line(bytes(self._rest))
        yield from self._line(b"")
        self._rest.clear()

    def _line(self, raw: bytes) -> Iterator[str]:
        line = raw.decode("utf-8", "replace").removesuffix("\r")
        if line.startswith("data:"):
            self._data.append(line[5:].removeprefix(" "))
        elif not line and self._data:
            yield "\n".join(self._data)
            self._data.clear()


# ---------------------------------------------------------------- what events tell


def read_chat(reading: Reading, event: Event) -> bool:
    """Take a chat completion chunk; say whether it brings output."""
    if event.get("error"):
        reading.error = json.dumps(event["error"])[:ERROR_CHARS_MAX]
    reading.usage |= event.get("usage") or {}
    reading.kv_cache |= reading.usage.get("kv_cache") or {}
    has_output = False
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        fields = delta.get("provider_specific_fields") or {}
        reading.kv_cache |= fields.get("kv_cache") or {}
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        reading.text.append(_words(delta.get("content")))
        reading.reasoning.append(_words(thought))
        _read_calls(reading, delta.get("tool_calls") or ())
        reading.is_complete |= bool(choice.get("finish_reason"))
        has_output |= bool(delta.get("content") or thought or delta.get("tool_calls"))
    return has_output or reading.is_complete


def _read_calls(reading: Reading, deltas: Sequence[Event]) -> None:
    """Join the deltas of tool calls to whole ones, as chat completions have them."""
    for delta in deltas:
        empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        call = reading.calls.setdefault(delta.get("index") or 0, empty)
        call["id"] = delta.get("id") or call["id"]
        told = delta.get("function") or {}
        for name in ("name", "arguments"):
            call["function"][name] += _words(told.get(name))


def read_messages(reading: Reading, event: Event) -> bool:
    """Take an event of Anthropic Messages; say whether it brings output."""
    kind = event.get("type")
    if kind == "error":
        reading.error = json.dumps(event.get("error"))[:ERROR_CHARS_MAX]
    elif kind == "message_start":
        reading.usage |= event["message"].get("usage") or {}
    elif kind == "message_delta":
        told = event.get("usage") or {}
        reading.usage |= {name: value for name, value in told.items() if value is not None}
        reading.kv_cache |= told.get("kv_cache") or {}
    elif kind == "message_stop":
        reading.is_complete = True
    elif kind == "content_block_delta":
        delta = event["delta"]
        reading.text.append(_words(delta.get("text")))
        reading.reasoning.append(_words(delta.get("thinking")))
    return kind in ("content_block_delta", "message_stop")


def read_responses(reading: Reading, event: Event) -> bool:
    """Take an event of Responses; say whether it brings output."""
    kind = event.get("type") or ""
    if kind in ("response.failed", "error"):
        told = (event.get("response") or {}).get("error") or event.get("error") or event
        reading.error = json.dumps(told)[:ERROR_CHARS_MAX]
    elif kind in ("response.completed", "response.incomplete"):
        reading.usage |= event["response"].get("usage") or {}
        reading.kv_cache |= reading.usage.get("kv_cache") or {}
        reading.is_complete = True
    elif kind == "response.output_text.delta":
        reading.text.append(_words(event.get("delta")))
    elif kind == "response.reasoning_text.delta":
        reading.reasoning.append(_words(event.get("delta")))
    return kind.endswith(".delta") or reading.is_complete


def _words(value: object) -> str:
    return value if isinstance(value, str) else ""


READERS: dict[str, Callable[[Reading, Event], bool]] = {
    "chat": read_chat,
    "messages": read_messages,
    "responses": read_responses,
}


def tokens_of(dialect: str, reading: Reading) -> Tokens | None:
    """Return what the usage tells, in any of the three shapes; None without one that counts.

    A server that does not say what it prefilled is believed to have prefilled what it did not
    find.
    """
    try:
        return _counted(dialect, reading.usage, reading.kv_cache) if reading.usage else None
    except (AttributeError, ValueError):
        return None


def _counted(dialect: str, usage: dict[str, Any], kv_cache: dict[str, Any]) -> Tokens:
    if dialect == "messages":
        cached = _count(usage.get("cache_read_input_tokens"))
        fresh = _count(usage.get("input_tokens"))
        prompt = fresh + cached + _count(usage.get("cache_creation_input_tokens"))
        completion = _count(usage.get("output_tokens"))
    else:
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        cached = _count(details.get("cached_tokens"))
        prompt = _count(usage.get("prompt_tokens") or usage.get("input_tokens"))
        completion = _count(usage.get("completion_tokens") or usage.get("output_tokens"))
    prefilled = kv_cache.get("prefilled")
    return Tokens(
        prompt=prompt,
        cached=cached,
        prefilled=max(0, prompt - cached) if prefilled is None else _count(prefilled),
        completion=completion,
        source=_words(kv_cache.get("source")),
    )


def _count(value: object) -> int:
    """Return a count that a server has told; 0 where it tells none.

    Raises:
        ValueError: it is no count.
    """
    if not value:
        return 0
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not is_whole or not 0 <= value <= COUNT_MAX:  # type: ignore[operator]
        raise ValueError("a usage counts in whole numbers")
    return int(value)  # type: ignore[call-overload, no-any-return]


# ---------------------------------------------------------------- sending


async def send(
    session: aiohttp.ClientSession,
    path: str,
    dialect: str,
    body: Event,
    headers: Mapping[str, str],
    on_taken: Callable[[str], None] = lambda request_id: None,
    on_event: Callable[[str, float], None] = lambda data, now_s: None,
) -> Outcome:
    """Stream one request to its end. Whatever a server does wrong is an Outcome.

    `on_taken` is called with the request's id as soon as the server begins to answer it, `on_event`
    with the data of each event and when it came, by `time.perf_counter`.
    """
    start = time.perf_counter()
    reading, first_s, status, request_id = Reading(), None, 0, ""
    error = ""
    try:
        async with session.post(
            path, json=body, headers=headers, allow_redirects=False
        ) as response:
            status = response.status
            request_id = response.headers.get("x-request-id", "")
            if status != 200:
                told = (await body_of(response)).decode(errors="replace")
                error = f"{status} {told[:ERROR_CHARS_MAX]}"
            else:
                on_taken(request_id)
                events = SseReader()
                async for chunk in chunks_of(response):
                    now_s = time.perf_counter()
                    for data in events.feed(chunk):
                        if _take(dialect, reading, data) and first_s is None:
                            first_s = now_s - start
                        on_event(data, now_s)
                for data in events.close():
                    _take(dialect, reading, data)
                    on_event(data, time.perf_counter())
    except (aiohttp.ClientError, TimeoutError) as problem:
        error = f"{type(problem).__name__} {problem}"[:ERROR_CHARS_MAX]
    tokens = tokens_of(dialect, reading)
    error = error or reading.error
    if not error and not reading.is_complete:
        error = "the stream broke off"
    if not error and tokens is None:
        error = "the stream told no usage"
    total_s = time.perf_counter() - start
    return Outcome(status, tokens, first_s, total_s, error, reading, request_id)


def _take(dialect: str, reading: Reading, data: str) -> bool:
    if data.strip() == "[DONE]":
        return False
    try:
        return READERS[dialect](reading, json.loads(data))
    except ODD_FORM:  # it is no event, or its parts are of other types
        reading.error = f"unreadable event of {len(data)} characters"
        return False


async def chunks_of(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the bytes of an answer as they come.

    Raises:
        aiohttp.ClientPayloadError: there are more than STREAM_BYTES_MAX.
    """
    length = 0
    async for chunk in response.content.iter_any():
        length += len(chunk)
        if length > STREAM_BYTES_MAX:
            raise aiohttp.ClientPayloadError(f"an answer of more than {STREAM_BYTES_MAX} bytes")
        yield chunk


async def body_of(response: aiohttp.ClientResponse) -> bytes:
    """Return the beginning of a body, BODY_BYTES_MAX at most."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) >= BODY_BYTES_MAX:
            break
    return bytes(body[:BODY_BYTES_MAX])


async def first_model(session: aiohttp.ClientSession, headers: Mapping[str, str]) -> str:
    """Return the name of the first model that a server lists.

    Raises:
        aiohttp.ClientError, TimeoutError: it does not answer, or with an error.
        LookupError: it lists none.
    """
    async with session.get("/v1/models", headers=headers, allow_redirects=False) as response:
        response.raise_for_status()
        try:
            name = json.loads(await body_of(response))["data"][0]["id"]
        except (ValueError, TypeError, LookupError, RecursionError):
            name = None
    if not isinstance(name, str):
        raise LookupError("the server lists no model")
    return name


async def prompt_ids(
    session: aiohttp.ClientSession, request_id: str, headers: Mapping[str, str]
) -> list[int] | None:
    """Return the token ids of a prompt just sent; None where the server does not tell them."""
    if not request_id:
        return None
    try:
        async with session.get(
            f"/v1/cache/prompts/{request_id}", headers=headers, allow_redirects=False
        ) as response:
            if response.status != 200:
                return None
            told = json.loads(b"".join([part async for part in chunks_of(response)]))
    except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError):
        return None
    ids = told.get("ids") if isinstance(told, dict) else None
    is_told = isinstance(ids, list) and all(isinstance(each, int) for each in ids)
    return ids if is_told else None
