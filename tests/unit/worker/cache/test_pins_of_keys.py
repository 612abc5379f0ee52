"""Each key's pins have a bound of their own, and tell a key nothing of what others hold."""

import itertools

import pytest

from hearth.shared.errors import RequestError
from hearth.worker.cache.extent_store import Extent, ExtentStore
from hearth.worker.cache.pinned_prompts import Pins
from scripts.harness.store_builders import keep, new_store, rows, text

MINE, THEIRS = "mine", "theirs"
NUMBERS = itertools.count(1)


def pin(store: ExtentStore, pins: Pins, key: str, tokens: int, is_shared: bool = False) -> str:
    """Pin that many tokens of `key`, and return the pin's id. Raises: RequestError."""
    number = next(NUMBERS)
    path: list[Extent] = keep(store, text(0 if is_shared else number, tokens), [tokens])
    pins.check(f"p{number}", key, path, 0, 0)
    pins.add(f"p{number}", key, path)
    return f"p{number}"


def refusal(store: ExtentStore, pins: Pins, key: str, tokens: int) -> str:
    with pytest.raises(RequestError) as caught:
        pin(store, pins, key, tokens)
    assert caught.value.status == 409
    return str(caught.value)


def ids(pins: Pins, key: str) -> list[str]:
    return [row["id"] for row in pins.report(key)["pins"]]


def stores(bytes_of_tokens: int = 80) -> tuple[ExtentStore, Pins, ExtentStore, Pins]:
    """Return a store of two named keys where one key holds all that it may, and an empty one."""
    full, empty = (new_store(bytes_max=rows(bytes_of_tokens).nbytes) for _ in range(2))
    pins = Pins(full, 2)
    for _ in range(2):
        pin(full, pins, THEIRS, 10)
    return full, pins, empty, Pins(empty, 2)


def test_one_key_cannot_take_all_that_may_be_pinned() -> None:
    full, pins, _, _ = stores()
    assert "may hold" in refusal(full, pins, THEIRS, 1)
    held = ids(pins, THEIRS)
    assert pin(full, pins, MINE, 20) in ids(pins, MINE)
    assert "may hold" in refusal(full, pins, MINE, 1)
    assert ids(pins, THEIRS) == held, "nobody's pin went for it"


@pytest.mark.parametrize("tokens", [21, 30, 41, 79])
def test_a_409_and_the_report_are_the_same_whatever_another_key_holds(tokens: int) -> None:
    full, pins, empty, none = stores()
    assert refusal(full, pins, MINE, tokens) == refusal(empty, none, MINE, tokens)
    assert pins.report(MINE) == none.report(MINE)
    for store, each in ((full, pins), (empty, none)):
        pin(store, each, MINE, 15)
    assert refusal(full, pins, MINE, 6) == refusal(empty, none, MINE, 6)
    mine, alone = pins.report(MINE), none.report(MINE)
    assert [mine[name] for name in mine if name != "pins"] == [
        alone[n] for n in alone if n != "pins"
    ]
    assert not pins.drop(ids(pins, THEIRS)[0], MINE), "as where there is no such pin"


def test_a_newcomer_gets_its_share_of_what_keys_without_a_name_hold_and_no_more() -> None:
    """LiteLLM's: whoever holds more than a share gives up its oldest, who holds less nothing."""
    store = new_store(bytes_max=rows(80).nbytes)
    pins = Pins(store)
    held = [pin(store, pins, THEIRS, 10) for _ in range(4)]
    small = pin(store, pins, MINE, 5)
    assert ids(pins, THEIRS) == held[1:]
    pin(store, pins, "third", 10)
    assert ids(pins, THEIRS) == held[2:] and ids(pins, MINE) == [small]
    before = [*pins]
    refusal(store, pins, "fourth", 11)
    assert [*pins] == before, "who is refused takes nothing from anybody"
