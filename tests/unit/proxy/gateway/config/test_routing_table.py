"""Checks what names mean in a LiteLLM config, and what a config is refused for."""

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from hearth.proxy.gateway.config.merged_config import HOOKS, environment, merged_config
from hearth.proxy.gateway.config.routing_table import RoutingTable, read_table
from hearth.shared.errors import StartError
from hearth.shared.settings_from_env import load_settings

KEY = "sk-ant-0123456789abcdef"
TWO_MODELS = {"MODELS": "small=/models/tiny-1b", "PROXY_MODEL_ID": "big", "MODEL_ALIASES": "main"}
CLOUD = {"model_name": "gpt-4o", "litellm_params": {"model": "openai/gpt-4o", "api_key": KEY}}


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


def test_every_local_model_is_a_group_of_its_own(tmp_path: Path) -> None:
    table = table_of(tmp_path, {"model_list": [CLOUD]})
    for name in ("big", "small"):
        assert table.exact_group(name) == name
        (row,) = table.deployments(name)
        assert (row.local, table.served_by(row)) == (name, f"hearth/{name}")
    assert set(table.listed) == {"big", "small", "gpt-4o"}


def test_a_local_model_is_found_by_its_name_its_path_and_the_last_part_of_it(
    tmp_path: Path,
) -> None:
    models = ["hearth/small", "hearth//models/tiny-1b", "hearth/tiny-1b", "hearth/main"]
    table = table_of(tmp_path, {"model_list": [entry(f"m{i}", m) for i, m in enumerate(models)]})
    found = [table.deployments(f"m{index}")[0].local for index in range(4)]
    assert found == ["small", "small", "small", "big"]


def test_the_former_default_model_is_the_default_one_unlisted(tmp_path: Path) -> None:
    config = {"model_list": [entry("m", "hearth/pocket"), CLOUD]}
    table = table_of(tmp_path, config, {"MODELS": "", "PROXY_MODEL_ID": ""})
    assert table.deployments("m")[0].local == "smollm2"
    assert set(table.listed) == {"smollm2", "m", "gpt-4o"}


def test_a_name_may_be_a_group_of_local_and_other_models(tmp_path: Path) -> None:
    rows = [entry("big", "hearth/big"), entry("big", "anthropic/claude-x", api_key=KEY)]
    table = table_of(tmp_path, {"model_list": rows})
    first, second = table.deployments("big")
    assert (first.local, second.local) == ("big", "") and first.id != second.id
    assert table.served_by(second) == "anthropic/claude-x"
    assert table.deployment("big", second.id) == second


def test_a_pattern_can_mean_another_local_model(tmp_path: Path) -> None:
    rows = [entry("claude-*", "hearth/big"), entry("claude-haiku-*", "hearth/small")]
    table = table_of(tmp_path, {"model_list": rows})
    assert table.exact_group("claude-haiku-4-5") is None
    assert table.pattern_group("claude-haiku-4-5") == "claude-haiku-4-5"
    assert table.deployments("claude-haiku-4-5")[0].local == "small"
    assert table.deployments("claude-opus-4-5")[0].local == "big"
    assert table.pattern_group("gpt-4o") is None


def test_what_a_star_stands_for_goes_into_the_models_star(tmp_path: Path) -> None:
    rows = [entry("anthropic/*", "anthropic/*"), entry("own/*", "hearth/*")]
    table = table_of(tmp_path, {"model_list": rows})
    (row,) = table.deployments("anthropic/claude-x")
    assert (row.model, row.group) == ("anthropic/claude-x", "anthropic/claude-x")
    assert table.deployments("own/small")[0].local == "small"
    assert table.pattern_group("own/missing") is None


def test_a_bare_name_never_leaves_by_the_pattern_of_a_provider(tmp_path: Path) -> None:
    table = table_of(tmp_path, {"model_list": [entry("anthropic/*", "anthropic/*")]})
    assert table.group_of("claude-sonnet-4-5") is None


