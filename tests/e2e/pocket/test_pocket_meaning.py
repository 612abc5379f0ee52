"""Checks that pocket recalls facts through a warm, branched, restored and restarted cache.

Tokens and logits are compared elsewhere. Here trained weights read facts, and each line of the
table runs twice: against the server, and against one whose cache is broken so that it must fail.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from tests.helpers.servers.pocket_talk import ASK, FACT, NOTES, Talk
from tests.helpers.servers.server import Server
from tests.helpers.worker_processes.broken_worker import FAULTS

CODES: Final = ("7731", "4086", "9254")
QUESTION_TOKENS_MAX: Final = 30  # ASK and the headers around it: 20
READER: Final = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}},
            "required": ["path"],
        },
    },
}
LAUNCH: Final = """
import sys
from hearth.proxy.main import end, main
end(main([sys.executable, "-m", "tests.helpers.worker_processes.broken_worker"]))
"""


# ---------------------------------------------------------------- what must hold


def a_fact_is_recalled_warm(server: Server) -> None:
    talk = Talk(server)
    talk.say(f"{NOTES}\n{FACT.format(CODES[0])}")
    for question in (ASK, "What is 3 + 4?", ASK):
        answer = talk.say(question)
        assert talk.source == "slot" and talk.prefilled < 100, "or nothing is shown"
        assert (CODES[0] in answer) == (question == ASK), answer


def branches_stay_apart(server: Server) -> None:
    trunk = Talk(server)
    trunk.say(NOTES)
    branches = [trunk.branch() for _ in CODES]
    for talk, code in zip(branches, CODES, strict=True):
        talk.say(FACT.format(code))
        assert talk.cached > 100, "the trunk is shared"
    for talk, code in zip(branches, CODES, strict=True):
        answer = talk.say(ASK)
        assert code in answer, answer


def a_fact_is_recalled_after_its_slot_was_given_up(server: Server) -> None:
    talk = Talk(server)
    talk.say(f"{NOTES}\n{FACT.format(CODES[1])}")
    Talk(server, date="1999-01-02").say("Hello!")  # there is one slot
    answer = talk.say(ASK)
    assert talk.source == "ram" and talk.prefilled < 100, "restored, not read again"
    assert CODES[1] in answer, answer


def a_fact_is_recalled_after_a_restart(server: Server) -> None:
    talk = Talk(server)
    talk.say(f"{NOTES}\n{FACT.format(CODES[2])}")
    server.stop()
    server.start(*server_command(server))
    server.wait_until_ready()
    for _ in range(2):
        answer = talk.say(ASK)
        assert CODES[2] in answer, answer
    assert talk.cached > 100, "warm again"


def another_tool_result_changes_the_answer(server: Server) -> None:
    talk = Talk(server)
    talk.tools = [READER]
    called = talk.send({"role": "user", "content": f"Read src/gate.txt. {ASK}"})
    (call,) = called.get("tool_calls", [{}])
    assert call.get("function", {}).get("name") == "read_file", called
    assert json.loads(call["function"]["arguments"]) == {"path": "src/gate.txt"}
    for code in CODES:
        told = talk.branch()
        result = f"{NOTES}\n{FACT.format(code)}"
        answer = told.send({"role": "tool", "tool_call_id": call["id"], "content": result})
        assert code in answer["content"], answer


def another_date_changes_the_answer(server: Server) -> None:
    for date in ("2026-11-22", "2026-11-23", "2031-02-08"):
        talk = Talk(server, date=date)
        talk.say(NOTES)
        answer = talk.say("What is today's date?")
        assert date in answer, answer


def thinking_that_a_client_strips_changes_nothing(server: Server) -> None:
    told = []
    code = "5520"  # no other conversation says it: a turn without thinking would be as likely
    for keeps_thinking in (True, False):
        server.forget()
        talk = Talk(server, thinks=True)
        talk.say(f"{NOTES}\n{FACT.format(code)}", keeps_thinking)
        assert talk.thought, "or there is nothing to strip"
        answers = [talk.say(question, keeps_thinking) for question in (ASK, "Hello!", ASK)]
        assert code in answers[0] and code in answers[2], answers
        assert talk.prefilled <= QUESTION_TOKENS_MAX, "its turns stand as sampled, thinking and all"
        told.append((answers, talk.cached, talk.prefilled))
    assert told[0] == told[1]


Scenario = Callable[[Server], None]
# Each with the fault of the cache that it must notice.
SCENARIOS: Final[dict[Scenario, str]] = {
    a_fact_is_recalled_warm: "forgetful",
    branches_stay_apart: "blind",
    a_fact_is_recalled_after_its_slot_was_given_up: "scrambled",
    a_fact_is_recalled_after_a_restart: "forgetful",
    another_tool_result_changes_the_answer: "blind",
    another_date_changes_the_answer: "blind",
    thinking_that_a_client_strips_changes_nothing: "estranged",
}


# ---------------------------------------------------------------- servers


def server_command(server: Server) -> tuple[str, ...]:
    return ("-c", LAUNCH) if "FAULT" in server.environment else ()


@contextmanager
def pocket_server(fault: str = "") -> Iterator[Server]:
    server = Server(LIVE_SLOTS_MAX="1", **({"FAULT": fault} if fault else {}))
    server.start(*server_command(server))
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.__exit__()


@pytest.fixture(scope="module")
def sound() -> Iterator[Server]:
    with pocket_server() as running:
        yield running


@pytest.fixture(scope="module", params=FAULTS)
def broken(request: pytest.FixtureRequest) -> Iterator[tuple[str, Server]]:
    with pocket_server(request.param) as running:
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
