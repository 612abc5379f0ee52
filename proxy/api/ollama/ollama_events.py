"""Turns our events into the answers of Ollama's /api/chat and /api/generate, whole or as lines."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from hearth.proxy.api.answer_frames import frames
from hearth.proxy.api.body import tool_definitions as tools
from hearth.proxy.api.body.logprob_rows import logprob_rows
from hearth.proxy.api.ollama.generate_context import context_of
from hearth.proxy.api.ollama.ollama_request import CHAT
from hearth.proxy.api.usage_extras import extra_fields
from hearth.proxy.request.parsed_request import AdmittedRequest, Dialect
from hearth.shared.errors import RequestError
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import CallStart, Delta, Finished, TokenLogprob, Usage

MEDIA_TYPE: Final = b"application/x-ndjson"
_NS_PER_MS: Final = 1_000_000


def line(row: dict[str, Any]) -> bytes:
    """Return one line of a stream."""
    return orjson.dumps(row) + b"\n"


def timestamp(at_s: float | None = None) -> str:
    """Return the time `at_s` of the clock on the wall, or now, as the API writes it."""
    at = datetime.now(UTC) if at_s is None else datetime.fromtimestamp(at_s, UTC)
    return at.isoformat().replace("+00:00", "Z")


def empty_answer(dialect: Dialect, model: str, reason: str) -> dict[str, Any]:
    """Return the whole answer to a request that asked nothing: `reason` is "load" or "unload"."""
    return _row(dialect, model, _Said()) | {"done": True, "done_reason": reason}


@dataclass(slots=True)
class _Said:
    """What an answer says, or a part of that."""

    content: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.thinking or self.calls or self.logprobs)


def _row(dialect: Dialect, model: str, said: _Said) -> dict[str, Any]:
    row: dict[str, Any] = {"model": model, "created_at": timestamp()}
    told: dict[str, Any] = {"thinking": said.thinking} if said.thinking else {}
    if said.calls:
        told["tool_calls"] = said.calls
    if dialect == CHAT:
        row["message"] = {"role": "assistant", "content": said.content, **told}
    else:
        row |= {"response": said.content, **told}
    if said.logprobs:
        row["logprobs"] = logprob_rows(said.logprobs)
    return row


class _AnswerReader:
    """Reads one answer into what it says, each call whole. Owner: its HTTP task."""

    def __init__(self) -> None:
        self._call: CallStart | None = None  # that is being written
        self._arguments: list[str] = []  # of that
        self._count = 0  # calls that were whole

    def said(self, delta: Delta) -> _Said:
        """Return what can be told of `delta`: of a call nothing, until it has ended."""
        is_speech = delta.channel != "tool_call"
        ended = self.rest() if delta.call or (is_speech and delta.text) else _Said()
        ended.logprobs = delta.logprobs
        if delta.channel == "reasoning":
            ended.thinking = delta.text
        elif is_speech:
            ended.content = delta.text
        else:
            self._call = delta.call or self._call
            self._arguments.append(delta.text)
        return ended

    def rest(self, *, is_cut: bool = False) -> _Said:
        """Return the call that was being written, `{}` for a text that is no object.

        `is_cut`: the answer was cut off; such a call can't be made, so it is left out.
        """
        call, text = self._call, "".join(self._arguments)
        self._call, self._arguments = None, []
        arguments = tools.as_written(text or "{}")
        if call is None or (arguments is None and is_cut):
            return _Said()
        index, self._count = self._count, self._count + 1
        function = {"index": index, "name": call.name, "arguments": arguments or {}}
        return _Said(calls=[{"id": call.id, "function": function}])


def _end(admitted: AdmittedRequest, finished: Finished, content: str) -> dict[str, Any]:
    """Return the fields of an answer's end; `content` is all that it said."""
    total_ms = round((awake_s() - admitted.came_at) * 1000)
    reason = "length" if finished.reason == "length" else "stop"
    row = {"done": True, "done_reason": reason, **_durations(finished.usage, total_ms)}
    request = admitted.request
    if request.dialect != CHAT and request.prompt.messages:  # not of a raw prompt
        row["context"] = context_of(request.prompt.messages, content)
    return row | extra_fields(finished.usage)


def _durations(usage: Usage, total_ms: int) -> dict[str, int]:
    """Return the API's figures, which are ns. Clients divide by them: nothing takes under 1 ms.

    Loading is all that is neither reading nor answering: the model's loading, and the queue.
    """
    read_ms = max(1, usage.ttft_ms - usage.queue_ms)
    answer_ms = max(1, usage.finish_ms - usage.ttft_ms)
    total_ms = max(total_ms, read_ms + answer_ms)
    return {
        "total_duration": total_ms * _NS_PER_MS,
        "load_duration": (total_ms - read_ms - answer_ms) * _NS_PER_MS,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": read_ms * _NS_PER_MS,
        "eval_count": usage.completion_tokens,
        "eval_duration": answer_ms * _NS_PER_MS,
    }


async def whole(admitted: AdmittedRequest) -> dict[str, Any]:
    """Return the answer once it is complete.

    Raises:
        RequestError: it broke off.
    """
    answer, reader = admitted.answer, _AnswerReader()
    parts: list[_Said] = []
    try:
        while not isinstance(row := await answer.next_event(), Finished):
            if row is not None:
                parts.append(reader.said(row))
    finally:
        answer.close()
    parts.append(reader.rest(is_cut=row.is_cut))
    said = _Said(
        "".join(part.content for part in parts),
        "".join(part.thinking for part in parts),
        [call for part in parts for call in part.calls],
        [each for part in parts for each in part.logprobs],
    )
    return _shown(admitted, said) | _end(admitted, row, said.content)


class _LineWriter:
    """Writes one stream's lines: a part of the answer in each.

    A sign of life is an empty part, as there are no comments in JSON lines.
    """

    def __init__(self, admitted: AdmittedRequest) -> None:
        self._admitted = admitted
        self._reader = _AnswerReader()
        self._contents: list[str] = []

    def begun(self) -> list[bytes]:
        return []

    def grown(self, _index: int, row: Delta) -> list[bytes]:
        said = self._reader.said(row)
        self._contents.append(said.content)
        return self._parts(said)

    def ended(self, _index: int, row: Finished, _usage: Usage | None) -> list[bytes]:
        end = _end(self._admitted, row, "".join(self._contents))
        return [*self._parts(self._reader.rest(is_cut=row.is_cut)), self._line(_Said(), end)]

    def alive(self) -> bytes:
        return self._line(_Said(), {"done": False})

    def broken(self, error: RequestError) -> list[bytes]:
        return [line({"error": str(error)})]

    def _parts(self, said: _Said) -> list[bytes]:
        return [self._line(said, {"done": False})] if said else []

    def _line(self, said: _Said, end: dict[str, Any]) -> bytes:
        return line(_shown(self._admitted, said) | end)


def events(admitted: AdmittedRequest) -> AsyncGenerator[bytes, None]:
    """Return the lines of `admitted`."""
    return frames(admitted, _LineWriter(admitted))


def _shown(admitted: AdmittedRequest, said: _Said) -> dict[str, Any]:
    return _row(admitted.request.dialect, admitted.request.model or admitted.model, said)
