"""Checks that the fair queue starves nobody: neither a lone request nor one beside a flood."""

from collections import Counter
from dataclasses import dataclass

from hypothesis import given, strategies as st

from hearth.worker.schedule.admission_and_disk_recall import in_queue_order, record_slot_given

ASKERS = st.sampled_from("abcd")


@dataclass(eq=False)
class Asked:
    queue_name: str
    queue_order: int = 0


class Line:
    """A queue before slots that are given one at a time."""

    def __init__(self) -> None:
        self.waiting: list[Asked] = []
        self.turn = 0

    def come(self, asker: str) -> Asked:
        asked = Asked(asker, self.turn)
        self.waiting.append(asked)
        return asked

    def give(self) -> Asked:
        return self.give_to(next(in_queue_order(self.waiting, self.turn)))

    def give_to(self, chosen: Asked) -> Asked:
        self.waiting.remove(chosen)
        self.turn = record_slot_given(chosen, self.waiting, self.turn)
        return chosen


# Some come (a letter), or one of those that wait has the next slot (None).
EVENTS = st.lists(st.none() | ASKERS, max_size=40)


def line_after(events: list[str | None]) -> Line:
    line = Line()
    for asker in events:
        if asker is not None:
            line.come(asker)
        elif line.waiting:
            line.give()
    return line


@given(EVENTS, EVENTS)
def test_a_lone_request_waits_for_one_request_of_each_other_at_most(
    before: list[str | None], after: list[str | None]
) -> None:
    line = line_after(before)
    lone = line.come("lone")
    served: Counter[str] = Counter()
    for asker in [*after, *[None] * len(line.waiting)]:
        if asker is not None:
            line.come(asker)
        elif (chosen := line.give()) is lone:
            assert max(served.values(), default=0) <= 1
            return
        else:
            served[chosen.queue_name] += 1
    raise AssertionError("the lone request never had its turn")


@given(EVENTS)
def test_the_order_that_is_told_is_the_order_that_follows(events: list[str | None]) -> None:
    line = line_after(events)
    told = list(in_queue_order(line.waiting, line.turn))
    assert [line.give() for _ in range(len(told))] == told
    assert not line.waiting


@given(EVENTS)
def test_each_ones_own_requests_are_served_in_the_order_of_their_coming(
    events: list[str | None],
) -> None:
    line = line_after(events)
    came = list(line.waiting)
    served = list(in_queue_order(line.waiting, line.turn))
    for asker in "abcd":
        mine = [each for each in came if each.queue_name == asker]
        assert [each for each in served if each.queue_name == asker] == mine


@given(EVENTS, st.data())
def test_who_is_passed_over_because_it_cannot_begin_loses_nothing(
    events: list[str | None], data: st.DataObject
) -> None:
    """A slot that its turn could not use goes to another, and the next one is its own."""
    line = line_after(events)
    blocked = line.come("blocked")
    for _ in range(data.draw(st.integers(0, len(line.waiting) - 1))):
        others = (each for each in in_queue_order(line.waiting, line.turn) if each is not blocked)
        line.give_to(next(others))
    ahead = {each.queue_name for each in line.waiting}
    place = list(in_queue_order(line.waiting, line.turn)).index(blocked)
    assert place < len(ahead)


def test_newcomers_without_end_starve_nobody() -> None:
    line = Line()
    flood = [line.come("flood") for _ in range(10)]
    served = 0
    for number in range(100):
        line.come(f"new{number}")
        line.come(f"newer{number}")
        served += line.give() in flood
    assert served >= 5, "it has its share, though two come for each one that is served"
