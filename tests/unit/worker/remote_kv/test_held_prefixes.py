"""A worker tells of its KV each name once, as many as are remembered, none after a clear."""

from hearth.shared.kv_move_messages import HELD_NAMES_MAX, Holds
from hearth.worker.cache.block_hash import root_hash
from hearth.worker.remote_kv.held_prefixes import HeldPrefixes
from tests.helpers.remote_kv.kv_movers import RUN, prompt_of

HERE, ELSEWHERE = root_hash(["here"]), root_hash(["elsewhere"])
TALK = list(range(20 * RUN + 1))
NOTHING = Holds([], [])


def test_a_conversation_tells_one_or_two_names_a_turn_and_the_same_ones_on_any_machine() -> None:
    here, elsewhere = HeldPrefixes(), HeldPrefixes()
    told = []
    for end in range(3 * RUN, 20 * RUN, 2 * RUN):
        here.note(prompt_of(TALK[: end + 1], HERE))
        elsewhere.note(prompt_of(TALK[: end + 1], ELSEWHERE))
        told.append(here.changes())
        assert told[-1] == elsewhere.changes()
        assert here.changes() == NOTHING
    assert {len(each.added) for each in told} == {2}
    assert not any(each.dropped for each in told)
    assert len(here.all().added) == 2 * len(told)


def test_another_keys_prompt_has_other_names() -> None:
    held = HeldPrefixes()
    for key in ("mine", "theirs"):
        held.note(prompt_of(TALK[: 3 * RUN], HERE, key))
    assert len(held.changes().added) == 4


def test_a_name_leads_to_the_prefix_by_this_machines_own_names() -> None:
    held, query = HeldPrefixes(), prompt_of(TALK[: 3 * RUN], HERE)
    held.note(query)
    for name, own in zip(held.changes().added, query.names[-2:], strict=True):
        found = held.find(name)
        assert found is not None and (found.root, found.end) == (query.root, own)


def test_what_is_dropped_is_told_once_and_a_clear_drops_all() -> None:
    held = HeldPrefixes()
    held.note(prompt_of(TALK[: 3 * RUN], HERE))
    added = held.changes().added
    held.drop(added[0])
    held.drop(b"unknown")
    assert held.changes() == Holds([], added[:1])
    held.note(prompt_of(TALK[: 5 * RUN], HERE))
    held.clear()
    assert held.changes() == Holds([], added[1:]) and held.all() == NOTHING


def test_the_names_that_were_used_longest_ago_make_room() -> None:
    held = HeldPrefixes()
    prompts = HELD_NAMES_MAX // 2 + 1
    first: list[bytes] = []
    for number in range(prompts):
        held.note(prompt_of([number, *TALK[: 3 * RUN]], HERE))
        changes = held.changes()
        first = first or changes.added
    assert sorted(changes.dropped) == sorted(first)
    assert len(held.all().added) == HELD_NAMES_MAX
