"""Checks what names mean in a LiteLLM config, what it is refused for, and what LiteLLM is given."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hearth.proxy.gateway.litellm_process import HOOKS, environment, merged_config
from hearth.proxy.gateway.routing_table import RoutingTable, read_table
from hearth.shared.errors import StartError
from hearth.shared.paths import PROJECT_DIR
from hearth.shared.settings import load_settings

DATA = yaml.safe_load((PROJECT_DIR / "tests/data/litellm_configs.yaml").read_text())
TWO_MODELS = {"MODELS": "small=/models/tiny-1b", "PROXY_MODEL_ID": "big", "MODEL_ALIASES": "main"}
KEY = "sk-ant-0123456789abcdef"


def table_of(
    tmp_path: Path, config: Any, environ: dict[str, str] | None = None, **in_file: str
) -> RoutingTable:
    path = tmp_path / "config.yaml"
    path.write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    path.chmod(0o600)
    given = {**TWO_MODELS, **(environ or {})}
    return read_table(path, load_settings(given, None), environ or {}, in_file)


def entry(name: str, model: str, **parameters: Any) -> dict[str, Any]:
    return {"model_name": name, "litellm_params": {"model": model, **parameters}}


def who(table: RoutingTable, name: str) -> list[str] | None:
    group = table.group_of(name)
    return None if group is None else [table.served_by(row) for row in table.deployments(group)]


@pytest.mark.parametrize("case", DATA["cases"].values(), ids=DATA["cases"])
def test_a_config_means_what_the_table_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: dict[str, Any]
) -> None:
    config, environ = case["config"], case.get("environ")
    if told := case.get("refused"):
        with pytest.raises(StartError) as caught:
            table_of(tmp_path, config, environ)
        assert told in str(caught.value) and "config.yaml" in str(caught.value)
        return
    table = table_of(tmp_path, config, environ)
    assert {name: who(table, name) for name in case.get("means", ())} == case.get("means", {})
    if "listed" in case:
        assert set(table.listed) - {"big", "small"} == set(case["listed"])
    for cause, rows in case.get("fallbacks", {}).items():
        assert {name: list(table.fallbacks(name, cause)) for name in rows} == rows
    assert table.fallback_lists.steps_max == case.get("steps", 5)
    if "warned" in case:
        told = case["warned"] or ""
        assert told in caplog.text and bool(told) == bool(caplog.text)
    for secret in case.get("redacted", ()):
        assert (
            table.secrets.redacted(f"it said {secret}, twice {secret}") == "it said ***, twice ***"
        )
        said = f'{{"a":"{secret}"}}\xff'.encode("latin-1")
        assert table.secrets.redacted_bytes(said) == b'{"a":"***"}\xff'
    for text in case.get("open", ()):
        assert table.secrets.redacted(text) == text
    if keys := case.get("keys"):
        assert table.checks_keys == (keys == "LiteLLM")
        general = merged_config(table, "token")["general_settings"]
        assert ("custom_auth" in general) == (keys == "ours" or "custom_auth" in str(config))
    if keys == "LiteLLM":
        with pytest.raises(StartError, match="PROXY_API_KEY"):
            table_of(tmp_path, config, (environ or {}) | {"PROXY_API_KEY": "k"})


@pytest.mark.parametrize("pattern", ["*", "huggingface/*", "x/*"])
def test_a_star_stands_for_a_model_and_for_no_place(tmp_path: Path, pattern: str) -> None:
    """LiteLLM would send the key there, or ask several models for one."""
    table = table_of(tmp_path, {"model_list": [entry(pattern, pattern, api_key=KEY)]})
    assert [name for name in DATA["places"] if table.group_of(name) is not None] == []
    if pattern == "*":
        assert [name for name in DATA["names"] if table.pattern_group(name) != name] == []


def test_included_files_are_appended_once_and_lie_beside_who_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    a = {"include": ["b.yaml", "../config.yaml"], "model_list": [entry("a", "m")]}
    (tmp_path / "sub/a.yaml").write_text(yaml.safe_dump(a))
    b = {"model_list": [entry("b", "m")], "general_settings": {"x": 2}}
    (tmp_path / "sub/b.yaml").write_text(yaml.safe_dump(b))
    config = {"include": ["sub/a.yaml", "sub/b.yaml"], "model_list": [entry("c", "m")]}
    table = table_of(tmp_path, {**config, "general_settings": {"x": 1}})
    assert [row["model_name"] for row in table.entries] == ["c", "a", "b", "big", "small"]
    assert table.config.section("general_settings") == {"x": 2}
    monkeypatch.chdir(tmp_path.parent)
    near = Path(tmp_path.name, "config.yaml")
    assert read_table(near, load_settings(TWO_MODELS, None), {}, {}).entries == table.entries


def test_litellm_is_given_the_list_with_ids_and_without_fallbacks(tmp_path: Path) -> None:
    litellm = {"fallbacks": [{"big": ["small"]}], "callbacks": "otel", "num_retries": 3}
    router = {"default_fallbacks": ["big"], "routing_strategy": "least-busy"}
    config = {"litellm_settings": litellm, "router_settings": router}
    config["model_list"] = [entry("a", "openai/x", api_key=KEY), entry("a", "openai/x")]
    table = table_of(tmp_path, config)
    merged = merged_config(table, "token")
    ids = [row["model_info"]["id"] for row in merged["model_list"]]
    assert ids == [row.id for row in table.all_deployments] and len(set(ids)) == 4
    assert table_of(tmp_path, config).entries == table.entries  # the same at each start
    first = table.all_deployments[0]
    assert table.deployment("a", first.id) == first
    settings = merged["litellm_settings"]
    assert "fallbacks" not in settings and settings["num_retries"] == 3
    assert settings["callbacks"] == ["otel", f"{HOOKS}.routing_hook"]
    assert set(merged["router_settings"]) == {"routing_strategy", "retry_policy"}
    general = merged["general_settings"]
    assert (general["master_key"], general["custom_auth"]) == ("token", f"{HOOKS}.authorise")
    assert table.config.section("litellm_settings")["fallbacks"]  # the table's own are kept


def test_litellm_sees_what_the_config_refers_to_and_no_other_config(tmp_path: Path) -> None:
    config = {"model_list": [entry("a", "openai/x", api_key="os.environ/OPENAI_KEY")]}
    environ = {"PATH": "/bin", "CONFIG_FILE_PATH": "/x", "LITELLM_CONFIG_BUCKET_NAME": "b"}
    environ |= {"PROXY_API_KEYS": "ours"}
    table = table_of(tmp_path, config, environ, OPENAI_KEY="k-from-the-file", PROXY_API_KEY="no")
    seen = environment(table)
    assert seen["OPENAI_KEY"] == "k-from-the-file" and seen["PATH"] == "/bin"
    assert seen["LITELLM_LOCAL_MODEL_COST_MAP"] == "True" and seen["NO_DOCS"] == "True"
    assert not {"PROXY_API_KEY", "PROXY_API_KEYS"} & set(seen)
    assert not {"CONFIG_FILE_PATH", "LITELLM_CONFIG_BUCKET_NAME"} & set(seen)
    assert table.variables == {"OPENAI_KEY"}
    assert table.secrets.redacted("key k-from-the-file.") == "key ***."


def test_a_file_that_is_no_text_refuses_to_start(tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(b"a: \xff")
    for name, why in (("gone", "cannot be read"), ("odd", "is no YAML in UTF-8")):
        with pytest.raises(StartError, match=why):
            read_table(tmp_path / name, load_settings({}, None), {}, {})


@pytest.mark.parametrize("own", [{"RateLimitErrorRetries": 3}, None])
def test_the_users_own_retries_and_those_without_fallbacks_stay(tmp_path: Path, own: Any) -> None:
    fallbacks = [{"cloud": ["small"]}] if own else []
    config = {
        "model_list": [entry("cloud", "openai/x")],
        "litellm_settings": {"fallbacks": fallbacks},
        "router_settings": {"retry_policy": own},
    }
    merged = merged_config(table_of(tmp_path, config), "token")
    assert merged["router_settings"]["retry_policy"] == own
