"""The cut rule: a pure function of the token prefix."""

from hypothesis import given, strategies as st

from hearth.worker.prompt.prefill_cuts import (
    HEADER_GAP_TOKENS_MIN,
    TAIL_TOKENS_MAX,
    CutRule,
    TurnMarks,
)

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


def last_header(ids: list[int]) -> int:
    return max(at for at, token in enumerate(ids) if token == HEADER)


@given(MESSAGES, MESSAGES)
def test_the_last_of_several_messages_before_a_turn_is_cut(
    head: list[tuple[int, int]], tail: list[tuple[int, int]]
) -> None:
    """A client may leave it out next time: that costs no more than itself."""
    several = [*rendered(head), *[HEADER, ROLE_U, NEWLINE, 9], *[HEADER, ROLE_U, NEWLINE, 9]]
    last = len(several) - 4
    assert last in RULE.cuts([*several, HEADER, ROLE_A, NEWLINE, *rendered(tail)])


@given(MESSAGES)
def test_a_prefill_by_cuts_leaves_a_short_tail_or_one_token(
    messages: list[tuple[int, int]],
) -> None:
    ids = rendered(messages)
    for rule in (RULE, BARE):
        cuts = rule.cuts(ids)
        assert cuts == sorted(set(cuts))
        assert all(0 < cut < len(ids) for cut in cuts)
        assert all(b - a <= 32 for a, b in zip([0, *cuts], cuts, strict=False))
        assert set(range(32, len(ids), 32)) <= set(cuts)
        tail = len(ids) - (cuts[-1] if cuts else 0)
        assert 1 <= tail <= TAIL_TOKENS_MAX


@given(MESSAGES, MESSAGES)
def test_the_cuts_of_a_prefix_are_cuts_of_whatever_extends_it(
    head: list[tuple[int, int]], tail: list[tuple[int, int]]
) -> None:
    short, long = rendered(head), rendered(head + tail)
    inner = [cut for cut in RULE.cuts(long) if cut < len(short)]
    natural = RULE.natural(short)
    assert inner[: len(natural)] == natural
    assert all(cut >= last_header(short) for cut in inner[len(natural) :]), "only what is open"
    assert set(RULE.cuts(short)) - set(inner) <= {len(short) - 1}


@given(MESSAGES)
def test_a_turn_of_the_model_is_cut_where_its_header_begins(
    messages: list[tuple[int, int]],
) -> None:
    ids = rendered(messages)
    prompt = [*ids, HEADER, ROLE_A, NEWLINE]
    assert RULE.cuts(prompt)[-1] == len(ids) or (len(ids) + 1) % 32 in (0, 31)
    assert len(ids) in RULE.cuts([*prompt, 9, 9, 9])


def test_system_and_tools_end_in_a_cut_and_close_headers_do_not() -> None:
    system, question = [HEADER, ROLE_U, NEWLINE, *[9] * 7], [HEADER, ROLE_U, NEWLINE, 9]
    ids = system + question + question + [9] * 10
    assert RULE.cuts(ids)[0] == len(system)
    assert len(system + question) not in RULE.cuts(ids)
    far = [HEADER, ROLE_U, *([9] * (HEADER_GAP_TOKENS_MIN + 80)), *question]
    wide = CutRule(1000, RULE.marks)
    assert wide.cuts([*system, *far, 9, 9])[1] == len(system) + len(far) - len(question)


def test_a_question_costs_one_forward_and_its_generation_prompt() -> None:
    question = [HEADER, ROLE_U, NEWLINE, *[9] * 20]
    assert RULE.cuts([*question, HEADER, ROLE_A, NEWLINE]) == [len(question)]


def test_one_token_is_fed_alone() -> None:
    assert RULE.cuts([HEADER]) == []
