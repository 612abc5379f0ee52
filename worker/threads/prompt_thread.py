"""Renders and tokenises requests in threads of their own; answers Count and session reports."""

import logging
import threading
from collections.abc import Callable
from typing import Final

from hearth.shared.errors import RequestError
from hearth.shared.settings_from_env import Settings
from hearth.shared.wire_messages import Admitted, Count, Failed, Status, Submit, Told, Up
from hearth.worker.cache.image_keys import PromptImages
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.prompt.awaited_work import stop_unless_awaited, while_awaited
from hearth.worker.requests.answer_token_queries import counted, session_report
from hearth.worker.requests.debug_prompt_log import RecentPrompts
from hearth.worker.requests.predict_next_prompt import predict_next_prompt
from hearth.worker.requests.request_builder import RequestBuilder
from hearth.worker.requests.session_prompt_builder import PromptFacts, SessionPromptBuilder
from hearth.worker.schedule.request_state import (
    ClientLease,
    MessageWithImages,
    RenderNextPrompt,
    Request,
)
from hearth.worker.schedule.suspects import Suspects
from hearth.worker.threads.thread_queues import PromptJobs

LOOK_WAIT_S_MAX: Final = 0.5  # for a disk thread that is amid a large file

log = logging.getLogger(__name__)


class PromptThread:
    """Takes messages from queues, one after the other from each. Each has a thread that runs `run`.

    It touches no MLX, and a long text in it stalls neither decoding nor heartbeats, nor what is in
    another queue. What its threads share is immutable or has a lock.
    Invariant: a Submit becomes a Request behind an Admitted, or a Failed; a Count and a Status get
    one answer. An error ends the one request that it is about, and so does its client where it
    leaves.
    """

    def __init__(
        self,
        prompts: SessionPromptBuilder,
        facts: PromptFacts,
        settings: Settings,
        suspects: Suspects | None = None,
        look: Callable[[], threading.Event | None] = lambda: None,
    ) -> None:
        """`look` has the directory of KV files looked at, and returns what is set once it was."""
        self._look = look
        self._prompts = prompts
        self._facts = facts
        self._recent = RecentPrompts(settings.serves_prompts)
        self._builder = RequestBuilder(
            prompts, self._recent, facts, settings.default_max_tokens, suspects
        )

    def run(
        self,
        jobs: PromptJobs,
        put: Callable[[Request | PrefixQuery], None],
        send: Callable[[Up], None],
    ) -> None:
        """Work until None comes; `put` hands on to the inference thread."""
        while (job := jobs.get()) is not None:
            lease, message = job
            if isinstance(message, RenderNextPrompt):
                self._foresee(message, put)
                continue
            try:
                with while_awaited(lease):
                    stop_unless_awaited()
                    self._answer(lease, message, put, send)
            except RequestError as error:
                log.info("refused request=%s code=%s", lease.request_id, error.code)
                send(Failed(lease.request_id, error.status, error.code, str(error)))
            except Exception:  # a bug, and one request's: no KV is touched here
                log.exception("a prompt could not be built request=%s", lease.request_id)
                text = "The worker failed at this prompt; its log says where."
                send(Failed(lease.request_id, 500, "internal_error", text))

    def _foresee(
        self, message: RenderNextPrompt, put: Callable[[Request | PrefixQuery], None]
    ) -> None:
        """Hand on the prompt that is likely to come; whatever is wrong with it, nobody waits."""
        try:
            query = predict_next_prompt(message.request, self._prompts, self._facts)
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
                send(counted(message, images, self._prompts, self._facts))
            case Submit():
                # While the prompt is built: its session may be another worker's, which is gone.
                seen = self._look() if message.use_kv_cache else None
                request = self._builder.build(lease, message, images)
                send(Admitted(request.request_id, request.prompt_tokens, request.deltas.signature))
                if seen is not None:
                    seen.wait(LOOK_WAIT_S_MAX)
                put(request)
