"""The prompt thread: turns a Submit into a Request, and answers Count. Touches no MLX."""

import logging
import queue
from collections.abc import Callable

from shared.config import Settings
from shared.errors import RequestError
from shared.wire import Count, Counted, Failed, Submit, Up
from worker.engine.sampling import check
from worker.prompt.cuts import CutRule
from worker.prompt.render import Renderer
from worker.request import Request, Ticket
from worker.stream.detokenise import Vocabulary
from worker.stream.output import Output

log = logging.getLogger(__name__)


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
    ) -> None:
        self._settings = settings
        self._renderer = renderer
        self._rule = rule
        self._vocabulary = vocabulary
        self._context_tokens, self._vocab_size = limits

    def run(
        self,
        jobs: "queue.SimpleQueue[tuple[Ticket, Submit | Count] | None]",
        inbox: "queue.SimpleQueue[Request]",
        send: Callable[[Up], None],
    ) -> None:
        """Work until None comes."""
        while (job := jobs.get()) is not None:
            ticket, message = job
            if ticket.is_gone:
                send(Failed(message.request_id, 499, "client_closed", "The client is gone."))
                continue
            try:
                if isinstance(message, Count):
                    tokens = len(self._renderer.ids(message.prompt))
                    send(Counted(message.request_id, tokens))
                else:
                    inbox.put(self.request(ticket, message))
            except RequestError as error:
                log.info("refused request=%s code=%s", message.request_id, error.code)
                send(Failed(message.request_id, error.status, error.code, str(error)))

    def request(self, ticket: Ticket, message: Submit) -> Request:
        """Return the request ready to be computed. Raises RequestError."""
        check(message.sampling, self._vocab_size)
        ids = self._renderer.ids(message.prompt)
        asked = message.sampling.max_tokens or self._settings.default_max_tokens
        return Request(
            ticket=ticket,
            ids=ids,
            cuts=self._rule.cuts(ids),
            sampling=message.sampling,
            tokens_max=min(asked, self._context_tokens - len(ids)),
            output=Output(self._vocabulary.detokeniser(), message.sampling.stop),
        )
