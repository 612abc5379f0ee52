"""Asks the processes that llguidance runs in, and bounds the wait for what they say."""

import atexit
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Final, TypeVar

from hearth.worker.constraint.grammar_protocol import (
    BROKEN,
    COMPILE,
    COMPILE_CPU_S,
    DRAFT,
    ERROR,
    FORCED,
    FORK,
    HELD,
    LOAD,
    MEMORY_BYTES_MAX,
    OK,
    RECEIVE_S_MAX,
    SEND_S_MAX,
    SOUND,
    STEP,
    STEP_CPU_S,
    TOO_LARGE,
    TRY,
    bound_waits,
    pack_tokens,
)

ANSWER_S_MAX: Final = 10.0  # a machine may be busy; what a process computes, its own limit ends
FORK_S_MAX: Final = 2.0  # of a process that has answered before
STEP_S_MAX: Final = 2.0  # the inference thread waits
STEP_S_MIN: Final = 0.05  # where others have given no answer
SLICE_S: Final = 0.1  # of a wait; a machine that is paused as a whole takes one of it
VAIN_DIVISOR: Final = 4  # by which each wait in vain shortens the next
VAIN_FORGOTTEN_S: Final = 30.0
ANSWER_BYTES_MAX: Final = 64 << 20
LOAD_S_MAX: Final = 120.0  # a large vocabulary takes seconds
TOLD_TOKENS_MAX: Final = 64  # at once: each message has the time of one step
_MEMORY_LIMIT: Final = f"it takes more than {MEMORY_BYTES_MAX >> 20} MB of memory"
_CRASHES: Final = (b"Abort", b"Segmentation", b"Bus")  # where memory runs out
_COMPILE_LIMIT: Final = f"it takes more than {COMPILE_CPU_S:g} s of CPU time"
_STEP_LIMIT: Final = f"a token of it takes more than {STEP_CPU_S:g} s of CPU time"
_MODULE: Final = "hearth.worker.constraint.grammar_process"
_ENVIRONMENT: Final = ("PATH", "PYTHONPATH")  # all that is passed on

R = TypeVar("R")
T = TypeVar("T")


class GrammarError(Exception):
    """llguidance cannot go on; the text says why and may quote the grammar."""


class GrammarEnded(Exception):
    """A process ended, as what it was asked passed a limit; the text says which."""


class GrammarLost(Exception):
    """A process was killed, or stands still: nothing that was asked did it. The text says which."""


class GrammarStill(GrammarLost):
    """A process gave no answer in time."""


