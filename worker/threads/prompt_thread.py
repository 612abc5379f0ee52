"""Processes images, renders and tokenises requests, and answers Count and Status."""

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, Final

import numpy as np

from hearth.shared.errors import RequestError
from hearth.shared.settings import Settings
from hearth.shared.wire_messages import (
    Admitted,
    Count,
    Counted,
    Failed,
    Prompt,
    Status,
    Submit,
    Told,
    Up,
)
from hearth.worker.cache.block_hash import pack
from hearth.worker.cache.image_keys import PromptImage, PromptImages
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.prompt.awaited_work import raise_if_client_left, while_client_waits
from hearth.worker.prompt.images.image_processor import ImageReader
from hearth.worker.schedule.request_state import (
    ClientLease,
    MessageWithImages,
    RenderNextPrompt,
    Request,
)
from hearth.worker.schedule.suspects import Suspects
from hearth.worker.sessions.session_manager import SessionManager
from hearth.worker.threads.request_builder import (
    RecentPrompts,
    RequestBuilder,
    SessionPromptBuilder,
    is_raw,
    predict_next_prompt,
)
from hearth.worker.threads.thread_queues import ImageJobs, PromptJobs

LOOK_WAIT_S_MAX: Final = 0.5  # most seconds to wait for a disk thread with a large file

log = logging.getLogger(__name__)


class PromptThread:
    """Builds requests from the messages of several queues; each queue has a thread in `run`.

    It uses no MLX, so a long text stalls neither decoding nor heartbeats nor the other queues.
    State that the threads share is immutable or has a lock.
    Invariant: a Submit becomes an Admitted and a Request, or a Failed; a Count and a Status get one
    answer each. An error, or a client that leaves, ends only the one request.
    """

    def __init__(
        self,
        prompts: SessionPromptBuilder,
        settings: Settings,
        suspects: Suspects | None = None,
        scan: Callable[[], threading.Event | None] = lambda: None,
    ) -> None:
        """`scan` starts a scan of the KV directory and returns an event that marks its end."""
        self._scan = scan
        self._prompts = prompts
        self._recent = RecentPrompts(settings.serves_prompts)
        self._builder = RequestBuilder(prompts, self._recent, settings.default_max_tokens, suspects)

    def run(
        self,
        jobs: PromptJobs,
        put: Callable[[Request | PrefixQuery], None],
        send: Callable[[Up], None],
    ) -> None:
        """Work until None comes; `put` hands a request to the inference thread."""
        while (job := jobs.get()) is not None:
            lease, message = job
            if isinstance(message, RenderNextPrompt):
                self._predict(message, put)
                continue
            try:
                with while_client_waits(lease):
                    raise_if_client_left()
                    self._answer(lease, message, put, send)
            except RequestError as error:
                log.info("refused request=%s code=%s", lease.request_id, error.code)
                send(Failed(lease.request_id, error.status, error.code, str(error)))
            except Exception:  # a bug ends only this request, since this thread touches no KV
                log.exception("a prompt could not be built request=%s", lease.request_id)
                text = "The worker failed at this prompt; its log says where."
                send(Failed(lease.request_id, 500, "internal_error", text))

    def _predict(
        self, message: RenderNextPrompt, put: Callable[[Request | PrefixQuery], None]
    ) -> None:
        """Hand on the likely next prompt. No client waits, so errors are only logged."""
        try:
            query = predict_next_prompt(message.request, self._prompts)
        except Exception:
            log.exception("a next prompt could not be built")
            return
        if query is not None:
            put(query)

    def _answer(
        self,
        lease: ClientLease,
        message: Submit | Count | Status | MessageWithImages,
        put: Callable[[Request | PrefixQuery], None],
        send: Callable[[Up], None],
    ) -> None:
        """Answer a Count or a Status; hand a Submit on as a Request. Raises RequestError."""
        images: PromptImages = {}
        if isinstance(message, MessageWithImages):
            images, message = message.images, message.message
        assert message.request_id == lease.request_id, (message.request_id, lease.request_id)
        match message:
            case Status():
                report = session_report(message, self._prompts.sessions, self._recent)
                send(Told(message.request_id, report))
            case Count():
                send(counted(message, images, self._prompts))
            case Submit():
                # The scan runs while the prompt is built, because another worker may have written
                # KV of the session.
                scanned = self._scan() if message.use_kv_cache else None
                request = self._builder.build(lease, message, images)
                send(Admitted(request.request_id, request.prompt_tokens, request.deltas.signature))
                if scanned is not None:
                    scanned.wait(LOOK_WAIT_S_MAX)
                put(request)


