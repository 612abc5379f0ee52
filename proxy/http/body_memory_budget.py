"""Bounds the bytes of request bodies and their images that this process holds at once."""

from typing import Final

from hearth.shared.errors import Overloaded

BODIES_BYTES_MAX: Final = 512 * 1024 * 1024  # of all requests that are being served


class BodyBudget:
    """Counts the bodies and images of all requests, from their first byte to the request's end.

    Invariant: 0 <= bytes_held <= BODIES_BYTES_MAX. Owner: the event loop.
    """

    def __init__(self) -> None:
        self.bytes_held = 0

    def check(self, count: int) -> None:
        """Raise Overloaded where `count` more bytes have no room now."""
        if self.bytes_held + count > BODIES_BYTES_MAX:
            raise Overloaded(
                f"The requests that are being served hold {self.bytes_held:,} bytes of bodies and "
                f"images, and this server holds {BODIES_BYTES_MAX:,} at once; {count:,} more have "
                "no room. Try again in a few seconds, or send less."
            )

    def take(self, count: int) -> None:
        """Hold `count` bytes more. Raises: Overloaded."""
        assert count >= 0, count
        self.check(count)
        self.bytes_held += count

    def give_back(self, count: int) -> None:
        self.bytes_held -= count
        assert self.bytes_held >= 0, self.bytes_held
