"""Settings: defaults, refusals that say what is allowed, and .env.example."""

from pathlib import Path

import pytest
from PIL import Image

from hearth.shared.errors import StartError
from hearth.shared.settings import DECODABLE_PIXELS_MAX
from hearth.shared.settings_from_env import PROJECT_DIR, example_lines, load_settings


def test_the_example_file_lists_every_setting_with_its_default() -> None:
    assert (PROJECT_DIR / ".env.example").read_text().splitlines() == example_lines()


def test_the_example_file_means_the_defaults() -> None:
    assert load_settings({}, PROJECT_DIR / ".env.example") == load_settings({}, None)


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    env_file = tmp_path / ".env"
    env_file.write_text("PROXY_PORT=4001\nWORKERS=2\n")
    settings = load_settings({"PROXY_PORT": "4002"}, env_file)
    assert (settings.proxy_port, settings.workers) == (4002, 2)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("PROXY_PORT", "80800", "a whole number from 1 to 65,535"),
        ("PROXY_PORT", "four", "a whole number from 1 to 65,535"),
        ("WORKERS", "-1", "a whole number from 0 to 16"),
        ("DEFAULT_TEMPERATURE", "nan", "a number from 0 to 2"),
        ("DEFAULT_THINKING", "maybe", "true or false"),
        ("LOG_LEVEL", "loud", "one of debug, info, warning, error"),
        ("PROXY_HOST", "my.host", "an IP address or localhost"),
        ("MODEL_PATH", "", "not empty"),
        ("MAX_IMAGE_PIXELS", "0", "a whole number from 1 to 89,478,485"),
        ("MAX_IMAGE_PIXELS", "89478486", "a whole number from 1 to 89,478,485"),
        ("VISION_CACHE_MB", "-1", "a whole number from 0 to 1,048,576"),
    ],
)
def test_a_bad_value_names_the_variable_the_value_and_what_is_allowed(
    name: str, value: str, allowed: str
) -> None:
    with pytest.raises(StartError) as caught:
        load_settings({name: value}, None)
    assert str(caught.value) == f"{name} is {value!r}; allowed is {allowed}."


def test_others_can_reach_it_only_with_a_key() -> None:
    with pytest.raises(StartError, match="PROXY_API_KEY is empty"):
        load_settings({"PROXY_HOST": "0.0.0.0"}, None)
    settings = load_settings({"PROXY_HOST": "0.0.0.0", "PROXY_API_KEY": "k"}, None)
    assert not settings.is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert load_settings({"PROXY_HOST": host}, None).is_loopback


def test_a_setting_that_blinds_the_model_is_refused_by_name() -> None:
    with pytest.raises(StartError, match="NORMALIZE_WRITE_TOOL_CONTENT_FOR_PROMPT is refused"):
        load_settings({"NORMALIZE_WRITE_TOOL_CONTENT_FOR_PROMPT": "true"}, None)
    load_settings({"NORMALIZE_WRITE_TOOL_CONTENT_FOR_PROMPT": "false"}, None)


def test_images_cannot_lose_their_identity() -> None:
    with pytest.raises(StartError, match="CACHE_VLM_IMAGE_IDENTITY is 'false'; allowed is true: "):
        load_settings({"CACHE_VLM_IMAGE_IDENTITY": "false"}, None)
    assert load_settings({"CACHE_VLM_IMAGE_IDENTITY": "on"}, None).cache_vlm_image_identity


def test_pillow_would_not_take_any_image_that_is_allowed_for_an_attack() -> None:
    assert Image.MAX_IMAGE_PIXELS == DECODABLE_PIXELS_MAX


def test_the_public_name_is_the_hub_id_the_directory_or_the_builtin(tmp_path: Path) -> None:
    directory = tmp_path / "My-Model-4bit"
    directory.mkdir()
    assert load_settings({"MODEL_PATH": str(directory)}, None).model_name == "My-Model-4bit"
    assert load_settings({"MODEL_PATH": "owner/name"}, None).model_name == "owner/name"
    assert load_settings({}, None).model_name == "pocket"
    assert load_settings({"PROXY_MODEL_ID": "mine"}, None).model_name == "mine"
