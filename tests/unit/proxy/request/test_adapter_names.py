"""An adapter is a name of the default model: listed, chosen and told as one of its own."""

from pathlib import Path
from typing import Any

import pytest

from hearth.proxy.gateway.routing_table import local_names
from hearth.proxy.pool.worker_pool import affinity_keys_of
from hearth.proxy.request.model_names import ModelNames
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import StartError
from hearth.shared.settings import load_settings
from hearth.shared.wire_messages import MessageName, Prompt, Sampling, Speaker, linked
from tests.helpers.proxy.proxy_app import app_of, ask
from tests.helpers.worker_processes.fake_worker import FACTS

ONE = {"ADAPTERS": "law=~/adapters/law, code=owner/code-lora"}


def names(**environ: str) -> ModelNames:
    return ModelNames.of(load_settings(ONE | environ, None))


def test_an_adapters_model_answers_for_it() -> None:
    for others, models in (("", ("", "", "")), ("big=owner/Big", ("smollm2", "smollm2", "big"))):
        known = names(MODELS=others)
        targets = [known.target(known.check(name)) for name in ("law", "smollm2")]
        targets += [known.target("big")] if others else []
        assert [known.adapter_of(each) for each in targets] == ["law", "", ""][: len(targets)]
        assert [known.model_of(each) for each in targets] == [*models[: len(targets)]]


def test_an_adapter_is_listed_with_its_models_facts_and_who_that_is() -> None:
    known = names()
    listed = known.listing(lambda _: FACTS, {}, is_anthropic=False)["data"]
    rows = {row["id"]: row for row in listed}
    assert rows["law"]["parent"] == "smollm2" and "parent" not in rows["smollm2"]
    assert rows["law"]["context_length"] == rows["smollm2"]["context_length"]


@pytest.mark.parametrize("name", ["LAW", "law:latest", "openai/law"])
def test_an_adapter_is_told_by_its_own_name_however_it_is_asked_for(
    tmp_path: Path, name: str
) -> None:
    row = ask(app_of(tmp_path, **ONE), "GET", f"/v1/models/{name}").json
    assert (row["id"], row["parent"]) == ("law", "smollm2")


def test_a_config_of_litellm_finds_an_adapter_before_a_path_that_ends_alike() -> None:
    more = {"MODEL_PATH": "owner/law", "PROXY_MODEL_ID": "base", "MODELS": "big=owner/code"}
    more["MODEL_ALIASES"] = "mine"
    settings = load_settings(ONE | more, None)
    found, known = local_names(settings), ModelNames.of(settings)
    for name in (*known.listed, "owner/code"):
        assert found[name] == known.find(name), name
    assert (found["law"], found["code"], found["owner/law"]) == ("law", "code", "base")


@pytest.mark.parametrize("name", ["smollm2", "mine", "big"])
def test_an_adapter_cannot_have_the_name_of_a_model(name: str) -> None:
    environ = {"MODELS": "big=owner/Big", "MODEL_ALIASES": "mine", "ADAPTERS": f"{name}=a/b"}
    with pytest.raises(StartError, match="the name of a model already"):
        ModelNames.of(load_settings(environ, None))


@pytest.mark.parametrize("text", ["law", "law=", "=a/b", "law=a/b, law=c/d", "l\u00e4w=a/b"])
def test_an_entry_that_is_no_name_with_a_source_refuses_the_start(text: str) -> None:
    with pytest.raises(StartError, match="ADAPTERS is"):
        load_settings({"ADAPTERS": text}, None)


def request(**fields: Any) -> ParsedRequest:
    prompt = Prompt([], speaker=Speaker(session="s"), names=linked([MessageName(b"m", b"m")]))
    return ParsedRequest("chat", "x", prompt, Sampling(), stream=False, body={}, **fields)


def test_what_answers_is_told_by_the_adapters_name_and_found_apart() -> None:
    plain, law = request(target="smollm2"), request(target="smollm2", adapter="law")
    assert (plain.served_as, law.served_as, request().served_as) == ("smollm2", "law", "")
    marks = [set(affinity_keys_of(each.prompt, each.served_as)) for each in (plain, law)]
    assert marks[0].isdisjoint(marks[1])
    assert [each.adapter for each in law.submissions()] == ["law"]
