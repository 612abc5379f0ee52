"""One answer while it is generated: every piece is reasoning, content or part of a tool call."""

from typing import Any

from hearth.worker.stream.answer_parts import AnswerCollector, AnswerPart, AnswerParts, Channel
from hearth.worker.stream.lookahead_buffer import LookaheadBuffer, ParserSteps

__all__ = ["AnswerPart", "AnswerSplitter", "Channel"]


class AnswerSplitter:
    """Takes one answer apart while it is generated.

    What is delivered depends on the text alone and not on how it is cut into pieces, and is never
    taken back. Held back is only what may still turn out to be a mark or a call.
    Owner: the inference thread.
    """

    def __init__(
        self, source: LookaheadBuffer, delivery: AnswerCollector, reading: ParserSteps[None]
    ) -> None:
        """`reading` reads `source` and tells `delivery` what it finds."""
        self._source = source
        self._delivery = delivery
        self._reading: Any = reading

    @property
    def parts(self) -> AnswerParts:
        """What was delivered so far."""
        return self._delivery.parts

    def feed(self, text: str) -> list[AnswerPart]:
        """Take the next piece of the answer and return what is certain of it."""
        assert not self._source.is_over
        self._source.add(text)
        next(self._reading, None)
        return self._delivery.take()

    def finish(self, is_complete: bool, is_stopped: bool = False) -> list[AnswerPart]:
        """The answer is over.

        `is_complete`: the model ended its turn, and was not cut off; `is_stopped`: a stop string
        did.
        """
        self._source.finish(is_complete, is_stopped)
        for _ in self._reading:
            raise AssertionError("a reader waits for text that never comes")
        return self._delivery.take()
