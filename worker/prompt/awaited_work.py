"""Stops work on a prompt when its client has left, or when its chat template does not end.

The code that builds a prompt checks between two parts of the work. The client is known to the
thread, so that not every function on the way needs it as an argument.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from hearth.shared.errors import RequestError, StartError

RENDER_S_MAX: Final = 5.0  # CPU time of the thread for one prompt; most take milliseconds


class EndlessTemplate(StartError):
    """A chat template does not end, so no model starts with it and no request is served by it."""

    def __init__(self) -> None:
        super().__init__(
            f"The model's chat template has computed for {RENDER_S_MAX:g} s on one prompt, as long "
            "as it may. Mend the checkpoint's chat_template.jinja (or chat_template in its "
            "tokenizer_config.json), or use another model."
        )


class ClientLeft(RequestError):
    """The client of the prompt in work has left."""

    def __init__(self) -> None:
        super().__init__("The client is gone.", status=499, code="client_closed")


class Client(Protocol):
    """The receiver of a prompt's result: a ClientLease, or a worker that starts."""

    @property
    def is_gone(self) -> bool:
        """Whether the client waits no longer."""


class _Work(threading.local):
    """The client that a thread works for. Owner: that thread."""

    client: Client | None = None
    render_until: float | None = None  # by the thread's CPU clock; None = not rendering


_work = _Work()


@contextmanager
def while_client_waits(client: Client) -> Iterator[None]:
    """Make this thread's work inside the block end with ClientLeft once `client` is gone."""
    assert _work.client is None, "one prompt at a time"
    _work.client = client
    try:
        yield
    finally:
        _work.client = None


def raise_if_client_left() -> None:
    """Raise ClientLeft if the client of this thread's work has left. Costs 0.2 microseconds."""
    if _work.client is not None and _work.client.is_gone:
        raise ClientLeft()


def joined(parts: Iterable[str]) -> str:
    """Return `parts` of a rendering as one string, as "".join does, while the client waits.

    Raises:
        ClientLeft: the client has left meanwhile.
        EndlessTemplate: the outermost of nested calls has taken RENDER_S_MAX.
    """
    if _work.render_until is not None:
        raise_if_stopped()
        return "".join(_checked(parts))
    _work.render_until = time.thread_time() + RENDER_S_MAX
    try:
        return "".join(_checked(parts))
    finally:
        _work.render_until = None


def raise_if_stopped() -> None:
    """Raise ClientLeft or EndlessTemplate if this thread's rendering must stop."""
    raise_if_client_left()
    if _work.render_until is not None and time.thread_time() > _work.render_until:
        raise EndlessTemplate()


def _checked(parts: Iterable[str]) -> Iterator[str]:
    for part in parts:
        raise_if_client_left()
        yield part
