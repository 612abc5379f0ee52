"""Turns our events into the answers of Ollama's /api/chat and /api/generate, whole or as lines."""

import functools
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from hearth.proxy.api.answer_frames import (
    AdmittedRequest,
    FrameWriter,
    extra_fields,
    logprob_rows,
    whole_choices,
)
from hearth.proxy.api.body import tool_definitions as tools
from hearth.proxy.api.ollama.errors import error_event
from hearth.proxy.api.ollama.parse import CHAT, context_of
from hearth.proxy.request.parsed_request import Dialect
from hearth.shared.errors import RequestError
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import CallStart, Delta, Finished, TokenLogprob, Usage

MEDIA_TYPE: Final = b"application/x-ndjson"
_NS_PER_MS: Final = 1_000_000
_MORE: Final = {"done": False}  # of a line that another follows


def line(row: dict[str, Any]) -> bytes:
    """Return one line of a stream."""
    return orjson.dumps(row) + b"\n"


def timestamp(at_s: float | None = None) -> str:
    """Return the time `at_s` of the clock on the wall, or now, as the API writes it."""
    at = datetime.now(UTC) if at_s is None else datetime.fromtimestamp(at_s, UTC)
    return at.isoformat().replace("+00:00", "Z")


def empty_answer(dialect: Dialect, model: str, reason: str) -> dict[str, Any]:
    """Return the whole answer to a request that asked nothing: `reason` is "load" or "unload"."""
    return _row(dialect, model) | {"done": True, "done_reason": reason}


def _row(
    dialect: Dialect,
    model: str,
    *,
    content: str = "",
    thinking: str = "",
    calls: Sequence[dict[str, Any]] = (),
    logprobs: Sequence[TokenLogprob] = (),
) -> dict[str, Any]:
    row: dict[str, Any] = {"model": model, "created_at": timestamp()}
    told: dict[str, Any] = {"thinking": thinking} if thinking else {}
    if calls:
        told["tool_calls"] = calls
    if dialect == CHAT:
        row["message"] = {"role": "assistant", "content": content, **told}
    else:
        row |= {"response": content, **told}
    if logprobs:
        row["logprobs"] = logprob_rows(logprobs)
    return row


def _told_as(admitted: AdmittedRequest) -> tuple[Dialect, str]:
    return admitted.request.dialect, admitted.request.model or admitted.model


def _call(call: CallStart, text: str, index: int, *, is_cut: bool = False) -> list[dict[str, Any]]:
    """Return the call of a `text`, with `{}` for one that is no object.

    `is_cut`: the answer was cut off; such a call can't be made, so it is left out.
    """
    arguments = tools.as_written(text or "{}")
    if arguments is None and is_cut:
        return []
    function = {"index": index, "name": call.name, "arguments": arguments or {}}
    return [{"id": call.id, "function": function}]


def _end(admitted: AdmittedRequest, finished: Finished, content: str) -> dict[str, Any]:
    """Return the fields of an answer's end; `content` is all that it said.

    Durations are in ns. Clients divide by them: nothing takes under 1 ms. Loading is all that is
    neither reading nor answering: the model's loading, and the queue.
    """
    request, usage = admitted.request, finished.usage
    read_ms = max(1, usage.ttft_ms - usage.queue_ms)
    answer_ms = max(1, usage.finish_ms - usage.ttft_ms)
    total_ms = max(round((awake_s() - admitted.came_at) * 1000), read_ms + answer_ms)
    row: dict[str, Any] = {
        "done": True,
        "done_reason": "length" if finished.reason == "length" else "stop",
        "total_duration": total_ms * _NS_PER_MS,
        "load_duration": (total_ms - read_ms - answer_ms) * _NS_PER_MS,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": read_ms * _NS_PER_MS,
        "eval_count": usage.completion_tokens,
        "eval_duration": answer_ms * _NS_PER_MS,
    }
    if request.dialect != CHAT and request.prompt.messages:  # not of a raw prompt
        row["context"] = context_of(request.prompt.messages, content)
    return row | extra_fields(usage)


async def whole(admitted: AdmittedRequest) -> dict[str, Any]:
    """Return the answer once it is complete.

    Raises:
        RequestError: it broke off.
    """
    (choice,), _ = await whole_choices(admitted)
    content, end, last = choice.text("content"), choice.end, len(choice.calls) - 1
    is_open = bool(choice.parts) and choice.parts[-1][1] is not None
    calls = [
        called
        for index, (call, text) in enumerate(choice.calls)
        for called in _call(call, text, index, is_cut=end.is_cut and is_open and index == last)
    ]
    said = _row(
        *_told_as(admitted),
        content=content,
        thinking=choice.text("reasoning"),
        calls=calls,
        logprobs=choice.logprobs,
    )
    return said | _end(admitted, end, content)


class OllamaWriter(FrameWriter):
    """Writes one stream's lines: a part of the answer in each, calls when they are whole.

    A sign of life is an empty part, as there are no comments in JSON lines.
    """

    def __init__(self, admitted: AdmittedRequest) -> None:
        self._admitted = admitted
        self._row = functools.partial(_row, *_told_as(admitted))
        self._contents: list[str] = []
        self._call: CallStart | None = None  # that is being written
        self._arguments: list[str] = []  # of that
        self._count = 0  # calls that were whole

    def grown(self, _index: int, row: Delta) -> list[bytes]:
        is_call = row.channel == "tool_call"
        has_ended = row.call is not None or (row.text and not is_call)
        said: dict[str, Any] = {
            "calls": self._ended() if has_ended else [],
            "logprobs": row.logprobs,
        }
        if is_call:
            self._call = row.call or self._call
            self._arguments.append(row.text)
        elif row.channel == "reasoning":
            said["thinking"] = row.text
        else:
            said["content"] = row.text
            self._contents.append(row.text)
        return [line(self._row(**said) | _MORE)] if any(said.values()) else []

    def ended(self, _index: int, row: Finished, _usage: Usage | None) -> list[bytes]:
        calls = self._ended(is_cut=row.is_cut)
        told = [line(self._row(calls=calls) | _MORE)] if calls else []
        end = _end(self._admitted, row, "".join(self._contents))
        return [*told, line(self._row() | end)]

    def alive(self) -> bytes:
        return line(self._row() | _MORE)

    def broken(self, error: RequestError) -> list[bytes]:
        return [error_event(error)]

    def _ended(self, *, is_cut: bool = False) -> list[dict[str, Any]]:
        """Return the call that was being written, if one was."""
        call, text = self._call, "".join(self._arguments)
        self._call, self._arguments = None, []
        calls = [] if call is None else _call(call, text, self._count, is_cut=is_cut)
        self._count += len(calls)
        return calls
