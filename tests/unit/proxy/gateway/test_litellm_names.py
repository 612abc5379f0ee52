"""A name of a config means here what it means to LiteLLM's own Router, fallbacks too.

One config holds many small ones, drawn at random, each with names of its own.
"""

import random
from pathlib import Path
from typing import Any, Final

import litellm
import pytest
import yaml
from litellm.router_utils.fallback_event_handlers import get_fallback_model_group

from hearth.proxy.gateway.routing_table import read_table
from hearth.shared.settings import load_settings

# LiteLLM's late imports warn of its own types.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
DRAWN: Final = 8
# No provider of LiteLLM's is called acme: a bare name is never completed by one here.
NAMES: Final = ("{}a", "{}a-1", "{}a-1-x", "acme{}/a", "acme{}/a-1", "acme{}/b/c", "{}b.c", "{}zz")
PATTERNS: Final = ("{}a-*", "{}a-1-*", "acme{}/*", "acme{}/a*", "{}*-x", "acme{}/*/c", "{}b.*")
MODELS: Final = ("openai/m", "openai/n", "hearth/local", "hearth/second")


def drawn(chance: random.Random) -> dict[str, Any]:
    entries, aliases, fallbacks = [], {}, []
    for space in map("n{}".format, range(DRAWN)):
        for name in chance.sample(NAMES[:-1] + PATTERNS, 4):
            for model in chance.sample(MODELS, chance.choice((1, 1, 2))):
                model = "openai/x-*" if "*" in name and chance.random() < 0.3 else model
                params = {"model": model, "api_key": "sk-none"}
                entries.append({"model_name": name.format(space), "litellm_params": params})
        aliases[f"{space}old"] = chance.choice(NAMES).format(space)
        names = [f"{space}-{letter}" for letter in "fgh"]
        params = {"model": "openai/m", "api_key": "sk-none"}
        entries += [{"model_name": name, "litellm_params": params} for name in names]
        fallbacks.append({names[0]: chance.sample(names, chance.randint(1, 3))})
    settings: dict[str, Any] = {"fallbacks": fallbacks, "model_group_alias": aliases}
    return {"model_list": entries, "router_settings": settings}


async def meant_by(router: Any, name: str) -> set[str]:
    """Return the models that LiteLLM's Router may take for `name`."""
    try:
        found = await router.async_get_healthy_deployments(model=name, request_kwargs={})
    except (litellm.BadRequestError, ValueError):
        return set()
    return {row["litellm_params"]["model"] for row in found}


async def test_a_name_and_its_fallbacks_mean_what_they_mean_to_litellm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"provider": "hearth", "custom_handler": litellm.CustomLLM()}
    monkeypatch.setattr(litellm, "custom_provider_map", [own])
    litellm.utils.custom_llm_setup()
    config = drawn(random.Random(53))
    router = litellm.Router(model_list=config["model_list"], **config["router_settings"])
    path = tmp_path / "litellm.yaml"
    path.touch(0o600)
    path.write_text(yaml.safe_dump(config))
    given = {"MODEL_PATH": "/a", "PROXY_MODEL_ID": "local", "MODELS": "second=/b"}
    table = read_table(path, load_settings(given, None), {}, {})
    names = [name.format(f"n{number}") for number in range(DRAWN) for name in (*NAMES, "{}old")]

    expected = {name: await meant_by(router, name) for name in names}
    assert sum(map(bool, expected.values())) > DRAWN * 4
    groups = {name: table.group_of(name) for name in names}
    found = {name: table.deployments(group) if group else () for name, group in groups.items()}
    assert {name: {row.model for row in rows} for name, rows in found.items()} == expected
    for name in (f"n{number}-{letter}" for number in range(DRAWN) for letter in "fgh"):
        told, _ = get_fallback_model_group(router.fallbacks, name)
        expected_there = [other for other in told or () if other != name]
        assert list(table.fallbacks(name, "error")) == expected_there, name
