"""Reads the images of messages in a thread of its own, and hands them to the prompt thread."""

import dataclasses
import logging
from collections.abc import Callable, Iterator

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Count, Failed, Prompt, Submit, Up
from hearth.worker.cache.image_keys import PromptImage, PromptImages
from hearth.worker.prompt.images.image_processor import ImageReader
from hearth.worker.schedule.request_state import ClientLease, MessageWithImages
from hearth.worker.threads.thread_queues import ImageJobs

log = logging.getLogger(__name__)


def read_images(
    reader: ImageReader,
    jobs: ImageJobs,
    put: Callable[[tuple[ClientLease, MessageWithImages]], None],
    send: Callable[[Up], None],
) -> None:
    """Decode and process images until None comes; `put` hands on to the prompt thread.

    A thread of its own runs it, so that a large image delays no request without any. A message is
    handed on with all its images, or it gets one Failed. A RequestError ends the one request; its
    Failed names the image.
    """
    while (job := jobs.get()) is not None:
        lease, message = job
        assert lease.request_id == message.request_id, (lease.request_id, message.request_id)
        try:
            images = _images_of(message, lease, reader)
        except RequestError as error:
            log.info("refused request=%s code=%s", message.request_id, error.code)
            send(Failed(message.request_id, error.status, error.code, str(error)))
            continue
        if images is None:
            send(Failed(message.request_id, 499, "client_closed", "The client is gone."))
        else:
            prompt = dataclasses.replace(message.prompt, images={})
            message = dataclasses.replace(message, prompt=prompt)
            put((lease, MessageWithImages(message, images)))


def _images_of(
    message: Submit | Count, lease: ClientLease, reader: ImageReader
) -> PromptImages | None:
    """Return the images of a message; None once its client is gone. Raises RequestError."""
    images: dict[str, PromptImage] = {}
    owner = _owner(message)
    for name, digest in _shown(message.prompt):
        if lease.is_gone:
            return None
        data = message.prompt.images.get(digest)
        if digest in images or data is None:
            continue  # the prompt builder refuses one that was not sent
        try:
            images[digest] = reader.read(digest, data, owner)
        except RequestError as error:
            text = f"{name}: {error}"
            raise RequestError(text, status=error.status, code=error.code) from error
    return images


def _owner(message: Submit | Count) -> str:
    """Return who alone profits from what is remembered of a message's images; "" = everybody.

    What is not to be kept is its request's own: nobody else's cost is less for it, nor its own.
    """
    if isinstance(message, Submit) and not message.use_kv_cache:
        return message.prompt.speaker.key + message.request_id
    return message.prompt.speaker.key


def _shown(prompt: Prompt) -> Iterator[tuple[str, str]]:
    """Yield the client's name and the digest of each image, in their order."""
    for message in prompt.messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        for digest in (part["image"] for part in parts if part["type"] == "image"):
            yield prompt.places.get(digest, "messages"), digest
