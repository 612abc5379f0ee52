"""A worker remembers each key's answers, and how well they could be drafted, within bounds."""

from hearth.worker.draft.answer_drafter import TOKENS_MIN, AnswerDrafter, AnswerSources, DraftMemory
from hearth.worker.draft.token_history import SEPARATOR

SECRET = list(range(1_000, 1_100))


def newest(answers: DraftMemory, owner: str, count: int) -> list[int]:
    history = answers.answers_of(owner)
    return history.newest(count).tolist() if history is not None else []


def test_a_probe_that_begins_as_another_keys_answer_did_is_drafted_nothing_of_it() -> None:
    memory = DraftMemory()
    for owner in ("mine", ""):
        told = memory.begin(owner, AnswerSources([1, 2, 3]), lambda: "text")
        told.take(SECRET)
        memory.keep(owner, told.answer)
    for begin in range(1, len(SECRET)):
        probe = memory.begin(
            "theirs", AnswerSources([1, 2, 3], prediction=SECRET[:begin]), lambda: "text"
        )
        probe.take(SECRET[:begin])
        assert probe.propose(8, 1).tokens == () and not probe.is_promising()
        memory.keep("theirs", probe.answer)
        own = memory.begin("mine", AnswerSources([1, 2, 3]), lambda: "text")
        own.take(SECRET[:begin])
        assert begin < 2 or own.propose(1, 1).tokens == (SECRET[begin],), "it serves its own key"


def test_a_short_answer_is_not_worth_being_kept() -> None:
    answers = DraftMemory()
    answers.keep("mine", range(TOKENS_MIN - 1))
    assert answers.answers_of("mine") is None and answers.nbytes == 0
    answers.keep("mine", range(TOKENS_MIN))
    assert newest(answers, "mine", 99) == [*range(TOKENS_MIN), SEPARATOR]


def test_a_key_that_holds_less_than_its_share_loses_nothing_to_one_that_floods() -> None:
    answers = DraftMemory(bytes_max=1 << 20)
    answers.keep("mine", SECRET)
    for number in range(80):
        answers.keep("theirs", range(number, number + 1_000))
        assert answers.nbytes <= 1 << 20
        assert newest(answers, "mine", 101) == [*SECRET, SEPARATOR]
    assert newest(answers, "theirs", 2) == [1_078, SEPARATOR], "the newest stay"


def test_any_number_of_keys_stays_within_the_bound() -> None:
    answers = DraftMemory(bytes_max=1 << 18)
    for number in range(500):
        answers.keep(f"{number}", range(20))
        assert answers.nbytes <= 1 << 18
    assert answers.answers_of("499") is not None


def test_an_answer_longer_than_all_room_leaves_its_end() -> None:
    answers = DraftMemory(bytes_max=1 << 18)
    answers.keep("mine", range(50_000))
    assert answers.nbytes <= 1 << 18
    assert newest(answers, "mine", 2) == [49_999, SEPARATOR]


def test_what_is_forgotten_is_gone() -> None:
    memory = DraftMemory()
    drafter = memory.begin("mine", AnswerSources([1, 2, 3]), lambda: "text")
    drafter.take(SECRET)
    memory.keep("mine", drafter.answer)
    assert memory.nbytes > 0
    memory.clear()
    assert memory.nbytes == 0


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
    first.record(first.propose(1, 1), [], 2)
    memory.keep("mine", first.answer)
    assert drafting(memory, "mine", [9]).rates.rate("history", "text", 2) < before
    assert drafting(memory, "theirs", [9]).rates.rate("history", "text", 2) == before
