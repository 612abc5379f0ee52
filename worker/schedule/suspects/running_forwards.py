"""Names in the worker's forward record the requests whose forward runs, before it does.

What breaks amid a forward belongs to one of them: the supervisor reads the record after a death.
"""

from collections.abc import Collection

from hearth.shared.suspects.forward_record import (
    NO_NAME,
    ForwardKind,
    ForwardRecord,
    ForwardRow,
)
from hearth.shared.suspects.suspect_store import SuspectStore
from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.schedule.request_state import Request


class RunningForwards:
    """Keeps the record of one worker. Owner: the inference thread. No method makes a system call.

    Invariant: between two steps the record names those that decode, since a device is one token
    ahead of what they were given; with nobody there it names nobody.
    A step of the same requests costs one store of four bytes.
    """

    def __init__(
        self, record: ForwardRecord | None = None, store: SuspectStore | None = None
    ) -> None:
        """Without either it names nobody: a worker that no supervisor watches."""
        self._record = record if store is not None else None
        self._store = store
        self._decoding: tuple[str, ...] | None = ()  # that alone are named; None = others are too
        self._steps = 0  # since they are
        self._answers: dict[str, ForwardRow] = {}  # of those that decode, as each began to

    def admit(self, request: Request, decoding: Collection[Request] = ()) -> None:
        """`request` is looked up, or given its slot, beside what decodes."""
        self._write(request, "admit", len(request.query.names) - 1, decoding)

    def read(self, request: Request, decoding: Collection[Request], *, is_image: bool) -> None:
        """A chunk of `request` is read, or an image encoded for it, beside what decodes."""
        self._write(request, "image" if is_image else "prefill", request.next_cut(), decoding)

    def decode(self, decoding: Collection[Request]) -> None:
        """These get their next token."""
        if self._record is not None and not self._name_only(decoding):
            self._steps += 1
            self._record.note_steps(self._steps)

    def rest(self, decoding: Collection[Request]) -> None:
        """Nothing is computed but what is ahead of the tokens that these were given."""
        self._name_only(decoding)

    def idle(self, query: PrefixQuery, number: int) -> None:
        """Work of nobody's reads `query` to its cut `number`."""
        if self._record is None or self._store is None:
            return
        name = idle_name(self._store, query.names[number])
        length = query.cuts[number]
        self._record.write([ForwardRow("", name, NO_NAME, length, length, "idle").packed()])
        self._decoding = None

    def _name_only(self, decoding: Collection[Request]) -> bool:
        """Have only those named that decode; say whether that was to be done."""
        ids = tuple(request.request_id for request in decoding)
        if self._record is None or ids == self._decoding:
            return False
        self._record.write(self._decode_rows(decoding, is_sole=len(ids) == 1))
        self._decoding, self._steps = ids, 0
        return True

    def _write(
        self, request: Request, kind: ForwardKind, number: int, decoding: Collection[Request]
    ) -> None:
        if self._record is None:
            return
        row = self._row(request, kind, number).packed(0, is_sole=not decoding)
        self._record.write([row, *self._decode_rows(decoding, is_sole=False)])
        self._decoding = None

    def _decode_rows(self, decoding: Collection[Request], *, is_sole: bool) -> list[bytes]:
        """Return the rows of who decodes, whose names are made once."""
        known = self._answers
        self._answers = {
            request.request_id: known.get(request.request_id) or self._row(request, "decode", -1)
            for request in decoding
        }
        return [
            self._answers[request.request_id].packed(request.completion_tokens, is_sole=is_sole)
            for request in decoding
        ]

    def _row(self, request: Request, kind: ForwardKind, number: int) -> ForwardRow:
        """Return the row of a forward to the cut `number`, or, with -1, behind all of them."""
        assert self._store is not None, "there is a record"
        query = request.query
        if number >= 0:
            name, length = self._store.named(query.names[number]), query.cuts[number]
        else:
            name, length = answer_name(self._store, request.prompt_name), request.prompt_tokens
        longest = max(request.suspicions, key=lambda row: row.length, default=None)
        return ForwardRow(
            request.request_id,
            name,
            owner_name(self._store, request.key),
            length,
            length,
            kind,
            longest is not None,
            bytes.fromhex(longest.name) if longest is not None else NO_NAME,
        )


def answer_name(store: SuspectStore, prompt: PrefixHash) -> bytes:
    """Return by what the answer to a prompt is suspected, which is no matter of longer prompts."""
    return store.named(prompt, "answer")


def idle_name(store: SuspectStore, prefix: PrefixHash) -> bytes:
    """Return by what tokens are suspected in idle time, which no request is refused for."""
    return store.named(prefix, "idle")


def owner_name(store: SuspectStore, key: str) -> bytes:
    """Return by what an API key, given by its digest, is known in the store alone."""
    return store.named(key.encode(), "owner")