PLACES = (
    *("huggingface/https://sink.example/v1", "huggingface/http://127.0.0.1:1", "x/../files"),
    *(
        "huggingface/..",
        "x/a?b=c",
        "x/a#b",
        "x/a%2e",
        "x/a,x/b",
        "x/*",
        "x/a b",
        "x/\u00e9",
        "x/a\\b",
    ),
)
NAMES = (
    *("openrouter/meta-llama/Llama-3.3-70B-Instruct:free", "vertex_ai/claude-3@2024", "x/@cf/a.b"),
    *("bedrock/arn:aws:bedrock:eu-west-1:1:inference-profile/eu.a-v2:0", "o/a..b", "x/m[1m]"),
)


@pytest.mark.parametrize("pattern", ["*", "huggingface/*", "x/*"])
def test_a_star_stands_for_no_place(tmp_path: Path, pattern: str) -> None:
    """LiteLLM would send the key there, or ask several models for one."""
    table = table_of(tmp_path, {"model_list": [entry(pattern, pattern, api_key=KEY)]})
    assert [name for name in PLACES if table.group_of(name) is not None] == []


def test_a_star_stands_for_every_name_of_a_model(tmp_path: Path) -> None:
    table = table_of(tmp_path, {"model_list": [entry("*", "*", api_key=KEY)]})
    assert [name for name in NAMES if table.pattern_group(name) != name] == []


def test_aliases_go_before_names_and_may_be_hidden(tmp_path: Path) -> None:
    alias = {"fast": "small", "gpt-4o": {"model": "big", "hidden": True}, "a": "acme/x"}
    rows = [CLOUD, entry("acme/*", "openai/*")]
    config = {"model_list": rows, "router_settings": {"model_group_alias": alias}}
    table = table_of(tmp_path, config)
    assert table.exact_group("fast") == "small"
    assert table.exact_group("gpt-4o") == "big"
    assert table.exact_group("a") == "acme/x" and table.deployments("acme/x")
    assert "fast" in table.listed


def test_an_alias_of_nothing_is_warned_of_and_means_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alias = {"a": "gone", "acme/old": "gone"}  # the second would be a pattern's name
    rows = [CLOUD, entry("acme/*", "openai/*")]
    config = {"model_list": rows, "router_settings": {"model_group_alias": alias}}
    table = table_of(tmp_path, config)
    assert [table.group_of(name) for name in (*alias, "acme/new")] == [None, None, "acme/new"]
    assert not set(alias) & set(table.listed)
    assert "'gone'" in caplog.text


def test_the_provider_is_told_where_the_model_does_not_name_it(tmp_path: Path) -> None:
    rows = [entry("a", "my-model", custom_llm_provider="openai"), entry("b", "modèle")]
    table = table_of(tmp_path, {"model_list": rows})
    told = [table.served_by(table.deployments(name)[0]) for name in ("a", "b")]
    assert told == ["openai/my-model", "mod?le"]


def test_fallbacks_are_those_that_the_config_names(tmp_path: Path) -> None:
    config = {
        "model_list": [CLOUD, entry("acme/*", "openai/*"), entry("openai/*", "openai/*")],
        "litellm_settings": {
            "fallbacks": [{"gpt-4o": ["big", {"model": "small"}]}, {"x": ["big"]}],
            "default_fallbacks": ["small"],
            "context_window_fallbacks": [{"big": ["gpt-4o"]}],
        },
    }
    table = table_of(tmp_path, config)
    assert table.fallbacks("gpt-4o", "error") == ("big", "small")
    assert table.fallbacks("big", "error") == ("small",)
    assert table.fallbacks("small", "error") == ()
    assert table.fallbacks("openai/x", "error") == ("big",)
    assert table.fallbacks("acme/x", "error") == ("small",)  # acme is no provider
    assert table.fallbacks("big", "context_window") == ("gpt-4o",)
    assert table.fallbacks("small", "context_window") == ()
    assert table.fallbacks("big", "content_policy") == ("small",)
    assert table.fallbacks_max == 5


def test_the_routers_own_fallbacks_win(tmp_path: Path) -> None:
    config = {
        "litellm_settings": {"fallbacks": [{"big": ["small"]}]},
        "router_settings": {"fallbacks": [{"small": ["big"]}], "max_fallbacks": 2},
    }
    table = table_of(tmp_path, config)
    assert table.fallbacks("small", "error") == ("big",)
    assert table.fallbacks("big", "error") == ()
    assert table.fallbacks_max == 2


