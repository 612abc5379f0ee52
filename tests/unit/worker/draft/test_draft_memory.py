"""A worker remembers how well each key's answers could be drafted, for so many keys."""

from hearth.worker.draft.answer_drafter import AnswerDrafter, AnswerSources
from hearth.worker.draft.draft_memory import OWNERS_MAX, DraftMemory


def drafting(memory: DraftMemory, owner: str, prompt: list[int]) -> AnswerDrafter:
    drafter = memory.begin(owner, AnswerSources(prompt), lambda: "text")
    drafter.take([1, 2, 3])
    drafter.propose(8, 1)
    return drafter


def test_a_new_answer_starts_from_its_keys_rates() -> None:
    memory = DraftMemory()
    first = drafting(memory, "mine", [5, 6, 7, 8])
    first.take([5, 6])
    before = first.rates.rate("history", "text", 2)
    first.note(first.propose(1, 1), [], 2)
    memory.keep("mine", first.answer)
    assert drafting(memory, "mine", [9]).rates.rate("history", "text", 2) < before
    assert drafting(memory, "theirs", [9]).rates.rate("history", "text", 2) == before


def test_rates_of_so_many_keys_are_remembered() -> None:
    memory = DraftMemory()
    rates = []
    for number in range(OWNERS_MAX + 1):
        drafter = drafting(memory, f"{number}", [5, 6, 7, 8])
        drafter.take([5, 6])
        drafter.note(drafter.propose(1, 1), [], 2)
        rates.append(drafter.rates.rate("history", "text", 2))
    again = [
        drafting(memory, f"{n}", [9]).rates.rate("history", "text", 2) for n in (OWNERS_MAX, 0)
    ]
    assert again[0] == rates[-1] < again[1], "the first of them is unknown again"
