"""Every known server can be started, told what it may keep, and told of without a path."""

import os
import sys
from pathlib import Path

import pytest

from hearth.commands.bench.results import HEARTH
from hearth.commands.bench.server import KEY, Memory, Server
from hearth.commands.bench.servers import server_environment
from hearth.commands.bench.servers.known_servers import SERVERS, chosen_servers, server_of_url
from hearth.commands.bench.servers.server_environment import (
    command_of,
    environment_of,
    placeholders,
    program_of,
    version_of,
    without_paths,
)
from hearth.shared.errors import StartError
from hearth.shared.settings import Settings
from hearth.shared.settings_from_env import load_settings

STARTED = [name for name, each in SERVERS.items() if not each.url]
PEERS = [name for name in STARTED if name != HEARTH]
USERS = {
    "PATH": "/bin",
    "HOME": "/Users/ann",
    "CACHE_EXACT": "true",
    "APC_ENABLED": "0",
    "RAPID_MLX_API_KEY": "secret",
    "OPENAI_API_KEY": "secret",
    "HF_TOKEN": "secret",
    "LANG": "C.UTF-8",
    "PYTHONPATH": "/mine",
}


def given(tmp_path: Path) -> dict[str, str]:
    return placeholders(tmp_path / "qwen", 4567, tmp_path / "home", 50)


def test_hearth_comes_first_and_each_name_is_its_own() -> None:
    assert STARTED == [HEARTH, "mlx_lm", "mlx_vlm", "vllm-mlx", "rapid-mlx"]
    assert all(name == server.name for name, server in SERVERS.items())
    assert all(SERVERS[name].install.startswith("uv tool install ") for name in PEERS)


@pytest.mark.parametrize("name", STARTED)
@pytest.mark.parametrize("memory", Memory)
def test_each_server_is_given_the_model_the_port_and_loopback(
    name: str, memory: Memory, tmp_path: Path
) -> None:
    """mlx_vlm listens on all addresses by default, without a key."""
    server, words = SERVERS[name], given(tmp_path)
    told = command_of(server, memory)
    assert "{model}" in told and "{port}" in told and "127.0.0.1" in told
    told = told.format(**words) + "".join(environment_of(server, memory, words, {}).values())
    assert "4567" in told and str(tmp_path / "qwen") in told and "{" not in told


@pytest.mark.parametrize("name", STARTED)
def test_each_server_can_be_told_what_it_may_keep(name: str) -> None:
    server = SERVERS[name]
    told = {(command_of(server, each), str(server.memory_extra.get(each))) for each in Memory}
    assert len(told) == 3
    assert all(SERVERS[name].can_be_told(memory) for memory in Memory)
    assert [Server("x").can_be_told(memory) for memory in Memory] == [True, False, False]


@pytest.mark.parametrize("name", STARTED)
def test_nothing_of_the_users_settings_and_keys_comes_to_a_server(
    name: str, tmp_path: Path
) -> None:
    made = environment_of(SERVERS[name], Memory.DEFAULT, given(tmp_path), USERS)
    assert "secret" not in made.values() and not set(made) & {"HF_TOKEN", "CACHE_EXACT"}
    assert {made["HF_HUB_OFFLINE"], made["DO_NOT_TRACK"]} == {"1"}
    assert made["RAPID_MLX_DISABLE_VERSION_CHECK"] == "1", "else it asks GitHub at each start"
    assert made["HOME"] == str(tmp_path / "home") and made["PATH"] == "/bin"
    meter, *others = made["PYTHONPATH"].split(os.pathsep)
    assert (Path(meter) / "sitecustomize.py").exists()
    assert others == (["/mine"] if name == HEARTH else [])
    assert made.get("APC_ENABLED") == ("1" if name == "mlx_vlm" else None)


def test_hearth_is_measured_with_its_defaults_whatever_its_env_file_says(tmp_path: Path) -> None:
    env_file = tmp_path / ".env"
    env_file.write_text("CACHE_EXACT=true\nWORKERS=4\nMODEL_PATH=/mine\nOTHER=1\n")
    made = environment_of(SERVERS[HEARTH], Memory.DEFAULT, given(tmp_path), USERS, env_file)
    settings = load_settings(made, env_file)
    plain = load_settings({"MODEL_PATH": str(tmp_path / "qwen")}, None)
    assert isinstance(settings, Settings)
    changed = {
        name for name in Settings.__slots__ if getattr(settings, name) != getattr(plain, name)
    }
    assert (settings.cache_exact, settings.workers) == ("auto", 1)
    expected = {"proxy_port", "api_keys", "log_prompts", "run_dir", "log_root", "kv_cache_dir"}
    assert {name for name in changed if "key" not in name} <= expected, changed


