"""The image thread: reads what a request's messages show, before its prompt is built."""

import logging
import queue
from collections.abc import Callable, Iterator

from shared.errors import RequestError
from shared.wire import Count, Failed, Prompt, Submit, Up
from worker.cache.images import Picture, Pictures
from worker.prompt.pictures import PictureReader
from worker.request import Seen, Ticket

log = logging.getLogger(__name__)

UnreadJobs = queue.SimpleQueue[tuple[Ticket, Submit | Count] | None]


class ImageThread:
    """Decodes and processes images, so that a large one delays no request without any.

    A RequestError ends the one request; it becomes its Failed, which names the image.
    """

    def __init__(self, reader: PictureReader) -> None:
        self._reader = reader

    def run(
        self,
        jobs: UnreadJobs,
        put: Callable[[tuple[Ticket, Seen]], None],
        send: Callable[[Up], None],
    ) -> None:
        """Work until None comes: each message goes on to `put`, with its pictures."""
        while (job := jobs.get()) is not None:
            ticket, message = job
            try:
                pictures = self._pictures(ticket, message)
            except RequestError as error:
                log.info("refused request=%s code=%s", message.request_id, error.code)
                send(Failed(message.request_id, error.status, error.code, str(error)))
                continue
            if pictures is None:
                send(Failed(message.request_id, 499, "client_closed", "The client is gone."))
            else:
                put((ticket, Seen(message, pictures)))

    def _pictures(self, ticket: Ticket, message: Submit | Count) -> Pictures | None:
        """Return what the message shows; None once its client is gone. Raises RequestError."""
        pictures: dict[str, Picture] = {}
        owner = _owner(message)
        for name, digest in _shown(message.prompt):
            if ticket.is_gone:
                return None
            data = message.prompt.images.get(digest)
            if digest in pictures or data is None:
                continue  # who builds the prompt refuses one that was not sent
            try:
                pictures[digest] = self._reader.read(digest, data, owner)
            except RequestError as error:
                text = f"{name}: {error}"
                raise RequestError(text, status=error.status, code=error.code) from error
        return pictures


def _owner(message: Submit | Count) -> str:
    """Return whom alone the images of a message are remembered for; "" = everybody.

    What is not to be kept is its request's own: nobody else's cost is less for it, nor its own.
    """
    owner = message.prompt.speaker.key if message.is_apart else ""
    if isinstance(message, Submit) and not message.use_kv_cache:
        owner += message.request_id
    return owner


def _shown(prompt: Prompt) -> Iterator[tuple[str, str]]:
    """Yield the client's name and the digest of each image, in their order."""
    for message in prompt.messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        for digest in (part["image"] for part in parts if part["type"] == "image"):
            yield prompt.places.get(digest, "messages"), digest
