"""An answer's drafter proposes what must come, then what followed before, and learns from both."""

from collections.abc import Callable, Sequence

import pytest

from hearth.worker.draft import answer_drafter
from hearth.worker.draft.answer_drafter import (
    HISTORY_TOKENS_MAX,
    AnswerDrafter,
    AnswerSources,
    DraftCounts,
)
from hearth.worker.draft.draft import Draft
from hearth.worker.draft.draft_length import CPU_CURVE, AcceptanceRates, DraftLength, TextKind
from hearth.worker.draft.token_history import SEPARATOR, TokenHistory

FLAT = {1: 1.0, 8: 1.01}


class Forced:
    """Says which tokens must come, as a test sets it, and that some never do."""

    def __init__(
        self,
        *tokens: int,
        never: int = -1,
        behind: dict[int, int] | None = None,
        few: Sequence[int] = (),
    ) -> None:
        self.tokens = list(tokens)
        self.never = never
        self.few = few  # one of them must come
        self.behind = behind or {}  # what must come behind a token
        self.taken: list[int] = []

    def take(self, tokens: Sequence[int]) -> None:
        self.taken += tokens
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
        if not self.few:
            return None
        return lambda token: token in self.few


def drafting(
    prompt: Sequence[int] = (),
    prediction: Sequence[int] = (),
    earlier: Sequence[int] = (),
    forced: Forced | None = None,
    trees: bool = False,
    kind: TextKind = "text",
) -> AnswerDrafter:
    answers = TokenHistory([*earlier, SEPARATOR])
    sources = AnswerSources(prompt, lambda: answers, prediction, forced)
    length = DraftLength(FLAT)
    length.note(9, 10)  # it may draft as it likes
    return AnswerDrafter(sources, length, lambda: kind, trees)


def settle(drafter: AnswerDrafter, draft: Draft, accepted: Sequence[int], then: int) -> None:
    """Tell what became of a chain, and what the model said behind it."""
    drafter.note(draft, accepted, 1 + len(draft))
    drafter.take([*(draft.tokens[node] for node in accepted), then])


def first_nodes(draft: Draft) -> dict[int, int]:
    """Return the first node of each token."""
    return {token: draft.tokens.index(token) for token in draft.tokens}


# ---------------------------------------------------------------- sources


def test_what_followed_in_the_prompt_is_drafted_again() -> None:
    drafter = drafting(range(100))
    drafter.take(range(10, 20))
    draft = drafter.propose(7, 1)
    assert draft.is_chain and set(draft.sources) == {"history"}
    assert draft.tokens == tuple(range(20, 27))


def test_what_followed_in_the_answer_itself_is_drafted_again() -> None:
    drafter = drafting([1, 2, 3])
    drafter.take([50, 51, 52, 53, 54, 50, 51])
    assert drafter.propose(3, 1).tokens == (52, 53, 54)


def test_a_text_that_repeats_itself_is_thought_to_go_on_so() -> None:
    drafter = drafting([1, 2, 3])
    drafter.take([50, 60, 50, 60, 50, 60])
    assert drafter.propose(5, 1).tokens == (50, 60, 50, 60, 50)


def test_where_nothing_stood_before_nothing_is_drafted() -> None:
    drafter = drafting(range(100))
    drafter.take([500, 501, 502])
    assert len(drafter.propose(7, 1)) == 0
    assert not drafter.is_promising()


def test_a_prediction_is_drafted_from_its_start() -> None:
    drafter = drafting([1, 2, 3], prediction=range(40, 60))
    draft = drafter.propose(4, 1)
    assert (draft.tokens, set(draft.sources)) == ((40, 41, 42, 43), {"prediction"})
    settle(drafter, draft, [0, 1, 2, 3], then=44)
    assert drafter.propose(4, 1).tokens == (45, 46, 47, 48)


def test_behind_what_differs_from_it_a_prediction_is_taken_up_again() -> None:
    drafter = drafting([1, 2, 3], prediction=range(40, 60))
    drafter.take([40, 41, 900, 901])
    assert len(drafter.propose(4, 1)) == 0
    drafter.take([45, 46])
    assert drafter.propose(4, 1).tokens == (47, 48, 49, 50)


