"""Settings: defaults, refusals that say what is allowed, .env.example, names that are not read."""

import re
from pathlib import Path

import pytest

from hearth.proxy.request.model_names import models_of
from hearth.shared.dropped_settings import DROPPED, FORMER_DEFAULTS, NAMES, REFUSED
from hearth.shared.errors import StartError
from hearth.shared.settings import CACHE_RAM_MB_UNKNOWN
from hearth.shared.settings_from_env import (
    PROJECT_DIR,
    example_lines,
    load_settings,
    setting_warnings,
)
from hearth.worker.setup.kv_setup import BATCHED, LONE
from hearth.worker.setup.memory_setup import IDLE_SHARE, LIVE_SHARE_MAX, LIVE_SHARE_MIN

STORED_BITS = "off, 4 or 8; from 2 to 8 in steps of 0.5 with KV_QUANT_SCHEME=turboquant"
LISTEN_HOST = "an IP address, localhost or a name of this machine"


def test_the_example_file_lists_every_setting_with_its_default() -> None:
    assert (PROJECT_DIR / ".env.example").read_text().splitlines() == example_lines()


def test_the_example_file_means_the_defaults() -> None:
    assert load_settings({}, PROJECT_DIR / ".env.example") == load_settings({}, None)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("PROXY_API_KEY=secret".encode("utf-16"), "no UTF-8 (byte 0). Save it as UTF-8"),
        (b"MODEL_ALIASES=caf\xe9\n", "no UTF-8 (byte 17)"),
        (None, "cannot be read (Is a directory)"),
    ],
)
def test_a_settings_file_that_cannot_be_read_refuses_to_start_instead_of_without_its_keys(
    content: bytes | None, told: str, tmp_path: Path
) -> None:
    env_file = tmp_path / ".env"
    if content is None:
        env_file.mkdir()
    else:
        env_file.write_bytes(content)
    with pytest.raises(StartError, match=re.escape(told)):
        load_settings({}, env_file)


@pytest.mark.parametrize("name", ["RUN_DIR", "KV_CACHE_DIR", "LOG_ROOT", "CURVE_KEYS_DIR"])
def test_a_directory_in_nobodys_home_refuses_to_start(name: str) -> None:
    with pytest.raises(StartError, match=f"^{name} is '~nobody-of-this-name/x'; allowed is"):
        load_settings({name: "~nobody-of-this-name/x"}, None)


@pytest.mark.parametrize("name", ["MODEL_PATH", "MODELS"])
@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "a" * 5_000])
def test_a_model_in_nobodys_home_or_of_too_long_a_name_is_left_to_its_loader(
    name: str, path: str
) -> None:
    *_, model = models_of(load_settings({name: path}, None))
    assert path in model.names


def test_a_settings_file_that_leads_nowhere_refuses_to_start(tmp_path: Path) -> None:
    (tmp_path / ".env").symlink_to(tmp_path / "gone")
    with pytest.raises(StartError, match="cannot be read"):
        load_settings({}, tmp_path / ".env")


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
        ("DEFAULT_TEMPERATURE", "nan", "auto, or a number from 0 to 2"),
        ("DEFAULT_THINKING", "maybe", "true or false"),
        ("LOG_LEVEL", "loud", "one of debug, info, warning, error"),
        *(
            ("PROXY_HOST", bad, LISTEN_HOST)
            for bad in ("127.1", "my host", "2130706433", "a..b", "*")
        ),
        ("CACHE_STORE_BITS", "3.25", STORED_BITS),
        ("SPECULATE", "true", "one of auto, off, forced, lookup"),
        ("CACHE_STORE_BITS", "nan", STORED_BITS),
        ("CACHE_STORE_BITS", "1.5", STORED_BITS),
        ("KV_QUANT_SCHEME", "polar", "one of uniform, turboquant"),
        ("IDLE_PREFILL", "later", "one of never, auto"),
        (
            "IDLE_PREFILL",
            "always",
            "never or auto: always also read again what an answer had written; auto reads on mains "
            "power what the next request would have to",
        ),
        ("MODEL_PATH", "", "not empty"),
    ],
)
def test_a_bad_value_names_the_variable_the_value_and_what_is_allowed(
    name: str, value: str, allowed: str
) -> None:
    with pytest.raises(StartError) as caught:
        load_settings({name: value}, None)
    assert str(caught.value) == f"{name} is {value!r}; allowed is {allowed}."


