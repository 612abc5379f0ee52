"""Writes an answer as Ollama's /api/chat and /api/generate do, whole or as a stream of lines."""

import functools
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from hearth.proxy.api.answer_frames import (
    AdmittedRequest,
    FrameWriter,
    extra_fields,
    logprob_entries,
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
_MORE: Final = {"done": False}  # in every line but the last


def json_line(data: dict[str, Any]) -> bytes:
    """Return one line of a stream."""
    return orjson.dumps(data) + b"\n"


def timestamp(at_s: float | None = None) -> str:
    """Return the wall-clock time `at_s`, by default now, as the API writes it."""
    at = datetime.now(UTC) if at_s is None else datetime.fromtimestamp(at_s, UTC)
    return at.isoformat().replace("+00:00", "Z")


def empty_answer(dialect: Dialect, model: str, reason: str) -> dict[str, Any]:
    """Return the answer to a request without a question; `reason` is "load" or "unload"."""
    return _answer(dialect, model) | {"done": True, "done_reason": reason}


def _answer(
    dialect: Dialect,
    model: str,
    *,
    content: str = "",
    thinking: str = "",
    calls: Sequence[dict[str, Any]] = (),
    logprobs: Sequence[TokenLogprob] = (),
) -> dict[str, Any]:
    answer: dict[str, Any] = {"model": model, "created_at": timestamp()}
    extras: dict[str, Any] = {"thinking": thinking} if thinking else {}
    if calls:
        extras["tool_calls"] = calls
    if dialect == CHAT:
        answer["message"] = {"role": "assistant", "content": content, **extras}
    else:
        answer |= {"response": content, **extras}
    if logprobs:
        answer["logprobs"] = logprob_entries(logprobs)
    return answer


def _dialect_and_model(admitted: AdmittedRequest) -> tuple[Dialect, str]:
    return admitted.request.dialect, admitted.request.model or admitted.model


def _call(call: CallStart, text: str, index: int, *, is_cut: bool = False) -> list[dict[str, Any]]:
    """Return the call with `text` as its arguments, or `{}` if `text` is not an object.

    With `is_cut` the answer was cut off. A call whose arguments are incomplete is then left out.
    """
    arguments = tools.object_fragment(text or "{}")
    if arguments is None and is_cut:
        return []
    function = {"index": index, "name": call.name, "arguments": arguments or {}}
    return [{"id": call.id, "function": function}]


def _end(admitted: AdmittedRequest, finished: Finished, content: str) -> dict[str, Any]:
    """Return the fields at the end of an answer; `content` is the answer's whole text.

    Durations are in ns. Reading and answering take at least 1 ms, as clients divide by these. The
    load duration is the rest: loading the model, and waiting in the queue.
    """
    request, usage = admitted.request, finished.usage
    read_ms = max(1, usage.ttft_ms - usage.queue_ms)
    answer_ms = max(1, usage.finish_ms - usage.ttft_ms)
    total_ms = max(round((awake_s() - admitted.received_at) * 1000), read_ms + answer_ms)
    fields: dict[str, Any] = {
        "done": True,
        "done_reason": "length" if finished.reason == "length" else "stop",
        "total_duration": total_ms * _NS_PER_MS,
        "load_duration": (total_ms - read_ms - answer_ms) * _NS_PER_MS,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": read_ms * _NS_PER_MS,
        "eval_count": usage.completion_tokens,
        "eval_duration": answer_ms * _NS_PER_MS,
    }
    if request.dialect != CHAT and request.prompt.messages:  # empty for a raw prompt
        fields["context"] = context_of(request.prompt.messages, content)
    return fields | extra_fields(usage)


async def whole(admitted: AdmittedRequest) -> dict[str, Any]:
    """Return the answer once it is complete.

    Raises:
        RequestError: the answer failed.
    """
    (choice,), _ = await whole_choices(admitted)
    content, end, last = choice.text("content"), choice.finished, len(choice.calls) - 1
    is_open = bool(choice.parts) and choice.parts[-1][1] is not None
    calls = [
        call_fields
        for index, (call, text) in enumerate(choice.calls)
        for call_fields in _call(call, text, index, is_cut=end.is_cut and is_open and index == last)
    ]
    answer = _answer(
        *_dialect_and_model(admitted),
        content=content,
        thinking=choice.text("reasoning"),
        calls=calls,
        logprobs=choice.logprobs,
    )
    return answer | _end(admitted, end, content)


class OllamaWriter(FrameWriter):
    """Writes one stream's lines, each with a piece of the answer or with complete calls.

    The keep-alive line has an empty piece, as JSON lines have no comments.
    """

    def __init__(self, admitted: AdmittedRequest) -> None:
        self._admitted = admitted
        self._line_fields = functools.partial(_answer, *_dialect_and_model(admitted))
        self._contents: list[str] = []
        self._call: CallStart | None = None  # call that is being written
        self._arguments: list[str] = []  # pieces of that call's arguments
        self._count = 0  # calls sent so far

    def delta_frames(self, _index: int, event: Delta) -> list[bytes]:
        is_call = event.channel == "tool_call"
        has_ended = event.call is not None or (event.text and not is_call)
        fields: dict[str, Any] = {
            "calls": self._end_call() if has_ended else [],
            "logprobs": event.logprobs,
        }
        if is_call:
            self._call = event.call or self._call
            self._arguments.append(event.text)
        elif event.channel == "reasoning":
            fields["thinking"] = event.text
        else:
            fields["content"] = event.text
            self._contents.append(event.text)
        return [json_line(self._line_fields(**fields) | _MORE)] if any(fields.values()) else []

    def final_frames(self, _index: int, event: Finished, _usage: Usage | None) -> list[bytes]:
        calls = self._end_call(is_cut=event.is_cut)
        lines = [json_line(self._line_fields(calls=calls) | _MORE)] if calls else []
        end = _end(self._admitted, event, "".join(self._contents))
        return [*lines, json_line(self._line_fields() | end)]

    def keep_alive_frame(self) -> bytes:
        return json_line(self._line_fields() | _MORE)

    def error_frames(self, error: RequestError) -> list[bytes]:
        return [error_event(error)]

    def _end_call(self, *, is_cut: bool = False) -> list[dict[str, Any]]:
        """Return the call that was being written; [] if there is none."""
        call, text = self._call, "".join(self._arguments)
        self._call, self._arguments = None, []
        calls = [] if call is None else _call(call, text, self._count, is_cut=is_cut)
        self._count += len(calls)
        return calls
