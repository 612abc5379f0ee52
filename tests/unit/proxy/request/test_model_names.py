"""Checks which model a requested name selects, and which entries MODELS accepts."""

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.request import model_names
from hearth.proxy.request.model_names import ModelNames, ServedModel, models_of
from hearth.shared.errors import RequestError, StartError
from hearth.shared.settings import load_settings, setting_warnings
from tests.helpers.cases import cases
from tests.helpers.worker_processes.fake_worker import FACTS


def names(**environ: str) -> ModelNames:
    return ModelNames.of(load_settings(environ, None))


@pytest.mark.parametrize("case", cases("api/model_names.yaml"))
def test_a_name_chooses_its_model(case: dict[str, Any]) -> None:
    known = names(**case["settings"])
    for target, asked in case["chooses"].items():
        for name in asked:
            assert known.target(known.check(name)) == target, name
    for name in case.get("refuses", ()):
        with pytest.raises(RequestError, match="is not served here") as caught:
            known.check(name)
        assert caught.value.status == 404
    assert known.listed == case.get("listed", known.listed)


@pytest.mark.parametrize("case", cases("proxy/model_names.yaml"))
def test_a_name_of_a_model_is_served_or_refused_as_the_table_says(case: dict[str, Any]) -> None:
    known = names(**case["settings"])
    assert [known.check(name) for name in case["served"]] == case["served"]
    for name, words in case["refused"].items():
        with pytest.raises(RequestError, match=re.escape(words)) as caught:
            known.check(name)
        assert caught.value.status == 404


def test_without_a_name_the_default_is_served_and_what_is_none_is_refused() -> None:
    known = ModelNames("local", (), ())
    assert known.check(None) == known.check("") == "local"
    for wrong in (5, ["local"], False, {}):
        with pytest.raises(RequestError) as caught:
            known.check(wrong)
        assert (caught.value.status, caught.value.param) == (400, "model")


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
    assert "cloudy" in str(names().unknown_name_error("none", ("cloudy",)))


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
        row = names().model_entry("smollm2", facts, is_anthropic=False)
        assert row["architecture"]["input_modalities"] == wanted
    assert "architecture" not in names().model_entry("smollm2", None, is_anthropic=False), (
        "not known yet"
    )


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


# ---------------------------------------------------------------- pocket, the former default model


@pytest.mark.parametrize("source", ["builtin:pocket", "builtin:Pocket", " builtin:pocket "])
def test_the_former_model_in_a_setting_is_the_default_one(source: str) -> None:
    settings = load_settings({"MODEL_PATH": source, "MODELS": f"{source}, b={source}"}, None)
    assert settings.model_path == "builtin:smollm2"
    assert [(model.name, model.path) for model in models_of(settings)] == [
        ("smollm2", ""),
        ("b", "builtin:smollm2"),
    ]


@pytest.mark.parametrize("source", ["builtin:pocketbook", "owner/pocket", "a=/x/builtin:pocket"])
def test_other_models_are_left_as_they_are(source: str) -> None:
    assert load_settings({"MODELS": source}, None).models == (source,)
    assert setting_warnings({"MODELS": source, "OTHER": "builtin:pocket"}, None) == []


def test_a_setting_that_names_the_former_model_is_told(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("MODEL_PATH=builtin:pocket\nMODELS=b=builtin:pocket\n")
    warnings = setting_warnings({"MODELS": "b=owner/b"}, file)
    assert len(warnings) == 1
    assert warnings[0].startswith("MODEL_PATH names builtin:pocket, which is gone: builtin:smollm2")


def test_a_request_for_the_former_model_is_the_defaults_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model_names._warn_former.cache_clear()
    known = names(CATCH_ALL_MODELS="*", MODELS="b=owner/b")
    with caplog.at_level(logging.WARNING):
        for name in ("pocket", "Pocket", "pocket:latest", "ollama/POCKET:latest", "builtin/pocket"):
            assert known.target(known.check(name)) == "smollm2"
    told = [row.getMessage() for row in caplog.records]
    assert told == ["the model 'pocket', which requests name, is gone: 'smollm2' answers them"]
    assert "pocket" not in known.listed
