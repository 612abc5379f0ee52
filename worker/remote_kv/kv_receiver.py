"""Brings KV of prompts from workers elsewhere, and makes it files of this worker's own.

A prompt then goes on from them as from any other file: they are read, checked and taken in by the
same code. A move is worth it as long as what is left of it comes sooner than a prefill would; all
that fails is a counted miss, and the prompt is prefilled.
"""

import logging
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from hearth.shared.kv_move_messages import (
    CHUNK_BYTES,
    SEEK_NAMES_MAX,
    Chunk,
    Fetch,
    Found,
    Seek,
)
from hearth.shared.suspending_clock import awake_s
from hearth.worker.cache.block_hash import prefix_hashes
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.disk.disk_thread import DiskThread
from hearth.worker.disk.file_names import FileKind
from hearth.worker.remote_kv.kv_sender import Post
from hearth.worker.remote_kv.moved_files import (
    MovedFile,
    MoveRules,
    UnusableMove,
    moved_files,
    record_of,
)
from hearth.worker.remote_kv.transfer_speed import TransferSpeed

MOVES_MAX: Final = 4  # at once
TOKENS_MIN: Final = 256  # fewer are sooner read anew than asked for
SILENCE_S_MAX: Final = 2.0  # of a holder, or of the line to it
DISTRUST_AFTER: Final = 3  # times that it was refused: nothing more is taken from that worker
HONEST: Final = ("by_disk", "exact", "room")  # reasons that lie with this worker
PIECE_BYTES_MIN: Final = 128 * 1024  # of the first piece that comes over a line not measured yet
PIECE_S: Final = 0.1  # answers wait behind a piece: none is larger than comes within that

log = logging.getLogger(__name__)


class Asker(Protocol):
    """Whose prompt it is: the proxy that sent it, and whether anybody still waits."""

    @property
    def peer(self) -> bytes: ...

    @property
    def is_gone(self) -> bool: ...


@dataclass(slots=True, eq=False)
class Move:
    """One prompt's KV on its way. `ends` are its prefixes by the names that were sought.

    Owner: the I/O thread; the inference thread reads `is_late`, and may set `is_over`.
    """

    seek_id: str
    query: PrefixQuery
    asker: Asker
    ends: dict[bytes, int]
    reached: Collection[int]  # positions that the prompt can be resumed from, or joined to, here
    kept_tokens: int
    tokens_per_s: float  # of a prefill
    then: Callable[[], None]
    asked_at: float = field(default_factory=awake_s)
    heard_at: float = field(default_factory=awake_s)
    is_over: bool = False
    found: Found | None = None
    files: list[MovedFile] = field(default_factory=list)  # that are still to come, this one first
    content: NDArray[np.uint8] | None = None  # of the first of them, as it comes
    received: int = 0  # bytes of it
    fetched_at: float = 0.0  # when the last piece was asked for
    piece_bytes: int = CHUNK_BYTES  # how much is asked for at once
    leader: "Move | None" = None  # that brings most of it: nothing is sent for this one
    position: int = 0  # that the prompt would be kept up to

    @property
    def prefill_s(self) -> float:
        """How long it takes to read anew what the move would spare, at most."""
        end = self.position or max(self.ends.values())
        return (end - self.kept_tokens) / self.tokens_per_s

    @property
    def is_late(self) -> bool:
        """Whether waiting has become dearer than reading the prompt. Any thread."""
        now, sent = awake_s(), self.leader or self
        is_silent = now - sent.heard_at > SILENCE_S_MAX
        return sent.is_over or self.is_over or is_silent or now - self.asked_at > self.prefill_s

    @property
    def left_bytes(self) -> int:
        return sum(file.nbytes for file in self.files) - self.received

    def is_slow(self, bytes_per_s: float) -> bool:
        """Whether at such a speed it would become late: then it is so now."""
        takes_s = awake_s() - self.asked_at + self.left_bytes / bytes_per_s
        return takes_s > self.prefill_s


