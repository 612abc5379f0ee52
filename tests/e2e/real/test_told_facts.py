"""SmolLM2's real weights behind the real server: what a newcomer asks, and facts that they told.

Each answer is a cold one too. Whatever else breaks the cache is found with random weights
(tests/e2e/cache/test_broken_caches.py, tests/property/warm).
"""

import signal
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from hearth.shared.models.model_path import MODELS_DIR_VARIABLE
from hearth.shared.paths import PROJECT_DIR
from hearth.shared.settings import DEFAULT_MODEL
from tests.helpers.clients.terminal import WAIT_S, python_module
from tests.helpers.models.real_weights import real_weights
from tests.helpers.servers.counted_talk import ASK, FACT, NOTES, Talk
from tests.helpers.servers.server import Server

pytestmark = pytest.mark.weights


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(MODEL_PATH=str(real_weights("smollm2")), PROXY_MODEL_ID="smollm2") as running:
        yield running


def test_branches_and_an_edited_message_are_answered_each_with_its_own_fact(
    server: Server,
) -> None:
    trunk = Talk(server)
    trunk.say(f"{NOTES}\n{FACT.format('4086')}")
    other = trunk.branch()
    assert "4086" in trunk.say(ASK) and trunk.prefilled < 30
    other.messages[1]["content"] = f"{NOTES}\n{FACT.format('9254')}"
    other.messages[2]["content"] = "I have read it."
    assert "9254" in other.say(ASK)
    assert other.cached > 100, "up to the edit it is the same"
    for talk in (trunk, other):
        talk.assert_as_cold()


def test_a_fact_is_recalled_after_kill_9_and_a_restart(server: Server) -> None:
    talk = Talk(server, date="2031-02-08")
    talk.say(f"{NOTES}\n{FACT.format('7731')}")
    server.wait_until_idle()
    assert server.process is not None
    workers = psutil.Process(server.process.pid).children(recursive=True)
    server.stop(signal.SIGKILL)
    psutil.wait_procs(workers, 20)
    server.start()
    server.wait_until_ready()
    assert "7731" in talk.say(ASK)
    assert talk.source == "ssd" and talk.prefilled < talk.cached
    talk.assert_as_cold()


def test_a_first_question_is_answered_where_no_server_runs() -> None:
    """`hearth run` as a newcomer types it: nothing is set."""
    directory = str(real_weights("smollm2").parent)
    unset = {"MODEL_PATH": DEFAULT_MODEL, MODELS_DIR_VARIABLE: directory}
    done = subprocess.run(
        python_module("hearth.commands.main", "run", "smollm2", "What is the capital of France?"),
        cwd=PROJECT_DIR,
        env=Server(**unset, DEFAULT_TEMPERATURE="0").environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert (done.returncode, "Paris" in done.stdout) == (0, True), done.stdout + done.stderr
