"""Checks what MODEL_PATH accepts, and the errors for models that cannot be loaded."""

import errno
from pathlib import Path

import pytest

from hearth.shared.errors import StartError
from hearth.shared.settings_from_env import load_settings
from hearth.worker.engine.model_loader import load_model
from scripts.fixtures.fixture_cache import fixture_dir


def refusal(model_path: str) -> str:
    with pytest.raises(StartError) as caught:
        load_model(load_settings({"MODEL_PATH": model_path}, None))
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("path", ["/nowhere/at/all", "./nowhere", "~/nowhere-at-all", "justaname"])
def test_a_path_that_is_not_there_is_told_apart_from_a_hub_id(path: str) -> None:
    assert "neither a directory nor a hub id" in refusal(path)


@pytest.mark.parametrize("path", ["~nobody-of-this-name/m", "a" * 5_000, "/" + "a/" * 3_000])
def test_a_path_that_no_system_takes_is_refused_and_breaks_no_thread(path: str) -> None:
    assert "cannot be read" in refusal(path)


def test_a_directory_that_this_user_or_macos_closes_to_the_program_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(self: Path) -> bool:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(self))

    monkeypatch.setattr(Path, "is_dir", closed)
    monkeypatch.setattr(Path, "exists", closed)
    assert "cannot be read (Operation not permitted)" in refusal(str(tmp_path))


def test_a_directory_without_a_model_says_so(tmp_path: Path) -> None:
    assert "without a config.json" in refusal(str(tmp_path))


def test_an_unknown_builtin_names_those_there_are() -> None:
    assert "builtin:smollm2, builtin:minilm" in refusal("builtin:rocket")


def test_the_facts_are_those_of_the_checkpoint() -> None:
    directory = fixture_dir("qwen3_5")
    loaded = load_model(load_settings({"MODEL_PATH": str(directory)}, None))
    facts = loaded.facts
    assert facts.architecture == "qwen3_5" and facts.vocab_size == 3072
    assert facts.cache_layout == "2 x ArraysCache, 2 x KVCache"
    assert facts.context_tokens == 131072 and facts.backend in ("cpu", "metal", "cuda")
    assert facts.weight_bytes == pytest.approx(facts.parameter_count * 4, rel=0.01)
    small = load_settings({"MODEL_PATH": str(directory), "MAX_KV_SIZE": "4096"}, None)
    assert load_model(small).facts.context_tokens == 4096
