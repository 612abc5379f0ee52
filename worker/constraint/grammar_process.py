"""Runs llguidance in processes of its own: `python -m hearth.worker.constraint.grammar_process`.

A client's schema is a program, and llguidance's own limits do not bound what it costs. So one
process runs no more than one client's grammar, has limits of its own, and ends where it passes
them; no one else's answer is in it. Each is a fork of the one that it goes on from:

    base        llguidance is imported; the worker starts it, and its end ends all
      tokenizer   knows one model's tokens
        grammar     knows one grammar and its first mask, and is remembered
          answer      is somewhere in that grammar

Imports no MLX and starts no thread, as it forks. Nothing that it is asked is logged.
"""

import contextlib
import faulthandler
import os
import random
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from hearth.worker.constraint.grammar_protocol import (
    BROKEN,
    COMPILE,
    COMPILE_CPU_S,
    DRAFT,
    DRAFT_CPU_S,
    ERROR,
    FORCED,
    FORK,
    HELD,
    LOAD,
    MEMORY_BYTES_MAX,
    OK,
    SOUND,
    STEP,
    STEP_CPU_S,
    STEP_REFILL_CPU_S,
    TOO_LARGE,
    TRY,
    bound_waits,
    unpack_tokens,
)

LEXER_STATES_MAX: Final = 50_000
TRIED_STEPS: Final = 64  # tokens of random answers with which a pattern is tried
_SILENT: Final = 0  # llguidance's log level: above it the answer is quoted on stderr


