"""Writes an answer as Anthropic's message, whole or as a stream of events."""

import re
from typing import Any, Final

import orjson

from hearth.proxy.api.answer_frames import (
    AdmittedRequest,
    FrameWriter,
    extra_fields,
    prefill_fields,
    whole_choices,
)
from hearth.proxy.api.body import tool_definitions as tools
from hearth.proxy.api.messages.errors import error_event
from hearth.proxy.api.server_sent_events import sse_event
from hearth.proxy.pool.worker_link import AnswerStream
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import CallStart, Delta, Finished, Usage

_STOP_REASONS: Final = {
    **{"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"},
    "prefilled": "max_tokens",  # the request set max_tokens to 0
}
_DELTA_HEAD: Final = b"event: content_block_delta\ndata: "
_DELTAS: Final = {  # type and field of a delta, by channel
    "tool_call": ("input_json_delta", "partial_json"),
    "reasoning": ("thinking_delta", "thinking"),
    "content": ("text_delta", "text"),
}
_BLANKS: Final = r"[ \t\r\n]*"  # white space in JSON
_BEGINNING: Final = re.compile(  # beginning of a tool's input, which may be no object
    rf'{_BLANKS}(?:(?P<object>\{{{_BLANKS}["}}])|\{{{_BLANKS}[^ \t\r\n"}}]|[^ \t\r\n{{])'
)
_HIDDEN: Final = "omitted"  # thinking.display of clients that only want the signature


def usage_fields(usage: Usage, is_marked: bool) -> dict[str, Any]:
    """Return `usage` in the fields of Messages; the three input fields add up to the prompt.

    The tokens that were not cached were prefilled. They count as cache creation if the client
    marked parts for caching (`is_marked`), else as plain input.
    """
    return {
        **_input_fields(usage, is_marked),
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        **extra_fields(usage),
    }


def _input_fields(prompt: Usage | AnswerStream, is_marked: bool) -> dict[str, int]:
    fresh = prompt.prompt_tokens - prompt.cached_tokens
    return {
        "input_tokens": 0 if is_marked else fresh,
        "cache_creation_input_tokens": fresh if is_marked else 0,
        "cache_read_input_tokens": prompt.cached_tokens,
    }


def _is_marked(admitted: AdmittedRequest) -> bool:
    """Return whether the client marked any part with `cache_control`."""
    body = admitted.request.body
    blocks: list[Any] = [body]
    for value in (body.get("tools"), body.get("system"), body.get("messages")):
        blocks += _within(value)
    return any(type(block) is dict and bool(block.get("cache_control")) for block in blocks)


def _within(content: Any) -> list[Any]:
    """Return the items of `content` and all items within them: messages, blocks, result blocks."""
    items = content if type(content) is list else []
    contents = (item.get("content") for item in items if type(item) is dict)
    return [*items, *(block for inner in contents for block in _within(inner))]


def _ending(finished: Finished) -> dict[str, Any]:
    reason = _STOP_REASONS.get(finished.reason, "end_turn")
    if finished.stop_sequence is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": finished.stop_sequence}


def _shell(admitted: AdmittedRequest, is_marked: bool) -> dict[str, Any]:
    """Return the message without its content."""
    answer = admitted.answer
    return {
        "id": f"msg_{answer.request_id}",
        "type": "message",
        "role": "assistant",
        "model": admitted.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _input_fields(answer, is_marked) | {"output_tokens": 0},
    }


def _block(channel: str, call: CallStart | None, text: str, signature: str) -> dict[str, Any]:
    """Return a block with `text`; a stream opens the block with "" as its text."""
    if call is not None:
        match = _BEGINNING.match(text)
        tool_input = tools.complete_pairs(text) if match and match["object"] else {}
        # The id stays unchanged, as the worker finds the turn by this id.
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": tool_input}
    if channel == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": signature}
    return {"type": "text", "text": text}


def _hides_thinking(admitted: AdmittedRequest) -> bool:
    thinking = admitted.request.body.get("thinking")
    return type(thinking) is dict and thinking.get("display") == _HIDDEN


