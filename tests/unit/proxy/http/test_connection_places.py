"""The connection that counts least goes first; a process has as many as its open files allow."""

import pytest

from hearth.proxy.http.http1_protocol import ConnectionSlots, slots_within

pytestmark = pytest.mark.pure

PLACES = 6


def test_places_are_within_the_files_that_may_be_open() -> None:
    assert [slots_within(files) for files in (4096, 2_128, 256, 64)] == [1_000, 1_000, 64, 1]


class Held:
    """A connection that notes whether it was closed."""

    is_closed = False

    def abort(self) -> None:
        self.is_closed = True


def held_by(places: ConnectionSlots, count: int) -> list[Held]:
    held = [Held() for _ in range(count)]
    for each in held:
        places.enter(each)
    return held


def test_in_a_steady_flood_the_places_are_trimmed_once_in_a_while_not_at_each_newcomer() -> None:
    """Else each newcomer would be judged when the one before it is due, and not in its own time."""
    places = ConnectionSlots(PLACES)
    held_by(places, PLACES)
    for _ in range(2):
        assert [places.enter(Held()) for _ in range(5)] == [True] + [False] * 4
        places.trim()


def test_a_newcomer_that_came_amid_a_burst_shows_its_key_before_anyone_is_closed() -> None:
    places = ConnectionSlots(PLACES)
    held = held_by(places, 2 * PLACES)
    assert not any(each.is_closed for each in held)
    places.update(held[0], is_trusted=True, is_busy=True)
    places.trim()
    assert [each.is_closed for each in held] == [False] + [True] * PLACES + [False] * (PLACES - 1)


def test_a_flood_without_a_pause_opens_no_more_than_twice_the_places() -> None:
    places = ConnectionSlots(PLACES)
    held = held_by(places, 9 * PLACES)
    assert len(places) <= 2 * PLACES and not held[-1].is_closed
    assert sum(not each.is_closed for each in held) == len(places)


def test_a_flood_in_one_turn_closes_few_who_could_not_show_their_key_yet() -> None:
    places = ConnectionSlots(100)
    for each in held_by(places, 100):
        places.update(each, is_trusted=True, is_busy=False)
    newcomers = held_by(places, 101)
    assert sum(each.is_closed for each in newcomers) <= 10


def test_the_least_goes_first_and_one_newcomer_beside_all_that_are_busy_is_left() -> None:
    places = ConnectionSlots(4)
    held = held_by(places, 6)
    for each, standing in zip(held, (1, 0, 3, 2, 3, 1), strict=True):
        places.update(each, is_trusted=standing > 1, is_busy=standing % 2 == 1)
    places.trim()
    assert [each.is_closed for each in held] == [True, True, False, False, False, False]
    places.update(held[5], is_trusted=True, is_busy=False)
    (newcomer,) = held_by(places, 1)
    places.trim()
    assert newcomer.is_closed and not held[3].is_closed, "idle, but with a key"
    for each in held[2:]:
        places.update(each, is_trusted=True, is_busy=True)
    (newcomer,) = held_by(places, 1)
    places.trim()
    assert places.are_full and not newcomer.is_closed
    held_by(places, 1)
    places.trim()
    assert newcomer.is_closed and len(places) == 5
    places.leave(held[2])
    places.leave(held[2])
    places.update(held[2], is_trusted=True, is_busy=True)
    assert not places.are_full and len(places) == 4
