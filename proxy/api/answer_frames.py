"""Streams an answer in its dialect's frames: one loop for all dialects, each with its writer.

Beside it are the frames and the fields that several dialects share: server-sent events, log
probabilities, and usage beyond each API's own.
"""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final, Protocol

import orjson

from hearth.proxy.api.multi_choice_stream import AdmittedRequest, choice_events, merged
from hearth.proxy.pool.answer_stream import AnswerStream
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Delta, Finished, TokenLogprob, Usage

PING_S: Final = 5.0  # of silence: a client that counts 10 s sees one late event in between
SSE_DONE: Final = b"data: [DONE]\n\n"  # the end of OpenAI's streams
LOGPROB_MIN: Final = -9999.0  # JSON has no infinity


def sse_event(kind: str, data: dict[str, Any]) -> bytes:
    """Return one named event, its type repeated in the data as the official APIs do."""
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **data}) + b"\n\n"


def sse_data(row: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(row) + b"\n\n"


class FrameWriter(Protocol):
    """Writes the frames of one stream, in the words of its dialect. Owner: its HTTP task."""

    def begun(self) -> list[bytes]:
        return []

    def grown(self, index: int, row: Delta) -> list[bytes]: ...

    def ended(self, index: int, row: Finished, usage: Usage | None) -> list[bytes]:
        """Return the end of a choice; `usage` is of all, where this is the last of them."""
        ...

    def alive(self) -> bytes:
        """Return the frame that keeps a silent stream alive; it tells how far the prefill is."""
        ...

    def broken(self, error: RequestError) -> list[bytes]:
        """Return the end of a stream that breaks off."""
        ...


async def frames(admitted: AdmittedRequest, writer: FrameWriter) -> AsyncGenerator[bytes, None]:
    """Yield the stream of `admitted`; where it breaks off, an error is its end.

    A stream that would fall silent, also where its model writes what is not told, says that it is
    alive.
    """
    usages: dict[int, Usage] = {}  # by choice, once it has ended
    try:
        for frame in writer.begun():
            yield frame
        sent_at = time.monotonic()
        async with aclosing(choice_events(admitted, PING_S)) as events:
            async for index, row in events:
                found: list[bytes] = []
                if isinstance(row, Delta):
                    found = writer.grown(index, row)
                elif row is not None:
                    usages[index], usage = row.usage, None
                    if len(usages) == len(admitted.answers):
                        of_all = [usages[each] for each in sorted(usages)]
                        usage = merged(of_all, admitted.request.choices)
                    found = writer.ended(index, row, usage)
                now = time.monotonic()
                if row is None or (not found and now - sent_at >= PING_S):
                    found = [writer.alive()]
                if found:
                    sent_at = now
                for frame in found:
                    yield frame
    except RequestError as error:
        for answer in admitted.answers:  # the others compute for nobody, also where he reads late
            answer.close()
        for frame in writer.broken(error):
            yield frame


# ---------------------------------------------------------------- shared fields


def extra_fields(usage: Usage) -> dict[str, Any]:
    """Return the fields of ours that the usage of every dialect has."""
    return {
        "kv_cache": {
            "cache_hit": usage.cached_tokens > 0,
            "prefix_length": usage.cached_tokens,
            "canonical_length": usage.canonical_tokens,
            "matched_length": usage.matched_tokens,
            "prefilled": usage.prefilled_tokens,
            "source": usage.source,
            "match": usage.match,
            "ttft_ms": usage.ttft_ms,
            "idle_tokens": usage.idle_tokens,
            **({"image_ms": usage.image_ms} if usage.image_tokens else {}),
            "divergence": usage.divergence,
        },
        "speculation": prediction_fields(usage) | {"decode_forwards": usage.decode_forwards},
        **({"warnings": usage.warnings} if usage.warnings else {}),
    }


def prediction_fields(usage: Usage) -> dict[str, int]:
    """Return what came of drafted tokens, in the words of chat completions."""
    return {
        "accepted_prediction_tokens": usage.accepted_prediction_tokens,
        "rejected_prediction_tokens": usage.rejected_prediction_tokens,
    }


def prefill_fields(answer: AnswerStream) -> dict[str, int]:
    """Return how far the prefill is, for a stream that is silent meanwhile."""
    return {"done_tokens": answer.done_tokens, "prompt_tokens": answer.prompt_tokens}


def image_fields(usage: Usage) -> dict[str, int]:
    """Return what of the prompt stands for images, in the words of both OpenAI dialects."""
    return {"image_tokens": usage.image_tokens} if usage.image_tokens else {}


def logprob_rows(rows: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return each token with its log probability, and those of its alternatives."""
    return [
        _row(each.token, each.token_bytes, each.logprob)
        | {"top_logprobs": [_row(text, octets, value) for _, text, octets, value in each.top]}
        for each in rows
    ]


def _row(text: str, octets: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text, "bytes": list(octets), "logprob": max(logprob, LOGPROB_MIN)}
