"""A name means to the running server what it means to LiteLLM's own Router, fallbacks too.

One config holds many small ones, drawn at random, each with names of its own.
"""

import asyncio
import random
from collections.abc import Iterator
from typing import Any, Final

import litellm
import pytest
from litellm.router_utils.fallback_event_handlers import get_fallback_model_group

from tests.helpers.cloud.cloud_answers import ERRORS, CloudAnswer
from tests.helpers.cloud.dialect_requests import ask, body_of
from tests.helpers.cloud.gateway_server import cloud_entry, local, write_config
from tests.helpers.servers.fake_server import FakeServer
from tests.helpers.servers.mock_cloud import MockCloud

# LiteLLM's late imports warn of its own types.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
DRAWN: Final = 8
# No provider of LiteLLM's is called acme: a bare name is never completed by one here.
NAMES: Final = ("{}a", "{}a-1", "{}a-1-x", "acme{}/a", "acme{}/a-1", "acme{}/b/c", "{}b.c", "{}zz")
PATTERNS: Final = ("{}a-*", "{}a-1-*", "acme{}/*", "acme{}/a*", "{}*-x", "acme{}/*/c", "{}b.*")
MODELS: Final = ("openai/m", "openai/n", "hearth/local", "hearth/second")
OURS: Final = {  # what LiteLLM's Router knows nothing of: a local name, case, a tag, no such model
    **{"local": "hearth/local", "second": "hearth/second", "LOCAL": "hearth/local"},
    **{"second:latest": "hearth/second", "by-alias": "hearth/second", "nobody": ""},
}


def drawn(cloud: MockCloud) -> dict[str, Any]:
    chance = random.Random(53)
    entries, aliases, fallbacks = [], {"by-alias": "second"}, []
    for space in map("n{}".format, range(DRAWN)):
        for name in chance.sample(NAMES[:-1] + PATTERNS, 4):
            for model in chance.sample(MODELS, chance.choice((1, 1, 2))):
                model = "openai/x-*" if "*" in name and chance.random() < 0.3 else model
                is_here = model.startswith("hearth/")
                given = name.format(space)
                entries.append(
                    local(given, model[7:]) if is_here else cloud_entry(cloud, given, model)
                )
        aliases[f"{space}old"] = chance.choice(NAMES).format(space)
        names = [f"{space}-{letter}" for letter in "fgh"]
        entries += [cloud_entry(cloud, name, f"openai/{name}") for name in names]
        fallbacks.append({names[0]: chance.sample(names, chance.randint(1, 3))})
    settings: dict[str, Any] = {"fallbacks": fallbacks, "model_group_alias": aliases}
    return {"model_list": entries, "router_settings": settings | {"disable_cooldowns": True}}


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeServer, Any, MockCloud]]:
    with MockCloud() as cloud, pytest.MonkeyPatch.context() as patch:
        own = {"provider": "hearth", "custom_handler": litellm.CustomLLM()}
        patch.setattr(litellm, "custom_provider_map", [own])
        litellm.utils.custom_llm_setup()
        config = drawn(cloud)
        router = litellm.Router(model_list=config["model_list"], **config["router_settings"])
        config["litellm_settings"] = {"num_retries": 0}
        path = write_config(tmp_path_factory.mktemp("routed"), config)
        with FakeServer(LITELLM_CONFIG=path, MODELS="second=/b", CATCH_ALL_MODELS="") as server:
            yield server, router, cloud


def meant_by(router: Any, name: str) -> set[str]:
    """Return the models that LiteLLM's Router may take for `name`."""
    try:
        found = asyncio.run(router.async_get_healthy_deployments(model=name, request_kwargs={}))
    except (litellm.BadRequestError, ValueError):
        return set()
    return {row["litellm_params"]["model"] for row in found}


def test_a_name_means_what_it_means_to_litellm(routed: Any) -> None:
    server, router, _ = routed
    names = [name.format(f"n{number}") for number in range(DRAWN) for name in (*NAMES, "{}old")]
    expected = {name: meant_by(router, name) for name in names}
    expected |= {name: {model} - {""} for name, model in OURS.items()}
    assert sum(map(bool, expected.values())) > DRAWN * 4
    for name, models in expected.items():
        answer = ask(server.url, "chat", body_of("chat", name, "n=1"))
        told = (answer.status, answer.served_by in models)
        assert told == ((200, True) if models else (404, False)), (name, models, answer.raw)
    answer = ask(server.url, "chat", {"messages": [{"role": "user", "content": "n=1"}]})
    assert answer.served_by == "hearth/local", "no model is the default one"


def test_fallbacks_are_those_that_litellm_would_take(routed: Any) -> None:
    server, router, cloud = routed
    cloud.rule = lambda request: CloudAnswer(error=ERRORS["server error"])
    for number in range(DRAWN):
        for name in (f"n{number}-{letter}" for letter in "fgh"):
            cloud.requests.clear()
            assert ask(server.url, "chat", body_of("chat", name, "Hi")).status == 500
            theirs, _ = get_fallback_model_group(router.fallbacks, name)
            rest = [other for other in theirs or () if other != name]
            assert [request.model for request in cloud.generations()] == [name, *rest]
