"""A prompt whose KV is elsewhere waits for it, as for the disk, for as long as that is worth."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.remote_kv.kv_exchange import NoRemoteKV
from hearth.worker.remote_kv.kv_receiver import Asker, Move
from hearth.worker.schedule.request_state import RecallDone, Request
from tests.helpers.worker.scripted_scheduler import finish_of, request, run, scheduler


@dataclass
class Elsewhere(NoRemoteKV):
    """Answers no move by itself; notes what it is asked."""

    moves: list[Move] = field(default_factory=list)
    given_up: list[Move] = field(default_factory=list)
    noted: list[PrefixQuery] = field(default_factory=list)
    cleared: int = 0

    def seek(
        self,
        query: PrefixQuery,
        asker: Asker,
        kept_tokens: int,
        tokens_per_s: float,
        then: Callable[[], None],
    ) -> Move | None:
        ends = {b"name": query.limit}
        self.moves.append(Move("a", query, asker, ends, (), kept_tokens, tokens_per_s, then))
        return self.moves[-1]

    def give_up(self, move: Move) -> None:
        move.is_over = True
        self.given_up.append(move)

    def note(self, query: PrefixQuery) -> None:
        self.noted.append(query)

    def forget(self) -> None:
        self.cleared += 1


@pytest.fixture
def elsewhere() -> Elsewhere:
    return Elsewhere()


def posted(elsewhere: Elsewhere) -> tuple[Any, list[RecallDone]]:
    inbox: list[RecallDone] = []
    made, _ = scheduler(parts={"remote_kv": elsewhere, "post": inbox.append}, a=[1], b=[2])
    return made, inbox


def prompt(name: str) -> Request:
    return request(name, prompt=500)


def test_a_prompt_waits_for_its_move_and_others_go_before_it(elsewhere: Elsewhere) -> None:
    made, inbox = posted(elsewhere)
    first, other = prompt("a"), request("b")
    other.uses_cache = False
    made.submit(first)
    assert made.is_blocked
    made.submit(other)
    for _ in range(20):
        list(made.step())
    assert first.slot is None and len(elsewhere.moves) == 1, "nothing is sought for the uncached"
    elsewhere.moves[0].then()
    made.take_recalled(inbox.pop())
    assert finish_of(run(made), "a").usage.prefilled_tokens == 500


def test_a_late_move_is_given_up_and_the_prompt_is_read(elsewhere: Elsewhere) -> None:
    made, inbox = posted(elsewhere)
    made.submit(prompt("a"))
    elsewhere.moves[0].heard_at -= 10
    assert finish_of(run(made), "a").usage.prefilled_tokens == 500
    assert elsewhere.given_up == elsewhere.moves and len(elsewhere.moves) == 1
    elsewhere.moves[0].then()
    made.take_recalled(inbox.pop())
    assert made.is_idle, "what comes after that changes nothing"


def test_a_prompt_that_was_read_is_noted_and_one_that_was_left_is_not(
    elsewhere: Elsewhere,
) -> None:
    made, inbox = posted(elsewhere)
    left, read = prompt("a"), prompt("b")
    made.submit(left)
    made.submit(read)
    left.lease.is_cancelled = True
    elsewhere.moves[1].then()
    made.take_recalled(inbox.pop())
    run(made)
    assert elsewhere.noted == [read.query]


def test_a_clear_tells_so_and_ends_what_waits(elsewhere: Elsewhere) -> None:
    made, inbox = posted(elsewhere)
    made.submit(prompt("a"))
    elsewhere.moves[0].then()
    made.forget()
    assert elsewhere.cleared == 1
    made.take_recalled(inbox.pop())
    assert finish_of(run(made), "a").reason == "stop"


def test_a_move_that_is_over_is_late_at_once_and_one_that_goes_on_when_a_prefill_would_end() -> (
    None
):
    query = prompt("a").query
    move = Move("a", query, prompt("a").lease, {b"n": 499}, (), 99, 100.0, lambda: None)
    assert move.prefill_s == 4.0 and not move.is_late
    move.asked_at -= 4.1
    assert move.is_late
    move.asked_at += 4.1
    move.is_over = True
    assert move.is_late
