"""MODEL_PATH names a model and its templates, or is refused with the reason."""

import errno
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from hearth.shared.errors import StartError
from hearth.shared.settings import load_settings
from hearth.worker.engine.model_loader import load_model
from hearth.worker.prompt.template_turn_tokens import end_of_turn_ids, turn_marks
from hearth.worker.setup.prompt_and_session_setup import make_builder
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.servers.scripted_server import checkpoint


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


NAMES = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json")
TOLD = "no chat template"


def loaded_tokenizer(directory: Path, config: Any, jinja: str, processor: str) -> Any:
    """Return the tokenizer of a text model whose template stands in these places."""
    checkpoint(directory, "qwen3")
    own = json.loads((directory / NAMES[0]).read_text()) | {"chat_template": config}
    texts = {NAMES[0]: json.dumps({k: v for k, v in own.items() if v is not None})}
    texts |= {NAMES[1]: jinja, NAMES[2]: processor}
    for name, text in texts.items():
        (directory / name).unlink(missing_ok=True)
        if text:
            (directory / name).write_text(text)
    return load_model(load_settings({"MODEL_PATH": str(directory)}, None)).tokenizer


def as_json(template: Any) -> str:
    return json.dumps({"chat_template": template})


@pytest.mark.parametrize(
    ("config", "jinja", "processor", "expected"),
    [
        (None, "", as_json("processor"), "processor"),
        ("config", "", as_json("processor"), "config"),
        (None, "jinja", as_json("processor"), "jinja"),
        ("config", "jinja", as_json("processor"), "jinja"),
        ([{"name": "default", "template": "a"}], "", as_json("processor"), {"default": "a"}),
        (None, "", "{ broken", None),
        (None, "", as_json(["no", "text"]), None),
        (None, "", "", None),
    ],
)
def test_a_template_that_stands_only_in_chat_template_json_is_read_and_none_is_told(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    config: Any,
    jinja: str,
    processor: str,
    expected: Any,
) -> None:
    tokenizer = loaded_tokenizer(tmp_path / "model", config, jinja, processor)
    assert tokenizer.chat_template == expected
    ends = end_of_turn_ids(tokenizer, {"eos_token_id": list(tokenizer.eos_token_ids)})
    with caplog.at_level(logging.WARNING):
        make_builder(tokenizer, turn_marks(tokenizer), ends, 1_000, load_settings({}, None))
    told = [record for record in caplog.records if TOLD in record.getMessage()]
    assert len(told) == (expected is None)
