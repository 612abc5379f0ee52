"""Turns our events into OpenAI's legacy completion, whole or as a stream of its chunks."""

import codecs
from dataclasses import dataclass, field
from typing import Any

from hearth.proxy.api.answer_frames import (
    LOGPROB_MIN,
    SSE_DONE,
    AdmittedRequest,
    FrameWriter,
    sse_data,
    whole_choices,
)
from hearth.proxy.api.chat_completions.events import shell, usage_fields
from hearth.proxy.api.completions.errors import error_event
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Delta, Finished, TokenLogprob, Usage


@dataclass(slots=True)
class _TextWriter:
    """Writes one choice in the API's words, and counts its text for the offsets of its tokens."""

    index: int
    wants_logprobs: bool
    prefix: str  # the prompt, where it is to be repeated
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )
    _offset: int = 0  # characters of the tokens so far

    def choice(
        self, text: str, rows: list[TokenLogprob] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        text, self.prefix = self.prefix + text, ""
        reason = "length" if reason == "prefilled" else reason  # none was asked for
        told: dict[str, Any] | None = None
        if self.wants_logprobs and rows:
            offsets = []
            for row in rows:
                offsets.append(self._offset)
                self._offset += len(self._decoder.decode(row.token_bytes))
            told = {
                "tokens": [row.token for row in rows],
                "token_logprobs": [max(row.logprob, LOGPROB_MIN) for row in rows],
                "top_logprobs": [_top(row) for row in rows],
                "text_offset": offsets,
            }
        return {"index": self.index, "text": text, "logprobs": told, "finish_reason": reason}


def _top(row: TokenLogprob) -> dict[str, float]:
    """Return the likeliest tokens by their text, and the one that was sampled."""
    found: dict[str, float] = {}
    for _, text, _, logprob in row.top:  # of two tokens with one text the likelier counts
        found.setdefault(text, max(logprob, LOGPROB_MIN))
    found.setdefault(row.token, max(row.logprob, LOGPROB_MIN))
    return found


def _writers(admitted: AdmittedRequest) -> list[_TextWriter]:
    request = admitted.request
    wants = request.sampling.top_logprobs is not None
    echoes = bool(request.body.get("echo"))
    return [
        _TextWriter(index, wants, (row.prompt.text or "") if echoes else "")
        for index, row in enumerate(request.submissions())
    ]


async def whole(admitted: AdmittedRequest) -> dict[str, Any]:
    """Return the completions once all are complete.

    Raises:
        RequestError: one broke off.
    """
    wholes, usage = await whole_choices(admitted)
    rows = [
        writer.choice(choice.text("content"), choice.logprobs, choice.end.reason)
        for writer, choice in zip(_writers(admitted), wholes, strict=True)
    ]
    return shell(admitted, "text_completion", "cmpl") | {
        "choices": rows,
        "usage": usage_fields(usage),
    }


class CompletionWriter(FrameWriter):
    """Writes one stream's chunks: a text of one choice in each."""

    def __init__(self, admitted: AdmittedRequest) -> None:
        self._writers = _writers(admitted)
        self._shell = shell(admitted, "text_completion", "cmpl")
        self._includes_usage = admitted.request.include_usage

    def begun(self) -> list[bytes]:
        return [self.alive()]

    def grown(self, index: int, row: Delta) -> list[bytes]:
        return [self._chunk(self._writers[index].choice(row.text, row.logprobs))]

    def ended(self, index: int, row: Finished, usage: Usage | None) -> list[bytes]:
        chunks = [self._chunk(self._writers[index].choice("", reason=row.reason))]
        if usage is not None and self._includes_usage:
            chunks.append(sse_data(self._shell | {"choices": [], "usage": usage_fields(usage)}))
        return chunks if usage is None else [*chunks, SSE_DONE]

    def alive(self) -> bytes:
        return self._chunk(self._writers[0].choice(""))

    def broken(self, error: RequestError) -> list[bytes]:
        return [error_event(error)]

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return sse_data(self._shell | {"choices": [choice]})