def test_a_program_is_found_beside_hearths_python_and_its_versions_in_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert program_of(SERVERS[HEARTH]) == sys.executable
    assert "hearth-llm " in version_of(SERVERS[HEARTH]) and "mlx-lm " in version_of(SERVERS[HEARTH])
    tool = tmp_path / "tools" / "peer"
    facts = tool / "lib" / "python3.12" / "site-packages" / "peer-1.2.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Name: peer\nVersion: 1.2\n")
    (tool / "bin").mkdir()
    (tool / "bin" / "peer").touch(mode=0o700)
    (tmp_path / "peer").symlink_to(tool / "bin" / "peer")
    monkeypatch.setenv("PATH", str(tmp_path))
    peer = Server("peer", ("peer",), packages=("peer", "mlx"))
    assert program_of(peer) == str(tmp_path / "peer") and version_of(peer) == "peer 1.2"
    assert version_of(Server("mine", url="http://127.0.0.1:1")) == ""


def test_the_command_of_a_server_is_as_a_reader_types_it() -> None:
    assert command_of(SERVERS["vllm-mlx"]).startswith("vllm-mlx serve {model} --port {port}")
    assert command_of(SERVERS[HEARTH]).endswith(" -m hearth.proxy.main")
    assert str(Path(sys.executable).parent) not in command_of(SERVERS[HEARTH])
    assert command_of(SERVERS["ollama"]) == "(as its owner has started it)"
    assert f"PROXY_API_KEY={KEY}" in command_of(SERVERS[HEARTH]), "CACHE_DEBUG needs some key"


def test_an_error_names_no_place_of_the_user(tmp_path: Path) -> None:
    said = f"{tmp_path}/m/config.json has {tmp_path}/h. {Path.home()}/x"
    told = without_paths(said, tmp_path / "m", tmp_path / "h")
    assert told == "{model}/config.json has {dir}. ~/x"


# ---------------------------------------------------------------- which are measured


@pytest.fixture
def only_mlx_lm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a user who has mlx_lm beside Hearth."""
    monkeypatch.setattr(
        server_environment.shutil,
        "which",
        lambda name, path: name if name in (sys.executable, "mlx_lm.server") else None,
    )


@pytest.mark.usefixtures("only_mlx_lm")
def test_without_names_what_a_user_has_is_measured_hearth_first() -> None:
    found = chosen_servers([], ["mine=http://127.0.0.1:8000/v1"])
    assert [each.name for each in found] == [HEARTH, "mlx_lm", "mine"]
    assert found[-1].url == "http://127.0.0.1:8000"
    named = chosen_servers(["ollama", "mlx_lm", HEARTH], [])
    assert [each.name for each in named] == [HEARTH, "ollama", "mlx_lm"]


@pytest.mark.usefixtures("only_mlx_lm")
@pytest.mark.parametrize(
    ("names", "urls", "told"),
    [
        (["omlx"], [], "No server is called omlx; there are hearth, mlx_lm"),
        (["rapid-mlx"], [], "rapid-mlx is not on this machine. Get it by: uv tool install rapid"),
        ([], ["hearth=http://127.0.0.1:1"], "Two servers are called hearth"),
    ],
)
def test_a_server_that_cannot_be_had_is_refused(
    names: list[str], urls: list[str], told: str
) -> None:
    with pytest.raises(StartError, match=told):
        chosen_servers(names, urls)


@pytest.mark.parametrize("text", ["mine", "=http://a", "mine=a:1", "mine=ftp://a", "mine=http://"])
def test_what_is_no_url_is_refused(text: str) -> None:
    with pytest.raises(StartError, match="NAME=URL"):
        server_of_url(text)


def test_a_url_may_name_a_model_and_no_key() -> None:
    assert server_of_url("mine=http://a:1#m").model == "m"
    with pytest.raises(StartError, match="a name or a key in it"):
        server_of_url("mine=http://me:secret@a:1")
