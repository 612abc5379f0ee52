"""Streams an answer in its dialect's frames: one loop for all dialects, each with its writer."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from hearth.proxy.api import server_sent_events as sse
from hearth.proxy.api.error_bodies import openai_error
from hearth.proxy.api.multi_choice_stream import AdmittedRequest, MergedChoices
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Delta, Finished, Usage


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
        return [sse.data({"error": openai_error(error)})]


async def frames(admitted: AdmittedRequest, writer: FrameWriter) -> AsyncGenerator[bytes, None]:
    """Yield the stream of `admitted`; where it breaks off, an error is its end.

    A stream that would fall silent, also where its model writes what is not told, says that it is
    alive.
    """
    choices = MergedChoices(admitted)
    try:
        for frame in writer.begun():
            yield frame
        sent_at = time.monotonic()
        async with aclosing(choices.events(sse.PING_S)) as events:
            async for index, row in events:
                found: list[bytes] = []
                if isinstance(row, Delta):
                    found = writer.grown(index, row)
                elif row is not None:
                    found = writer.ended(index, row, choices.usage if choices.have_ended else None)
                now = time.monotonic()
                if row is None or (not found and now - sent_at >= sse.PING_S):
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