class KVReceiver:
    """Seeks KV, fetches it piece by piece, and puts each file into the file store.

    Each move that is sought and not given up ends in one call of its `then`, on the I/O thread or
    the wire's.
    Invariant: at most MOVES_MAX moves, each with one file in memory that is not whole.
    Owner: the I/O thread; `seek`, `give_up` and `forget` are the inference thread's, `hear` is the
    wire thread's.
    """

    def __init__(
        self,
        disk: DiskThread,
        rules: MoveRules,
        post: Post,
        fits: Callable[[Collection[tuple[int, int]]], bool] = lambda rows: True,
    ) -> None:
        """`fits` as of DiskTier: whether rows may be in RAM."""
        self.counts: Counter[str] = Counter()
        self.speed = TransferSpeed()
        self._disk = disk
        self._rules = rules
        self._post = post
        self._fits = fits
        self._moves: dict[str, Move] = {}  # one step of the interpreter each: threads share it
        self._refusals: Counter[int] = Counter()  # by holder

    # ------------------------------------------------------------ the inference thread

    def seek(
        self,
        query: PrefixQuery,
        asker: Asker,
        reached: Collection[int],
        kept_tokens: int,
        tokens_per_s: float,
        then: Callable[[], None],
    ) -> Move | None:
        """Ask for the KV of a prompt beyond `kept_tokens`; None where it is not worth asking.

        Where another prompt's move brings most of it already this one waits for that, and is late
        once that is over.
        """
        cuts = [cut for cut in query.cuts if cut - kept_tokens >= TOKENS_MIN][-SEEK_NAMES_MAX:]
        if query.portable_root is None or not cuts:
            return None
        self._give_up_dead()
        names = prefix_hashes(query.portable_root, query.tokens, cuts)
        ends: dict[bytes, int] = dict(zip(names, cuts, strict=True))
        seek_id = uuid.uuid4().hex
        move = Move(seek_id, query, asker, ends, reached, kept_tokens, tokens_per_s, then)
        if self._joins_other(move):
            self.counts["joined"] += 1
            return move
        if len(self._moves) >= MOVES_MAX:
            return None
        self._moves[seek_id] = move
        self.counts["sought"] += 1
        self._post(asker.peer, Seek(seek_id, list(reversed(names))))
        return move

    def _give_up_dead(self) -> None:
        """Leave the moves that nobody waits for, and that no answer ends: their proxy died."""
        for move in list(self._moves.values()):
            if move.is_late or move.asker.is_gone:
                self.give_up(move)

    def _joins_other(self, move: Move) -> bool:
        """Have it wait for a move that brings more of the prompt than it leaves, if any does."""
        for other in list(self._moves.values()):
            shared = max((move.ends[name] for name in move.ends.keys() & other.ends), default=0)
            if shared - move.kept_tokens > max(move.ends.values()) - shared:
                move.leader, move.position = other, shared
                return True
        return False

    def give_up(self, move: Move) -> None:
        """Nobody waits for a move any more; what has come of it is on disk."""
        move.is_over = True
        if self._moves.pop(move.seek_id, None) is not None:
            self.counts["given_up"] += 1

    def forget(self) -> None:
        """The cache is emptied: what is on its way is not kept."""
        for move in list(self._moves.values()):
            self.give_up(move)

    # ------------------------------------------------------------ the wire thread

    def hear(self, message: Found | Chunk) -> None:
        """Take what came for a move, later. Where the disk has no time the move becomes late.

        That there is nothing (more) needs no disk: no prompt waits for what others write there.
        """
        move = self._moves.get(message.seek_id)
        if move is None:
            return
        move.heard_at = awake_s()
        if isinstance(message, Found) and not message.name:
            self.counts["lost" if move.found else "nowhere"] += 1
            self._end(move)
            return
        self._disk.later(partial(self._take, move, message, move.heard_at))

    # ------------------------------------------------------------ the I/O thread

    def _take(self, move: Move, message: Found | Chunk, heard_at: float) -> None:
        if move.is_over:
            return
        try:
            if isinstance(message, Found):
                self._begin(move, message)
            else:
                self._go_on(move, message, heard_at)
        except UnusableMove as refusal:
            self.counts[f"refused_{refusal.reason}"] += 1
            if refusal.reason not in HONEST and move.found is not None:
                self._distrust(move.found.holder, refusal.reason)
            self._end(move)
        except Exception:
            self._end(move)
            raise

    def _begin(self, move: Move, found: Found) -> None:
        """Take what is offered."""
        if move.found is not None or found.name not in move.ends:
            raise UnusableMove("answer")
        move.found, end = found, move.ends[found.name]
        if self._refusals[found.holder] >= DISTRUST_AFTER:
            self.counts["distrusted"] += 1
            self._end(move)
            return
        files = moved_files(found, end, move.query, self._rules)
        begin = max((file.position for file in files if file.position in move.reached), default=0)
        store = self._disk.file_store
        move.files = [
            file
            for file in files
            if not store.holds(file.mine)
            and (file.end > begin or file.theirs.kind is not FileKind.ROWS)
        ]
        move.position = end
        self._check_room([file for file in files if file.end > begin], move.left_bytes)
        speed = self.speed.bytes_per_s(found.holder)
        measured = PIECE_BYTES_MIN if speed is None else int(speed * PIECE_S)
        move.piece_bytes = min(max(measured, PIECE_BYTES_MIN), CHUNK_BYTES)
        self._fetch(move)

    def _check_room(self, files: Sequence[MovedFile], nbytes: int) -> None:
        """Raise UnusableMove where `nbytes` may not be written, or `files` not be read then."""
        kinds = ((file.theirs, file.nbytes) for file in files)
        rows = [(name.token_count, size) for name, size in kinds if name.kind is FileKind.ROWS]
        if not (self._disk.file_store.takes(nbytes) and self._fits(rows)):
            raise UnusableMove("room")

    def _go_on(self, move: Move, chunk: Chunk, heard_at: float) -> None:
        """Take a piece of the file that is fetched; put it into the store once it is whole."""
        if move.found is None:
            raise UnusableMove("answer")
        file, size = move.files[0], len(chunk.data)
        if not size:
            self.counts["lost"] += 1
            self._end(move)
            return
        is_asked = (chunk.file, chunk.offset) == (file.number, move.received)
        if not is_asked or size > min(CHUNK_BYTES, file.nbytes - move.received):
            raise UnusableMove("answer")
        took_s = heard_at - move.fetched_at
        self.speed.note(move.found.holder, size, took_s)
        may_grow = size == move.piece_bytes < CHUNK_BYTES and took_s < PIECE_S
        move.piece_bytes = min(move.piece_bytes * (1 + may_grow), CHUNK_BYTES)
        self.counts["bytes"] += size
        if move.content is None:
            move.content = np.empty(file.nbytes, np.uint8)
        move.content[move.received : move.received + size] = np.frombuffer(chunk.data, np.uint8)
        move.received += size
        if move.received < file.nbytes:
            self._fetch(move)
            return
        content, move.content, move.received = move.content, None, 0
        del move.files[0]
        if move.files:
            self._fetch(move)  # comes while this one is written
        self._put(move, move.found, file, content)
        if not move.files and not move.is_over:
            self.counts["moved"] += 1
            self.counts["moved_tokens"] += move.position - move.kept_tokens
            self._end(move)

    def _fetch(self, move: Move) -> None:
        """Ask for the next piece, where all will have come sooner than a prefill would."""
        assert move.found is not None
        speed = self.speed.bytes_per_s(move.found.holder)
        is_slow = move.is_late or (speed is not None and move.is_slow(speed))
        if is_slow or not move.files or move.asker.is_gone:
            self.counts["slow" if is_slow else "needless"] += 1
            self._end(move)
            return
        move.fetched_at = awake_s()
        file, size = move.files[0], move.piece_bytes
        self._post(move.asker.peer, Fetch(move.seek_id, file.number, move.received, size))

    def _put(self, move: Move, found: Found, file: MovedFile, content: NDArray[np.uint8]) -> None:
        record = record_of(file, content, found, move.query, self._rules.root)
        if not self._disk.file_store.put(record, is_needed=True):
            raise UnusableMove("by_disk")

    def _distrust(self, holder: int, reason: str) -> None:
        self._refusals[holder] += 1
        if self._refusals[holder] == 1:
            log.warning(
                "KV from worker %d is not taken, it is not what was asked for (%s). Said once; "
                "later ones are counted (moves in /v1/cache). Look whose key that worker has.",
                holder,
                reason,
            )

    def _end(self, move: Move) -> None:
        if self._moves.pop(move.seek_id, None) is not None:
            move.is_over = True
            move.then()