async def whole(admitted: AdmittedRequest) -> dict[str, Any]:
    """Return the message once it is complete.

    Raises:
        RequestError: the answer failed.
    """
    (choice,), usage = await whole_choices(admitted)
    is_marked, hides = _is_marked(admitted), _hides_thinking(admitted)
    blocks = [
        _block(
            *(channel, call),
            "" if hides and channel == "reasoning" else "".join(texts),
            admitted.answer.signature,
        )
        for channel, call, texts in choice.parts
    ]
    if not blocks and choice.finished.reason != "prefilled":
        blocks = [{"type": "text", "text": ""}]
    fields = {"content": blocks, "usage": usage_fields(usage, is_marked)}
    return _shell(admitted, is_marked) | fields | _ending(choice.finished)


class MessageWriter(FrameWriter):
    """Writes the events of one message: it opens, extends and closes the message's blocks.

    The deltas of a tool's input must add up to an object, as other texts are errors in clients'
    SDKs. A text that does not begin as an object is sent as `{}`. An object that was cut off stays
    cut off: if it were closed, a client would run half a command. An answer that is not streamed
    has the object's complete pairs.
    """

    def __init__(self, admitted: AdmittedRequest) -> None:
        self._admitted, self._answer = admitted, admitted.answer
        self._index = -1  # index of the newest block
        self._channel = ""  # channel of the open block; "" = none is open
        self._input = ""  # white space before the input of the open call
        self._is_object: bool | None = None  # type of the open call's input; None = not known yet
        self._is_marked = _is_marked(admitted)
        self._hides_thinking = _hides_thinking(admitted)

    def opening_frames(self) -> list[bytes]:
        shell = _shell(self._admitted, self._is_marked)
        return [sse_event("message_start", {"message": shell}), self.keep_alive_frame()]

    def final_frames(self, _index: int, event: Finished, _usage: Usage | None) -> list[bytes]:
        """Return the last events; a message without any block gets an empty text block."""
        is_empty = self._index < 0 and event.reason != "prefilled"
        frames = [self._open(Delta("", 0, "content", ""))] if is_empty else []
        message_delta = {
            "delta": _ending(event),
            "usage": usage_fields(event.usage, self._is_marked),
        }
        ends = [sse_event("message_delta", message_delta), sse_event("message_stop", {})]
        return [*frames, *self._close(is_cut=event.is_cut), *ends]

    def keep_alive_frame(self) -> bytes:
        return sse_event("ping", {"prefill": prefill_fields(self._answer)})

    def error_frames(self, error: RequestError) -> list[bytes]:
        return [error_event(error)]

    def delta_frames(self, _index: int, delta: Delta) -> list[bytes]:
        """Return the events for `delta`, which may close one block and open the next."""
        frames = []
        if delta.call is not None or delta.channel != self._channel:
            if delta.call is None and not delta.text:
                return []  # an empty text opens no block
            frames = [*self._close(), self._open(delta)]
        text = delta.text
        if self._channel == "tool_call":
            if self._is_object is None:
                self._input = text = self._input + text
                if match := _BEGINNING.match(text):
                    self._is_object = bool(match["object"])
            text = text if self._is_object else ""
        if text and not (self._channel == "reasoning" and self._hides_thinking):
            frames.append(self._delta(text))
        return frames

    def _close(self, *, is_cut: bool = False) -> list[bytes]:
        """Return the events that close the open block; none if no block is open."""
        if not self._channel:
            return []
        frames = []
        if self._channel == "tool_call" and not self._is_object:
            is_bare = is_cut and self._is_object is None  # a client would run a call with {}
            cut = self._input if self._input.strip() else "{"
            frames.append(self._delta(cut if is_bare else "{}"))
        elif self._channel == "reasoning" and (signature := self._answer.signature):
            signed = {"type": "signature_delta", "signature": signature}
            signing = {"index": self._index, "delta": signed}
            frames.append(sse_event("content_block_delta", signing))
        self._channel = ""
        return [*frames, sse_event("content_block_stop", {"index": self._index})]

    def _open(self, delta: Delta) -> bytes:
        self._index, self._channel, self._input = self._index + 1, delta.channel, ""
        self._is_object = None
        start = {"index": self._index, "content_block": _block(delta.channel, delta.call, "", "")}
        return sse_event("content_block_start", start)

    def _delta(self, text: str) -> bytes:
        kind, name = _DELTAS[self._channel]
        data = {
            "type": "content_block_delta",
            "index": self._index,
            "delta": {"type": kind, name: text},
        }
        return _DELTA_HEAD + orjson.dumps(data) + b"\n\n"  # like `sse_event`, but twice as fast
