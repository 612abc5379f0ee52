"""Splits one answer, while it is generated, into reasoning, content and tool calls."""

from functools import partial
from typing import Any

from hearth.worker.stream.answer_parts import (
    AnswerCollector,
    AnswerPart,
    AnswerParts,
    AnswerStopped,
    Channel,
)
from hearth.worker.stream.lookahead_buffer import LookaheadBuffer, Marks, ParserSteps

__all__ = ["AnswerPart", "AnswerSplitter", "Channel"]


class AnswerSplitter:
    """Splits one answer while it is generated. Owner: the inference thread.

    Invariants: the parts depend on the text alone and not on how it is cut into pieces; a part is
    never taken back; only what may still turn out to be a mark or a call is held back.
    """

    def __init__(
        self, buffer: LookaheadBuffer, collector: AnswerCollector, steps: ParserSteps[Any]
    ) -> None:
        """`steps` parse the text in `buffer` and give `collector` the parts."""
        self._buffer = buffer
        self.collector = collector
        self._steps: Any = steps

    @property
    def parts(self) -> AnswerParts:
        """All parts so far."""
        return self.collector.parts

    def feed(self, text: str) -> list[AnswerPart]:
        """Take the next piece of the answer and return what is certain of it."""
        assert not self._buffer.is_over
        self._buffer.add(text)
        self._read()
        return self.collector.take()

    def finish(self, is_complete: bool) -> list[AnswerPart]:
        """End the answer and return its last parts.

        `is_complete`: the model ended its turn, and was not cut off.
        """
        self._buffer.finish(is_complete)
        self._read()
        self.collector.flush()
        return self.collector.take()

    def _read(self) -> None:
        try:
            is_waiting = next(self._steps, self) is not self
        except AnswerStopped:
            return
        assert not (is_waiting and self._buffer.is_over), "no more text ever comes"


def plain_splitter() -> AnswerSplitter:
    """Return the splitter of an answer that is content and nothing else."""
    buffer = LookaheadBuffer()
    collector = AnswerCollector(buffer)
    steps = buffer.scan(Marks(), partial(collector.text, "content"))
    return AnswerSplitter(buffer, collector, steps)
