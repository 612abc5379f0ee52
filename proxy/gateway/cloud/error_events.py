"""Takes secrets out of the error events of a stream that flows by; all else passes as it came.

LiteLLM passes Anthropic's streams on as they are, and a provider may repeat in an error what it
was sent. The text of an answer is never changed: an agent may write down a key that it was shown.
"""

import re
from itertools import pairwise
from typing import Final

from hearth.proxy.gateway.config.config_secrets import Secrets

HELD_BYTES_MAX: Final = 64 * 1024  # of an event that is not whole yet
_ERROR: Final = re.compile(rb'event: ?error|data: ?\{("type": ?"error"|"error")')
_EVENT_END: Final = re.compile(rb"\n\r?\n")


class ErrorEventRedactor:
    """Reads one stream in pieces cut anywhere. Owner: the task that sends it on.

    Invariant: at most HELD_BYTES_MAX are held, all of an event that is not whole.
    """

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self.has_errors = False  # an error has gone by
        self._held = b""

    def feed(self, part: bytes) -> bytes:
        """Return what may be sent on now."""
        data = self._held + part
        ends = [0, *(found.end() for found in _EVENT_END.finditer(data))]
        if len(data) - ends[-1] > HELD_BYTES_MAX:
            ends.append(len(data))
        self._held = data[ends[-1] :]
        return b"".join(self._passed(data[begin:end]) for begin, end in pairwise(ends))

    def rest(self) -> bytes:
        """Return what is held at the stream's end."""
        held, self._held = self._held, b""
        return self._passed(held)

    def _passed(self, event: bytes) -> bytes:
        if not _ERROR.match(event):
            return event
        self.has_errors = True
        return self._secrets.redacted_bytes(event)
