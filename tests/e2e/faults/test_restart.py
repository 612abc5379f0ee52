"""A session goes on where it was after its server ended, however that ended."""

import itertools
import signal

import psutil
import pytest

from tests.helpers.servers.counted_talk import ASK, FACT, NOTES, Talk
from tests.helpers.servers.leaving_clients import Leaving
from tests.helpers.servers.server import Server, until

CHUNK = 128  # tokens of one forward, and so of one extent at most
MARGIN = 16  # tokens that the template puts between two turns
QUESTIONS = (
    "What is 3 + 4?",
    "What is 12 + 30?",
    ASK,
    "What is 8 + 1?",
)
AFTER = "What is 2 + 5?"  # asked of what the question after a restart has left
SAID = f"{NOTES}\n{FACT.format('7731')}"


def killed(server: Server) -> None:
    """Kill everything at once, as a power cut would."""
    assert server.process is not None
    family = [psutil.Process(server.process.pid)]
    family += family[0].children(recursive=True)
    for each in family:
        each.kill()
    psutil.wait_procs(family, 10)
    server.process.wait(10)


def queued_bytes(server: Server) -> int:
    """Return how much waits to be written."""
    return sum(row["disk"]["queue_bytes"] for row in server.get("/v1/cache")["workers"])


@pytest.mark.parametrize(
    ("how", "restarts"),
    [
        ("kill -9", 2),
        pytest.param("SIGTERM", 2, marks=pytest.mark.night),
        *(pytest.param(how, 20, marks=pytest.mark.night) for how in ("kill -9", "SIGTERM")),
    ],
)
def test_a_session_goes_on_where_it_was(how: str, restarts: int) -> None:
    with Server(PREFILL_CHUNK=str(CHUNK)) as server:
        talk = Talk(server)
        talk.say(SAID)
        left: list[Leaving] = []  # clients whose answer broke off
        lengths = [0, talk.cached + talk.prefilled]  # of each prompt
        for number, question in zip(range(restarts), itertools.cycle(QUESTIONS)):
            if number % 2:
                amid = talk.body(question) | {"max_tokens": 20_000, "stream": True}
                left.append(Leaving(server, "/v1/chat/completions", amid))
                left[-1].read_some()
            elif how == "kill -9":
                until(lambda: not queued_bytes(server))
            if how == "SIGTERM":
                server.stop(signal.SIGTERM)
            else:
                killed(server)
            server.start()
            server.wait_until_ready()
            talk.say(question)
            # Of what was read before: but for one extent, or but for one turn.
            kept = lengths[-1] - CHUNK if how == "SIGTERM" else lengths[-2]
            assert talk.cached >= kept - MARGIN, (number, talk.cached, lengths)
            assert talk.source == "ssd"
            lengths.append(talk.cached + talk.prefilled)
            talk.say(AFTER)
            lengths.append(talk.cached + talk.prefilled)
        for client in left:
            client.leave()
        talk.assert_as_cold()