class GrammarProcess:
    """One process that llguidance runs in, as the worker sees it. It ends with this object.

    Any thread may ask; one waits for another. Invariant: what was asked is answered before more
    is, and a process that gave no answer is asked nothing more.
    """

    def __init__(self, connection: Connection, parent: "GrammarProcess | None" = None) -> None:
        """`parent`, which it is a fork of, is alive as long as this one."""
        self._connection = connection
        self._parent = parent
        self._lock = threading.Lock()
        self._has_answered = False  # before that it may be starting yet

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, by itself or by the system."""
        with self._lock:
            return self._connection.closed or self._connection.poll(0)

    @property
    def is_ended(self) -> bool:
        """Whether it was ended for what it was asked."""
        return self._connection.closed

    def fork(self, wait_s: float | None = None) -> "GrammarProcess":
        """Return a process that goes on from where this one is.

        Raises GrammarLost where the system has none to give, or has ended this one.
        """
        with self._lock, self._ending_where_it_breaks():
            if wait_s is None:
                wait_s = FORK_S_MAX if self._has_answered else ANSWER_S_MAX
            answer = self._answer(FORK, "", wait_s)
            if answer[:1] == OK:
                self._wait_for_answer(wait_s)  # the handle is a message of its own
                return GrammarProcess(Connection(recv_handle(self._connection)), self)
        raise GrammarLost(answer[1:].decode(errors="replace"))

    def load(self, config: str, size: int, ends: Sequence[int]) -> None:
        """Have it read a tokenizer of `size` tokens, of which `ends` end a turn."""
        head = struct.pack(f"<II{len(ends)}I", size, len(ends), *ends)
        self._ask(LOAD + head + config.encode(), "its tokenizer ended it", LOAD_S_MAX)

    def compile(self, source: str) -> bytes:
        """Have it compile a grammar; return the mask of its first token."""
        return self._ask(COMPILE + source.encode(), _COMPILE_LIMIT)

    def attempt(self, source: str) -> None:
        """Have it compile a grammar and write random answers with it."""
        self._ask(TRY + source.encode(), _COMPILE_LIMIT)

    def held_bytes(self) -> int:
        """Return how much more memory it has had than what it was first limited at."""
        return int.from_bytes(self._ask(HELD, _MEMORY_LIMIT), "little")

    def step(self, tokens: Sequence[int], wait_s: float = STEP_S_MAX) -> bytes:
        """Have it go on by tokens; return the mask of the next one: a bit each, lowest first."""
        return self._ask(STEP + pack_tokens(tokens), _STEP_LIMIT, wait_s)

    def draft(
        self, tokens: Sequence[int], draft: Sequence[int], mask_bytes: int, wait_s: float
    ) -> tuple[list[bytes], bytes]:
        """Have it go on by tokens, and look ahead over a draft, of which it takes nothing.

        Returns the masks behind each part of the draft, up to its first token that may not come,
        and how it is then: SOUND or BROKEN.
        """
        answer = self._ask(DRAFT + pack_tokens(tokens, draft), _STEP_LIMIT, wait_s)
        assert (len(answer) - 1) % mask_bytes == 0, (len(answer), mask_bytes)
        masks = [answer[n : n + mask_bytes] for n in range(1, len(answer), mask_bytes)]
        return masks, answer[:1]

    def forced(self, tokens: Sequence[int], wait_s: float) -> tuple[list[int], bytes]:
        """Have it go on by tokens; return those that have to come next, and how it is then:
        SOUND or BROKEN.

        A text that is forced is told in the tokens that its tokenizer reads it as.
        """
        answer = self._ask(FORCED + pack_tokens(tokens), _STEP_LIMIT, wait_s)
        return list(struct.unpack(f"<{len(answer) // 4}I", answer[1:])), answer[:1]

    def close(self) -> None:
        """Let it end."""
        self._connection.close()

    def _ask(self, asked: bytes, limit: str, wait_s: float = ANSWER_S_MAX) -> bytes:
        """Return what is answered; `limit` is that of the CPU time that it takes.

        Raises:
            GrammarError: llguidance refuses.
            GrammarEnded: the process came to its limits.
            GrammarLost: it was killed, or stands still.
        """
        with self._lock, self._ending_where_it_breaks():
            answer = self._answer(asked, limit, wait_s)
        if answer[:1] == ERROR:
            raise GrammarError(answer[1:].decode(errors="replace"))
        return answer[1:]

    def _answer(self, asked: bytes, limit: str, wait_s: float) -> bytes:
        with contextlib.suppress(BrokenPipeError):  # its last words may be there to be read
            self._connection.send_bytes(asked)
        self._wait_for_answer(wait_s)
        try:
            answer = self._connection.recv_bytes(ANSWER_BYTES_MAX)
        except (EOFError, BlockingIOError):
            raise
        except OSError as error:  # what a signal's handler writes is no message of ours
            raise self._ended_by_signal(limit) from error
        if answer[:1] == TOO_LARGE:
            raise GrammarEnded(_MEMORY_LIMIT)
        self._has_answered = True
        return answer

    def _wait_for_answer(self, wait_s: float) -> None:
        """Wait until a message comes, `wait_s` of time in which this process could have read it.

        Where the system pauses all of us (a virtual machine, SIGSTOP), one slice goes by.
        Raises GrammarStill.
        """
        slices = max(1, round(wait_s / SLICE_S))
        if not any(self._connection.poll(wait_s / slices) for _ in range(slices)):
            raise GrammarStill(f"it gave no answer within {wait_s:g} s")

    def _ended_by_signal(self, limit: str) -> GrammarEnded | GrammarLost:
        """Return why it ended, by the last words of its signal handler.

        A process that is killed has none.
        """
        words = b""
        with contextlib.suppress(OSError):
            while read := os.read(self._connection.fileno(), 4096):
                words += read
        if not words:
            return GrammarLost("the system has ended it")
        return GrammarEnded(_MEMORY_LIMIT if any(map(words.__contains__, _CRASHES)) else limit)

    @contextlib.contextmanager
    def _ending_where_it_breaks(self) -> Iterator[None]:
        """Close the connection, which ends the process, where it gives no good answer."""
        try:
            yield
        except (GrammarEnded, GrammarLost):
            self._connection.close()
            raise
        except BlockingIOError as error:  # the socket's own limits of time
            self._connection.close()
            raise GrammarStill(
                f"it took no more of a message within {SEND_S_MAX} s, or gave no more of one "
                f"within {RECEIVE_S_MAX} s"
            ) from error
        except (EOFError, OSError) as error:
            self._connection.close()
            raise GrammarLost("the system has ended it") from error


class Patience:
    """Says how long the inference thread waits for the process of one answer.

    Where one stands still others may too, as where the machine swaps: each wait in vain shortens
    the next, so that all of them together take little more than the first.
    Owner: the inference thread.
    """

    def __init__(self, first_s: float = STEP_S_MAX) -> None:
        self.first_s = first_s  # where no wait was in vain
        self._vain_count = 0
        self._vain_at = 0.0

    @property
    def wait_s(self) -> float:
        """How long to wait now."""
        if time.monotonic() - self._vain_at > VAIN_FORGOTTEN_S:
            self._vain_count = 0
        return float(max(self.first_s / VAIN_DIVISOR**self._vain_count, STEP_S_MIN))

    def note_in_vain(self) -> None:
        """Count a wait that no answer came in."""
        self._vain_count += 1
        self._vain_at = time.monotonic()


# What one process is asked behind the tokens that it is told, and how long it is waited for.
_Ask = Callable[[GrammarProcess, Sequence[int], float], R]


class GrammarAnswer:
    """One answer's place in a grammar. Owner: the inference thread.

    Its process is forked at its first token, so that an answer that waits has none.
    Invariant: to look ahead ends no answer. A process that fails once it has looked ahead is
    replaced by one that is told the same tokens, and from then on nothing is looked at ahead.
    """

    def __init__(
        self, grammar: GrammarProcess, first_mask: bytes, patience: Patience | None = None
    ) -> None:
        """Take what it goes on from; answers that share `patience` stand still together."""
        self._grammar = grammar
        self._patience = patience or Patience()
        self._mask_bytes = len(first_mask)
        self._mask: bytes | None = first_mask  # behind all tokens; None = not asked for yet
        self._tokens: list[int] = []
        self._process: GrammarProcess | None = None
        self._told_count = 0  # tokens that its process knows
        self._has_looked_ahead = False  # in this process
        self._may_look_ahead = True

    def mask(self, tokens: Sequence[int]) -> bytes:
        """Return which token may come behind `tokens`, those since the last call of any method.

        Raises GrammarError, GrammarEnded and GrammarLost, as all methods do.
        """
        self._take(tokens)
        if self._mask is None:
            step = GrammarProcess.step
            self._mask = self._asked(step) or self._asked(step)
            assert self._mask is not None, "the second one has looked ahead nowhere, and raises"
        return self._mask

    def masks(self, tokens: Sequence[int], draft: Sequence[int]) -> list[bytes]:
        """Return `mask(tokens)`, and those behind each part of `draft` that may come then.

        They are no more than the draft's tokens and one; the draft is not taken.
        """
        self._take(tokens)
        if not draft or not self._may_look_ahead:
            return [self.mask(())]
        masks = self._looked_ahead(
            lambda process, told, wait_s: process.draft(told, draft, self._mask_bytes, wait_s)
        )
        if not masks:
            return [self.mask(())]
        self._mask = masks[0]
        return masks

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that have to come behind `tokens`, those since the last call."""
        self._take(tokens)
        return self._looked_ahead(GrammarProcess.forced) if self._may_look_ahead else []

    def _take(self, tokens: Sequence[int]) -> None:
        if tokens:
            self._tokens += tokens
            self._mask = None

    def _looked_ahead(self, ask: _Ask[tuple[list[T], bytes]]) -> list[T]:
        """Return what is found; nothing where the process failed by it."""
        self._has_looked_ahead = True
        found, state = self._asked(ask) or ([], SOUND)
        if state == BROKEN:
            self._drop_process()
        return found

    def _asked(self, ask: _Ask[R]) -> R | None:
        """Return what is told behind all tokens; None where looking ahead had the process fail."""
        wait_s = self._patience.wait_s
        try:
            if self._process is None:
                self._process = self._grammar.fork(wait_s)
            while len(self._tokens) - self._told_count > TOLD_TOKENS_MAX:
                self._process.step(self._untold(TOLD_TOKENS_MAX), wait_s)
            return ask(self._process, self._untold(TOLD_TOKENS_MAX), wait_s)
        except GrammarStill:
            self._patience.note_in_vain()
            raise
        except (GrammarError, GrammarEnded):
            if not self._has_looked_ahead:
                raise
            self._drop_process()
            return None

    def _untold(self, count: int) -> list[int]:
        """Return the next tokens that the process does not know, which are told it now."""
        untold = self._tokens[self._told_count : self._told_count + count]
        self._told_count += len(untold)
        return untold

    def _drop_process(self) -> None:
        """Have the next one look ahead nowhere."""
        self._has_looked_ahead = self._may_look_ahead = False
        self._process, self._told_count = None, 0