def test_a_fallback_that_no_model_is_is_warned_of_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"litellm_settings": {"fallbacks": [{"big": ["gone", "small"]}]}}
    assert table_of(tmp_path, config).fallbacks("big", "error") == ("small",)
    assert "'gone'" in caplog.text


REFUSED: list[tuple[Any, str]] = [
    ("a: [", "is no YAML (line 1"),
    ("- 1", "holds no mapping"),
    ({"model_list": {"a": 1}}, "model_list is no list"),
    ({"model_list": [{"litellm_params": {"model": "x"}}]}, "entry 1 has no model_name"),
    ({"model_list": [CLOUD, {"model_name": "a"}]}, "entry 2 (a) has no litellm_params.model"),
    ({"model_list": [entry("a", "hearth/gone")]}, "no such local model is served"),
    ({"model_list": [entry("a", "hearth/*")]}, "'hearth/*', and no such"),
    ({"model_list": [entry("a", "os.environ/NOT_SET")]}, "which is not set"),
    ({"model_list": [{**CLOUD, "model_info": 1}]}, "model_info that is no mapping"),
    ({"general_settings": 7}, "general_settings is no mapping"),
    ({"include": "x.yaml"}, "include is no list"),
    ({"include": ["gone.yaml"]}, "gone.yaml, which cannot be read (No such file"),
    ({"litellm_settings": {"fallbacks": ["big"]}}, "has an entry that is no single"),
    ({"litellm_settings": {"fallbacks": [{"big": "small"}]}}, "is no list of names"),
    ({"litellm_settings": {"fallbacks": [{"big": [{"model": "small", "n": 1}]}]}}, "(n)"),
    ({"litellm_settings": {"fallbacks": [{"big": [3]}]}}, "has an entry that is no name"),
    ({"litellm_settings": {"custom_provider_map": [{"provider": "hearth"}]}}, "'hearth'"),
    ({"router_settings": {"model_group_alias": ["a"]}}, "is no mapping"),
]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_lst": [CLOUD]}, "model_list is not there or empty"),
        ({"model_list": [entry("a", "openai/x", api_key="os.environ/NOT_SET")]}, "os.environ/NOT_"),
        (
            {"model_list": [CLOUD], "litellm_settings": {"fallbacks": [{"gpt-4": ["big"]}]}},
            "fallbacks has 'gpt-4', which no model is",
        ),
    ],
)
def test_what_is_of_no_use_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: Any, told: str
) -> None:
    table_of(tmp_path, config)
    assert told in caplog.text


def test_fallbacks_that_litellm_would_find_are_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [CLOUD, entry("openai/*", "openai/*"), entry("groq/llama", "groq/llama")]
    names = ("gpt-4o", "openai/o3", "o3", "llama", "groq/llama", "big", "tiny-1b", "*")
    fallbacks = [{name: ["small"]} for name in names]
    table_of(tmp_path, {"model_list": rows, "litellm_settings": {"fallbacks": fallbacks}})
    assert "which no model is" not in caplog.text


@pytest.mark.parametrize(("config", "told"), REFUSED, ids=[row[1] for row in REFUSED])
def test_a_config_that_cannot_be_meant_refuses_to_start(
    tmp_path: Path, config: Any, told: str
) -> None:
    with pytest.raises(StartError) as caught:
        table_of(tmp_path, config)
    assert told in str(caught.value) and "config.yaml" in str(caught.value)


def test_a_file_that_is_not_there_refuses_to_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="cannot be read"):
        read_table(tmp_path / "gone.yaml", load_settings({}, None), {}, {})


@pytest.mark.parametrize(
    ("config", "environ"),
    [
        ({"general_settings": {"master_key": "sk-1234567890"}}, {}),
        ({"general_settings": {"master_key": "os.environ/MK"}}, {"MK": "sk-1234567890"}),
        ({"general_settings": {"custom_auth": "a.b"}}, {}),
        ({"model_list": []}, {"LITELLM_MASTER_KEY": "sk-1234567890"}),
    ],
)
def test_keys_are_checked_by_litellm_or_by_us_and_never_by_both(
    tmp_path: Path, config: Any, environ: dict[str, str]
) -> None:
    assert table_of(tmp_path, config, environ).checks_keys
    with pytest.raises(StartError, match="PROXY_API_KEY"):
        table_of(tmp_path, config, environ | {"PROXY_API_KEY": "k"})
    assert not table_of(tmp_path, {"model_list": []}, {"PROXY_API_KEY": "k"}).checks_keys


