"""The prompt thread: turns a Submit into a Request, and answers Count. Touches no MLX."""

import logging
import queue
from collections.abc import Callable

from shared.config import Settings
from shared.errors import RequestError
from shared.wire import Count, Counted, Failed, Status, Submit, Told, Up
from worker.cache.block_hash import PrefixHash, pack, prefix_hashes
from worker.cache.index import Query
from worker.engine.sampling import check
from worker.prompt.cuts import CutRule
from worker.prompt.render import Renderer
from worker.request import Request, Ticket
from worker.stream.detokenise import Vocabulary
from worker.stream.output import Output

log = logging.getLogger(__name__)

RECENT_MAX = 64  # prompts whose ids CACHE_DEBUG remembers


class Prompter:
    """Renders and tokenises, so that a long text stalls neither decoding nor heartbeats.

    A RequestError ends the one request; it becomes its Failed.
    """

    def __init__(
        self,
        settings: Settings,
        renderer: Renderer,
        rule: CutRule,
        vocabulary: Vocabulary,
        limits: tuple[int, int],
        root: PrefixHash,
    ) -> None:
        self._settings = settings
        self._renderer = renderer
        self._rule = rule
        self._vocabulary = vocabulary
        self._context_tokens, self._vocab_size = limits
        self._root = root
        self._recent: dict[str, list[int]] = {}

    def run(
        self,
        jobs: "queue.SimpleQueue[tuple[Ticket, Submit | Count | Status] | None]",
        put: Callable[[Request], None],
        send: Callable[[Up], None],
    ) -> None:
        """Work until None comes."""
        while (job := jobs.get()) is not None:
            ticket, message = job
            if ticket.is_gone:
                send(Failed(message.request_id, 499, "client_closed", "The client is gone."))
                continue
            try:
                if isinstance(message, Status):
                    send(self._prompt_ids(message))
                elif isinstance(message, Count):
                    tokens = len(self._renderer.ids(message.prompt))
                    send(Counted(message.request_id, tokens))
                else:
                    put(self.request(ticket, message))
            except RequestError as error:
                log.info("refused request=%s code=%s", message.request_id, error.code)
                send(Failed(message.request_id, error.status, error.code, str(error)))

    def _prompt_ids(self, message: Status) -> Told:
        """Return what CACHE_DEBUG remembers of a prompt. Raises RequestError."""
        ids = self._recent.get(message.about)
        if ids is None:
            text = f"No prompt of request {message.about!r:.80} is remembered by this worker."
            raise RequestError(text, status=404, code="not_found")
        return Told(message.request_id, {"ids": ids})

    def _remember(self, request_id: str, ids: list[int]) -> None:
        """Keep the ids of recent prompts where debugging is on."""
        if not self._settings.cache_debug:
            return
        self._recent[request_id] = ids
        while len(self._recent) > RECENT_MAX:
            del self._recent[next(iter(self._recent))]

    def request(self, ticket: Ticket, message: Submit) -> Request:
        """Return the request ready to be computed. Raises RequestError."""
        check(message.sampling, self._vocab_size)
        ids = self._renderer.ids(message.prompt)
        self._remember(message.request_id, ids)
        tokens, cuts = pack(ids), self._rule.cuts(ids)
        asked = message.sampling.max_tokens or self._settings.default_max_tokens
        return Request(
            ticket=ticket,
            ids=ids,
            query=Query(tokens, cuts, prefix_hashes(self._root, tokens, cuts)),
            sampling=message.sampling,
            tokens_max=min(asked, self._context_tokens - len(ids)),
            output=Output(self._vocabulary.detokeniser(), message.sampling.stop),
        )
