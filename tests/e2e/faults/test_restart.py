"""A session goes on where it was after its server ended, however that ended.

HEARTH_RESTARTS=20 runs the whole of what the project promises; CI runs a few.
"""

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import psutil
import pytest

from tests.helpers.servers.pocket_talk import ASK, FACT, NOTES, Talk
from tests.helpers.servers.server import Server

pytestmark = pytest.mark.e2e

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
SAID = [f"{NOTES}\n{FACT.format('7731')}"]
SAID += [text for question in ASKED for text in (question, AFTER)]


def killed(server: Server) -> None:
    """Kill everything at once, as a power cut would."""
    assert server.process is not None
    family = [psutil.Process(server.process.pid)]
    family += family[0].children(recursive=True)
    for each in family:
        each.kill()
    psutil.wait_procs(family, 10)
    server.process.wait(10)


def ended(server: Server) -> None:
    server.stop(signal.SIGTERM)


ENDINGS = {"SIGTERM": ended, "kill -9": killed}


@contextmanager
def served() -> Iterator[Server]:
    made = Server(MODEL_PATH="builtin:pocket", PREFILL_CHUNK=str(CHUNK))
    with made as server:
        yield server


@pytest.fixture(scope="module")
def cold() -> list[str]:
    """Return what a server that keeps nothing answers to each of SAID."""
    made = Server(MODEL_PATH="builtin:pocket", PREFILL_CHUNK=str(CHUNK), MAX_KV_SIZE_GB="0")
    answers = []
    with made as server:
        talk = Talk(server)
        for text in SAID:
            server.forget()
            answers.append(talk.say(text))
    return answers


def break_off(server: Server, talk: Talk, question: str) -> None:
    """Ask, and have the server end amid the answer: the client gets none."""
    body = {
        "model": "pocket",
        "messages": [*talk.messages, {"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 200,
        "enable_thinking": False,
        "stream": True,
    }
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


@pytest.mark.parametrize("how", ENDINGS)
def test_a_session_goes_on_where_it_was(how: str, cold: list[str]) -> None:
    expected = iter(cold)
    with served() as server:
        talk = Talk(server)
        assert talk.say(SAID[0]) == next(expected)
        lengths = [0, talk.cached + talk.prefilled]  # of each prompt
        for number, question in enumerate(ASKED):
            if number % 2:
                break_off(server, talk, question)
            elif how == "kill -9":
                time.sleep(0.5)  # no more than the disk needs
            ENDINGS[how](server)
            server.start()
            server.wait_until_ready()
            answer = talk.say(question)
            assert answer == next(expected)
            # Of what was read before: but for one extent, or but for one turn.
            kept = lengths[-1] - CHUNK if how == "SIGTERM" else lengths[-2]
            assert talk.cached >= kept - MARGIN, (number, talk.cached, lengths)
            assert talk.source == "ssd"
            lengths.append(talk.cached + talk.prefilled)
            assert talk.say(AFTER) == next(expected)
            lengths.append(talk.cached + talk.prefilled)
        assert "7731" in talk.say(ASK)
