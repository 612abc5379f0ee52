"""Ends the work on a prompt once nobody waits for it any more, or its template does not end.

What builds a prompt asks here between two parts of it. Whom it works for is known to the thread,
not to each function on the way there.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from hearth.shared.errors import RequestError, StartError

RENDER_S_MAX: Final = 5.0  # of a thread's own time, for one prompt: they take milliseconds


class EndlessTemplate(StartError):
    """A chat template does not end: no model starts with it, and no request is served by it."""

    def __init__(self) -> None:
        super().__init__(
            f"The model's chat template has computed for {RENDER_S_MAX:g} s on one prompt, as long "
            "as it may. Mend the checkpoint's chat_template.jinja (or chat_template in its "
            "tokenizer_config.json), or use another model."
        )


class NobodyWaits(RequestError):
    """The client of the prompt in work has left."""

    def __init__(self) -> None:
        super().__init__("The client is gone.", status=499, code="client_closed")


class Client(Protocol):
    """Whoever waits for a prompt: a ClientLease, or a worker that starts."""

    @property
    def is_gone(self) -> bool:
        """Whether it waits no more."""


class _Work(threading.local):
    """Whom a thread works for. Owner: that thread."""

    client: Client | None = None
    render_until: float | None = None  # by its own clock; None = it renders nothing


_work = _Work()


@contextmanager
def while_awaited(client: Client) -> Iterator[None]:
    """Have what this thread does in here end with NobodyWaits once `client` is gone."""
    assert _work.client is None, "one prompt at a time"
    _work.client = client
    try:
        yield
    finally:
        _work.client = None


def stop_unless_awaited() -> None:
    """Raise NobodyWaits where the client of this thread's work has left. Costs 0.2 microseconds."""
    if _work.client is not None and _work.client.is_gone:
        raise NobodyWaits()


def joined(parts: Iterable[str]) -> str:
    """Return `parts` of a rendering as one string, as "".join does, as long as it may go on.

    Raises:
        NobodyWaits: the client has left meanwhile.
        EndlessTemplate: the outermost of such calls has taken RENDER_S_MAX.
    """
    if _work.render_until is not None:
        stop_unless_it_ends()
        return "".join(_awaited(parts))
    _work.render_until = time.thread_time() + RENDER_S_MAX
    try:
        return "".join(_awaited(parts))
    finally:
        _work.render_until = None


def stop_unless_it_ends() -> None:
    """Raise what `joined` raises where this thread's rendering, if any, is not to go on."""
    stop_unless_awaited()
    if _work.render_until is not None and time.thread_time() > _work.render_until:
        raise EndlessTemplate()


def _awaited(parts: Iterable[str]) -> Iterator[str]:
    for part in parts:
        stop_unless_awaited()
        yield part
