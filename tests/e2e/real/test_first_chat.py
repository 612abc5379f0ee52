"""`hearth run` with the default model's real weights, as a newcomer types it: nothing is set."""

import subprocess

import pytest

from hearth.shared.models.builtin_models import MODELS_DIR_VARIABLE
from hearth.shared.paths import PROJECT_DIR
from hearth.shared.settings import DEFAULT_MODEL
from tests.helpers.clients.terminal import WAIT_S, python_module
from tests.helpers.models.real_weights import real_weights
from tests.helpers.servers.server import Server


@pytest.mark.weights
def test_a_first_question_is_answered_where_no_server_runs() -> None:
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