def test_ranks_on_other_machines_serve_one_worker() -> None:
    told = {"RANKS": "2", "RANK_HOSTS": "hosts.json", "WORKERS": "2"}
    with pytest.raises(StartError, match="WORKERS is 2 and RANK_HOSTS names machines"):
        load_settings(told, None)
    assert load_settings({**told, "WORKERS": "1"}, None).ranks == 2
    assert load_settings({**told, "RANK_HOSTS": ""}, None).workers == 2


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
    return lines[at - 1]


def test_every_text_about_the_caches_default_size_has_the_figures_that_are_used() -> None:
    """What `worker/setup/memory_setup.py` makes of them is tested beside it."""
    assert (LIVE_SHARE_MIN, LIVE_SHARE_MAX, IDLE_SHARE) == (4, 2, 2)
    page = (PROJECT_DIR / "docs" / "cache.md").read_text()
    (budget,) = [part for part in page.split("\n\n") if part.startswith("**Budget.**")]
    for text in (about("CACHE_RAM_BUDGET_MB"), budget):
        assert "half to three quarters" in text and str(CACHE_RAM_MB_UNKNOWN) in text


def test_every_text_about_how_many_compute_at_once_has_the_figures_that_are_used() -> None:
    page = (PROJECT_DIR / "docs" / "operations.md").read_text()
    (queue,) = [part for part in page.split("\n\n") if "**How many at once.**" in part]
    for text in (about("MAX_CONCURRENT_REQUESTS"), queue):
        assert f"{BATCHED}, or {LONE} where" in " ".join(text.split())


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


def test_the_remedy_for_memory_names_the_setting_that_bounds_it_now() -> None:
    assert "CACHE_RAM_BUDGET_MB" in DROPPED["PROMPT_CACHE_MAX_ENTRIES_GLOBAL"]


@pytest.mark.parametrize(("name", "reason"), DROPPED.items())
def test_every_setting_that_a_warning_points_at_is_there(name: str, reason: str) -> None:
    assert set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", reason)) <= set(NAMES), name


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("PROXY_PROT", "PROXY_PORT"),
        ("WORKRES", "WORKERS"),
        ("CACHE_RAM_BUDGET", "CACHE_RAM_BUDGET_MB"),
        ("default_temperature", "DEFAULT_TEMPERATURE"),
    ],
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


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"CACHE_STORE_BITS": "3.5"}, "CACHE_STORE_BITS is 3.5 and KV_QUANT_SCHEME is uniform"),
        ({"CACHE_STORE_BITS": "6"}, "packs in 4 or 8 bits. Set CACHE_STORE_BITS=4"),
        ({"KV_QUANT_SCHEME": "turboquant"}, "CACHE_STORE_BITS is off, so that nothing"),
        ({"KV_QUANT_SCHEME": "turboquant", "KV_BITS": "4"}, "are packed uniformly. Set CACHE"),
        ({"CACHE_STORE_BITS": "8", "CACHE_EXACT": "true"}, "CACHE_STORE_BITS is 8: KV that was"),
    ],
)
def test_bits_that_nothing_would_pack_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(StartError, match=message):
        load_settings(environ, None)


@pytest.mark.parametrize("bits", ["2", "2.5", "3", "3.5", "4", "7.5", "8"])
def test_turboquant_takes_half_bits(bits: str) -> None:
    settings = load_settings({"CACHE_STORE_BITS": bits, "KV_QUANT_SCHEME": "turboquant"}, None)
    assert settings.cache_store_bits == float(bits)


@pytest.mark.parametrize("text", [",", " , ,"])
def test_a_list_of_keys_that_names_none_does_not_leave_the_server_open(text: str) -> None:
    with pytest.raises(StartError, match=r"PROXY_API_KEYS is ','|PROXY_API_KEYS is ', ,'"):
        load_settings({"PROXY_API_KEYS": text}, None)
    assert load_settings({"PROXY_API_KEYS": " a,, b "}, None).api_keys == ("a", "b")
