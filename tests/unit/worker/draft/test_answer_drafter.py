"""An answer's drafter proposes what must come, then what followed before, and learns from both.

tests/property/draft/test_answer_drafter.py holds that drafts are bounded and rows counted.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from hearth.worker.draft import answer_drafter
from hearth.worker.draft.answer_drafter import (
    HISTORY_TOKENS_MAX,
    AnswerDrafter,
    AnswerSources,
    DraftCounts,
)
from hearth.worker.draft.draft_length import AcceptanceRates, DraftLength, TextKind
from hearth.worker.draft.token_history import SEPARATOR, TokenHistory
from tests.helpers.cases import cases

FLAT = {1: 1.0, 8: 1.01}


class Forced:
    """Says which tokens must come, as a case sets it, and that some never do."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        self.tokens: list[int] = list(case.get("forced", ()))
        self.never = case.get("never", -1)
        self.few = case.get("few", ())  # one of them must come
        self.behind = case.get("behind", {})  # what must come behind a token

    def take(self, tokens: Sequence[int]) -> None:
        self.tokens = self.tokens[len(tokens) :]

    def forced(self, tokens_max: int) -> list[int]:
        return self.tokens[:tokens_max]

    def fitting(self, ahead: Sequence[int], tokens: Sequence[int]) -> tuple[int, list[int]]:
        for count, token in enumerate(tokens):
            if token == self.never or (self.few and token not in self.few):
                return count, []
            if token in self.behind:
                return count + 1, [self.behind[token]]
        return len(tokens), []

    def choice(self, ahead: Sequence[int]) -> Callable[[int], bool] | None:
        return (lambda token: token in self.few) if self.few else None


class Model:
    """Follows an answer that goes on with the numbers from `first`; None: it knows nothing."""

    def __init__(self, first: int | None = 900, token_cost: float = 0.1) -> None:
        self.token_cost = token_cost
        self.asked: list[list[int]] = []
        self._first = first

    def take(self, start: int, tokens: object, hidden: object) -> None:
        raise AssertionError("the engine tells it, not the drafter")

    def draft(self, place: int, last: int, tokens_max: int) -> list[int]:
        self.asked.append([place, last, tokens_max])
        return [] if self._first is None else [*range(self._first, self._first + tokens_max)]


def drafting(
    case: Mapping[str, Any], model: Model | None = None, trees: bool = False
) -> AnswerDrafter:
    """Return the drafter of an answer whose sources are a case's."""
    is_call = bool({"forced", "never", "few", "behind"} & case.keys())
    answers = TokenHistory([*case.get("earlier", ()), SEPARATOR])
    sources = AnswerSources(
        case.get("prompt", ()),
        lambda: answers,
        case.get("prediction", ()),
        Forced(case) if is_call else None,
        model=model,
    )
    length = DraftLength(FLAT)
    length.record(9, 10)  # it may draft as it likes
    return AnswerDrafter(sources, length, lambda: "call" if is_call else "text", trees)


@pytest.mark.parametrize("case", cases("draft/proposed.yaml", "chains"))
def test_a_draft_is_what_must_come_and_what_followed_before(case: dict[str, Any]) -> None:
    model = Model(case["first"]) if "first" in case else None
    drafter = drafting(case, model)
    for step in case["steps"]:
        drafter.take(step["taken"])
        assert drafter.is_promising() is step.get("promising", drafter.is_promising())
        draft = drafter.propose(step.get("asks", 4), 1)
        assert draft.is_chain and list(draft.tokens) == step["proposed"]
        sources = step.get("sources", draft.sources)
        assert list(draft.sources) == (list(sources) * len(draft))[: len(draft)]
    assert model is None or model.asked == case["asked"]


@pytest.mark.parametrize("case", cases("draft/proposed.yaml", "trees"))
def test_where_sources_differ_there_are_branches_where_trees_are_allowed(
    case: dict[str, Any],
) -> None:
    drafter, chains = drafting(case, trees=True), drafting(case)
    for each in (drafter, chains):
        each.take([7, 8])
    draft = drafter.propose(len(case.get("tokens", range(7))), 1)
    assert chains.propose(7, 1).is_chain and not draft.is_chain
    assert list(draft.tokens) == case.get("tokens", list(draft.tokens))
    assert list(draft.parents) == case.get("parents", list(draft.parents))
    assert list(draft.sources) == case.get("sources", list(draft.sources))
    roots = {draft.tokens[n] for n, parent in enumerate(draft.parents) if parent == -1}
    assert sorted(roots) == case.get("roots", sorted(roots))


def test_of_a_tree_each_branch_learns_what_was_told_of_it() -> None:
    drafter = drafting({"prompt": [7, 8, 50, 51], "earlier": [7, 8, 60, 61]}, trees=True)
    drafter.take([7, 8])
    draft = drafter.propose(7, 1)
    before = [drafter.rates.rate(source, "text", 2) for source in ("history", "answers")]
    drafter.record(draft, [draft.tokens.index(60)], 1 + len(draft))
    after = [drafter.rates.rate(source, "text", 2) for source in ("history", "answers")]
    assert after[0] < before[0] and after[1] > before[1]


