"""Takes secrets out of the error events of a stream that flows by; all else passes as it came.

LiteLLM passes Anthropic's streams on as they are, and a provider may repeat in an error what it
was sent. The text of an answer is never changed: an agent may write down a key that it was shown.
"""

import re
from typing import Final

from hearth.proxy.gateway.config.config_secrets import Secrets

HELD_BYTES_MAX: Final = 64 * 1024  # of an event that is not whole yet
_BEGINNINGS: Final = (
    *(b"event: error", b"event:error", b'data: {"error"', b'data:{"error"'),
    *(b'data: {"type":"error"', b'data: {"type": "error"'),
)
_EVENT_END: Final = re.compile(rb"\r?\n\r?\n")
_LINE_ENDS: Final = (b"\n\r", b"\r\n", b"\n", b"\r")  # that may be half of an event's end


class ErrorEventRedactor:
    """Reads one stream in pieces cut anywhere. Owner: the task that sends it on.

    Invariant: at most HELD_BYTES_MAX are held, nothing of them but an error's beginning or an
    event's last line end.
    """

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self.has_errors = False  # an error has gone by
        self._held = b""
        self._is_amid = False  # within an event that passes as it is

    def feed(self, part: bytes) -> bytes:
        """Return what may be sent on now."""
        data, self._held = self._held + part, b""
        passed: list[bytes] = []
        while data:
            if not self._is_amid and not data.startswith(_BEGINNINGS):
                if any(begin.startswith(data) for begin in _BEGINNINGS):
                    self._held = data
                    break
                self._is_amid = True
            self.has_errors |= not self._is_amid
            end = _EVENT_END.search(data)
            if end is None:
                passed.append(self._begun(data))
                break
            event, data = data[: end.end()], data[end.end() :]
            passed.append(event if self._is_amid else self._secrets.redacted_bytes(event))
            self._is_amid = False
        return b"".join(passed)

    def _begun(self, data: bytes) -> bytes:
        """Return what passes of an event that is not whole."""
        if self._is_amid:
            held = next((end for end in _LINE_ENDS if data.endswith(end)), b"")
            self._held = held
            return data.removesuffix(held)
        if len(data) <= HELD_BYTES_MAX:
            self._held = data
            return b""
        return self._secrets.redacted_bytes(data)

    def rest(self) -> bytes:
        """Return what is held at the stream's end."""
        held, self._held = self._held, b""
        return self._secrets.redacted_bytes(held)
