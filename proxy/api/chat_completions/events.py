"""Writes an answer as OpenAI's chat completion, whole or as a stream of chunks."""

import time
from collections.abc import Collection
from typing import Any, Final

import orjson

from hearth.proxy.api.answer_frames import (
    AdmittedRequest,
    FrameWriter,
    WholeChoice,
    extra_fields,
    image_fields,
    logprob_entries,
    prediction_fields,
    prefill_fields,
    whole_choices,
)
from hearth.proxy.api.body import tool_definitions as tools
from hearth.proxy.api.chat_completions.errors import error_event
from hearth.proxy.api.chat_completions.parse import custom_names, is_legacy
from hearth.proxy.api.server_sent_events import SSE_DONE, sse_data
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import CallStart, Delta, Finished, TokenLogprob, Usage

_CHUNK_END: Final = b',"finish_reason":null}]}\n\n'


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Return `usage` in the fields of chat completions, with the fields that Hearth adds."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens} | image_fields(usage),
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            **prediction_fields(usage),
        },
        **extra_fields(usage),
    }


def logprob_fields(logprobs: list[TokenLogprob]) -> dict[str, Any]:
    """Return the `logprobs` field of a choice."""
    return {"content": logprob_entries(logprobs), "refusal": None}


def base_fields(admitted: AdmittedRequest, kind: str, prefix: str = "chatcmpl") -> dict[str, Any]:
    """Return the first fields of a completion or of one of its chunks."""
    return {
        "id": f"{prefix}-{admitted.answer.request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": admitted.model,
    }


# ---------------------------------------------------------------- one choice as deltas


