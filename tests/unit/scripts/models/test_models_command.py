"""Checks what `hearth models` and its sisters show: capabilities, sums, names."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from hearth.commands.models import list_models, pull_model
from hearth.commands.models.hub_repository import ModelError
from hearth.commands.models.memory_lines import sentence
from hearth.commands.models.model_capabilities import capabilities, encoder_kind
from hearth.commands.models.pull_model import hub_id_of
from hearth.commands.server.fetch_missing import fetch_missing
from hearth.shared.models import model_path
from hearth.shared.models.local_models import OMLX, FoundModel
from hearth.shared.models.model_path import MODELS_DIR_VARIABLE, BuiltinModel
from hearth.shared.settings import load_settings
from hearth.worker.memory_verdict import MemoryVerdict
from scripts.fixtures.embedding_checkpoints import embedding_checkpoint
from scripts.fixtures.fixture_cache import fixture_dir

GB = 1024**3


def test_a_models_files_tell_what_it_takes(tmp_path: Path) -> None:
    assert capabilities(fixture_dir("qwen3_5_vl"))[0] == "images"
    assert "images" not in capabilities(fixture_dir("qwen3_5"))
    assert capabilities(tmp_path) == ()
    for template, takes in (
        ("{{ tools }}", ("tools",)),
        ("<think>", ("thinking",)),
        ("{% if tools %}{{ enable_thinking }}{% endif %}", ("tools", "thinking")),
        ("plain", ()),
    ):
        config = tmp_path / "tokenizer_config.json"
        config.write_text(json.dumps({"chat_template": template}))
        assert capabilities(tmp_path) == takes
        config.write_text(json.dumps({"chat_template": [{"name": "a", "template": template}]}))
        assert capabilities(tmp_path) == takes
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
        config.write_text("{}")
        assert capabilities(tmp_path) == takes
        (tmp_path / "chat_template.json").unlink()
    (tmp_path / "chat_template.jinja").write_text("{{ tools }} <think>")
    assert capabilities(tmp_path) == ("tools", "thinking")


def test_a_models_files_or_else_its_name_tell_that_it_embeds_or_ranks(tmp_path: Path) -> None:
    for name in ("bert", "xlm_roberta", "modernbert", "qwen3", "gemma3"):
        assert encoder_kind(embedding_checkpoint(name), "org/it") == "embeddings", name
    for name in ("bert_ranker", "xlm_roberta_ranker", "modernbert_ranker"):
        assert encoder_kind(embedding_checkpoint(name), "org/it") == "rerank", name
    talks = fixture_dir("qwen3", tiny=True)
    assert encoder_kind(talks, "Qwen/Qwen3-8B") is None
    assert encoder_kind(talks, "mlx-community/Qwen3-Embedding-0.6B-8bit") == "embeddings"
    assert encoder_kind(talks, "mlx-community/Qwen3-Reranker-0.6B-mxfp8") == "rerank"
    assert encoder_kind(tmp_path, "nothing") is None


def test_a_builtin_model_that_is_not_here_is_pulled_before_a_server_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(model_path, "local_models", list)
    monkeypatch.setenv(MODELS_DIR_VARIABLE, str(tmp_path))
    pulled: list[str] = []

    def pull(model: BuiltinModel, file: Path | None, say: object, *, is_dry: bool) -> None:
        assert file is None and not is_dry
        pulled.append(model.name)
        model.directory.mkdir()
        (model.directory / "config.json").write_text("{}")

    monkeypatch.setattr(pull_model, "pull_builtin", pull)
    for name in ("builtin:smollm2", "smollm2:latest", "minilm"):
        fetch_missing(name, load_settings({}, None), Console(quiet=True))
    assert pulled == ["smollm2", "minilm"]


def verdict(**more: object) -> MemoryVerdict:
    sums: dict[str, object] = {
        **{"machine_bytes": 16 * GB, "limit": 10 * GB, "weight_bytes": 6 * GB},
        **{"beside_bytes": GB // 2, "reserve_bytes": GB // 2, "model_tokens": 131_072},
        **{"kv_bytes": lambda tokens: tokens * 65_536, "forward_bytes": lambda _tokens: GB // 4},
    }
    return MemoryVerdict(**{**sums, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "more, told",
    [
        ({"context_tokens": 131_072, "context_by": "model"}, "131,072 tokens, all of it."),
        ({"context_tokens": 9000, "context_by": "setting"}, "9,000 tokens that MAX_KV_SIZE allows"),
        ({"weight_bytes": 11 * GB}, "does not fit: this machine gives a worker 10.0 GB"),
        ({"context_tokens": 0}, "no room for a context of 256 tokens beside its weights"),
        ({"unknown": "no such type"}, "Its weights fit (6.0 of 10.0 GB). What its context takes"),
        ({"unknown": "no such type", "weight_bytes": 11 * GB}, "does not fit"),
        ({"refused": "its type is 'a'"}, "It is not served: its type is 'a'."),
    ],
)
def test_a_sentence_says_whether_a_model_fits(more: dict[str, object], told: str) -> None:
    assert told in sentence(verdict(**more))


@pytest.mark.parametrize("name", ["no-such-alias", "/a/b", "~/a", "./a", "a/b/c", "", "https://x"])
def test_what_is_no_hub_id_is_not_asked_for(name: str) -> None:
    with pytest.raises(ModelError, match="neither an alias nor a hub id"):
        hub_id_of(name)


def test_a_model_of_a_type_that_is_not_served_is_listed_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llada2_moe"}')
    (tmp_path / "model.safetensors").write_bytes(bytes(10))
    model = FoundModel("owner/name", tmp_path, OMLX)
    monkeypatch.setattr(list_models, "local_models", lambda: [model])
    monkeypatch.setattr(list_models, "sources_in_use", lambda _run_dir: [])
    assert list_models.main(["--memory"]) == 0
    shown = capsys.readouterr().out
    assert "not served" in shown and "It is not served: its type 'llada2_moe'" in shown


def test_a_name_cannot_move_the_cursor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(10))
    model = FoundModel("owner/\x1b[2Jname\r\n\u202e\udcff", tmp_path, OMLX)
    monkeypatch.setattr(list_models, "local_models", lambda: [model])
    monkeypatch.setattr(list_models, "sources_in_use", lambda _run_dir: [])
    assert list_models.main([]) == 0
    shown = capsys.readouterr().out
    assert "owner/?[2Jname????" in shown and "\x1b" not in shown
