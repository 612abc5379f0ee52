"""Stops work on a prompt when the client has left, or when the chat template does not end.

The code that builds a prompt checks between two parts of the work. A variable of the thread holds
the client, so that not every function needs the client as an argument.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from hearth.shared.errors import RequestError, StartError

RENDER_S_MAX: Final = 5.0  # most CPU seconds of the thread per prompt; usual are milliseconds


class EndlessTemplate(StartError):
    """A chat template does not end, so no model starts and no request is served with it."""

    def __init__(self) -> None:
        super().__init__(
            f"The model's chat template has computed for {RENDER_S_MAX:g} s on one prompt, as long "
            "as it may. Mend the checkpoint's chat_template.jinja (or chat_template in its "
            "tokenizer_config.json), or use another model."
        )


class ClientLeft(RequestError):
    """The client has left while its prompt was being built."""

    def __init__(self) -> None:
        super().__init__("The client is gone.", status=499, code="client_closed")


class Client(Protocol):
    """The one that waits for a prompt: a ClientLease, or a worker that starts."""

    @property
    def is_gone(self) -> bool:
        """Whether the client no longer waits."""


class _Work(threading.local):
    """The client that a thread works for. Owner: that thread."""

    client: Client | None = None
    render_until: float | None = None  # by the thread's CPU clock; None = not rendering


_work = _Work()


@contextmanager
def while_client_waits(client: Client) -> Iterator[None]:
    """End this thread's work in the block with ClientLeft once `client` is gone."""
    assert _work.client is None, "the thread already works for a client"
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
    """Join the `parts` of a rendering, as "".join does, while the client waits.

    Raises:
        ClientLeft: the client has left meanwhile.
        EndlessTemplate: the rendering has taken RENDER_S_MAX, nested calls included.
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
