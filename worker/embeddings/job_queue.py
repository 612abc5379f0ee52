"""Splits requests into small steps, and chooses the request with the next step.

No step takes longer than its pace allows, except for a single long row.
Owner: the inference thread of the embedding worker.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hearth.shared.wire_messages import Embedded, Reranked
from hearth.worker.embeddings.encoder_models import EmbeddingModel, RerankModel, TokenRow
from hearth.worker.embeddings.length_batches import ForwardPace, LengthBatches
from hearth.worker.schedule.client_lease import ClientLease

TOKENISED_CHARS: Final = 32_768  # characters of one step, which has at least one item
CHARS_A_TOKEN: Final = 4  # guess for items that are not tokenised yet

# (values of all rows in order, number of tokens of each) -> the answer
Finish = Callable[[NDArray[np.float32], list[int]], Embedded | Reranked]


class Job:
    """One request. First its items are tokenised, then the token rows are computed in batches.

    Invariant: a step does one of the two, and each row is computed once.
    """

    def __init__(
        self,
        lease: ClientLease,
        model: EmbeddingModel | RerankModel,
        items: Sequence[Any],
        truncate: bool,
        finish: Finish,
    ) -> None:
        self.lease = lease
        self._model, self._items, self._truncate, self._finish = model, items, truncate, finish
        self._rows: list[TokenRow] = []
        self._batches: LengthBatches | None = None
        self._values: NDArray[np.float32] | None = None
        self._chars_left = sum(map(model.chars, items))

    @property
    def tokens_left(self) -> int:
        """About how many tokens are not computed yet."""
        if self._batches is not None:
            return self._batches.tokens_left
        counted = sum(len(row.ids) for row in self._rows)
        return counted + self._chars_left // CHARS_A_TOKEN

    @property
    def is_tokenised(self) -> bool:
        return len(self._rows) == len(self._items)

    def tokenise(self) -> None:
        """Tokenise the next items. Raises RequestError if the model cannot take one of them."""
        first = stop = len(self._rows)
        chars = 0
        while stop < len(self._items) and (stop == first or chars < TOKENISED_CHARS):
            chars += self._model.chars(self._items[stop])
            stop += 1
        rows = self._model.rows(self._items[first:stop], first, self._truncate)
        self._rows += [row.packed() for row in rows]
        self._chars_left -= chars
        if self.is_tokenised:
            self._batches = LengthBatches([len(row.ids) for row in self._rows])

    def compute(self, pace: ForwardPace, clock: Callable[[], float]) -> float:
        """Compute the next batch; return the seconds that it took by `clock`."""
        assert self._batches is not None, "tokenise first"
        batch = self._batches.take(pace.tokens)
        rows = [self._rows[index] for index in batch]
        began = clock()
        values = self._model.values(rows)
        computed_s = clock() - began
        pace.record(max(len(row.ids) for row in rows) * len(rows), computed_s)
        if self._values is None:
            self._values = np.zeros((len(self._rows), values.shape[1]), np.float32)
        self._values[batch] = values
        return computed_s

    @property
    def is_computed(self) -> bool:
        return self._batches is not None and self._batches.is_empty

    def answer(self) -> Embedded | Reranked:
        """Return the answer, once all is computed. Raises RequestError if there is none."""
        assert self.is_computed and self._values is not None, self.lease.request_id
        return self._finish(self._values, [len(row.ids) for row in self._rows])


class JobQueue(list[Job]):
    """The jobs without an answer, in the order of their arrival.

    Steps go alternately to the oldest job and to the job with the least left to compute. So a short
    request does not wait for a long one, and the oldest request gets every second step.
    """

    _is_shortest_next = True

    def take_gone(self) -> list[Job]:
        """Remove and return the jobs whose clients have left."""
        gone = [job for job in self if job.lease.is_gone]
        self[:] = [job for job in self if job not in gone]
        return gone

    def next(self) -> Job:
        """Return the job that gets the next step."""
        assert self, "the queue is empty"
        is_shortest, self._is_shortest_next = self._is_shortest_next, not self._is_shortest_next
        return min(self, key=lambda job: job.tokens_left) if is_shortest else self[0]