def test_a_prediction_that_has_come_to_its_end_drafts_nothing() -> None:
    drafter = drafting([1, 2, 3], prediction=range(40, 50))
    drafter.take(range(40, 50))
    assert len(drafter.propose(4, 1)) == 0


def test_earlier_answers_are_drafted_from() -> None:
    drafter = drafting([1, 2, 3], earlier=range(40, 60))
    drafter.take([45, 46, 47])
    draft = drafter.propose(2, 1)
    assert (draft.tokens, set(draft.sources)) == ((48, 49), {"answers"})


def test_the_longest_match_is_followed_and_of_those_as_long_the_own_conversations() -> None:
    drafter = drafting([7, 8, 9, 100], [6, 7, 8, 9, 200], [5, 6, 7, 8, 9, 300])
    for tail, source in (
        ([7, 8, 9], "history"),
        ([6, 7, 8, 9], "prediction"),
        ([5, 6, 7, 8, 9], "answers"),
    ):
        drafter = drafting([7, 8, 9, 100], [6, 7, 8, 9, 200], [5, 6, 7, 8, 9, 300])
        drafter.take([1_000, *tail])
        assert drafter.propose(1, 1).sources == (source,)


# ---------------------------------------------------------------- forced tokens


def test_forced_tokens_come_first_and_what_followed_them_before_behind() -> None:
    drafter = drafting([30, 31, 32, 33, 34, 35], forced=Forced(31, 32), kind="call")
    drafter.take([])
    draft = drafter.propose(5, 1)
    assert draft.tokens == (31, 32, 33, 34, 35)
    assert draft.sources == ("forced", "forced", "history", "history", "history")
    assert draft.is_chain


def test_a_place_that_is_followed_already_is_followed_behind_forced_tokens() -> None:
    prompt = [*range(20, 40), 25, 26, 900]  # newer, but a shorter match
    forced = Forced(0, 0, 0, 0, 25, 26)
    drafter = drafting(prompt, forced=forced, kind="call")
    drafter.take([21, 22, 23, 24])
    assert forced.taken == [21, 22, 23, 24]
    assert drafter.propose(4, 1).tokens == (25, 26, 27, 28)


def test_text_that_is_copied_with_a_change_is_gone_on_with_behind_it() -> None:
    drafter = drafting([*range(20, 120)])
    drafter.take([20, 21, 22])
    assert drafter.propose(2, 1).tokens == (23, 24)
    drafter.take([200, 201])
    assert not drafter.propose(2, 1).tokens
    drafter.take([25])
    assert drafter.propose(1, 1).tokens == (26,), "one token tells where it goes on"
    drafter.take([202, 39])
    assert drafter.propose(1, 1).tokens == (40,)
    drafter.take([203, 204, 20])
    assert not drafter.propose(1, 1).tokens, "it is far from where it was left"


def test_what_cannot_come_in_a_call_is_not_drafted() -> None:
    known = [30, 31, 32, 33, 34, 35, 30, 31]
    assert drafting(known, kind="call").propose(4, 1).tokens == (32, 33, 34, 35)
    drafter = drafting(known, forced=Forced(never=34), kind="call")
    assert drafter.propose(4, 1).tokens == (32, 33)


def test_where_one_of_few_must_come_the_one_that_came_last_is_drafted() -> None:
    known = [31, 51, 31, 50, 52, 8, 31, 60, 9, 30, 31, 61, 62, 30, 31]
    assert drafting(known, kind="call").propose(4, 1).tokens[:1] == (61,)
    drafter = drafting(known, forced=Forced(few=(50, 51)), kind="call")
    assert drafter.propose(4, 1).tokens == (50,)


def test_what_must_come_behind_a_likely_token_is_drafted_behind_it_and_what_followed_that() -> None:
    known = [32, 70, 72, 30, 31, 32, 33, 34, 35, 30, 31]
    drafter = drafting(known, forced=Forced(behind={32: 70}), kind="call")
    draft = drafter.propose(3, 1)
    assert draft.tokens == (32, 70, 72)
    assert draft.sources == ("history", "forced", "history")


