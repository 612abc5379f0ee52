"""Translates OpenAI's legacy completions: a raw prompt, no template, and text that continues it."""

import codecs
import time
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from hearth.proxy.api import server_sent_events as sse
from hearth.proxy.api.answer_fields import LOGPROB_MIN
from hearth.proxy.api.answer_frames import FrameWriter
from hearth.proxy.api.body import field_readers as fields, sampling_params
from hearth.proxy.api.chat_completions import CHOICES_MAX
from hearth.proxy.api.chat_completions_events import usage_fields
from hearth.proxy.api.multi_choice_stream import AdmittedRequest, whole_choices
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Delta, Finished, Prompt, TokenLogprob, Usage

PROMPTS_MAX: Final = 32  # in one request
ANSWERS_MAX: Final = 32  # prompts times n
LOGPROBS_MAX: Final = 5
TOKEN_ID_MAX: Final = 2**31 - 1
_PROMPT: Final = "text, a list of texts, token ids, or a list of lists of token ids; none empty"


def parse(body: dict[str, Any]) -> ParsedRequest:
    """Return the request in `body`.

    Raises:
        RequestError: a field is not what the API allows, or needs what this server lacks.
    """
    prompts = _prompts(body.get("prompt"))
    count = fields.integer(body, "n", 1, CHOICES_MAX) or 1
    if len(prompts) * count > ANSWERS_MAX:
        fields.refuse("n", count, f"up to {ANSWERS_MAX} answers to all prompts together")
    top_logprobs = fields.integer(body, "logprobs", 0, LOGPROBS_MAX)
    _refuse_unsupported(body, prompts[0], count, top_logprobs)
    stream_options = fields.optional_record(body, "stream_options")
    limit = sampling_params.read_max_tokens(body, "max_tokens", "n_predict", low=0)
    return ParsedRequest(
        dialect="completions",
        model=str(body.get("model") or ""),
        prompt=prompts[0],
        sampling=sampling_params.read_sampling(
            body, max_tokens=limit or None, stop="stop", top_logprobs=top_logprobs
        ),
        stream=fields.boolean(body, "stream"),
        body=body,
        include_usage=fields.boolean(stream_options, "include_usage"),
        choices=count,
        more_prompts=tuple(prompts[1:]),
        prefill_only=limit == 0,
    )


def _prompts(value: Any) -> list[Prompt]:
    """Return the prompts, each a text or the ids of its tokens."""
    if type(value) is not list or (value and all(type(row) is int for row in value)):
        return [_prompt(value, "prompt")]
    if not 1 <= len(value) <= PROMPTS_MAX:
        fields.refuse("prompt", f"a list of {len(value)}", f"1 to {PROMPTS_MAX} prompts")
    return [_prompt(row, f"prompt[{index}]") for index, row in enumerate(value)]


def _prompt(value: Any, param: str) -> Prompt:
    if type(value) is str and value:
        return Prompt([], text=value)
    if type(value) is not list or not value:
        fields.refuse(param, value, _PROMPT)
    for token in value:
        if type(token) is not int or not 0 <= token <= TOKEN_ID_MAX:
            fields.refuse(param, token, _PROMPT)
    return Prompt([], ids=value)


def _refuse_unsupported(
    body: dict[str, Any], prompt: Prompt, count: int, top_logprobs: int | None
) -> None:
    if body.get("suffix") not in (None, ""):
        _unsupported("suffix", "this server only continues a prompt; leave it out")
    best_of = fields.integer(body, "best_of", 1, CHOICES_MAX)
    if best_of not in (None, count):
        _unsupported("best_of", f"it has to equal n, which is {count}")
    if fields.boolean(body, "echo"):
        if prompt.text is None:
            _unsupported("echo", "of token ids there is no text to repeat; send the prompt as text")
        if top_logprobs is not None:
            _unsupported("echo", "there are no logprobs of a prompt; leave one of the two out")


def _unsupported(param: str, reason: str) -> NoReturn:
    text = f"{param} is not supported so: {reason}."
    raise RequestError(text, code="unsupported_parameter", param=param)


# ---------------------------------------------------------------- our events to its fields


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
        logprobs = self._logprobs(rows) if self.wants_logprobs and rows else None
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, rows: list[TokenLogprob]) -> dict[str, Any]:
        offsets = []
        for row in rows:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(row.token_bytes))
        return {
            "tokens": [row.token for row in rows],
            "token_logprobs": [max(row.logprob, LOGPROB_MIN) for row in rows],
            "top_logprobs": [_top(row) for row in rows],
            "text_offset": offsets,
        }


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
    texts = [row.prompt.text or "" for row in request.submissions()]
    echoes = bool(request.body.get("echo"))
    return [_TextWriter(i, wants, text if echoes else "") for i, text in enumerate(texts)]


def _shell(admitted: AdmittedRequest) -> dict[str, Any]:
    return {
        "id": f"cmpl-{admitted.answer.request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": admitted.model,
    }


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
    return _shell(admitted) | {"choices": rows, "usage": usage_fields(usage)}


class CompletionWriter(FrameWriter):
    """Writes one stream's chunks: a text of one choice in each."""

    def __init__(self, admitted: AdmittedRequest) -> None:
        self._writers = _writers(admitted)
        self._shell = _shell(admitted)
        self._includes_usage = admitted.request.include_usage

    def begun(self) -> list[bytes]:
        return [self.alive()]

    def grown(self, index: int, row: Delta) -> list[bytes]:
        return [self._chunk(self._writers[index].choice(row.text, row.logprobs))]

    def ended(self, index: int, row: Finished, usage: Usage | None) -> list[bytes]:
        chunks = [self._chunk(self._writers[index].choice("", reason=row.reason))]
        if usage is not None and self._includes_usage:
            chunks.append(sse.data(self._shell | {"choices": [], "usage": usage_fields(usage)}))
        return chunks if usage is None else [*chunks, sse.DONE]

    def alive(self) -> bytes:
        return self._chunk(self._writers[0].choice(""))

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return sse.data(self._shell | {"choices": [choice]})
