"""Masks the logits of one answer so that only tokens can come that its constraints allow.

The constraints are a grammar, a banned token, and a budget of thinking tokens: the think block is
closed when the budget is spent.
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

CHARACTER_TOKENS_MAX: Final = 3  # further tokens of thinking for an unfinished character
TAIL_BYTES: Final = 64  # last bytes of the answer, searched for a mark; all marks are shorter

T = TypeVar("T")


# ---------------------------------------------------------------- thinking


@dataclass(frozen=True, slots=True)
class ThinkMarks:
    """The marks with which one model's think block begins and ends. Immutable."""

    start: str
    end: str
    forced: tuple[int, ...]  # tokens that close the block when it has to end
    again: int | None = None  # token that would begin a block after `forced`; None = no token can
    before_again: bytes = b""  # text before `again`
    others: tuple[str, ...] = ()  # other marks that end the block

    @property
    def is_first_only(self) -> bool:
        """Whether a block may stand only at the answer's beginning, rather than anywhere."""
        return self.again is None


def think_marks(
    tokenizer: Any, messages: MessageGrammar | None, marks: tuple[str, ...]
) -> ThinkMarks | None:
    """Return the think marks of the model with mlx-lm's `tokenizer`; None without marks.

    The first of `marks` opens the think block, the second closes it, and all others close it, too.
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
    """Return the text that the template writes between thinking and an answer."""
    messages = [
        {"role": "user", "content": "alpha"},
        {"role": "assistant", "reasoning_content": "sigma", "content": "omega"},
    ]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except StartError:  # the template runs without end
        raise
    except Exception as error:  # a template may raise anything; then the default is used
        log.debug("template probe refused: %s", error)
        text = ""
    found = re.search(rf"sigma(\n?{re.escape(end)}\n{{0,2}})omega", text)
    return found[1] if found else f"\n{end}\n\n"


class ThinkingBudget:
    """Counts the tokens of the think block, and forces the tokens that close it.

    Invariant: tokens are forced only while the block is open and its budget is spent.
    Owner: the inference thread.
    """

    def __init__(
        self,
        marks: ThinkMarks,
        budget: int,
        is_open: bool,
        token_bytes: Callable[[int], bytes],
    ) -> None:
        """`budget` is how many tokens all blocks may have; `is_open`: the prompt began a block."""
        assert marks.forced, "nothing would end the block"
        self._marks = marks
        self._left = budget
        self._token_bytes = token_bytes
        self._is_open = is_open
        self._may_open = not (is_open and marks.is_first_only)
        self._tail = b""  # the last bytes, since the block began or ended
        # Kept for a moment: forced tokens of one answer
        self.to_come: deque[int] = deque()  # forced tokens that are not written yet
        self._waits_left = CHARACTER_TOKENS_MAX
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._close_if_due()

    @property
    def forced(self) -> int | None:
        """The token that has to come next."""
        return self.to_come[0] if self.to_come else None

    @property
    def banned(self) -> int | None:
        """The token that must not come next, as it would begin another block."""
        is_spent = self._left <= 0 and not self._is_open
        return (
            self._marks.again
            if is_spent and self._tail.endswith(self._marks.before_again)
            else None
        )

    def copy(self) -> "ThinkingBudget":
        """Return an independent copy, to look ahead with."""
        other = copy.copy(self)
        other.to_come = self.to_come.copy()
        other._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        other._decoder.setstate(self._decoder.getstate())
        return other

    def add(self, token: int) -> None:
        """Count the next token of the answer."""
        self._tail = (self._tail + self._token_bytes(token))[-TAIL_BYTES:]
        if self.to_come:
            self.to_come.popleft()
            self._is_open = bool(self.to_come)
        elif self._is_open:
            self._left -= 1
            self._decoder.decode(self._token_bytes(token))
            self._toggle_if(
                any(end.encode() in self._tail for end in (self._marks.end, *self._marks.others))
            )
        elif self._may_open:
            self._toggle_if(self._opens_block())
        self._close_if_due()

    def _toggle_if(self, is_mark: bool) -> None:
        """Open or close the block if a mark was written."""
        if is_mark:
            self._is_open = not self._is_open
            self._tail = b""
            self._may_open = not self._marks.is_first_only

    def _opens_block(self) -> bool:
        """Return whether the written text opens a block; stop looking once no block can open."""
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
class _PositionMask:
    """The tokens that may come at one position of an answer. Immutable."""

    forced: int | None = None  # the only token that may come
    banned: tuple[int, ...] = ()
    mask: bytes | None = None  # one bit per token, lowest first; None allows all tokens

    def may_come(self, token: int) -> bool:
        """Return whether a token may come, if the grammar allows it."""
        return token not in self.banned if self.forced is None else token == self.forced

    @property
    def is_free(self) -> bool:
        return self.forced is None and self.mask is None and not self.banned

    def masked(self, logits: mx.array) -> mx.array:
        """Return `logits` (1, vocabulary), with -inf for tokens that may not come."""
        assert logits.ndim == 2, logits.shape
        width = logits.shape[-1]
        if self.forced is not None:
            return mx.where(mx.arange(width) == self.forced, logits, NEVER)
        if self.mask is not None:
            bits = np.unpackbits(np.frombuffer(self.mask, np.uint8), bitorder="little")
            allowed = mx.array(bits[:width])
            # Logits without a token in the tokenizer are not allowed.
            allowed = mx.pad(allowed, (0, width - allowed.shape[0]))
            logits = mx.where(allowed > 0, logits, NEVER)
        for banned in self.banned:
            logits = mx.where(mx.arange(width) == banned, NEVER, logits)
        return logits


class TokenMask:
    """Masks all tokens but those that may come next.

    Invariants:
      quiet   No method raises, because in a batch that would break other requests' answers. When
              the mask cannot go on, `failure` says why, and nothing is masked any more: the sampler
              ends the request.
      equal   Row j of `process_rows` is the result of `process` after the draft's first j tokens.
              Looking ahead changes no later result.
    Owner: the inference thread.
    """

    def __init__(
        self,
        prompt_tokens: int,
        answer: GrammarAnswer | None = None,  # position in the grammar; the mask advances it
        thinking: ThinkingBudget | None = None,
        banned: int | None = None,  # token that may never come
        counts: Counter[str] | None = None,
    ) -> None:
        self.failure = ""
        self.failure_status = 500  # HTTP status; 400 if the client's schema is the cause
        self._prompt_tokens = prompt_tokens
        self._answer = answer
        self._counts: Counter[str] = Counter() if counts is None else counts
        self._unread: list[int] = []  # tokens of the answer that the grammar has not read yet
        self._thinking = thinking
        self._banned = banned
        self._seen = 0  # tokens of the answer
        self._draft: tuple[int, ...] = ()  # the draft of `_position_masks`
        # Masks before each token of the draft that may come, and after the last such token:
        self._position_masks: list[_PositionMask] = []

    def process(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Return `logits` (1, vocabulary), with -inf for tokens that must not follow `tokens` (n,).

        `tokens` are the prompt and the answer. They are read only if a constraint depends on them.
        """

        def masked() -> mx.array:
            if self._answer is not None or self._thinking is not None:
                known = self._prompt_tokens + self._seen
                assert tokens.ndim == 1 and tokens.shape[0] >= known, (tokens.shape, known)
                unseen: Any = tokens[known:].tolist()
                self._add(unseen)
            return self._masks_for(())[0].masked(logits)

        return self._guarded(masked, logits)

    def close(self) -> None:
        """Release the grammar: the answer is over."""
        self._answer = None

    # ------------------------------------------------------------ drafts

    def take(self, tokens: Sequence[int]) -> None:
        """Add the answer's next tokens; `process` reads only the tokens after them."""
        self._guarded(lambda: self._add(tokens), None)

    def forced(self, tokens_max: int) -> list[int]:
        """Return tokens that have to come next; none if that is not known."""
        nothing: list[int] = []
        return self._guarded(self._forced, nothing)[:tokens_max]

    def fitting(self, draft: Sequence[int]) -> int:
        """Return how many tokens of a draft may come, from its first token on.

        If looking ahead takes long, the remaining tokens do not count.
        """
        return self._guarded(lambda: len(self._masks_for(draft)) - 1, 0)

    def process_rows(self, draft: Sequence[int], logits: mx.array) -> mx.array:
        """Return `logits` (n + 1, vocabulary), row j masked as after the draft's first j tokens.

        Rows after a token that may not come stay as they are: their samples are not used. The draft
        is not added to the answer.
        """

        def masked() -> mx.array:
            assert logits.shape[0] == len(draft) + 1, (logits.shape, len(draft))
            masks = self._masks_for(draft)
            if all(mask.is_free for mask in masks):
                return logits
            found = [mask.masked(logits[n : n + 1]) for n, mask in enumerate(masks)]
            return mx.concatenate([*found, logits[len(masks) :]])

        return self._guarded(masked, logits)

    # ------------------------------------------------------------ failures

    def _guarded(self, act: Callable[[], T], otherwise: T) -> T:
        """Return the result of `act`; if it raises, set `failure`; after a failure, `otherwise`."""
        if self.failure:
            return otherwise
        try:
            return act()
        except GrammarError as error:
            self._counts["answers_ended"] += 1
            log.warning("a grammar ended amid its answer by %s", type(error).__name__)
            text, meaning = explained(error), meaning_of(error_text(error))
            if meaning.is_limit:  # the client can make a too large schema smaller
                self.failure_status = 400
                if self._answer and meaning.is_of_patterns:
                    text += f". {self._answer.grammar.largest_pattern}"
            text = " ".join(text.split()).rstrip(". ")  # the error that quotes it adds a full stop
            self.failure = f"its grammar could not go on: {text}"
        except Exception as error:
            log.exception("a constraint broke")
            self.failure = f"{type(error).__name__}: {error}"
        return otherwise

    # ------------------------------------------------------------ positions

    def _add(self, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        self._seen += len(tokens)
        self._draft, self._position_masks = (), []
        if self._thinking is not None:
            for token in tokens:
                self._thinking.add(token)
        if self._answer is not None:
            self._unread += tokens

    def _take_unread(self) -> list[int]:
        """Return the tokens that the grammar has to read first, and count them as read."""
        unread, self._unread = self._unread, []
        return unread

    def _forced(self) -> list[int]:
        if self._thinking is not None and self._thinking.forced is not None:
            return list(self._thinking.to_come)
        if self._answer is None:
            return []
        forced = self._answer.forced(self._take_unread())
        return forced[: len(self._masks_without_grammar(forced)) - 1]

    def _masks_for(self, draft: Sequence[int]) -> list[_PositionMask]:
        """Return the masks before each token of a draft that may come, and after the last one."""
        draft = tuple(draft)
        if not self._position_masks or self._draft[: len(draft)] != draft:
            position_masks = self._masks_without_grammar(draft)
            if self._answer is not None and position_masks[0].forced is not None:
                # A forced token may break the grammar, which fails only when used.
                position_masks = list(
                    itertools.takewhile(lambda allowed: allowed.forced is not None, position_masks)
                )
            elif self._answer is not None:
                masks = self._answer.masks(self._take_unread(), draft[: len(position_masks) - 1])
                position_masks = [
                    replace(allowed, mask=mask)
                    for allowed, mask in zip(position_masks, masks, strict=False)
                ]
            self._draft, self._position_masks = draft, position_masks
        return self._position_masks[: len(draft) + 1]

    def _masks_without_grammar(self, draft: Sequence[int]) -> list[_PositionMask]:
        """Return the masks of a draft's tokens without the grammar's part."""
        thinking = self._thinking
        position_masks = [self._mask_without_grammar(thinking)]
        for token in draft:
            if not position_masks[-1].may_come(token):
                break
            if thinking is not None:
                thinking = thinking.copy() if thinking is self._thinking else thinking
                thinking.add(token)
            position_masks.append(self._mask_without_grammar(thinking))
        return position_masks

    def _mask_without_grammar(self, thinking: ThinkingBudget | None) -> _PositionMask:
        forced, banned = (None, None) if thinking is None else (thinking.forced, thinking.banned)
        return _PositionMask(forced, tuple(n for n in (self._banned, banned) if n is not None))
