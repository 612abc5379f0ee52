"""Turns sampled tokens into the Deltas that a client is sent.

Functions of the inference thread: the state that they change is the request's own.
"""

from collections.abc import Iterator

from hearth.shared.our_ids import call_id_for
from hearth.shared.wire_messages import CallStart, Delta, TokenLogprob
from hearth.worker.engine.decode.decoder import SampledToken
from hearth.worker.schedule.request_state import Request
from hearth.worker.stream.answer_parts import AnswerPart
from hearth.worker.stream.detokenise import Vocabulary
from hearth.worker.stream.logprobs import describe
from hearth.worker.stream.output_processor import OutputPiece


def piece_deltas(request: Request, piece: OutputPiece) -> Iterator[Delta]:
    """Yield the deltas of a piece; its first content carries the log probabilities that waited.

    None of them waits beyond the beginning of a call.
    """
    request.logprobs += piece.logprobs
    for part in piece.parts:
        if part.name:
            yield from last_deltas(request)
        yield _delta(request, part)


def last_deltas(request: Request) -> Iterator[Delta]:
    """Yield an empty delta for log probabilities that no text followed, if there are any."""
    if request.logprobs:
        yield _delta(request, AnswerPart("content", ""))
    assert not request.logprobs, len(request.logprobs)


def _delta(request: Request, part: AnswerPart) -> Delta:
    call = None
    if part.name:
        call = CallStart(
            call_id_for(
                part.call_id, part.name, {*request.known_ids, *request.call_ids}, request.new_id()
            ),
            part.name,
        )
        request.call_ids.append(call.id)
    logprobs: list[TokenLogprob] = []
    if part.channel == "content":
        logprobs, request.logprobs = request.logprobs, []
    request.seq += 1
    return Delta(request.request_id, request.seq - 1, part.channel, part.text, logprobs, call)


def token_logprob(
    request: Request, sampled: SampledToken, vocabulary: Vocabulary
) -> TokenLogprob | None:
    """Return the log probabilities that the client asked for of one token; None if of none."""
    if sampled.logprobs is None:
        return None
    wanted = request.sampling.top_logprobs
    assert wanted is not None, "only asked-for log probabilities are carried"
    return describe(sampled.token_id, sampled.logprobs, wanted, vocabulary)
