"""A memory by owner serves no other, and leaves each the room that it has a right to."""

import random

from hearth.shared.memory_by_owner import MemoryByOwner


def kept(memory: MemoryByOwner[str, int], owner: str, keys: str) -> str:
    return "".join(key for key in keys if memory.get(owner, key) is not None)


def test_what_one_owner_has_remembered_is_not_there_for_another() -> None:
    memory: MemoryByOwner[str, int] = MemoryByOwner(10)
    memory.put("mine", "a", 1)
    assert memory.get("mine", "a") == 1
    assert memory.get("theirs", "a") is memory.get("", "a") is None
    memory.put("theirs", "a", 2)
    assert (memory.get("mine", "a"), memory.get("theirs", "a"), len(memory)) == (1, 2, 2)


def test_of_one_owner_what_was_not_used_longest_goes_first() -> None:
    memory: MemoryByOwner[str, int] = MemoryByOwner(3)
    for key in "abc":
        memory.put("", key, 0)
    memory.get("", "a")
    memory.put("", "d", 0)
    assert kept(memory, "", "abcd") == "acd"


def test_an_owner_that_holds_less_than_its_share_loses_nothing_to_one_that_floods() -> None:
    memory: MemoryByOwner[str, int] = MemoryByOwner(100, lambda _key, cost: cost)
    for key in "abcd":
        memory.put("mine", key, 10)
    for number in range(1_000):
        memory.put("theirs", f"{number}", 1 + number % 60)
        assert kept(memory, "mine", "abcd") == "abcd"
    assert memory.cost <= 100


def test_what_costs_more_than_all_the_room_is_not_kept() -> None:
    memory: MemoryByOwner[str, int] = MemoryByOwner(10, lambda _key, cost: cost)
    memory.put("mine", "a", 2)
    memory.put("theirs", "b", 11)
    assert (kept(memory, "mine", "a"), kept(memory, "theirs", "b"), memory.cost) == ("a", "", 2)


def test_its_cost_is_the_sum_over_what_is_kept_whoever_puts_what() -> None:
    chance = random.Random(7)
    memory: MemoryByOwner[int, int] = MemoryByOwner(50, lambda _key, cost: cost)
    for step in range(2_000):
        owner, key = chance.choice("abc"), chance.randrange(40)
        if memory.get(owner, key) is None:
            memory.put(owner, key, 1 + key % 7)
        found = [memory.get(who, number) for who in "abc" for number in range(40)]
        costs = [cost for cost in found if cost is not None]
        assert (memory.cost, len(memory)) == (sum(costs), len(costs)) and memory.cost <= 50
        if step % 500 == 0:
            memory.clear()
            assert (memory.cost, len(memory)) == (0, 0)
