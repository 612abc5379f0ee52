"""A session goes on where it was after its server ended, however that ended.

HEARTH_RESTARTS=20 runs the whole of what the project promises; CI runs a few.
"""

import itertools
import os
import signal
import threading

import httpx
import psutil
import pytest

from tests.helpers.servers.counted_talk import ASK, FACT, NOTES, Talk
from tests.helpers.servers.server import Server, until

RESTARTS = int(os.environ.get("HEARTH_RESTARTS", "2"))
CHUNK = 128  # tokens of one forward, and so of one extent at most
MARGIN = 16  # tokens that the template puts between two turns
QUESTIONS = (
    "What is 3 + 4?",
    "What is 12 + 30?",
    ASK,
    "What is 8 + 1?",
)
AFTER = "What is 2 + 5?"  # asked of what the question after a restart has left
ASKED = list(itertools.islice(itertools.cycle(QUESTIONS), RESTARTS))
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


def break_off(server: Server, talk: Talk, question: str) -> None:
    """Ask, and have the server end amid the answer: the client gets none."""
    body = talk.body(question) | {"max_tokens": 20_000, "stream": True}
    started = threading.Event()

    def read() -> None:
        try:
            with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body) as answer:
                for _ in answer.iter_raw():
                    started.set()
        except httpx.HTTPError:
            started.set()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert started.wait(30)


@pytest.mark.parametrize("how", [pytest.param("SIGTERM", marks=pytest.mark.night), "kill -9"])
def test_a_session_goes_on_where_it_was(how: str) -> None:
    with Server(PREFILL_CHUNK=str(CHUNK)) as server:
        talk = Talk(server)
        talk.say(SAID)
        lengths = [0, talk.cached + talk.prefilled]  # of each prompt
        for number, question in enumerate(ASKED):
            if number % 2:
                break_off(server, talk, question)
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
        talk.assert_as_cold()