def test_included_files_are_appended_once_and_lie_beside_who_names_them(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a.yaml").write_text(
        "include: [b.yaml, ../config.yaml]\n"
        "model_list: [{model_name: a, litellm_params: {model: m}}]"
    )
    (tmp_path / "sub/b.yaml").write_text(
        "model_list: [{model_name: b, litellm_params: {model: m}}]\ngeneral_settings: {x: 2}"
    )
    config = {"include": ["sub/a.yaml", "sub/b.yaml"], "model_list": [CLOUD]}
    table = table_of(tmp_path, {**config, "general_settings": {"x": 1}})
    assert [row["model_name"] for row in table.entries] == ["gpt-4o", "a", "b", "big", "small"]
    assert table.config.section("general_settings") == {"x": 2}


def test_keys_in_a_file_that_others_can_read_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = table_of(tmp_path, {"model_list": [CLOUD]})
    assert not caplog.records
    table.config.path.chmod(0o644)
    read_table(table.config.path, load_settings(TWO_MODELS, None), {}, {})
    assert "chmod 600" in caplog.text and KEY not in caplog.text


def test_litellm_is_given_the_list_with_ids_and_without_fallbacks(tmp_path: Path) -> None:
    config = {
        "model_list": [CLOUD],
        "litellm_settings": {
            "fallbacks": [{"big": ["small"]}],
            "callbacks": "otel",
            "num_retries": 3,
            "request_timeout": 7,
        },
        "router_settings": {"default_fallbacks": ["big"], "routing_strategy": "least-busy"},
    }
    table = table_of(tmp_path, config)
    merged = merged_config(table, "token")
    assert {row["model_info"]["id"] for row in merged["model_list"]} == {
        row.id for name in ("gpt-4o", "big", "small") for row in table.deployments(name)
    }
    settings = merged["litellm_settings"]
    assert "fallbacks" not in settings and settings["callbacks"] == [
        "otel",
        f"{HOOKS}.routing_hook",
    ]
    assert (settings["num_retries"], settings["request_timeout"]) == (3, 7)
    assert set(merged["router_settings"]) == {"routing_strategy", "retry_policy"}
    general = merged["general_settings"]
    assert (general["master_key"], general["custom_auth"]) == ("token", f"{HOOKS}.authorise")
    assert table.config.section("litellm_settings")["fallbacks"]  # the table's own are kept


@pytest.mark.parametrize(
    ("fallbacks", "own", "policy"),
    [
        ([{"cloud": ["small"]}], None, {"RateLimitErrorRetries": 0}),
        ([{"cloud": ["small"]}], {"RateLimitErrorRetries": 3}, {"RateLimitErrorRetries": 3}),
        ([], None, None),
    ],
)
def test_a_provider_that_is_full_is_not_waited_for_where_others_can_answer(
    tmp_path: Path, fallbacks: Any, own: Any, policy: Any
) -> None:
    config = {
        "model_list": [entry("cloud", "openai/x")],
        "litellm_settings": {"fallbacks": fallbacks},
        "router_settings": {"retry_policy": own},
    }
    router = merged_config(table_of(tmp_path, config), "token")["router_settings"]
    assert router["retry_policy"] == policy


def test_the_users_own_checks_of_keys_stay(tmp_path: Path) -> None:
    config = {"general_settings": {"master_key": "sk-1234567890"}}
    general = merged_config(table_of(tmp_path, config), "token")["general_settings"]
    assert general["master_key"] == "sk-1234567890" and "custom_auth" not in general
    config = {"general_settings": {"custom_auth": "mine.check"}}
    general = merged_config(table_of(tmp_path, config), "token")["general_settings"]
    assert (general["master_key"], general["custom_auth"]) == ("token", "mine.check")


