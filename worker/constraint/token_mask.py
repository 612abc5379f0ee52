"""Masks the logits of one answer so that only tokens can come that its constraints allow.

These are a grammar, a token that never may come, and a budget of tokens for thinking, whose block
is ended where it is spent.
"""

import codecs
import copy
import itertools
import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import mlx.core as mx
import numpy as np

from hearth.shared.errors import StartError
from hearth.worker.constraint.call_grammars import MessageGrammar
from hearth.worker.constraint.compiled_grammar import GrammarAnswer
from hearth.worker.constraint.grammar_trial import GrammarError, error_text, explained, meaning_of

log = logging.getLogger(__name__)

NEVER = -float("inf")

CHARACTER_TOKENS_MAX: Final = 3  # that an unfinished character is given to become whole
TAIL_BYTES: Final = 64  # of the answer that are looked at for a mark; all are shorter

T = TypeVar("T")


# ---------------------------------------------------------------- thinking


@dataclass(frozen=True, slots=True)
class ThinkMarks:
    """The marks with which one model's think block begins and ends. Immutable."""

    start: str
    end: str
    forced: tuple[int, ...]  # the tokens that are written where it has to end
    again: int | None = (
        None  # the token that would begin another right behind them; None = none may
    )
    in_front: bytes = b""  # what stands in front of `again`
    others: tuple[str, ...] = ()  # what ends it, too

    @property
    def is_first_only(self) -> bool:
        """Whether a block begins the answer; otherwise it may begin anywhere, several times."""
        return self.again is None


