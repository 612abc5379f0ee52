"""Every known server can be started, told what it may keep, and told of without a path."""

import os
import re
from pathlib import Path

import pytest

from hearth.commands.bench.results import HEARTH
from hearth.commands.bench.server import KEY, Memory, Server
from hearth.commands.bench.servers import install_server
from hearth.commands.bench.servers.found_servers import BY_URL
from hearth.commands.bench.servers.install_server import can_install
from hearth.commands.bench.servers.known_servers import SERVERS
from hearth.commands.bench.servers.server_environment import (
    arguments_of,
    defaults_against,
    environment_of,
    placeholders,
    without_paths,
)
from hearth.commands.bench.servers.server_facts import command_of, facts_of
from hearth.commands.bench.servers.started_server import ServerStartError
from hearth.shared.settings import Settings
from hearth.shared.settings_from_env import load_settings

TRIED = ("hearth", "mlx_lm", "mlx_vlm", "vllm-mlx", "rapid-mlx", "mlx-openai-server")
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
    assert next(iter(SERVERS)) == HEARTH and set(TRIED) <= set(SERVERS)
    assert all(name == server.name for name, server in SERVERS.items())


@pytest.mark.parametrize("name", SERVERS)
def test_each_server_is_given_the_model_and_the_port(name: str, tmp_path: Path) -> None:
    server, words = SERVERS[name], given(tmp_path)
    for memory in Memory:
        told = [each.format(**words) for each in arguments_of(server, memory)]
        environment = environment_of(server, memory, words, {})
        text = " ".join((*told, *environment.values()))
        assert "4567" in text and "qwen" in text + server.model.format(**words)
        assert "{" not in text.replace("{}", "")


@pytest.mark.parametrize("name", SERVERS)
def test_each_server_is_told_to_listen_on_loopback_alone(name: str) -> None:
    """mlx_vlm and mlx-openai-server listen on all addresses by default, without a key."""
    server = SERVERS[name]
    hosts = [
        server.arguments[at + 1] for at, word in enumerate(server.arguments) if word == "--host"
    ]
    hosts += [server.environment["PROXY_HOST"]] if name == HEARTH else []
    assert hosts == ["127.0.0.1"]


@pytest.mark.parametrize("name", TRIED)
def test_each_server_that_was_tried_can_be_told_what_it_may_keep(name: str) -> None:
    server = SERVERS[name]
    told = {(command_of(server, each), str(server.memory_extra.get(each))) for each in Memory}
    assert len(told) == 3 and all(server.can_be_told(memory) for memory in Memory)
    assert all("{model}" in command and "{port}" in command for command, _ in told)


def test_a_server_without_such_an_option_says_so() -> None:
    for server in SERVERS.values():
        told = " ".join(server.notes)
        assert server.can_be_told(Memory.NONE) or "switches its cache off" in told, server.name
        assert server.can_be_told(Memory.ONE_SESSION) or "bounds what it keeps" in told, server.name
    assert Server("x").can_be_told(Memory.DEFAULT)


@pytest.mark.parametrize("name", SERVERS)
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
    own = not (SERVERS[name].package or SERVERS[name].program)
    assert others == (["/mine"] if own else [])
    assert made.get("APC_ENABLED") == ("1" if name == "mlx_vlm" else None)


def test_hearth_is_measured_with_its_defaults_whatever_its_env_file_says(tmp_path: Path) -> None:
    env_file = tmp_path / ".env"
    env_file.write_text("CACHE_EXACT=true\nWORKERS=4\nMODEL_PATH=/mine\nOTHER=1\n")
    assert set(defaults_against(env_file)) == {"CACHE_EXACT", "WORKERS", "MODEL_PATH"}
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


def test_the_kind_of_a_model_and_a_folder_that_has_only_it_are_told(tmp_path: Path) -> None:
    assert given(tmp_path)["kind"] == "lm"
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "config.json").write_text('{"vision_config": {}}')
    told = given(tmp_path)
    assert told["kind"] == "multimodal" and told["model_name"] == "qwen"
    assert told["models_dir"] == str(tmp_path / "home" / "models")
    assert (told["memory_bytes"], told["memory_gb"]) == ("52428800", "0.048828")


def test_the_facts_hold_what_a_reader_needs_and_no_key() -> None:
    facts = facts_of(SERVERS["rapid-mlx"], "0.16.10", is_metered=True, notes=("It is new.",))
    assert facts.command.startswith("python -m rapid_mlx.cli serve {model} --port {port}")
    assert facts.notes == (*SERVERS["rapid-mlx"].notes, "It is new.")
    mine = Server("mine", url="http://127.0.0.1:1", notes=(BY_URL,))
    assert facts_of(mine, "1", is_metered=False).command == "(as its owner has started it)"
    assert f"PROXY_API_KEY={KEY}" in command_of(SERVERS[HEARTH]), "LOG_PROMPTS needs some key"


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_what_is_installed_is_what_has_a_package_and_computes_here(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install_server.sys, "platform", platform)
    found = [name for name, each in SERVERS.items() if can_install(each)]
    anywhere = ["vllm-mlx", "rapid-mlx", "mlx-openai-server"]
    packages = [each.package for each in SERVERS.values() if each.package]
    assert all(re.fullmatch(r"[\w-]+==\d[\w.]*", each) for each in (*packages, install_server.UV))
    assert found == anywhere + (["mtplx"] if platform == "darwin" else [])


def test_an_error_names_no_place_and_its_reason_is_one_line(tmp_path: Path) -> None:
    model, home = tmp_path / "m", tmp_path / "h"
    said = f"\x1b[31mValueError: {model}/config.json has {home}\x1b[0m\nExiting. {Path.home()}/x"
    error = ServerStartError(without_paths(said, model, home))
    assert error.reason == "ValueError: {model}/config.json has {dir}"
    assert str(error).endswith("Exiting. ~/x")
    assert ServerStartError("a\nb\n").reason == "b" and ServerStartError("").reason == ""
