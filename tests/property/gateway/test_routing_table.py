"""The table means by every name what LiteLLM's own Router means by it, fallbacks too."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import litellm
import pytest
import yaml
from hypothesis import given, settings, strategies as st
from litellm.router_utils.fallback_event_handlers import get_fallback_model_group

from hearth.proxy.gateway.config.merged_config import merged_config
from hearth.proxy.gateway.config.routing_table import RoutingTable, read_table
from hearth.proxy.gateway.litellm_hooks import local_model
from hearth.shared.settings_from_env import load_settings

# LiteLLM's late imports warn of its own types.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
SETTINGS = load_settings({"PROXY_MODEL_ID": "big", "MODELS": "small=/models/tiny"}, None)
# No provider of LiteLLM's is called acme: a bare name is never completed by one here.
NAMES = ("a", "a-1", "a-1-x", "acme/a", "acme/a-1", "acme/b/c", "big", "small", "b.c", "openai/a")
PATTERNS = ("a-*", "a-1-*", "acme/*", "acme/a*", "*-x", "acme/*/c", "*", "b.*")
MODELS = ("openai/m", "hearth/small", "hearth/big", "openai/*", "openai/x-*", "hearth/*")
CAUSES = ("error", "context_window", "content_policy")

names = st.sampled_from(NAMES)
entries = st.builds(
    lambda name, model, base: {
        "model_name": name,
        "litellm_params": {
            "model": model if "*" in name else model.replace("hearth/*", "hearth/small"),
            **{"api_base": base, "api_key": "sk-0123456789"},
        },
    },
    st.sampled_from(NAMES + PATTERNS),
    st.sampled_from(MODELS),
    st.sampled_from(("http://127.0.0.1:1", "http://127.0.0.1:2")),
)
aliases = st.dictionaries(
    st.sampled_from(("fast", "a", "old")),
    names | st.builds(lambda name: {"model": name, "hidden": True}, names),
    max_size=2,
)
rows = st.lists(
    st.builds(lambda key, value: {key: value}, names | st.just("*"), st.lists(names, max_size=3)),
    max_size=4,
    unique_by=lambda row: next(iter(row)),
)


@pytest.fixture(autouse=True, scope="module")
def _hearth_is_a_provider() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        own = {"provider": "hearth", "custom_handler": local_model}
        patch.setattr(litellm, "custom_provider_map", [own])
        litellm.utils.custom_llm_setup()
        yield


def table_of(config: dict[str, Any]) -> RoutingTable:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        path.chmod(0o600)
        return read_table(path, SETTINGS, {}, {})


def router_of(table: RoutingTable, config: dict[str, Any]) -> Any:
    merged = merged_config(table, "token")
    return litellm.Router(model_list=merged["model_list"], **config.get("router_settings", {}))


async def meant_by(router: Any, name: str) -> list[tuple[str, str]]:
    """Return the id and the model of each deployment that LiteLLM's Router may take for `name`."""
    try:
        found = await router.async_get_healthy_deployments(model=name, request_kwargs={})
    except (litellm.BadRequestError, ValueError):
        return []
    return sorted((row["model_info"]["id"], row["litellm_params"]["model"]) for row in found)


@settings(max_examples=40)  # a Router takes its time
@given(st.lists(entries, max_size=6), aliases)
def test_a_name_means_what_it_means_to_litellm(
    model_list: list[dict[str, Any]], alias: dict[str, Any]
) -> None:
    config = {"model_list": model_list, "router_settings": {"model_group_alias": alias}}
    table = table_of(config)
    asyncio.run(compare(table, router_of(table, config)))


async def compare(table: RoutingTable, router: Any) -> None:
    for name in (*NAMES, "fast", "old", "acme/zz", "zz"):
        group = table.group_of(name)
        found = [] if group is None else table.deployments(group)
        theirs = await meant_by(router, name)
        # A star that leads to no local model leads nowhere here; LiteLLM would only fail later.
        served = [row for row in theirs if not is_missing_local(row[1])]
        assert sorted((row.id, row.model) for row in found) == served, name
        if group is not None:
            assert await meant_by(router, found[0].group) == theirs


def is_missing_local(model: str) -> bool:
    return model.startswith("hearth/") and model not in ("hearth/big", "hearth/small")


@settings(max_examples=40)
@given(rows, rows, st.lists(names, max_size=2), st.booleans())
def test_fallbacks_are_those_that_litellm_would_take(
    fallbacks: list[Any], windows: list[Any], default: list[str], in_router: bool
) -> None:
    model_list = [
        {"model_name": name, "litellm_params": {"model": "openai/m", "api_key": "sk-0123456789"}}
        for name in NAMES
    ]
    lists: dict[str, Any] = {"fallbacks": fallbacks, "context_window_fallbacks": windows}
    if default:
        lists["default_fallbacks"] = default
    section = "router_settings" if in_router else "litellm_settings"
    table = table_of({"model_list": model_list, section: lists})
    router = litellm.Router(model_list=model_list, **lists)
    for name in NAMES:
        theirs, _ = get_fallback_model_group(router.fallbacks or [], name)
        assert table.fallbacks(name, "error") == without(theirs, name)
        if windows:  # configured, so that no other list counts
            theirs, _ = get_fallback_model_group(router.context_window_fallbacks, name)
            assert table.fallbacks(name, "context_window") == without(theirs, name)
        assert table.fallbacks(name, "content_policy") == table.fallbacks(name, "error")


def without(found: list[str] | None, name: str) -> tuple[str, ...]:
    """Return `found` less the name itself, which LiteLLM passes over."""
    return tuple(row for row in found or () if row != name)
