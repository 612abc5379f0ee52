"""Every known server can be started, told what it may keep, and told of without a path."""

import os
from pathlib import Path

import pytest

from hearth.commands.bench.results import HEARTH
from hearth.commands.bench.server import Memory
from hearth.commands.bench.servers.known_servers import SERVERS, server_of_url
from hearth.commands.bench.servers.server_environment import (
    environment_of,
    placeholders,
)
from hearth.shared.errors import StartError

STARTED = [name for name, each in SERVERS.items() if not each.url]
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


# ---------------------------------------------------------------- which are measured


def test_a_url_may_name_a_model_and_no_key() -> None:
    assert server_of_url("mine=http://a:1#m").model == "m"
    with pytest.raises(StartError, match="a name or a key in it"):
        server_of_url("mine=http://me:secret@a:1")