def test_what_forced_tokens_repeat_is_thought_to_go_on() -> None:
    drafter = drafting([1, 2, 9], forced=Forced(1, 2), kind="call")
    assert drafter.propose(6, 1).tokens == (1, 2, 9, 1, 2, 9)


def test_forced_tokens_that_are_always_wrong_are_asked_for_no_more() -> None:
    drafter = AnswerDrafter(
        AnswerSources([], forced=Forced(*[5] * 400)), DraftLength(CPU_CURVE), lambda: "call"
    )
    drafted = 0
    for at in range(300):
        draft = drafter.propose(7, 1)
        drafted += len(draft)
        if len(draft):
            drafter.note(draft, [], 1 + len(draft))
        drafter.take([1_000 + at])
    assert drafted <= 15


# ---------------------------------------------------------------- trees


def test_where_two_sources_differ_both_branches_are_proposed_where_trees_are_allowed() -> None:
    drafter = drafting([7, 8, 50, 51], earlier=[7, 8, 60, 61], trees=True)
    drafter.take([7, 8])
    draft = drafter.propose(7, 1)
    assert not draft.is_chain
    at = first_nodes(draft)
    assert {50, 51, 60} <= at.keys()
    assert draft.parents[at[50]] == draft.parents[at[60]] == -1
    assert (draft.parents[at[51]], draft.parents[at[61]]) == (at[50], at[60])
    assert at[50] < at[60] < at[51] < at[61], "the likeliest first"
    assert draft.sources[at[60]] == "answers"


def test_two_places_of_one_text_may_be_the_branches() -> None:
    drafter = drafting([7, 8, 50, 1, 2, 7, 8, 60, 3, 4], trees=True)
    drafter.take([7, 8])
    draft = drafter.propose(7, 1)
    roots = {draft.tokens[n] for n, parent in enumerate(draft.parents) if parent == -1}
    assert roots == {50, 60}


def test_branches_part_where_the_sources_do() -> None:
    drafter = drafting([7, 8, 40, 50, 51], earlier=[7, 8, 40, 60, 61], trees=True)
    drafter.take([7, 8])
    draft = drafter.propose(7, 1)
    at = first_nodes(draft)
    assert draft.tokens.count(40) == 1
    assert draft.parents[at[50]] == draft.parents[at[60]] == at[40]


def test_only_chains_are_proposed_unless_trees_are_allowed() -> None:
    drafter = drafting([7, 8, 50, 51], earlier=[7, 8, 60, 61])
    drafter.take([7, 8])
    assert drafter.propose(7, 1).is_chain


def test_of_a_tree_each_branch_learns_what_was_told_of_it() -> None:
    drafter = drafting([7, 8, 50, 51], earlier=[7, 8, 60, 61], trees=True)
    drafter.take([7, 8])
    draft = drafter.propose(7, 1)
    before = [drafter.rates.rate(source, "text", 2) for source in ("history", "answers")]
    drafter.note(draft, [draft.tokens.index(60)], 1 + len(draft))
    after = [drafter.rates.rate(source, "text", 2) for source in ("history", "answers")]
    assert after[0] < before[0] and after[1] > before[1]


# ---------------------------------------------------------------- what the engine is told


@pytest.mark.parametrize("waiting", [1, 3, 7, 8, 20])
def test_no_more_is_proposed_than_was_asked_for_nor_than_eight_rows(waiting: int) -> None:
    drafter = drafting(range(100))
    drafter.take(range(10, 20))
    assert len(drafter.propose(16, waiting)) == max(0, 8 - waiting)
    assert len(drafter.propose(2, waiting)) == min(2, max(0, 8 - waiting))
    assert len(drafter.propose(0, waiting)) == 0


def test_a_draft_is_promised_while_a_text_is_followed_and_behind_a_right_draft() -> None:
    drafter = drafting(range(100))
    drafter.take(range(10, 20))
    assert drafter.is_promising()
    settle(drafter, drafter.propose(2, 1), [0, 1], then=700)
    assert drafter.is_promising()
    for token in range(701, 708):
        assert drafter.is_promising()
        drafter.take([token])
    drafter.take([708])
    assert not drafter.is_promising()