class _DeltaWriter:
    """Writes one choice as the API's deltas, and numbers its calls.

    The text of a custom tool is held back until it is complete, as the model writes it inside JSON.
    """

    def __init__(self, body: dict[str, Any]) -> None:
        """Choose the form of the calls by the request's `body`."""
        self._custom = custom_names(body)
        self._is_legacy = is_legacy(body)
        self._calls = 0
        self._open: CallStart | None = None  # custom call that is being written
        self._arguments: list[str] = []  # pieces of the custom call's arguments

    def deltas(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the API's deltas for `delta`, of which the last one has the log probabilities."""
        if delta.channel == "tool_call":
            deltas = self._call_deltas(delta)
        else:
            name = "reasoning_content" if delta.channel == "reasoning" else "content"
            deltas = [{name: delta.text}] if delta.text else []
        return deltas or ([{}] if delta.logprobs else [])

    def _call_deltas(self, delta: Delta) -> list[dict[str, Any]]:
        if delta.call is None:
            if self._open is None:
                return [self._delta({"function": {"arguments": delta.text}})] if delta.text else []
            self._arguments.append(delta.text)
            return []
        ended = self.close()
        self._calls += 1
        if delta.call.name in self._custom:
            self._open, self._arguments = delta.call, [delta.text]
            return ended
        return [*ended, self._delta(_call(delta.call, delta.text, self._custom))]

    def _delta(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the delta of the newest call, or of a piece of its arguments."""
        if self._is_legacy:
            return {"function_call": call["function"]}
        return {"tool_calls": [{"index": self._calls - 1, **call}]}

    def close(self) -> list[dict[str, Any]]:
        """Return the delta of the custom call that was held back, if there was one."""
        call, self._open = self._open, None
        if call is None:
            return []
        return [self._delta(_call(call, "".join(self._arguments), self._custom))]


def _call(call: CallStart, text: str, custom: Collection[str]) -> dict[str, Any]:
    """Return a call; `text` is its arguments, or perhaps only their beginning for a function."""
    if call.name in custom:
        fields = {"name": call.name, "input": tools.free_text(text)}
        return {"id": call.id, "type": "custom", "custom": fields}
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": text},
    }


def _reason(finished: Finished, body: dict[str, Any]) -> str:
    """Return the finish reason in the API's words."""
    called = "function_call" if is_legacy(body) else "tool_calls"
    return called if finished.reason == "tool_calls" else finished.reason


# ---------------------------------------------------------------- the whole answer


def _message(choice: WholeChoice, body: dict[str, Any]) -> dict[str, Any]:
    """Return the message, with null as the content if there are only calls."""
    calls = [_call(*call, custom_names(body)) for call in choice.calls]
    content = choice.text("content") or (None if calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning := choice.text("reasoning"):
        message["reasoning_content"] = reasoning
    if calls and is_legacy(body):
        message["function_call"] = calls[0]["function"]
    elif calls:
        message["tool_calls"] = calls
    return message


async def whole(admitted: AdmittedRequest) -> dict[str, Any]:
    """Return the completion once all of its choices are complete.

    Raises:
        RequestError: one choice failed.
    """
    body = admitted.request.body
    wants_logprobs = admitted.request.sampling.top_logprobs is not None
    wholes, usage = await whole_choices(admitted)
    choices = [
        {
            "index": index,
            "message": _message(choice, body),
            "logprobs": logprob_fields(choice.logprobs) if wants_logprobs else None,
            "finish_reason": _reason(choice.finished, body),
        }
        for index, choice in enumerate(wholes)
    ]
    return base_fields(admitted, "chat.completion") | {
        "choices": choices,
        "usage": usage_fields(usage),
    }


# ---------------------------------------------------------------- the stream


class ChatWriter(FrameWriter):
    """Writes one stream's chunks; the fields that all chunks of a choice share are encoded once."""

    def __init__(self, admitted: AdmittedRequest) -> None:
        count = len(admitted.answers)
        self._answer = admitted.answer
        self._body = admitted.request.body
        self._includes_usage = admitted.request.include_usage
        self._base_fields = base_fields(admitted, "chat.completion.chunk")
        opening = sse_data(self._base_fields).removesuffix(b"}\n\n")
        self._heads = [opening + b',"choices":[{"index":%d,"delta":' % i for i in range(count)]
        self._writers = [_DeltaWriter(self._body) for _ in range(count)]

    def opening_frames(self) -> list[bytes]:
        """Return the first chunk of each choice."""
        return [
            self._chunk(index, {"role": "assistant", "content": ""})
            for index in range(len(self._heads))
        ]

    def delta_frames(self, index: int, event: Delta) -> list[bytes]:
        deltas = self._writers[index].deltas(event)
        if not event.logprobs:
            return [self._chunk(index, delta) for delta in deltas]
        *others, last = deltas
        rest = {"logprobs": logprob_fields(event.logprobs), "finish_reason": None}
        return [*(self._chunk(index, delta) for delta in others), self._chunk(index, last, rest)]

    def final_frames(self, index: int, event: Finished, usage: Usage | None) -> list[bytes]:
        deltas = self._writers[index].close()
        if usage is not None:
            deltas.append({"content": "", "provider_specific_fields": extra_fields(usage)})
        chunks = [self._chunk(index, delta) for delta in deltas]
        chunks.append(self._chunk(index, {}, {"finish_reason": _reason(event, self._body)}))
        if usage is not None and self._includes_usage:
            chunks.append(
                sse_data(self._base_fields | {"choices": [], "usage": usage_fields(usage)})
            )
        return chunks if usage is None else [*chunks, SSE_DONE]

    def keep_alive_frame(self) -> bytes:
        choices = [{"index": 0, "delta": {}, "finish_reason": None}]
        return sse_data(
            self._base_fields | {"choices": choices, "prefill": prefill_fields(self._answer)}
        )

    def error_frames(self, error: RequestError) -> list[bytes]:
        return [error_event(error)]

    def _chunk(
        self, index: int, delta: dict[str, Any], rest: dict[str, Any] | None = None
    ) -> bytes:
        """Return a chunk of one choice; `rest` has the choice's fields after the delta."""
        head = self._heads[index] + orjson.dumps(delta)
        if rest is None:
            return head + _CHUNK_END
        return head + b"," + orjson.dumps(rest)[1:] + b"]}\n\n"
