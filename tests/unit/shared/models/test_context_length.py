"""A model's context is read from its files, whatever name they have for it."""

import json
from pathlib import Path
from typing import Any

import pytest

from hearth.commands.server.find_or_start import context_in_files
from hearth.shared.models.local_models import UNKNOWN_LENGTH, context_tokens


@pytest.mark.parametrize(
    ("config", "of_tokenizer", "tokens"),
    [
        ({"max_position_embeddings": 8192}, 4096, 8192),
        ({"text_config": {"n_ctx": 2048}, "max_position_embeddings": 77}, None, 2048),
        ({"n_positions": 1024.0, "seq_length": 5}, None, 1024),
        ({"max_position_embeddings": "many", "max_seq_len": 0}, 512, 512),
        ({}, 10**30, UNKNOWN_LENGTH),
        ({}, None, UNKNOWN_LENGTH),
    ],
)
def test_the_context_is_told_by_the_config_else_by_the_tokenizer(
    config: dict[str, Any], of_tokenizer: object, tokens: int, tmp_path: Path
) -> None:
    assert context_tokens(config, of_tokenizer) == tokens
    (tmp_path / "config.json").write_text(json.dumps(config))
    alone = context_tokens(config, None)
    assert context_in_files(str(tmp_path)) == (None if alone == UNKNOWN_LENGTH else alone)


@pytest.mark.parametrize("text", ["", "[1]", '{"text_config": [1]}', "[" * 100_000])
def test_files_that_tell_nothing_tell_no_context(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert context_in_files(str(tmp_path)) is None
    assert context_in_files("builtin:none") is None and context_in_files("no/such-model") is None