class _Clock:
    """Bounds the CPU time of what a client's grammar asks for: it ends this process.

    Python could not: a signal's handler waits for llguidance to return.
    """

    def __init__(self, left_s: float) -> None:
        self.left_s = left_s

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Have the system end this process where what is done within takes more than is left.

        The thread's time is counted, and all is done on one: while such a timer runs, Linux tells
        the process' time as it was at the last tick.
        """
        began = time.thread_time()
        signal.setitimer(signal.ITIMER_PROF, max(self.left_s, 0.001))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self.left_s -= time.thread_time() - began

    def refill(self, tokens_said: int) -> None:
        self.left_s = min(self.left_s + STEP_REFILL_CPU_S * tokens_said, STEP_CPU_S)


class _Process:
    """The state of this process. Everything is asked, and answered, over one connection."""

    def __init__(self, connection: Connection) -> None:
        self._connect(connection)
        self._tokenizer: LLTokenizer | None = None
        self._matcher: LLMatcher | None = None
        self._clock = _Clock(COMPILE_CPU_S)  # of what is asked
        self._ahead_clock = _Clock(STEP_CPU_S)  # of looks ahead: they shorten no step's time
        self._memory_max = 0  # 0 = no limit
        self._limits = LLParserLimits(verbose_errors=False, max_lexer_states=LEXER_STATES_MAX)
        self._answers: dict[bytes, Callable[[bytes], bytes]] = {
            LOAD: self._load,
            COMPILE: self._compile,
            TRY: self._try,
            HELD: self._held,
            STEP: self._step,
            DRAFT: self._draft,
            FORCED: self._forced,
        }

    def _connect(self, connection: Connection) -> None:
        """Take the connection; whatever signal ends this process is told there first.

        So the worker tells a limit that was passed from a process that was killed. What is told is
        no answer, and names lines of this program alone.
        """
        self._connection = connection
        faulthandler.enable(connection.fileno(), all_threads=False)
        faulthandler.register(signal.SIGPROF, connection.fileno(), all_threads=False, chain=True)

    def run(self) -> None:
        """Answer until the worker has nothing more to ask. Raises EOFError then."""
        while True:
            asked = self._connection.recv_bytes()
            what, about = asked[:1], asked[1:]
            if what == FORK:
                self._fork()
            else:
                answer = self._within_limits(self._answers[what], about)
                self._connection.send_bytes(answer)

    def _fork(self) -> None:
        """Make a process that goes on from here, and give the worker a connection to it."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                is_parent = os.fork() > 0
            except OSError as error:
                self._connection.send_bytes(ERROR + str(error).encode())
                return
            if is_parent:
                self._connection.send_bytes(OK)
                bound_waits(theirs)
                send_handle(self._connection, theirs.fileno(), None)
                return
            theirs.close()
            self._connection.close()
            self._connect(Connection(ours.detach()))
        if self._matcher is not None:
            self._clock = _Clock(STEP_CPU_S)
        if self._tokenizer is not None and not self._memory_max:
            self._limit_memory()

    def _limit_memory(self) -> None:
        """Limit what this process and its forks take. Where the system has no such limit, it is
        looked at behind each step: the time that a step has bounds what it can take.
        """
        self._memory_max = _resident_bytes() + MEMORY_BYTES_MAX
        with contextlib.suppress(OSError, ValueError):
            limit = _virtual_bytes() + MEMORY_BYTES_MAX
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def _within_limits(self, answer: Callable[[bytes], bytes], about: bytes) -> bytes:
        """Return the answer. The system ends this process where that takes more than its limits."""
        # What a checkpoint costs is no client's doing, and what looks ahead has two clocks.
        has_clock = answer in (self._load, self._draft, self._forced)
        try:
            with contextlib.nullcontext() if has_clock else self._clock.running():
                answered = answer(about)
        except MemoryError:
            answered = TOO_LARGE
        if self._memory_max and _resident_bytes() > self._memory_max:
            return TOO_LARGE
        return answered

    # ------------------------------------------------------------ what is asked

    def _load(self, about: bytes) -> bytes:
        """Read a tokenizer: its vocabulary's size, the number of end tokens, these, its JSON."""
        size, count = struct.unpack_from("<II", about)
        ends = list(struct.unpack_from(f"<{count}I", about, 8))
        config = about[8 + 4 * count :].decode()
        try:
            self._tokenizer = LLTokenizer(config, n_vocab=size, eos_token=ends)
        except ValueError as error:
            return ERROR + str(error).encode()
        return OK

    def _compile(self, about: bytes) -> bytes:
        """Compile a grammar, which replaces the one before, and return its first mask."""
        assert self._tokenizer is not None
        self._matcher = LLMatcher(
            self._tokenizer, about.decode(), log_level=_SILENT, limits=self._limits
        )
        return self._masked(self._matcher)

    def _try(self, about: bytes) -> bytes:
        """Compile a grammar, and write random answers with it, as some fail at a later token."""
        answer = self._compile(about)
        dice, walk = random.Random(0), self._matcher
        for _ in range(TRIED_STEPS):
            if answer[:1] != OK:
                break
            assert self._matcher is not None and walk is not None
            if walk.is_stopped():
                walk = self._matcher
            if walk is self._matcher:
                walk = walk.deep_copy()
                answer = self._masked(walk)
            walk.consume_token(_drawn(answer[1:], dice))
            answer = OK if walk.is_stopped() and not walk.is_error() else self._masked(walk)
        return answer if answer[:1] == ERROR else OK

    def _held(self, _: bytes) -> bytes:
        """Tell how much more memory it has had than where its limit was set."""
        held = max(0, _resident_bytes() + MEMORY_BYTES_MAX - self._memory_max)
        return OK + held.to_bytes(8, "little")

    def _step(self, about: bytes) -> bytes:
        """Go on by tokens and return the mask of the next one."""
        assert self._matcher is not None
        self._take(unpack_tokens(about)[0])
        return self._masked(self._matcher)

    def _take(self, tokens: list[int]) -> None:
        """Go on by tokens that are said."""
        self._clock.refill(len(tokens))
        self._ahead_clock.refill(len(tokens))
        assert self._matcher is not None
        for token in tokens:
            _consume(self._matcher, token)

    def _draft(self, about: bytes) -> bytes:
        """Go on by tokens; return the masks behind each part of a draft, and forget the draft.

        They end at the first token that its mask forbids, or where looking ahead takes long.
        """
        assert self._matcher is not None
        with self._clock.running():
            first = self._step(about)
        if first[:1] != OK:
            return first
        with self._ahead_clock.running():
            masks, is_sound = self._ahead(self._matcher, first[1:], unpack_tokens(about)[1])
        return OK + (SOUND if is_sound else BROKEN) + b"".join(masks)

    def _ahead(
        self, matcher: LLMatcher, first: bytes, draft: list[int]
    ) -> tuple[list[bytes], bool]:
        """Return the masks from `first` on, and whether the matcher can go on.

        A copy looks ahead: llguidance's rollback leaves rows behind that give a wrong mask later. A
        copy shares the lexer, so its failure is the matcher's too.
        """
        walk, masks, began = matcher.deep_copy(), [first], time.thread_time()
        for token in draft:
            spent_s = time.thread_time() - began
            is_tired = self._ahead_clock.left_s - spent_s < STEP_CPU_S / 2
            if is_tired or spent_s > DRAFT_CPU_S or not _allows(masks[-1], token):
                break
            _consume(walk, token)
            answer = self._masked(walk)
            if answer[:1] != OK:
                return masks, False
            masks.append(answer[1:])
        return masks, True

    def _forced(self, about: bytes) -> bytes:
        """Go on by tokens, and return those that have to come next."""
        assert self._matcher is not None
        with self._clock.running():
            self._take(unpack_tokens(about)[0])
        if self._matcher.is_error():
            return ERROR + self._matcher.get_error().encode()
        forced: list[int] = []
        with self._ahead_clock.running():
            if self._ahead_clock.left_s >= STEP_CPU_S / 2:
                forced = self._matcher.compute_ff_tokens()
        flag = BROKEN if self._matcher.is_error() else SOUND
        return OK + flag + struct.pack(f"<{len(forced)}I", *forced)

    @staticmethod
    def _masked(matcher: LLMatcher) -> bytes:
        mask = matcher.compute_bitmask()
        return ERROR + matcher.get_error().encode() if matcher.is_error() else OK + mask


def _consume(matcher: LLMatcher, token: int) -> None:
    """Go on by a token. A grammar that has ended takes none: what follows is the turn's end."""
    if not matcher.is_stopped():
        matcher.consume_token(token)


def _allows(mask: bytes, token: int) -> bool:
    return token < len(mask) * 8 and bool(mask[token // 8] >> token % 8 & 1)


def _drawn(mask: bytes, dice: random.Random) -> int:
    """Return a token that a mask lets come: that of a random set bit, or the next one."""
    bits, start = int.from_bytes(mask, "little"), dice.randrange(len(mask) * 8)
    higher = bits >> start << start
    rest = higher or bits
    return (rest & -rest).bit_length() - 1


def _resident_bytes() -> int:
    """Return the most memory that this process had so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _virtual_bytes() -> int:
    """Return the address space that is taken. Raises OSError where the system does not tell."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def main() -> None:
    """Answer the worker on standard input, a socket, until it is gone; then end all forks too."""
    base = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that end leave nothing behind
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a dump would hold a client's words
    worker = Connection(os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # a fork must not hold the socket of what it comes from
    try:
        with contextlib.suppress(EOFError, OSError):
            _Process(worker).run()
    finally:
        if os.getpid() == base:
            os.killpg(0, signal.SIGKILL)
        os._exit(0)


if __name__ == "__main__":
    main()
