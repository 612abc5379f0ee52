"""The relay: who is asked for whose KV, and who gets what."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.pool import kv_relay
from hearth.proxy.pool.kv_relay import KVRelay
from hearth.shared.kv_move_messages import (
    CHUNK_BYTES,
    HELD_NAMES_MAX,
    Chunk,
    Fetch,
    Found,
    Holds,
    KVMove,
    Seek,
)

LONG, SHORT = b"l" * 16, b"s" * 16


@dataclass
class Link:
    worker_id: int
    is_remote: bool = True
    is_ready: bool = True
    load: int = 0
    sent: list[KVMove] = field(default_factory=list)

    def send_kv(self, message: KVMove) -> None:
        self.sent.append(message)


def relay_of(*links: Link) -> KVRelay:
    return KVRelay({link.worker_id: link for link in links})


def found(seek_id: str) -> Found:
    return Found(seek_id, LONG, b"r" * 16, ["a file"], [10])


def test_the_worker_that_holds_most_of_a_prompt_is_asked_for_what_it_holds_alone() -> None:
    one, two, three = (Link(number) for number in range(3))
    relay = relay_of(one, two, three)
    relay.hear(0, Holds([SHORT], []))
    relay.hear(1, Holds([SHORT, LONG], []))
    relay.hear(2, Seek("a", [b"longest" * 2, LONG, SHORT]))
    assert (one.sent, three.sent) == ([], [])
    assert two.sent == [Seek("a", [LONG, SHORT])]


def test_of_two_that_hold_as_much_the_less_busy_one_is_asked() -> None:
    one, two, three = Link(0, load=3), Link(1, load=1), Link(2)
    relay = relay_of(one, two, three)
    for number in (0, 1):
        relay.hear(number, Holds([LONG], []))
    relay.hear(2, Seek("a", [LONG]))
    assert (len(one.sent), len(two.sent)) == (0, 1)


def test_workers_of_this_machine_share_a_directory_and_ask_only_those_elsewhere() -> None:
    one, two, away = Link(0, is_remote=False), Link(1, is_remote=False), Link(2)
    relay = relay_of(one, two, away)
    relay.hear(0, Holds([LONG], []))
    relay.hear(1, Seek("a", [LONG]))
    assert two.sent == [Found.nobody("a")] and one.sent == []
    relay.hear(2, Seek("b", [LONG]))
    assert one.sent == [Seek("b", [LONG])]


def test_what_is_found_goes_to_who_asked_and_pieces_to_and_fro() -> None:
    one, two = Link(0), Link(1)
    relay = relay_of(one, two)
    relay.hear(0, Holds([LONG], []))
    relay.hear(1, Seek("a", [LONG]))
    relay.hear(0, found("a"))
    relay.hear(1, Fetch("a", 0, 0, CHUNK_BYTES))
    relay.hear(0, Chunk("a", 0, 0, b"KV"))
    (told, chunk), (_, fetch) = two.sent, one.sent
    assert isinstance(told, Found) and told.holder == 0
    assert (fetch, chunk) == (Fetch("a", 0, 0, CHUNK_BYTES), Chunk("a", 0, 0, b"KV"))
    assert relay.report() == {"held": 1, "routes": 1, "sought": 1, "bytes": 2}


def test_a_worker_cannot_speak_in_a_route_that_is_not_its_own() -> None:
    one, two, liar = (Link(number) for number in range(3))
    relay = relay_of(one, two, liar)
    relay.hear(0, Holds([LONG], []))
    relay.hear(1, Seek("a", [LONG]))
    before = len(one.sent), len(two.sent)
    for number, message in (
        (2, found("a")),
        (2, Chunk("a", 0, 0, b"lie")),
        (2, Fetch("a", 0, 0, CHUNK_BYTES)),
        (1, Chunk("a", 0, 0, b"to itself")),
        (0, Found.nobody("unknown")),
    ):
        relay.hear(number, message)
    relay.hear(2, Seek("a", [LONG]))
    assert (len(one.sent), len(two.sent)) == before
    assert relay.counts["strays"] == 5 and liar.sent == [Found.nobody("a")]


def test_a_holder_that_goes_ends_the_waiting_of_who_asked_it() -> None:
    one, two = Link(0), Link(1)
    relay = relay_of(one, two)
    relay.hear(0, Holds([LONG], []))
    relay.hear(1, Seek("a", [LONG]))
    relay.forget(0)
    assert two.sent == [Found.nobody("a")]
    relay.hear(1, Seek("b", [LONG]))
    assert two.sent[1:] == [Found.nobody("b")]


def test_after_a_clear_nobody_is_asked_for_what_was_told_before() -> None:
    one, two = Link(0), Link(1)
    relay = relay_of(one, two)
    relay.hear(0, Holds([LONG], []))
    relay.hear(1, Seek("a", [LONG]))
    relay.clear()
    relay.hear(1, Seek("b", [LONG]))
    assert two.sent == [Found.nobody("a"), Found.nobody("b")]


def test_a_worker_that_asks_without_end_loses_its_own_oldest_routes_and_nobody_elses() -> None:
    one, two, three = Link(0), Link(1), Link(2)
    relay = relay_of(one, two, three)
    relay.hear(0, Holds([LONG], []))
    relay.hear(2, Seek("other", [LONG]))
    for number in range(3 * kv_relay.ROUTES_MAX):
        relay.hear(1, Seek(f"{number}", [LONG]))
    assert relay.report()["routes"] == kv_relay.ROUTES_MAX + 1
    relay.hear(0, found("other"))
    assert len(three.sent) == 1
    relay.hear(1, Fetch("0", 0, 0, CHUNK_BYTES))
    assert two.sent[-1] == Found.nobody("0"), "who asks on learns at once that it is in vain"


@pytest.mark.parametrize(
    "said",
    [
        [Chunk("a", 0, 0, b"early")],
        [found("a"), found("a")],
        [Fetch("a", 0, 0, CHUNK_BYTES)],
        [found("a"), Chunk("a", 0, 0, b"unasked")],
        [found("a"), None, Chunk("a", 0, 0, b"KV"), Chunk("a", 0, 0, b"again")],
        [found("a"), None, Chunk("a", 0, 0, b"x" * (CHUNK_BYTES + 1))],
    ],
)
def test_a_holder_that_says_what_it_was_not_asked_is_not_listened_to_any_more(
    said: list[KVMove | None],
) -> None:
    one, two = Link(0), Link(1)
    relay = relay_of(one, two)
    relay.hear(0, Holds([LONG], []))
    relay.hear(1, Seek("a", [LONG]))
    for message in said:
        relay.hear(0, message) if message else relay.hear(1, Fetch("a", 0, 0, CHUNK_BYTES))
    allowed = [message for message in said[:-1] if message is not None]
    assert len(two.sent) == len(allowed) + 1 and two.sent[-1] == Found.nobody("a")
    assert relay.report()["routes"] == 0 and relay.counts["strays"] == 1
    relay.hear(0, found("a"))
    assert len(two.sent) == len(allowed) + 1


def test_of_one_route_one_piece_at_a_time_is_asked_for() -> None:
    one, two = Link(0), Link(1)
    relay = relay_of(one, two)
    relay.hear(0, Holds([LONG], []))
    relay.hear(1, Seek("a", [LONG]))
    relay.hear(0, found("a"))
    for _ in range(2):
        relay.hear(1, Fetch("a", 0, 0, CHUNK_BYTES))
    assert len(one.sent) == 2 and relay.counts["strays"] == 1


def test_a_name_that_is_none_is_not_remembered() -> None:
    relay = relay_of(Link(0), Link(1))
    relay.hear(0, Holds([b"x" * (kv_relay.NAME_BYTES_MAX + 1), LONG], []))
    assert relay.report() == {"held": 1, "routes": 0, "strays": 1}


NAMES = st.integers(0, 2 * HELD_NAMES_MAX).map(lambda number: number.to_bytes(16, "big"))


@given(st.lists(st.tuples(st.lists(NAMES, max_size=4), st.lists(NAMES, max_size=4)), max_size=20))
def test_what_is_remembered_of_a_worker_is_what_it_told_last(
    told: list[tuple[list[bytes], list[bytes]]],
) -> None:
    relay, expected = relay_of(Link(0), Link(1)), set[bytes]()
    for added, dropped in told:
        relay.hear(0, Holds(added, dropped))
        expected = (expected - {*dropped}) | {*added}
    assert relay.report()["held"] == len(expected)


def test_no_more_is_remembered_of_a_worker_than_its_share_however_much_it_tells() -> None:
    one, two = Link(0), Link(1)
    relay = relay_of(one, two)
    names = [number.to_bytes(16, "big") for number in range(HELD_NAMES_MAX + 10)]
    relay.hear(0, Holds(names, []))
    assert relay.report()["held"] == HELD_NAMES_MAX
    relay.hear(1, Seek("a", [names[9]]))
    relay.hear(1, Seek("b", [names[10]]))
    assert two.sent == [Found.nobody("a")] and one.sent == [Seek("b", [names[10]])]