TEXT_BYTES_MAX: Final = 16 * 1024 * 1024  # most bytes of text in one response


def counted(message: Count, images: PromptImages, prompts: SessionPromptBuilder) -> Counted:
    """Return the answer to `message`. Prompt thread.

    The tokens are the same as for a request with the same messages.

    Raises:
        RequestError: the prompt is refused, or its text is too long for a response.
    """
    query = message.query
    if is_raw(message.prompt):
        ids = prompts.raw_ids(message.prompt, query)
        keys = pack(ids)
    else:
        _, built = prompts.build(
            message.prompt, images, adds_header=query.adds_header, is_counted=True
        )
        ids, keys = built.ids, built.keys
    request_id, count = message.request_id, len(ids)
    if query.tells == "count":
        return Counted(request_id, count)
    if query.tells == "text":
        text = prompts.text(keys.tolist())
        _check_size(len(text.encode()))
        return Counted(request_id, count, text=text)
    packed = _packed(ids)
    if query.tells == "ids":
        return Counted(request_id, count, packed)
    pieces = [prompts.facts.vocabulary.token_bytes(token_id) for token_id in ids]
    ends = list(accumulate(map(len, pieces)))
    _check_size(ends[-1] if ends else 0)
    return Counted(request_id, count, packed, b"".join(pieces), _packed(ends))


def _packed(numbers: list[int]) -> bytes:
    return np.array(numbers, dtype="<u4").tobytes()


def _check_size(nbytes: int) -> None:
    if nbytes > TEXT_BYTES_MAX:
        raise RequestError(
            f"The text of these tokens is {nbytes:,} bytes and this server tells "
            f"{TEXT_BYTES_MAX:,} at once. Send fewer tokens.",
            code="too_many_tokens",
        )


def session_report(
    message: Status, sessions: SessionManager, recent: RecentPrompts
) -> dict[str, Any]:
    """Return the body of the answer to `message`. Prompt thread.

    Raises:
        RequestError: the session or the prompt is unknown, or belongs to another API key.
    """
    if message.what == "sessions":
        return {"sessions": sessions.session_rows(message.key)}
    body: dict[str, Any] | None
    if message.what in ("session", "tree"):
        is_brief = message.what == "tree"
        body = sessions.lines_report(message.about, message.key, is_brief)
        text = f"No session {message.about!r:.80} is remembered by this worker."
    else:
        ids = recent.ids_of(message.about, message.key)
        body = {"ids": ids} if ids is not None else None
        text = f"No prompt of request {message.about!r:.80} is remembered by this worker."
    if body is None:
        raise RequestError(text, status=404, code="not_found")
    return body


def read_images(
    reader: ImageReader,
    jobs: ImageJobs,
    put: Callable[[tuple[ClientLease, MessageWithImages]], None],
    send: Callable[[Up], None],
) -> None:
    """Decode and process images until None comes; `put` hands messages to the prompt threads.

    A thread of its own runs this, so that a large image delays no request without images. Each
    message is handed on with all images, or gets one Failed that names the bad image.
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
    """Return the images of a message; None once the client is gone. Raises RequestError."""
    images: dict[str, PromptImage] = {}
    owner = _owner(message)
    for name, digest in _shown(message.prompt):
        if lease.is_gone:
            return None
        data = message.prompt.images.get(digest)
        if digest in images or data is None:
            continue  # the prompt builder refuses an image that was not sent
        try:
            images[digest] = reader.read(digest, data, owner)
        except RequestError as error:
            text = f"{name}: {error}"
            raise RequestError(text, status=error.status, code=error.code) from error
    return images


def _owner(message: Submit | Count) -> str:
    """Return the owner of a message's cached images; "" = shared by all requests.

    A request without the cache is an owner of its own, so later requests do not find its images.
    """
    if isinstance(message, Submit) and not message.use_kv_cache:
        return message.prompt.speaker.key + message.request_id
    return message.prompt.speaker.key


def _shown(prompt: Prompt) -> Iterator[tuple[str, str]]:
    """Yield each image's place in the request body and its digest, in order."""
    for message in prompt.messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        for digest in (part["image"] for part in parts if part["type"] == "image"):
            yield prompt.places.get(digest, "messages"), digest
