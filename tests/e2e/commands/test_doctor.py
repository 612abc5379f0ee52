"""The command `hearth doctor` beside a running server: the server tells, nothing is loaded here."""

import json
import subprocess
import sys
import urllib.request

from tests.helpers.servers.server import Server


def test_a_running_server_is_asked_and_tells_of_its_machine_and_model(server: Server) -> None:
    with server.openai() as client:
        said = [{"role": "user", "content": "swordfish"}]
        client.chat.completions.create(model="", messages=said, max_tokens=1, user="swordfish")
    with urllib.request.urlopen(f"{server.url}/v1/doctor", timeout=30) as answer:
        (told,) = json.load(answer)["workers"]
    assert (told["state"], told["findings"]) == ("idle", None), "tests serve with DOCTOR=off"
    assert told["model"]["model"] == "a local checkpoint"
    assert told["settings"]["DOCTOR"] == "off"
    command = [sys.executable, "-m", "hearth.commands.main", "doctor"]
    ran = subprocess.run(
        command, env=server.environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 2, "there is no verdict yet"
    assert "## hearth doctor" in ran.stdout and "Nothing was found out yet." in ran.stdout
    assert str(server.run_dir) not in ran.stdout and ran.stderr == ""
    assert "swordfish" not in ran.stdout + json.dumps(told)
