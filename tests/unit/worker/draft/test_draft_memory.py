"""A worker remembers 32 MB for drafting at most, whatever is asked of it."""

import tracemalloc
from array import array
from collections.abc import Sequence

import pytest

from hearth.worker.draft import answer_drafter
from hearth.worker.draft.answer_drafter import HISTORY_TOKENS_MAX, AnswerDrafter, AnswerSources
from hearth.worker.draft.draft_memory import OWNERS_MAX, DraftMemory
from hearth.worker.draft.history_room import HistoryRoom
from hearth.worker.draft.token_history import TokenHistory


class Holder:
    def __init__(self, nbytes: int) -> None:
        self.history_nbytes = nbytes

    def drop_history(self) -> None:
        self.history_nbytes = 0


def drafting(memory: DraftMemory, owner: str, prompt: list[int]) -> AnswerDrafter:
    drafter = memory.begin(owner, AnswerSources(prompt), lambda: "text")
    drafter.take([1, 2, 3])
    drafter.propose(8, 1)
    return drafter


def test_the_history_that_was_made_first_makes_way() -> None:
    room = HistoryRoom(bytes_max=10)
    holders = [Holder(4), Holder(4), Holder(4)]
    for holder in holders:
        room.hold(holder)
    assert [holder.history_nbytes for holder in holders] == [0, 4, 4]
    assert room.nbytes == 8


def test_one_that_is_released_counts_no_more() -> None:
    room = HistoryRoom(bytes_max=10)
    first, second = Holder(6), Holder(6)
    room.hold(first)
    room.release(first)
    room.hold(second)
    assert (room.nbytes, first.history_nbytes) == (6, 6)
    room.hold(second)
    assert room.nbytes == 6, "one holds its history once"


def test_a_history_larger_than_all_room_is_the_only_one() -> None:
    room = HistoryRoom(bytes_max=10)
    small, large = Holder(2), Holder(11)
    room.hold(small)
    room.hold(large)
    assert (small.history_nbytes, large.history_nbytes) == (0, 11)


def test_long_conversations_and_long_answers_of_many_keys_stay_within_32_mb() -> None:
    memory = DraftMemory()
    prompt = list(range(HISTORY_TOKENS_MAX))
    drafters = []
    for number in range(8):
        drafters.append(drafting(memory, f"{number}", prompt))
        assert 0 < memory.nbytes <= 32 << 20
    for number, drafter in enumerate(drafters):
        drafter.take(range(60_000))
        drafter.propose(8, 1)
        assert memory.nbytes <= 32 << 20
        memory.keep(f"{number}", drafter.answer)
        memory.end(drafter)
        assert memory.nbytes <= 32 << 20
    assert memory.counts.tokens == 8 * 60_003


def test_the_predictions_of_many_answers_stay_within_32_mb_too() -> None:
    memory = DraftMemory()
    predicted = array("i", range(1_000_000))  # one of 1,000,000 characters may have as many tokens
    tracemalloc.start()
    sources = AnswerSources([1, 2, 3], prediction=predicted)
    drafters = [memory.begin(f"{number}", sources, lambda: "text") for number in range(4)]
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(drafters) == 4 and held <= 1 << 20, "nothing is indexed before it is asked for"
    for drafter in drafters:
        drafter.take([0, 1])
        drafter.propose(1, 1)
    assert memory.nbytes <= 32 << 20
    assert sum(drafter.history_nbytes for drafter in drafters) > 4 << 20, "what is told counts them"


def test_many_answers_that_grow_long_side_by_side_stay_within_32_mb() -> None:
    """Each has a history from its begin, and goes on in a batch, where none is drafted for."""
    memory = DraftMemory()
    drafters = [drafting(memory, f"{number}", [5, 6, 7, 8]) for number in range(20)]
    for start in range(0, 80_000, 4_000):
        for drafter in drafters:
            drafter.take(range(start, start + 4_000))
            assert memory.nbytes <= 32 << 20


def test_a_conversation_whose_history_made_way_is_drafted_as_before_once_another_has_ended() -> (
    None
):
    memory = DraftMemory()
    prompt = list(range(HISTORY_TOKENS_MAX))
    drafters = [drafting(memory, "mine", prompt) for _ in range(6)]
    assert min(drafter.history_nbytes for drafter in drafters) == 0
    assert drafters[0].propose(1, 1).tokens == ()
    memory.end(drafters[5])
    drafters[0].take(range(200_000, 200_010))
    assert drafters[0].propose(1, 1).tokens == (200_010,)


def test_a_new_answer_starts_from_its_keys_rates() -> None:
    memory = DraftMemory()
    first = drafting(memory, "mine", [5, 6, 7, 8])
    first.take([5, 6])
    before = first.rate("history", "text", 2)
    first.note(first.propose(1, 1), [], 2)
    memory.keep("mine", first.answer)
    memory.end(first)
    assert drafting(memory, "mine", [9]).rate("history", "text", 2) < before
    assert drafting(memory, "theirs", [9]).rate("history", "text", 2) == before


def test_rates_of_so_many_keys_are_remembered() -> None:
    memory = DraftMemory()
    rates = []
    for number in range(OWNERS_MAX + 1):
        drafter = drafting(memory, f"{number}", [5, 6, 7, 8])
        drafter.take([5, 6])
        drafter.note(drafter.propose(1, 1), [], 2)
        rates.append(drafter.rate("history", "text", 2))
    again = [drafting(memory, f"{n}", [9]).rate("history", "text", 2) for n in (OWNERS_MAX, 0)]
    assert again[0] == rates[-1] < again[1], "the first of them is unknown again"


def test_answers_that_have_no_room_together_do_not_make_their_histories_anew_at_each_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a model does not batch, each of many long answers is asked at each step."""
    made: list[int] = []

    class Counted(TokenHistory):
        def __init__(self, tokens: Sequence[int] = (), room: int = 0) -> None:
            made.append(len(tokens))
            super().__init__(tokens, room)

    monkeypatch.setattr(answer_drafter, "TokenHistory", Counted)
    memory, steps = DraftMemory(), 5
    prompts = [range(place, place + 50_000) for place in range(20)]
    drafters = [memory.begin("k", AnswerSources(prompt), lambda: "text") for prompt in prompts]
    for step in range(steps):
        for drafter in drafters:
            drafter.take([step])
            drafter.is_promising()
    assert len(made) <= 2 * len(drafters)
