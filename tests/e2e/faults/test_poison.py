"""Prompts that end the worker that reads them: each ends two at most, and others are served."""

import threading
import urllib.request
from collections.abc import Iterator
from typing import Any, Final

import openai
import pytest

from tests.helpers.servers.server import WAIT_S_MAX, Server, until

LAUNCH: Final = """
import sys
from hearth.proxy.main import end, main
end(main([sys.executable, "-m", "scripts.harness.faulty_workers.poisoned_worker"]))
"""
SENT: Final = 10  # times that a client sends its poison, whatever it is told
STORY: Final = "Tell me a long story of a fox. " * 20


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server of this module's own: its workers break at marks."""
    made = Server()
    made.start("-c", LAUNCH)
    with made.ready() as running:
        yield running


def ask(server: Server, text: str, tokens: int = 12) -> tuple[int, str]:
    """Send a prompt once; return the status and the answer, or what is told instead."""
    with server.openai() as client:
        try:
            answer = client.chat.completions.create(
                model="local",
                messages=[{"role": "user", "content": text}],
                max_tokens=tokens,
                temperature=0,
            )
        except openai.APIStatusError as error:
            return error.status_code, str(error)
    message = answer.choices[0].message
    return 200, (message.content or "") + str(getattr(message, "reasoning_content", ""))


def until_answered(server: Server, text: str) -> str:
    """Send a prompt until it is served, as a client does that retries."""

    def answered() -> str:
        status, told = ask(server, text, 60)
        assert status in (200, 503), told
        return told if status == 200 else ""

    return str(until(answered))


def send_poison(server: Server, mark: str, times: int = SENT) -> list[tuple[int, str]]:
    """Send a prompt so often, each time to a worker that is ready; return what is told."""
    told = []
    for _ in range(times):
        server.wait_until_ready()
        told.append(ask(server, "Read this. " * 60 + mark + " And go on. " * 60))
    server.wait_until_ready()
    return told


def suspects(server: Server) -> dict[str, Any]:
    return dict(server.get("/v1/cache")["workers"][0]["suspects"])


def test_a_poison_prompt_sent_10_times_ends_two_workers_and_an_innocent_is_served(
    server: Server,
) -> None:
    cold = until_answered(server, STORY)
    server.forget()
    answers: list[str] = []
    is_over = threading.Event()

    def innocent() -> None:
        while not is_over.is_set() or len(answers) < 3:
            answers.append(until_answered(server, STORY))

    beside = threading.Thread(target=innocent)
    beside.start()
    try:
        told = send_poison(server, "poison-sigsegv-prefill!")
    finally:
        is_over.set()
        beside.join()
    assert server.worker()["restarts"] == 2
    assert [status for status, _ in told][-8:] == [400] * 8
    assert "It is refused until" in told[-1][1] and "SIGSEGV" in told[-1][1]
    assert set(answers) == {cold}
    assert (suspects(server)["refused"], suspects(server)["suspects"]) == (1, 0)
    log = server.log.read_text()
    assert "refused=1: SIGSEGV" in log and "Read this." not in log


@pytest.mark.night
def test_an_exception_amid_an_answer_ends_two_workers(server: Server) -> None:
    before = server.worker()["restarts"]
    told = send_poison(server, "poison-raise-decode!", 4)
    assert server.worker()["restarts"] - before == 2
    assert [status for status, _ in told] == [503, 400, 400, 400]
    assert "while it was answered" in told[-1][1] and "exit code 70" in told[-1][1]


def test_a_refusal_outlives_the_server_and_ends_by_delete(server: Server) -> None:
    mark = "poison-sigabrt-prefill-2!"
    assert [status for status, _ in send_poison(server, mark, 2)] == [503, 400]
    server.stop()
    server.start("-c", LAUNCH)
    assert send_poison(server, mark, 1)[0][0] == 400
    assert server.worker()["restarts"] == 0
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=WAIT_S_MAX) as answer:
        assert 'hearth_poison_refusals_total{worker="0"} 1.0' in answer.read().decode()
    server.forget()
    assert suspects(server)["rows"] == []
    assert send_poison(server, mark, 1)[0][0] == 200