def test_in_a_call_whose_grammar_is_known_a_draft_is_always_promised() -> None:
    assert drafting(forced=Forced(), kind="call").is_promising()
    assert not drafting(forced=Forced(), kind="text").is_promising()


def test_of_what_hangs_from_a_wrong_token_nothing_is_learned() -> None:
    drafter, rates = drafting(range(100)), AcceptanceRates()
    drafter.take(range(10, 12))
    drafter.note(drafter.propose(7, 1), [], 8)
    rates.note("history", "text", 2, right=False)
    lengths = (2, 3, 4, 6, 9)
    told = [drafter.rates.rate("history", "text", length) for length in lengths]
    assert told == [rates.rate("history", "text", length) for length in lengths]


def test_kinds_of_text_are_learned_apart() -> None:
    kind: list[TextKind] = ["thinking"]
    drafter = AnswerDrafter(AnswerSources(range(100)), DraftLength(), lambda: kind[0])
    drafter.take([20, 21])
    before = drafter.rates.rate("history", "call", 2)
    drafter.note(drafter.propose(1, 1), [], 2)
    assert (
        drafter.rates.rate("history", "thinking", 2)
        < drafter.rates.rate("history", "call", 2)
        < before
    )


def test_counts_tell_what_was_drafted_and_what_it_saved() -> None:
    drafter = drafting([30, 31, 32, 33, 34, 35], forced=Forced(31, 32), kind="call")
    settle(drafter, drafter.propose(4, 1), [0, 1, 2], then=700)
    drafter.take([701, 702])
    counts = drafter.counts
    assert (counts.tokens, counts.forwards, counts.rows) == (6, 3, 5 + 2)
    assert counts.drafted == {"forced": 2, "history": 2}
    assert counts.accepted == {"forced": 2, "history": 1}
    assert counts.saved == pytest.approx(3, abs=0.02)
    total = DraftCounts()
    total.add(counts)
    total.add(counts)
    assert (total.tokens, total.forwards, total.rows) == (12, 6, 14)
    assert total.accepted == {"forced": 4, "history": 2}


def test_a_draft_that_the_engine_drops_whole_is_plain_decoding() -> None:
    drafter = drafting(range(100))
    drafter.take(range(10, 20))
    assert len(drafter.propose(4, 3)) == 4
    drafter.take([20])
    counts = drafter.counts
    assert (counts.tokens, counts.forwards, counts.rows) == (11, 11, 10 + 3)
    assert counts.drafted.total() == 0


def test_rows_that_wait_are_counted_where_nothing_is_drafted_too() -> None:
    drafter = drafting([1, 2])
    drafter.take([5])
    assert len(drafter.propose(4, 3)) == 0
    drafter.take([6])
    assert (drafter.counts.rows, drafter.counts.forwards) == (2 + 2, 2)


# ---------------------------------------------------------------- memory


def test_a_history_that_has_grown_too_long_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_drafter, "HISTORY_TOKENS_MAX", 200)
    drafter = drafting(range(100), prediction=[900, 901, 902])
    drafter.take(range(10, 20))
    assert drafter.propose(2, 1).tokens == (20, 21)
    for start in range(0, 900, 45):
        drafter.take(range(start, start + 45))
        drafter.take([start + 5, start + 6])
        assert drafter.propose(2, 1).tokens == (start + 7, start + 8)
    drafter.take([900, 901])
    assert drafter.propose(1, 1).tokens == (902,), "the prediction is known all the same"


def test_of_a_longer_conversation_the_newest_tokens_are_looked_up() -> None:
    drafter = drafting([*range(HISTORY_TOKENS_MAX), 1, 2])
    drafter.take([5, 6, 7])
    assert len(drafter.propose(4, 1)) == 0
    drafter.take(range(HISTORY_TOKENS_MAX - 50, HISTORY_TOKENS_MAX - 40))
    assert drafter.propose(1, 1).tokens == (HISTORY_TOKENS_MAX - 40,)
    whole = TokenHistory(range(HISTORY_TOKENS_MAX))
    assert whole.nbytes <= 24 * HISTORY_TOKENS_MAX, "of the KV of so many tokens it is little"