def test_litellm_sees_what_the_config_refers_to_and_no_other_config(tmp_path: Path) -> None:
    config = {"model_list": [entry("a", "openai/x", api_key="os.environ/OPENAI_KEY")]}
    environ = {"PATH": "/bin", "CONFIG_FILE_PATH": "/x", "LITELLM_CONFIG_BUCKET_NAME": "b"}
    table = table_of(tmp_path, config, environ, OPENAI_KEY="k-from-the-file", PROXY_API_KEY="no")
    seen = environment(table)
    assert seen["OPENAI_KEY"] == "k-from-the-file" and seen["PATH"] == "/bin"
    assert seen["LITELLM_LOCAL_MODEL_COST_MAP"] == "True" and seen["NO_DOCS"] == "True"
    assert not {"PROXY_API_KEY", "CONFIG_FILE_PATH", "LITELLM_CONFIG_BUCKET_NAME"} & set(seen)
    assert table.variables == {"OPENAI_KEY"}
    assert table.redacted("key k-from-the-file.") == "key ***."


SECRETS = [
    ({"model_list": [entry("a", "x", api_key="abcdefgh1234")]}, "abcdefgh1234"),
    ({"model_list": [entry("a", "x", aws_secret_access_key="abcd/efgh12")]}, "abcd/efgh12"),
    ({"model_list": [entry("a", "x", vertex_credentials="abcdefgh1234")]}, "abcdefgh1234"),
    ({"litellm_settings": {"headers": {"Authorization": "Bearer abcdefgh12"}}}, "abcdefgh12"),
    ({"litellm_settings": {"headers": {"x-api-key": "abcdefgh-13"}}}, "abcdefgh-13"),
    ({"environment_variables": {"LANGFUSE_SECRET_KEY": "abcdefgh1234"}}, "abcdefgh1234"),
    ({"general_settings": {"database_url": "postgresql://u:pw1234567@h/d"}}, "pw1234567"),
    ({"litellm_settings": {"cache_params": {"password": "hunter2hunter2"}}}, "hunter2hunter2"),
    ({"general_settings": {"master_key": "sk-abcdefgh"}}, "sk-abcdefgh"),
    ({"general_settings": {"alerting": ["https://x:tok12345678@hooks"]}}, "tok12345678"),
]


@pytest.mark.parametrize(("config", "secret"), SECRETS, ids=[row[1] for row in SECRETS])
def test_a_secret_of_the_config_is_in_no_text(tmp_path: Path, config: Any, secret: str) -> None:
    table = table_of(tmp_path, config)
    assert table.redacted(f"it said {secret}, twice {secret}") == "it said ***, twice ***"
    said = f'{{"a":"{secret}"}}\xff'.encode("latin-1")
    assert table.secrets.redacted_bytes(said) == b'{"a":"***"}\xff'


def test_the_keys_that_litellm_finds_in_the_environment_are_secrets(tmp_path: Path) -> None:
    environ = {
        "OPENAI_API_KEY": "canary.0001",
        "LANGFUSE_SECRET_KEY": "canary.0002",
        "AWS_SECRET_ACCESS_KEY": "canary.0003",
        "HTTPS_PROXY": "http://user:canary.0004@proxy:3128",
        "AWS_DEFAULT_REGION": "eu-central-1",
        "AWS_PROFILE": "production",
        "HOSTNAME": "an-ordinary-name",
    }
    secrets = table_of(tmp_path, {"model_list": [CLOUD]}, environ).secrets
    for text in ("canary.0001", "canary.0002", "canary.0003", "canary.0004"):
        assert secrets.redacted(f"a {text} b") == "a *** b"
    for text in ("eu-central-1", "production", "an-ordinary-name"):
        assert secrets.redacted(text) == text


def test_ordinary_words_are_no_secrets(tmp_path: Path) -> None:
    row = entry("a-long-model-name", "openai/a-long-model-name", max_tokens=123456789)
    row["litellm_params"] |= {"aws_region_name": "eu-central-1", "input_cost_per_token": 1e-9}
    config = {
        "model_list": [row],
        "router_settings": {"routing_strategy": "usage-based-routing-v2"},
        "litellm_settings": {"callbacks": ["prometheus"], "cache_params": {"api_key": "short"}},
    }
    assert not table_of(tmp_path, config).secrets.texts


def test_a_warning_names_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        table_of(tmp_path, {"litellm_settings": {"fallbacks": [{"big": ["gone"]}]}})
    assert str(tmp_path / "config.yaml") in caplog.text
