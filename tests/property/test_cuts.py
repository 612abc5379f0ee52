"""The cut rule: a pure function of the token prefix."""

from hypothesis import given
from hypothesis import strategies as st

from worker.prompt.cuts import HEADER_GAP_TOKENS_MIN, CutRule, TurnMarks

HEADER, ROLE_A, ROLE_U, NEWLINE = 1, 2, 3, 4
RULE = CutRule(32, TurnMarks(frozenset({HEADER}), ((HEADER, ROLE_A, NEWLINE),)))
BARE = CutRule(32, TurnMarks(frozenset(), ()))

MESSAGES = st.lists(
    st.tuples(st.sampled_from([ROLE_A, ROLE_U]), st.integers(0, 150)), min_size=1, max_size=8
)


def rendered(messages: list[tuple[int, int]]) -> list[int]:
    ids = []
    for role, length in messages:
        ids += [HEADER, role, NEWLINE, *range(10, 10 + length)]
    return ids


@given(MESSAGES)
def test_a_prefill_by_cuts_feeds_everything_but_the_last_token_once(
    messages: list[tuple[int, int]],
) -> None:
    ids = rendered(messages)
    for rule in (RULE, BARE):
        cuts = rule.cuts(ids)
        assert cuts == sorted(set(cuts))
        assert cuts[-1] == len(ids) - 1
        assert all(b - a <= 32 for a, b in zip([0, *cuts], cuts, strict=False))
        assert set(range(32, len(ids), 32)) <= set(cuts)


@given(MESSAGES, MESSAGES)
def test_the_cuts_of_a_prefix_are_cuts_of_whatever_extends_it(
    head: list[tuple[int, int]], tail: list[tuple[int, int]]
) -> None:
    short, long = rendered(head), rendered(head + tail)
    inner = [cut for cut in RULE.cuts(long) if cut < len(short) - 2]
    assert [cut for cut in RULE.cuts(short) if cut < len(short) - 2] == inner


@given(MESSAGES)
def test_a_generation_prompt_is_cut_before_its_last_token(messages: list[tuple[int, int]]) -> None:
    ids = rendered([*messages, (ROLE_A, 0)])
    assert len(ids) - 1 in RULE.cuts([*ids, 9, 9, 9])


def test_system_and_tools_end_in_a_cut_and_close_headers_do_not() -> None:
    system, question = [HEADER, ROLE_U, NEWLINE, *[9] * 7], [HEADER, ROLE_U, NEWLINE, 9]
    ids = system + question + question + [9] * 10
    assert RULE.cuts(ids)[0] == len(system)
    assert len(system + question) not in RULE.cuts(ids)
    far = [HEADER, ROLE_U, *([9] * (HEADER_GAP_TOKENS_MIN + 80)), *question]
    wide = CutRule(1000, RULE.marks)
    assert wide.cuts([*system, *far, 9, 9])[1] == len(system) + len(far) - len(question)


def test_a_question_costs_one_forward_and_its_last_token() -> None:
    question = [HEADER, ROLE_U, NEWLINE, *[9] * 20, HEADER, ROLE_A, NEWLINE]
    assert RULE.cuts(question) == [len(question) - 1]


def test_one_token_is_fed_alone() -> None:
    assert RULE.cuts([HEADER]) == []
