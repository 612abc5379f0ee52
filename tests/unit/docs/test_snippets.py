"""Every block of code in the documents is well formed, and names commands that exist."""

import ast
import json
import re
import tomllib
from pathlib import Path

import pytest

from hearth.commands.main import COMMANDS
from hearth.proxy.gateway.routing_table import read_table
from hearth.shared.settings import load_settings
from tests.helpers.documents import GUIDES, LANGUAGES, ROOT, CodeBlock, blocks

PAGES = [*GUIDES, ROOT / "CONTRIBUTING.md"]
BLOCKS = [block for page in PAGES for block in blocks(page)]


def of_language(*languages: str) -> list[CodeBlock]:
    return [block for block in BLOCKS if block.language in languages]


def test_every_block_names_its_language() -> None:
    assert [str(block) for block in BLOCKS if block.language not in LANGUAGES] == []
    assert len(of_language("sh")) >= 15 and len(of_language("python")) >= 3


@pytest.mark.parametrize("block", of_language("yaml"), ids=str)
def test_a_block_of_yaml_is_a_config_that_the_gateway_takes(
    block: CodeBlock, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(block.text)
    models = {"MODEL_PATH": "models/big", "PROXY_MODEL_ID": "big", "MODELS": "small=models/small"}
    table = read_table(path, load_settings(models, None), {}, {})
    assert {row.local for row in table.all_deployments} >= {"big", "small"}


@pytest.mark.parametrize("block", of_language("python"), ids=str)
def test_a_block_of_python_parses(block: CodeBlock) -> None:
    ast.parse(block.text)


@pytest.mark.parametrize("block", of_language("json", "toml"), ids=str)
def test_a_block_of_settings_of_a_client_parses(block: CodeBlock) -> None:
    assert (json.loads if block.language == "json" else tomllib.loads)(block.text)


@pytest.mark.parametrize("block", of_language("dotenv"), ids=str)
def test_a_block_of_our_settings_is_accepted(block: CodeBlock, tmp_path: Path) -> None:
    env_file = tmp_path / ".env"
    env_file.write_text(block.text)
    assert load_settings({}, env_file) != load_settings({}, None)


def shell_commands() -> list[str]:
    """Return the commands of all blocks of shell and of all spans of code, one a line."""
    spans = [span for page in PAGES for span in re.findall(r"`([^`\n]+)`", page.read_text())]
    return [line for block in of_language("sh") for line in block.text.splitlines()] + spans


def test_every_command_of_hearth_is_named_and_no_other() -> None:
    named = {each for line in shell_commands() for each in re.findall(r"^hearth (\w[\w-]*)", line)}
    assert named == set(COMMANDS)


def source_of(module: str) -> str:
    """Return the text of a script's module, with those beside it where it is a package."""
    path = ROOT / module.replace(".", "/")
    if path.is_dir():
        return "".join(each.read_text() for each in path.glob("*.py"))
    return path.with_suffix(".py").read_text()


def test_every_script_exists_and_has_the_options_that_it_is_called_with() -> None:
    called = 0
    for line in shell_commands():
        if found := re.search(r"-m (scripts[\w.]+)([^#]*)", line):
            called += 1
            source = source_of(found[1])
            for option in re.findall(r"(?<!\S)--[\w-]+", found[2]):
                assert f'"{option}"' in source, (line, option)
    assert called >= 10
