"""Splits one answer, while it is generated, into reasoning, content and tool calls."""

from typing import Any

from hearth.worker.stream.answer_parts import AnswerCollector, AnswerPart, AnswerParts, Channel
from hearth.worker.stream.lookahead_buffer import LookaheadBuffer, ParserSteps

__all__ = ["AnswerPart", "AnswerSplitter", "Channel"]


class AnswerSplitter:
    """Splits one answer while it is generated. Owner: the inference thread.

    Invariants: the parts depend on the text alone and not on how it is cut into pieces; a part is
    never taken back; only what may still turn out to be a mark or a call is held back.
    """

    def __init__(
        self, buffer: LookaheadBuffer, collector: AnswerCollector, steps: ParserSteps[None]
    ) -> None:
        """`steps` parse the text in `buffer` and give `collector` the parts."""
        self._buffer = buffer
        self._collector = collector
        self._steps: Any = steps

    @property
    def parts(self) -> AnswerParts:
        """All parts so far."""
        return self._collector.parts

    def feed(self, text: str) -> list[AnswerPart]:
        """Take the next piece of the answer and return what is certain of it."""
        assert not self._buffer.is_over
        self._buffer.add(text)
        next(self._steps, None)
        return self._collector.take()

    def finish(self, is_complete: bool) -> list[AnswerPart]:
        """End the answer and return its last parts.

        `is_complete`: the model ended its turn, and was not cut off.
        """
        self._buffer.finish(is_complete)
        for _ in self._steps:
            raise AssertionError("a parser waits for text that never comes")
        return self._collector.take()
