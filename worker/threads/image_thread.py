"""The image thread: reads what a request's messages show, before its prompt is built."""

import logging
import queue
from collections.abc import Callable, Iterator

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Count, Failed, Prompt, Submit, Up
from hearth.worker.cache.image_keys import PromptImage, PromptImages
from hearth.worker.prompt.images.image_processor import ImageReader
from hearth.worker.schedule.request_state import ClientLease, MessageWithImages

log = logging.getLogger(__name__)

UnreadJobs = queue.SimpleQueue[tuple[ClientLease, Submit | Count] | None]


class ImageThread:
    """Decodes and processes images, so that a large one delays no request without any.

    A RequestError ends the one request; it becomes its Failed, which names the image.
    """

    def __init__(self, reader: ImageReader) -> None:
        self._reader = reader

    def run(
        self,
        jobs: UnreadJobs,
        put: Callable[[tuple[ClientLease, MessageWithImages]], None],
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
                put((ticket, MessageWithImages(message, pictures)))

    def _pictures(self, ticket: ClientLease, message: Submit | Count) -> PromptImages | None:
        """Return what the message shows; None once its client is gone. Raises RequestError."""
        pictures: dict[str, PromptImage] = {}
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
