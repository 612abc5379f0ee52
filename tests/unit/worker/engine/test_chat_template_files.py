"""Chat templates of text models come from several files, and a model without any is told of."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from hearth.shared.settings_from_env import load_settings
from hearth.worker.engine.model_loader import load_model
from hearth.worker.prompt.template_turn_tokens import end_of_turn_ids, turn_marks
from hearth.worker.setup.prompt_and_session_setup import make_builder
from tests.helpers.servers.scripted_server import checkpoint

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
