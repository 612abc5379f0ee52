"""Holds the lease of a request's client: whether anybody still waits for the answer."""

from hearth.shared.suspending_clock import awake_s
from hearth.shared.zmq_transport import LEASE_S


class ClientLease:
    """Says who asked for a request, and whether they still want it.

    Owner: the wire thread, which alone writes; all threads read: each field is one assignment.
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
