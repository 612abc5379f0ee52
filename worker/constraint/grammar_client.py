"""Asks the processes that llguidance runs in, and bounds the wait for what they say."""

import atexit
import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Final

from hearth.worker.constraint.grammar_protocol import (
    COMPILE,
    COMPILE_CPU_S,
    ERROR,
    FORK,
    LOAD,
    MEMORY_BYTES_MAX,
    OK,
    STEP,
    STEP_CPU_S,
    TOO_LARGE,
    TRY,
)

ANSWER_S_MAX: Final = 10.0  # a machine may be busy; what a process computes, its own limit ends
LOAD_S_MAX: Final = 120.0  # a large vocabulary takes seconds
_COMPILE_LIMIT: Final = f"it takes more than {COMPILE_CPU_S:g} s of CPU time"
_STEP_LIMIT: Final = f"a token of it takes more than {STEP_CPU_S:g} s of CPU time"
_MODULE: Final = "hearth.worker.constraint.grammar_process"
_ENVIRONMENT: Final = ("PATH", "PYTHONPATH")  # all that is passed on


class GrammarError(Exception):
    """llguidance cannot go on; the text says why and may quote the grammar."""


class GrammarEnded(Exception):
    """A process ended, as what it was asked passed a limit; the text says which."""


class GrammarProcess:
    """One process that llguidance runs in, as the worker sees it. It ends with this object.

    Any thread may ask; one waits for another. Invariant: what was asked is answered before more
    is, and a process that gave no answer is asked nothing more.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, by itself or by the system."""
        with self._lock:
            return self._connection.closed or self._connection.poll(0)

    @property
    def is_ended(self) -> bool:
        """Whether it was ended for what it was asked."""
        return self._connection.closed

    def fork(self) -> "GrammarProcess":
        """Return a process that goes on from where this one is.

        Raises GrammarError where the system has none to give, or has ended this one.
        """
        try:
            with self._lock, self._ending_where_it_breaks("the system has ended it"):
                if (answer := self._answer(FORK, ANSWER_S_MAX))[:1] == OK:
                    return GrammarProcess(Connection(recv_handle(self._connection)))
        except GrammarEnded as error:
            raise GrammarError(str(error)) from error
        raise GrammarError(answer[1:].decode(errors="replace"))

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

    def step(self, tokens: Sequence[int]) -> bytes:
        """Have it go on by tokens; return the mask of the next one: a bit each, lowest first."""
        return self._ask(STEP + struct.pack(f"<{len(tokens)}I", *tokens), _STEP_LIMIT)

    def close(self) -> None:
        """Let it end."""
        self._connection.close()

    def _ask(self, asked: bytes, limit: str, wait_s: float = ANSWER_S_MAX) -> bytes:
        """Return what is answered; `limit` is the one that it ends at without a word.

        Raises:
            GrammarError: llguidance refuses.
            GrammarEnded: the process came to its limits.
        """
        with self._lock, self._ending_where_it_breaks(limit):
            answer = self._answer(asked, wait_s)
        if answer[:1] == ERROR:
            raise GrammarError(answer[1:].decode(errors="replace"))
        return answer[1:]

    def _answer(self, asked: bytes, wait_s: float) -> bytes:
        self._connection.send_bytes(asked)
        if not self._connection.poll(wait_s):
            raise GrammarEnded(f"it gave no answer within {wait_s:.0f} s")
        answer = self._connection.recv_bytes()
        if answer[:1] == TOO_LARGE:
            raise GrammarEnded(f"it takes more than {MEMORY_BYTES_MAX >> 20} MB of memory")
        return answer

    @contextlib.contextmanager
    def _ending_where_it_breaks(self, limit: str) -> Iterator[None]:
        """Close the connection, which ends the process, where it gives no good answer."""
        try:
            yield
        except GrammarEnded:
            self._connection.close()
            raise
        except (EOFError, OSError) as error:
            self._connection.close()
            raise GrammarEnded(limit) from error


class GrammarAnswer:
    """One answer's place in a grammar. Owner: the inference thread.

    Its process is forked at its first token, so that an answer that waits has none.
    """

    def __init__(self, grammar: GrammarProcess, first_mask: bytes) -> None:
        self._grammar = grammar
        self._first_mask = first_mask
        self._process: GrammarProcess | None = None

    def mask(self, tokens: Sequence[int]) -> bytes:
        """Return which token may come behind `tokens`, those since the last call."""
        if self._process is None:
            if not tokens:
                return self._first_mask
            self._process = self._grammar.fork()
        return self._process.step(tokens)


class _Base:
    """The process that all others are forks of. Its end ends them, and our end ends it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name in _ENVIRONMENT}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE],
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
        """Have it end, and wait for that."""
        if self.is_ours:
            atexit.unregister(self.end)
            self.process.close()
            self._process.wait()


_base: _Base | None = None
_base_lock = threading.Lock()


def base_process() -> GrammarProcess:
    """Return the process to fork from; it is started at first need, and anew if it has ended."""
    global _base
    with _base_lock:
        if _base is None or not _base.is_ours or _base.process.is_gone:
            if _base is not None:
                _base.end()
            _base = _Base()
        return _base.process


def end_base() -> None:
    """End all processes; the next grammar starts them anew."""
    global _base
    with _base_lock:
        ended, _base = _base, None
    if ended is not None:
        ended.end()
