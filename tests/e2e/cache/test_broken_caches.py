"""Checks warm, branched and restored answers against cold ones, and the checks themselves.

Each line of the table runs twice: against the server, and against one whose cache is broken so
that it must fail.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from tests.helpers.by_day import by_day
from tests.helpers.servers.counted_talk import ASK, FACT, NOTES, Talk
from tests.helpers.servers.server import Server
from tests.helpers.worker_processes.broken_worker import FAULTS

CODES: Final = ("7731", "4086", "9254")
QUESTION_TOKENS_MAX: Final = 30  # ASK and the headers around it
LAUNCH: Final = """
import sys
from hearth.proxy.main import end, main
end(main([sys.executable, "-m", "tests.helpers.worker_processes.broken_worker"]))
"""


# ---------------------------------------------------------------- what must hold


def a_warm_answer_is_a_cold_one(server: Server) -> None:
    talk = Talk(server)
    talk.say(f"{NOTES}\n{FACT.format(CODES[0])}")
    for question in (ASK, "What is 3 + 4?", ASK):
        talk.say(question)
        assert talk.source == "slot" and talk.prefilled < 100, "or nothing is shown"
    talk.assert_as_cold()


def branches_stay_apart(server: Server) -> None:
    trunk = Talk(server)
    trunk.say(NOTES)
    branches = [trunk.branch() for _ in CODES]
    for talk, code in zip(branches, CODES, strict=True):
        talk.say(FACT.format(code))
        assert talk.cached > 100, "the trunk is shared"
    for talk in branches:
        talk.say(ASK)
        assert talk.prefilled <= QUESTION_TOKENS_MAX, "and the branch is found"
    for talk in branches:
        talk.assert_as_cold()


def an_answer_is_a_cold_one_after_its_slot_was_given_up(server: Server) -> None:
    talk = Talk(server)
    talk.say(f"{NOTES}\n{FACT.format(CODES[1])}")
    Talk(server, date="1999-01-02").say("Hello!")  # there is one slot
    talk.say(ASK)
    assert talk.source == "ram" and talk.prefilled < 100, "restored, not read again"
    talk.assert_as_cold()


def an_answer_is_a_cold_one_after_a_restart(server: Server) -> None:
    talk = Talk(server)
    talk.say(f"{NOTES}\n{FACT.format(CODES[2])}")
    server.stop()
    server.start(*server_command(server))
    server.wait_until_ready()
    for source in ("ssd", "slot"):
        talk.say(ASK)
        assert talk.prefilled <= QUESTION_TOKENS_MAX and talk.source == source
    talk.assert_as_cold()


def another_date_is_another_prompt(server: Server) -> None:
    talks = [Talk(server, date=date) for date in ("2026-11-22", "2026-11-23", "2031-02-08")]
    for talk in talks:
        talk.say(NOTES)
    for talk in talks:
        talk.assert_as_cold()


def thinking_that_a_client_strips_stands_as_sampled(server: Server) -> None:
    told = []
    for keeps_thinking in (True, False):
        server.forget()
        talk = Talk(server, thinks=True)
        talk.say(NOTES, keeps_thinking)
        thoughts = [talk.thought]
        assert talk.thought, "or there is nothing to strip"
        for question in (ASK, "Hello!", ASK):
            talk.say(question, keeps_thinking)
            thoughts.append(talk.thought)
            assert talk.prefilled <= QUESTION_TOKENS_MAX, "turns are known, thinking and all"
        told.append((thoughts, talk.cached, talk.prefilled))
    assert told[0] == told[1]


Scenario = Callable[[Server], None]
# Each with the fault of the cache that it must notice.
SCENARIOS: Final[dict[Scenario, str]] = {
    a_warm_answer_is_a_cold_one: "forgetful",
    branches_stay_apart: "blind",
    an_answer_is_a_cold_one_after_its_slot_was_given_up: "scrambled",
    an_answer_is_a_cold_one_after_a_restart: "scrambled",
    another_date_is_another_prompt: "blind",
    thinking_that_a_client_strips_stands_as_sampled: "estranged",
}


# ---------------------------------------------------------------- servers


def server_command(server: Server) -> tuple[str, ...]:
    return ("-c", LAUNCH) if "FAULT" in server.environment else ()


@contextmanager
def served(fault: str = "") -> Iterator[Server]:
    server = Server(LIVE_SLOTS_MAX="1", **({"FAULT": fault} if fault else {}))
    server.start(*server_command(server))
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.__exit__()


@pytest.fixture(scope="module")
def sound() -> Iterator[Server]:
    with served() as running:
        yield running


@pytest.fixture(scope="module", params=by_day(FAULTS, ("forgetful",)))
def broken(request: pytest.FixtureRequest) -> Iterator[tuple[str, Server]]:
    with served(request.param) as running:
        yield request.param, running


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_it_holds(sound: Server, scenario: Scenario) -> None:
    scenario(sound)


def test_it_would_be_noticed(broken: tuple[str, Server]) -> None:
    """The proof of the proof: with this fault, what stands beside it in the table fails."""
    fault, server = broken
    for scenario in [each for each, noticed in SCENARIOS.items() if noticed == fault]:
        with pytest.raises(AssertionError):
            scenario(server)