def test_a_draft_is_promised_behind_a_right_draft_for_a_while() -> None:
    drafter = drafting({"prompt": range(100)})
    drafter.take(range(10, 20))
    drafter.record(drafter.propose(2, 1), [0, 1], 3)
    drafter.take([20, 21, 700])
    for token in range(701, 708):
        assert drafter.is_promising()
        drafter.take([token])
    drafter.take([708])
    assert not drafter.is_promising()


def test_of_what_hangs_from_a_wrong_token_nothing_is_learned() -> None:
    drafter, rates = drafting({"prompt": range(100)}), AcceptanceRates()
    drafter.take(range(10, 12))
    drafter.record(drafter.propose(7, 1), [], 8)
    rates.record("history", "text", 2, right=False)
    for length in (2, 3, 4, 6, 9):
        told = drafter.rates.rate("history", "text", length)
        assert told == rates.rate("history", "text", length)


def test_kinds_of_text_are_learned_apart() -> None:
    kind: list[TextKind] = ["thinking"]
    drafter = AnswerDrafter(AnswerSources(range(100)), DraftLength(), lambda: kind[0])
    drafter.take([20, 21])
    before = drafter.rates.rate("history", "call", 2)
    drafter.record(drafter.propose(1, 1), [], 2)
    after = drafter.rates.rate("history", "call", 2)
    assert drafter.rates.rate("history", "thinking", 2) < after < before


def test_counts_tell_what_was_drafted_and_what_it_saved() -> None:
    drafter = drafting({"prompt": [30, 31, 32, 33, 34, 35], "forced": [31, 32]})
    drafter.record(drafter.propose(4, 1), [0, 1, 2], 5)
    drafter.take([31, 32, 33, 700])
    drafter.take([701, 702])
    counts, total = drafter.counts, DraftCounts()
    assert counts.drafted == {"forced": 2, "history": 2}
    assert counts.accepted == {"forced": 2, "history": 1}
    assert counts.saved == pytest.approx(3, abs=0.02)
    total.add(counts)
    total.add(counts)
    assert (total.tokens, total.forwards, total.rows) == (12, 6, 14)
    assert total.accepted == {"forced": 4, "history": 2}


def test_a_history_that_has_grown_too_long_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_drafter, "HISTORY_TOKENS_MAX", 200)
    drafter = drafting({"prompt": range(100), "prediction": [900, 901, 902]})
    for start in range(0, 900, 45):
        drafter.take(range(start, start + 45))
        drafter.take([start + 5, start + 6])
        assert drafter.propose(2, 1).tokens == (start + 7, start + 8)
    drafter.take([900, 901])
    assert drafter.propose(1, 1).tokens == (902,), "the prediction is known all the same"
    drafter.take([300, 301])
    assert not drafter.propose(1, 1).tokens, "they are no more among the newest"


def test_of_a_longer_conversation_the_newest_tokens_are_looked_up() -> None:
    drafter = drafting({"prompt": [*range(HISTORY_TOKENS_MAX), 1, 2]})
    drafter.take([5, 6, 7])
    assert len(drafter.propose(4, 1)) == 0
    drafter.take(range(HISTORY_TOKENS_MAX - 50, HISTORY_TOKENS_MAX - 40))
    assert drafter.propose(1, 1).tokens == (HISTORY_TOKENS_MAX - 40,)


# ---------------------------------------------------------------- a draft model


def test_the_dearer_its_tokens_are_the_shorter_are_a_models_drafts_and_the_less_they_save() -> None:
    lengths, saved = [], []
    for cost in (0.0, 0.1, 0.2, 0.5):
        drafter = drafting({}, Model(token_cost=cost))
        drafter.take([500])
        draft = drafter.propose(7, 1)
        lengths.append(len(draft))
        drafter.record(draft, range(min(2, len(draft))), 1 + len(draft))
        drafter.take([900, 901, 500])
        saved.append(drafter.counts.saved)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[2] > lengths[3] == 0
    assert saved == sorted(saved, reverse=True) and saved[0] > saved[1] > saved[3] == 0


def test_a_draft_model_that_is_wrong_is_asked_no_more_but_now_and_then_for_a_token() -> None:
    model = Model()
    drafter = drafting({}, model)
    for _ in range(200):
        drafter.take([500])
        draft = drafter.propose(7, 1)
        if len(draft):
            drafter.record(draft, [], 1 + len(draft))
    asked = [tokens_max for _, _, tokens_max in model.asked]
    assert asked[0] > 1 and asked[-2:] == [1, 1] and len(asked) < 15


def test_a_draft_model_that_has_nothing_to_go_on_leaves_it_to_the_text() -> None:
    drafter = drafting({"prompt": [1, 2, 3, 4, 5, 1]}, Model(first=None))
    drafter.take([2])
    assert set(drafter.propose(2, 1).sources) <= {"history"}
    assert drafter.counts.saved == 0
