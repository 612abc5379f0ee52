"""Writes an answer as OpenAI's legacy completion, whole or as a stream of chunks."""

import codecs
from dataclasses import dataclass, field
from typing import Any

from hearth.proxy.api.answer_frames import LOGPROB_MIN, AdmittedRequest, FrameWriter, whole_choices
from hearth.proxy.api.chat_completions.events import base_fields, usage_fields
from hearth.proxy.api.completions.errors import error_event
from hearth.proxy.api.server_sent_events import SSE_DONE, sse_data
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Delta, Finished, TokenLogprob, Usage


@dataclass(slots=True)
class _TextWriter:
    """Writes the pieces of one choice, and counts characters for the offsets of its tokens."""

    index: int
    wants_logprobs: bool
    prefix: str  # prompt that the first piece repeats; "" for none
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )
    _offset: int = 0  # characters of all tokens so far

    def choice(
        self, text: str, logprobs: list[TokenLogprob] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        text, self.prefix = self.prefix + text, ""
        reason = "length" if reason == "prefilled" else reason  # the request asked for no tokens
        fields: dict[str, Any] | None = None
        if self.wants_logprobs and logprobs:
            offsets = []
            for entry in logprobs:
                offsets.append(self._offset)
                self._offset += len(self._decoder.decode(entry.token_bytes))
            fields = {
                "tokens": [entry.token for entry in logprobs],
                "token_logprobs": [max(entry.logprob, LOGPROB_MIN) for entry in logprobs],
                "top_logprobs": [_top(entry) for entry in logprobs],
                "text_offset": offsets,
            }
        return {"index": self.index, "text": text, "logprobs": fields, "finish_reason": reason}


def _top(entry: TokenLogprob) -> dict[str, float]:
    """Return the log probabilities of the likeliest tokens and of the sampled token, by text."""
    logprobs: dict[str, float] = {}
    for _, text, _, logprob in entry.top:  # likeliest first, and the first of equal texts counts
        logprobs.setdefault(text, max(logprob, LOGPROB_MIN))
    logprobs.setdefault(entry.token, max(entry.logprob, LOGPROB_MIN))
    return logprobs


def _writers(admitted: AdmittedRequest) -> list[_TextWriter]:
    request = admitted.request
    wants_logprobs = request.sampling.top_logprobs is not None
    echoes = bool(request.body.get("echo"))
    return [
        _TextWriter(index, wants_logprobs, (submission.prompt.text or "") if echoes else "")
        for index, submission in enumerate(request.submissions())
    ]


async def whole(admitted: AdmittedRequest) -> dict[str, Any]:
    """Return the completions once all are complete.

    Raises:
        RequestError: one choice failed.
    """
    wholes, usage = await whole_choices(admitted)
    choices = [
        writer.choice(choice.text("content"), choice.logprobs, choice.finished.reason)
        for writer, choice in zip(_writers(admitted), wholes, strict=True)
    ]
    return base_fields(admitted, "text_completion", "cmpl") | {
        "choices": choices,
        "usage": usage_fields(usage),
    }


class CompletionWriter(FrameWriter):
    """Writes one stream's chunks, each with a piece of one choice."""

    def __init__(self, admitted: AdmittedRequest) -> None:
        self._writers = _writers(admitted)
        self._base_fields = base_fields(admitted, "text_completion", "cmpl")
        self._includes_usage = admitted.request.include_usage

    def opening_frames(self) -> list[bytes]:
        return [self.keep_alive_frame()]

    def delta_frames(self, index: int, event: Delta) -> list[bytes]:
        return [self._chunk(self._writers[index].choice(event.text, event.logprobs))]

    def final_frames(self, index: int, event: Finished, usage: Usage | None) -> list[bytes]:
        chunks = [self._chunk(self._writers[index].choice("", reason=event.reason))]
        if usage is not None and self._includes_usage:
            chunks.append(
                sse_data(self._base_fields | {"choices": [], "usage": usage_fields(usage)})
            )
        return chunks if usage is None else [*chunks, SSE_DONE]

    def keep_alive_frame(self) -> bytes:
        return self._chunk(self._writers[0].choice(""))

    def error_frames(self, error: RequestError) -> list[bytes]:
        return [error_event(error)]

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return sse_data(self._base_fields | {"choices": [choice]})
