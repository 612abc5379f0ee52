"""An answer's drafter proposes what followed before, and stops where that is wrong."""

from hearth.worker.draft.answer_drafter import AnswerDrafter, AnswerSources
from hearth.worker.draft.draft_length import DraftLength


def test_what_followed_in_the_prompt_is_drafted_again() -> None:
    drafter = AnswerDrafter(AnswerSources(list(range(100))), DraftLength(), lambda: "text")
    drafter.take([500, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19])
    draft = drafter.propose(7, 1)
    assert draft.is_chain and set(draft.sources) == {"history"}
    assert draft.tokens == tuple(range(20, 20 + len(draft))) and len(draft) > 1
