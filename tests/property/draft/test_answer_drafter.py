"""Whatever an answer's sources say and a model makes of it, drafts are bounded and counted."""

from collections.abc import Callable, Sequence

from hypothesis import example, given, settings, strategies as st

from hearth.worker.draft.answer_drafter import AnswerDrafter, AnswerSources
from hearth.worker.draft.draft import Draft, DraftSource
from hearth.worker.draft.draft_length import ROWS_MAX, AcceptanceRates, DraftLength, TextKind
from hearth.worker.draft.token_history import TokenHistory

SOURCES: tuple[DraftSource, ...] = ("forced", "history", "prediction", "answers", "model")
KINDS: tuple[TextKind, ...] = ("thinking", "text", "call")
TEXTS = st.lists(st.integers(0, 5), max_size=40)


class Forced:
    """Forces a token or several now and then, right or wrong."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens, self._at = tokens, 0

    def take(self, tokens: Sequence[int]) -> None:
        self._at += len(tokens)

    def forced(self, tokens_max: int) -> list[int]:
        return self._tokens[: min(self._at % 4, tokens_max)]

    def fitting(self, ahead: Sequence[int], tokens: Sequence[int]) -> tuple[int, list[int]]:
        count = min((self._at + len(ahead)) % 5, len(tokens))
        return count, self._tokens[: self._at % 3] if count else []

    def choice(self, ahead: Sequence[int]) -> Callable[[int], bool] | None:
        return (lambda token: token % 2 == 0) if len(ahead) % 2 else None


class Model:
    """Says some tokens again and again, or nothing now and then."""

    def __init__(self, tokens: list[int], token_cost: float) -> None:
        self._tokens, self.token_cost = tokens, token_cost

    def take(self, start: int, tokens: object, hidden: object) -> None:
        raise AssertionError("the engine tells it, not the drafter")

    def draft(self, place: int, last: int, tokens_max: int) -> list[int]:
        assert tokens_max > 0
        again = self._tokens * tokens_max
        return again[:tokens_max] if place % 5 else []


def path_of(draft: Draft, truth: Sequence[int]) -> list[int]:
    """Return the nodes of the longest path that says what the model does."""
    path: list[int] = []
    for token in truth:
        parent = path[-1] if path else -1
        nodes = range(len(draft))
        node = [n for n in nodes if (draft.parents[n], draft.tokens[n]) == (parent, token)]
        if not node:
            return path
        path += node
        assert len(node) == 1, "no two children of a node are alike"
    return path


def assert_is_bounded(draft: Draft, tokens_max: int, waiting: int) -> None:
    assert len(draft) <= max(0, min(tokens_max, ROWS_MAX - waiting))
    assert all(-1 <= parent < node for node, parent in enumerate(draft.parents))


@settings(max_examples=150, deadline=None)
@given(st.tuples(TEXTS, TEXTS, TEXTS, TEXTS), TEXTS, st.booleans(), st.booleans(), st.data())
def test_every_draft_is_a_tree_within_its_bounds_and_every_row_is_counted(
    texts: tuple[list[int], ...],
    answer: list[int],
    trees: bool,
    replays: bool,
    data: st.DataObject,
) -> None:
    prompt, predicted, earlier, forced = texts
    answers = TokenHistory(earlier)
    model = data.draw(st.none() | st.builds(Model, TEXTS, st.sampled_from([0.0, 0.1])))
    sources = AnswerSources(prompt, lambda: answers, predicted, Forced(forced), model=model)
    length = DraftLength({1: 1.0, 8: 1.2})
    drafter = AnswerDrafter(sources, length, lambda: KINDS[len(drafter.answer) % 3], trees)
    forwards, rows, waiting = 0, 0, 1
    while len(drafter.answer) < len(answer):
        left = answer[len(drafter.answer) :]
        tokens_max = data.draw(st.integers(0, len(left)))
        draft = drafter.propose(tokens_max, waiting)
        assert_is_bounded(draft, tokens_max, waiting)
        draft = draft.cut(data.draw(st.integers(0, len(draft))) if len(draft) > 1 else len(draft))
        path = path_of(draft, left[:-1])
        fed = waiting + len(draft)
        if len(draft):
            drafter.record(draft, path, fed)
        forwards, rows = forwards + 1, rows + fed
        waiting = min(waiting + len(path) + 1, 20) if replays and len(path) < len(draft) else 1
        drafter.take(left[: len(path) + 1])
        if data.draw(st.booleans()):
            drafter.is_promising()
    counts = drafter.counts
    assert drafter.answer == answer
    assert (counts.tokens, counts.forwards, counts.rows) == (len(answer), forwards, rows)


LIES = st.lists(
    st.tuples(
        st.sampled_from(SOURCES),
        st.sampled_from(KINDS),
        st.integers(2, 64),
        st.integers(1, 7),
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=100, deadline=None)
@given(LIES, st.sampled_from((300, 1_000)), st.booleans())
@example([("forced", "call", 2, 7)], 300, True)
@example([("history", "text", 64, 7), ("history", "thinking", 64, 7)], 300, True)
def test_where_nothing_is_accepted_rows_are_five_percent_more_at_most(
    lies: list[tuple[DraftSource, TextKind, int, int]], tokens: int, replays: bool
) -> None:
    """Each lie is a draft that is proposed at a token: its source, kind, match and length."""
    length, rows, waiting = DraftLength(), 0, 1
    for at in range(tokens):
        source, kind, match, count = lies[at % len(lies)]
        drafted = proposed(length, source, kind, match, count, waiting)
        rows += waiting + drafted
        if drafted:
            length.rates.record(source, kind, match, right=False)
        if drafted or waiting > 1:
            length.record(0, waiting + drafted)
        waiting = waiting + 1 if replays and drafted else 1
        length.count_tokens(1)
    assert rows <= 1.05 * tokens, "and a forward a token, which rejected drafts cannot change"


def proposed(
    length: DraftLength, source: DraftSource, kind: TextKind, match: int, count: int, waiting: int
) -> int:
    chance, chances = 1.0, []
    for at in range(count):
        chance *= length.rates.rate(source, kind, match + at)
        chances.append(chance)
    return length.count(chances, waiting)


@given(LIES, st.lists(st.booleans(), max_size=200))
def test_a_rate_is_a_probability_whatever_was_told(
    lies: list[tuple[DraftSource, TextKind, int, int]], told: list[bool]
) -> None:
    rates = AcceptanceRates()
    for at, right in enumerate(told):
        source, kind, match, _ = lies[at % len(lies)]
        rates.record(source, kind, match, right)
        assert 0 < rates.rate(source, kind, match) < 1