def think_marks(
    tokenizer: Any, messages: MessageGrammar | None, marks: tuple[str, ...]
) -> ThinkMarks | None:
    """Return the marks with which the model of mlx-lm's `tokenizer` thinks; None without any.

    `marks` open and close its think block; what is behind them closes it, too.
    """

    def tokens(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    if messages is not None:
        close, again = tokens(messages.thinking_close), tokens(messages.again)[0]
        in_front = messages.thinking.removesuffix(messages.again).encode()
        return ThinkMarks(messages.thinking, messages.thinking_end, close, again, in_front)
    start, end, *others = marks
    if not start:
        return None
    return ThinkMarks(start, end, tokens(_close(tokenizer, end)), others=tuple(others))


def _close(tokenizer: Any, end: str) -> str:
    """Return what the template writes between thinking and an answer: `end`, and newlines."""
    messages = [
        {"role": "user", "content": "alpha"},
        {"role": "assistant", "reasoning_content": "sigma", "content": "omega"},
    ]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except StartError:  # it does not end
        raise
    except Exception as error:  # a template raises what it likes; then it tells nothing
        log.debug("template probe refused: %s", error)
        text = ""
    found = re.search(rf"sigma(\n?{re.escape(end)}\n{{0,2}})omega", text)
    return found[1] if found else f"\n{end}\n\n"


class ThinkingBudget:
    """Counts the tokens of the think block and forces those that end it.

    Invariant: tokens are forced only while the block is open, and only once it is due.
    Owner: the inference thread.
    """

    def __init__(
        self,
        marks: ThinkMarks,
        budget: int,
        is_open: bool,
        token_bytes: Callable[[int], bytes],
    ) -> None:
        """`budget` is how many tokens the block may have; `is_open`: the prompt has begun it."""
        assert marks.forced, "nothing would end the block"
        self._marks = marks
        self._left = budget
        self._token_bytes = token_bytes
        self._is_open = is_open
        self._may_open = not (is_open and marks.is_first_only)
        self._tail = b""  # the bytes that were written last: in the block, or since it
        # Kept for a moment: forced tokens of one answer
        self.to_come: deque[int] = deque()  # tokens, one behind the other
        self._waits_left = CHARACTER_TOKENS_MAX
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._close_if_due()

    @property
    def forced(self) -> int | None:
        """The token that has to come next."""
        return self.to_come[0] if self.to_come else None

    @property
    def banned(self) -> int | None:
        """The token that must not come next, as it would begin what was closed."""
        is_spent = self._left <= 0 and not self._is_open
        return self._marks.again if is_spent and self._tail.endswith(self._marks.in_front) else None

    def copy(self) -> "ThinkingBudget":
        """Return one that goes on from here alone, to look ahead with."""
        other = copy.copy(self)
        other.to_come = self.to_come.copy()
        other._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        other._decoder.setstate(self._decoder.getstate())
        return other

    def see(self, token: int) -> None:
        """Take the next token of the answer."""
        self._tail = (self._tail + self._token_bytes(token))[-TAIL_BYTES:]
        if self.to_come:
            self.to_come.popleft()
            self._is_open = bool(self.to_come)
        elif self._is_open:
            self._left -= 1
            self._decoder.decode(self._token_bytes(token))
            self._turn(
                any(end.encode() in self._tail for end in (self._marks.end, *self._marks.others))
            )
        elif self._may_open:
            self._turn(self._begins())
        self._close_if_due()

    def _turn(self, is_turning: bool) -> None:
        """Open the block, or close it."""
        if is_turning:
            self._is_open = not self._is_open
            self._tail = b""
            self._may_open = not self._marks.is_first_only

    def _begins(self) -> bool:
        """Return whether what was written opens a block; stop looking where it no longer can."""
        start = self._marks.start.encode()
        if not self._marks.is_first_only:
            return start in self._tail
        written = self._tail.lstrip()
        self._may_open = start.startswith(written[: len(start)])
        return self._may_open and len(written) >= len(start)

    def _close_if_due(self) -> None:
        if not self._is_open or self.to_come or self._left > 0:
            return
        if self._decoder.getstate()[0] and self._waits_left:
            self._waits_left -= 1
            return
        self.to_come.extend(self._marks.forced)
        assert self._is_open and self.to_come


# ---------------------------------------------------------------- the mask


@dataclass(frozen=True, slots=True)
class _Row:
    """Which tokens may come at one place of an answer. Immutable."""

    forced: int | None = None  # nothing else may
    banned: tuple[int, ...] = ()
    mask: bytes | None = None  # the grammar's: a bit for each token, lowest first; None = all

    def may_come(self, token: int) -> bool:
        """Return whether all but the grammar lets a token come."""
        return token not in self.banned if self.forced is None else token == self.forced

    @property
    def is_free(self) -> bool:
        return self.forced is None and self.mask is None and not self.banned

    def masked(self, logits: mx.array) -> mx.array:
        """Return `logits` (1, vocabulary), -inf where a token may not come."""
        assert logits.ndim == 2, logits.shape
        width = logits.shape[-1]
        if self.forced is not None:
            return mx.where(mx.arange(width) == self.forced, logits, NEVER)
        if self.mask is not None:
            bits = np.unpackbits(np.frombuffer(self.mask, np.uint8), bitorder="little")
            allowed = mx.array(bits[:width])
            # Logits that the tokenizer has no token for are none.
            allowed = mx.pad(allowed, (0, width - allowed.shape[0]))
            logits = mx.where(allowed > 0, logits, NEVER)
        for banned in self.banned:
            logits = mx.where(mx.arange(width) == banned, NEVER, logits)
        return logits


class TokenMask:
    """Leaves the sampler only the tokens that may come next.

    Invariants:
      quiet   it never raises, as in a batch that would break other requests' answers too. When it
              cannot go on, `failure` says why and nothing is masked any more: the sampler ends the
              request.
      equal   row j of `process_rows` is what `process` would return, had the draft's first j
              tokens been said; and whatever is looked at ahead, it is so afterwards too
    Owner: the inference thread.
    """

    def __init__(
        self,
        prompt_tokens: int,
        answer: GrammarAnswer | None = None,  # the whole answer's; the mask advances it
        thinking: ThinkingBudget | None = None,
        banned: int | None = None,  # a token that never may come
        counts: Counter[str] | None = None,
    ) -> None:
        self.failure = ""
        self.failure_status = 500  # of HTTP; 400 where the grammar is what is wrong
        self._prompt_tokens = prompt_tokens
        self._answer = answer
        self._counts: Counter[str] = Counter() if counts is None else counts
        self._unread: list[int] = []  # tokens of the answer that the grammar has not had yet
        self._thinking = thinking
        self._banned = banned
        self._seen = 0  # tokens of the answer
        self._draft: tuple[int, ...] = ()  # that was looked at behind them
        self._rows: list[_Row] = []  # in front of each of its tokens that may come, and the last

    def process(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Return `logits` (1, vocabulary), -inf where a token must not follow `tokens` (n,).

        The tokens are the prompt's and the answer's; they are read where they decide anything.
        """

        def masked() -> mx.array:
            if self._answer is not None or self._thinking is not None:
                known = self._prompt_tokens + self._seen
                assert tokens.ndim == 1 and tokens.shape[0] >= known, (tokens.shape, known)
                unseen: Any = tokens[known:].tolist()
                self._see(unseen)
            return self._rows_of(())[0].masked(logits)

        return self._guarded(masked, logits)

    def close(self) -> None:
        """Let the grammar go: the answer is over."""
        self._answer = None

    # ------------------------------------------------------------ drafts

    def take(self, tokens: Sequence[int]) -> None:
        """Take the answer's next tokens; `process` reads only those behind them."""
        self._guarded(lambda: self._see(tokens), None)

    def forced(self, tokens_max: int) -> list[int]:
        """Return tokens that have to come next; none where that is not known."""
        nothing: list[int] = []
        return self._guarded(self._forced, nothing)[:tokens_max]

    def fitting(self, draft: Sequence[int]) -> int:
        """Return how many tokens of a draft may come, from its first one on.

        Where it takes long to look further, the others count as those that may not.
        """
        return self._guarded(lambda: len(self._rows_of(draft)) - 1, 0)

    def process_rows(self, draft: Sequence[int], logits: mx.array) -> mx.array:
        """Return `logits` (n + 1, vocabulary), row j masked as behind the draft's first j tokens.

        Rows behind a token that does not fit are left as they are: no answer comes there. Nothing
        of the draft is taken.
        """

        def masked() -> mx.array:
            assert logits.shape[0] == len(draft) + 1, (logits.shape, len(draft))
            rows = self._rows_of(draft)
            if all(row.is_free for row in rows):
                return logits
            found = [row.masked(logits[n : n + 1]) for n, row in enumerate(rows)]
            return mx.concatenate([*found, logits[len(rows) :]])

        return self._guarded(masked, logits)

    # ------------------------------------------------------------ failures

    def _guarded(self, act: Callable[[], T], otherwise: T) -> T:
        """Return what `act` gives; where it raises, or something did before, fail instead."""
        if self.failure:
            return otherwise
        try:
            return act()
        except GrammarError as error:
            self._counts["answers_ended"] += 1
            log.warning("a grammar ended amid its answer by %s", type(error).__name__)
            said, meaning = explained(error), meaning_of(error_text(error))
            if meaning.is_limit:  # what is too large to go on with is the client's to change
                self.failure_status = 400
                if self._answer and meaning.is_of_patterns:
                    said += f". {self._answer.grammar.largest_pattern}"
            said = " ".join(said.split()).rstrip(". ")  # whoever tells it ends the sentence
            self.failure = f"its grammar could not go on: {said}"
        except Exception as error:
            log.exception("a constraint broke")
            self.failure = f"{type(error).__name__}: {error}"
        return otherwise

    # ------------------------------------------------------------ places

    def _see(self, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        self._seen += len(tokens)
        self._draft, self._rows = (), []
        if self._thinking is not None:
            for token in tokens:
                self._thinking.see(token)
        if self._answer is not None:
            self._unread += tokens

    def _read(self) -> list[int]:
        """Return the tokens that the grammar has to have first; it has them then."""
        unread, self._unread = self._unread, []
        return unread

    def _forced(self) -> list[int]:
        if self._thinking is not None and self._thinking.forced is not None:
            return list(self._thinking.to_come)
        if self._answer is None:
            return []
        forced = self._answer.forced(self._read())
        return forced[: len(self._rows_without_grammar(forced)) - 1]

    def _rows_of(self, draft: Sequence[int]) -> list[_Row]:
        """Return the rows in front of each of a draft's tokens that may come, and one behind."""
        draft = tuple(draft)
        if not self._rows or self._draft[: len(draft)] != draft:
            rows = self._rows_without_grammar(draft)
            if self._answer is not None and rows[0].forced is not None:
                # What is forced may be against the grammar, which fails only where it is asked.
                rows = list(itertools.takewhile(lambda row: row.forced is not None, rows))
            elif self._answer is not None:
                masks = self._answer.masks(self._read(), draft[: len(rows) - 1])
                rows = [replace(row, mask=mask) for row, mask in zip(rows, masks, strict=False)]
            self._draft, self._rows = draft, rows
        return self._rows[: len(draft) + 1]

    def _rows_without_grammar(self, draft: Sequence[int]) -> list[_Row]:
        """Return the rows as far as all but the grammar lets a draft come."""
        thinking = self._thinking
        rows = [self._row(thinking)]
        for token in draft:
            if not rows[-1].may_come(token):
                break
            if thinking is not None:
                thinking = thinking.copy() if thinking is self._thinking else thinking
                thinking.see(token)
            rows.append(self._row(thinking))
        return rows

    def _row(self, thinking: ThinkingBudget | None) -> _Row:
        forced, banned = (None, None) if thinking is None else (thinking.forced, thinking.banned)
        return _Row(forced, tuple(n for n in (self._banned, banned) if n is not None))
