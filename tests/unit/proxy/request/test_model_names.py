"""Checks which model a requested name selects, and which entries MODELS accepts."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.request.model_names import ModelNames, ServedModel, models_of
from hearth.proxy.startup_banner import ready_lines
from hearth.shared.errors import RequestError, StartError
from hearth.shared.settings_from_env import load_settings
from tests.helpers.worker_processes.fake_worker import FACTS


def names(**environ: str) -> ModelNames:
    return ModelNames.of(load_settings(environ, None))


def test_models_are_known_by_their_name_their_path_and_its_last_part() -> None:
    known = names(MODELS="big=owner/Big-4bit, other/Small, ~/models/mine")
    assert known.listed == ["smollm2", "big", "other/Small", "~/models/mine"]
    for name in ("big", "owner/Big-4bit", "Big-4bit", "anthropic/big"):
        assert known.target(known.check(name)) == "big"
    for name in ("other/Small", "Small", "openai/other/Small"):
        assert known.target(known.check(name)) == "other/Small"
    assert known.target("mine") == "~/models/mine"
    assert known.target("smollm2") == "smollm2"


def test_patterns_and_aliases_stand_for_the_default_model_and_names_go_first() -> None:
    known = names(MODELS="gpt-oss=owner/gpt-oss-20b, x=y/alias", MODEL_ALIASES="mine, alias")
    assert known.target("gpt-oss") == known.target("gpt-oss-20b") == "gpt-oss"
    assert known.target("gpt-5") == known.target("claude-sonnet") == "smollm2"
    assert known.target("mine") == known.target("alias") == "smollm2"
    assert known.target("y/alias") == "x"


def test_without_models_there_is_no_choice() -> None:
    assert names().target("smollm2") == names().target("claude-x") == ""


@pytest.mark.parametrize("name", ["none", "../owner/Big/..", "Big/", "/owner/Big-4bit/x"])
def test_other_names_are_not_found(name: str) -> None:
    with pytest.raises(RequestError, match="is not served here") as caught:
        names(MODELS="big=owner/Big").check(name)
    assert caught.value.status == 404


def test_a_given_name_goes_before_the_last_part_of_another() -> None:
    known = names(MODELS="a/x, x=b/y")
    assert (known.target("x"), known.target("a/x"), known.target("y")) == ("x", "a/x", "x")


def test_what_stands_behind_a_provider_is_taken_as_long_as_it_is() -> None:
    known = names(MODELS="one=z/m, two=a/m")
    assert (known.target("m"), known.target("provider/a/m")) == ("one", "two")


def test_names_match_without_case_and_without_ollamas_latest() -> None:
    known = names(MODELS="big=owner/Big-4bit", MODEL_ALIASES="Mine", CATCH_ALL_MODELS="gpt-*")
    for name in ("BIG", "big:latest", "Owner/big-4BIT:LATEST", "ollama/Big:latest"):
        assert known.target(known.check(name)) == "big"
    for name in ("SmolLM2", "smollm2:latest", "mine:latest", "x/MINE", "GPT-5", "gpt-5:latest"):
        assert known.target(known.check(name)) == "smollm2"
    for name in ("big:8b", ":latest", "big:latest:latest", "bi"):
        with pytest.raises(RequestError, match="is not served here"):
            known.check(name)


def test_a_name_as_it_was_sent_goes_before_one_that_is_only_alike() -> None:
    known = names(MODELS="Big=a/x, big=a/y, tagged:latest=a/z, tagged=a/w")
    for name, meant in (("Big", "Big"), ("big", "big"), ("BIG", "Big"), ("tagged", "tagged")):
        assert known.target(name) == meant
    assert known.target("Tagged:latest") == known.target("TAGGED") == "tagged:latest"


@given(st.sampled_from(("smollm2", "big", "a/x", "Mine")), st.booleans(), st.data())
def test_no_case_of_a_name_means_another_model(name: str, latest: bool, data: Any) -> None:
    known = names(MODELS="big=a/x", MODEL_ALIASES="Mine", CATCH_ALL_MODELS="")
    sent = "".join(data.draw(st.sampled_from((c.lower(), c.upper()))) for c in name)
    sent += ":latest" if latest else ""
    assert known.find(sent) == known.find(name)


def test_a_refusal_names_forty_models_and_where_the_others_stand() -> None:
    known = names(MODELS=",".join(f"m{index}=a/{index}" for index in range(50)))
    with pytest.raises(RequestError) as caught:
        known.check("none", more=("cloudy",))
    text = str(caught.value)
    assert "smollm2, m0, m1" in text and "m38 and" in text and "m39" not in text
    left = len(known.listed) + 1 + len(known.patterns) - 40
    assert f"and {left} more, which GET /v1/models lists" in text
    assert "cloudy" in str(names().unknown("none", ("cloudy",)))


def test_a_worker_is_told_its_model_and_its_name(tmp_path: Path) -> None:
    directory = tmp_path / "a=b"
    directory.mkdir()
    default, other = models_of(load_settings({"MODELS": str(directory)}, None))
    assert default.environ == {}
    assert other == ServedModel("a=b", str(directory))
    assert other.environ == {
        **{"MODEL_PATH": str(directory), "PROXY_MODEL_ID": "a=b"},
        **{"DRAFT_MODEL": "", "ADAPTERS": ""},  # which fit one model alone
    }


def test_a_model_that_takes_images_is_told_as_one() -> None:
    seeing = dataclasses.replace(FACTS, takes_images=True)
    for facts, wanted in ((FACTS, ["text"]), (seeing, ["text", "image"])):
        row = names().row("smollm2", facts, is_anthropic=False)
        assert row["architecture"]["input_modalities"] == wanted
    assert "architecture" not in names().row("smollm2", None, is_anthropic=False), "not known yet"


def test_the_default_model_may_be_listed_again() -> None:
    settings = load_settings({"MODELS": "builtin:smollm2, b=owner/b"}, None)
    assert [model.name for model in models_of(settings)] == ["smollm2", "b"]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ("=owner/x", "allowed is a directory or hub id, or name="),
        ("x=", "allowed is a directory or hub id, or name="),
        ("smollm2=owner/x", "'smollm2' is the name of 'builtin:smollm2' already"),
        ("a=owner/x, a=owner/y", "'a' is the name of 'owner/x' already"),
        ("模型=owner/x", "not plain ASCII"),
    ],
)
def test_an_entry_that_cannot_be_served_refuses_to_start(entries: str, said: str) -> None:
    with pytest.raises(StartError, match=said):
        names(MODELS=entries)


def test_a_start_says_what_else_can_be_asked_for() -> None:
    settings = load_settings({"MODELS": "big=owner/big, other/small"}, None)
    text = "\n".join(ready_lines(settings, FACTS))
    assert "big, other/small (loaded when they are asked for)" in text
    assert "others" not in "\n".join(ready_lines(load_settings({}, None), FACTS))
