"""Holds the lease of a request, which says whether the client still waits for the answer."""

from hearth.shared.suspending_clock import awake_s
from hearth.shared.zmq_transport import LEASE_S


class ClientLease:
    """Says which proxy sent a request, and whether the client still waits.

    Owner: the wire thread, the only writer. All threads may read: each change is one assignment.
    """

    def __init__(self, request_id: str, peer: bytes) -> None:
        self.request_id = request_id
        self.peer = peer
        self.received_at = awake_s()
        self.lease_until = self.received_at + LEASE_S
        self.is_cancelled = False

    def renew(self) -> None:
        self.lease_until = awake_s() + LEASE_S

    @property
    def is_gone(self) -> bool:
        return self.is_cancelled or awake_s() > self.lease_until
