"""Checks that pocket, the former default model, stands for the default one, and is told once."""

import logging
from pathlib import Path

import pytest

from hearth.proxy.request import model_names
from hearth.proxy.request.model_names import ModelNames, models_of
from hearth.shared.settings_from_env import load_settings, setting_warnings


def names(**environ: str) -> ModelNames:
    return ModelNames.of(load_settings(environ, None))


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
    model_names._tell_former.cache_clear()
    known = names(CATCH_ALL_MODELS="*", MODELS="b=owner/b")
    with caplog.at_level(logging.WARNING):
        for name in ("pocket", "Pocket", "pocket:latest", "ollama/POCKET:latest", "builtin/pocket"):
            assert known.target(known.check(name)) == "smollm2"
    told = [row.getMessage() for row in caplog.records]
    assert told == ["the model 'pocket', which requests name, is gone: 'smollm2' answers them"]
    assert "pocket" not in known.listed


def test_a_model_that_has_the_name_keeps_it(caplog: pytest.LogCaptureFixture) -> None:
    known = names(MODELS="Pocket=owner/b", MODEL_ALIASES="x")
    assert known.target(known.check("pocket")) == "Pocket"
    assert caplog.records == []