class _Base:
    """The process that all others are forks of. Its end ends them, and our end ends it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name in _ENVIRONMENT}
        bound_waits(ours)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE],
                env=environment | {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a panic in llguidance quotes what it was at
                start_new_session=True,  # it ends its whole group
            )
        self.process = GrammarProcess(Connection(ours.detach()))
        self._owner_pid = os.getpid()
        atexit.register(self.end)

    @property
    def is_ours(self) -> bool:
        """Whether this process has started it, not one that this is a fork of."""
        return self._owner_pid == os.getpid()

    def end(self) -> None:
        """End it and all its forks, also where they stand still, and wait for that."""
        if self.is_ours:
            atexit.unregister(self.end)
            self.process.close()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


_base: _Base | None = None
_forks: weakref.WeakSet[GrammarProcess] = weakref.WeakSet()  # of the base
_base_lock = threading.RLock()


def base_process() -> GrammarProcess:
    """Return the process to fork from; it is started at first need, and anew if it has ended."""
    global _base
    with _base_lock:
        if _base is None or not _base.is_ours or _base.process.is_gone:
            if _base is not None:
                _base.end()
            _base = _Base()
        return _base.process


def fork_base() -> GrammarProcess:
    """Return a fork of the base; one that is lost is started anew, once. Raises GrammarLost."""
    with _base_lock:
        try:
            fork = base_process().fork()
        except GrammarLost:
            fork = base_process().fork()
        _forks.add(fork)
    return fork


def end_unused_base() -> None:
    """End the base where it has no forks, nor forks of these, and none is being made."""
    if _base_lock.acquire(blocking=False):
        try:
            if _base is not None and not _forks:
                end_base()
        finally:
            _base_lock.release()


def end_base() -> None:
    """End all processes; the next grammar starts them anew."""
    global _base
    with _base_lock:
        ended, _base = _base, None
    if ended is not None:
        ended.end()
