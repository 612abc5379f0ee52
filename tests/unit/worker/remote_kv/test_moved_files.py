"""Whatever another worker says of its files, what is taken of it is files of this very prompt."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from hearth.shared.kv_move_messages import Found
from hearth.worker.cache.block_hash import PrefixHash, prefix_hashes, root_hash
from hearth.worker.disk.file_names import FileName
from hearth.worker.remote_kv.moved_files import ModelBytes, MoveRules, UnusableMove, moved_files
from tests.helpers.remote_kv.kv_movers import (
    FULL,
    ROW_BYTES,
    RULE,
    RUN,
    STATE_BYTES,
    prompt_of,
    records_of,
)

M3, M4 = root_hash(["chip M3"]), root_hash(["chip M4"])
TOKENS = list(range(1, 4 * RUN + 20))
SIZES = ModelBytes(ROW_BYTES, ROW_BYTES, STATE_BYTES)
THEIRS, OURS = prompt_of(TOKENS, M3), prompt_of(TOKENS, M4)
RECORDS = records_of(THEIRS, M3, FULL)
NAMES = [record.name for record in RECORDS]
FOUND = Found("a", b"n" * 16, M3, [name.file_name for name in NAMES], [9000] * len(NAMES))


def rules(root: PrefixHash = M4, is_exact: bool = False) -> MoveRules:
    return MoveRules(root, RULE, is_exact, SIZES)


def test_files_of_another_machine_get_this_ones_names_and_places() -> None:
    files = moved_files(FOUND, OURS.limit, OURS, rules())
    starts = dict(zip([0, *OURS.cuts], [OURS.root, *OURS.names], strict=True))
    assert [file.theirs for file in files] == NAMES
    for file in files:
        assert (file.mine.start, file.mine.end) == (starts[file.position], starts[file.end])
        assert not file.mine.is_canonical and not file.mine.rule


def test_files_of_the_same_machine_stay_as_they_are() -> None:
    assert OURS.root != THEIRS.root
    files = moved_files(FOUND, THEIRS.limit, THEIRS, rules(M3, is_exact=True))
    assert [file.mine for file in files] == NAMES


def test_who_claims_this_machines_root_has_to_have_its_names() -> None:
    with pytest.raises(UnusableMove, match="names"):
        moved_files(replace(FOUND, root=M4), OURS.limit, OURS, rules(is_exact=True))


def test_a_file_larger_than_the_models_kv_can_be_is_refused() -> None:
    sizes = [SIZES.file_max(name) for name in NAMES]
    assert moved_files(replace(FOUND, sizes=sizes), OURS.limit, OURS, rules())
    for number in range(len(sizes)):
        larger = [*sizes[:number], sizes[number] + 1, *sizes[number + 1 :]]
        with pytest.raises(UnusableMove, match="size"):
            moved_files(replace(FOUND, sizes=larger), OURS.limit, OURS, rules())


@st.composite
def lies(draw: st.DrawFn) -> Found:
    """Return a Found of which some files lack, come twice, elsewhere, or under other names."""
    names = draw(
        st.lists(st.sampled_from(NAMES), max_size=12) | st.permutations(NAMES) | st.just(NAMES)
    )
    changed: list[FileName | None] = list(names)
    for at in draw(st.sets(st.integers(0, max(0, len(names) - 1)), max_size=2)) if names else ():
        odd = replace(names[at], token_count=draw(st.integers(1, 2 * RUN)))
        changed[at] = draw(st.sampled_from([odd, replace(odd, end=M4), None]))
    texts = [name.file_name if name is not None else "../../etc/passwd" for name in changed]
    sizes = draw(st.lists(st.integers(-1, 1 << 40), min_size=len(texts), max_size=len(texts)))
    root = draw(st.sampled_from([M3, M4, b"", b"r" * 99]))
    return Found(
        "a", b"n" * 16, root, texts, draw(st.sampled_from([sizes, sizes[1:], [9000] * len(texts)]))
    )


@given(lies(), st.sampled_from([RUN, 4 * RUN]), st.booleans())
def test_no_lie_makes_a_file_that_is_not_the_prompts_own(
    found: Found, end: int, is_exact: bool
) -> None:
    try:
        files = moved_files(found, end, OURS, rules(is_exact=is_exact))
    except UnusableMove:
        return
    assert not is_exact and files[-1].end <= end
    assert OURS.root is not None
    for file in files:
        ends = [at for at in (file.position, file.end) if at]
        own = prefix_hashes(OURS.root, OURS.tokens, ends)
        assert own[-1] == file.mine.end
        assert file.mine.start == (own[0] if file.position else OURS.root)
        assert 0 < file.nbytes <= SIZES.file_max(file.theirs)
