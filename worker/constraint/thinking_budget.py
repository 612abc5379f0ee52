"""Counts the tokens of an answer's think block, and ends the block where its budget is spent.

Touches no MLX.
"""

import codecs
import copy
import logging
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from hearth.shared.errors import StartError
from hearth.worker.constraint.call_grammars import MessageGrammar

log = logging.getLogger(__name__)

CHARACTER_TOKENS_MAX: Final = 3  # that an unfinished character is given to become whole
TAIL_BYTES: Final = 64  # of the answer that are looked at for a mark; all are shorter


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
            ends = (self._marks.end, *self._marks.others)
            self._turn(any(end.encode() in self._tail for end in ends))
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