# ---------------------------------------------------------------- a draft model


class Model:
    """Follows an answer that goes on with the numbers from `first`, whatever stands behind."""

    def __init__(self, first: int = 900, token_cost: float = 0.1, knows: bool = True) -> None:
        self.token_cost = token_cost
        self.asked: list[tuple[int, int, int]] = []
        self._first, self._knows = first, knows

    def take(self, start: int, tokens: object, hidden: object) -> None:
        raise AssertionError("the engine tells it, not the drafter")

    def draft(self, place: int, last: int, tokens_max: int) -> list[int]:
        self.asked.append((place, last, tokens_max))
        return [*range(self._first, self._first + tokens_max)] if self._knows else []


def with_model(
    model: Model, prompt: Sequence[int] = (), forced: Forced | None = None, allowed: int = 9
) -> AnswerDrafter:
    length = DraftLength(FLAT)
    length.note(allowed, 10)
    return AnswerDrafter(
        AnswerSources(prompt, forced=forced, model=model), length, lambda: "text", False
    )


def test_a_draft_model_is_asked_behind_the_last_known_token_where_no_text_repeats() -> None:
    model = Model()
    drafter = with_model(model, range(100))
    drafter.take([500, 501])
    assert drafter.is_promising()
    draft = drafter.propose(7, 1)
    (asked,) = model.asked
    assert asked == (101, 501, len(draft)) and 0 < len(draft) < 7
    assert set(draft.sources) == {"model"} and draft.is_chain
    assert draft.tokens == tuple(range(900, 900 + len(draft)))


def test_a_long_match_is_followed_instead_of_a_draft_model() -> None:
    model = Model()
    drafter = with_model(model, range(100))
    drafter.take(range(10, 50))
    assert set(drafter.propose(7, 1).sources) == {"history"}
    assert not model.asked


def test_a_draft_model_is_not_asked_behind_what_is_forced() -> None:
    model = Model()
    drafter = with_model(model, forced=Forced(1, 50, 51))
    drafter.take([1])
    assert drafter.propose(7, 1).tokens == (50, 51)
    assert not model.asked


def test_the_dearer_its_tokens_are_the_shorter_are_a_models_drafts_and_at_last_there_are_none() -> (
    None
):
    lengths = []
    for cost in (0.0, 0.1, 0.2, 0.5):
        drafter = with_model(Model(token_cost=cost))
        drafter.take([500])
        lengths.append(len(drafter.propose(7, 1)))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[2] > lengths[3] == 0


def test_a_draft_model_that_is_wrong_is_asked_no_more_but_now_and_then_for_a_token() -> None:
    model = Model()
    drafter = with_model(model)
    drafter.take([500])
    for _ in range(200):
        draft = drafter.propose(7, 1)
        if len(draft):
            drafter.note(draft, [], 1 + len(draft))
        drafter.take([500])
    first, late = model.asked[0], model.asked[-2:]
    assert first[2] > 1 and [asked[2] for asked in late] == [1, 1]
    assert len(model.asked) < 15


def test_what_a_models_drafts_cost_is_taken_from_what_they_are_held_to_save() -> None:
    saved = []
    for cost in (0.0, 0.1):
        drafter = with_model(Model(token_cost=cost))
        drafter.take([500])
        draft = drafter.propose(2, 1)
        settle(drafter, draft, [0, 1], 902)
        saved.append(drafter.counts.saved)
    assert saved[0] - saved[1] == pytest.approx(2 * 0.1)
    assert drafter.counts.accepted["model"] == 2


def test_a_draft_model_that_has_nothing_to_go_on_leaves_it_to_the_text() -> None:
    drafter = with_model(Model(knows=False), [1, 2, 3, 4, 5, 1])
    drafter.take([2])
    assert set(drafter.propose(2, 1).sources) <= {"history"}
    assert drafter.counts.saved == 0
