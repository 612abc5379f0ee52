"""Settings: defaults, refusals that say what is allowed, .env.example, names that are not read."""

import re
from pathlib import Path
from typing import Any

import pytest

from hearth.proxy.request.model_names import models_of
from hearth.shared.dropped_settings import DROPPED, FORMER_DEFAULTS, REFUSED
from hearth.shared.errors import StartError
from hearth.shared.paths import PROJECT_DIR
from hearth.shared.settings import CACHE_RAM_MB_UNKNOWN, NAMES, load_settings, setting_warnings
from hearth.worker.setup.kv_setup import BATCHED, LONE
from hearth.worker.setup.memory_setup import IDLE_SHARE, LIVE_SHARE_MAX, LIVE_SHARE_MIN
from scripts.docs.settings_table import example_lines
from tests.helpers.cases import cases

TABLES = "settings/settings.yaml"


def test_the_example_file_lists_every_setting_with_its_default() -> None:
    assert (PROJECT_DIR / ".env.example").read_text().splitlines() == example_lines()
    assert load_settings({}, PROJECT_DIR / ".env.example") == load_settings({}, None)


@pytest.mark.parametrize("case", cases(TABLES, "refused"))
def test_what_cannot_be_meant_is_refused_with_what_is_allowed(case: dict[str, Any]) -> None:
    with pytest.raises(StartError) as caught:
        load_settings(case["given"], None)
    assert case["told"] in str(caught.value)


@pytest.mark.parametrize("case", cases(TABLES, "taken"))
def test_what_is_given_is_what_is_meant(case: dict[str, Any]) -> None:
    settings = load_settings(case["given"], None)
    assert {name: str(getattr(settings, name)) for name in case["meant"]} == case["meant"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("PROXY_API_KEY=secret".encode("utf-16"), "no UTF-8 (byte 0). Save it as UTF-8"),
        (b"MODEL_ALIASES=caf\xe9\n", "no UTF-8 (byte 17)"),
        (None, "cannot be read"),
    ],
)
def test_a_settings_file_that_cannot_be_read_refuses_to_start_instead_of_without_its_keys(
    content: bytes | None, told: str, tmp_path: Path
) -> None:
    env_file = tmp_path / ".env"
    if content is None:
        env_file.symlink_to(tmp_path / "gone")
    else:
        env_file.write_bytes(content)
    with pytest.raises(StartError, match=re.escape(told)):
        load_settings({}, env_file)


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "a" * 5_000])
def test_a_model_in_nobodys_home_or_of_too_long_a_name_is_left_to_its_loader(path: str) -> None:
    for name in ("MODEL_PATH", "MODELS"):
        *_, model = models_of(load_settings({name: path}, None))
        assert path in model.names


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    env_file = tmp_path / ".env"
    env_file.write_text("PROXY_PORT=4001\nWORKERS=2\n")
    settings = load_settings({"PROXY_PORT": "4002"}, env_file)
    assert (settings.proxy_port, settings.workers) == (4002, 2)


def test_the_public_name_is_the_hub_id_the_directory_or_the_builtin(tmp_path: Path) -> None:
    directory = tmp_path / "My-Model-4bit"
    directory.mkdir()
    assert load_settings({"MODEL_PATH": str(directory)}, None).model_name == "My-Model-4bit"
    assert load_settings({"MODEL_PATH": "owner/name"}, None).model_name == "owner/name"
    assert load_settings({}, None).model_name == "smollm2"
    assert load_settings({"PROXY_MODEL_ID": "mine"}, None).model_name == "mine"


def about(name: str) -> str:
    lines = example_lines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith(f"{name}=")]
    return " ".join(lines[at - 1].split())


def paragraph(page: Path, begin: str) -> str:
    (found,) = [part for part in page.read_text().split("\n\n") if begin in part]
    return " ".join(found.split())


def test_every_text_about_a_default_has_the_figures_that_are_used() -> None:
    """What `worker/setup/memory_setup.py` makes of them is tested beside it."""
    assert (LIVE_SHARE_MIN, LIVE_SHARE_MAX, IDLE_SHARE) == (4, 2, 2)
    docs = PROJECT_DIR / "docs"
    budget = paragraph(docs / "cache.md", "**Budget.**")
    queue = paragraph(docs / "operations.md", "**How many at once.**")
    for text in (about("CACHE_RAM_BUDGET_MB"), budget):
        assert "half to three quarters" in text and str(CACHE_RAM_MB_UNKNOWN) in text
    for text in (about("MAX_CONCURRENT_REQUESTS"), queue):
        assert f"{BATCHED}, or {LONE} where" in text


# ---------------------------------------------------------------- names that are not read


@pytest.mark.parametrize("name", [*DROPPED, *REFUSED])
def test_a_dropped_setting_gets_one_warning_wherever_it_is_set(name: str, tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text(f"{name}=sk-secret\n")
    for environ, env_file in (({name: "sk-secret"}, None), ({}, file), ({name: ""}, file)):
        (warning,) = setting_warnings(environ, env_file)
        assert warning.startswith(f"{name} is set and has no effect") and warning.endswith(".")
        assert "sk-secret" not in warning and (DROPPED | REFUSED)[name] in warning
    assert name not in NAMES
    assert set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", DROPPED.get(name, ""))) <= set(NAMES)


def test_the_remedy_for_memory_names_the_setting_that_bounds_it_now() -> None:
    assert "CACHE_RAM_BUDGET_MB" in DROPPED["PROMPT_CACHE_MAX_ENTRIES_GLOBAL"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("WORKRES", "WORKERS"), ("default_temperature", "DEFAULT_TEMPERATURE")],
)
def test_a_misspelt_setting_in_the_file_is_told_with_the_one_that_is_meant(
    name: str, meant: str, tmp_path: Path
) -> None:
    file = tmp_path / ".env"
    file.write_text(f"{name}=sk-secret\nHF_TOKEN=sk-secret\nPROXY_PORT=4001\n{name}=2\n")
    warnings = setting_warnings({name: "1", "PROXY_HOTS": "x"}, file)
    assert warnings == [
        f"{name} in the settings file is not read. Is {meant} meant?",
        "HF_TOKEN in the settings file is not read. docs/settings.md lists those that are.",
    ]


def test_what_is_read_or_anothers_is_not_warned_of() -> None:
    environ = {"HF_TOKEN": "x", "PATH": "/bin", "PROXY_HOTS": "x", "MODEL_PATH": "m"}
    assert setting_warnings(environ, PROJECT_DIR / ".env.example") == []
    assert setting_warnings({}, None) == setting_warnings({}, Path("/no/such/.env")) == []


@pytest.mark.parametrize(("name", "text"), FORMER_DEFAULTS.items())
def test_a_dropped_setting_is_told_where_somebody_chose_its_value(
    name: str, text: str, tmp_path: Path
) -> None:
    file = tmp_path / ".env"
    file.write_text(f"{name}={text}\n")
    assert setting_warnings({}, file) == [], "the installer wrote it"
    file.write_text(f"{name}=other\n")
    (warning,) = setting_warnings({}, file)
    assert warning.startswith(f"{name} is set and has no effect: ")
