"""Commands of ranks over 127.0.0.x: a rank that joined is checked, and joins again by itself."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hearth.commands.make_keys import make_keys
from hearth.shared.errors import EXIT_CANNOT_START
from hearth.shared.paths import PROJECT_DIR
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.servers.server import free_port

COMMAND = (sys.executable, "-m", "hearth.commands.main", "ranks")
CHECK_S_MAX = 60


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two machines in one: 127.0.0.1 has rank 0, 127.0.0.2 the other one."""
    directory = tmp_path_factory.mktemp("ranks")
    make_keys(directory / "keys")
    hosts = [{"ssh": "a", "ips": ["127.0.0.1"]}, {"ssh": "b", "ips": ["127.0.0.2"]}]
    (directory / "hosts.json").write_text(json.dumps({"hosts": hosts}))
    told = {"RANKS": "2", "RANK_HOSTS": str(directory / "hosts.json")}
    told |= {"PROXY_PORT": str(free_port()), "CURVE_KEYS_DIR": str(directory / "keys")}
    told |= {"RUN_DIR": str(directory / "run"), "KV_CACHE_DIR": str(directory / "kv")}
    return {**os.environ, **told, "MODEL_PATH": str(fixture_dir("qwen3"))}


@pytest.fixture(scope="module")
def joined(environ: dict[str, str]) -> Iterator["subprocess.Popen[str]"]:
    """`hearth ranks join` on 127.0.0.2, whose own settings name no ranks."""
    own = {key: value for key, value in environ.items() if key not in ("RANKS", "RANK_HOSTS")}
    command = [*COMMAND, "join", "127.0.0.1", "--address", "127.0.0.2"]
    process = subprocess.Popen(
        command, env=own, cwd=PROJECT_DIR, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate()


def check(environ: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, "check"],
        env=environ,
        cwd=PROJECT_DIR,
        capture_output=True,
        text=True,
        timeout=CHECK_S_MAX,
    )


@pytest.mark.night
def test_ranks_are_checked_twice_and_a_joined_one_ends_by_a_signal(
    environ: dict[str, str], joined: "subprocess.Popen[str]"
) -> None:
    for _ in range(2):
        done = check(environ)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "2: 127.0.0.1, 127.0.0.2; versions are the same" in done.stdout
        assert "bits of sums         the same on all ranks (18 sums)" in done.stdout
        assert f"{fixture_dir('qwen3')}: the same on all ranks (2 files)" in done.stdout
    joined.send_signal(signal.SIGTERM)
    out, _ = joined.communicate(timeout=60)
    assert joined.returncode == 0
    assert out == f"A rank of tcp://127.0.0.1:{int(environ['PROXY_PORT']) + 100}; Ctrl-C ends it.\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["join", "8.8.8.8"], "Rank 0's address: 8.8.8.8 is not private"),
        (["join", "0.0.0.0:4100"], "0.0.0.0 is not private"),
        (["join", "127.0.0.1:0"], "no port that could be one"),
        (["join", "127.0.0.1", "--address", "1.1.1.1"], "--address: 1.1.1.1 is not private"),
        (["check"], "RANKS is 1: there is nothing to check"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(
    environ: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    says: str,
) -> None:
    from hearth.commands.ranks.command import main

    for name in ("RUN_DIR", "KV_CACHE_DIR", "CURVE_KEYS_DIR"):
        monkeypatch.setenv(name, environ[name])
    assert main(arguments) == EXIT_CANNOT_START
    err = capsys.readouterr().err
    assert err.startswith("hearth ranks ") and says in err and err.count("\n") == 1
