"""The cut rule: a pure function of the token prefix."""

import itertools
import re

from hypothesis import given, strategies as st

from hearth.worker.cache.prefill_grid import HEADER_GAP, PrefillGrid
from hearth.worker.prompt.prefill_cuts import TAIL_TOKENS_MAX, CutRule, TurnMarks

HEADER, ROLE_A, ROLE_U, NEWLINE = 1, 2, 3, 4
MARKS = TurnMarks(frozenset({HEADER}), ((HEADER, ROLE_A, NEWLINE),))
RULE = CutRule(32, MARKS)
BARE = CutRule(32, TurnMarks(frozenset(), ()))
# Steps of 128 to 256 tokens, then 64, 32 and 16: a prompt of some messages goes through all.
DEEP = CutRule(128, MARKS, gap=HEADER_GAP, step_min=16, full_to=256)
WIDE = CutRule(512, MARKS, gap=256, step_min=64, full_to=512)
RULES = st.sampled_from([RULE, DEEP, WIDE])

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
    for rule in (RULE, BARE, DEEP, WIDE):
        cuts = rule.cuts(ids)
        assert cuts == sorted(set(cuts))
        assert all(0 < cut < len(ids) for cut in cuts)
        steps = [(b - a, rule.grid.step_at(a)) for a, b in zip([0, *cuts], cuts, strict=False)]
        assert all(length <= step for length, step in steps)
        assert set(rule.grid.points(len(ids))) <= set(cuts)
        tail = len(ids) - (cuts[-1] if cuts else 0)
        assert 1 <= tail <= TAIL_TOKENS_MAX


@given(MESSAGES, MESSAGES, RULES)
def test_the_cuts_of_a_prefix_are_cuts_of_whatever_extends_it(
    head: list[tuple[int, int]], tail: list[tuple[int, int]], rule: CutRule
) -> None:
    short, long = rendered(head), rendered(head + tail)
    inner = [cut for cut in rule.cuts(long) if cut < len(short)]
    natural = rule.natural(short)
    assert inner[: len(natural)] == natural
    assert all(cut >= last_header(short) for cut in inner[len(natural) :]), "only what is open"
    assert set(rule.cuts(short)) - set(inner) <= {len(short) - 1}


@given(MESSAGES, st.integers(1, 1_000))
def test_a_header_cut_reads_no_fewer_tokens_than_its_gap(
    messages: list[tuple[int, int]], broken_off: int
) -> None:
    ids = rendered(messages)[:broken_off]
    for rule in (RULE, DEEP, WIDE):
        always, maybe, _ = rule._candidates(ids)
        cuts = [0, *(cut for cut in rule.cuts(ids) if cut < len(ids) - 1)]
        lengths = {b: b - a for a, b in itertools.pairwise(cuts)}
        assert all(lengths[cut] >= rule.gap for cut in maybe - always if cut in lengths)
        assert always - {len(ids) - 1} <= set(cuts), "what is always cut is, whatever the gap"


def test_the_grid_is_of_halves_with_the_depth() -> None:
    grid = DEEP.grid
    assert grid.points(1060) == [
        *(128, 256, 320, 384, 448, 512, 544),
        *range(576, 1024, 32),
        *(1024, 1040, 1056),
    ]
    assert [grid.step_at(at) for at in (0, 255, 256, 511, 512, 1024, 9999)] == [
        *(128, 128, 64, 64, 32, 16, 16)
    ]
    assert all(map(grid.is_point, grid.points(3000)))
    assert grid.step_ends(100) == [100] and grid.step_ends(600) == [256, 512, 600]


@given(st.integers(1, 3000), st.integers(1, 400), st.integers(1, 300), st.integers(1, 500))
def test_the_grid_of_a_prefix_is_that_of_whatever_extends_it(
    end: int, chunk: int, step_min: int, full_to: int
) -> None:
    grid = PrefillGrid(chunk, step_min, full_to)
    points = grid.points(end)
    assert points == [at for at in grid.points(end + 777) if at < end]
    assert points == [at for at in range(1, end) if grid.is_point(at)]
    gaps = [b - a for a, b in zip([0, *points], [*points, end], strict=True)]
    assert all(0 < gap <= chunk for gap in gaps)
    assert all(gap >= min(chunk, step_min) for gap in gaps[:-1])


def test_system_and_tools_are_cut_more_finely_than_what_follows() -> None:
    """Sub-agents with other tools part there, and there is no header to resume at."""
    wide = CutRule(2048, MARKS, gap=256)
    system = [HEADER, ROLE_U, NEWLINE, *[9] * 5000]
    ids = [*system, HEADER, ROLE_U, NEWLINE, *[9] * 5000]
    assert wide.cuts(ids) == [1024, 2048, 3072, 4096, 5003, 6144, 8192, 10005]
    assert wide.natural(system) == [1024, 2048, 3072, 4096]
    bare = CutRule(2048, BARE.marks)
    assert bare.natural(ids) == [2048, 4096, 6144, 8192], "no end of it can be told"


def test_the_label_names_all_that_decides_the_cuts() -> None:
    rules = [RULE, DEEP, WIDE, CutRule(32, MARKS, gap=63), CutRule(32, MARKS, step_min=1)]
    rules += [CutRule(32, MARKS, full_to=99), CutRule(16_384, MARKS, 256, 1024)]
    rules += [CutRule(32, TurnMarks(MARKS.header_ids, MARKS.assistant_headers, True))]
    labels = {rule.label for rule in rules}
    assert len(labels) == len(rules)
    assert all(re.fullmatch(r"[a-z0-9.]{1,24}", label) for label in labels), labels


@given(MESSAGES, MESSAGES)
def test_system_and_tools_end_at_a_cut_whatever_follows(
    head: list[tuple[int, int]], tail: list[tuple[int, int]]
) -> None:
    first = rendered(head[:1])
    end = RULE.system_end([*first, *rendered(tail)])
    assert end == len(first) and end in RULE.cuts([*first, *rendered(tail)])
    assert RULE.system_end(first) == BARE.system_end([*first, *rendered(tail)]) == 0


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
    far = [HEADER, ROLE_U, *([9] * (HEADER_GAP + 80)), *question]
    wide = CutRule(1000, RULE.marks)
    assert wide.cuts([*system, *far, 9, 9])[1] == len(system) + len(far) - len(question)


def test_a_question_costs_one_forward_and_its_generation_prompt() -> None:
    question = [HEADER, ROLE_U, NEWLINE, *[9] * 20]
    assert RULE.cuts([*question, HEADER, ROLE_A, NEWLINE]) == [len(question)]


def test_one_token_is_fed_alone() -> None:
    assert RULE.cuts([HEADER]) == []
