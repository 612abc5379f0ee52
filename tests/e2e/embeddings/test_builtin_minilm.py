"""A server with EMBEDDING_MODEL=builtin:minilm embeds, or tells the remedy until it was pulled."""

from pathlib import Path

import openai
import pytest

from hearth.shared.models.builtin_models import MINILM, MODELS_DIR_VARIABLE
from scripts.fixtures.embedding_checkpoints import embedding_checkpoint
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.servers.server import Server


def server_of(models: Path, hub: Path) -> Server:
    return Server(
        MODEL_PATH=str(fixture_dir("qwen3", tiny=True)),
        EMBEDDING_MODEL=MINILM.source,
        **{MODELS_DIR_VARIABLE: str(models), "HF_HOME": str(hub)},
    )


def test_without_its_files_text_is_served_and_they_are_found_once_they_are_there(
    tmp_path: Path,
) -> None:
    models = tmp_path / "models"
    with server_of(models, tmp_path / "hub") as server, server.openai() as client:
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="hearth pull minilm") as refused:
                client.embeddings.create(model="minilm", input="a")
            assert refused.value.status_code == 503
        text = client.completions.create(model="", prompt="a", max_tokens=2)
        assert text.usage is not None and text.usage.completion_tokens
        assert [row.id for row in client.models.list()][-1] == "minilm"
        models.mkdir()
        (models / MINILM.directory.name).symlink_to(embedding_checkpoint("bert"))
        (row,) = client.embeddings.create(model="minilm", input="a").data
        assert len(row.embedding) == 32
