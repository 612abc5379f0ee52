"""Judges what a request was told to have lost, by what was sent, fed and prefilled.

It knows nothing of conversation lines or causes as the worker finds them. Each text has words that
no other text has (chat_client.py): a word of a prompt that an earlier request fed, and
that was prefilled now, was read again; nothing else was.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hearth.worker.cache.block_hash import Tokens, common_length, pack
from hearth.worker.sessions.session_context import HEAD, SLACK
from scripts.harness.chat_client import Asked, Body
from scripts.harness.random_conversations import Plan

WORD: Final = re.compile("z[0-9a-f]{4}")
VOLATILE: Final = re.compile(
    r"Today's date: Sat Nov \d\d 2026|<system-reminder>.*?</system-reminder>\n", re.DOTALL
)
TOLD_MIN: Final = 64  # tokens read again, less SLACK for each place, that must be told
HEAD_CAUSES: Final = frozenset(
    ("tool added", "tool removed", "tool order", "tool schema", "template option")
)
AS_IT_WAS: Final = frozenset(
    ("template", "template moves", "thinking dropped", "turn not recorded", "unexplained")
)
NOT_KEPT: Final = frozenset(("eviction", "restart", "exact mode"))
EDITED: Final = {
    "system prompt": "system",
    "message edited": "user",
    "tool result": "tool",
    "assistant turn": "assistant",
}


@dataclass(frozen=True)
class Finding:
    """One falsehood: the rule that it breaks, and what was told beside what is so."""

    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"

    @property
    def is_short(self) -> bool:
        """Whether what was told is true and not all: two lines of one session were alike.

        A request is compared with one line, and there each has what the other has not.
        """
        return self.rule in ("told too little", "wrong request")


class Reading:
    """The words of a run of tokens, with the tokens that each has a part in."""

    def __init__(self, pieces: Sequence[str], ids: Sequence[int]) -> None:
        self.tokens: Tokens = pack(list(ids))
        ends = np.cumsum([len(piece) for piece in pieces])
        found = list(WORD.finditer("".join(pieces)))
        firsts = np.searchsorted(ends, [match.start() for match in found], side="right")
        lasts = np.searchsorted(ends, [match.end() - 1 for match in found], side="right")
        self.words = [
            (match.group(), first, last + 1)
            for match, first, last in zip(found, firsts.tolist(), lasts.tolist(), strict=True)
        ]

    def known(self, start: int = 0) -> set[str]:
        """Return the words that end behind token `start`."""
        return {name for name, _, end in self.words if end > start}


@dataclass(frozen=True)
class ReadAgain:
    """What of a prompt was read again, from some token on."""

    words: int  # tokens of words that were known
    runs: int  # of such words, with no new one between
    most: int  # tokens of these runs, with all up to the next new word


def read_again(now: Reading, start: int, known: set[str]) -> ReadAgain:
    """Count what of `now` behind token `start` is made of `known` words."""
    words = runs = most = 0
    border, is_open = start, False  # where the last new word ended; whether a run goes on
    # What ends the prompt ends the last run, as a new word does.
    for name, first, end in [*now.words, (None, len(now.tokens), len(now.tokens) + 1)]:
        if name in known and end > start:
            words += end - max(first, start)
            runs += not is_open
            is_open = True
        elif end > start:
            most += max(0, first - border) if is_open else 0
            border, is_open = end, False
    return ReadAgain(words, runs, most)


class Judge:
    """Judges the requests of one played plan, in their order."""

    def __init__(self, plan: Plan, tokenizer: Any) -> None:
        self.plan = plan
        # Each token's text; only ASCII is as it was.
        self._pieces = {number: piece for piece, number in tokenizer.get_vocab().items()}
        self._fed: dict[Asked, Reading] = {}  # by earlier request, in their order

    def findings(self, asked: Sequence[Asked]) -> list[tuple[Asked, Finding]]:
        found = []
        for each in asked:
            found += [(each, finding) for finding in self._of(each, self._reading(each.ids))]
            self._fed[each] = self._reading(each.fed)
        return found

    def _reading(self, ids: Sequence[int]) -> Reading:
        return Reading([self._pieces[each] for each in ids], ids)

    def _of(self, asked: Asked, now: Reading) -> Iterator[Finding]:
        told = asked.told
        if not self._has_twin(asked):
            yield from self._untold(asked, now, told)
        if told is not None:
            yield from self._amount(asked, now, told)
            yield from self._remedy(asked, told)
            yield from self._place(asked, now, told)

    # ------------------------------------------------------------ what must be told

    def _untold(self, asked: Asked, now: Reading, told: Body | None) -> Iterator[Finding]:
        """Hold it to what its own conversation last sent: is an edit told, and as large as it is?

        What was sent counts where the server can know that the two are one conversation.
        """
        before = asked.before
        if before is None or before.is_forgotten or asked.is_left or not _is_known(before, asked):
            return
        if asked.messages[:-1] == before.messages[: len(asked.messages) - 1]:
            return  # a last message that is asked anew is new, whatever it has of the old one
        was, cached = self._fed[before], asked.answer.cached
        shared = common_length(was.tokens, now.tokens)
        start = max(shared, cached)
        again = read_again(now, start, was.known(shared))
        least = again.words - SLACK * again.runs
        if told is None and shared - cached > self.plan.variant.chunk + SLACK + TOLD_MIN:
            yield Finding("not told", f"{shared} are shared, {cached} were kept")
        elif told is None and least >= TOLD_MIN:
            yield Finding("not told", f"{again.words} tokens were read again from {start} on")
        elif told is not None and least >= TOLD_MIN:
            what = f"{told['cause']}, lost {told['lost']} at {told['token']}"
            if told["lost"] < least:
                yield Finding("told too little", f"{what}, and {again.words} were read again")
            if told["token"] < shared and told["cause"] not in NOT_KEPT:
                yield Finding("wrong request", f"{what}, and its own last one is left at {shared}")

    def _has_twin(self, asked: Asked) -> bool:
        """Whether another request of the session has as much in common with this one.

        It is compared with one of the two, and against that it may have lost less.
        """
        before = asked.before
        return before is not None and any(
            other is not before
            and other.session == asked.session
            and _shared(other, asked) >= _shared(before, asked)
            and other.messages != before.messages
            for other in self._fed
        )

    # ------------------------------------------------------------ what may be told

    def _amount(self, asked: Asked, now: Reading, told: Body) -> Iterator[Finding]:
        lost, cached, prefilled = told["lost"], asked.answer.cached, asked.answer.prefilled
        what = f"{told['cause']}, lost {lost}"
        if lost > prefilled:
            yield Finding("more than prefilled", f"{what}, and {prefilled} were prefilled")
        if told["cause"] in NOT_KEPT:  # what was forwarded and is gone: any earlier request's
            shared = (common_length(fed.tokens, now.tokens) for fed in self._fed.values())
            most = behind = max(0, max(shared, default=0) - cached)
        else:
            known: set[str] = set().union(*(fed.known() for fed in self._fed.values()))
            behind = read_again(now, max(told["token"], cached), known).words
            most = read_again(now, cached, known).most + SLACK
        if not behind:
            yield Finding("nothing read again", what)
        elif lost > most:
            yield Finding("more than read again", f"{what}, and {most} at most were read again")

    def _remedy(self, asked: Asked, told: Body) -> Iterator[Finding]:
        """Hold the remedy to the settings and to what happened to the cache."""
        so = {
            "PRESERVE_THINKING=true": self.plan.variant.preserves_thinking,
            "CACHE_EXACT=false": not self.plan.variant.is_exact,
            "CACHE_RAM_BUDGET_MB": "evicted" not in asked.happened,
            "cut by a stop string": "stopped" not in asked.happened,
            "Please report this": True,
            **dict.fromkeys(("restarted", "MAX_KV_SIZE_GB"), "restarted" not in asked.happened),
        }
        yield from (
            Finding("remedy", f"{told['cause']}: {words}")
            for words, is_so in so.items()
            if is_so and words in told["remedy"]
        )

    def _place(self, asked: Asked, now: Reading, told: Body) -> Iterator[Finding]:
        """Hold cause, message and token to the earlier requests that it shares so much with."""
        cause, at, token = (told[name] for name in ("cause", "message", "token"))
        if cause in NOT_KEPT or (cause == "turn not recorded" and token == asked.answer.cached):
            return
        same = [
            each
            for each, fed in self._fed.items()
            if common_length(fed.tokens, now.tokens) == token
        ]
        if not same:
            yield Finding("wrong token", f"{cause} {at} at {token}")
        elif not any(names(told, each.body, asked.body) for each in same) and not (
            cause == "assistant turn" and self._is_rewritten(asked.messages[at])
        ):
            yield Finding("wrong cause", f"{cause} {at} at {token}")

    def _is_rewritten(self, message: Body) -> bool:
        """Whether it is an answer that nobody gave, so that no tokens are known of it."""
        return message["role"] == "assistant" and all(
            message["content"] != each.said for each in self._fed
        )


# ---------------------------------------------------------------- causes


def names(told: Body, was: Body, now: Body) -> bool:
    """Whether the cause says what is different between two requests, and at which message."""
    cause, message = told["cause"], told["message"]
    if cause in HEAD_CAUSES:
        return message == HEAD and _head(was, now) == cause
    ours, theirs = now["messages"], was["messages"]
    first = first_difference(theirs, ours)
    if cause in AS_IT_WAS:
        return first is None or message <= first
    if first is None:  # all is as it was: what is told is about the answer
        is_echo = message == len(theirs) and message < len(ours)
        return cause == "assistant turn" and is_echo and ours[message]["role"] == "assistant"
    if message != first:
        return False
    match cause:
        case "message inserted":
            return theirs[first] in ours[first + 1 :]
        case "message removed":
            rest = theirs[first + 1 :]
            is_answer = not rest and ours[first:] and ours[first]["role"] == "assistant"
            return bool(first == len(ours) or is_answer or ours[first] in rest)
        case "volatile field":
            return _volatile(theirs[first]) != _volatile(ours[first])
        case _ if cause in EDITED:
            is_of = ours[first]["role"] == EDITED[cause]
            return is_of and _rest(theirs[first]) != _rest(ours[first])
    return True  # the history was rewritten, or a cause that this oracle does not know


def _is_known(was: Asked, now: Asked) -> bool:
    """Whether two requests can be seen to be of one conversation.

    They have much in common, and one session's id; or none, and what they begin with.
    """
    is_alike = _shared(was, now) > max(1, min(len(now.messages), len(was.messages)) / 2)
    begins_alike = bool(now.session[0]) or was.messages[:2] == now.messages[:2]
    return was.session == now.session and is_alike and begins_alike


def _shared(was: Asked, now: Asked) -> int:
    """Return how many messages of one the other has too."""
    return sum(one in now.messages for one in was.messages)


def first_difference(was: Sequence[Body], now: Sequence[Body]) -> int | None:
    """Return the first message that is not what it was; None where `now` only adds some."""
    pairs = enumerate(zip(was, now, strict=False))
    end = len(now) if len(now) < len(was) else None
    return next((at for at, (one, other) in pairs if one != other), end)


def _head(was: Body, now: Body) -> str:
    ours, theirs = now.get("tools", []), was.get("tools", [])
    new, old = ([tool["function"]["name"] for tool in each] for each in (ours, theirs))
    differs = {
        "tool added": set(new) - set(old),
        "tool removed": set(old) - set(new),
        "tool order": new != old,
        "tool schema": ours != theirs,
        "template option": was.get("chat_template_kwargs") != now.get("chat_template_kwargs"),
    }
    return next((cause for cause, found in differs.items() if found), "")


def _volatile(message: Body) -> list[str]:
    return VOLATILE.findall(message["content"] or "")


def _rest(message: Body) -> Body:
    return message | {"content": VOLATILE.sub("", message["content"] or "")}
